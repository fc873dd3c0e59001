# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Positions that are not rotary embeddings of `position_ids`: tables that count from another number, tables that the
model indexes by itself, and ALiBi. Each is made to follow the depth in the tree, by hooks that act
in a tree call only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling.batch import DEPTH
from hf_prefix_tree.modeling.context import active_tree

_ALIBI_METHODS = ("build_alibi_tensor", "build_mpt_alibi_tensor")


class Handle(Protocol):
    """What undoes a hook."""

    def remove(self) -> None:
        """Undoes it."""


def place_by_depth(model: PreTrainedModel) -> list[Handle]:
    """
    Hooks the parts of a model that turn positions into something else than a rotary embedding.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.

    Returns:
        `list[Handle]`: the hooks; models with rotary embeddings have none.
    """
    handles: list[Handle] = []
    for module in model.modules():
        forward = inspect.signature(type(module).forward).parameters
        if hasattr(module, "create_position_ids_from_input_ids") and "position_ids" in forward:
            handles.append(module.register_forward_pre_hook(_count_from_padding, with_kwargs=True))
        elif isinstance(module, torch.nn.Embedding) and "position_ids" in forward:
            handles.append(module.register_forward_pre_hook(_index_by_depth, with_kwargs=True))
            handles.append(module.register_forward_hook(_back_to_rows))
        elif getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            handles.append(module.register_forward_pre_hook(_note_tree, with_kwargs=True))
            handles.append(module.register_forward_hook(_forget_tree, always_call=True))
            handles.append(module.q_proj.register_forward_hook(functools.partial(_temper_by_depth, module)))
        handles += [_AlibiByDepth(module, name) for name in _ALIBI_METHODS if hasattr(module, name)]
    return handles


def _count_from_padding(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    # RoBERTa and its kin count positions from `padding_idx + 1`, and skip tokens that are padding.
    context = active_tree()
    if context is None:
        return None
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    input_ids, depth = kwargs.get("input_ids"), context.prefix_tree[:, DEPTH].long()
    if input_ids is not None and bool(((input_ids == module.padding_idx) & (depth > 0)).any()):
        raise ValueError(
            f"`input_ids` hold the padding token {module.padding_idx} inside a branch; {type(module).__name__} counts "
            "positions by what is not padding. Take that token out of the branches."
        )
    return (), {**kwargs, "position_ids": depth + module.padding_idx + 1}


def _index_by_depth(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    # Tables of learned or sinusoidal positions take one flat list of positions: that of all rows.
    context = active_tree()
    if context is None:
        return None
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    return (), {**kwargs, "position_ids": context.prefix_tree[:, DEPTH].reshape(-1).long()}


def _back_to_rows(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
    context = active_tree()
    if context is None or context.prefix_tree.shape[0] == 1:  # one row: the shape is the model's own
        return None
    batch_size, _, length = context.prefix_tree.shape
    return output.reshape(batch_size, length, output.shape[-1])


def _note_tree(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    # Recomputation under checkpointing runs after the call: the layer's keyword argument is what still knows the tree.
    module._prefix_tree_context = kwargs.get("prefix_tree")


def _forget_tree(module: Any, args: tuple, output: Any) -> None:
    module._prefix_tree_context = None


def _temper_by_depth(
    attention: Any, module: torch.nn.Module, args: tuple, output: torch.Tensor
) -> torch.Tensor | None:
    # Llama 4 multiplies queries without rotary embedding by a factor of their index, which is linear up to the scores:
    # multiply by what is missing to the factor of their depth.
    context = attention._prefix_tree_context
    if context is None:
        return None
    depth = context.prefix_tree[:, DEPTH]
    index = torch.arange(depth.shape[1], device=depth.device)
    by_depth, by_index = (
        torch.log1p(torch.floor((x.float() + 1.0) / attention.floor_scale)) * attention.attn_scale + 1.0
        for x in (depth, index)
    )
    return output * (by_depth.double() / by_index.double())[..., None].to(output.dtype)


class _AlibiByDepth:
    """
    Makes a model's method that builds ALiBi's biases give each key that of its depth.

    A softmax does not change when all its scores move by the same number, so a bias that grows with the depth of the
    key is the bias that falls with the distance. The method itself makes the biases of a straight line, from which the
    depths pick theirs.
    """

    def __init__(self, module: torch.nn.Module, name: str) -> None:
        self.module, self.name = module, name
        setattr(module, name, functools.partial(_pick_by_depth, getattr(module, name)))

    def remove(self) -> None:
        """Gives the model its method back."""
        delattr(self.module, self.name)


def _pick_by_depth(build: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    line = build(*args, **kwargs)
    context = active_tree()
    if context is None:
        return line
    depth = context.prefix_tree[:, DEPTH].long()
    batch_size = depth.shape[0]
    if isinstance(args[0], torch.Tensor):  # the padding mask, one for each row: Bloom
        line = build(torch.ones_like(args[0]), *args[1:], **kwargs)
    elif batch_size > 1:
        raise ValueError(
            f"This model has one ALiBi bias for all rows of a batch: use a batch of 1 row, not {batch_size}."
        )
    heads = line.shape[0] // batch_size
    return line.gather(2, depth.repeat_interleave(heads, dim=0)[:, None])
