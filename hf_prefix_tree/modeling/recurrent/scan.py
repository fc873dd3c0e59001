# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Scans on a tree: every segment starts from the state that its parent segment ended in.

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

from hf_prefix_tree.modeling.recurrent.segments import Batch, Schedule, Segments
from hf_prefix_tree.tree.layout import Int64Array

# What a call costs, forward and backward, in tokens that it could scan instead. On a GPU a call is a millisecond or
# more of launches and Python; on a CPU the tokens are what takes the time.
CALL_TOKENS, CALL_TOKENS_CPU = 8192, 512


class Recurrence(NamedTuple):
    """What a kind of recurrent layer is to the tree."""

    # The segments of a batch from their states (`None`: from zero) to their outputs and the states they end in.
    scan: Callable[[Batch, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]
    # The segments of a batch to their affine maps: the state reached from zero, and what multiplies the state before.
    affine: Callable[[Batch], tuple[torch.Tensor, torch.Tensor]]
    # The second part of a map, applied to the states before.
    apply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    padded: bool  # whether `scan` takes a padded batch, not one segment after another


def scan_on_tree(segments: Segments, recurrence: Recurrence) -> torch.Tensor:
    """
    The outputs of a scan over all segments, in row order.

    Args:
        segments ([`Segments`]): The cut of the rows.
        recurrence ([`Recurrence`]): How one call scans some segments.

    Returns:
        `torch.Tensor` of shape `(B * N, ...)`, zero at padding.
    """
    return fork(segments, recurrence) if forking_is_cheaper(segments) else link(segments, recurrence)


def forking_is_cheaper(segments: Segments) -> bool:
    """Whether the calls that linking saves cost less than what it scans again. Two levels are two calls either way."""
    call_tokens = CALL_TOKENS_CPU if segments.device.type == "cpu" else CALL_TOKENS
    scanned_again = 2 * int(segments.length[segments.is_parent].sum())
    return (segments.num_levels - 2) * call_tokens <= scanned_again


def fork(segments: Segments, recurrence: Recurrence) -> torch.Tensor:
    """[`scan_on_tree`] level by level: as many calls as the tree has levels."""
    schedules = [
        segments.schedule(np.flatnonzero(segments.level == level), padded=recurrence.padded)
        for level in range(segments.num_levels)
    ]
    orders = [schedule.order for schedule in schedules]
    parents = segments.indices(
        f"fork, padded={recurrence.padded}",
        lambda: tuple(_places(segments.parent[below], above) for above, below in pairwise(orders)),
    )
    outputs, ends = _scan(recurrence, schedules[0], None)
    for schedule, parent in zip(schedules[1:], parents, strict=True):
        more, ends = _scan(recurrence, schedule, ends.index_select(0, parent))
        outputs += more
    return _in_row_order(segments, f"forked, padded={recurrence.padded}", schedules, outputs)


def link(segments: Segments, recurrence: Recurrence) -> torch.Tensor:
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
    return _in_row_order(segments, f"linked, padded={recurrence.padded}", [everything], outputs)


def _scan(
    recurrence: Recurrence, schedule: Schedule, before: torch.Tensor | None
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Outputs of each call, and the states that the segments end in, in the schedule's order."""
    states = [None] * len(schedule.counts) if before is None else before.split(schedule.counts)
    done = [recurrence.scan(batch, state) for batch, state in zip(schedule.batches, states, strict=True)]
    return [output for output, _ in done], torch.cat([end for _, end in done])


def _in_row_order(
    segments: Segments, name: str, schedules: list[Schedule], outputs: list[torch.Tensor]
) -> torch.Tensor:
    if len(outputs) == 1 and (first := schedules[0].batches[0].first) is not None:
        flat = outputs[0][0]
        after = segments.num_tokens - first - len(flat)
        return torch.nn.functional.pad(flat, [0, 0] * (flat.dim() - 1) + [first, after])

    def places() -> tuple[Int64Array]:
        tokens = np.concatenate([schedule.tokens for schedule in schedules])
        found = np.full(segments.num_tokens, len(tokens))
        found[tokens[tokens >= 0]] = np.flatnonzero(tokens >= 0)
        return (found,)

    (index,) = segments.indices(name, places)
    flat = torch.cat([output.flatten(0, 1) for output in outputs])
    return torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])]).index_select(0, index)


def _places(values: Int64Array, among: Int64Array) -> Int64Array:
    """Where each of `values` stands in `among`."""
    order = np.argsort(among)
    return order[np.searchsorted(among, values, sorter=order)]
