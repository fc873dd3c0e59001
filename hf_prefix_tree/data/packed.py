# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trees to packed sequences of at most so many tokens: large trees are split, small ones share a sequence.

All parts of a split tree belong in one optimizer step, and so does a tree that shares a sequence with a part. Every
part therefore has a sequence of its own, which only whole trees fill up: no sequence ties two split trees together.

Cost: lengths are packed in O(n log n); only trees that are split are read for it. Then one pass gathers the rows as
Arrow tables, a batch of rows at a time, without a Python object per token.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets

from hf_prefix_tree.data.trees import TREE_FEATURES, cached_map, check_same_weighting
from hf_prefix_tree.tree.packing import fill, pack_rows, split_tree
from hf_prefix_tree.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)

PACKED_FEATURES = Features(
    {"trees": List(dict(TREE_FEATURES)), "tree_ids": List(Value("int64")), "num_parts": List(Value("int64"))}
)
STREAM_BUFFER = 1000  # trees of a stream that are packed together
_PART_COUNTS = ("tree", "tokens", "weightless", "tree_id")
_PART_FEATURES = Features({**TREE_FEATURES, **dict.fromkeys(_PART_COUNTS, Value("int64"))})


def pack_dataset(
    trees: Dataset, lengths: list[int], max_tokens: int, pack_trees: bool, num_proc: int | None
) -> tuple[Dataset, dict[str, Any]]:
    """
    Pack a dataset of trees into dataset rows with the columns of `PACKED_FEATURES`, one packed sequence each.

    Args:
        trees ([`~datasets.Dataset`]):
            Rows are trees.
        lengths (`list` of `int`):
            Tokens of each tree.
        max_tokens (`int`):
            Tokens that a row holds. At least the longest branch.
        pack_trees (`bool`):
            Whether trees share rows. If not, each tree or part has one.
        num_proc (`int`, *optional*):
            Number of processes.

    Returns:
        The packed rows, and counts: `packed_rows`, `split_trees`, `parts`, `weightless_parts`, `duplicated_tokens`,
        `fill`.
    """
    large = [index for index, length in enumerate(lengths) if length > max_tokens]
    # Pieces are the whole trees and the parts: where each is in `source`, which tree it is of, how long it is.
    source = trees
    parts_of: dict[int, list[tuple[int, int, int]]] = {index: [] for index in large}
    split: list[tuple[int, int, int]] = []
    part_ids: list[int] = []
    if large:
        parts = cached_map(
            trees.select(large),
            _split_batch,
            with_indices=True,
            batched=True,
            batch_size=16,
            remove_columns=trees.column_names,
            features=_PART_FEATURES,
            fn_kwargs={"trees": large, "max_tokens": max_tokens},
            num_proc=_processes(num_proc, len(large)),
            writer_batch_size=100,
            desc="Splitting trees",
        )
        *counts, part_ids = (parts[name][:] for name in _PART_COUNTS)
        split = list(zip(*counts, strict=True))
        for at, (tree, length, is_weightless) in enumerate(split):
            if not is_weightless:
                parts_of[tree].append((len(trees) + at, tree, length))
        source = concatenate_datasets([trees, parts.remove_columns(list(_PART_COUNTS))])
    whole = ([(index, index, length)] for index, length in enumerate(lengths))
    flat = [piece for index, pieces in enumerate(whole) for piece in parts_of.get(index, pieces)]
    rows = _rows([length for *_, length in flat], [tree for _, tree, _ in flat], max_tokens, pack_trees)
    # In the order of the rows: where each piece is in `source`, and which tree it is of. Arrays are hashed fast.
    members = np.array([flat[piece][:2] for row in rows for piece in row])
    ends = np.cumsum([len(row) for row in rows])
    packed = cached_map(
        source.select(members[np.append(0, ends[:-1]), 0]),
        _gather,
        with_indices=True,
        input_columns=["num_branches"],  # a row stands for the packed row that it is in; no more of it is read
        batched=True,
        batch_size=16,
        remove_columns=source.column_names,
        features=PACKED_FEATURES,
        fn_kwargs={
            "source": source,
            "members": members,
            "ends": ends,
            "num_parts": np.bincount(members[:, 1])[members[:, 1]],
            "part_ids": np.array(part_ids, dtype=np.int64),
        },
        num_proc=_processes(num_proc, len(rows)),
        writer_batch_size=16,
        desc="Packing trees",
    )
    return packed, _counted(flat, rows, max_tokens, split, sum(lengths[index] for index in large))


