# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Branches, and the fold itself: which tokens the branches share, and the weights of those tokens.

The branches are sorted lexicographically, as bytes. Each is then compared with the one before it, whose path is the
open path of the trie: shared tokens are kept, the rest is new. One buffer holds the tree index of the token at each
depth of the open path, where a branch finds its tokens; a node is identified by its first token.

Cost: O(log B) byte comparisons of each branch for the sort, then a few vectorised passes; memory linear in the input.
Python steps over branches and nodes, never over tokens.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.tree import layout
from hf_prefix_tree.tree.layout import Float64Array, Int64Array

WEIGHTINGS = ("tree", "branch", "branch_mean", "once")
INT32_MAX = np.iinfo(np.int32).max
INT64_MAX = np.iinfo(np.int64).max


def integer_array(value: Any, name: str, minimum: int = 0, maximum: int = INT64_MAX) -> Int64Array:
    """Copy `value` to int64 `[L]`; a `ValueError` that names `name` if it isn't 1-D, integer and within the bounds."""
    array = _flat_array(value, name, "integers")
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    items = value if isinstance(value, (list, tuple)) else []
    # NumPy reads [5, True] as integers, so the types of a list's items are checked.
    if array.dtype.kind not in "iu" or {bool, np.bool_} & set(map(type, items)):
        for index, item in enumerate(items or array.tolist()):
            if isinstance(item, (bool, np.bool_)) or not isinstance(item, (int, np.integer)):
                raise ValueError(f"`{name}` must be integers, got {_short(item)} at index {index}; pass `int`s.")
        raise ValueError(f"`{name}` has the dtype {array.dtype}, got {_short(value)}; pass integers that fit int64.")
    if array.min() < minimum or array.max() > maximum:
        index = int(np.argmax((array < minimum) | (array > maximum)))
        raise ValueError(
            f"`{name}` must be between {minimum} and {maximum}, got {array[index]} at index {index}; replace it."
        )
    return array.astype(np.int64)


def weight_array(value: Any, name: str) -> Float64Array:
    """Copy `value` to float64 `[L]`; a `ValueError` that names `name` if it isn't 1-D, real, finite and >= 0."""
    array = _flat_array(value, name, "numbers")
    if array.size == 0:
        return np.empty(0, dtype=np.float64)
    if array.dtype.kind not in "fiub":
        raise ValueError(f"`{name}` must be real numbers, got {_short(value)}; pass one number per token.")
    weights = np.add(array, 0.0, dtype=np.float64)  # a copy, and -0.0 becomes 0.0
    if not (weights.min() >= 0.0 and weights.max() < np.inf):  # NaN fails every comparison
        index = int(np.argmin((weights >= 0.0) & (weights < np.inf)))
        raise ValueError(
            f"`{name}` must be finite and not negative, got {weights[index]} at index {index}; replace it "
            "(0 means not supervised)."
        )
    return weights


def as_list(value: Any, name: str) -> list[Any]:
    """`value` as a list; a `ValueError` that names `name` if it is none."""
    try:
        if isinstance(value, (str, bytes, Mapping)):
            raise TypeError("its entries are no items")
        return list(value)
    except TypeError as error:
        raise ValueError(f"`{name}` is {_short(value)}; pass a list.") from error


def parent_array(parents: Any) -> Int64Array:
    """The parent of each node as int64 `[M]`, -1 for a root, which may be given as `None`."""
    return integer_array([-1 if p is None else p for p in as_list(parents, "parents")], "parents", minimum=-1)


