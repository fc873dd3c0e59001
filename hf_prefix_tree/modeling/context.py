# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What one call on the tree path knows: the tree, its supervised tokens, and the masks built so far.

The pre-hook of the causal LM makes one [`TreeContext`] per call. It travels as the keyword argument `prefix_tree`
through the model, recomputation under checkpointing included. Transformers' mask functions see no keyword arguments,
so for the time of the call it is also the value of a context variable. Layers that mix tokens in another way than
attention (a convolution, a scan) read the tree itself from it: `predecessor`, `nodes` and `parents`.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from functools import cached_property
from types import FrameType
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from hf_prefix_tree.modeling.attention.mask import dense_mask, tree_block_mask
from hf_prefix_tree.modeling.batch import PREDECESSOR, Supervised

Mask = torch.Tensor | BlockMask


class TreeContext:
    """
    The context of one call.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): The tree rows of the batch contract.
        supervised ([`~hf_prefix_tree.modeling.batch.Supervised`], *optional*): The tokens whose predecessors'
            hidden states go to the head; `None` where the call has no labels and every position goes.
        attn_backend (`str`, *optional*, defaults to `"auto"`): `"flex"`, `"flash"`, `"sdpa"` or `"auto"`.
        sinks (`bool`, *optional*, defaults to `False`): Whether the model's attention has sinks.

    Example:

    ```python
    >>> import torch
    >>> tree = torch.tensor([[[4, 4, 3, 4], [0, 1, 2, 2], [-1, 0, 1, 1]]], dtype=torch.int32)
    >>> context = TreeContext(tree)
    >>> context.nodes, context.parents  # two tokens, then two children of one token each
    (tensor([0, 2, 3, 4]), tensor([-1,  0,  0]))

    ```
    """

    def __init__(
        self,
        prefix_tree: torch.Tensor,
        supervised: Supervised | None = None,
        attn_backend: str = "auto",
        sinks: bool = False,
    ) -> None:
        self.prefix_tree = prefix_tree
        self.supervised = supervised
        self.attn_backend = attn_backend
        self.sinks = sinks
        self.gathered = False  # whether the hidden states of the call went through `gather`
        self.loss_computed = False  # whether the model's `loss_function` was called, or the caller weighs log-probs
        self.attention_mask: torch.Tensor | None = None  # `(B, N)`, 0 at padding, where the call has one
        self.segments: object = None  # the cut of the rows, once a recurrent layer made it
        self.followed: set[str] = set()  # the functions of recurrent layers that ran along the branches
        self._masks: dict[tuple[str, int | None], Mask] = {}

    @cached_property
    def predecessor(self) -> torch.Tensor:
        """
        The token before each token on its path, counted over the whole batch: int64 `(B * N,)`, -1 at roots and at
        padding. Indexes anything that was flattened to `(B * N, ...)`.
        """
        rows, _, length = self.prefix_tree.shape
        predecessor = self.prefix_tree[:, PREDECESSOR].long()
        first = torch.arange(rows, device=predecessor.device)[:, None] * length
        return torch.where(predecessor >= 0, predecessor + first, -1).view(-1)

    @cached_property
    def nodes(self) -> torch.Tensor:
        """
        Where the M nodes of the batch begin, and after them B * N: int64 `(M + 1,)`. Node m is the tokens
        `nodes[m]` to `nodes[m + 1] - 1`, which follow one another on a path and fork, if at all, after the last one.
        Every token of padding is a node without a parent. The first use waits for the device, to learn M.
        """
        predecessor = self.predecessor
        index = torch.arange(len(predecessor), device=predecessor.device)
        children = torch.zeros(len(predecessor) + 1, dtype=torch.int64, device=predecessor.device)
        children.scatter_add_(0, predecessor + 1, torch.ones_like(predecessor))  # the first entry counts roots
        goes_on = (predecessor >= 0) & (predecessor == index - 1) & (children[predecessor + 1] == 1)
        return torch.cat([(~goes_on).nonzero().squeeze(-1), index.new_full((1,), len(index))])

    @cached_property
    def parents(self) -> torch.Tensor:
        """The node whose last token each node continues: int64 `(M,)`, -1 for a root. Parents come first."""
        starts, predecessor = self.nodes[:-1], self.predecessor
        # the node of a token: how many nodes begin at it or before it
        return torch.bucketize(predecessor[starts], starts, right=True) - 1

    def mask(self, window: int | None = None, chunk: int | None = None, *, flex: bool) -> Mask:
        """The mask of the layers with this window or chunk size; built once per call."""
        key = ("window", window) if chunk is None else ("chunk", chunk)
        if key not in self._masks:
            build = tree_block_mask if flex else dense_mask
            self._masks[key] = build(self.prefix_tree, **{key[0]: key[1]})
        return self._masks[key]

    @property
    def has_masks(self) -> bool:
        """Whether the model asked for a mask of the tree."""
        return bool(self._masks)

    def additive_mask(self, dtype: torch.dtype, window: int | None = None, chunk: int | None = None) -> torch.Tensor:
        """The mask as numbers to add to the scores: 0 where a key is visible, elsewhere the smallest of the dtype."""
        visible = self.mask(window, chunk, flex=False)
        assert isinstance(visible, torch.Tensor)
        return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)

    def owns(self, mask: object) -> bool:
        """
        Whether `mask` is one that this context built (a tensor that was detached on the way still is), or one that the
        model made from it by hiding more, as the indexer of sparse attention does. The latter costs a comparison of
        all pairs and a wait for the device.
        """
        if not isinstance(mask, torch.Tensor):
            return any(own is mask for own in self._masks.values())
        dense = [own for own in self._masks.values() if isinstance(own, torch.Tensor)]
        if any(own.data_ptr() == mask.data_ptr() and own.shape == mask.shape for own in dense):
            return True
        length = self.prefix_tree.shape[-1]
        if mask.dim() != 4 or mask.shape[-2:] != (length, length):
            return False
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return any(not bool((visible & ~own).any()) for own in dense)

    def gather(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The hidden states that predict the supervised tokens: `(B, N, hidden)` to `(1, M, hidden)`."""
        if self.supervised is None or self.gathered:
            return hidden_states
        self.gathered = True
        return hidden_states.reshape(-1, hidden_states.shape[-1])[self.supervised.where][None]


class _Call(NamedTuple):
    context: TreeContext | None  # `None` in a call without a tree
    frame: FrameType | None  # what calls the hooks; `None` under compilation, which knows no frames


# The calls of prepared models that run, the innermost last.
_calls: ContextVar[tuple[_Call, ...]] = ContextVar("hf_prefix_tree_calls", default=())


def active_context() -> TreeContext | None:
    """The context of the call that runs now, or `None` where it has no tree."""
    calls = _calls.get()
    return calls[-1].context if calls else None


def enter_call() -> None:
    """
    Begins a call: without a tree, until [`set_active_context`] gives it one. To be called by a hook.

    PyTorch runs no hooks after `KeyboardInterrupt`: calls that ended so are forgotten here.
    """
    calls, caller = _calls.get(), None
    if not torch.compiler.is_compiling():
        caller = sys._getframe(2)
        if calls:
            running, frame = [], caller.f_back
            while frame is not None:
                running.append(frame)
                frame = frame.f_back
            calls = tuple(call for call in calls if call.frame is None or call.frame in running)
    _calls.set((*calls, _Call(None, caller)))


def set_active_context(context: TreeContext) -> None:
    """Makes the call that runs now one with a tree."""
    *outer, call = _calls.get()
    _calls.set((*outer, call._replace(context=context)))


def leave_call() -> TreeContext | None:
    """Ends the call that runs now; returns its context."""
    context = active_context()
    _calls.set(_calls.get()[:-1])
    return context
