# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The model that steps are measured on, and the FLOPs of a step."""

from __future__ import annotations

from transformers import Qwen3Config

from benchmarks.common import Row, attention_flops
from hf_prefix_tree.tree import PrefixTree


def model_config(quick: bool) -> Qwen3Config:
    """Qwen3-0.6B, or a model of its form with 2 layers."""
    sizes = (512, 32, 48, 2, 4, 2, 8) if quick else (151_936, 1024, 3072, 28, 16, 8, 128)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "head_dim")
    return Qwen3Config(
        **dict(zip(names, sizes, strict=True)), tie_word_embeddings=True, max_position_embeddings=65_536
    )


def step_flops(config: Qwen3Config, tokens: int, supervised: int, pairs: int) -> float:
    """FLOPs of a forward and a backward, nothing recomputed."""
    projections = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (projections + 3 * config.intermediate_size)
    linear = config.num_hidden_layers * layer * tokens + config.hidden_size * config.vocab_size * supervised
    return 6 * linear + config.num_hidden_layers * attention_flops(pairs, config.num_attention_heads, config.head_dim)


def flop_counts(trees: list[PrefixTree], config: Qwen3Config) -> dict[str, Row]:
    """Tokens, supervised tokens, pairs and TFLOP of a step, for each method."""
    stats = sum((tree.stats() for tree in trees[1:]), trees[0].stats())
    supervised = sum(int((branch.weights > 0).sum()) for tree in trees for branch in tree.branches())
    counts = {
        "folded": (stats.tree_tokens, stats.supervised_tokens, stats.tree_pairs),
        "branches": (stats.branch_tokens, supervised, stats.branch_pairs),
    }
    names = ("tokens", "supervised", "pairs")
    return {
        method: {**dict(zip(names, own, strict=True)), "tflop": step_flops(config, *own) / 1e12}
        for method, own in counts.items()
    }
