# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One file for each kind of mask: its dense form, its block bounds, its `mask_mod`, and how a config asks for it.

In: a packed sequence of trees, or the spans of a diffusion batch. Out: a dense mask or a block mask of FlexAttention.
"""
