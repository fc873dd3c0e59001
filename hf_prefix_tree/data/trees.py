# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Dataset rows to one tree and its counts: the functions that `datasets` maps.

A tree's rows carry their counts along, in one more column, so that they are there also when the tree comes from the
cache. A tree that supervises nothing is kept for its counts, without tokens.

Cost: that of reading the rows (`row_branches`), then one fold. The branches of a tree are in memory together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from hf_prefix_tree.data.counts import COUNTS, FEATURES, NO_SIZES, Report
from hf_prefix_tree.data.rows import RowOptions, group_key, row_branches, rows_of_batch
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

TREE_FEATURES = Features(
    {
        "input_ids": List(Value("int64")),
        "node_lengths": List(Value("int32")),
        "node_parents": List(Value("int32")),
        "weights": List(Value("float64")),
        "branch_count": List(Value("int32")),
        "num_branches": Value("int32"),
        "weighting": Value("string"),
        "branch_nodes": List(Value("int32")),
        "run_counts": List(Value("int32")),
        "run_lengths": List(Value("int32")),
        "run_values": List(Value("float64")),
    }
)
REPORT = "preparation"  # the column of the counts
COUNTED_FEATURES = Features({**TREE_FEATURES, REPORT: FEATURES})
_NO_TREE = {
    name: value[:0] if isinstance(value, np.ndarray) else value
    for name, value in fold([Branch([0], [0])]).to_dict().items()
} | {"num_branches": 0}


def tree_of_unit(
    row: Mapping[str, Any], index: int, source: Dataset, units: list[list[int]] | None, **settings: Any
) -> dict[str, Any]:
    """
    The tree of the rows of `source` whose indices `units` lists, the first of which is `row`.

    Without `units`, the row at `index` is one of its own. `settings` are those of `tree_of_rows`.
    """
    first, *further = [index] if units is None else units[index]
    return tree_of_rows([(first, row)], ((i, source[i]) for i in further), **settings)


def trees_of_batch(batch: Mapping[str, list[Any]], indices: list[int], **settings: Any) -> dict[str, list[Any]]:
    """The trees of a stream's rows, each row a tree; losses are logged."""
    rows = zip(indices, rows_of_batch(batch), strict=True)
    trees = list(_logged(tree_of_rows([row], **settings) for row in rows))
    return {name: [tree[name] for tree in trees] for name in TREE_FEATURES}


def trees_of_stream(dataset: IterableDataset, group_by: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The trees of a stream's groups, each of consecutive rows; losses are logged."""

    def keyed() -> Iterator[tuple[Any, tuple[int, Mapping[str, Any]]]]:
        for index, row in enumerate(dataset):
            try:
                yield group_key(row.get(group_by), group_by), (index, row)
            except ValueError as error:
                report = Report()
                report.add(skipped_row(index, error, settings["on_error"]))
                report.log()

    for _, items in groupby(keyed(), key=itemgetter(0)):
        yield from _logged([tree_of_rows(map(itemgetter(1), items), **settings)])


def skipped_row(index: int, error: ValueError, on_error: str) -> dict[str, Any]:
    """The counts of a row that can't be put into any tree. Raises under `on_error="raise"`."""
    if on_error == "raise":
        raise ValueError(f"row {index}: {error}") from error
    return {**dict.fromkeys(COUNTS, 0), **NO_SIZES, "rows": 1, "skipped": 1, "errors": [f"row {index}: {error}"]}


def _logged(trees: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The trees that supervise something, without their counts; losses are logged after the last one."""
    report = Report()
    for tree in trees:
        report.add(tree.pop(REPORT))
        if tree["num_branches"]:
            yield tree
    if report.losses():
        report.log()


def tree_of_rows(
    *rows: Iterable[tuple[int, Mapping[str, Any]]],
    options: RowOptions,
    weighting: str,
    on_error: str,
    max_packed_tokens: int | None,
    overflow: str,
) -> dict[str, Any]:
    """The tree of some rows, given with their indices, and its counts. Without tokens if it supervises nothing."""
    counts: Counter[str] = Counter()
    errors: list[str] = []
    branches: list[Branch] = []
    tree, last = None, 0
    for index, row in (item for items in rows for item in items):
        counts["rows"] += 1
        last = index
        try:
            if options.kind == "tree":
                tree = _reweighted(PrefixTree.from_dict(row), weighting)
            else:
                branches += row_branches(row, options, counts)
        except ValueError as error:
            if on_error == "raise":
                raise ValueError(f"row {index}: {error}") from error
            counts["skipped"] += 1
            errors.append(f"row {index}: {error}")
    if any(branch.weights.any() for branch in branches):
        tree = fold(branches, weighting)
    if tree is not None and max_packed_tokens is not None and len(tree) > max_packed_tokens:
        if problem := _overflow(tree, max_packed_tokens, overflow):
            if on_error == "raise":
                raise ValueError(f"row {last}: {problem}")
            counts["skipped"] = counts["rows"]
            errors.append(f"row {last}: {problem}")
            tree = None
        elif overflow == "drop":
            counts["oversized"] += 1
            tree = None
    counts["empty"] += tree is None and not counts["oversized"]
    sizes = tree.stats().__dict__ if tree is not None else NO_SIZES
    state = tree.to_dict() if tree is not None else _NO_TREE
    return state | {REPORT: {name: counts[name] for name in COUNTS} | sizes | {"errors": errors}}


def _reweighted(tree: PrefixTree, weighting: str) -> PrefixTree:
    if tree.weighting == weighting:
        return tree
    if len(tree.branch_nodes) != tree.num_branches:
        raise ValueError(
            f"`weighting` is {weighting!r}, but this is a part of a tree folded with {tree.weighting!r}, and a part "
            f"can't be weighted anew; pass `weighting={tree.weighting!r}`, or the whole tree."
        )
    return fold(tree.branches(), weighting)


def _overflow(tree: PrefixTree, max_packed_tokens: int, overflow: str) -> str:
    """Why a tree that is larger than a row can't be prepared; empty if it can be split or dropped."""
    if overflow == "raise":
        return (
            f"its tree has {len(tree)} tokens, `max_packed_tokens` is {max_packed_tokens}; raise it, or pass "
            "`overflow='split'` or 'drop'."
        )
    longest = tree.stats().longest_path
    if overflow == "split" and longest > max_packed_tokens:
        return (
            f"its tree has a branch of {longest} tokens, which can't be split, `max_packed_tokens` is "
            f"{max_packed_tokens}; raise it, or cap the branches with `max_length`."
        )
    return ""
