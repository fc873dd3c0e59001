# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which rank computes which rows of an optimizer step, so that all ranks need the same time.

A row costs its tokens (linear layers), its supervised tokens (the head) and its visible pairs (attention), in the
proportion of the model's sizes; the number of rows, or of tokens, says little. Ranks wait for each other at every
micro-batch under FSDP and ZeRO and at every step under DDP, so both are kept even.

Cost: one pass over the dataset before the first step, O(n log n) an epoch for n rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.collators.prefix_tree import DataCollatorForPrefixTree


class RowCounts:
    """
    Tokens, supervised tokens and visible pairs of dataset rows; a function for `Dataset.map(batched=True)`.

    Args:
        collator ([`DataCollatorForPrefixTree`]): What reads the rows.
    """

    def __init__(self, collator: DataCollatorForPrefixTree) -> None:
        self.collator = collator

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[list[int]]]:
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return {"counts": [self.of(row) for row in rows]}

    def of(self, row: Any) -> list[int]:
        """The counts of one row."""
        stats = [tree.stats() for tree in self.collator.trees([row])]
        names = ("tree_tokens", "supervised_tokens", "tree_pairs")
        return [sum(getattr(own, name) for own in stats) for name in names]


def deal(costs: npt.NDArray[np.float64], ranks: int, batch_size: int) -> npt.NDArray[np.int64]:
    """
    The order in which the rows of a step are read: batch after batch, where batch i goes to rank i % ranks.

    Each row, the heaviest first, goes to the rank with the least work that has room; then rows are exchanged with the
    most loaded rank as long as that helps. A rank reads its heaviest rows first, so that rows of the same micro-batch
    cost alike.

    Args:
        costs (float64 `[n]`): Cost of each row; n is a multiple of `ranks * batch_size`.
        ranks (`int`): Ranks that read different rows.
        batch_size (`int`): Rows of a batch.

    Returns:
        int64 `[n]`: the rows in their new order.

    Example:

    ```python
    >>> deal(np.array([1.0, 9.0, 4.0, 5.0]), ranks=2, batch_size=1)  # rank 0: 9 and 1, rank 1: 5 and 4
    array([1, 3, 0, 2])

    ```
    """
    room = len(costs) // ranks
    own: list[list[int]] = [[] for _ in range(ranks)]
    work = np.zeros(ranks)
    for row in np.argsort(-costs, kind="stable").tolist():
        rank = min((r for r in range(ranks) if len(own[r]) < room), key=lambda r: work[r])
        own[rank].append(row)
        work[rank] += costs[row]
    while (swap := _best_swap(costs, own, work)) is not None:
        most, i, rank, j = swap
        change = costs[own[most][i]] - costs[own[rank][j]]
        own[most][i], own[rank][j] = own[rank][j], own[most][i]
        work[most] -= change
        work[rank] += change
    rows = np.array([sorted(rank, key=lambda row: -costs[row]) for rank in own], dtype=np.int64)  # [rank, round]
    return rows.reshape(ranks, -1, batch_size).swapaxes(0, 1).reshape(-1)


def _best_swap(
    costs: npt.NDArray[np.float64], own: list[list[int]], work: npt.NDArray[np.float64]
) -> tuple[int, int, int, int] | None:
    """The exchange of two rows that relieves the most loaded rank most, without loading another one as much."""
    most = int(work.argmax())
    best, found = work[most] * (1 - 1e-6), None
    for rank, rows in enumerate(own):
        if rank == most:
            continue
        change = costs[own[most]][:, None] - costs[rows][None]
        heavier = np.maximum(work[most] - change, work[rank] + change)
        i, j = np.unravel_index(heavier.argmin(), heavier.shape)
        if heavier[i, j] < best:
            best, found = heavier[i, j], (most, int(i), rank, int(j))
    return found
