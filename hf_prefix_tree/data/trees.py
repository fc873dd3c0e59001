# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Dataset rows to one tree, or to samples, and their counts: the functions that `datasets` maps.

A tree's rows carry their counts along, in one more column, so that they are there also when the tree comes from the
cache. A tree that supervises nothing is kept for its counts, without tokens.

Cost: that of reading the rows (`row_branches`), then one fold. The branches of a tree are in memory together.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from hf_prefix_tree.data.counts import COUNTS, FEATURES, NO_SIZES, Report
from hf_prefix_tree.data.rows import (
    SAMPLE_KINDS,
    RowOptions,
    columns_of,
    group_key,
    row_branches,
    row_kind,
    rows_of_batch,
)
from hf_prefix_tree.data.supervision import SUPERVISION, located, read_sample
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

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


_SAMPLE_FEATURES = Features({name: List(Value("int64")) for name in ("input_ids", "loss_mask")})


def read_samples(
    rows: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    on_error: str = "raise",
    num_proc: int | None = None,
    counts: MutableMapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """
    Rows as samples without weights, for training without trees: one for each branch that `prepare_trees` would make.

    A sample ends with its last supervised token: text of the chat template after a turn would tell where it ends. A
    branch that supervises nothing is no sample. Counts are logged as by `prepare_trees`.

    Args:
        rows (`Dataset`, `IterableDataset` or list of `dict`):
            Rows of one of the `SAMPLE_KINDS`. Rows with `input_ids` are returned as they are.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Renders and tokenizes.
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a row that can't be read is an error, also later for `input_ids`, or is skipped (`"skip"`).
        num_proc (`int`, *optional*):
            Processes, for a `Dataset`.
        counts (`MutableMapping[str, Any]`, *optional*):
            As for `prepare_trees`.
        options:
            Further ones of [`RowOptions`].

    Returns:
        `input_ids` and `loss_mask`, in the form of `rows`.

    Raises:
        `ValueError`: If the rows are of no kind that becomes samples, or one can't be read; its index is named.
    """
    if on_error not in ("raise", "skip"):
        raise ValueError(f"`on_error` is {on_error!r}; pass 'raise' or 'skip'.")
    columns = columns_of(rows)
    if "input_ids" in columns or not columns:
        return rows if on_error == "raise" else _readable(rows)
    kind = row_kind(columns)
    if kind not in SAMPLE_KINDS:
        raise ValueError(
            f"`dataset` has the columns {sorted(columns)}, {kind} rows, which are no samples; pass conversations, "
            f"`text`, or `input_ids` with one of {', '.join(SUPERVISION)}."
        )
    if tokenizer is None:
        raise ValueError(f"`tokenizer` is None, but {kind} rows are text; pass the model's tokenizer.")
    is_list = not isinstance(rows, Dataset | IterableDataset)
    features = {} if is_list else dict(rows.features or {})
    read = RowOptions(kind, tokenizer, features, "keep" if kind == "text" else "per_turn", **options)
    settings: dict[str, Any] = {"options": read, "weighting": "branch", "on_error": on_error}
    settings |= {"max_packed_tokens": None, "overflow": "split"}
    if isinstance(rows, IterableDataset):
        kwargs = {"batched": True, "batch_size": 64, "with_indices": True, "remove_columns": columns}
        trees = rows.map(trees_of_batch, features=TREE_FEATURES, fn_kwargs=settings, **kwargs)
        return trees.map(
            _samples_of_trees, batched=True, remove_columns=list(TREE_FEATURES), features=_SAMPLE_FEATURES
        )
    if is_list:
        trees = [tree_of_rows([item], **settings) for item in enumerate(rows)]
        reports = [tree[REPORT] for tree in trees]
    else:
        kwargs = {"features": COUNTED_FEATURES, "fn_kwargs": settings | {"source": None, "units": None}}
        kwargs |= {"with_indices": True, "remove_columns": columns, "num_proc": num_proc, "desc": "Rendering samples"}
        trees = rows.map(tree_of_unit, **kwargs)
        reports = trees[REPORT]
    report = Report()
    for counted in reports:
        report.add(counted)
    report.log()
    if counts is not None:
        counts.update(report.as_dict())
    if is_list:
        return [sample for tree in trees for sample in _samples(tree)]
    kwargs = {"features": _SAMPLE_FEATURES, "num_proc": num_proc, "desc": "Unfolding samples"}
    return trees.map(_samples_of_trees, batched=True, remove_columns=trees.column_names, **kwargs)


def _readable(rows: Any) -> Any:
    """The rows of token ids that can be read; the rest is logged, of a stream batch by batch."""
    if isinstance(rows, Dataset | IterableDataset):
        return rows.filter(_can_read, with_indices=True, batched=True)
    return list(itertools.compress(rows, _can_read(rows, range(len(rows)))))


def _can_read(rows: Any, indices: Sequence[int]) -> list[bool]:
    skipped: list[str] = []
    can_read = []
    for index, row in zip(indices, rows_of_batch(rows) if isinstance(rows, Mapping) else rows, strict=True):
        count = len(skipped)
        with located(f"row {index}", skipped):
            read_sample(row)
        can_read.append(len(skipped) == count)
    if skipped:
        logger.warning("Skipped %d of %d rows: %s", len(skipped), len(indices), "; ".join(skipped[:3]))
    return can_read


def _samples(tree: Mapping[str, Any]) -> Iterator[dict[str, list[int]]]:
    for branch in PrefixTree.from_dict(tree).branches() if tree["num_branches"] else ():
        if branch.weights.any():
            mask = branch.weights > 0
            end = int(np.flatnonzero(mask)[-1]) + 1
            yield {"input_ids": branch.input_ids[:end].tolist(), "loss_mask": mask[:end].astype(int).tolist()}


def _samples_of_trees(batch: Mapping[str, list[Any]]) -> dict[str, list[list[int]]]:
    samples = [sample for tree in rows_of_batch(batch) for sample in _samples(tree)]
    return {name: [sample[name] for sample in samples] for name in _SAMPLE_FEATURES}
