# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The plain tree mask: key k is visible to query q iff `k <= q < subtree_end[k]`.

The other kinds of [`KINDS`] hide some of these pairs, by the depths of query and key and one number. [`dense_mask`] is
the reference: an N x N tensor, plain and slow. [`tree_block_mask`] describes the same mask to FlexAttention, built
directly from block-wise minima and maxima: O(N + (N/128)^2) time and memory, no N x N tensor and no wait for the
device. [`tree_mask_mod`] is the mask as FlexAttention's function of a pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from hf_prefix_tree.modeling.attention.masks import chunk, window
from hf_prefix_tree.modeling.batch import BLOCK_SIZE, DEPTH, SUBTREE_END

# The kinds by name: modules that define the functions of `masks/window.py`. The first one that a config asks for is
# the mask of the layer.
KINDS: dict[str, Any] = {"chunk": chunk, "window": window}


def limit_asked_by(config: Any, local_size: int | None, is_overlaid: bool) -> dict[str, int]:
    """
    The limit of a layer's mask, by its kind, as [`dense_mask`] takes it; none for the plain mask.

    Args:
        config (`PretrainedConfig`): The config of the language model.
        local_size (`int`, *optional*): Window or chunk size that Transformers asks the mask function for.
        is_overlaid (`bool`): Whether the model lays another mask over the causal one.
    """
    for name, kind in KINDS.items():
        if (limit := kind.asked_by(config, local_size, is_overlaid)) is not None:
            return {name: limit}
    return {}


def mean_keys_seen(config: Any, layers: int, longest: int) -> npt.NDArray[np.float64]:
    """
    How many keys a token sees in a layer, by its depth: the mean over a model's layers with attention.

    Args:
        config (`PretrainedConfig`): The config of the language model.
        layers (`int`): Its layers with attention.
        longest (`int`): Tokens of the longest branch.

    Returns:
        float64 `[longest]`.

    Example:

    ```python
    >>> from transformers import Qwen3Config
    >>> types = ["full_attention", "sliding_attention"]
    >>> config = Qwen3Config(num_hidden_layers=2, layer_types=types, use_sliding_window=True, sliding_window=2)
    >>> mean_keys_seen(config, layers=2, longest=4)
    array([1. , 2. , 2.5, 3. ])

    ```
    """
    depth, total, plain = np.arange(longest), np.zeros(longest), layers
    for kind in KINDS.values():
        if (size := kind.size_in(config)) is not None:
            plain -= kind.layers_in(config)
            total += kind.layers_in(config) * kind.keys_seen(depth, size)
    return (total + plain * (depth + 1)) / max(layers, 1)


def kind_of(limit: Mapping[str, int | None]) -> tuple[str, int | None]:
    """
    The name of a kind and its limit, of keyword arguments as [`dense_mask`] takes them.

    Args:
        limit (`Mapping[str, int | None]`): At most one number by the name of its kind; the others are `None`.

    Example:

    ```python
    >>> kind_of({"window": None}), kind_of({"window": 8})
    (('causal', None), ('window', 8))

    ```
    """
    given = [(name, number) for name, number in limit.items() if number is not None]
    assert limit.keys() <= KINDS.keys() and len(given) <= 1
    return given[0] if given else ("causal", None)


