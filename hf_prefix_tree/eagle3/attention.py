# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Attention of a test-time-training step: one softmax over the path so far and the slot's earlier steps.

At step k, slot t sees the keys of step 0 at the slots before it on its path and at itself, and the keys of steps 1 to
k at itself. The first part is the mask of the draft's tree; the rest is a diagonal per step. Documents without shared
tokens are trees without forks: chains.
[`dense_steps`] is the reference, with an N x N score matrix. [`flex_steps`] takes the first part's log-sum-exp from
FlexAttention and adds the diagonals to the softmax: O(N) memory, no key is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hf_prefix_tree.modeling.attention.backend import takes_flex
from hf_prefix_tree.modeling.attention.kernels import attention_dtype, flex_with_lse
from hf_prefix_tree.modeling.context import TreeContext


def document_tree(seq_lens: torch.Tensor, length: int) -> torch.Tensor:
    """
    Packed documents as a forest of chains, in the form of the batch contract.

    Args:
        seq_lens (`torch.Tensor` of shape `(B, D)`, int64): Tokens of each document, filled up with zeros.
        length (`int`): N, the sum of each tensor row of `seq_lens`.

    Returns:
        `torch.Tensor` of shape `(B, 3, N)`, int32: `subtree_end`, `depth`, `predecessor`.

    Example:

    ```python
    >>> import torch
    >>> document_tree(torch.tensor([[3, 2, 0]]), 5)
    tensor([[[ 3,  3,  3,  5,  5],
             [ 0,  1,  2,  0,  1],
             [-1,  0,  1, -1,  3]]], dtype=torch.int32)

    ```
    """
    ends = seq_lens.cumsum(dim=1)
    index = torch.arange(length, device=seq_lens.device).expand(len(seq_lens), -1).contiguous()
    document = torch.searchsorted(ends, index, right=True).clamp(max=ends.shape[1] - 1)
    end = ends.gather(1, document)
    depth = index - (end - seq_lens.gather(1, document))
    return torch.stack([end, depth, torch.where(depth > 0, index - 1, -1)], dim=1).to(torch.int32)


DRAFT_KEYS = ("draft_tree", "draft_sources", "draft_weights")


def draft_slots(batch: Mapping[str, Any], steps: int) -> dict[str, torch.Tensor]:
    """
    The slots of a draft, M in each tensor row: where it is unrolled, and what it reads and learns there.

    Those of trees are in the batch. In documents without shared tokens every position is one.

    Args:
        batch (`Mapping[str, Any]`): A batch of [`DataCollatorForEagle3`] of `(B, N)` positions.
        steps (`int`): K, the steps that the draft is unrolled for.

    Returns:
        `dict[str, torch.Tensor]`: `draft_tree`, the tree of the slots, int32 of shape `(B, 3, M)`; `draft_sources`,
        the token of each slot and the K after it, int64 of shape `(B, K + 1, M)`: indices into the flattened `B * N`
        (of the last token, once the branch has ended); `draft_weights`, how many branches supervise the token that
        the slot reads at each step, int64 of shape `(B, K, M)`.

    Raises:
        `ValueError`: If the trees of the batch were collated for another number of steps.

    Example:

    ```python
    >>> import torch
    >>> batch = {"loss_mask": [[0, 0, 1, 1]], "doc_remaining": [[3, 2, 1, 0]], "seq_lens": [[4]]}
    >>> slots = draft_slots({name: torch.tensor(value) for name, value in batch.items()}, steps=2)
    >>> slots["draft_sources"][0], slots["draft_weights"][0]
    (tensor([[0, 1, 2, 3],
            [1, 2, 3, 3],
            [2, 3, 3, 3]]), tensor([[0, 1, 1, 0],
            [1, 1, 0, 0]]))

    ```
    """
    if "draft_tree" in batch:
        if (collated := batch["draft_weights"].shape[1]) != steps:
            raise ValueError(
                f"`ttt_steps` is {steps}, but the trees of the batch were collated for {collated}: pass the same "
                "`ttt_steps` to `DataCollatorForEagle3`."
            )
        return {name: batch[name] for name in DRAFT_KEYS}
    mask, remaining = batch["loss_mask"], batch["doc_remaining"][:, None]
    index = torch.arange(mask.numel(), device=mask.device).view_as(mask)[:, None]
    ahead = torch.arange(steps + 1, device=mask.device)[:, None]
    sources = index + ahead.minimum(remaining)
    weights = (mask.flatten()[sources] != 0) & (ahead <= remaining)
    tree = document_tree(batch["seq_lens"], mask.shape[1])
    return dict(zip(DRAFT_KEYS, (tree, sources, weights[:, 1:].long()), strict=True))


def step_attention(
    query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slots: TreeContext
) -> torch.Tensor:
    """
    Attention of one step, with FlexAttention where the call allows it.

    Args:
        query (`torch.Tensor` of shape `(B, heads, N, D)`): Queries of this step.
        keys, values (sequences of `torch.Tensor` of shape `(B, kv_heads, N, D)`): Those of steps 0 to k, in order.
        slots ([`~hf_prefix_tree.modeling.context.TreeContext`]): That of the `draft_tree`, see [`draft_slots`].

    Returns:
        `torch.Tensor` of shape `(B, N, heads, D)`.
    """
    dtype = attention_dtype(query.device, values[0].dtype)
    query, keys, values = query.to(dtype), [k.to(dtype) for k in keys], [v.to(dtype) for v in values]
    flex = takes_flex(slots.attn_backend, query.device, dtype, query.shape[-1], query.shape[2])
    return (flex_steps if flex else dense_steps)(query, keys, values, slots).transpose(1, 2)


def dense_steps(
    query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slots: TreeContext
) -> torch.Tensor:
    """The reference; arguments as for [`step_attention`], returns `(B, heads, N, D)`."""
    keys, values = _repeated(query, keys), _repeated(query, values)
    scale = query.shape[-1] ** -0.5
    mask: Any = slots.mask(flex=False)
    scores = torch.matmul(query, keys[0].transpose(2, 3)).masked_fill(~mask, -torch.inf)
    scores = torch.cat([scores, *_diagonals(query, keys[1:])], dim=-1) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    length = keys[0].shape[2]
    output = torch.matmul(weights[..., :length], values[0])
    for step, value in enumerate(values[1:]):
        output = output + weights[..., length + step, None] * value
    return output


def flex_steps(
    query: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], slots: TreeContext
) -> torch.Tensor:
    """FlexAttention over step 0, then the diagonals; arguments and result as for [`dense_steps`]."""
    mask: Any = slots.mask(flex=True)
    output, lse = flex_with_lse(query, keys[0], values[0], mask)
    if len(keys) == 1:
        return output
    keys, values = _repeated(query, keys[1:]), _repeated(query, values[1:])
    lse = lse.float()
    scores = torch.cat([x.float() for x in _diagonals(query, keys)], dim=-1) * query.shape[-1] ** -0.5
    total = torch.logsumexp(torch.cat([lse[..., None], scores], dim=-1), dim=-1)
    mixed = output.float() * (lse - total).exp()[..., None]
    for step, value in enumerate(values):
        mixed = mixed + (scores[..., step] - total).exp()[..., None] * value.float()
    return mixed.to(query.dtype)


def _diagonals(query: torch.Tensor, keys: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Unscaled scores of every query with the keys of its slot, `(B, heads, N, 1)` per step."""
    return [(query * key).sum(dim=-1, keepdim=True) for key in keys]


def _repeated(query: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in tensors]
