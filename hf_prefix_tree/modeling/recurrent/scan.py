# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Scans on a tree: every segment starts from the state that its parent segment ended in.

A segment is a node of the tree: a run of tokens that a scan may read in order. It starts at a root or at a child of a
branch point, and continues from the state that its parent segment ended in. Segments of one level (as many segments
above them) do not depend on each other. Padding belongs to no segment. Segments are built once per call, on the host:
one wait for the device, O(N) vectorised plus O(segments) Python steps.

Two ways give the same numbers. Forking scans one level of segments after the other, each token once, and hands the
states down; autograd sums the gradients of a state over the segments that start from it. A caterpillar of 20 turns has
20 levels, and a call of a kernel costs more than its few hundred tokens. Linking uses that a segment acts on the state
by an affine map: one call finds the maps of all segments that have children, small products link them to the state at
every branch point, and one more call scans all segments from their states. That is two calls for any tree, and the
tokens above branch points scanned again, in up to twice the columns. The cheaper one is chosen by the tree.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree.layout import Int64Array, node_depths, ranges

SHORTEST_PADDED = 64  # tokens; segments up to it share a padded batch: the chunk size of most scans


class Batch(NamedTuple):
    """The segments of one call of a scan: one after another, or as a padded batch."""

    tokens: Tensor  # [1, T] or [segments, longest], int64: positions in the flattened batch
    padding: Tensor | None  # bool of the same shape, `None` where nothing is padded
    bounds: Tensor | None  # int64 [segments + 1]: where segments start and end in [1, T]; `None` where padded
    first: int | None = None  # where the tokens begin, if they follow one another

    def take(self, flat: Tensor) -> Tensor:
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
    The segments of a batch, in preorder; positions count through all packed sequences.

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
            is_real[0] |= not is_real.any()  # of a batch that is all padding one token, so that every layer has work
        renumbered = np.append(np.cumsum(is_real) - 1, -1)
        self.start, self.length = start[is_real], length[is_real]
        self.parent = renumbered[parents[is_real]]
        self.level = node_depths(np.ones_like(self.parent), self.parent)
        self.num_levels = int(self.level.max(initial=0)) + 1
        self.is_parent = np.isin(np.arange(len(self.parent)), self.parent)
        self._schedules: dict[tuple[bytes, bool], Schedule] = {}
        self._indices: dict[str, tuple[Tensor, ...]] = {}

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

    def indices(self, name: str, build: Callable[[], tuple[Int64Array, ...]]) -> tuple[Tensor, ...]:
        """The arrays of `build` as tensors on the device; built once under this name."""
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
        size = np.maximum(self.length[segments], SHORTEST_PADDED)
        bucket = np.ceil(np.log2(size)).astype(np.int64)
        order, batches, tokens = [], [], []
        for key in np.unique(bucket):
            chosen = segments[bucket == key]
            lengths = self.length[chosen]
            column = np.arange(lengths.max())
            padding = column >= lengths[:, None]
            read = self.start[chosen][:, None] + column
            mask = torch.from_numpy(padding).to(self.device) if padding.any() else None
            # Padding reads the tokens that come next; a single shared index would serialize the scatter-add of the
            # backward.
            inside = torch.from_numpy(np.minimum(read, self.num_tokens - 1)).to(self.device)
            batches.append(Batch(inside, mask, None))
            order.append(chosen)
            tokens.append(np.where(padding, -1, read).reshape(-1))
        return Schedule(np.concatenate(order), batches, [len(chosen) for chosen in order], np.concatenate(tokens))


def segments_of(context: TreeContext) -> Segments:
    """The segments of a call, built at its first recurrent layer."""
    if context.segments is None:
        context.segments = Segments(context)
    return context.segments


# The cost of a call, forward and backward, in tokens that it could scan instead. On a GPU a call is a millisecond or
# more of launches and Python; on a CPU the tokens are what takes the time.
CALL_TOKENS, CALL_TOKENS_CPU = 8192, 512


class Recurrence(NamedTuple):
    """The operations of a kind of recurrent layer that a scan on a tree needs."""

    # The segments of a batch from their states (`None`: from zero) to their outputs and the states they end in.
    scan: Callable[[Batch, Tensor | None], tuple[Tensor, Tensor]]
    # The segments of a batch to their affine maps: the state reached from zero, and what multiplies the state before.
    affine: Callable[[Batch], tuple[Tensor, Tensor]]
    # The second part of a map, applied to the states before.
    apply: Callable[[Tensor, Tensor], Tensor]
    padded: bool  # whether `scan` takes a padded batch, not one segment after another


