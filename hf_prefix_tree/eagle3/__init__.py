# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""EAGLE-3 draft heads: vocabulary, packing, training, export, speculative decoding.

In: conversations and a target model. Out: a draft that serving engines load.
"""
