# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The models that steps are measured on, and the FLOPs of a step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedConfig, Qwen3_5TextConfig, Qwen3Config

from hf_prefix_tree import PrefixTree
from hf_prefix_tree.modeling.attention.masks.causal import mean_keys_seen
from hf_prefix_tree.modeling.flops import FORWARD_AND_BACKWARD, cost_per_count, counted_sizes

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
MODELS = ("qwen3-0.6b", "qwen3.5-0.8b", "qwen3-8b")


def shape_config(shape: str) -> Qwen3Config:
    """Qwen3 of a size in `SHAPES`, or `"quick"`."""
    sizes = dict(zip(NAMES, QWEN3_SMALL if shape == "quick" else SHAPES[shape], strict=True))
    return Qwen3Config(**sizes, tie_word_embeddings=shape != "8b", max_position_embeddings=65_536)


def model_config(quick: bool, model: str = "qwen3-0.6b") -> PreTrainedConfig:
    """A model of `MODELS`, or a small one of its kind with 2 or 4 layers. In Qwen3.5 every 4th layer has attention."""
    if model.startswith("qwen3-"):
        return shape_config("quick" if quick else model.removeprefix("qwen3-"))
    sizes = QWEN3_5_SMALL if quick else QWEN3_5_08B
    return Qwen3_5TextConfig(
        **dict(zip(HYBRID_NAMES, sizes, strict=True)),
        linear_conv_kernel_dim=4,
        tie_word_embeddings=True,
        max_position_embeddings=65_536,
    )


def step_flops(config: PreTrainedConfig, tokens: int, supervised: int, pairs: float) -> float:
    """
    FLOPs of a forward and a backward, nothing recomputed.

    Args:
        config (`PreTrainedConfig`):
            The model's config; for a multimodal model, that of the text model is used.
        tokens (`int`), supervised (`int`), pairs (`float`):
            Tokens that pass the layers, tokens that pass the head, visible query-key pairs of a layer with attention
            (the mean over them, where they differ).

    Raises:
        `ValueError`: If the config lacks a size, or has layers without attention.
    """
    counted_sizes(config)  # refuses what is not counted
    return float(cost_per_count(config) @ np.array([tokens, supervised, pairs], dtype=np.float64))


def flop_counts(trees: Sequence[PrefixTree], config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """
    Tokens, supervised tokens, pairs and TFLOP of a step on all these trees, folded and branch by branch. Pairs are
    those of a layer with attention, the mean where layers differ.

    Parts of split trees count as they are: tokens that they recompute are included in `"folded"`.

    Example:

    ```python
    >>> from transformers import Qwen3Config
    >>> from hf_prefix_tree import Branch, fold

    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1])])
    >>> counts = flop_counts([tree], Qwen3Config())
    >>> [(c["tokens"], c["supervised"], c["pairs"]) for c in counts.values()]
    [(5, 4, 13.0), (7, 5, 16.0)]

    ```
    """
    sizes, stats = counted_sizes(config), functools.reduce(operator.add, (tree.stats() for tree in trees))
    keys = mean_keys_seen(config.get_text_config(), sizes.attention_layers, stats.longest_path)
    of_branch = keys.cumsum()
    supervised = sum(int(tree.branch_count.sum()) for tree in trees)
    folded = sum(float(keys[tree.depth].sum()) for tree in trees)
    unfolded = sum(float(of_branch[tree.branch_lengths - 1].sum()) for tree in trees)
    counts = {
        "folded": (stats.tree_tokens, stats.supervised_tokens, folded),
        "branches": (stats.branch_tokens, supervised, unfolded),
    }
    names = ("tokens", "supervised", "pairs")
    return {
        method: {**dict(zip(names, count, strict=True)), "tflop": step_flops(config, *count) / 1e12}
        for method, count in counts.items()
    }


def work_of(counts: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, float]:
    """TFLOP of the categories of profiles.py, without attention's hidden pairs and what the head computes twice."""
    attention = step_flops(config, 0, 0, counts["pairs"]) / 1e12
    return {
        "matmul": step_flops(config, counts["tokens"], 0, 0) / 1e12,
        "head and loss": step_flops(config, 0, counts["supervised"], 0) / 1e12,
        "attention forward": attention / FORWARD_AND_BACKWARD,
        "attention backward": attention * (1 - 1 / FORWARD_AND_BACKWARD),
    }
