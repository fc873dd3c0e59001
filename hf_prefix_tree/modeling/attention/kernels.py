# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The arithmetic of masked attention, whatever the mask stands for: dense in plain PyTorch, or FlexAttention compiled
once for all lengths.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

LONG = 2**14  # tokens above which the size of a dense mask matters
_BLOCK_SCORES = 2**26  # scores of a block of queries: 256 MiB in float32


def attention_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype that attention runs in: autocast's where it is on, otherwise that of the values."""
    # Norms and rotary embeddings leave query and key in float32 under autocast, and FlexAttention, unlike SDPA, is not
    # on autocast's list.
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else dtype


def attend_dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """
    Attention under a dense mask: SDPA, or matmul and softmax where it has a softcap or sinks.

    Longer sequences than [`LONG`] run on a CPU in blocks of queries, whose backward computes them again: SDPA turns
    the mask into numbers, four times its size in float32, and would keep these for the backward of every layer.

    Args:
        query (`torch.Tensor` of shape `(B, heads, N, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(B, kv_heads, N, head_dim)`): Keys.
        value (`torch.Tensor` of shape `(B, kv_heads, N, value_dim)`): Values.
        mask (`torch.Tensor` of shape `(B, 1, N, N)`): Bool, `True` = visible, or numbers to add to the scores.
        scale (`float`, *optional*, defaults to `head_dim ** -0.5`): Factor of the scores.
        softcap (`float`, *optional*): Scores become `softcap * tanh(score / softcap)`.
        sinks (`torch.Tensor` of shape `(heads,)`, *optional*): A logit per head whose probability goes nowhere.

    Returns:
        `torch.Tensor` of shape `(B, heads, N, value_dim)`.
    """
    groups, dtype = query.shape[1] // key.shape[1], attention_dtype(query.device, value.dtype)
    if groups > 1:  # before the cast, as in stock layers: gradients of a group add up in the dtype of its key
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    length = query.shape[2]
    if length <= LONG or query.device.type != "cpu":
        return _attend_dense(query, key, value, mask, scale, softcap, sinks)
    rows = max(1, _BLOCK_SCORES // (length * (1 if softcap is None and sinks is None else query.shape[1])))
    blocks = [
        checkpoint(
            _attend_dense,
            *(query[:, :, start : start + rows], key, value, mask[:, :, start : start + rows], scale, softcap, sinks),
            use_reentrant=False,
            preserve_rng_state=False,  # nothing is drawn
        )
        for start in range(0, length, rows)
    ]
    return torch.cat(blocks, dim=2)


def _attend_dense(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap: float | None, sinks: Any
) -> Tensor:
    if softcap is None and sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    scores = torch.matmul(query, key.transpose(2, 3)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:  # the sink: one more key, whose probability goes nowhere
        sinks = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., : key.shape[2]]
    return torch.matmul(probabilities.to(value.dtype), value)


def attend_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, *, sinks: Tensor | None = None, **options: Any
) -> Tensor:
    """
    The same under a block mask; arguments and result as for [`attend_dense`], N a multiple of 128.
    """
    output, lse = flex_with_lse(query, key, value, mask, **options)
    if sinks is None:
        return output
    # softmax over keys and sink = softmax over keys * sigmoid(lse - sink), in float32
    kept = torch.sigmoid(lse - sinks.to(lse.dtype).view(1, -1, 1))
    return (output * kept[..., None]).to(query.dtype)


def flex_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: BlockMask,
    *,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """
    FlexAttention by Triton; arguments as for [`attend_flex`].

    Returns:
        `tuple`: the output `(B, heads, N, value_dim)` and the log-sum-exp of the scores `(B, heads, N)`, float32.
    """
    score_mod = None if softcap is None else _softcap_mod(softcap)
    args: Any = (*map(_without_gaps, (query, key, value)), mask, score_mod, scale)
    return _triton(*args) if torch.compiler.is_compiling() else _call_compiled(_triton, *args)


