# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The grouped baseline: the loss and gradients of a tree, computed branch by branch.

Each branch is a sequence by itself, with backward before the next one's forward, so memory is that of one branch. The
weights are those of the tree, handed to its branches, so the divisor and the step's metrics stay the same.

Cost: every branch's tokens, a shared prefix once per branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.sft.collator import DataCollatorForPrefixTree
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold


def branch_shares(tree: PrefixTree) -> list[npt.NDArray[np.float64]]:
    """
    The weights of a tree's tokens, handed to its branches: over the branches through a token they sum to its weight.

    Args:
        tree ([`PrefixTree`]): A tree, or a part of a split one.

    Returns:
        `list` of float64 `[L]`, one per branch: its own weights over K (weighting `"tree"`), as they are (`"branch"`),
        or over its supervised tokens (`"branch_mean"`); for `"once"` a token's weight goes to the first branch there.
    """
    of_branches = [branch.weights for branch in tree.branches()]
    if tree.weighting == "tree":
        return [weights / tree.num_branches for weights in of_branches]
    if tree.weighting == "branch_mean":
        return [weights / max(int(np.count_nonzero(weights)), 1) for weights in of_branches]
    if tree.weighting == "branch":
        return of_branches
    left = tree.weights.copy()
    shares = []
    for path in tree.paths():
        shares.append(left[path])
        left[path] = 0.0
    return shares


@dataclass
class BranchCollator:
    """
    Every branch of the trees as a sequence by itself, padded by itself, one after the other in one batch.

    `branch_lengths` (int64 `[1, number of rows]`) says where they end; [`branch_batches`] takes them apart. Indices in
    `prefix_tree` count from each row's start. `tree_stats` are those of the trees.

    Args:
        collator ([`DataCollatorForPrefixTree`]): Reads the features.
    """

    collator: DataCollatorForPrefixTree

    def __call__(self, features: Sequence[PrefixTree | Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        trees = self.collator.trees(features)
        chains = [
            [fold([Branch(branch.input_ids, weights)], weighting="branch")]
            for tree in trees
            for branch, weights in zip(tree.branches(), branch_shares(tree), strict=True)
        ]
        rows = [self._row(chain) for chain in chains or [[]]]
        batch = {name: torch.cat([row[name] for row in rows], dim=-1) for name in rows[0]}
        batch["tree_stats"] = self._row(trees)["tree_stats"]
        batch["branch_lengths"] = torch.tensor([[row["input_ids"].shape[1] for row in rows]])
        return batch

    def _row(self, trees: Sequence[PrefixTree]) -> dict[str, torch.Tensor]:
        return concatenate_trees(trees, self.collator.pad_token_id, self.collator.pad_to_multiple_of)


def branch_batches(batch: Mapping[str, torch.Tensor], number: int) -> list[dict[str, torch.Tensor]]:
    """
    The rows of a batch of [`BranchCollator`], and rows without weight up to `number`.

    Args:
        batch (`Mapping[str, torch.Tensor]`): The batch.
        number (`int`): Rows to return, at least as many as the batch has.
    """
    ends = batch["branch_lengths"][0].cumsum(0).tolist()
    names = [name for name in batch if name not in ("branch_lengths", "tree_stats")]
    rows = [
        {name: batch[name][..., start:end] for name in names} for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    # The shortest row again, as if it were padding: collectives need a forward and a backward on every rank.
    shortest = min(rows, key=lambda row: row["input_ids"].shape[1])
    filler = shortest | {
        "labels": torch.full_like(shortest["labels"], IGNORE_INDEX),
        "attention_mask": torch.zeros_like(shortest["attention_mask"]),
    }
    return rows + [filler] * (number - len(rows))
