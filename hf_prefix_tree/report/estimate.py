# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Does folding pay? Predicted speed-up and activation memory of training on trees instead of on their branches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_prefix_tree.modeling.flops import activation_bytes, flop_counts
from hf_prefix_tree.report.gain import parts_of
from hf_prefix_tree.tree.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Tree attention is slower per pair than a causal kernel, and a tree has to be built: a smaller gain can be eaten up.
PAYS_FROM = 1.2
ASSUMPTIONS = (
    "speed-up: FLOPs of matrix products, forward and backward, at the same throughput for both; branches are trained "
    "one by one without padding. Not counted: optimizer, data loading, communication, and that a pair costs more in "
    "tree attention than in a causal kernel",
    "a sliding window counts as full attention (it makes that part smaller on both sides); the head runs on "
    "supervised tokens only",
    "memory: activations in bfloat16 that a layer of Qwen3 or Qwen3.5 keeps in eager mode, one tree, part or branch "
    "per micro-batch; weights, gradients, optimizer and the chunked head come on top and are the same for both",
)


@dataclass(frozen=True)
class Estimate:
    """
    What [`estimate`] predicts.

    Args:
        branch_tflop (`float`), tree_tflop (`float`): FLOPs of one epoch, in 10^12.
        speedup (`float`): Their ratio.
        pays (`bool`): Whether that is at least `PAYS_FROM`.
        branch_gib (`float`), tree_gib (`float`): Activations of the longest branch, and of the largest tree or part.
        branch_gib_checkpointed (`float`), tree_gib_checkpointed (`float`): The same with gradient checkpointing.
    """

    branch_tflop: float
    tree_tflop: float
    speedup: float
    pays: bool
    branch_gib: float
    tree_gib: float
    branch_gib_checkpointed: float
    tree_gib_checkpointed: float

    def verdict(self) -> str:
        """One sentence: whether folding pays."""
        if self.pays:
            return f"Folding pays: {self.speedup:.2f}x fewer FLOPs than branch by branch."
        return (
            f"Folding does not pay here: {self.speedup:.2f}x fewer FLOPs, and below {PAYS_FROM}x tree attention can "
            "cost more than it saves. Train the branches with SFTTrainer, packed."
        )


def estimate(trees: Sequence[PrefixTree], config: PretrainedConfig, max_packed_tokens: int | None = None) -> Estimate:
    """
    Predict from counts what training on the trees gains over training on their branches. See `ASSUMPTIONS`.

    Args:
        trees (sequence of [`PrefixTree`]):
            At least one.
        config (`PretrainedConfig`):
            The model's.
        max_packed_tokens (`int`, *optional*):
            Splits larger trees first, so that what the parts compute again counts.

    Raises:
        `ValueError`: If the FLOPs of the model are not counted, see [`step_flops`], or a branch is longer than
            `max_packed_tokens`.
    """
    rows = [part for tree in trees for part in parts_of(tree, max_packed_tokens)]
    branch_tflop = flop_counts(trees, config)["branches"]["tflop"]
    tree_tflop = flop_counts(rows, config)["folded"]["tflop"]
    sizes = {"branch": max(tree.stats().longest_path for tree in trees), "tree": max(map(len, rows))}
    gib = {
        f"{name}_gib{suffix}": activation_bytes(config, tokens, checkpointing) / 2**30
        for name, tokens in sizes.items()
        for suffix, checkpointing in (("", False), ("_checkpointed", True))
    }
    speedup = branch_tflop / tree_tflop
    return Estimate(branch_tflop, tree_tflop, speedup, speedup >= PAYS_FROM, **gib)