def pack_stream(trees: IterableDataset, max_tokens: int, pack_trees: bool, splits: bool) -> IterableDataset:
    """
    The same for a stream: up to `STREAM_BUFFER` consecutive trees are packed together. Without `splits` a larger tree
    stays whole, in a row of its own.
    """
    return trees.map(
        _pack_batch,
        with_indices=True,
        batched=True,
        batch_size=STREAM_BUFFER,
        remove_columns=list(TREE_FEATURES),
        features=PACKED_FEATURES,
        fn_kwargs={"max_tokens": max_tokens, "pack_trees": pack_trees, "splits": splits},
    )


def check_weightings(dataset: Dataset | IterableDataset, column: str, weighting: str) -> Dataset | IterableDataset:
    """
    The same packed rows (`column="trees"`) or folded trees (`"weighting"`), whose weighting is checked, of a stream
    while it is read.

    Raises:
        `ValueError`: If a tree has another weighting: it is taken as it is, and parts of split trees can't be weighted
            anew.
    """
    if isinstance(dataset, IterableDataset):
        return dataset.map(
            _check_weightings,
            batched=True,
            batch_size=16,
            input_columns=[column],
            features=dataset.features,
            fn_kwargs={"weighting": weighting},
        )
    if column == "weighting":
        _check_weightings(dataset.unique(column), weighting)
        return dataset
    for table in dataset.select_columns("trees").with_format("arrow").iter(batch_size=1000):
        for chunk in table["trees"].chunks:
            _check_weightings(
                [[{"weighting": name} for name in chunk.flatten().field("weighting").unique().to_pylist()]], weighting
            )
    return dataset


def _check_weightings(rows: list[list[dict[str, Any]]] | list[str], weighting: str) -> dict[str, Any]:
    for row in rows:
        for given in [row] if isinstance(row, str) else [tree["weighting"] for tree in row]:
            check_same_weighting(given, weighting)
    return {}


def log_packing(counts: Mapping[str, Any], max_tokens: int, level: int = logging.WARNING) -> None:
    """Log the counts of packing. Nothing is lost, but by default only warnings are shown."""
    split = (
        f"; {counts['split_trees']} trees split into {counts['parts']} parts, {counts['duplicated_tokens']} tokens "
        f"computed again, {counts['weightless_parts']} parts without supervised token left out"
    )
    logger.log(
        level,
        "Packed into %d rows of at most %d tokens, %.1f %% full%s.",
        counts["packed_rows"],
        max_tokens,
        100 * counts["fill"],
        split if counts["split_trees"] else "",
    )


def _rows(lengths: list[int], trees: list[int], max_tokens: int, pack_trees: bool) -> list[list[int]]:
    """Pieces of each row. `trees` names the tree of each piece: pieces of the same one are parts, and consecutive."""
    if not pack_trees:
        return [[piece] for piece in range(len(lengths))]
    unique, counts = np.unique(trees, return_counts=True)
    (parts,) = np.isin(trees, unique[counts > 1]).nonzero()
    rows = pack_rows(lengths, max_tokens, apart=parts.tolist())
    # Rows with parts of one tree come one after another, for samplers that read ahead.
    is_part = np.isin(np.arange(len(lengths)), parts)
    return sorted(rows, key=lambda row: next((piece for piece in row if is_part[piece]), row[0]))


def _counted(
    pieces: list[tuple[int, int, int]],
    rows: list[list[int]],
    max_tokens: int,
    parts: list[tuple[int, int, int]],
    tokens_before: int,
) -> dict[str, Any]:
    return {
        "packed_rows": len(rows),
        "split_trees": len({tree for tree, *_ in parts}),
        "parts": len(parts),
        "weightless_parts": sum(weightless for *_, weightless in parts),
        "duplicated_tokens": sum(tokens for _, tokens, _ in parts) - tokens_before,
        "fill": fill([tokens for *_, tokens in pieces], rows, max_tokens),
    }


