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
lists takes the host longer than the launch of the kernels. So do the functions of `flash-attn-4`, which check their
arguments and look up the compiled kernel: in a forward, the first layer under a mask calls them, and later ones with
tensors of the same kind launch the kernel that was found. Everything private of `flash-attn-4` is touched here.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from hf_prefix_tree.modeling.attention.masks.causal import TreeBlockMask

FLASH_KINDS = ("causal", "window", "chunk", "path")  # of masks that are written in the language of the kernels
# For each packed sequence the keyword arguments of the kernels, and the launches that `_forward` may repeat.
_KernelMasks = list[tuple[dict[str, Any], dict[Any, Any]]]
_prepared = WeakTensorKeyDictionary()  # what `_masks` keeps for each `subtree_end`


def attend_flash(
    query: Tensor, key: Tensor, value: Tensor, mask: TreeBlockMask, *, scale: float | None = None
) -> Tensor:
    """
    Attention under a block mask by `flash-attn-4`; arguments and result as for [`~attention.kernels.attend_flex`],
    without softcap and sinks.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if not torch.compiler.is_compiling():
        return _Eager.apply(query, key, value, mask, scale)
    return _flash(query, key, value, *_operands(mask), scale)[0]


def _operands(mask: TreeBlockMask) -> tuple[list[Tensor], list[Tensor], str]:
    """The tensors that a mask reads, its lists of blocks (four for the forward, four for the backward), its kind."""
    kind, tensors = mask.kind, [mask.subtree_end, *([] if mask.limit is None else [mask.depth, mask.limit])]
    if mask.skipped is not None:
        assert kind == "causal"  # `choose_backend` takes no other
        kind, tensors = "path", [mask.subtree_end, mask.skipped]
    lists: list[Any] = [
        *(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices),
        *(mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices),
    ]
    return tensors, lists, kind


def _forward(query: Tensor, key: Tensor, value: Tensor, masks: _KernelMasks, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    output, lse = _empty_results(query, key, value)
    inputs = list(map(_dense, (query, key, value)))
    launch_key = scale, *((x.dtype, x.shape, x.stride(), x.data_ptr() % 16, x.device) for x in inputs)
    for index, (arguments, launched) in enumerate(masks):
        views = [*(_by_group(index, lse, x) for x in (*inputs, output)), lse[index]]
        if launch_key in launched:
            kernel, rest = launched[launch_key]
            with torch.accelerator.device_index(query.device.index):
                kernel(*views, *rest)
            continue
        with _kernels_of(query.device), _Recorder(_flash_attn_fwd) as launches:
            _flash_attn_fwd(*views[:3], softmax_scale=scale, return_lse=True, out=views[3], lse=views[4], **arguments)
        for kernel, passed in launches:
            if all(x.data_ptr() == view.data_ptr() for x, view in zip(passed, views, strict=False)):  # no copies
                launched[launch_key] = kernel, passed[len(views) :]
    return output, lse


def _backward(*tensors: Tensor, masks: _KernelMasks, scale: float) -> tuple[Tensor, ...]:
    from flash_attn.cute.interface import _flash_attn_bwd

    grad, query, key, value, output, lse = map(_dense, tensors)
    query_grad, key_grad, value_grad = _empty_gradients(grad, query, key, value)
    with _kernels_of(query.device):
        for index, (arguments, _) in enumerate(masks):
            _flash_attn_bwd(
                *(_by_group(index, lse, x) for x in (query, key, value, output, grad)),
                lse[index],
                softmax_scale=scale,
                dq=_by_group(index, lse, query_grad),
                dk=key_grad[index],
                dv=value_grad[index],
                **arguments,
            )
    return query_grad, key_grad, value_grad


_flash = torch.library.custom_op(
    "hf_prefix_tree::flash",
    lambda q, k, v, tensors, lists, kind, scale: _forward(q, k, v, _masks(q, k, tensors, lists, kind), scale),
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor[] mask, Tensor[] lists, str kind, float scale) -> (Tensor, Tensor)",
)
_flash_backward = torch.library.custom_op(
    "hf_prefix_tree::flash_backward",
    lambda grad, q, k, v, output, lse, tensors, lists, kind, scale: _backward(
        grad, q, k, v, output, lse, masks=_masks(q, k, tensors, lists, kind, backward=True), scale=scale
    ),
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor output, Tensor lse, Tensor[] mask, Tensor[] lists, "
    "str kind, float scale) -> (Tensor, Tensor, Tensor)",
)


@_flash.register_fake
def _empty_results(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """
    The output, in memory tokens before heads, and the log-sum-exp of each group of heads, `(B, groups, kv_heads, N)`.
    """
    batch_size, heads, length, _ = query.shape
    kv_heads = key.shape[1]
    lse = query.new_empty(batch_size, heads // kv_heads, kv_heads, length, dtype=torch.float32)
    return query.new_empty(batch_size, length, heads, value.shape[3]).transpose(1, 2), lse


@_flash_backward.register_fake
def _empty_gradients(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The gradient of the queries, and for each group those of keys and values, `(B, groups, N, kv_heads, ...)`."""
    batch_size, heads, length, size = query.shape
    _, kv_heads, keys, _ = key.shape
    query_grad = query.new_empty(batch_size, length, heads, size).transpose(1, 2)
    shape = batch_size, heads // kv_heads, keys, kv_heads
    return query_grad, *(x.new_empty(*shape, x.shape[3]) for x in (key, value))


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    query, key, value, tensors, lists, *ctx.rest = inputs
    ctx.save_for_backward(query, key, value, *output, *tensors, *lists)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple:
    saved = ctx.saved_tensors  # once: checkpointing recomputes it, and then lets go
    tensors, lists = list(saved[5:-8]), list(saved[-8:])
    query_grad, *grads = _flash_backward(grad, *saved[:5], tensors, lists, *ctx.rest)
    # Not in the operator: compiled layers add the groups up where they read them.
    return query_grad, *(x.sum(dim=1).transpose(1, 2) for x in grads), [None] * len(tensors), [None] * 8, None, None


