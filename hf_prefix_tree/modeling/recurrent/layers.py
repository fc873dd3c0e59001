# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The recurrent layers of Transformers on a tree: the convolution, the delta rule and Mamba2.

Convolution: the model's runs over the packed sequence as it is, which is right but for the first `width - 1` tokens of
each run of consecutive tokens: those read whatever lies before the run. They are convolved once more, behind the
tokens above the run on its path (zeros above a root), and replace the wrong ones. Activation, bias and kernel stay the
model's. Cost: `2 * width - 2` more tokens for each run, and a copy of the result. Where a wrong result overflows, as
it might in float16, the gradients are not a number, though nothing reads it: zero times infinity.

In the delta rule (Gated DeltaNet: one decay for each head, Kimi delta attention: one for each channel) the state `S`
of a head, `[key_dim, value_dim]`, changes by `S <- A_t S + k_t v_t'`, so a segment is an affine map of it. Its matrix
part comes from the model's scan: columns with values of zero that start from the identity end as the product of the
`A_t`. Finding the maps costs a scan of `value_dim + key_dim` columns. On a GPU with flash-linear-attention the
segments of a call lie one after another; elsewhere the scan of the modeling file gets them as padded batches.

In Mamba2 the state of a head changes by `h <- exp(A dt_t) h + dt_t B_t x_t'`, so a segment multiplies the state before
it by one number for each head, `exp(A sum(dt))`, and the maps of segments cost one scan. The scan of the modeling
file, a kernel of mamba-ssm or the reference, takes a state for each sequence of a batch: segments make up padded
batches.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.recurrent.scan import Batch, Recurrence, Segments, scan_on_tree, segments_of
from hf_prefix_tree.tree.layout import Int64Array

Scan = Callable[..., tuple[Tensor, Tensor]]  # of a modeling file: to the outputs and the last state


