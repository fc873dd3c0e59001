# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The published comparison: figures of its 64 trees, its batches, and the samples of its baselines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.common import Row
from hf_prefix_tree.data.baselines import per_branch
from hf_prefix_tree.nemo import CROSS_ENTROPY_IGNORE_IDX
from hf_prefix_tree.tree.prefix_tree import PrefixTree

MODES = ("tree", "per_branch", "grouped", "flat_steps")
ON_TREES = ("tree", "grouped")  # the other modes are baselines on branches
BRANCHES_PER_TREE = 4  # of the published batches: 16 branches against 4 trees
# The 64 published trees: means of K, tokens and longest path, and sums over branches divided by sums over trees.
PUBLISHED = {"branches": 20.4, "tokens": 8004.0, "longest_path": 6615.0, "token_ratio": 8.11, "pair_ratio": 5.38}
TOLERANCE = 0.02


def set_figures(trees: Sequence[PrefixTree]) -> dict[str, float]:
    """The published figures of the 64 trees, computed for these trees."""
    stats = [tree.stats() for tree in trees]

    def total(name: str) -> int:
        return sum(getattr(of_tree, name) for of_tree in stats)

    return {
        "branches": total("branches") / len(stats),
        "tokens": total("tree_tokens") / len(stats),
        "longest_path": total("longest_path") / len(stats),
        "token_ratio": total("branch_tokens") / total("tree_tokens"),
        "pair_ratio": total("branch_pairs") / total("tree_pairs"),
    }


def check_figures(figures: dict[str, float]) -> None:
    """Raises `ValueError` if a figure differs from the published one."""
    off = {name: value for name, value in figures.items() if abs(value / PUBLISHED[name] - 1) > TOLERANCE}
    if off:
        raise ValueError(f"the set of trees is off the published figures {PUBLISHED}: {off}")


def turn_samples(tree: PrefixTree) -> list[Row]:
    """
    The flat samples of a caterpillar: for each turn its context, reasoning and output (the last two supervised), and
    the final response.
    """
    *leaves, trunk = tree.branches()
    samples = []
    done = 0  # supervised tokens of the trunk before it belong to earlier turns
    for leaf in leaves:
        shared = min(len(leaf), len(trunk))
        differs = leaf.input_ids[:shared] != trunk.input_ids[:shared]
        fork = int(differs.argmax()) if differs.any() else shared
        silent = trunk.weights[fork:] == 0
        done = fork + int(silent.argmax())
        ids = np.concatenate([leaf.input_ids, trunk.input_ids[fork:done]])
        samples.append({"input_ids": ids.tolist(), "labels": [CROSS_ENTROPY_IGNORE_IDX] * fork + ids[fork:].tolist()})
    weights = trunk.weights.copy()
    weights[:done] = 0
    labels = np.where(weights > 0, trunk.input_ids, CROSS_ENTROPY_IGNORE_IDX)
    return [*samples, {"input_ids": trunk.input_ids.tolist(), "labels": labels.tolist()}]


def baseline_rows(mode: str, trees: Sequence[PrefixTree]) -> list[Row]:
    """The samples of a baseline, shuffled so that the samples of a step come from different trees."""
    rows = per_branch(trees) if mode == "per_branch" else [row for tree in trees for row in turn_samples(tree)]
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def rows_per_step(
    mode: str, coverage: str, trees: Sequence[PrefixTree], trees_per_step: int, ranks: int, micro_batch: int = 1
) -> int:
    """
    Dataset rows of a step over all ranks, a multiple of their number. The rows of a baseline cover the trees of a step
    and fill micro-batches of `micro_batch` rows.
    """
    in_step = max(1, round(trees_per_step / ranks)) * ranks
    if mode in ON_TREES:
        return in_step
    per_tree = BRANCHES_PER_TREE if coverage == "published" else set_figures(trees)["branches"]
    unit = ranks * micro_batch
    return max(1, round(in_step * per_tree / unit)) * unit