def check_choice(value: Any, name: str, choices: Iterable[str]) -> None:
    """A `ValueError` that names `name` unless `value` is one of some strings."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` is {_short(value)}; pass one of {', '.join(map(repr, choices))}.")


def check_type(value: Any, name: str, types: Any, remedy: str) -> Any:
    """`value`, if it is of one of the types; a `ValueError` that names `name` and what to pass otherwise."""
    if not isinstance(value, types):
        raise ValueError(f"`{name}` is a {type(value).__name__}; pass {remedy}.")
    return value


def check_mapping(value: Any, name: str, columns: Sequence[str] = ()) -> None:
    """A `ValueError` that names `name` unless `value` is a mapping that has something in each of the columns."""
    check_type(value, name, Mapping, "a dict of columns")
    if missing := [column for column in columns if value.get(column) is None]:
        raise ValueError(f"`{missing[0]}` is missing or null in {list(value)}; add it.")


def check_not_empty(items: Any, name: str) -> None:
    """A `ValueError` that names `name` if there are no items; a stream has no length, and passes."""
    if hasattr(items, "__len__") and not len(items):
        raise ValueError(f"`{name}` is empty; pass at least one entry, or drop it.")


def check_length(values: Any, name: str, expected: int, of: str) -> None:
    """A `ValueError` that names `name` unless it has one entry for each of the `expected` ones `of` something else."""
    if len(values) != expected:
        raise ValueError(f"`{name}` has {len(values)} entries for {expected} {of}; pass one for each.")


def check_integer(value: Any, name: str, least: int = 0) -> int:
    """`value`, if it is an integer of at least `least`; a `ValueError` that names `name` otherwise."""
    if type(value) is bool or not isinstance(value, (int, np.integer)) or not least <= value <= INT64_MAX:
        raise ValueError(f"`{name}` is {_short(value)}; pass an integer of at least {least}.")
    return int(value)


def _flat_array(value: Any, name: str, kind: str) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except Exception as error:  # an array-like may raise anything
        raise ValueError(f"`{name}` is no array ({error}); pass a flat list or 1-D array of {kind}.") from error
    if array.ndim != 1:
        raise ValueError(
            f"`{name}` has {array.ndim} dimensions, got {_short(value)}; pass a flat list or 1-D array of {kind}."
        )
    return array


_SHORT = reprlib.Repr()  # a few entries of a few levels
_SHORT.maxstring = _SHORT.maxother = 80
_short = _SHORT.repr


@dataclass(frozen=True, init=False, eq=False)
class Branch:
    """
    One root-to-leaf token sequence with a weight per token: one sample of ordinary training.

    The first token has no predecessor, so nothing predicts it: its weight is set to 0.

    Args:
        input_ids (array-like of `int`, shape `[L]`):
            Token ids, not negative.
        weights (array-like of `float`, shape `[L]`):
            Weight of each token in the loss, finite and not negative. 0 means not supervised.

    Raises:
        `ValueError`: If the branch is empty, the lengths differ, an id is not a non-negative integer, or a weight is
            negative, infinite or NaN.

    Example:

    ```python
    >>> from hf_prefix_tree import Branch

    >>> branch = Branch([7, 8, 9], weights=[1, 0, 1])
    >>> branch.input_ids
    array([7, 8, 9])
    >>> branch.weights
    array([0., 0., 1.])

    ```
    """

    input_ids: Int64Array
    weights: Float64Array

    def __init__(self, input_ids: npt.ArrayLike, weights: npt.ArrayLike) -> None:
        arrays = {"input_ids": integer_array(input_ids, "input_ids"), "weights": weight_array(weights, "weights")}
        check_not_empty(arrays["input_ids"], "input_ids")
        check_length(arrays["weights"], "weights", len(arrays["input_ids"]), "`input_ids`")
        arrays["weights"][0] = 0.0
        for name, array in arrays.items():
            array.setflags(write=False)
            object.__setattr__(self, name, array)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Branch):
            return NotImplemented
        return np.array_equal(self.input_ids, other.input_ids) and np.array_equal(self.weights, other.weights)

    def __reduce__(self) -> tuple[type[Branch], tuple[Any, ...]]:
        return Branch, (self.input_ids, self.weights)  # arrays come back from a pickle writable: go through the checks


def branches_of_nodes(parents: Any, input_ids: Any, weights: Any) -> list[Branch]:
    """The branches of explicit nodes. See `PrefixTree.from_nodes`."""
    parents = parent_array(parents)
    ids = [integer_array(x, f"input_ids[{node}]") for node, x in enumerate(as_list(input_ids, "input_ids"))]
    given = [np.ones(len(x)) for x in ids] if weights is None else as_list(weights, "weights")
    node_weights = [weight_array(w, f"weights[{node}]") for node, w in enumerate(given)]
    check_length(ids, "input_ids", len(parents), "`parents`")
    check_length(node_weights, "weights", len(parents), "`parents`")
    for node, (x, w) in enumerate(zip(ids, node_weights, strict=True)):
        check_length(w, f"weights[{node}]", len(x), f"`input_ids[{node}]`")
    return _branches_along(leaf_paths(parents.tolist()), ids, node_weights)


def branches_of_node_paths(input_ids: Any, node_lengths: Any, sample_paths: Any, weights: Any) -> list[Branch]:
    """The branches of a tree in NeMo's terms. See `PrefixTree.from_node_paths`."""
    ids = integer_array(input_ids, "input_ids")
    lengths = integer_array(node_lengths, "node_lengths", maximum=INT32_MAX)
    w = np.ones(len(ids)) if weights is None else weight_array(weights, "weights")
    check_length(w, "weights", len(ids), "`input_ids`")
    if lengths.sum() != len(ids):
        raise ValueError(f"`node_lengths` sums to {lengths.sum()} for {len(ids)} `input_ids`; make them agree.")
    check_not_empty(lengths, "node_lengths")
    given, last = enumerate(as_list(sample_paths, "sample_paths")), len(lengths) - 1
    paths = [integer_array(path, f"sample_paths[{index}]", maximum=last).tolist() for index, path in given]
    check_sample_paths(lengths.tolist(), paths)
    ends = np.cumsum(lengths)[:-1]
    return _branches_along(paths, np.split(ids, ends), np.split(w, ends))


