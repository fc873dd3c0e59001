# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Dataset rows to one tree and its counts: the functions that `datasets` maps, and the map that checks its cache.

A tree's rows carry their counts along, in one more column, so that they are there also when the tree comes from the
cache. A tree that supervises nothing is kept for its counts, without tokens.

Cost: that of reading the rows (`row_branches`), then one fold. The branches of a tree are in memory together.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value, is_caching_enabled
from datasets.fingerprint import Hasher, update_fingerprint

from hf_prefix_tree.data.counts import COUNTS, FEATURES, NO_SIZES, Report
from hf_prefix_tree.data.messages import TurnError
from hf_prefix_tree.data.rows import TREE_COLUMNS, RowOptions, group_key, row_branches, rows_of_batch
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

logger = logging.getLogger(__name__)

# Of the columns that are no lists of int32.
_TYPES = {name: List(Value("float64")) for name in ("weights", "run_values")}
_TYPES |= {"input_ids": List(Value("int64")), "num_branches": Value("int32"), "weighting": Value("string")}
TREE_FEATURES = Features({name: _TYPES.get(name, List(Value("int32"))) for name in TREE_COLUMNS})
REPORT = "preparation"  # the column of the counts
FOLDING = ("options", "weighting", "on_error")  # the options of `tree_of_rows`
COUNTED_FEATURES = Features({**TREE_FEATURES, REPORT: FEATURES})
_NO_TREE = {
    name: value[:0] if isinstance(value, np.ndarray) else value
    for name, value in fold([Branch([0], [0])]).to_dict().items()
} | {"num_branches": 0}


@dataclass(frozen=True)
class Plan:
    """The checked options of `prepare_trees`, and how to read its rows."""

    options: RowOptions
    weighting: str = "tree"
    on_error: str = "raise"
    max_packed_tokens: int | None = None
    overflow: str = "split"
    group_by: str | None = None
    pack_trees: bool = True
    selection_metric: str | None = None
    selection_num_proc: int | None = None
    max_examples: int | None = None
    num_proc: int | None = None

    def some(self, names: Sequence[str]) -> dict[str, Any]:
        """The options that a function takes: the cached results of the fold must not depend on those of packing."""
        return {name: getattr(self, name) for name in names}


def tree_of_unit(
    row: Mapping[str, Any], index: int, source: Dataset, units: list[list[int]] | None, **settings: Any
) -> dict[str, Any]:
    """
    The tree of the rows of `source` whose indices `units` lists, the first of which is `row`.

    Without `units`, the row at `index` is one of its own. `settings` are those of `tree_of_rows`.
    """
    first, *further = [index] if units is None else units[index]
    return tree_of_rows([(first, row)], ((i, source[i]) for i in further), **settings)


def trees_of_batch(batch: Mapping[str, list[Any]], indices: list[int], plan: Plan) -> dict[str, list[Any]]:
    """The trees of a stream's rows, each row a tree; losses are logged."""
    trees = list(_logged(([row] for row in zip(indices, rows_of_batch(batch), strict=True)), plan))
    return {name: [tree[name] for tree in trees] for name in TREE_FEATURES}


def trees_of_stream(dataset: IterableDataset, group_by: str, plan: Plan) -> Iterator[dict[str, Any]]:
    """The trees of a stream's groups, each of consecutive rows; losses are logged."""

    def keyed() -> Iterator[tuple[Any, tuple[int, Mapping[str, Any]]]]:
        for index, row in enumerate(dataset):
            try:
                yield group_key(row.get(group_by), group_by), (index, row)
            except ValueError as error:
                report = Report()
                report.add(skipped_row(index, error, plan.on_error))
                report.log()

    for _, items in groupby(keyed(), key=itemgetter(0)):
        yield from _logged([[row for _, row in items]], plan)


def skipped_row(index: int, error: ValueError, on_error: str) -> dict[str, Any]:
    """The counts of a row that can't be put into any tree. Raises under `on_error="raise"`."""
    if on_error == "raise":
        raise ValueError(f"row {index}: {error}") from error
    return {**dict.fromkeys(COUNTS, 0), **NO_SIZES, "rows": 1, "skipped": 1, "errors": [f"row {index}: {error}"]}


