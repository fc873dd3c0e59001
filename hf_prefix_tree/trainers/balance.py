# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which rank computes which rows of an optimizer step, so that ranks wait little for each other.

A row costs its tokens (linear layers), its supervised tokens (the head) and its visible pairs (attention), in the
proportion of the model's sizes; the number of rows, or of tokens, says little. Ranks meet at every micro-batch, under
FSDP and ZeRO to gather parameters and under DDP because TRL gathers its metrics there. So a step takes as long as the
slowest batch of its first round, plus that of its second, and so on, and this sum is kept low.

Cost: one pass over the dataset before the first step, O(n log n) an epoch for n rows, and the exchanges.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.collators.prefix_tree import DataCollatorForPrefixTree
from hf_prefix_tree.flops import cost_per_count

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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


def row_costs(
    dataset: Any, counts: RowCounts, config: PretrainedConfig, num_proc: int | None = None
) -> npt.NDArray[np.float64]:
    """
    FLOPs of every row.

    Args:
        dataset (`Dataset`): Of `datasets`, which keeps the counts in its cache, or of torch.
        counts ([`RowCounts`]): What counts a row.
        config (`PretrainedConfig`): The model's.
        num_proc (`int`, *optional*): Processes that count the rows of a `datasets.Dataset`.

    Returns:
        float64 `[number of rows]`.
    """
    if hasattr(dataset, "map"):
        options = {"batched": True, "batch_size": 64, "num_proc": num_proc, "desc": "Counting tokens and pairs"}
        found = dataset.with_format(None).map(counts, remove_columns=dataset.column_names, **options)["counts"]
    else:
        found = [counts.of(dataset[index]) for index in range(len(dataset))]
    return np.array(list(found), dtype=np.float64) @ cost_per_count(config)


def deal(costs: npt.NDArray[np.float64], ranks: int, batch_size: int) -> npt.NDArray[np.int64]:
    """
    The order in which the rows of a step are read: batch after batch, where batch i goes to rank i % ranks.

    Each row, the heaviest first, goes to the batch with the least work that has room. Batches that cost alike make a
    round, in which rows are exchanged with the heaviest batch as long as that helps; and a round's heaviest batch goes
    to the rank with the least work so far. Batches of one row are dealt as well as they can be.

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
    batches: list[list[int]] = [[] for _ in range(len(costs) // batch_size)]
    lightest = [(0.0, batch) for batch in range(len(batches))]  # a heap of those that have room
    for row in np.argsort(-costs, kind="stable").tolist():
        work, batch = heapq.heappop(lightest)
        batches[batch].append(row)
        if len(batches[batch]) < batch_size:
            heapq.heappush(lightest, (work + costs[row], batch))
    batches.sort(key=lambda batch: -costs[batch].sum())
    order: list[int] = []
    of_ranks = np.zeros(ranks)
    for start in range(0, len(batches), ranks):
        own = batches[start : start + ranks]
        of_batches = _even_out(costs, own)
        places = np.empty(ranks, dtype=np.int64)
        places[np.argsort(of_ranks, kind="stable")] = np.argsort(-of_batches, kind="stable")
        of_ranks += of_batches[places]
        order += [row for place in places for row in own[place]]
    return np.array(order, dtype=np.int64)


def _even_out(costs: npt.NDArray[np.float64], own: list[list[int]]) -> npt.NDArray[np.float64]:
    """Exchanges rows of the heaviest batch with others' as long as that helps; returns the work of each batch."""
    work = np.array([costs[rows].sum() for rows in own])
    while (swap := _best_swap(costs, own, work)) is not None:
        most, i, other, j = swap
        change = costs[own[most][i]] - costs[own[other][j]]
        own[most][i], own[other][j] = own[other][j], own[most][i]
        work[most] -= change
        work[other] += change
    return work


def _best_swap(
    costs: npt.NDArray[np.float64], own: list[list[int]], work: npt.NDArray[np.float64]
) -> tuple[int, int, int, int] | None:
    """The exchange of two rows that relieves the heaviest batch most, without loading another one as much."""
    most = int(work.argmax())
    best, found = work[most] * (1 - 1e-6), None
    for other, rows in enumerate(own):
        if other == most:
            continue
        change = costs[own[most]][:, None] - costs[rows][None]
        heavier = np.maximum(work[most] - change, work[other] + change)
        i, j = np.unravel_index(heavier.argmin(), heavier.shape)
        if heavier[i, j] < best:
            best, found = heavier[i, j], (most, int(i), other, int(j))
    return found
