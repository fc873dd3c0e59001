# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Causal convolution on a tree: every token sees the last tokens of its path.

The model's own convolution runs over the row as it is, which is right but for the first `width - 1` tokens of each run
of consecutive tokens: those read what happens to lie before the run. They are convolved once more, behind the tokens
above the run on its path (zeros above a root), and take the place of the wrong ones. Activation, bias and kernel stay
the model's own. Cost: `2 * width - 2` more tokens for each run, and a copy of the result.

Where a wrong result overflows, as it might in float16, the gradients are not a number, though nothing reads it: zero
times infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.recurrent.segments import Segments, segments_of
from hf_prefix_tree.tree.layout import Int64Array


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
        `torch.Tensor` of shape `(B, channels, N)`.
    """
    segments = segments_of(context)
    _, channels, length = hidden_states.shape
    taps = weight.shape[1] - 1
    out = convolve(hidden_states, weight, bias, **kwargs)
    if taps == 0:
        return out
    reads, is_nothing, kept, writes = segments.indices(
        f"convolution of {taps + 1}", lambda: _starts_of_runs(segments, taps)
    )
    starts = hidden_states.transpose(1, 2).reshape(-1, channels).index_select(0, reads)
    starts = starts.masked_fill(is_nothing[:, None].bool(), 0).view(-1, 2 * taps, channels)
    again = convolve(starts.transpose(1, 2), weight, bias, **kwargs)[..., taps:].transpose(1, 2)
    again = again.reshape(-1, channels).index_select(0, kept)
    return out.transpose(1, 2).index_put((writes // length, writes % length), again).transpose(1, 2)


def _starts_of_runs(segments: Segments, taps: int) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """
    For each run `taps` tokens of its path above it and its first `taps` tokens: which they are, and where there is
    none; which of the latter there are, and which tokens they are.
    """
    above = segments.predecessor
    # Of the segments, those that go on from the token before them need no history: it is there already.
    goes_on = segments.parent >= 0
    goes_on &= above[segments.start] == segments.start - 1
    first = np.flatnonzero(~goes_on)
    starts, lengths = segments.start[first], np.add.reduceat(segments.length, first)
    history = np.empty((len(starts), taps), dtype=np.int64)
    token = starts
    for tap in range(taps - 1, -1, -1):
        token = history[:, tap] = np.where(token < 0, -1, above[token])
    column = np.arange(taps)
    own = np.where(column < lengths[:, None], starts[:, None] + column, -1)
    reads = np.concatenate([history, own], axis=1).reshape(-1)
    kept = np.flatnonzero(own.reshape(-1) >= 0)
    # What is nothing reads some token: were it one, all gradients of zero would queue up for it.
    some = np.arange(len(reads)) % segments.num_tokens
    return np.where(reads < 0, some, reads), (reads < 0).astype(np.int64), kept, own.reshape(-1)[kept]
