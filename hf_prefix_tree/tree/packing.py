# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Packing trees into rows: which trees share a packed sequence ("row" below), by best fit with the largest first.

Packing goes by size, except for trees that must not share a row. The sampler, not the packing, keeps the parts of a
split tree in one optimizer step.

Cost: O(n log n) Python steps for n trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.tree.folding import INT32_MAX, integer_array


def pack_rows(lengths: npt.ArrayLike, max_tokens: int, apart: Sequence[int] = ()) -> list[list[int]]:
    """
    Pack trees into few rows of at most `max_tokens` tokens: best-fit decreasing.

    The largest tree comes first (ties: the lower index). Each goes to the row with the least room that still takes it
    (ties: the row that was opened first), or opens a new one. For many trees, this needs at most 11/9 of the fewest
    rows possible.

    Args:
        lengths (array-like of `int`, shape `[n]`):
            Tokens of each tree, at least 1.
        max_tokens (`int`):
            Tokens that a row holds.
        apart (sequence of `int`, *optional*, defaults to `()`):
            Indices of trees that each open a row, before all others: no two of them share one.

    Returns:
        `list` of `list` of `int`: the indices of each row's trees, ascending; rows ordered by their first index.

    Raises:
        `ValueError`: If a length or `max_tokens` is no positive integer, or a tree is larger than `max_tokens`.

    Example:

    ```python
    >>> pack_rows([3, 7, 5, 2, 1], max_tokens=10)
    [[0, 1], [2, 3, 4]]

    ```
    """
    max_tokens = integer_array([max_tokens], "max_tokens", 1, INT32_MAX).item()
    sizes = integer_array(lengths, "lengths", 1)
    if len(sizes) and sizes.max() > max_tokens:
        raise ValueError(
            f"`lengths` is {sizes.max()} at index {sizes.argmax()}, above `max_tokens`, which is {max_tokens}; split "
            "the tree with `split_tree`, or raise `max_tokens`."
        )
    row_of = [0] * len(sizes)
    num_rows = 0
    # Rows with room for the next tree, least room first, and the rest, most room first. Trees only get smaller, so a
    # row that takes the next tree takes all later ones, until a tree is added to it.
    takes: list[tuple[int, int]] = []
    waits: list[tuple[int, int]] = []
    tokens = sizes.tolist()
    openers = set(apart)
    for index in sorted(openers):
        row_of[index] = num_rows
        heappush(waits, (tokens[index] - max_tokens, num_rows))
        num_rows += 1
    for index in np.argsort(-sizes, kind="stable").tolist():
        if index in openers:
            continue
        size = tokens[index]
        while waits and -waits[0][0] >= size:
            room, row = heappop(waits)
            heappush(takes, (-room, row))
        if takes:
            room, row = heappop(takes)
        else:
            room, row = max_tokens, num_rows
            num_rows += 1
        row_of[index] = row
        heappush(waits, (size - room, row))
    rows: dict[int, list[int]] = {}
    for index, row in enumerate(row_of):
        rows.setdefault(row, []).append(index)
    return list(rows.values())


def fill(lengths: npt.ArrayLike, rows: Sequence[Sequence[int]], max_tokens: int) -> float:
    """
    Share of the rows' capacity that trees occupy, between 0 and 1.

    Args:
        lengths (array-like of `int`, shape `[n]`):
            Tokens of each tree.
        rows (sequence of sequences of `int`):
            The result of [`pack_rows`].
        max_tokens (`int`):
            Tokens that a row holds.

    Raises:
        `ValueError`: If there is no row, or a row holds more than `max_tokens`.

    Example:

    ```python
    >>> fill([3, 7, 5, 2, 1], [[0, 1], [2, 3, 4]], max_tokens=10)
    0.9

    ```
    """
    max_tokens = integer_array([max_tokens], "max_tokens", 1, INT32_MAX).item()
    if not rows:
        raise ValueError("`rows` is empty; pack at least one tree.")
    tokens = integer_array(lengths, "lengths", 1).tolist()
    used = [sum(tokens[index] for index in row) for row in rows]
    if max(used) > max_tokens:
        row = used.index(max(used))
        raise ValueError(f"`rows[{row}]` holds {used[row]} tokens, above `max_tokens`, which is {max_tokens}; repack.")
    return sum(used) / (len(rows) * max_tokens)
