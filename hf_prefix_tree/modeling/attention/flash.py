# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Tree attention by the Hopper kernels of `flash-attn-4`.

FlexAttention's FLASH backend runs the same kernels. Called directly they expose options that FlexAttention does not:

- Query heads that share keys are sequences of the batch, views of the same keys. Otherwise the kernels sum the
  gradients of keys and values in float32 in memory.
- The longest blocks start first, those of all heads together: in the backward the first keys, which many queries see,
  in the forward the last queries. In the order of the kernels those of the last head would start last, and all wait
  for them.
- The mask looks up the tree by address. The kernels wrap every index of a tensor that a mask reads.
- Packed sequences fill their blocks, so no pair is compared with the ends of the sequences. The kernels do that in
  the first blocks of every block of queries, and in the backward in all blocks.

Custom operators keep compiled layers one graph. Eager layers call what is in them: the dispatch of operators that take
lists takes the host longer than the launch of the kernels. Everything private of `flash-attn-4` is touched here.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_prefix_tree.modeling.attention.masks.causal import TreeBlockMask

FLASH_KINDS = ("causal", "window", "chunk", "path")  # of masks that are written in the language of the kernels


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeBlockMask, *, scale: float | None = None
) -> Tensor:
    """
    Attention under a block mask by `flash-attn-4`; arguments and result as for [`~attention.kernels.attend_flex`],
    without softcap and sinks.
    """
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    tensors = [mask.subtree_end] if mask.limit is None else [mask.subtree_end, mask.depth, mask.limit]
    kind = mask.kind
    if mask.skipped is not None:
        assert kind == "causal"  # `choose_backend` takes no other
        kind, tensors = "path", [mask.subtree_end, mask.skipped]
    lists = [
        *(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices),
        *(mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices),
    ]
    inputs: Any = query, key, value, tensors, lists, kind, scale
    output = _flash(*inputs)[0] if torch.compiler.is_compiling() else _Eager.apply(*inputs)
    return output.transpose(1, 2)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    lists: Sequence[Tensor],
    kind: str,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    output, lse = _empty_results(query, key, value)
    groups = lse.shape[1]
    query, key, value = map(_dense, (query, key, value))
    with _kernels_of(query.device):
        for index, lse_of_one in enumerate(lse):
            _flash_attn_fwd(
                *_operands(index, groups, query, key, value),
                softmax_scale=scale,
                return_lse=True,
                out=_by_group(output[index], groups),
                lse=lse_of_one,
                **_mask(index, tensors, lists[:4], kind),
            )
    return output, lse


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    lists: Sequence[Tensor],
    kind: str,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd

    query_grad, key_grad, value_grad = _empty_gradients(grad, query, key, value)
    groups = lse.shape[1]
    grad, query, key, value = map(_dense, (grad, query, key, value))
    with _kernels_of(query.device):
        for index, lse_of_one in enumerate(lse):
            _flash_attn_bwd(
                *_operands(index, groups, query, key, value),
                _by_group(output[index], groups),
                _by_group(grad[index], groups),
                lse_of_one,
                softmax_scale=scale,
                dq=_by_group(query_grad[index], groups),
                dk=key_grad[index],
                dv=value_grad[index],
                **_mask(index, tensors, lists[4:], kind),
            )
    return query_grad, key_grad, value_grad


_flash = torch.library.custom_op("hf_prefix_tree::flash", _forward, mutates_args=())
_flash_backward = torch.library.custom_op("hf_prefix_tree::flash_backward", _backward, mutates_args=())