def _logged(units: Iterable[list[tuple[int, Mapping[str, Any]]]], plan: Plan) -> Iterator[dict[str, Any]]:
    """The trees that supervise something and fit, without their counts; losses are logged after the last one."""
    report = Report()
    for rows in units:
        tree = tree_of_rows(rows, **plan.some(FOLDING))
        counts = tree.pop(REPORT)
        drop_oversized(counts, rows[-1][0], plan)
        report.add(counts)
        if counts["branches"]:
            yield tree
    if report.losses():
        report.log()


def tree_of_rows(
    *rows: Iterable[tuple[int, Mapping[str, Any]]], options: RowOptions, weighting: str, on_error: str
) -> dict[str, Any]:
    """The tree of some rows, given with their indices, and its counts. Without tokens if it supervises nothing."""
    counts: Counter[str] = Counter()
    errors: list[str] = []
    branches: list[Branch] = []
    tree = None
    for index, row in (item for items in rows for item in items):
        counts["rows"] += 1
        try:
            if options.kind == "tree":
                tree = _reweighted(PrefixTree.from_dict(row), weighting)
            else:
                branches += row_branches(row, options, counts)
        except ValueError as error:
            errors += skipped_row(index, error, on_error)["errors"]
            counts["skipped"] += 1
            if isinstance(error, TurnError):
                counts[error.name] += 1
    if any(branch.weights.any() for branch in branches):
        tree = fold(branches, weighting)
    counts["empty"] += tree is None
    sizes = tree.stats().__dict__ if tree is not None else NO_SIZES
    state = tree.to_dict() if tree is not None else _NO_TREE
    return state | {REPORT: {name: counts[name] for name in COUNTS} | sizes | {"errors": errors}}


def _reweighted(tree: PrefixTree, weighting: str) -> PrefixTree:
    if tree.weighting == weighting:
        return tree
    if len(tree.branch_nodes) != tree.num_branches:  # a part, which can't be weighted anew
        check_same_weighting(tree.weighting, weighting)
    return fold(tree.branches(), weighting)


def check_same_weighting(given: str, weighting: str) -> None:
    """Raises `ValueError` where a tree, or a part of one, is taken as it is and has another weighting."""
    if given != weighting:
        raise ValueError(
            f"`weighting` is {weighting!r}, but `dataset` holds trees or parts of them that were folded with "
            f"{given!r}; pass `weighting={given!r}`, or prepare the whole trees again."
        )


def drop_oversized(counts: dict[str, Any], last: int, plan: Plan) -> None:
    """
    Replaces the counts of a tree that is too large for a packed sequence and is not split, in place.

    It works on counts, after the fold: the cache then serves every way to pack.

    Args:
        counts (`dict`): Those of the tree, see `FEATURES`.
        last (`int`): Index of its last row, for the error.
        plan ([`Plan`]): See [`prepare_trees`] for its `max_packed_tokens`, `overflow` and `on_error`.
    """
    if plan.max_packed_tokens is None or counts["tree_tokens"] <= plan.max_packed_tokens:
        return
    problem = overflow_problem(counts, plan.max_packed_tokens, plan.overflow)
    if problem and plan.on_error == "raise":
        raise ValueError(f"row {last}: {problem}")
    if problem:
        counts |= {"skipped": counts["rows"], "errors": [*counts["errors"], f"row {last}: {problem}"]}
    if problem or plan.overflow == "drop":
        counts |= {**NO_SIZES, "empty" if problem else "oversized": 1}


def drop_oversized_trees(counts: dict[str, Any], last: Callable[[int], int], plan: Plan) -> None:
    """The same for the columns of many trees; `last` tells the last row of one."""
    for index in np.flatnonzero(counts["tree_tokens"] > (plan.max_packed_tokens or np.inf)).tolist():
        of_tree = {name: values[index] for name, values in counts.items()}
        drop_oversized(of_tree, last(index), plan)
        for name, value in of_tree.items():
            counts[name][index] = value


def overflow_problem(counts: Mapping[str, Any], max_packed_tokens: int, overflow: str) -> str:
    """Why a tree that is larger than a row can't be prepared; empty if it can be split or dropped."""
    if overflow == "raise":
        return (
            f"its tree has {counts['tree_tokens']} tokens, `max_packed_tokens` is {max_packed_tokens}; raise it, or "
            "pass `overflow='split'`, 'stream' or 'drop'."
        )
    longest = counts["longest_path"]
    if overflow == "split" and longest > max_packed_tokens:
        return (
            f"a branch has {longest} tokens, which can't be split, `max_packed_tokens` is "
            f"{max_packed_tokens}; raise it, pass `overflow='stream'`, or cap the branches with `max_length`."
        )
    return ""


