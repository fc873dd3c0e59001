# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The models that steps are measured on."""

from __future__ import annotations

from transformers import PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config

NAMES = [
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
]
HYBRID_NAMES = [
    *NAMES,
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
]
QWEN3_06B = (151_936, 1024, 3072, 28, 16, 8, 128)
QWEN3_SMALL = (512, 32, 48, 2, 4, 2, 8)
QWEN3_5_08B = (248_320, 1024, 3584, 24, 8, 2, 256, 16, 16, 128, 128)
QWEN3_5_SMALL = (512, 32, 48, 4, 4, 2, 16, 2, 2, 16, 16)
MODELS = ("qwen3-0.6b", "qwen3.5-0.8b")


def model_config(quick: bool, model: str = "qwen3-0.6b") -> PreTrainedConfig:
    """A model of `MODELS`, or one of its form with 2 or 4 layers. Of Qwen3.5, every 4th layer has attention."""
    common = {"tie_word_embeddings": True, "max_position_embeddings": 65_536}
    if model == "qwen3-0.6b":
        return Qwen3Config(**dict(zip(NAMES, QWEN3_SMALL if quick else QWEN3_06B, strict=True)), **common)
    sizes = QWEN3_5_SMALL if quick else QWEN3_5_08B
    return Qwen3_5TextConfig(**dict(zip(HYBRID_NAMES, sizes, strict=True)), linear_conv_kernel_dim=4, **common)
