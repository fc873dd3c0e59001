# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The masks of diffusion language models: at most two spans of keys that each query sees, and one of queries per key.

Every mask here is: query q sees key k iff `start0 <= k < end0` or `start1 <= k < end1`, for the spans of q, and
`first <= q < until`, for the span of k; and every token sees itself, so that no softmax is over nothing. That covers
full attention, block-causal attention, and the `[x_t | x_0]` sequences of block diffusion, where the span of a key is
everything or, if it is not attended, nothing; and shared prefixes, where each query's span is everything and a key's
its subtree. [`spans`] builds these numbers; [`dense_mask`] is the reference, an N x N tensor; [`block_mask`] describes
the same mask to FlexAttention, built directly from block-wise minima and maxima: O(N + (N/128)^2) time and memory, no
N x N tensor and no wait for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hf_prefix_tree.modeling.attention.masks.causal import listed_blocks
from hf_prefix_tree.modeling.batch import BLOCK_SIZE
from hf_prefix_tree.tree.folding import check_choice

LAYOUTS = ("full", "block_causal", "block_diffusion", "hybrid")
START0, END0, START1, END1, FIRST, UNTIL = range(6)


def spans(
    attention_mask: Tensor,
    layout: str = "full",
    block_size: int | None = None,
    *,
    window_start: Tensor | None = None,
    causal_before: Tensor | None = None,
) -> Tensor:
    """
    The spans of keys that each token of a batch sees.

    - `"full"`: every token sees every attended one.
    - `"block_causal"`: a token sees its block and all earlier ones.
    - `"block_diffusion"`: the sequence is `[x_t | x_0]`, twice as long. A masked token sees its masked block and all
      earlier clean blocks; a clean token sees the clean blocks up to its block.
    - `"hybrid"`: the same sequence, but a clean token sees the clean tokens up to itself: they are those of an
      autoregressive model, and the one after them is not among them.

    Args:
        attention_mask (`torch.Tensor` of shape `(B, L)`, int64 or bool):
            The tokens that others may see. A token that is not attended still sees the spans of its position.
        layout (`str`, *optional*, defaults to `"full"`):
            One of the above.
        block_size (`int`, *optional*):
            Tokens of a block; needed for all layouts but `"full"`.
        window_start (`torch.Tensor` of shape `(B,)`, int64, *optional*):
            Where the blocks begin; the tokens before it are one block. Defaults to 0.
        causal_before (`torch.Tensor` of shape `(B,)`, int64, *optional*):
            For `"block_causal"`: tokens before this index see the tokens up to themselves only.

    Returns:
        `torch.Tensor` of shape `(B, 6, N)`, int32: start and end of the first span of keys, of the second, and of the
        queries that see the token: 0 and N, or twice 0 where it is not attended; N is L, or 2 L for `[x_t | x_0]`.

    Raises:
        `ValueError`: If `layout` is unknown.

    Example:

    ```python
    >>> import torch
    >>> dense_mask(spans(torch.ones(1, 4), "block_diffusion", 2))[0, 0].int()
    tensor([[1, 1, 0, 0, 0, 0, 0, 0],
            [1, 1, 0, 0, 0, 0, 0, 0],
            [0, 0, 1, 1, 1, 1, 0, 0],
            [0, 0, 1, 1, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1, 0, 0],
            [0, 0, 0, 0, 1, 1, 1, 1],
            [0, 0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)

    ```
    """
    check_choice(layout, "layout", LAYOUTS)
    attended = (attention_mask != 0).int()
    batch_size, length = attended.shape
    index = torch.arange(length, device=attended.device, dtype=torch.int32).expand(batch_size, -1)
    none = torch.zeros_like(index)
    if layout == "full":
        return torch.stack([none, none + length, none, none, none, length * attended], dim=1)
    assert block_size is not None  # the other layouts have blocks
    start = none[:, :1] if window_start is None else window_start.int()[:, None]
    block_start = torch.where(index < start, 0, start + (index - start) // block_size * block_size)
    block_end = torch.where(index < start, start, block_start + block_size).clamp(max=length)
    if layout == "block_causal":
        if causal_before is not None:
            block_end = torch.where(index < causal_before.int()[:, None], index + 1, block_end)
        return torch.stack([none, block_end, none, none, none, length * attended], dim=1)
    clean_end = block_end if layout == "block_diffusion" else index + 1
    until = 2 * length * attended
    noisy = torch.stack([block_start, block_end, none + length, length + block_start, none, until], dim=1)
    clean = torch.stack([none, none, none + length, length + clean_end, none, until], dim=1)
    return torch.cat([noisy, clean], dim=2)


def dense_mask(spans: Tensor) -> Tensor:
    """
    The mask as one boolean per pair of tokens.

    Args:
        spans (`torch.Tensor` of shape `(B, 6, N)`, int32): See [`spans`].

    Returns:
        `torch.Tensor` of shape `(B, 1, N, N)`, bool: `True` where the query (third axis) sees the key (fourth).
    """
    index = torch.arange(spans.shape[2], device=spans.device, dtype=spans.dtype)
    start0, end0, start1, end1 = (spans[:, entry, :, None] for entry in (START0, END0, START1, END1))
    inside = ((index >= start0) & (index < end0)) | ((index >= start1) & (index < end1))
    seen = inside & (index[:, None] >= spans[:, FIRST, None]) & (index[:, None] < spans[:, UNTIL, None])
    return (seen | (index[:, None] == index[None, :]))[:, None]


def block_mask(spans: Tensor) -> BlockMask:
    """
    The mask as FlexAttention's [`~torch.nn.attention.flex_attention.BlockMask`].

    A block of keys is visible to a block of queries iff a span meets its attended keys, and a key's span the queries:
    as the spans of neighbours overlap or follow one another, the smallest start and the largest end tell. It is full
    iff one span holds it for every query, and every key's span holds the queries: the largest start and the smallest
    end tell. Where the attended tokens of a sequence, or a span across 128 tokens, have gaps, a hidden block may be
    called partial, which costs time only; the same holds for a full one that two spans hold together.

    Args:
        spans (`torch.Tensor` of shape `(B, 6, N)`, int32): See [`spans`]; N a multiple of 128.
    """
    batch_size, _, length = spans.shape
    assert length % BLOCK_SIZE == 0  # `why_not_flex` refuses others
    num_blocks = length // BLOCK_SIZE
    low, high = spans.view(batch_size, 6, num_blocks, BLOCK_SIZE).aminmax(dim=-1)  # [B, 6, blocks]
    attended = (spans[:, FIRST] < spans[:, UNTIL]).view(batch_size, num_blocks, BLOCK_SIZE)
    index = torch.arange(length, device=spans.device, dtype=spans.dtype).view(num_blocks, BLOCK_SIZE)
    # first and last attended key of each block; without one, they are such that no span meets them
    first = torch.where(attended, index, length).amin(dim=-1)[:, None, :]
    last = torch.where(attended, index, -1).amax(dim=-1)[:, None, :]
    block_first, block_last = index[None, None, :, 0], index[None, None, :, -1]
    visible = torch.zeros((batch_size, num_blocks, num_blocks), dtype=torch.bool, device=spans.device)
    full = visible.clone()
    for start, end in ((START0, END0), (START1, END1)):
        visible |= (low[:, start, :, None] <= last) & (high[:, end, :, None] > first)
        full |= (high[:, start, :, None] <= block_first) & (low[:, end, :, None] > block_last)
    # the same with queries and keys exchanged
    visible &= (low[:, FIRST, None] <= block_last.mT) & (high[:, UNTIL, None] > block_first.mT)
    full &= (high[:, FIRST, None] <= block_first.mT) & (low[:, UNTIL, None] > block_last.mT)
    partial = (visible | torch.eye(num_blocks, dtype=torch.bool, device=spans.device)) & ~full
    # Clones, not views: the compiler would also specialise on the tensor that they are views of.
    entries = tuple(spans[:, entry].clone() for entry in range(6))
    return BlockMask.from_kv_blocks(
        *listed_blocks(partial, full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=_mask_mod(*entries),
        seq_lengths=(length, length),
    )


def _mask_mod(start0: Tensor, end0: Tensor, start1: Tensor, end1: Tensor, first: Tensor, until: Tensor) -> Any:
    # One code object for every layout, that reads tensors and never Python numbers: it is compiled once.
    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        in0 = (k >= start0[b, q]) & (k < end0[b, q])
        in1 = (k >= start1[b, q]) & (k < end1[b, q])
        return ((in0 | in1) & (q >= first[b, k]) & (q < until[b, k])) | (k == q)

    return visible
