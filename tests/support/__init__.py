"""What tests of several folders share: models, rows, training runs, and functions that run as ranks."""
