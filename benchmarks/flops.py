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
SHAPES = {
    "0.6b": (151_936, 1024, 3072, 28, 16, 8, 128),
    "4b": (151_936, 2560, 9728, 36, 32, 8, 128),
    "8b": (151_936, 4096, 12_288, 36, 32, 8, 128),
}
QWEN3_SMALL = (512, 32, 48, 2, 4, 2, 8)
QWEN3_5_08B = (248_320, 1024, 3584, 24, 8, 2, 256, 16, 16, 128, 128)
QWEN3_5_SMALL = (512, 32, 48, 4, 4, 2, 16, 2, 2, 16, 16)
MODELS = ("qwen3-0.6b", "qwen3.5-0.8b")


def shape_config(shape: str) -> Qwen3Config:
    """Qwen3 of a size in `SHAPES`, or `"quick"`."""
    sizes = dict(zip(NAMES, QWEN3_SMALL if shape == "quick" else SHAPES[shape], strict=True))
    return Qwen3Config(**sizes, tie_word_embeddings=shape != "8b", max_position_embeddings=65_536)


def model_config(quick: bool, model: str = "qwen3-0.6b") -> PreTrainedConfig:
    """A model of `MODELS`, or a small one of its kind with 2 or 4 layers. In Qwen3.5 every 4th layer has attention."""
    if model == "qwen3-0.6b":
        return shape_config("quick" if quick else "0.6b")
    sizes = QWEN3_5_SMALL if quick else QWEN3_5_08B
    return Qwen3_5TextConfig(
        **dict(zip(HYBRID_NAMES, sizes, strict=True)),
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
        max_position_embeddings=65_536,
    )