def dense_mask(prefix_tree: Tensor, path: Tensor | None = None, **limit: int | None) -> Tensor:
    """
    The mask as one boolean per pair of tokens.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): As in the batch contract.
        path (`torch.Tensor` of shape `(B, 2, P)`, int32, *optional*): Tokens before these, whose keys come first:
            their `subtree_end`, counted from the first of the N tokens (at most 0: visible to none), and depth.
        limit: At most one of `window` (`int`), tokens of path distance that a token sees, and `chunk` (`int`): a token
            sees the tokens of its chunk, of so many tokens of depth.

    Returns:
        `torch.Tensor` of shape `(B, 1, N, P + N)`, bool: `True` where the query (third axis) sees the key (fourth).

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
    kind, number = kind_of(limit)
    subtree_end, depth = _bounds_and_depths(prefix_tree, path)
    index = torch.arange(prefix_tree.shape[2], device=subtree_end.device, dtype=subtree_end.dtype)
    before = subtree_end.shape[1] - len(index)
    mask = (index[:, None] < subtree_end[:, None, :]).tril_(before)  # in place: no other N x N tensor
    for start in range(0, len(index) if number is not None else 0, 1024):
        queries = slice(start, start + 1024)
        mask[:, queries] &= KINDS[kind].sees(depth[:, before:][:, queries, None], depth[:, None, :], number)
    return mask[:, None]


class TreeBlockMask(BlockMask):
    """A block mask, what runs it (`"flex"`: Triton, or `"flash"`), and what the pairs of a partial block depend on."""

    backend: str = "flex"
    subtree_end: Tensor  # [B, P + N] int32
    depth: Tensor  # [B, P + N] int32
    kind: str  # "causal" or one of `KINDS`
    limit: Tensor | None  # [1] int32: the window, or the size of chunks
    skipped: Tensor | None = None  # [1] int32: P, where it is above 0


def tree_block_mask(prefix_tree: Tensor, path: Tensor | None = None, **limit: int | None) -> TreeBlockMask:
    """
    The mask as FlexAttention's [`~torch.nn.attention.flex_attention.BlockMask`].

    For a block of keys strictly before the block of queries, with the largest and smallest `subtree_end` of its keys:
    no pair is visible iff `max <= first query`, all are iff `min > last query`. Blocks on the diagonal are partial.
    The bounds of another kind are by the smallest and the largest depth of a block.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): As in the batch contract; N a multiple of 128.
        path (`torch.Tensor` of shape `(B, 2, P)`, int32, *optional*): As in [`dense_mask`]; P a multiple of 128.
        limit: As in [`dense_mask`].
    """
    kind, number = kind_of(limit)
    length = prefix_tree.shape[2]
    subtree_end, depth = _bounds_and_depths(prefix_tree, path)
    skipped = subtree_end.shape[1] - length
    # `why_not_flex` refuses others, and sections are padded; FLASH compares no pair with the ends of the sequences
    assert length % BLOCK_SIZE == skipped % BLOCK_SIZE == 0
    size = block_size(length) if path is None else BLOCK_SIZE
    end_low, end_high = _block_bounds(subtree_end, size)
    key_block = torch.arange(-skipped // size, -(-length // size), device=subtree_end.device, dtype=subtree_end.dtype)
    block = key_block[skipped // size :, None]
    first_query, last_query = block * size, (block * size + size - 1).clamp(max=length - 1)
    visible = (key_block <= block) & (end_high[:, None] > first_query)  # [B, query blocks, key blocks]
    full = (key_block < block) & (end_low[:, None] > last_query)
    if number is not None:
        low, high = _block_bounds(depth, size)
        of_queries = (x[:, skipped // size :, None] for x in (low, high))
        some, every = KINDS[kind].block_bounds(*of_queries, low[:, None], high[:, None], number)
        visible &= some
        full &= every
    partial = visible ^ full  # all full blocks are visible
    number_on_device, skipped_on_device = _on_device(number, depth), _on_device(skipped or None, depth)
    mask = TreeBlockMask(
        (length, skipped + length),
        *listed_blocks(partial, full),
        *listed_blocks(partial.mT, full.mT),  # the queries of a block of keys, for the backward
        (size, size),
        _mask_mod(subtree_end, depth, kind, number_on_device, skipped_on_device),
    )
    mask.subtree_end, mask.depth, mask.skipped = subtree_end, depth, skipped_on_device
    mask.kind, mask.limit = kind, number_on_device
    return mask


def tree_mask_mod(prefix_tree: Tensor, **limit: int | None) -> Callable[..., Tensor]:
    """
    The mask as a `mask_mod` of FlexAttention: a function of batch, head, query and key that tells whether the query
    sees the key. `create_block_mask` takes it, but [`tree_block_mask`] is much faster.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): As in the batch contract.
        limit: As in [`dense_mask`].

    Example:

    ```python
    >>> import torch
    >>> from hf_prefix_tree import Branch, DataCollatorForPrefixTree, fold, tree_mask_mod
    >>> paths = [5, 6, 7, 8, 9], [5, 6, 7, 3], [5, 6, 4, 2]
    >>> tree = fold([Branch(path, [1] * len(path)) for path in paths])
    >>> packed = DataCollatorForPrefixTree(pad_token_id=0, pad_to_multiple_of=8)([tree])["prefix_tree"]
    >>> query, key = torch.arange(8)[:, None], torch.arange(8)
    >>> for keys in tree_mask_mod(packed)(0, 0, query, key).int():
    ...     print(*(".#"[seen] for seen in keys))
    # . . . . . . .
    # # . . . . . .
    # # # . . . . .
    # # # # . . . .
    # # # # # . . .
    # # # . . # . .
    # # . . . . # .
    # # . . . . # #
    >>> for keys in tree_mask_mod(packed, window=2)(0, 0, query, key).int():
    ...     print(*(".#"[seen] for seen in keys))
    # . . . . . . .
    # # . . . . . .
    . # # . . . . .
    . . # # . . . .
    . . . # # . . .
    . . # . . # . .
    . # . . . . # .
    . . . . . . # #

    ```
    """
    kind, number = kind_of(limit)
    subtree_end, depth = _bounds_and_depths(prefix_tree)
    return _mask_mod(subtree_end, depth, kind, _on_device(number, depth))


def _bounds_and_depths(prefix_tree: Tensor, path: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`subtree_end` and depth of every key, `[B, P + N]`."""
    # Clones, not views: the compiler would also specialise on the tensor that they are views of.
    parts = [prefix_tree] if path is None else [path, prefix_tree]
    subtree_end, depth = (torch.cat([part[:, x] for part in parts], dim=1) for x in (SUBTREE_END, DEPTH))
    return subtree_end, depth


