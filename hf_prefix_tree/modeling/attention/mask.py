# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The tree mask: key k is visible to query q iff `k <= q < subtree_end[k]`, and `depth[q] - depth[k] < window` in
sliding layers, `depth[q] // chunk == depth[k] // chunk` in chunked ones.

[`dense_mask`] is the reference: an N x N tensor, plain and slow. [`tree_block_mask`] describes the same mask to
FlexAttention, built directly from block-wise minima and maxima: O(N + (N/128)^2) time and memory, no N x N tensor and
no wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.attention.flex_attention import BlockMask

from hf_prefix_tree.modeling.batch import BLOCK_SIZE, DEPTH, SUBTREE_END


def dense_mask(prefix_tree: torch.Tensor, window: int | None = None, chunk: int | None = None) -> torch.Tensor:
    """
    The mask as one boolean per pair of tokens.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): The tree rows of the batch contract.
        window (`int`, *optional*): Sliding window in tokens of path distance.
        chunk (`int`, *optional*): Chunk size in tokens of depth; a token sees its own chunk only.

    Returns:
        `torch.Tensor` of shape `(B, 1, N, N)`, bool: `True` where the query (third axis) sees the key (fourth).

    Example:

    ```python
    >>> import torch
    >>> tree = torch.tensor([[[3, 2, 3], [0, 1, 1], [-1, 0, 0]]], dtype=torch.int32)  # a root with two children
    >>> dense_mask(tree)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 0, 1]], dtype=torch.int32)

    ```
    """
    subtree_end, depth = prefix_tree[:, SUBTREE_END], prefix_tree[:, DEPTH]
    index = torch.arange(subtree_end.shape[1], device=subtree_end.device, dtype=subtree_end.dtype)
    mask = (index[None, None, :] <= index[None, :, None]) & (index[None, :, None] < subtree_end[:, None, :])
    if window is not None:
        mask &= depth[:, :, None] - depth[:, None, :] < window
    if chunk is not None:
        mask &= depth[:, :, None] // chunk == depth[:, None, :] // chunk
    return mask[:, None]


class TreeBlockMask(BlockMask):
    """A block mask, what runs it (`"flex"`: Triton, or `"flash"`), and what the pairs of a partial block depend on."""

    backend: str = "flex"
    subtree_end: torch.Tensor  # [B, N] int32
    depth: torch.Tensor  # [B, N] int32
    kind: str  # "plain", "window" or "chunk"
    limit: torch.Tensor | None  # [1] int32: the window, or the size of chunks


