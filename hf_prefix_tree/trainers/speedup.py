# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What folding gains, measured on a row of a training: its root-to-leaf paths one by one against the row, forward."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from hf_prefix_tree.batch import IGNORE_INDEX, PREDECESSOR, SUBTREE_END, WEIGHTED_BY_CALLER
from hf_prefix_tree.tree import Branch, PrefixTree, fold


def root_to_leaf_paths(batch: Mapping[str, torch.Tensor]) -> list[PrefixTree]:
    """
    The paths of a batch's trees, each a tree of one branch. Strict prefixes and duplicates are on other paths.

    Args:
        batch (`Mapping[str, torch.Tensor]`): A batch of the contract, with `labels`.

    Example:

    ```python
    >>> from hf_prefix_tree.batch import concatenate_trees

    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8], [0, 1, 1])])
    >>> [path.input_ids.tolist() for path in root_to_leaf_paths(concatenate_trees([tree], pad_token_id=0))]
    [[5, 6, 7], [5, 6, 8]]

    ```
    """
    names = ("input_ids", "labels", "attention_mask")
    rows = [batch[name].cpu().numpy() for name in names]
    paths = []
    for ids, labels, is_real, tree in zip(*rows, batch["prefix_tree"].cpu().numpy(), strict=True):
        leaves = np.flatnonzero((tree[SUBTREE_END] == np.arange(len(ids)) + 1) & (is_real > 0))
        for leaf in leaves.tolist():
            path = [leaf]
            while (before := int(tree[PREDECESSOR, path[-1]])) >= 0:
                path.append(before)
            own = np.array(path[::-1])
            paths.append(fold([Branch(ids[own], (labels[own] != IGNORE_INDEX).astype(float))]))
    return paths


def seconds_of_forwards(
    model: Callable[..., Any],
    batch: Mapping[str, torch.Tensor],
    collate: Callable[[list[PrefixTree]], dict[str, torch.Tensor]],
    ranks_most: Callable[[int], int],
) -> torch.Tensor:
    """
    Seconds of the forward of a batch, and of its paths one after another, each after a forward that is not timed.
    Every rank must call it: all do the same number of forwards.

    Args:
        model (`Callable`): Takes the entries of a batch and `fused_lm_head`.
        batch (`Mapping[str, torch.Tensor]`): A batch of the contract.
        collate (`Callable`): Makes a batch of a list with one tree, on the model's device.
        ranks_most (`Callable`): The largest of an integer over all ranks.

    Returns:
        float64 `[2]`.
    """
    device = batch["input_ids"].device
    rows = [collate([path]) for path in root_to_leaf_paths(batch)] or [dict(batch)]  # a rank may have padding only
    forwards = rows + rows[:1] * (ranks_most(len(rows)) - len(rows))
    with torch.no_grad(), _random_state_of(device):
        for warm_up in (batch, *forwards):  # kernels follow the length of a row: each may have to be compiled
            _seconds(model, warm_up, device)
        folded = _seconds(model, batch, device)
        one_by_one = [_seconds(model, row, device) for row in forwards]
    return torch.tensor([folded, sum(one_by_one[: len(rows)])], dtype=torch.float64, device=device)


def _seconds(model: Callable[..., Any], batch: Mapping[str, torch.Tensor], device: torch.device) -> float:
    _wait_for(device)
    start = time.perf_counter()
    model(**batch, use_cache=False, fused_lm_head=True, **{WEIGHTED_BY_CALLER: True})
    _wait_for(device)
    return time.perf_counter() - start


def _random_state_of(device: torch.device) -> AbstractContextManager[None]:
    """Gives the random state back afterwards, also that of dropout."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