def convolve_on_tree(
    convolve: Callable[..., Tensor],
    context: TreeContext,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """
    A causal convolution over time that follows the branches.

    Args:
        convolve (`Callable`): The convolution of the model, `convolve(hidden_states, weight, bias, **kwargs)`.
        context ([`TreeContext`]): The call's tree.
        hidden_states (`torch.Tensor` of shape `(B, channels, N)`): Inputs.
        weight (`torch.Tensor` of shape `(channels, width)`): One filter for each channel; the last entry is for
            the token itself.
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
    goes_on = (segments.parent >= 0) & (above[segments.start] == segments.start - 1)
    first = np.flatnonzero(~goes_on)
    starts, lengths = segments.start[first], np.add.reduceat(segments.length, first)
    history = np.empty((len(starts), taps), dtype=np.int64)
    token = starts
    for tap in range(taps - 1, -1, -1):
        token = history[:, tap] = np.where(token < 0, -1, above[token])
    column = np.arange(taps)
    run_tokens = np.where(column < lengths[:, None], starts[:, None] + column, -1)
    reads = np.concatenate([history, run_tokens], axis=1).reshape(-1)
    kept = np.flatnonzero(run_tokens.reshape(-1) >= 0)
    # Missing entries read distinct dummy tokens; a single shared index would serialize the scatter-add of the
    # backward.
    some = np.arange(len(reads)) % segments.num_tokens
    return np.where(reads < 0, some, reads), (reads < 0).astype(np.int64), kept, run_tokens.reshape(-1)[kept]


logger = logging.getLogger(__name__)


def delta_rule_on_tree(
    kernel: str,
    scan: Scan,
    context: TreeContext,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """
    The delta rule over the branches of a tree.

    Args:
        kernel (`str`): The kernel of flash-linear-attention for it, `"module.function"`.
        scan (`Callable`): The scan of the modeling file.
        context ([`TreeContext`]): The call's tree.
        query (`torch.Tensor` of shape `(B, N, key_heads, key_dim)`), key (`torch.Tensor`, the same): Queries and keys.
        value (`torch.Tensor` of shape `(B, N, heads, value_dim)`): Values.
        g (`torch.Tensor` of shape `(B, N, heads)` or `(B, N, heads, key_dim)`): Logarithm of the decay.
        beta (`torch.Tensor` of shape `(B, N, heads)`): How much a token overwrites.
        initial_state, output_final_state, cu_seqlens: Of a cache and of packed sequences, which no call has.

    Returns:
        `tuple`: the output `(B, N, heads, value_dim)`, and no state.
    """
    assert initial_state is None and not output_final_state and cu_seqlens is None  # `refuse_options` saw to it
    recurrence = delta_rule(kernel, scan, query, key, value, g, beta, **kwargs)
    return scan_on_tree(segments_of(context), recurrence).view(value.shape), None


def delta_rule(
    kernel: str, scan: Scan, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> Recurrence:
    """The [`Recurrence`] of these inputs; arguments as in [`delta_rule_on_tree`]."""
    inputs = [x.reshape(-1, *x.shape[2:]) for x in (query, key, value, g, beta)]
    scan_line = line_kernel(kernel, query.device.type)
    heads, key_dim, value_dim = value.shape[2], key.shape[3], value.shape[3]
    precise = torch.promote_types(value.dtype, torch.float32)

    def run(batch: Batch, taken: list[Tensor], state: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v, log_decay, overwrite = taken
        call = scan if scan_line is None else functools.partial(scan_line, cu_seqlens=batch.bounds)
        return call(q, k, v, g=log_decay, beta=overwrite, initial_state=state, output_final_state=True, **kwargs)

    def forward(batch: Batch, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return run(batch, [batch.take(x) for x in inputs], state)

    def affine(batch: Batch) -> tuple[Tensor, Tensor]:
        k, v, log_decay, overwrite = (batch.take(x) for x in inputs[1:])
        v = torch.nn.functional.pad(v, (0, key_dim))
        segments = len(batch.tokens) if batch.bounds is None else len(batch.bounds) - 1
        identity = torch.eye(key_dim, dtype=precise, device=v.device)
        state = torch.nn.functional.pad(identity, (value_dim, 0)).expand(segments, heads, -1, -1).contiguous()
        _, end = run(batch, [k.detach(), k, v, log_decay, overwrite], state)  # no query has a part in the state
        return end[..., :value_dim], end[..., value_dim:]

    return Recurrence(forward, affine, torch.matmul, padded=scan_line is None)


@functools.cache
def line_kernel(name: str, device_type: str) -> Callable | None:
    """The kernel that scans segments one after another, or `None` where there is none; logged once."""
    if device_type != "cuda":
        return None
    module, function = name.rsplit(".", 1)
    try:
        scan_function = getattr(importlib.import_module(module), function)
    except ImportError:
        logger.warning(
            "flash-linear-attention is not installed: the recurrent layers scan the segments of a tree as padded "
            "batches, which is slower. Install `flash-linear-attention`."
        )
        return None
    logger.info("The recurrent layers scan the segments of a tree with `%s`.", name)
    return scan_function


def mamba2_on_tree(
    scan: Scan,
    context: TreeContext,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> Tensor:
    """
    The scan of Mamba2 over the branches of a tree.

    Args:
        scan (`Callable`): The scan of the modeling file.
        context ([`TreeContext`]): The call's tree.
        hidden_states (`torch.Tensor` of shape `(batch, N, heads, head_dim)`): Inputs.
        dt (`torch.Tensor` of shape `(batch, N, heads)`): Step sizes, before bias, softplus and limits.
        A (`torch.Tensor` of shape `(heads,)`): Decay rates, negative.
        B (`torch.Tensor` of shape `(batch, N, groups, state_dim)`), C (`torch.Tensor`, the same): Input and output
            projections of the state.
        dt_bias, dt_softplus, dt_limit: They turn `dt` into step sizes; applied here, so that padding steps by 0.
        z, initial_states, return_final_states: Of uses without a tree.
        kwargs: `chunk_size` and `D`, as the scan takes them.

    Returns:
        `torch.Tensor` of shape `(batch, N, heads, head_dim)`.
    """
    assert initial_states is None and not return_final_states and z is None  # `refuse_options` saw to it
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    recurrence = mamba2(scan, hidden_states, dt.clamp(*dt_limit), A, B, C, **kwargs)
    return scan_on_tree(segments_of(context), recurrence).view(hidden_states.shape)


def mamba2(
    scan: Scan, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any
) -> Recurrence:
    """The [`Recurrence`] of these inputs; arguments as in [`mamba2_on_tree`], `dt` the step sizes themselves."""
    inputs = [x.reshape(-1, *x.shape[2:]) for x in (hidden_states, dt, B, C)]

    def forward(batch: Batch, state: Tensor | None) -> tuple[Tensor, Tensor]:
        x, step, b, c = (batch.take(x) for x in inputs)
        return scan(x, step, A, b, c, initial_states=state, return_final_states=True, **options)

    def affine(batch: Batch) -> tuple[Tensor, Tensor]:
        _, end = forward(batch, None)
        return end, (A.float() * batch.take(inputs[1]).sum(dim=1)).exp()[..., None, None]

    return Recurrence(forward, affine, torch.mul, padded=True)
