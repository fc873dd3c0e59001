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
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets

from hf_prefix_tree.data.rows import rows_of_batch
from hf_prefix_tree.data.trees import TREE_FEATURES, cached_map, check_same_weighting
from hf_prefix_tree.tree.layout import Int64Array, ranges
from hf_prefix_tree.tree.packing import pack_rows, split_tree
from hf_prefix_tree.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)

PACKED_FEATURES = Features(
    {"trees": List(dict(TREE_FEATURES)), "tree_ids": List(Value("int64")), "num_parts": List(Value("int64"))}
)
STREAM_BUFFER = 1000  # trees of a stream that are packed together
_PART_COUNTS = ("tree", "tokens", "weightless")
_PART_FEATURES = Features({**TREE_FEATURES, **dict.fromkeys(_PART_COUNTS, Value("int64"))})


class Packing(NamedTuple):
    """The pieces of each row: whole trees, and the parts of split ones that supervise anything."""

    places: Int64Array  # of the pieces, row by row: a whole tree is where it was, the parts come after all trees
    trees: Int64Array  # the tree that each piece is, or is a part of
    num_parts: Int64Array  # of that tree
    ends: Int64Array  # of the rows among the pieces
    counts: dict[str, Any]


def pack_dataset(
    trees: Dataset, lengths: npt.ArrayLike, max_tokens: int, pack_trees: bool, num_proc: int | None
) -> tuple[Dataset, dict[str, Any]]:
    """
    Pack a dataset of trees into dataset rows with the columns of `PACKED_FEATURES`, one packed sequence each.

    Args:
        trees ([`~datasets.Dataset`]):
            Rows are trees.
        lengths (array-like of `int`):
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
    large = np.flatnonzero(np.asarray(lengths) > max_tokens)
    source, options = trees, {"with_indices": True, "batched": True, "batch_size": 16, "num_proc": num_proc}
    parts: dict[str, list[int]] = {name: [] for name in _PART_COUNTS}
    if len(large):
        split = cached_map(
            trees.select(large),
            _split_batch,
            **options,
            remove_columns=trees.column_names,
            features=_PART_FEATURES,
            fn_kwargs={"trees": large.tolist(), "max_tokens": max_tokens},
            writer_batch_size=100,
            desc="Splitting trees",
        )
        parts = {name: split[name][:] for name in _PART_COUNTS}
        source = concatenate_datasets([trees, split.remove_columns(list(_PART_COUNTS))])
    packing = _plan(lengths, parts, max_tokens, pack_trees)
    packed = cached_map(
        source.select(packing.places[np.append(0, packing.ends[:-1])]),
        _gather,
        **options,
        input_columns=["num_branches"],  # a row stands for the packed row that it is in; no more of it is read
        remove_columns=source.column_names,
        features=PACKED_FEATURES,
        fn_kwargs={"source": source, "packing": packing},
        writer_batch_size=16,
        desc="Packing trees",
    )
    return packed, packing.counts


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
        options = {"input_columns": [column], "features": dataset.features, "fn_kwargs": {"weighting": weighting}}
        return dataset.map(_check_row, **options)
    if column == "weighting":
        names = dataset.unique(column)
    else:
        tables = dataset.select_columns(column).with_format("arrow").iter(batch_size=1000)
        chunks = (chunk.flatten() for table in tables for chunk in table[column].chunks)
        names = [name for trees in chunks for name in trees.field("weighting").unique().to_pylist()]
    for name in names:
        check_same_weighting(name, weighting)
    return dataset


def _check_row(trees: list[dict[str, Any]] | str, weighting: str) -> dict[str, Any]:
    for name in [trees] if isinstance(trees, str) else [tree["weighting"] for tree in trees]:
        check_same_weighting(name, weighting)
    return {}


def log_packing(counts: Mapping[str, Any], max_tokens: int, level: int = logging.WARNING) -> None:
    """Log the counts of packing. Nothing is lost, but by default only warnings are shown."""
    split = (
        f"; {counts['split_trees']} trees split into {counts['parts']} parts, {counts['duplicated_tokens']} tokens "
        f"computed again, {counts['weightless_parts']} parts without supervised token left out"
    )
    full = f"{100 * counts['fill']:.1f} % full{split if counts['split_trees'] else ''}"
    logger.log(level, "Packed into %d rows of at most %d tokens, %s.", counts["packed_rows"], max_tokens, full)


def _plan(lengths: npt.ArrayLike, parts: Mapping[str, Sequence[int]], max_tokens: int, pack_trees: bool) -> Packing:
    """Pieces to rows. `parts` has the columns `_PART_COUNTS` of the parts of all trees above `max_tokens`."""
    of_tree, (tree, tokens, weightless) = np.array(lengths), (np.array(parts[name], int) for name in _PART_COUNTS)
    whole, kept = np.flatnonzero(of_tree <= max_tokens), np.flatnonzero(weightless == 0)
    trees = np.append(whole, tree[kept])
    order = trees.argsort(kind="stable")
    trees, places = trees[order], np.append(whole, len(of_tree) + kept)[order]
    sizes, num_parts = np.append(of_tree[whole], tokens[kept])[order], np.bincount(trees)[trees]
    rows = [[piece] for piece in range(len(trees))]
    if pack_trees:
        is_part = num_parts > 1
        rows = pack_rows(sizes, max_tokens, apart=np.flatnonzero(is_part).tolist())
        # Rows with parts of one tree come one after another, for samplers that read ahead.
        rows.sort(key=lambda row: next((piece for piece in row if is_part[piece]), row[0]))
    pieces = np.concatenate(rows)
    counts = {
        "packed_rows": len(rows),
        "split_trees": len(of_tree) - len(whole),
        "parts": len(tree),
        "weightless_parts": len(tree) - len(kept),
        "duplicated_tokens": int(tokens.sum() - of_tree[of_tree > max_tokens].sum()),
        "fill": int(sizes.sum()) / (len(rows) * max_tokens),
    }
    return Packing(places[pieces], trees[pieces], num_parts[pieces], np.cumsum(list(map(len, rows))), counts)


def _split_batch(
    batch: Mapping[str, list[Any]], indices: list[int], trees: list[int], max_tokens: int
) -> dict[str, list[Any]]:
    whole = zip(indices, rows_of_batch(batch), strict=True)
    parts = [part for index, tree in whole for part in _parts(tree, trees[index], max_tokens)]
    return {name: [part[name] for part in parts] for name in _PART_FEATURES}


def _parts(tree: Mapping[str, Any], index: int, max_tokens: int) -> list[dict[str, Any]]:
    """The parts as rows. A part is weightless, and has no gradient, if all that it supervises is in earlier parts."""
    return [
        part.to_dict() | {"tree": index, "tokens": len(part), "weightless": int(not part.weights.any())}
        for part in split_tree(PrefixTree.from_dict(tree), max_tokens)
    ]


def _gather(_: Any, indices: list[int], source: Dataset, packing: Packing) -> pa.Table:
    starts = np.append(0, packing.ends)[indices]
    lengths = packing.ends[indices] - starts
    chosen = ranges(starts, lengths)
    pieces = source.with_format("arrow")[packing.places[chosen]]
    columns = {name: pa.concat_arrays(pieces[name].chunks) for name in TREE_FEATURES}
    trees = packing.trees[chosen]
    whole = source.select_columns("input_ids").with_format("arrow")[trees]["input_ids"]
    tree_ids = [_tree_id(ids.values.to_numpy(), index) for ids, index in zip(whole, trees.tolist(), strict=True)]
    lists = {
        "trees": pa.StructArray.from_arrays(list(columns.values()), list(columns)),
        "tree_ids": pa.array(tree_ids, pa.int64()),
        "num_parts": pa.array(packing.num_parts[chosen]),
    }
    offsets = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return pa.table({name: pa.ListArray.from_arrays(offsets, values) for name, values in lists.items()})


def _pack_batch(
    batch: Mapping[str, list[Any]], indices: list[int], max_tokens: int, pack_trees: bool, splits: bool
) -> dict[str, list[Any]]:
    trees = list(rows_of_batch(batch))
    lengths = [len(tree["input_ids"]) for tree in trees]
    if not splits:
        lengths = [min(length, max_tokens) for length in lengths]
    large = [row for row, length in enumerate(lengths) if length > max_tokens]
    parts = [part for row in large for part in _parts(trees[row], row, max_tokens)]
    packing = _plan(lengths, {name: [part[name] for part in parts] for name in _PART_COUNTS}, max_tokens, pack_trees)
    # A warning per batch of a stream would flood the log.
    log_packing(packing.counts, max_tokens, logging.INFO)
    pieces = [{name: piece[name] for name in TREE_FEATURES} for piece in (*trees, *parts)]
    columns = {
        "trees": [pieces[place] for place in packing.places],
        "tree_ids": [_tree_id(trees[tree]["input_ids"], indices[tree]) for tree in packing.trees],
        "num_parts": packing.num_parts.tolist(),
    }
    bounds = list(pairwise([0, *packing.ends]))
    return {name: [values[start:end] for start, end in bounds] for name, values in columns.items()}


def _tree_id(input_ids: npt.ArrayLike, index: int) -> int:
    """
    An id for the tree with this index and these tokens, in 63 bits.

    The index alone would name several trees: data sets are concatenated, and each worker that reads a stream counts
    from 0. The tokens alone would name equal trees of a data set alike.
    """
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8)
    digest.update(np.ascontiguousarray(input_ids, dtype=np.int64).tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1