def _without_gaps(x: Tensor) -> Tensor:
    """
    `x`, copied if it is a slice of something larger, as of a fused projection: the kernels are slower on that (7% in
    bf16 with heads of 128, on an H200), and the backward would keep all of it. Tokens may lie before heads, as
    Transformers lays them out: the kernels are as fast on that, and an output that lies as its query needs no copy for
    the projection that follows.
    """
    tokens_first = x.transpose(1, 2)
    return x if x.is_contiguous() or tokens_first.is_contiguous() else tokens_first.contiguous().transpose(1, 2)


def _triton(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, score_mod: Callable | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    # The compiler does not know that a dynamic length is a multiple of the block, and would check every load (25-30%
    # slower): tell it. One graph then serves every length at the speed of a static one.
    is_divisible = True if query.shape[2] % mask.BLOCK_SIZE[0] == 0 else False  # noqa: SIM210 - becomes a guard
    options: Any = {"IS_DIVISIBLE": is_divisible}
    if query.dtype == torch.float32 and _splits_products(query.device.type):
        for head_dim, tuned in _FLOAT32_OPTIONS.items():  # a symbolic size can be compared, not looked up
            if query.shape[-1] == head_dim and value.shape[-1] == head_dim:
                options |= tuned
    output, aux = flex_attention(
        query,
        key,
        value,
        score_mod=score_mod,
        block_mask=mask,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
        kernel_options=options,
        return_aux=AuxRequest(lse=True),
    )
    assert aux.lse is not None  # it was asked for
    return output, aux.lse


def _bfloat16_parts(backward_warps: int, *backward_blocks: int) -> dict[str, Any]:
    names = ("bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
    forward = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 1}
    backward = {"bwd_num_warps": backward_warps, "bwd_num_stages": 1, **dict(zip(names, backward_blocks, strict=True))}
    return {"FLOAT32_PRECISION": "'bf16x6'", **forward, **backward}


# By head size, the fastest of those that were tried on an H200: of heads of 64 and 128 some ten choices of parts and
# blocks, of heads of 256 both kinds of parts with inductor's blocks. With those, heads of 96 need more shared memory
# for TF32 parts than a Hopper GPU has; others were not tried.
_FLOAT32_OPTIONS: dict[int, dict[str, Any]] = {
    64: _bfloat16_parts(4, 32, 64, 64, 32),
    128: _bfloat16_parts(8, 16, 128, 128, 16),
    256: {"FLOAT32_PRECISION": "'tf32x3'"},
}


@torch.compiler.assume_constant_result
def _splits_products(device_type: str) -> bool:
    """
    Whether float32 products are taken as sums of products of parts, three in TF32 or six in bfloat16, on the tensor
    cores: as exact as float32, and many times faster than what Triton does otherwise. TF32 is used where allowed.
    """
    if device_type != "cuda" or torch.cuda.get_device_capability()[0] != 9:
        return False
    precision = torch.backends.cuda.matmul.fp32_precision  # once it is set, the older function raises
    return torch.get_float32_matmul_precision() == "highest" if precision == "none" else precision == "ieee"


@contextmanager
def one_graph_for_all_lengths() -> Iterator[None]:
    """Dynamo's settings for code whose sequence length varies; they matter while it compiles."""
    with torch._dynamo.config.patch(_DYNAMO_OPTIONS), torch.fx.experimental._config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


# - A recompile limit that is hit runs attention unfused, in silence: fail instead. The limit is raised because every
#   dtype, head size and kind of mask of every model in the process needs another graph.
# - DDP would cut a layer's graph at its buckets, which is meant for the graph of a whole model.
# - Floats (softcap, scale) are constants of a model.
# - Hooks on a layer's modules that come or go after it was compiled (adapters, router logits) must be seen.
# - No duck shapes: taking two sizes that happen to be equal (heads and blocks, say) for the same size costs another
#   graph at every other length.
_DYNAMO_OPTIONS: dict[str, Any] = {
    "recompile_limit": 64,
    "fail_on_recompile_limit_hit": True,
    "optimize_ddp": False,
    "specialize_float": True,
    "skip_nnmodule_hook_guards": False,
}


def _call_compiled(function: Callable, *args: Any) -> Any:
    with one_graph_for_all_lengths():
        return _compiled(function)(*args)


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, dynamic=True)


@functools.cache
def _softcap_mod(softcap: float) -> Callable:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod
