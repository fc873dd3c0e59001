# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The delta rule on a tree: Gated DeltaNet (one decay for each head) and Kimi delta attention (one for each channel).

The state `S` of a head, `[key_dim, value_dim]`, changes by `S <- A_t S + k_t v_t'`, so a segment is an affine map of
it. Its matrix part comes from the model's own scan: columns with values of zero that start from the identity end as
the product of the `A_t`. Finding the maps costs a scan of `value_dim + key_dim` columns.

On a GPU with flash-linear-attention the segments of a call lie one after another; elsewhere the scan of the modeling
file gets them as the rows of padded batches.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.recurrent.scan import Recurrence, scan_on_tree
from hf_prefix_tree.modeling.recurrent.segments import Batch, segments_of

logger = logging.getLogger(__name__)


def delta_rule_on_tree(
    kernel: str,
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    context: TreeContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
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
        initial_state, output_final_state, cu_seqlens: Of a cache and of packed rows; refused.

    Returns:
        `tuple`: the output `(B, N, heads, value_dim)`, and no state.
    """
    if initial_state is not None or output_final_state or cu_seqlens is not None:
        raise ValueError("A recurrent layer got a cache or packed rows together with `prefix_tree`; pass neither.")
    recurrence = delta_rule(kernel, scan, query, key, value, g, beta, **kwargs)
    return scan_on_tree(segments_of(context), recurrence).view(value.shape), None


def delta_rule(
    kernel: str,
    scan: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **kwargs: Any,
) -> Recurrence:
    """The [`Recurrence`] of these inputs; arguments as in [`delta_rule_on_tree`]."""
    inputs = [x.reshape(-1, *x.shape[2:]) for x in (query, key, value, g, beta)]
    scan_line = line_kernel(kernel, query.device.type)
    heads, key_dim, value_dim = value.shape[2], key.shape[3], value.shape[3]
    precise = torch.promote_types(value.dtype, torch.float32)

    def run(batch: Batch, taken: list[torch.Tensor], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, log_decay, overwrite = taken
        call = scan if scan_line is None else functools.partial(scan_line, cu_seqlens=batch.bounds)
        return call(q, k, v, g=log_decay, beta=overwrite, initial_state=state, output_final_state=True, **kwargs)

    def forward(batch: Batch, state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return run(batch, [batch.take(x) for x in inputs], state)

    def affine(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
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
        found = getattr(importlib.import_module(module), function)
    except ImportError:
        logger.warning(
            "flash-linear-attention is not installed: the recurrent layers scan the segments of a tree as padded "
            "batches, which is slower. Install `flash-linear-attention`."
        )
        return None
    logger.info("The recurrent layers scan the segments of a tree with `%s`.", name)
    return found