# ---- the cache of `datasets`, and files that are whole or not there ----

PARTIAL = ".hf_prefix_tree_partial"  # ends the name of a file that is being written
_PROCESSING = ("num_proc", "writer_batch_size", "desc")  # options of `map` on which no result depends


def cached_map(dataset: Any, function: Callable[..., Any], **options: Any) -> Any:
    """
    `dataset.map`, which takes a result from the cache only if its files are as they were written. A stream is mapped
    without the options on which no result depends, and no process is without a row.

    `datasets` reads a torn file up to the tear. Their checksums lie beside them, and a result that differs is made
    again.

    Args:
        dataset (`Dataset` or `IterableDataset`): Where it has no file, there is no cache.
        function (`Callable`), options: As `map` takes them.

    Raises:
        `OSError`: If the cache can't be read or written.
    """
    results = {name: value for name, value in options.items() if name not in _PROCESSING}
    if isinstance(dataset, IterableDataset):
        return dataset.map(function, **results)
    if options.get("num_proc") is not None:
        options["num_proc"] = min(options["num_proc"], len(dataset))
    if not dataset.cache_files or not len(dataset) or not is_caching_enabled():
        return dataset.map(function, **options)
    key = update_fingerprint(dataset._fingerprint, function, results)
    path = Path(dataset.cache_files[0]["filename"]).with_name(f"cache-{key}.arrow")
    manifest = path.with_suffix(".json")
    try:
        cached = sorted(path.parent.glob(f"{path.stem}*.arrow"))
        is_whole = manifest.is_file() and manifest.read_bytes() == json.dumps(checksums(path.parent, cached)).encode()
        if cached and not is_whole:
            logger.warning("The cached file %s differs from its checksum, and is made again.", path)
        options |= {"cache_file_name": str(path), "new_fingerprint": key, "load_from_cache_file": is_whole}
        result = dataset.map(function, **options)
        if not is_whole:
            files = [Path(file["filename"]) for file in result.cache_files]
            for file in {*cached} - {*files}:  # of another number of processes
                file.unlink(missing_ok=True)
            write_files({manifest: json.dumps(checksums(path.parent, sorted(files))).encode()})
    except OSError as error:
        problem = f"{error.strerror or error} (the cache of `datasets`, which needs space and permissions)"
        raise OSError(error.errno, problem, str(path)) from error
    return result


def checksums(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """The checksum of each file, by its path within the folder."""
    values = {}
    for path in files:
        with path.open("rb") as file:
            values[path.relative_to(folder).as_posix()] = Hasher.hash_bytes(iter(lambda: file.read(1 << 24), b""))
    return values


def write_files(contents: Mapping[Path, bytes]) -> None:
    """
    Write files that belong together. A reader sees each whole or as it was before, and the last one only beside the
    others that it was written with.

    Args:
        contents (`Mapping[Path, bytes]`):
            The content of each file. Missing folders are created; links are followed, and devices written to.

    Raises:
        `OSError`: If one can't be written.
    """
    devices = {path for path in contents if path.is_char_device()}  # no file may replace one, such as /dev/null
    for path in devices:
        path.write_bytes(contents[path])
    contents = {Path(os.path.realpath(path)): content for path, content in contents.items() if path not in devices}
    # renaming is atomic within one folder
    temporary = {path: path.with_name(f".{uuid.uuid4().hex}{PARTIAL}") for path in contents}
    try:
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            _remove_partial_files(path.parent)
            temporary[path].write_bytes(content)
        if len(contents) > 1:
            path.unlink(missing_ok=True)
        for path in contents:
            os.replace(temporary[path], path)
    except OSError as error:  # that of a write names no file
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
    finally:
        for file in temporary.values():
            with contextlib.suppress(OSError):  # its folder may be none
                file.unlink(missing_ok=True)


@functools.cache  # once in a process: a folder may hold many files
def _remove_partial_files(folder: Path) -> None:
    """Removes the files that runs which were killed left behind: those that nobody has written to for an hour."""
    for file in folder.glob(f".*{PARTIAL}"):
        if file.stat().st_mtime < time.time() - 3600:
            file.unlink(missing_ok=True)
