# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Diffusion language models: noise, losses, attention, training and sampling."""
