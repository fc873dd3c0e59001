# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Masks and kernels of tree attention, and what is registered with Transformers.

In: query, key, value and the tree of a call. Out: the attention output.
"""