def scan_on_tree(segments: Segments, recurrence: Recurrence) -> Tensor:
    """
    The outputs of a scan over all segments, in the order of the tokens.

    Args:
        segments ([`Segments`]): The segments of the packed sequences.
        recurrence ([`Recurrence`]): How one call scans some segments.

    Returns:
        `torch.Tensor` of shape `(B * N, ...)`, zero at padding.
    """
    return fork(segments, recurrence) if forking_is_cheaper(segments) else link(segments, recurrence)


def forking_is_cheaper(segments: Segments) -> bool:
    """Whether the calls that linking saves cost less than what it scans again. Two levels are two calls either way."""
    call_tokens = CALL_TOKENS_CPU if segments.device.type == "cpu" else CALL_TOKENS
    return (segments.num_levels - 2) * call_tokens <= 2 * int(segments.length[segments.is_parent].sum())


def fork(segments: Segments, recurrence: Recurrence) -> Tensor:
    """[`scan_on_tree`] level by level: as many calls as the tree has levels."""
    padded, levels = recurrence.padded, range(segments.num_levels)
    schedules = [segments.schedule(np.flatnonzero(segments.level == level), padded=padded) for level in levels]
    orders = [schedule.order for schedule in schedules]
    parents = segments.indices(
        f"fork, padded={padded}",
        lambda: tuple(_places(segments.parent[below], above) for above, below in pairwise(orders)),
    )
    outputs, ends = _scan(recurrence, schedules[0], None)
    for schedule, parent in zip(schedules[1:], parents, strict=True):
        more, ends = _scan(recurrence, schedule, ends.index_select(0, parent))
        outputs += more
    return _in_token_order(segments, f"forked, padded={padded}", schedules, outputs)


def link(segments: Segments, recurrence: Recurrence) -> Tensor:
    """[`scan_on_tree`] by the affine maps of the segments that have children: two calls."""
    everything = segments.schedule(np.arange(len(segments.start)), padded=recurrence.padded)
    above = segments.schedule(np.flatnonzero(segments.is_parent), padded=recurrence.padded)
    by_level = [above.order[segments.level[above.order] == level] for level in range(segments.num_levels - 1)]
    sorted_above = np.concatenate([*by_level, [-1]])  # -1: nothing, what is above the roots
    by_levels, *befores, parents = segments.indices(
        f"link, padded={recurrence.padded}",
        lambda: (
            _places(sorted_above[:-1], above.order),
            *(_places(segments.parent[below], level) for level, below in pairwise(by_level)),
            _places(segments.parent[everything.order], sorted_above),
        ),
    )
    maps = [recurrence.affine(batch) for batch in above.batches]
    # taken apart in one go: the gradients of the parts are then put together in one, not added up level by level
    counts = [len(level) for level in by_level]
    offsets, factors = (torch.cat(parts).index_select(0, by_levels).split(counts) for parts in zip(*maps, strict=True))
    ends = [offsets[0]]
    with torch.autocast(segments.device.type, enabled=False):  # states keep their precision
        for offset, factor, before in zip(offsets[1:], factors[1:], befores, strict=True):
            ends.append(offset + recurrence.apply(factor, ends[-1].index_select(0, before)))
    states = torch.cat([*ends, torch.zeros_like(offsets[0][:1])])
    outputs, _ = _scan(recurrence, everything, states.index_select(0, parents))
    return _in_token_order(segments, f"linked, padded={recurrence.padded}", [everything], outputs)


def _scan(recurrence: Recurrence, schedule: Schedule, before: Tensor | None) -> tuple[list[Tensor], Tensor]:
    """Outputs of each call, and the states that the segments end in, in the schedule's order."""
    states = [None] * len(schedule.counts) if before is None else before.split(schedule.counts)
    done = [recurrence.scan(batch, state) for batch, state in zip(schedule.batches, states, strict=True)]
    return [output for output, _ in done], torch.cat([end for _, end in done])


def _in_token_order(segments: Segments, name: str, schedules: list[Schedule], outputs: list[Tensor]) -> Tensor:
    if len(outputs) == 1 and (first := schedules[0].batches[0].first) is not None:
        flat = outputs[0][0]
        after = segments.num_tokens - first - len(flat)
        return torch.nn.functional.pad(flat, [0, 0] * (flat.dim() - 1) + [first, after])

    def places() -> tuple[Int64Array]:
        tokens = np.concatenate([schedule.tokens for schedule in schedules])
        place_of = np.full(segments.num_tokens, len(tokens))
        place_of[tokens[tokens >= 0]] = np.flatnonzero(tokens >= 0)
        return (place_of,)

    (index,) = segments.indices(name, places)
    flat = torch.cat([output.flatten(0, 1) for output in outputs])
    return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])]).index_select(0, index)


def _places(values: Int64Array, among: Int64Array) -> Int64Array:
    """Where each of `values` stands in `among`."""
    order = np.argsort(among)
    return order[np.searchsorted(among, values, sorter=order)]
