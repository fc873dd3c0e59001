# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The context of one call of a prepared model: its mask, and the hidden states that go to the head.

The pre-hook of the causal LM makes one context per call: a [`TreeContext`] or a [`DiffusionContext`]. Transformers'
mask functions see no keyword arguments, so for the time of the call it is the value of a context variable. That of a
tree also travels through the model as the keyword argument `prefix_tree`, which recomputation under checkpointing
sees. Layers that mix tokens in another way than attention (a convolution, a scan) read the tree itself from it:
`predecessor`, `nodes` and `parents`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask

from hf_prefix_tree.modeling.attention.masks.causal import dense_mask, kind_of, tree_block_mask
from hf_prefix_tree.modeling.batch import PREDECESSOR, Supervised
from hf_prefix_tree.modeling.streaming import Section

Mask = torch.Tensor | BlockMask


class CallContext:
    """
    The part of a context that every call of a prepared model has.

    Args:
        attn_backend (`str`): `"auto"` or the backend to use.
        predict_positions (`torch.Tensor` of shape `(M,)`, int64, *optional*):
            Indices into the flattened `(B * N)` of the hidden states that go to the head; `None` for all.
    """

    # No dataclass: FSDP copies those.
    def __init__(self, attn_backend: str, predict_positions: torch.Tensor | None) -> None:
        self.attn_backend, self.predict_positions = attn_backend, predict_positions
        self.gathered = False  # whether the hidden states of the call went through `gather`

    def gather(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The hidden states that go to the head: `(B, N, hidden)` to `(1, M, hidden)`, the first time."""
        if self.predict_positions is None or self.gathered:
            return hidden_states
        self.gathered = True
        return hidden_states.reshape(-1, hidden_states.shape[-1])[self.predict_positions][None]


class DiffusionContext(CallContext):
    """
    The context of one call of a diffusion language model.

    Args:
        attn_backend (`str`): `"flex"`, `"sdpa"` (dense) or `"auto"`.
        predict_positions (`torch.Tensor` of shape `(M,)`, int64, *optional*): As in [`CallContext`].
        layout (`torch.Tensor` of shape `(B, 6, N)`, int32, *optional*):
            Which keys each query sees, see [`~hf_prefix_tree.modeling.attention.masks.spans.spans`]. `None` is full
            attention, whose padding the mask function gets from Transformers.
        longest (`int`, *optional*): Tokens of the longest sequence, from its positions.
    """

    def __init__(self, *args: Any, layout: torch.Tensor | None, longest: int | None) -> None:
        super().__init__(*args)
        self.layout, self.longest = layout, longest
        self.mask: Mask | None = None


class TreeContext(CallContext):
    """
    The context of one call with a tree.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): As in the batch contract.
        supervised ([`~hf_prefix_tree.modeling.batch.Supervised`], *optional*): The tokens whose predecessors'
            hidden states go to the head; `None` where the call has no labels and every position goes.
        attn_backend (`str`, *optional*, defaults to `"auto"`): `"flex"`, `"flash"`, `"sdpa"` or `"auto"`.
        sinks (`bool`, *optional*, defaults to `False`): Whether the model's attention has sinks.
        section ([`~hf_prefix_tree.modeling.streaming.Section`], *optional*): That of the packed sequence which the
            call computes, where it reads a path or is read by others.

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
        section: Section | None = None,
    ) -> None:
        super().__init__(attn_backend, None if supervised is None else supervised.where)
        self.prefix_tree = prefix_tree
        self.section = section
        self.supervised = supervised
        self.sinks = sinks
        self.is_weighted = False  # whether the caller weighs log-probs
        self.loss: torch.Tensor | None = None  # what the model's `loss_function` returned
        self.attention_mask: torch.Tensor | None = None  # `(B, N)`, 0 at padding, where the call has one
        self.mask_counts_branches = False  # whether the causal LM got `token_branches` in its place
        self.recorded: tuple[str, ...] = ()  # outputs that hooks record in compiled layers (router logits)
        self.segments: Any = None  # of the scans, once a recurrent layer made them
        self.followed: set[str] = set()  # the functions of recurrent layers that ran along the branches
        self.masks: dict[tuple[str, int | None], Mask] = {}  # that the model asked for, by kind and limit

    @classmethod
    def at_layer(cls, prefix_tree: Any) -> TreeContext | None:
        """The tree that reached a layer as the keyword argument `prefix_tree`."""
        refuse_raw_tensor("prefix_tree", prefix_tree)
        return prefix_tree

    @cached_property
    def predecessor(self) -> torch.Tensor:
        """
        The token before each token on its path, counted over the whole batch: int64 `(B * N,)`, -1 at roots and at
        padding. Indexes anything that was flattened to `(B * N, ...)`.
        """
        batch_size, _, length = self.prefix_tree.shape
        predecessor = self.prefix_tree[:, PREDECESSOR].long()
        first = torch.arange(batch_size, device=predecessor.device)[:, None] * length
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

    def mask(self, *, flex: bool, **limit: int | None) -> Mask:
        """The mask of the layers with this limit, see [`dense_mask`]; built once per call."""
        key = kind_of(limit)
        if key not in self.masks:
            build: Any = tree_block_mask if flex else dense_mask
            path = {} if self.section is None else {"path": self.section.path.to(self.prefix_tree.device)}
            self.masks[key] = build(self.prefix_tree, **path, **limit)
        return self.masks[key]

    def owns(self, mask: object) -> bool:
        """
        Whether `mask` is one that this context built (a tensor that was detached on the way still is), or one that the
        model made from it by hiding more, as the indexer of sparse attention does. The latter costs a comparison of
        all pairs and a wait for the device.
        """
        if not isinstance(mask, torch.Tensor):
            return any(built is mask for built in self.masks.values())
        dense = [built for built in self.masks.values() if isinstance(built, torch.Tensor)]
        if any(built.data_ptr() == mask.data_ptr() and built.shape == mask.shape for built in dense):
            return True
        length = self.prefix_tree.shape[-1]
        if mask.dim() != 4 or mask.shape[-2:] != (length, length):
            return False
        visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
        return any(not bool((visible & ~built).any()) for built in dense)