def leaf_paths(parents: list[int]) -> list[list[int]]:
    """Path of nodes, root first, to every node without children. A `ValueError` names `parents` that are no forest."""
    check_not_empty(parents, "parents")
    for node, parent in enumerate(parents):
        if parent >= node:
            raise ValueError(
                f"`parents[{node}]` is {parent} of {len(parents)} nodes, not an earlier node; order the nodes parents "
                "first, and use -1 for a root."
            )
    paths = []
    for node in sorted(set(range(len(parents))) - set(parents)):
        path = []
        while node >= 0:
            path.append(node)
            node = parents[node]
        paths.append(path[::-1])
    return paths


def check_sample_paths(node_lengths: list[int], sample_paths: list[list[int]]) -> None:
    """A `ValueError` names `sample_paths` if the paths don't form a tree of all tokens. Indices are in range."""
    check_not_empty(sample_paths, "sample_paths")
    parents: dict[int, int] = {}
    for index, path in enumerate(sample_paths):
        for parent, node in zip([-1, *path], path, strict=False):
            if parent >= node:
                raise ValueError(
                    f"`sample_paths[{index}]` goes from node {parent} to node {node}; number the nodes parents first, "
                    "each once in a path."
                )
            if parents.setdefault(node, parent) != parent:
                raise ValueError(
                    f"`sample_paths[{index}]` gives node {node} the parent {parent}, an earlier path {parents[node]} "
                    "(-1: none); give every node one parent."
                )
    for node, length in enumerate(node_lengths):
        if length and node not in parents:
            raise ValueError(
                f"`sample_paths` never visits node {node} of {length} tokens; add its path or remove the node."
            )


def _branches_along(paths: list[list[int]], ids: list[Int64Array], weights: list[Float64Array]) -> list[Branch]:
    branches = []
    for path in paths:
        if not any(len(ids[node]) for node in path):
            raise ValueError(f"`input_ids` has no token on the path {path}; give it a token or drop it.")
        tokens = np.concatenate([ids[node] for node in path])
        branches.append(Branch(tokens, np.concatenate([weights[node] for node in path])))
    return branches


