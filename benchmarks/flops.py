# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The model that steps are measured on."""

from __future__ import annotations

from transformers import Qwen3Config


def model_config(quick: bool) -> Qwen3Config:
    """Qwen3-0.6B, or a model of its form with 2 layers."""
    sizes = (512, 32, 48, 2, 4, 2, 8) if quick else (151_936, 1024, 3072, 28, 16, 8, 128)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim")
    return Qwen3Config(
        **dict(zip(names, sizes, strict=True)), tie_word_embeddings=True, max_position_embeddings=65_536
    )
