# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which rows of a padded batch share a forward: rows that start alike stay together, within a token budget.

Rows are sorted, so those with a common prefix are neighbours, and cut into parts of equal numbers of rows (trainers
gather values per row over all ranks, so every rank must have as many rows in a part). The number of parts is the one
that computes the fewest tokens.

Cost: a sort of the rows as bytes, then O(rows) per number of parts that is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hf_prefix_tree.folding import common_prefixes, sorted_order

TOO_MANY = 2**40  # tokens of parts that exceed the budget: also added up over many ranks it fits int64


@dataclass(frozen=True)
class SortedRows:
    """
    The rows of a padded batch in an order that puts rows with a common prefix side by side.

    Args:
        order (int64 `[B]`):
            The row at each place.
        lengths (int64 `[B]`):
            Its tokens, padding left out.
        shared (int64 `[B]`):
            How many of them it shares with the row before it.
        width (`int`):
            Tokens of a padded row.

    Example:

    ```python
    >>> import torch
    >>> from hf_prefix_tree.trainers.groups import SortedRows

    >>> ids = torch.tensor([[5, 6, 7], [8, 9, 0], [5, 6, 9], [8, 9, 9]])
    >>> rows = SortedRows.of(ids, torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]))
    >>> rows.parts(2)
    [[0, 2], [1, 3]]
    >>> rows.tokens(2).tolist()
    [4, 3]

    ```
    """

    order: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]
    width: int

    @classmethod
    def of(cls, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SortedRows:
        """
        Args:
            input_ids (int64 `[B, L]`): Padded rows.
            attention_mask (int64 `[B, L]`): 1 = real token.
        """
        kept = attention_mask.bool().cpu().numpy()
        ids = [row[own] for row, own in zip(input_ids.cpu().numpy(), kept, strict=True)]
        order = sorted_order(ids)
        ids = [ids[row] for row in order]
        lengths = np.array([len(row) for row in ids])
        return cls(np.array(order), lengths, common_prefixes(ids), input_ids.shape[1])

    def parts(self, number: int) -> list[list[int]]:
        """The rows of each of `number` parts, in the order of the batch; parts differ by at most one row."""
        return [sorted(part.tolist()) for part in np.array_split(self.order, number)]

    def tokens(self, number: int, min_reuse: float = 1.0, multiple: int = 1) -> npt.NDArray[np.int64]:
        """
        Tokens that a forward over each of `number` parts holds.

        Args:
            number (`int`):
                Parts.
            min_reuse (`float`, *optional*, defaults to 1.0):
                A part whose tokens over its folded tokens are below it is not folded: it holds its padded tokens.
            multiple (`int`, *optional*, defaults to 1):
                Folded tokens of a part are rounded up to a multiple of it.
        """
        starts = np.cumsum([0, *map(len, np.array_split(self.order, number))])[:-1]
        lengths = np.add.reduceat(self.lengths, starts)
        # a part's first row shares nothing with the row before it, which is in another part
        folded = np.add.reduceat(self.lengths - self.shared, starts) + self.shared[starts]
        folded = -(-folded // multiple) * multiple
        padded = np.diff(starts, append=len(self.order)) * self.width
        return np.where(lengths >= min_reuse * folded, folded, padded)

    def totals(self, most: int, budget: int, min_reuse: float = 1.0, multiple: int = 1) -> npt.NDArray[np.int64]:
        """
        Tokens of all parts, for 1, 2, ... `most` parts; `TOO_MANY` where a part exceeds the budget.

        Args:
            most (`int`):
                The largest number of parts. It is always allowed.
            budget (`int`):
                Tokens that a forward may hold.
            min_reuse (`float`, *optional*, defaults to 1.0):
                As for [`tokens`].
            multiple (`int`, *optional*, defaults to 1):
                As for [`tokens`].
        """
        tokens = [self.tokens(number, min_reuse, multiple) for number in range(1, most + 1)]
        fits = [own.max() <= budget for own in tokens[:-1]] + [True]
        return np.array([own.sum() if fit else TOO_MANY for own, fit in zip(tokens, fits, strict=True)])


def select_rows(batches: Sequence[dict[str, Any]], rows: Sequence[int]) -> dict[str, Any]:
    """
    The given rows of micro-batches that are counted through.

    Args:
        batches (sequence of `dict`):
            Micro-batches with the same keys: tensors and lists with an entry per row, scalar tensors that hold for
            all of them alike, or `None`.
        rows (sequence of `int`):
            Rows to take.

    Example:

    ```python
    >>> select_rows([{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3, 4])}], [0, 3])
    {'x': tensor([1, 4])}

    ```
    """
    selected: dict[str, Any] = {}
    for name, value in batches[0].items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            values = torch.cat([batch[name] for batch in batches])
            selected[name] = values[torch.tensor(rows, device=values.device)]
        elif isinstance(value, list):
            entries = [entry for batch in batches for entry in batch[name]]
            selected[name] = [entries[row] for row in rows]
        else:
            selected[name] = value
    return selected