def refuse_raw_tensor(name: str, value: Any) -> None:
    """Raises `ValueError` where the hooks of the causal LM did not turn an argument into the context of the call."""
    if isinstance(value, torch.Tensor):
        raise ValueError(
            f"`{name}` reached a layer as a raw tensor: prepare the model (`prepare_model`, "
            "`prepare_diffusion_model`), and call the causal LM itself, with peft >= 0.21 and an adapter that calls "
            "it, as LoRA does and AdaLoRA does not."
        )


class _Call(NamedTuple):
    model: int  # the `id` of the prepared causal LM
    context: CallContext | None  # `None` in a call without a tree


# The calls of prepared models that run, the innermost last.
_calls: ContextVar[tuple[_Call, ...]] = ContextVar("hf_prefix_tree_calls", default=())


def active_context() -> CallContext | None:
    """The context of the innermost call of a prepared model, or `None` where it has none."""
    calls = _calls.get()
    return calls[-1].context if calls else None


def active_tree() -> TreeContext | None:
    """[`active_context`] where that is of a call with a tree."""
    context = active_context()
    return context if isinstance(context, TreeContext) else None


def enter_call(model: object) -> None:
    """
    Begins a call of a causal LM: without a context, until [`set_active_context`] sets one.

    PyTorch runs no hooks after `KeyboardInterrupt`. A model that was interrupted forgets that call here.
    """
    _calls.set((*_before(model), _Call(id(model), None)))


def set_active_context(context: CallContext) -> None:
    """Sets the context of the innermost call."""
    *outer, call = _calls.get()
    _calls.set((*outer, call._replace(context=context)))


def leave_call(model: object) -> CallContext | None:
    """Ends the call of a causal LM; returns its context. Does nothing where the call was not entered."""
    calls, outer = _calls.get(), _before(model)
    _calls.set(outer)
    return calls[len(outer)].context if len(outer) < len(calls) else None


def _before(model: object) -> tuple[_Call, ...]:
    """The calls outside the one of this model; all, where it has none."""
    calls = _calls.get()
    for index, call in enumerate(calls):
        if call.model == id(model):
            return calls[:index]
    return calls


@contextmanager
def separate_calls() -> Iterator[None]:
    """Calls inside the block, of the running model too, leave the running call as it is."""
    token = _calls.set(())
    try:
        yield
    finally:
        _calls.reset(token)
