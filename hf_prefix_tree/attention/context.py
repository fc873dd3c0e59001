# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What one call on the tree path knows: the tree, its supervised tokens, and the masks built so far.

The pre-hook of the causal LM makes one [`TreeContext`] per call. It travels as the keyword argument `prefix_tree`
through the model, recomputation under checkpointing included. Transformers' mask functions see no keyword arguments,
so for the time of the call it is also the value of a context variable.
"""

from __future__ import annotations

from contextvars import ContextVar

import torch
from torch.nn.attention.flex_attention import BlockMask

from hf_prefix_tree.attention.mask import dense_mask, tree_block_mask
from hf_prefix_tree.batch import BLOCK_SIZE, Supervised

Mask = torch.Tensor | BlockMask


class TreeContext:
    """
    The context of one call.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): The tree rows of the batch contract.
        supervised ([`~hf_prefix_tree.batch.Supervised`], *optional*): The tokens whose predecessors' hidden states
            go to the head; `None` where the call has no labels and every position goes.
        attn_backend (`str`, *optional*, defaults to `"auto"`): `"flex"`, `"sdpa"` or `"auto"`.
    """

    def __init__(
        self, prefix_tree: torch.Tensor, supervised: Supervised | None = None, attn_backend: str = "auto"
    ) -> None:
        self.prefix_tree = prefix_tree
        self.supervised = supervised
        self.attn_backend = attn_backend
        self._masks: dict[int | None, Mask] = {}

    def mask(self, window: int | None, *, flex: bool) -> Mask:
        """The mask of the layers with this window; built once per call."""
        if window not in self._masks:
            build = tree_block_mask if flex else dense_mask
            self._masks[window] = build(self.prefix_tree, window)
        return self._masks[window]

    def owns(self, mask: object) -> bool:
        """Whether `mask` is one that this context built; a tensor that was detached on the way still is."""
        if isinstance(mask, torch.Tensor):
            return any(
                isinstance(own, torch.Tensor) and own.data_ptr() == mask.data_ptr() for own in self._masks.values()
            )
        return any(own is mask for own in self._masks.values())

    def gather(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The hidden states that predict the supervised tokens: `(B, N, hidden)` to `(1, M, hidden)`."""
        if self.supervised is None:
            return hidden_states
        return hidden_states.reshape(-1, hidden_states.shape[-1])[self.supervised.where][None]


_active: ContextVar[TreeContext | None] = ContextVar("hf_prefix_tree_context", default=None)


def active_context() -> TreeContext | None:
    """The context of the tree call that runs now, or `None`."""
    return _active.get()


def set_active_context(context: TreeContext | None) -> None:
    """Enters a tree call, or leaves it with `None`."""
    _active.set(context)


def can_use_flex(device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> str | None:
    """`None` where FlexAttention can train these shapes, otherwise the reason why not."""
    if device.type != "cuda":
        return f"FlexAttention has no backward on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"FlexAttention does not take {dtype}"
    if head_dim < 16:
        return f"FlexAttention needs a head size of at least 16, got {head_dim}"
    if length % BLOCK_SIZE != 0:
        return f"rows of {length} tokens are no multiple of {BLOCK_SIZE}"
    return None
