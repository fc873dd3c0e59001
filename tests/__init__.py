"""Importable as `tests`, so that tests and the ranks that they start share `tests.support`."""
