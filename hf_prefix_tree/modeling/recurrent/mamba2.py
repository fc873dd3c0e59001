# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The scan of Mamba2 on a tree.

The state of a head changes by `h <- exp(A dt_t) h + dt_t B_t x_t'`, so a segment multiplies the state before it by one
number for each head, `exp(A sum(dt))`, and the maps of segments cost one scan. The scan of the modeling file, a kernel
of mamba-ssm or the reference, takes a state for each row of a batch: segments are the rows of padded batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.recurrent.scan import Recurrence, scan_on_tree
from hf_prefix_tree.modeling.recurrent.segments import Batch, segments_of


def mamba2_on_tree(
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    context: TreeContext,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    chunk_size: int,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
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
        chunk_size (`int`), D (`torch.Tensor`): As the scan takes them.
        dt_bias, dt_softplus, dt_limit: What makes step sizes of `dt`; applied here, so that padding steps by 0.
        z, initial_states, return_final_states: Of other uses; refused.

    Returns:
        `torch.Tensor` of shape `(batch, N, heads, head_dim)`.
    """
    if initial_states is not None or return_final_states or z is not None:
        raise ValueError("A Mamba2 layer got a cache or a gate together with `prefix_tree`; pass neither.")
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = torch.nn.functional.softplus(dt)
    recurrence = mamba2(scan, hidden_states, dt.clamp(*dt_limit), A, B, C, chunk_size=chunk_size, D=D, **kwargs)
    return scan_on_tree(segments_of(context), recurrence).view(hidden_states.shape)


def mamba2(
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    **options: Any,
) -> Recurrence:
    """The [`Recurrence`] of these inputs; arguments as in [`mamba2_on_tree`], `dt` the step sizes themselves."""
    inputs = [x.reshape(-1, *x.shape[2:]) for x in (hidden_states, dt, B, C)]

    def forward(batch: Batch, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        x, step, b, c = (batch.take(x) for x in inputs)
        return scan(x, step, A, b, c, initial_states=state, return_final_states=True, **options)

    def affine(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        _, end = forward(batch, None)
        decay = (A.float() * batch.take(inputs[1]).sum(dim=1)).exp()
        return end, decay[..., None, None]

    return Recurrence(forward, affine, torch.mul, padded=True)
