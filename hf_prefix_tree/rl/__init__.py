# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Preference and policy training with folded forwards.

In: the padded rows of TRL's trainers. Out: the same per-token results, each shared prefix computed once.
"""