@_flash.register_fake
def _empty_results(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp of each group of heads, `(B, groups, kv_heads, N)`."""
    batch_size, length, heads, _ = query.shape
    kv_heads = key.shape[2]
    lse = query.new_empty(batch_size, heads // kv_heads, kv_heads, length, dtype=torch.float32)
    return query.new_empty(*query.shape[:3], value.shape[3]), lse


@_flash_backward.register_fake
def _empty_gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the queries, and for each group of heads those of keys and values, `(B, groups, N, ...)`."""
    groups = query.shape[2] // key.shape[2]
    key_grad, value_grad = (x.new_empty(x.shape[0], groups, *x.shape[1:]) for x in (key, value))
    return query.new_empty(query.shape), key_grad, value_grad


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, tensors, lists, *ctx.rest = inputs
    ctx.num_tensors = len(tensors)
    ctx.save_for_backward(query, key, value, *output, *tensors, *lists)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor | None, backward: Callable = _flash_backward) -> tuple:
    query, key, value, output, lse, *rest = ctx.saved_tensors  # once: checkpointing recomputes it, and then lets go
    tensors, lists = rest[: ctx.num_tensors], rest[ctx.num_tensors :]
    query_grad, *grads = backward(grad, query, key, value, output, lse, tensors, lists, *ctx.rest)
    # Not in the operator: compiled layers add the groups up where they read them. Eager layers add two faster than
    # they reduce them.
    grads = [x.sum(dim=1) if x.shape[1] > 2 else functools.reduce(torch.add, x.unbind(1)) for x in grads]
    return query_grad, *grads, [None] * len(tensors), [None] * len(lists), None, None