_flash.register_autograd(_differentiate, setup_context=_keep)


class _Eager(torch.autograd.Function):
    """Skips the dispatch of the operators."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:  # with a `setup_context` it takes the host longer
        query, key, value, ctx.mask, ctx.scale = inputs  # the mask lives as long as the graph
        output, lse = _forward(query, key, value, _masks(query, key, *_operands(ctx.mask)), ctx.scale)
        ctx.save_for_backward(query, key, value, output, lse)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable  # what the kernels write has no graph of its own
    def backward(ctx: Any, grad: Tensor) -> tuple:
        saved = ctx.saved_tensors
        masks = _masks(saved[0], saved[1], *_operands(ctx.mask), backward=True)
        query_grad, *grads = _backward(grad, *saved, masks=masks, scale=ctx.scale)
        # two groups are added faster than reduced
        sums = (x.sum(dim=1) if x.shape[1] > 2 else functools.reduce(torch.add, x.unbind(1)) for x in grads)
        return query_grad, *(x.transpose(1, 2) for x in sums), None, None


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_group(index: int, lse: Tensor, x: Tensor) -> Tensor:
    """A view of `x[index]`, `(heads, N, size)`, as `(groups, N, kv_heads, size)`; groups have the same keys."""
    _, groups, kv_heads, _ = lse.shape
    _, heads, length, size = x.shape
    of_sequence, of_head, of_token, _ = x.stride()
    of_group, of_next = (of_head, groups * of_head) if heads == groups * kv_heads else (0, of_head)
    shape, strides = (groups, length, kv_heads, size), (of_group, of_token, of_next, 1)
    return x.as_strided(shape, strides, x.storage_offset() + index * of_sequence)


def _masks(query: Tensor, key: Tensor, tensors: Any, lists: Any, kind: str, backward: bool = False) -> _KernelMasks:
    """
    Those of the forward or of the backward, prepared once for all layers whose tensors are these, not copies. Holds
    the addresses of the tensors that the mask reads: they must outlive the result.
    """
    heads, lists = (query.shape[1] // key.shape[1], key.shape[1]), lists[4:] if backward else lists[:4]
    prepared, addresses = _prepared.setdefault(tensors[0], {}), [x.data_ptr() for x in (*tensors, *lists)]
    if prepared.get((kind, heads, backward), (None,))[0] != addresses:
        prepared[kind, heads, backward] = addresses, _prepare(heads, tensors, lists, kind)
    return prepared[kind, heads, backward][1]


def _prepare(heads: tuple[int, int], tensors: Sequence[Tensor], lists: Sequence[Tensor], kind: str) -> _KernelMasks:
    from cutlass import Int64
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in tensors)  # they are read by address
    size = tensors[0].shape[1] // max(x.shape[-1] for x in lists[:2])  # the blocks of keys, no fewer than of queries
    masks: _KernelMasks = []
    for index in range(len(lists[0])):
        expanded = [x[index, None].expand(*heads, *x.shape[2:]) for x in lists]
        blocks = BlockSparseTensorsTorch(*expanded, block_size=(size, size))
        scalars = tuple(Int64((x[index] if x.dim() == 2 else x).data_ptr()) for x in tensors)  # one limit for all
        masks.append(({"mask_mod": _mask_mod(kind), "aux_scalars": scalars, "block_sparse_tensors": blocks}, {}))
    return masks


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
    digest = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]
    chosen.__cute_hash__ = f"hf_prefix_tree {digest}: {kind}"  # compiled kernels are kept under it, on disk as well
    return chosen


_compiling = threading.RLock()  # the backward runs in other threads


@contextmanager
def _kernels_of(device: torch.device) -> Iterator[None]:
    """This thread compiles kernels for this GPU, in our order of blocks, which compare no pair with an end."""
    from flash_attn.cute import flash_bwd_sm90, flash_fwd_sm90, mask, tile_scheduler

    modules, thread = (flash_fwd_sm90, flash_bwd_sm90), threading.get_ident()

    def mask_of(*args: Any, **kwargs: Any) -> Any:  # what other code compiles meanwhile has all its masks
        return (_whole_blocks() if threading.get_ident() == thread else mask.AttentionMask)(*args, **kwargs)

    with torch.accelerator.device_index(device.index), _compiling:
        try:
            for module in modules:
                module.AttentionMask = mask_of
                module.SingleTileScheduler = _scheduler(last_first=module is flash_fwd_sm90)
            yield
        finally:
            for module in modules:
                module.AttentionMask = mask.AttentionMask
                module.SingleTileScheduler = tile_scheduler.SingleTileScheduler


class _Recorder(UserDict):
    """Takes the place of the compiled kernels of a function of `flash-attn-4`; gives what this thread launches."""

    def __init__(self, function: Any) -> None:
        self.function, self.data, self.thread = function, function.compile_cache, threading.get_ident()

    def __enter__(self) -> list[tuple[Callable, tuple]]:
        self.function.compile_cache, self.launches = self, list[tuple[Callable, tuple]]()
        return self.launches

    def __exit__(self, *error: object) -> None:
        self.function.compile_cache = self.data

    def __getitem__(self, key: Any) -> Callable:
        kernel = self.data[key]

        def launch(*arguments: Any) -> None:
            self.launches.append((kernel, arguments))
            kernel(*arguments)

        return launch if threading.get_ident() == self.thread else kernel


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
