# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The gain of folding a dataset: counts, predicted FLOPs and memory, pictures of trees.

In: a file of dataset rows. Out: tables, text and plots.
"""
