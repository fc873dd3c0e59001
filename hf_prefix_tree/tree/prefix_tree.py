# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The prefix tree: `fold` makes it, datasets store it, a model trains on it, and it unfolds into its branches.

`PrefixTree` stores the tokens in layout order, the node table, the folded weights and, to unfold without loss, each
branch's last node and its weights, run-length encoded. The integers that a model needs per token are derived.

Cost: construction and every property are O(N) vectorised plus O(M) Python steps over nodes; unfolding is linear in the
tokens of the branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.tree import folding, layout
from hf_prefix_tree.tree.folding import Branch
from hf_prefix_tree.tree.html import tree_html
from hf_prefix_tree.tree.layout import TreeStats

__all__ = ["Branch", "PrefixTree", "TreeStats", "fold"]

_INT32_MINIMA = {"node_lengths": 1, "node_parents": -1, "branch_count": 0}
_INT32_MINIMA |= {"branch_nodes": 0, "run_counts": 1, "run_lengths": 1}


@dataclass(frozen=True, eq=False, repr=False)
class PrefixTree:
    """
    A folded set of branches in DFS preorder, heaviest child first. [`fold`] makes it; it is read-only.

    N tokens, M nodes, B branches, R runs. The constructor takes the stored state and checks it.

    Args:
        input_ids (`np.ndarray` of shape `[N]`, int64):
            Tokens in layout order.
        node_lengths (`np.ndarray` of shape `[M]`, int32):
            Tokens of each node, at least 1.
        node_parents (`np.ndarray` of shape `[M]`, int32):
            Parent of each node, -1 for a root. In preorder.
        weights (`np.ndarray` of shape `[N]`, float64):
            Training weight of each token. 0 at a root's first token, which nothing predicts.
        branch_count (`np.ndarray` of shape `[N]`, int32):
            g_t: number of branches that supervise each token.
        num_branches (`int`):
            K: number of branches that the weights refer to. B, unless the tree is a part of a split one.
        weighting (`str`):
            How `weights` follow from the branches' weights, see [`fold`].
        branch_nodes (`np.ndarray` of shape `[B]`, int32):
            The node that each branch ends with, in the order of the branches.
        run_counts (`np.ndarray` of shape `[B]`, int32), run_lengths (`np.ndarray` of shape `[R]`, int32), \
        run_values (`np.ndarray` of shape `[R]`, float64):
            Run-length encoding of each branch's weights along its path.

    Raises:
        `ValueError`: If the arrays don't describe a tree. The message names the array.

    Example:

    ```python
    >>> from hf_prefix_tree import Branch, fold

    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1])])
    >>> tree.input_ids
    array([5, 6, 8, 9, 7])
    >>> tree.weights
    array([0. , 1. , 0.5, 0.5, 0.5])
    >>> tree.subtree_end
    array([5, 5, 4, 4, 5], dtype=int32)

    ```
    """

    input_ids: npt.NDArray[np.int64]
    node_lengths: npt.NDArray[np.int32]
    node_parents: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float64]
    branch_count: npt.NDArray[np.int32]
    num_branches: int
    weighting: str
    branch_nodes: npt.NDArray[np.int32]
    run_counts: npt.NDArray[np.int32]
    run_lengths: npt.NDArray[np.int32]
    run_values: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        folding.check_choice(self.weighting, "weighting", folding.WEIGHTINGS)
        num_branches = folding.integer_array([self.num_branches], "num_branches", 1, folding.INT32_MAX).item()
        object.__setattr__(self, "num_branches", num_branches)
        arrays: dict[str, npt.NDArray[Any]] = {"input_ids": folding.integer_array(self.input_ids, "input_ids")}
        for name, minimum in _INT32_MINIMA.items():
            integers = folding.integer_array(getattr(self, name), name, minimum, folding.INT32_MAX)
            arrays[name] = integers.astype(np.int32)
        for name in ("weights", "run_values"):
            given = getattr(self, name)
            arrays[name] = folding.weight_array(given, name)
            if not isinstance(given, list) and np.asarray(given).dtype in (np.float16, np.float32):
                raise ValueError(
                    f"`{name}` is {given.dtype}, which rounds the weights; read dataset rows in the default format of "
                    "`datasets`, or pass float64."
                )
        for name, array in arrays.items():
            object.__setattr__(self, name, _read_only(array))
        for name, problem in self._problems():
            raise ValueError(f"`{name}` {problem}; the tree is corrupt: fold its branches again.")

    def _problems(self) -> Iterator[tuple[str, str]]:
        """The problems of the stored state, as (argument, problem). Later checks rely on earlier ones."""
        num_tokens, num_nodes, num_branches = len(self), len(self.node_lengths), len(self.branch_nodes)
        for name, expected in {
            "input_ids": max(num_tokens, 1),
            "node_parents": num_nodes,
            "weights": num_tokens,
            "branch_count": num_tokens,
            "branch_nodes": max(num_branches, 1),
            "run_counts": num_branches,
            "run_lengths": self.run_counts.sum(dtype=np.int64),
            "run_values": len(self.run_lengths),
        }.items():
            if len(getattr(self, name)) != expected:
                yield name, f"has {len(getattr(self, name))} entries instead of {expected}"
        if self.node_lengths.sum(dtype=np.int64) != num_tokens:
            yield "node_lengths", f"doesn't sum to the {num_tokens} tokens of `input_ids`"
        node = layout.first_out_of_preorder(self.node_parents)
        if node is not None:
            yield "node_parents", f"gives node {node} the parent {self.node_parents[node]}, which is not preorder"
        if self.branch_nodes.max() >= num_nodes:
            yield "branch_nodes", f"has node {self.branch_nodes.max()} of {num_nodes} nodes"
        passed = np.zeros(num_nodes + 1, dtype=bool)
        passed[self.branch_nodes] = passed[self.node_parents] = True  # the last entry is for the parent of roots, -1
        if not passed[:-1].all():
            yield "branch_nodes", f"has no branch through node {passed.argmin()}"
        first_runs = layout.node_starts(self.run_counts)
        run_tokens = np.add.reduceat(self.run_lengths, first_runs, dtype=np.int64)
        if (run_tokens != self.branch_lengths).any():
            branch = (run_tokens != self.branch_lengths).argmax()
            yield "run_lengths", f"sums to {run_tokens[branch]} for branch {branch}, not to its tokens"
        if self.run_values[first_runs].any():
            yield "run_values", "is not 0 at a branch's first token, which has no predecessor"
        if self.weights[self.node_starts[self.node_parents == -1]].any():
            yield "weights", "is not 0 at a root's first token, which has no predecessor"
        if self.weights[self.branch_count == 0].any():
            yield "branch_count", "is 0 at a token with a weight above 0"
        if self.num_branches < max(num_branches, self.branch_count.max()):
            yield "num_branches", f"is {self.num_branches}, below the number of branches or a `branch_count`"
        supervised = self.run_lengths[self.run_values > 0].sum(dtype=np.int64)
        if self.num_branches == num_branches and self.branch_count.sum(dtype=np.int64) != supervised:
            yield "branch_count", f"doesn't sum to the {supervised} tokens that the branches supervise"

    @cached_property
    def depth(self) -> npt.NDArray[np.int32]:
        """Tokens before each token on its path, int32 `[N]`: the position for RoPE."""
        return _read_only(layout.depth(self.node_lengths, self.node_parents))

    @cached_property
    def subtree_end(self) -> npt.NDArray[np.int32]:
        """End of each token's subtree, int32 `[N]`: query `q` sees key `k` iff `k <= q < subtree_end[k]`."""
        return _read_only(layout.subtree_end(self.node_lengths, self.node_parents))

    @cached_property
    def predecessor(self) -> npt.NDArray[np.int32]:
        """Index of the token before each token on its path, int32 `[N]`; -1 at a root's first token."""
        return _read_only(layout.predecessor(self.node_lengths, self.node_parents))

    @cached_property
    def node_starts(self) -> npt.NDArray[np.int64]:
        """Index of each node's first token, int64 `[M]`."""
        return _read_only(layout.node_starts(self.node_lengths))

    @cached_property
    def branch_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each branch, int64 `[B]`."""
        ends = layout.node_depths(self.node_lengths, self.node_parents) + self.node_lengths
        return _read_only(ends[self.branch_nodes])

    def __len__(self) -> int:
        return len(self.input_ids)

    def __repr__(self) -> str:
        sizes = f"tokens={len(self)}, nodes={len(self.node_lengths)}, branches={len(self.branch_nodes)}"
        return f"PrefixTree({sizes}, weighting={self.weighting!r})"

    def _repr_html_(self) -> str:
        return tree_html(self)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixTree):
            return NotImplemented
        return all(np.array_equal(value, getattr(other, name)) for name, value in self.to_dict().items())

    def __reduce__(self) -> tuple[type[PrefixTree], tuple[Any, ...]]:
        # without derived arrays; unpickled arrays are writable, so check them again
        return PrefixTree, tuple(self.to_dict().values())

    def paths(self) -> list[npt.NDArray[np.int64]]:
        """
        Indices of each branch's tokens in the layout, root first, in the order of `branches()`.

        Example:

        ```python
        >>> from hf_prefix_tree import Branch, fold

        >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1])])
        >>> [path.tolist() for path in tree.paths()]
        [[0, 1, 4], [0, 1, 2, 3]]

        ```
        """
        return layout.branch_positions(self.node_lengths, self.node_parents, self.branch_nodes)

    def branches(self) -> list[Branch]:
        """
        Unfold: every branch with its weights, in the order in which they were folded, without loss.

        `fold(tree.branches(), weighting=tree.weighting)` equals `tree`, unless it is a part of a split tree.
        """
        weights = np.split(np.repeat(self.run_values, self.run_lengths), np.cumsum(self.branch_lengths)[:-1])
        return [Branch(self.input_ids[path], w) for path, w in zip(self.paths(), weights, strict=True)]

    def stats(self) -> TreeStats:
        """Counts of the tree and of its branches."""
        lengths = self.branch_lengths
        levels = layout.node_depths(np.ones_like(self.node_lengths), self.node_parents) + 1
        return TreeStats(
            branches=len(lengths),
            branch_tokens=int(lengths.sum()),
            tree_tokens=len(self),
            branch_pairs=int((lengths * (lengths + 1) // 2).sum()),
            tree_pairs=int(self.depth.sum(dtype=np.int64)) + len(self),
            longest_path=int(lengths.max()),
            depth=int(levels.max()),
            nodes=len(levels),
            supervised_tokens=int(np.count_nonzero(self.weights)),
        )

    def to_dict(self) -> dict[str, npt.NDArray[Any] | int | str]:
        """The stored state as a flat dictionary: a dataset row."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any]) -> PrefixTree:
        """
        The tree of a dictionary from `to_dict`, also after a round trip through Arrow. Unknown keys are ignored.

        Raises:
            `ValueError`: If a column is missing, the columns don't describe a tree, or its weights are not those of
                its branches. The message names the column.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        folding.check_mapping(mapping, "mapping", names)
        tree = cls(*(mapping[name] for name in names))
        if tree.num_branches == len(tree.branch_nodes):  # a part of a split tree has the weights of the whole tree
            positions, weights = np.concatenate(tree.paths()), np.repeat(tree.run_values, tree.run_lengths)
            expected = folding.folded_weights(
                positions, weights, tree.branch_lengths, tree.num_branches, tree.weighting
            )
            for name, values in zip(("weights", "branch_count"), expected, strict=True):
                if not np.allclose(getattr(tree, name), values, rtol=1e-9, atol=1e-300):
                    raise ValueError(f"`{name}` contradicts `run_values`; fold the tree's branches again.")
        return tree

    @classmethod
    def from_nodes(
        cls,
        parents: Sequence[int | None],
        input_ids: Sequence[npt.ArrayLike],
        weights: Sequence[npt.ArrayLike] | None = None,
        weighting: str = "tree",
    ) -> PrefixTree:
        """
        Fold a tree that is given by its nodes. Every node without children ends a branch.

        The branches are folded again, so siblings that start with the same tokens merge. A node may be empty.

        Args:
            parents (sequence of `int` or `None`):
                Parent of each node, -1 or `None` for a root. A parent comes before its children.
            input_ids (sequence of array-likes of `int`):
                Token ids of each node.
            weights (sequence of array-likes of `float`, *optional*):
                Weights of each node's tokens, for every branch through it. 1 if not given.
            weighting (`str`, *optional*, defaults to `"tree"`):
                See [`fold`].

        Raises:
            `ValueError`: If there is no node, the lengths differ, a parent is out of range, its own child or after it,
                or a path has no token.

        Example:

        ```python
        >>> tree = PrefixTree.from_nodes([None, 0, 0], [[5, 6], [7], [8, 9]])
        >>> tree.input_ids
        array([5, 6, 8, 9, 7])

        ```
        """
        return fold(folding.branches_of_nodes(parents, input_ids, weights), weighting)

    def to_node_paths(self) -> tuple[list[int], list[list[int]]]:
        """
        The tree in NeMo's terms: tokens of each node, and the nodes of each branch. Weights are not part of it.

        Example:

        ```python
        >>> PrefixTree.from_nodes([None, 0, 0], [[5, 6], [7], [8, 9]]).to_node_paths()
        ([2, 2, 1], [[0, 2], [0, 1]])

        ```
        """
        nodes = layout.branch_positions(np.ones_like(self.node_lengths), self.node_parents, self.branch_nodes)
        return self.node_lengths.tolist(), [path.tolist() for path in nodes]

    @classmethod
    def from_node_paths(
        cls,
        input_ids: npt.ArrayLike,
        node_lengths: npt.ArrayLike,
        sample_paths: Sequence[Sequence[int]],
        weights: npt.ArrayLike | None = None,
        weighting: str = "tree",
    ) -> PrefixTree:
        """
        Fold a tree that is given in NeMo's terms. The branches are folded again, so equal prefixes merge.

        Args:
            input_ids (array-like of `int`, shape `[N]`):
                Tokens, node after node.
            node_lengths (array-like of `int`, shape `[M]`):
                Tokens of each node. An empty node may be on a path or on none.
            sample_paths (sequence of sequences of `int`):
                Nodes of each branch, root first, in ascending order.
            weights (array-like of `float`, shape `[N]`, *optional*):
                Weight of each token, for every branch through it. 1 if not given.
            weighting (`str`, *optional*, defaults to `"tree"`):
                See [`fold`].

        Raises:
            `ValueError`: If the lengths differ, a path has a node out of range, twice or before its parent, a node has
                two parents, tokens are on no path, or a path has no token.
        """
        return fold(folding.branches_of_node_paths(input_ids, node_lengths, sample_paths, weights), weighting)


def fold(branches: Iterable[Branch], weighting: str = "tree") -> PrefixTree:
    """
    Fold branches into a prefix tree. Tokens merge when they and all tokens before them are equal; their weights add.

    A branch that ends inside another one and a branch that occurs twice both count. Branches that start differently
    become several roots.

    Args:
        branches (iterable of [`Branch`]):
            At least one.
        weighting (`str`, *optional*, defaults to `"tree"`):
            Weight of a tree token, from the weights w of the branches through it:

            - `"tree"`: their sum over K, the number of branches given, those that supervise nothing included (g_t / K
              where the weights are 0 and 1).
            - `"branch"`: their sum, as if the branches were trained one by one.
            - `"branch_mean"`: the sum of w / n, where n is how many tokens the branch supervises.
            - `"once"`: their sum over g_t, so that every supervised token of the tree counts once.

    Returns:
        [`PrefixTree`]

    Raises:
        `ValueError`: If there is no branch, an item is not a [`Branch`], the weighting is unknown, or weights add up
            to infinity.

    Example:

    ```python
    >>> from hf_prefix_tree import Branch, fold

    >>> tree = fold([Branch([5, 6], [0, 1]), Branch([5, 6, 7], [0, 1, 1])], weighting="branch")
    >>> tree.input_ids, tree.weights
    (array([5, 6, 7]), array([0., 2., 1.]))
    >>> tree.stats().token_ratio
    1.6666666666666667

    ```
    """
    folding.check_choice(weighting, "weighting", folding.WEIGHTINGS)
    items = folding.as_list(branches, "branches")
    for index, item in enumerate(items):
        if not isinstance(item, Branch):
            raise ValueError(f"`branches[{index}]` is a {type(item).__name__}; make it a `Branch`.")
    folding.check_not_empty(items, "branches")
    return PrefixTree(**folding.fold_branches(items, weighting))


def _read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array.setflags(write=False)
    return array