def tree_block_mask(prefix_tree: torch.Tensor, window: int | None = None, chunk: int | None = None) -> TreeBlockMask:
    """
    The mask as FlexAttention's [`~torch.nn.attention.flex_attention.BlockMask`].

    For a block of keys strictly before the block of queries, with the largest and smallest `subtree_end` of its keys:
    no pair is visible iff `max <= first query`, all are iff `min > last query`. Blocks on the diagonal are partial. A
    window hides a block where even the closest depths are too far apart, and leaves it full where the farthest are
    not. A chunk size hides a block where the ranges of chunks do not meet, and leaves it full where all depths are of
    one chunk.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): The tree rows; N a multiple of 128.
        window (`int`, *optional*): Sliding window in tokens of path distance.
        chunk (`int`, *optional*): Chunk size in tokens of depth.

    Raises:
        `ValueError`: if N is not a multiple of 128.
    """
    length = prefix_tree.shape[2]
    if length % BLOCK_SIZE != 0:
        raise ValueError(
            f"`prefix_tree` has rows of {length} tokens, but FlexAttention needs a multiple of {BLOCK_SIZE}: build "
            f"the batch with `DataCollatorForPrefixTree(pad_to_multiple_of={BLOCK_SIZE})`."
        )
    # Clones, not views: the compiler would also specialise on the tensor that they are views of.
    subtree_end, depth = (
        prefix_tree[:, row].clone(memory_format=torch.contiguous_format) for row in (SUBTREE_END, DEPTH)
    )
    size = block_size(length)
    end_low, end_high = _block_bounds(subtree_end, size)
    block = torch.arange(end_low.shape[1], device=subtree_end.device, dtype=subtree_end.dtype)
    first_query = (block * size)[:, None]
    last_query = (block * size + size - 1).clamp(max=length - 1)[:, None]
    before = block[None, :] < block[:, None]
    visible = before & (end_high[:, None, :] > first_query)  # [B, query blocks, key blocks]
    full = before & (end_low[:, None, :] > last_query)
    if window is not None:
        depth_low, depth_high = _block_bounds(depth, size)
        visible &= depth_low[:, :, None] - depth_high[:, None, :] < window
        full &= depth_high[:, :, None] - depth_low[:, None, :] < window
    if chunk is not None:
        low, high = (bound // chunk for bound in _block_bounds(depth, size))
        visible &= (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
        full &= (low == high)[:, :, None] & (low == high)[:, None, :] & (low[:, :, None] == low[:, None, :])
    partial = visible.logical_and_(~full).logical_or_(block[None, :] == block[:, None])
    # A window may be a scalar of the model, but the kernel reads it from a tensor: one compiled graph for all windows.
    reach = _on_device(window, depth)
    chunk_size = _on_device(chunk, depth)
    mask = TreeBlockMask(
        (length, length),
        *listed_blocks(partial),
        *listed_blocks(full),
        *listed_blocks(partial.transpose(1, 2)),  # the queries of a block of keys, for the backward
        *listed_blocks(full.transpose(1, 2)),
        (size, size),
        _mask_mod(subtree_end, depth, reach, chunk_size),
    )
    mask.subtree_end, mask.depth = subtree_end, depth
    mask.kind = mask_kind(window, chunk)
    mask.limit = reach if chunk is None else chunk_size
    return mask


def mask_kind(window: int | None, chunk: int | None) -> str:
    """What hides pairs of a path from each other: `"plain"` (nothing), `"window"` or `"chunk"`."""
    if chunk is not None:
        return "chunk"
    return "plain" if window is None else "window"


def block_size(length: int) -> int:
    """
    The block of a row: 128 tokens, doubled until a row has at most 4,096 blocks. The four lists of blocks then take at
    most 256 MiB, where 128-token blocks of a row of a million tokens would take 1 GiB.

    Args:
        length (`int`): Tokens of the row.

    Example:

    ```python
    >>> block_size(40_960), block_size(524_288), block_size(1_048_576)
    (128, 128, 256)

    ```
    """
    size = BLOCK_SIZE
    while length > size * _MOST_BLOCKS:
        size *= 2
    return size


_MOST_BLOCKS = 4096
_LISTED_AT_ONCE = 2**22  # pairs of blocks: bounds what a listing needs beside its result


def _block_bounds(values: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest value of each block, `[B, nb]` each; the last block may be shorter."""
    missing = -values.shape[1] % size
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1)
    return values.unflatten(1, (-1, size)).aminmax(dim=-1)


def listed_blocks(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of blocks, how many are set and which, the set ones first: `[B, 1, nb]` and `[B, 1, nb, nb]` int32."""
    batch_size, num_blocks, _ = blocks.shape
    column = torch.arange(num_blocks, device=blocks.device, dtype=torch.int32)
    counts = torch.empty((batch_size, 1, num_blocks), dtype=torch.int32, device=blocks.device)
    indices = torch.empty((batch_size, 1, num_blocks, num_blocks), dtype=torch.int32, device=blocks.device)
    rows = max(1, _LISTED_AT_ONCE // (batch_size * num_blocks))
    for start in range(0, num_blocks, rows):
        own = blocks[:, start : start + rows]
        rank = own.cumsum(dim=-1, dtype=torch.int32)  # set blocks up to this one
        count = rank[..., -1:]
        place = torch.where(own, rank - 1, count + column - rank).long()
        indices[:, 0, start : start + rows].scatter_(-1, place, column.expand_as(place))
        counts[:, 0, start : start + rows] = count[..., 0]
    return counts, indices


def _on_device(number: int | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if number is None else torch.full((1,), number, device=like.device, dtype=like.dtype)


def _mask_mod(
    subtree_end: torch.Tensor, depth: torch.Tensor, reach: torch.Tensor | None, chunk_size: torch.Tensor | None
) -> Callable[..., torch.Tensor]:
    # A few code objects that read tensors, never Python numbers: FlexAttention compiles each once.
    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < subtree_end[b, k])

    if chunk_size is not None:

        def visible_in_chunk(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            same_chunk = depth[b, q] // chunk_size[0] == depth[b, k] // chunk_size[0]
            return (k <= q) & (q < subtree_end[b, k]) & same_chunk

        return visible_in_chunk

    if reach is None:
        return visible

    def visible_in_window(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < subtree_end[b, k]) & (depth[b, q] - depth[b, k] < reach[0])

    return visible_in_window
