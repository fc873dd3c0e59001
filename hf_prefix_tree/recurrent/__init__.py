# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Recurrent layers on prefix trees: convolutions and scans that follow each branch instead of the row."""