_flash.register_autograd(_differentiate, setup_context=_keep)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # with a `setup_context` it takes the host longer
        results = _forward(*inputs)
        _keep(ctx, inputs, results)
        return results[0]

    @staticmethod
    @torch.autograd.function.once_differentiable  # what the kernels write has no graph of its own
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return *_differentiate(ctx, grad, None, _backward)[:3], None, None, None, None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _operands(index: int, groups: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a packed sequence: each group of queries, and for each the same keys and values."""
    shared = (-1, -1, -1)
    return _by_group(query[index], groups), key[index].expand(groups, *shared), value[index].expand(groups, *shared)


def _by_group(x: Tensor, groups: int) -> Tensor:
    """A view of the heads of a packed sequence `(N, heads, size)` as `(groups, N, heads / groups, size)`."""
    length, heads, size = x.shape
    of_token, of_head, _ = x.stride()
    return x.as_strided((groups, length, heads // groups, size), (of_head, of_token, groups * of_head, 1))


def _mask(index: int, tensors: Sequence[Tensor], lists: Sequence[Tensor], kind: str) -> dict[str, Any]:
    """The keyword arguments for the mask of a packed sequence. The tensors must live until the kernel has run."""
    from cutlass import Int64
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in tensors)  # they are read by address
    of_sequence = [x[index] if x.dim() == 2 else x for x in tensors]  # a limit is the same for all
    size = tensors[0].shape[1] // max(x.shape[-1] for x in lists[:2])  # the blocks of keys, no fewer than of queries
    return {
        "mask_mod": _mask_mod(kind),
        "aux_scalars": tuple(Int64(x.data_ptr()) for x in of_sequence),
        "block_sparse_tensors": BlockSparseTensorsTorch(*(x[index, None] for x in lists), block_size=(size, size)),
    }


@functools.cache
def _mask_mod(kind: str) -> Callable:
    """
    Whether a pair is visible, in the language of the kernels; see [`~attention.masks.causal.dense_mask`]. The
    scalars are the addresses of the tensors.
    """
    import cutlass
    import cutlass.cute as cute

    def lookup(address: Any, index: Any) -> Any:
        pointer = cute.make_ptr(cutlass.Int32, address, cute.AddressSpace.gmem, assumed_align=4)
        element = cute.make_rmem_tensor(1, cutlass.Int32)
        element[0] = cute.make_tensor(pointer, cute.make_layout(2**30))[index]
        return element.load()

    @cute.jit
    def causal(b: Any, h: Any, q: Any, k: Any, info: Any, tensors: Any, scalars: Any) -> Any:
        return (k <= q) & (q < lookup(scalars[0], k[0]))

    @cute.jit
    def window(b: Any, h: Any, q: Any, k: Any, info: Any, tensors: Any, scalars: Any) -> Any:
        near = lookup(scalars[1], q[0]) - lookup(scalars[1], k[0]) < lookup(scalars[2], 0)
        return (k <= q) & (q < lookup(scalars[0], k[0])) & near

    @cute.jit
    def chunk(b: Any, h: Any, q: Any, k: Any, info: Any, tensors: Any, scalars: Any) -> Any:
        size = lookup(scalars[2], 0)
        same = lookup(scalars[1], q[0]) // size == lookup(scalars[1], k[0]) // size
        return (k <= q) & (q < lookup(scalars[0], k[0])) & same

    @cute.jit
    def path(b: Any, h: Any, q: Any, k: Any, info: Any, tensors: Any, scalars: Any) -> Any:
        return (k <= q + lookup(scalars[1], 0)) & (q < lookup(scalars[0], k[0]))

    chosen = {"causal": causal, "window": window, "chunk": chunk, "path": path}[kind]
    # compiled kernels are kept under it, on disk as well
    chosen.__cute_hash__ = f"hf_prefix_tree {_digest()}: {kind}"
    return chosen


@functools.cache
def _digest() -> str:
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


_compiling = threading.RLock()  # the backward runs in other threads


@contextmanager
def _kernels_of(device: torch.device) -> Iterator[None]:
    """What this thread compiles now is for this GPU, in our order of blocks, and compares no pair with an end."""
    import flash_attn.cute.flash_bwd_sm90 as backward
    import flash_attn.cute.flash_fwd_sm90 as forward
    from flash_attn.cute.mask import AttentionMask
    from flash_attn.cute.tile_scheduler import SingleTileScheduler

    thread = threading.get_ident()

    def mask_of(*args: Any, **kwargs: Any) -> Any:  # what other code compiles meanwhile has all its masks
        return (_whole_blocks() if threading.get_ident() == thread else AttentionMask)(*args, **kwargs)

    with torch.accelerator.device_index(device.index), _compiling:
        forward.SingleTileScheduler, backward.SingleTileScheduler = _scheduler(last_first=True), _scheduler()
        forward.AttentionMask = backward.AttentionMask = mask_of
        try:
            yield
        finally:
            forward.SingleTileScheduler = backward.SingleTileScheduler = SingleTileScheduler
            forward.AttentionMask = backward.AttentionMask = AttentionMask


@functools.cache
def _whole_blocks() -> type:
    from flash_attn.cute.mask import AttentionMask

    class WholeBlocks(AttentionMask):
        def apply_mask(self, *args: Any, mask_mod: Any = None, mask_seqlen: bool = False, **kwargs: Any) -> None:
            if mask_mod is not None:  # a full block has nothing to hide
                super().apply_mask(*args, mask_mod=mask_mod, mask_seqlen=False, **kwargs)

    return WholeBlocks


@functools.cache
def _scheduler(last_first: bool = False) -> type:
    import cutlass.cute as cute
    from flash_attn.cute.tile_scheduler import SingleTileScheduler

    class HeadsFirst:
        Params = SingleTileScheduler.Params
        to_underlying_arguments = staticmethod(SingleTileScheduler.to_underlying_arguments)

        @staticmethod
        def create(params: Any, context: Any = None, *, loc: Any = None, ip: Any = None) -> Any:
            head, sequence, block = cute.arch.block_idx()
            if last_first:
                block = params.num_block - 1 - block
            return SingleTileScheduler(params, (block, head, sequence), loc=loc, ip=ip)

        @staticmethod
        def get_grid_shape(params: Any, *, loc: Any = None, ip: Any = None) -> tuple:
            return params.num_head * params.num_splits, params.num_batch, params.num_block

    return HeadsFirst