def block_size(length: int) -> int:
    """
    The block of a packed sequence: 128 tokens, doubled until the sequence has at most 4,096 blocks. The four lists of
    blocks then take at most 256 MiB, where 128-token blocks of a million tokens would take 1 GiB.

    Args:
        length (`int`): Tokens of the packed sequence.

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


def _block_bounds(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each block, `[B, nb]` each; the last block may be shorter."""
    missing = -values.shape[1] % size
    if missing:
        values = torch.cat([values, values[:, -1:].expand(-1, missing)], dim=1)
    return values.unflatten(1, (-1, size)).aminmax(dim=-1)


def listed_blocks(partial: Tensor, full: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """
    Per row of `[B, rows, nb]` partial blocks, how many are set, `[B, 1, rows]`, and which, those first; the same of
    full blocks; int32.
    """
    both = torch.stack((partial, full))[:, :, None]
    size = both.stride(0)
    # every list starts at a multiple of 16 bytes: compiled layers copy others, each layer again
    listed = torch.empty(2, size + -size % 4, dtype=torch.int32, device=both.device)[:, :size].view(both.shape)
    at_once = max(1, _LISTED_AT_ONCE // (2 * partial.shape[0] * partial.shape[2]))
    for part, of_part in zip(listed.split(at_once, dim=3), both.split(at_once, dim=3), strict=True):
        part.copy_(of_part.argsort(dim=-1, descending=True, stable=True))
    counts = both.sum(dim=-1, dtype=torch.int32)
    return counts[0], listed[0], counts[1].clone(), listed[1]


def _on_device(number: int | None, like: Tensor) -> Tensor | None:
    return None if number is None else torch.full((1,), number, device=like.device, dtype=like.dtype)


def _mask_mod(
    subtree_end: Tensor, depth: Tensor, kind: str, limit: Tensor | None, skipped: Tensor | None = None
) -> Callable[..., Tensor]:
    # Code objects that read tensors, never Python numbers: FlexAttention compiles each once for each kind. A window
    # may be a scalar of the model, but the kernel reads it from a tensor: one compiled graph for all windows.
    def among_keys(q: Tensor) -> Tensor:
        return q if skipped is None else q + skipped[0]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= among_keys(q)) & (q < subtree_end[b, k])

    if limit is None:
        return visible
    sees = KINDS[kind].sees

    def visible_and_seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = sees(depth[b, among_keys(q)], depth[b, k], limit[0])
        return (k <= among_keys(q)) & (q < subtree_end[b, k]) & near

    return visible_and_seen
