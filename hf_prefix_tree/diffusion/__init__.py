# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Diffusion language models: noise, losses, training and sampling.

In: samples with supervised tokens, and a causal LM. Out: a model that denoises, or text from it.
"""
