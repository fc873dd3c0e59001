# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which trees share a packed sequence: best fit, with the largest tree first.

Packing goes by size, except for trees that must not share a sequence. The sampler, not the packing, keeps the parts of
a split tree in one optimizer step.

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
    Pack trees into few sequences of at most `max_tokens` tokens: best-fit decreasing.

    The largest tree comes first (ties: the lower index). Each goes to the sequence with the least room that still
    takes it (ties: the one that was opened first), or opens a new one. For many trees, this needs at most 11/9 of the
    fewest sequences possible.

    Args:
        lengths (array-like of `int`, shape `[n]`):
            Tokens of each tree, at least 1.
        max_tokens (`int`):
            Tokens that a sequence holds.
        apart (sequence of `int`, *optional*, defaults to `()`):
            Indices of trees that each open a sequence, before all others: no two of them share one.

    Returns:
        `list` of `list` of `int`: the indices of each sequence's trees, ascending; the sequences are ordered by their
        first index.

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
    sequence_of = [0] * len(sizes)
    num_sequences = 0
    # Sequences with room for the next tree, least room first, and the rest, most room first. Trees only get smaller,
    # so one that takes the next tree takes all later ones, until a tree is added to it.
    takes: list[tuple[int, int]] = []
    waits: list[tuple[int, int]] = []
    tokens = sizes.tolist()
    openers = set(apart)
    for index in sorted(openers):
        sequence_of[index] = num_sequences
        heappush(waits, (tokens[index] - max_tokens, num_sequences))
        num_sequences += 1
    for index in np.argsort(-sizes, kind="stable").tolist():
        if index in openers:
            continue
        size = tokens[index]
        while waits and -waits[0][0] >= size:
            room, sequence = heappop(waits)
            heappush(takes, (-room, sequence))
        if takes:
            room, sequence = heappop(takes)
        else:
            room, sequence = max_tokens, num_sequences
            num_sequences += 1
        sequence_of[index] = sequence
        heappush(waits, (size - room, sequence))
    sequences: dict[int, list[int]] = {}
    for index, sequence in enumerate(sequence_of):
        sequences.setdefault(sequence, []).append(index)
    return list(sequences.values())


def fill(lengths: Sequence[int], packed: Sequence[Sequence[int]], max_tokens: int) -> float:
    """
    Share of the capacity of packed sequences that trees occupy, between 0 and 1.

    Args:
        lengths (sequence of `int`):
            Tokens of each tree.
        packed (sequence of sequences of `int`):
            The result of [`pack_rows`].
        max_tokens (`int`):
            Tokens that a sequence holds.

    Example:

    ```python
    >>> fill([3, 7, 5, 2, 1], [[0, 1], [2, 3, 4]], max_tokens=10)
    0.9

    ```
    """
    return sum(lengths[index] for trees in packed for index in trees) / (len(packed) * max_tokens)
