# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""How a causal LM is prepared: [`prepare`] checks it, switches its attention and installs four hooks.

A [`Kind`] is the purpose: trees ([`~hf_prefix_tree.modeling.prepare.TREE`]) or diffusion
([`~hf_prefix_tree.diffusion.model.DIFFUSION`]). A pre-hook on the causal LM turns the inputs of a call into its
context; hooks on the backbone refuse a call that went around it and hand the head only the hidden states it needs. No
forward is replaced, because TRL and Accelerate replace `forward` on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling.attention.implementations import implementations, set_implementations, with_implementation
from hf_prefix_tree.modeling.call_checks import WITH, refuse_options
from hf_prefix_tree.modeling.checks import backbone_of, base_causal_lm, check_support, refuse_adapters
from hf_prefix_tree.modeling.context import (
    CallContext,
    active_context,
    active_tree,
    enter_call,
    leave_call,
    refuse_raw_tensor,
    set_active_context,
)
from hf_prefix_tree.modeling.positions import with_names
from hf_prefix_tree.tree.folding import check_choice

_STATE = "_hf_prefix_tree_state"


class Kind(NamedTuple):
    """A purpose that a model is prepared for."""

    name: str  # key of the tables in `checks` and `call_checks`
    implementation: str  # of attention
    attn_backends: tuple[str, ...]
    function: str  # the public function that prepares, for messages
    undo: str  # the one that undoes it
    # The context of a call and the model's inputs, or `None` for a call that is left alone.
    enter: Callable[[PreTrainedModel, dict[str, Any]], tuple[CallContext, dict[str, Any]] | None]
    # Checks and completes the output of a call that has a context.
    leave: Callable[[PreTrainedModel, CallContext, dict[str, Any], Any], Any] | None = None


@dataclass
class State:
    """The changes that were made to a model, so that they can be undone."""

    kind: Kind
    attn_backend: str
    previous_implementations: dict[str, str]
    handles: list[Any] = field(default_factory=list)


def state_of(model: PreTrainedModel) -> Any:
    """The [`State`] of a causal LM, or `None` where it is not prepared."""
    return getattr(model, _STATE, None)


def prepare(
    model: torch.nn.Module, kind: Kind, attn_backend: str, state_class: type[State] = State
) -> tuple[PreTrainedModel, bool]:
    """
    Prepares a causal LM, in place. One that is prepared for the same keeps its hooks and its `attn_backend`.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
        kind ([`Kind`]): The purpose.
        attn_backend (`str`): One of the kind's.
        state_class (`type`, *optional*): A subclass of [`State`].

    Returns:
        `tuple`: the causal LM without adapters around it, and whether it was prepared now.

    Raises:
        `ValueError`: where the model, or an option of it, cannot be served.
    """
    check_choice(attn_backend, "attn_backend", kind.attn_backends)
    base = base_causal_lm(model)
    state = state_of(base)
    if state is not None and state.kind != kind:
        raise ValueError(
            f"`{kind.function}` got a model that `{state.kind.function}` prepared: call `{state.kind.undo}(model)` "
            "first."
        )
    is_new = state is None
    if is_new:
        check_support(base, kind.name)
        backbone: Any = backbone_of(base)
        state = state_class(kind, attn_backend, implementations(base))
        setattr(base, _STATE, state)
        state.handles = [
            base.register_forward_pre_hook(_enter, with_kwargs=True),
            base.register_forward_hook(_leave, with_kwargs=True, always_call=True),
            backbone.register_forward_pre_hook(_check_backbone_call, with_kwargs=True),
            backbone.register_forward_hook(_gather_hidden_states),
        ]
    set_implementations(base, with_implementation(base, kind.implementation))
    return base, is_new


def unprepare(model: torch.nn.Module, kind: Kind) -> tuple[PreTrainedModel, Any]:
    """
    Undoes [`prepare`]; does nothing to a model that is not prepared for this.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
        kind ([`Kind`]): The purpose.

    Returns:
        `tuple`: the causal LM without adapters around it, and the [`State`] that it had, if any.
    """
    base = base_causal_lm(model)
    state = state_of(base)
    if state is None or state.kind != kind:
        return base, None
    delattr(base, _STATE)
    for handle in state.handles:
        handle.remove()
    set_implementations(base, state.previous_implementations)
    return base, state


def check_options(module: PreTrainedModel, kind: Kind, kwargs: dict[str, Any]) -> None:
    """
    Raises `ValueError` for changes of the model since it was prepared, and for options that have no meaning here.

    Args:
        module (`PreTrainedModel`): The prepared causal LM.
        kind ([`Kind`]): The purpose.
        kwargs (`dict[str, Any]`): Keyword arguments of the call.
    """
    # behind the properties of the config, which take 3 microseconds
    if object.__getattribute__(module.config, "_attn_implementation_internal") != kind.implementation:
        raise ValueError(
            f"`{kind.function}` prepared the model, but its attention is {module.config._attn_implementation!r} now: "
            f"call `{kind.function}(model)` again."
        )
    if torch._C._functorch.maybe_current_level() is not None:
        raise ValueError(
            f"Transforms of `torch.func` cannot be used {WITH[kind.name]}: their tensors have no storage. Use "
            "`loss.backward()` or `torch.autograd.grad`."
        )
    if "peft_config" in vars(module):  # adapters may have come after it
        refuse_adapters(module)
    refuse_options(kind.name, kwargs)


def leave_last(module: PreTrainedModel) -> None:
    """Makes `_leave` run after the hooks that came later, so that it sees what they do to the loss."""
    hooks, state = module._forward_hooks, state_of(module)
    if state.handles[1].id not in hooks:
        raise ValueError(f"The hooks of the model were removed: call `{state.kind.undo}(model)` and prepare it again.")
    hooks.move_to_end(state.handles[1].id)


def refuse_other_backbone(module: PreTrainedModel) -> None:
    """Raises `ValueError` where the backbone of a prepared causal LM was replaced: the new one has no hooks."""
    if not any(_gather_hidden_states in part._forward_hooks.values() for part in module.modules()):
        undo = state_of(module).kind.undo
        raise ValueError(
            f"The backbone of {type(module).__name__} was replaced after the model was prepared: call `{undo}(model)` "
            "and prepare it again."
        )


def _enter(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Pre-hook of the causal LM: inputs in, context of the call out."""
    enter_call(module)  # first of all: after an error the other hook leaves it
    entered = state_of(module).kind.enter(module, with_names(module, args, kwargs))
    if entered is None:
        return None
    context, kwargs = entered
    set_active_context(context)
    return (), {**kwargs, "use_cache": False}


def _leave(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    context = leave_call(module)
    leave = state_of(module).kind.leave
    if context is None or output is None or leave is None:  # no output after an error
        return None
    return leave(module, context, kwargs, output)


def _check_backbone_call(
    module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    for name in ("prefix_tree", "diffusion_layout", "predict_positions"):
        refuse_raw_tensor(name, kwargs.get(name))
    context = active_tree()
    if context is None or not context.mask_counts_branches:
        return None
    return (), {**with_names(module, args, kwargs), "attention_mask": context.attention_mask}


def _gather_hidden_states(module: torch.nn.Module, args: tuple, output: Any) -> Any:
    context = active_context()
    if context is None or context.predict_positions is None:
        return None
    if isinstance(output, tuple):
        return (context.gather(output[0]), *output[1:])
    output.last_hidden_state = context.gather(output.last_hidden_state)
    return output
