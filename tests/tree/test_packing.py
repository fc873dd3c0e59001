# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Packing against a plain best fit that looks at every row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_prefix_tree.tree.packing import pack_rows


def plain_best_fit(lengths: list[int], max_tokens: int) -> list[list[int]]:
    rows: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rooms = [max_tokens - sum(lengths[i] for i in row) for row in rows]
        fitting = [row for row, room in enumerate(rooms) if room >= lengths[index]]
        if fitting:
            rows[min(fitting, key=lambda row: rooms[row])].append(index)
        else:
            rows.append([index])
    return sorted(sorted(row) for row in rows)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "rows"),
    [
        ([5], 5, [[0]]),
        ([1, 5], 5, [[0], [1]]),
        ([1, 4], 5, [[0, 1]]),
        ([2, 2, 2, 2, 2], 5, [[0, 1], [2, 3], [4]]),  # equal trees in their order
        ([5, 7, 3, 5], 10, [[0, 3], [1, 2]]),
        ([1, 2, 6, 7], 8, [[0, 3], [1, 2]]),  # 2 goes where it leaves no room, not where it fits first
        ([2, 5, 6], 8, [[0, 2], [1]]),  # the least room, not the last row
        ([3, 7, 7], 10, [[0, 1], [2]]),  # equal room: the row that was opened first
        ([], 5, []),
    ],
)
def test_examples(lengths: list[int], max_tokens: int, rows: list[list[int]]):
    assert pack_rows(lengths, max_tokens) == rows
    assert pack_rows(np.array(lengths, dtype=np.int32), max_tokens) == rows


def test_500_random_inputs():
    rng = np.random.default_rng(0)
    several = 0
    for _ in range(500):
        max_tokens = int(rng.integers(1, 60))
        largest = int(rng.integers(1, max_tokens + 1))
        lengths = rng.integers(1, largest + 1, rng.integers(0, 60)).tolist()
        rows = pack_rows(lengths, max_tokens)
        assert rows == plain_best_fit(lengths, max_tokens)
        assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
        assert all(sum(lengths[index] for index in row) <= max_tokens for row in rows)
        several += len(rows) > 5
    assert several > 100


def test_as_many_as_there_are():
    """Grows as n log n: the plain best fit would take hours."""
    lengths = np.random.default_rng(0).integers(1, 4097, 100_000)
    rows = pack_rows(lengths, 4096)
    assert sum(map(len, rows)) == 100_000
    assert lengths.sum() / (len(rows) * 4096) > 0.99


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "message"),
    [
        ([2, 9, 3, 10], 8, "`max_tokens` is 8; pass an integer of at least 10"),
        ([2, 0], 8, "`lengths` must be between 1 and .* got 0 at index 1"),
        ([2, 1.5], 8, "`lengths` must be integers, got .*1.5 at index 1"),
        (7, 8, "`lengths` has 0 dimensions"),
        ([2], 0, "`max_tokens` must be between 1 and .* got 0"),
        ([2], 8.0, "`max_tokens` must be integers, got 8.0"),
        ([2], None, "`max_tokens` must be integers, got None"),
    ],
)
def test_errors(lengths: Any, max_tokens: Any, message: str):
    with pytest.raises(ValueError, match=message):
        pack_rows(lengths, max_tokens)
