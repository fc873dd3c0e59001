# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The cut of a row into segments: runs of tokens that a scan may read in row order.

A segment is a node of the tree: it starts at a root or at a child of a branch point, and continues from the state that
its parent segment ended in. Segments of one level (as many segments above them) do not depend on each other. Padding
belongs to no segment.

Built once per call, on the host: one wait for the device, O(N) vectorised plus O(segments) Python steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree.layout import Int64Array, ranges

SHORTEST_ROW = 64  # tokens; segments up to it share a padded batch: the chunk size of most scans


class Batch(NamedTuple):
    """The segments of one call of a scan: one after another, or as the rows of a padded batch."""

    tokens: torch.Tensor  # [1, T] or [segments, longest], int64: positions in the flattened rows
    padding: torch.Tensor | None  # bool of the same shape, `None` where nothing is padded
    bounds: torch.Tensor | None  # int64 [segments + 1]: where segments start and end in [1, T]; `None` where padded
    first: int | None = None  # where the tokens begin, if they follow one another

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """The tokens of the segments, zero where padded: `(B * N, ...)` to `(*tokens.shape, ...)`."""
        if self.first is not None:
            return flat.narrow(0, self.first, self.tokens.shape[1])[None]
        taken = flat.index_select(0, self.tokens.reshape(-1)).view(*self.tokens.shape, *flat.shape[1:])
        if self.padding is None:
            return taken
        return taken.masked_fill(self.padding.view(*self.padding.shape, *[1] * (flat.dim() - 1)), 0)


class Schedule(NamedTuple):
    """Some segments, arranged for as few calls as their layout allows."""

    order: Int64Array  # the segments in the order in which the calls give their states
    batches: list[Batch]
    counts: list[int]  # segments of each call
    tokens: Int64Array  # what the calls give, flattened and one after another: the token, -1 where padded


class Segments:
    """
    The segments of a batch of rows, in preorder; positions count through all rows.

    Args:
        context ([`TreeContext`]): The call's tree.

    Example:

    ```python
    >>> import torch
    >>> # a trunk of 2 tokens with children of 2 and 1 tokens
    >>> tree = torch.tensor([[[5, 5, 4, 4, 5], [0, 1, 2, 3, 2], [-1, 0, 1, 2, 1]]], dtype=torch.int32)
    >>> segments = Segments(TreeContext(tree))
    >>> segments.start.tolist(), segments.length.tolist(), segments.parent.tolist(), segments.level.tolist()
    ([0, 2, 4], [2, 2, 1], [-1, 0, 0], [0, 1, 1])

    ```
    """

    def __init__(self, context: TreeContext) -> None:
        self.device = context.prefix_tree.device
        self.predecessor = context.predecessor.cpu().numpy()
        self.num_tokens = len(self.predecessor)
        nodes, parents = context.nodes.cpu().numpy(), context.parents.cpu().numpy()
        start, length = nodes[:-1], np.diff(nodes)
        is_real = np.ones(len(start), bool)
        if context.attention_mask is not None:
            unreal = context.attention_mask.reshape(-1).cpu().numpy()[start] == 0
            has_child = np.bincount(parents + 1, minlength=len(start) + 1)[1:] > 0
            is_real = ~(unreal & (parents < 0) & (length == 1) & ~has_child)
            is_real[0] |= not is_real.any()  # of rows that are all padding one token, so that every layer has work
        renumbered = np.append(np.cumsum(is_real) - 1, -1)
        self.start, self.length = start[is_real], length[is_real]
        self.parent = renumbered[parents[is_real]]
        level: list[int] = []
        for parent in self.parent.tolist():  # parents come before their children
            level.append(level[parent] + 1 if parent >= 0 else 0)
        self.level = np.array(level, dtype=np.int64)
        self.num_levels = max(level, default=0) + 1
        self.is_parent = np.zeros(len(level), bool)
        self.is_parent[self.parent[self.parent >= 0]] = True
        self._schedules: dict[tuple[bytes, bool], Schedule] = {}
        self._indices: dict[str, tuple[torch.Tensor, ...]] = {}

    def schedule(self, segments: Int64Array, *, padded: bool) -> Schedule:
        """
        The calls that scan these segments: one, or one for each power of two of lengths where they are padded.

        Args:
            segments (`np.ndarray` of shape `[S]`): Indices of the segments.
            padded (`bool`): Whether the scan takes a padded batch instead of one segment after another.
        """
        key = (segments.tobytes(), padded)
        if key not in self._schedules:
            self._schedules[key] = self._padded(segments) if padded else self._in_a_line(segments)
        return self._schedules[key]

    def indices(self, name: str, build: Callable[[], tuple[Int64Array, ...]]) -> tuple[torch.Tensor, ...]:
        """What `build` gives, as tensors on the device; built once under this name."""
        if name not in self._indices:
            self._indices[name] = tuple(torch.from_numpy(values).to(self.device) for values in build())
        return self._indices[name]

    def _in_a_line(self, segments: Int64Array) -> Schedule:
        lengths = self.length[segments]
        tokens = ranges(self.start[segments], lengths)
        bounds = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)])).to(self.device)
        follow = np.array_equal(tokens, np.arange(tokens[0], tokens[0] + len(tokens)))
        first = int(tokens[0]) if follow else None
        batch = Batch(torch.from_numpy(tokens).to(self.device)[None], None, bounds, first)
        return Schedule(segments, [batch], [len(segments)], tokens)

    def _padded(self, segments: Int64Array) -> Schedule:
        size = np.maximum(self.length[segments], SHORTEST_ROW)
        bucket = np.ceil(np.log2(size)).astype(np.int64)
        order, batches, tokens = [], [], []
        for key in np.unique(bucket):
            chosen = segments[bucket == key]
            lengths = self.length[chosen]
            column = np.arange(lengths.max())
            padding = column >= lengths[:, None]
            read = self.start[chosen][:, None] + column
            mask = torch.from_numpy(padding).to(self.device) if padding.any() else None
            # Padding reads tokens that come next: were it one token, all gradients of zero would queue up for it.
            inside = torch.from_numpy(np.minimum(read, self.num_tokens - 1)).to(self.device)
            batches.append(Batch(inside, mask, None))
            order.append(chosen)
            tokens.append(np.where(padding, -1, read).reshape(-1))
        return Schedule(np.concatenate(order), batches, [len(chosen) for chosen in order], np.concatenate(tokens))


def segments_of(context: TreeContext) -> Segments:
    """The segments of a call, cut at its first recurrent layer."""
    if context.segments is None:
        context.segments = Segments(context)
    segments = context.segments
    assert isinstance(segments, Segments)
    return segments
