"""What tests of several folders share; imported as `support`, since pytest puts `tests/` on the path."""
