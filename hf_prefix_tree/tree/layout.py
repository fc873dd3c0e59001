# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Node tables: their order, and the three integers per token that the mask, the positions and the labels need.

A node table is two integer arrays over M nodes: `node_lengths` (tokens of each node) and `node_parents` (index of the
parent, -1 for a root; a parent comes before its children). Laid out in DFS preorder, every subtree is one contiguous
range of tokens, so `subtree_end` alone is the attention mask.

Cost: O(M) Python steps over nodes, vectorised over tokens; memory O(M + N). Nothing recurses.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

MAXIMA = ("longest_path", "depth")  # the fields of `TreeStats` that don't add up


@dataclasses.dataclass(frozen=True)
class TreeStats:
    """
    Counts of one tree, or of several: statistics add up with `+` (the two maxima stay maxima).

    Args:
        branches (`int`): Branches.
        branch_tokens (`int`): Tokens of all branches, which training branch by branch computes.
        tree_tokens (`int`): Tokens of the tree.
        branch_pairs (`int`): Visible query-key pairs of causal attention over every branch, diagonal included.
        tree_pairs (`int`): Visible query-key pairs of the tree, diagonal included.
        longest_path (`int`): Tokens of the longest branch.
        depth (`int`): Largest number of nodes on a path.
        nodes (`int`): Nodes.
        supervised_tokens (`int`): Tokens of the tree with a weight above 0.
    """

    branches: int
    branch_tokens: int
    tree_tokens: int
    branch_pairs: int
    tree_pairs: int
    longest_path: int
    depth: int
    nodes: int
    supervised_tokens: int

    @property
    def token_ratio(self) -> float:
        """Tokens of the branches per token of the tree."""
        return self.branch_tokens / self.tree_tokens

    @property
    def pair_ratio(self) -> float:
        """Attention pairs of the branches per pair of the tree."""
        return self.branch_pairs / self.tree_pairs

    def __add__(self, other: TreeStats) -> TreeStats:
        pairs = {f.name: (getattr(self, f.name), getattr(other, f.name)) for f in dataclasses.fields(self)}
        return TreeStats(**{name: max(pair) if name in MAXIMA else sum(pair) for name, pair in pairs.items()})


def heavy_first_order(
    node_lengths: IntArray, node_parents: IntArray, branch_nodes: IntArray
) -> tuple[Int64Array, Int64Array]:
    """
    DFS preorder of the nodes with the heaviest child first, so that the longest shared work is one contiguous run.

    The weight of a child is the number of tokens in its subtree, including the child. Ties go to the child that an
    earlier branch passes through. Roots are ordered in the same way.

    Args:
        node_lengths (`np.ndarray` of shape `[M]`):
            Tokens of each node.
        node_parents (`np.ndarray` of shape `[M]`):
            Parent of each node, -1 for a root. A parent comes before its children.
        branch_nodes (`np.ndarray` of shape `[B]`):
            The node that each branch ends with.

    Returns:
        `tuple`: the nodes in their new order, int64 `[M]`, and the new index of each node, int64 `[M + 1]`; its last
        entry is -1, the index that the parent of a root keeps.

    Example:

    ```python
    >>> # a trunk of 2 tokens with children of 1 and 3 tokens
    >>> heavy_first_order(np.array([2, 1, 3]), np.array([-1, 0, 0]), np.array([1, 2]))
    (array([0, 2, 1]), array([ 0,  2,  1, -1]))

    ```
    """
    parents, tokens_below = node_parents.tolist(), node_lengths.tolist()
    first_branches = np.full(len(parents), len(branch_nodes))
    np.minimum.at(first_branches, branch_nodes, np.arange(len(branch_nodes)))
    first_seen = first_branches.tolist()
    for node in range(len(parents) - 1, -1, -1):
        if parents[node] >= 0:
            tokens_below[parents[node]] += tokens_below[node]
            first_seen[parents[node]] = min(first_seen[parents[node]], first_seen[node])
    # Lightest and latest first: the last child pushed on the stack, the heaviest, is the next one to leave it.
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # the last list holds the roots (parent -1)
    for node in np.lexsort((-np.array(first_seen), np.array(tokens_below))).tolist():
        children[parents[node]].append(node)
    order: list[int] = []
    stack = children[-1]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(children[node])
    new_index = np.full(len(order) + 1, -1)
    new_index[order] = np.arange(len(order))
    return np.array(order, dtype=np.int64), new_index


def first_out_of_preorder(node_parents: IntArray) -> int | None:
    """Index of the first node whose parent is not on the path of the node before it, `None` if all are in preorder."""
    path: list[int] = [-1]
    for node, parent in enumerate(node_parents.tolist()):
        while path and path[-1] != parent:
            path.pop()
        if not path:
            return node
        path.append(node)
    return None


def node_starts(node_lengths: IntArray) -> Int64Array:
    """Index of each node's first token, int64 `[M]`."""
    ends = np.cumsum(node_lengths, dtype=np.int64)
    return ends - node_lengths


def ranges(starts: IntArray, lengths: IntArray) -> Int64Array:
    """`start, ..., start + length - 1` of every range, one after another, int64."""
    return np.repeat(starts - node_starts(lengths), lengths) + np.arange(lengths.sum(dtype=np.int64))


def node_depths(node_lengths: IntArray, node_parents: IntArray) -> Int64Array:
    """Tokens above each node on its path (the depth of its first token), int64 `[M]`."""
    lengths = node_lengths.tolist()
    tops = [0] * len(lengths)
    for node, parent in enumerate(node_parents.tolist()):
        if parent >= 0:
            tops[node] = tops[parent] + lengths[parent]
    return np.array(tops, dtype=np.int64)


def depth(node_lengths: IntArray, node_parents: IntArray) -> Int32Array:
    """
    Number of tokens before each token on its path: the RoPE position.

    Args:
        node_lengths (`np.ndarray` of shape `[M]`), node_parents (`np.ndarray` of shape `[M]`):
            A node table in preorder.

    Returns:
        `np.ndarray` of shape `[N]`, int32: 0 at a root's first token, +1 along the path.

    Example:

    ```python
    >>> depth(np.array([2, 3, 1]), np.array([-1, 0, 0])).tolist()
    [0, 1, 2, 3, 4, 2]

    ```
    """
    index = np.arange(node_lengths.sum(), dtype=np.int32)
    # Inside a node, depth and index grow together: only their difference changes from node to node.
    offset = node_depths(node_lengths, node_parents) - node_starts(node_lengths)
    return index + np.repeat(offset.astype(np.int32), node_lengths)


def subtree_end(node_lengths: IntArray, node_parents: IntArray) -> Int32Array:
    """
    One past the last token of each token's subtree: key `k` is visible to query `q` iff `k <= q < subtree_end[k]`.

    Args:
        node_lengths (`np.ndarray` of shape `[M]`), node_parents (`np.ndarray` of shape `[M]`):
            A node table in preorder.

    Returns:
        `np.ndarray` of shape `[N]`, int32.

    Example:

    ```python
    >>> subtree_end(np.array([2, 3, 1]), np.array([-1, 0, 0])).tolist()
    [6, 6, 5, 5, 5, 6]

    ```
    """
    parents = node_parents.tolist()
    ends = np.cumsum(node_lengths, dtype=np.int64).tolist()
    # In preorder a subtree ends where its last node ends, and this loop visits that node before its ancestors.
    for node in range(len(parents) - 1, -1, -1):
        parent = parents[node]
        if parent >= 0 and ends[parent] < ends[node]:
            ends[parent] = ends[node]
    return np.repeat(np.array(ends, dtype=np.int32), node_lengths)


def predecessor(node_lengths: IntArray, node_parents: IntArray) -> Int32Array:
    """
    Index of the token before each token on its path: token `t` is predicted from the hidden state there.

    Args:
        node_lengths (`np.ndarray` of shape `[M]`), node_parents (`np.ndarray` of shape `[M]`):
            A node table in preorder; every node has at least one token.

    Returns:
        `np.ndarray` of shape `[N]`, int32: -1 at a root's first token.

    Example:

    ```python
    >>> predecessor(np.array([2, 3, 1]), np.array([-1, 0, 0])).tolist()
    [-1, 0, 1, 2, 3, 1]

    ```
    """
    before = np.arange(-1, node_lengths.sum() - 1, dtype=np.int32)
    starts = node_starts(node_lengths)
    last = starts + node_lengths - 1
    before[starts] = np.where(node_parents >= 0, last[node_parents], -1)
    return before


def branch_positions(node_lengths: IntArray, node_parents: IntArray, branch_nodes: IntArray) -> list[Int64Array]:
    """
    Token indices of every branch, root to end, in the order of `branch_nodes`.

    Args:
        node_lengths (`np.ndarray` of shape `[M]`), node_parents (`np.ndarray` of shape `[M]`):
            A node table in preorder.
        branch_nodes (`np.ndarray` of shape `[B]`):
            The node that each branch ends with.

    Returns:
        `list` of B int64 arrays.

    Example:

    ```python
    >>> [p.tolist() for p in branch_positions(np.array([2, 3, 1]), np.array([-1, 0, 0]), np.array([2, 1]))]
    [[0, 1, 5], [0, 1, 2, 3, 4]]

    ```
    """
    starts = node_starts(node_lengths).tolist()
    lengths = node_lengths.tolist()
    tops = node_depths(node_lengths, node_parents).tolist()
    path = np.empty(max(top + length for top, length in zip(tops, lengths, strict=True)), dtype=np.int64)
    positions: list[Int64Array] = [path] * len(branch_nodes)
    ends = branch_nodes.tolist()
    done = 0
    # One walk in preorder. `path` holds the token index at every depth of the open path: entries above a node's first
    # depth belong to its ancestors.
    for branch in np.argsort(branch_nodes, kind="stable").tolist():
        for node in range(done, ends[branch] + 1):
            path[tops[node] : tops[node] + lengths[node]] = np.arange(starts[node], starts[node] + lengths[node])
        done = ends[branch] + 1
        positions[branch] = path[: tops[done - 1] + lengths[done - 1]].copy()
    return positions
