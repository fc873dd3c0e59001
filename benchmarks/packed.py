# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The baseline: causal attention over branches packed into one sequence, with every installed fast kernel.

| kernel | what runs |
|---|---|
| `fa2` | the varlen FlashAttention-2 in PyTorch |
| `fa4` | the varlen FlashAttention of `flash-attn-4` |
| `cudnn` | cuDNN's causal attention through SDPA, one call for all branches of a length |
| `flex` | this project's FlexAttention path, over single-branch trees |
| `sdpa` | PyTorch's choice for a CPU, one call for all branches of a length |
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import versions
from hf_prefix_tree.modeling.attention.interface import prefix_tree_attention
from hf_prefix_tree.modeling.batch import BLOCK_SIZE
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree import layout
from hf_prefix_tree.tree.prefix_tree import PrefixTree

IMPLEMENTATION = "packed_branches"


def installed_kernels(device: torch.device) -> list[str]:
    """The kernels of the table above that can run here."""
    if device.type != "cuda":
        return ["sdpa"]
    return ["fa2", *(["fa4"] if versions()["flash-attn-4"] else []), "cudnn", "flex"]


@dataclass
class Packed:
    """The branches of a packed sequence, those of one length adjacent; the padding at the end counts as a branch."""

    lengths: list[int]
    longest: int
    starts: torch.Tensor  # [branches + 1] int32
    context: TreeContext  # every branch a tree
    kernel: str = "sdpa"

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> Packed:
        """Branches of these lengths, in this order; their sum is a multiple of 128."""
        lengths = list(lengths)
        assert sum(lengths) % BLOCK_SIZE == 0
        counts = torch.tensor(lengths)
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        depth = torch.arange(sum(lengths)) - starts[:-1].repeat_interleave(counts)
        before = torch.where(depth > 0, torch.arange(sum(lengths)) - 1, -1)
        rows = torch.stack([starts[1:].repeat_interleave(counts), depth, before]).to(torch.int32)
        context = TreeContext(rows[None].to(device), attn_backend="flex")
        return cls(lengths, max(lengths), starts.to(torch.int32).to(device), context)


# PyTorch's path to `flash-attn-4` expects the results of another build. A custom operator keeps compiled layers in
# one graph.
@torch.library.custom_op("packed_branches::fa4", mutates_args=())
def _fa4(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    output, lse, *_ = _flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=query_starts,
        cu_seqlens_k=key_starts,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
        softmax_scale=scale,
        causal=True,
        return_lse=True,
    )
    return output, lse


@torch.library.custom_op("packed_branches::fa4_backward", mutates_args=())
def _fa4_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    return _flash_attn_bwd(
        query,
        key,
        value,
        output,
        grad.contiguous(),
        lse,
        scale,
        True,
        cu_seqlens_q=query_starts,
        cu_seqlens_k=key_starts,
        max_seqlen_q=longest_query,
        max_seqlen_k=longest_key,
    )


@_fa4.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = query.shape
    return query.new_empty(tokens, heads, value.shape[-1]), query.new_empty(heads, tokens, dtype=torch.float32)


@_fa4_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: tuple, output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, *inputs[3:5])
    ctx.numbers = inputs[5:]


def _differentiate(ctx: Any, grad: torch.Tensor, _: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    return *_fa4_backward(grad, *ctx.saved_tensors, *ctx.numbers), *[None] * 5


_fa4.register_autograd(_differentiate, setup_context=_keep)


def varlen_causal(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    longest_query: int,
    longest_key: int,
    scale: float | None = None,
) -> torch.Tensor:
    """
    Flash attention, `fa2` or `fa4`, over `[tokens, heads, head_dim]`; queries are aligned with the end of their keys.
    """
    if kernel == "fa4":
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = (x.contiguous() for x in (query, key, value))
        return _fa4(query, key, value, query_starts, key_starts, longest_query, longest_key, scale)[0]
    return torch.ops.aten._flash_attention_forward(
        query, key, value, query_starts, key_starts, longest_query, longest_key, 0.0, True, False, scale=scale
    )[0]


def causal(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    is_causal: bool = True,
) -> torch.Tensor:
    """SDPA over `[batch, heads, tokens, head_dim]`, causal unless all pairs are requested, cuDNN on a GPU."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.is_cuda and not _cudnn_takes_groups(query.dtype):
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        grouped = False
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if query.is_cuda else nullcontext():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=grouped
        )


@functools.cache
def _cudnn_takes_groups(dtype: torch.dtype) -> bool:
    query, key = (torch.zeros(1, heads, 128, 128, device="cuda", dtype=dtype) for heads in (2, 1))
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    except RuntimeError:  # no kernel for it in this version
        return False
    return True


@torch.compiler.disable  # its calls depend on the branches, so each packed sequence would need its own graph
def _by_length(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: Packed, scale: float | None
) -> torch.Tensor:
    outputs, start = [], 0
    for length, members in groupby(packed.lengths):
        count = len(list(members))
        end = start + count * length
        inputs = [x[0, :, start:end].unflatten(1, (count, length)).transpose(0, 1) for x in (query, key, value)]
        outputs.append(causal(*inputs, scale).transpose(1, 2).flatten(0, 1))
        start = end
    return torch.cat(outputs)[None]


def gather_paths(tree: PrefixTree, device: torch.device, kernel: str) -> Callable[..., torch.Tensor]:
    """Each node's tokens are the last queries of the path to it, whose keys and values are copied."""
    nodes = np.arange(len(tree.node_lengths))
    paths = layout.branch_positions(tree.node_lengths, tree.node_parents, nodes)
    counts = [tree.node_lengths.tolist(), [len(path) for path in paths]]
    index = torch.from_numpy(np.concatenate(paths)).to(device)
    starts = [torch.from_numpy(np.cumsum([0, *count], dtype=np.int32)).to(device) for count in counts]
    longest = [max(count) for count in counts]

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        key, value = (x.index_select(0, index) for x in (key, value))
        return varlen_causal(kernel, query[: len(tree)], key, value, *starts, *longest)[None]

    def attend_on_cpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        outputs = []
        for count, path in zip(counts[0], paths, strict=True):
            mask = torch.ones(count, len(path), dtype=torch.bool).tril(len(path) - count)
            inputs = (query[:, :, path[-count:]], key[:, :, path], value[:, :, path])
            outputs.append(torch.nn.functional.scaled_dot_product_attention(*inputs, mask, enable_gqa=True))
        return torch.cat(outputs, dim=2).transpose(1, 2)

    return attend if device.type == "cuda" else attend_on_cpu


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    packed: Packed | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function for Transformers on packed branches; `packed` is a keyword argument of the model."""
    assert packed is not None and attention_mask is None and not kwargs.get("dropout")
    if packed.kernel == "flex":
        mask = packed.context.mask(flex=True)
        return prefix_tree_attention(module, query, key, value, mask, prefix_tree=packed.context, scaling=scaling)
    if packed.kernel in ("cudnn", "sdpa"):
        return _by_length(query, key, value, packed, scaling), None
    rows = (x[0].transpose(0, 1) for x in (query, key, value))
    longest = packed.longest
    return varlen_causal(packed.kernel, *rows, packed.starts, packed.starts, longest, longest, scaling)[None], None
