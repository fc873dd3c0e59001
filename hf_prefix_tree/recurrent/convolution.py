# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Causal convolution on a tree: every token sees the last tokens of its path.

The row is laid out anew, each run of consecutive tokens behind the `width - 1` tokens above it on its path (zeros
above a root), and the model's own convolution runs over that once. Its activation, bias and kernel stay its own.
Cost: one gather each way, and `width - 1` more tokens for each run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_prefix_tree.attention.context import TreeContext
from hf_prefix_tree.layout import Int64Array
from hf_prefix_tree.recurrent.segments import Segments, ranges, segments_of


def convolve_on_tree(
    convolve: Callable[..., torch.Tensor],
    context: TreeContext,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """
    A causal convolution over time that follows the branches.

    Args:
        convolve (`Callable`): The convolution of the model, `convolve(hidden_states, weight, bias, **kwargs)`.
        context ([`TreeContext`]): The call's tree.
        hidden_states (`torch.Tensor` of shape `(B, channels, N)`): Inputs.
        weight (`torch.Tensor` of shape `(channels, width)`): One filter for each channel; the last entry is the
            token's own.
        bias (`torch.Tensor` of shape `(channels,)`, *optional*): Of the convolution.

    Returns:
        `torch.Tensor` of shape `(B, channels, N)`, zero at padding.
    """
    segments = segments_of(context)
    batch_size, channels, length = hidden_states.shape
    width = weight.shape[1]
    reads, keeps = segments.indices(f"convolution of {width}", lambda: _path_layout(segments, width))
    flat = hidden_states.transpose(1, 2).reshape(batch_size * length, channels)
    flat = torch.cat([flat, flat.new_zeros(1, channels)])  # what a token above a root or padding reads
    laid_out = flat.index_select(0, reads)[None].transpose(1, 2)
    out = convolve(laid_out, weight, bias, **kwargs)[0].transpose(0, 1)
    out = torch.cat([out, out.new_zeros(1, channels)]).index_select(0, keeps)
    return out.view(batch_size, length, channels).transpose(1, 2)


def _path_layout(segments: Segments, width: int) -> tuple[Int64Array, Int64Array]:
    """Which token each place of the new layout reads, and in which place each token finds its result."""
    nothing = segments.num_tokens
    above = np.append(segments.predecessor, nothing)
    above[above < 0] = nothing
    # Of the segments, those that go on from the token before them need no history: it is there already.
    goes_on = segments.parent >= 0
    goes_on &= segments.predecessor[segments.start] == segments.start - 1
    first = np.flatnonzero(~goes_on)
    starts, lengths = segments.start[first], np.add.reduceat(segments.length, first)
    history = np.empty((len(starts), width - 1), dtype=np.int64)
    token = starts
    for tap in range(width - 2, -1, -1):
        token = history[:, tap] = above[token]
    places = np.cumsum(lengths + width - 1) - lengths  # of each run's own first token
    own, results = ranges(starts, lengths), ranges(places, lengths)
    reads = np.empty(len(own) + history.size, dtype=np.int64)
    reads[results] = own
    reads[ranges(places - (width - 1), np.full(len(starts), width - 1))] = history.reshape(-1)
    keeps = np.full(segments.num_tokens, len(reads))
    keeps[own] = results
    return reads, keeps