def fold_branches(branches: Sequence[Branch], weighting: str) -> dict[str, Any]:
    """Fold a non-empty list of branches: the stored state of a `PrefixTree`. See `hf_prefix_tree.fold`."""
    order = sorted_order([branch.input_ids for branch in branches])
    ids = [branches[b].input_ids for b in order]
    lengths = np.array([len(x) for x in ids])
    shared = common_prefixes(ids)
    num_tokens = int((lengths - shared).sum())
    if num_tokens > INT32_MAX:
        raise ValueError(f"`branches` fold to {num_tokens} tokens, int32 ends at {INT32_MAX}; fold fewer.")
    first_new = layout.node_starts(lengths - shared)  # tree index of each branch's first new token
    tree_ids = np.concatenate([x[prefix:] for x, prefix in zip(ids, shared.tolist(), strict=True)])

    # The open path: tree index of its token at each depth.
    path = np.empty(lengths.max(), dtype=np.int64)
    above, split, paths = [], [], []  # per branch: token above its new ones, that token's open child, all its tokens
    open_length = 0
    for prefix, length, start in zip(shared.tolist(), lengths.tolist(), first_new.tolist(), strict=True):
        above.append(path[prefix - 1] if prefix else -1)
        split.append(path[prefix] if prefix < open_length else -1)
        path[prefix:length] = np.arange(start, start + length - prefix)
        paths.append(path[:length].copy())
        open_length = length
    raw = np.concatenate([branches[b].weights for b in order])
    weights, count = folded_weights(np.concatenate(paths), raw, lengths, len(branches), weighting)

    # A node starts with a branch's first new token, and with the token where it leaves the open path: two children of
    # the token `above`.
    new = np.where(lengths > shared, first_new, -1)
    starts, where = np.unique(np.concatenate([[-1], new, split]), return_index=True)
    starts, where = starts[1:], where[1:] - 1  # without the -1 of branches that start no node
    parents = np.searchsorted(starts, np.concatenate([above, above])[where], side="right") - 1
    node_lengths = np.diff(starts, append=num_tokens)
    branch_nodes = np.empty(len(order), dtype=np.int64)
    branch_nodes[order] = np.searchsorted(starts, [path[-1] for path in paths], side="right") - 1

    nodes, new_index = layout.heavy_first_order(node_lengths, parents, branch_nodes)
    tokens = layout.ranges(starts[nodes], node_lengths[nodes])
    return {
        "input_ids": tree_ids[tokens],
        "node_lengths": node_lengths[nodes],
        "node_parents": new_index[parents[nodes]],
        "weights": weights[tokens],
        "branch_count": count[tokens],
        "num_branches": len(branches),
        "weighting": weighting,
        "branch_nodes": new_index[branch_nodes],
        **_weight_runs([branch.weights for branch in branches]),
    }


def sorted_order(ids: list[Int64Array]) -> list[int]:
    """Indices of the branches in lexicographic order; equal branches keep theirs."""
    flat = np.concatenate(ids)
    # Big-endian integers of one width compare as bytes, and `bytes` puts a strict prefix first.
    dtype = np.dtype(">u4" if flat.max() < 2**32 else ">u8")
    data = flat.astype(dtype).tobytes()
    ends = itertools.accumulate(len(x) * dtype.itemsize for x in ids)
    keys = [data[end - len(x) * dtype.itemsize : end] for x, end in zip(ids, ends, strict=True)]
    return sorted(range(len(ids)), key=keys.__getitem__)


def common_prefix(first: Int64Array, second: Int64Array) -> int:
    """Number of tokens that two sequences share at their start."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def common_prefixes(ids: list[Int64Array]) -> Int64Array:
    """Number of tokens that each branch shares with the one before it, 0 for the first."""
    return np.array([0, *itertools.starmap(common_prefix, itertools.pairwise(ids))])


def folded_weights(
    positions: Int64Array, weights: Float64Array, lengths: Int64Array, num_branches: int, weighting: str
) -> tuple[Float64Array, Int64Array]:
    """The weights and g of a tree's tokens, from the `positions` and `weights` of its branches, one after another."""
    count = np.bincount(positions[weights > 0], minlength=positions.max() + 1)
    if weighting == "branch_mean":
        supervised = np.add.reduceat(weights > 0, layout.node_starts(lengths), dtype=np.int64)
        weights = weights / np.repeat(np.maximum(supervised, 1), lengths)
    total: Any = np.bincount(positions, weights)
    with np.errstate(over="ignore"):
        weight = total.sum()  # the divisor of the loss; no token and no branch weighs more
    if not weight < np.inf:
        raise ValueError(f"`weights` of the branches add up to {weight} over the tree; scale all of them down.")
    if weighting == "tree":
        total = total / num_branches
    elif weighting == "once":
        total = total / np.maximum(count, 1)
    return total, count


def _weight_runs(weights: list[Float64Array]) -> dict[str, npt.NDArray[Any]]:
    """Run-length encoding of every branch's weights: runs per branch, tokens per run, value of each run."""
    flat = np.concatenate(weights)
    starts_run = np.append(True, flat[1:] != flat[:-1])
    ends = np.cumsum([len(w) for w in weights])
    starts_run[ends[:-1]] = True  # a run never spans two branches
    (starts,) = starts_run.nonzero()
    run_counts = np.diff(np.searchsorted(starts, ends), prepend=0)
    return {"run_counts": run_counts, "run_lengths": np.diff(starts, append=len(flat)), "run_values": flat[starts]}
