# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Preference and policy training with folded forwards.

In: the padded rows of a TRL trainer. Out: the same per-token results, with each shared prefix computed once.
"""