def _split_batch(
    batch: Mapping[str, list[Any]], indices: list[int], trees: list[int], max_tokens: int
) -> dict[str, list[Any]]:
    parts = [
        part for row, index in enumerate(indices) for part in _parts(_tree_at(batch, row), trees[index], max_tokens)
    ]
    return {name: [part[name] for part in parts] for name in _PART_FEATURES}


def _parts(tree: PrefixTree, index: int, max_tokens: int) -> list[dict[str, Any]]:
    """The parts as rows. A part is weightless, and has no gradient, if all that it supervises is in earlier parts."""
    counts = {"tree": index, "tree_id": _tree_id(tree.input_ids, index)}
    return [
        part.to_dict() | counts | {"tokens": len(part), "weightless": int(not part.weights.any())}
        for part in split_tree(tree, max_tokens)
    ]


def _gather(
    _: Any,
    indices: list[int],
    source: Dataset,
    members: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    num_parts: npt.NDArray[np.int64],
    part_ids: npt.NDArray[np.int64],
) -> pa.Table:
    starts = [ends[index - 1] if index else 0 for index in indices]
    chosen = np.concatenate([np.arange(start, ends[index]) for start, index in zip(starts, indices, strict=True)])
    pieces = source.with_format("arrow")[members[chosen, 0]]
    columns = {name: pa.concat_arrays(pieces[name].chunks) for name in TREE_FEATURES}
    num_whole = len(source) - len(part_ids)
    tree_ids = [
        _tree_id(ids.values.to_numpy(), int(tree)) if place < num_whole else part_ids[place - num_whole]
        for ids, (place, tree) in zip(columns["input_ids"], members[chosen], strict=True)
    ]
    lists = {
        "trees": pa.StructArray.from_arrays(list(columns.values()), list(columns)),
        "tree_ids": pa.array(tree_ids, pa.int64()),
        "num_parts": pa.array(num_parts[chosen]),
    }
    offsets = np.append(0, np.cumsum(ends[indices] - starts)).astype(np.int32)
    return pa.table({name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()})


def _pack_batch(
    batch: Mapping[str, list[Any]], indices: list[int], max_tokens: int, pack_trees: bool, splits: bool
) -> dict[str, list[Any]]:
    trees: list[dict[str, Any]] = []
    pieces: list[tuple[int, int, int]] = []
    split: list[tuple[int, int, int]] = []
    tokens_before = 0
    for row, input_ids in enumerate(batch["input_ids"]):
        members = [{name: batch[name][row] for name in TREE_FEATURES}]
        if splits and len(input_ids) > max_tokens:
            parts = _parts(_tree_at(batch, row), row, max_tokens)
            split += [(row, part["tokens"], part["weightless"]) for part in parts]
            tokens_before += len(input_ids)
            members = [{name: part[name] for name in TREE_FEATURES} for part in parts if not part["weightless"]]
        for tree in members:
            pieces.append((len(trees), row, min(len(tree["input_ids"]), max_tokens)))
            trees.append(tree)
    rows = _rows([length for *_, length in pieces], [row for _, row, _ in pieces], max_tokens, pack_trees)
    # A warning per batch of a stream would flood the log.
    log_packing(_counted(pieces, rows, max_tokens, split, tokens_before), max_tokens, logging.INFO)
    ids = [_tree_id(batch["input_ids"][row], index) for row, index in enumerate(indices)]
    num_parts = Counter(row for _, row, _ in pieces)
    return {
        "trees": [[trees[piece] for piece in row] for row in rows],
        "tree_ids": [[ids[pieces[piece][1]] for piece in row] for row in rows],
        "num_parts": [[num_parts[pieces[piece][1]] for piece in row] for row in rows],
    }


def _tree_id(input_ids: npt.ArrayLike, index: int) -> int:
    """
    An id for the tree with this index and these tokens, in 63 bits.

    The index alone would name several trees: data sets are concatenated, and each worker that reads a stream counts
    from 0. The tokens alone would name equal trees of a data set alike.
    """
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8)
    digest.update(np.ascontiguousarray(input_ids, dtype=np.int64).tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def _tree_at(batch: Mapping[str, list[Any]], row: int) -> PrefixTree:
    return PrefixTree.from_dict({name: batch[name][row] for name in TREE_FEATURES})


def _processes(num_proc: int | None, rows: int) -> int | None:
    return num_proc if num_proc is None else min(num_proc, rows)
