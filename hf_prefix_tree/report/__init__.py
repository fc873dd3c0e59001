# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The gain of folding a dataset against training without trees: counts, predicted FLOPs and memory, pictures of trees.

In: a dataset. Out: tables, text and plots.
"""
