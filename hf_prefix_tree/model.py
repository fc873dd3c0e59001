# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`prepare_model`]: the hooks that make a causal LM take the `prefix_tree` batch key.

No forward is replaced, because TRL and Accelerate replace `forward` on top. A pre-hook on the causal LM turns the
batch contract into the context of the call; hooks on the backbone refuse a call that went around it and hand the head
only the hidden states that predict a supervised token. Without `prefix_tree` in the call nothing is touched.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.attention.context import TreeContext, active_context, set_active_context
from hf_prefix_tree.attention.interface import IMPLEMENTATION
from hf_prefix_tree.attention.positions import Handle, place_by_depth
from hf_prefix_tree.batch import DEPTH, check_batch, gather_supervised
from hf_prefix_tree.loss import weighted_token_loss
from hf_prefix_tree.support import backbone_of, base_causal_lm, check_support, rope_limit
from hf_prefix_tree.verify import verify_tree_forward, weights_are_whole

ATTN_BACKENDS = ("auto", "flex", "sdpa")
_STATE = "_hf_prefix_tree_state"


@dataclass
class _State:
    """What `prepare_model` did to a model, so that `unprepare_model` can undo it."""

    attn_backend: str
    previous_implementation: str
    previous_loss: Callable | None
    had_loss_kwargs_flag: bool
    previous_loss_kwargs_flag: bool | None
    handles: list[Handle] = field(default_factory=list)
    verified_on: set[str] = field(default_factory=set)
    verifying: bool = False
    rope_limit: int | None = None


def prepare_model(model: torch.nn.Module, *, attn_backend: str = "auto") -> torch.nn.Module:
    """
    Makes a causal LM train on prefix trees, in place.

    Afterwards `model(**batch)` with a batch of [`DataCollatorForPrefixTree`] returns exact logits, and with `labels`
    the loss `sum(w * nll) / sum(w)`; `outputs.logits` is then `[1, M, vocab]`, one row for each of the M supervised
    tokens. Without `prefix_tree` in the call the model does what it does under its default attention. Calling it again
    changes nothing but `attn_backend`; [`unprepare_model`] undoes it.

    The model is checked against independent runs of the branches: at once where its weights are whole and on the
    device they train on, otherwise at the first training step.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal LM. Wrap it with DDP, FSDP or `torch.compile` afterwards.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            `"flex"` runs FlexAttention and raises where it cannot serve, `"sdpa"` runs a dense mask, `"auto"` takes
            FlexAttention wherever it can train and the dense mask elsewhere (on CPU).

    Returns:
        The same `model`.

    Raises:
        `ValueError`: where the architecture or an option of the model cannot be exact on trees.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, Qwen3Config
    >>> from hf_prefix_tree import Branch, DataCollatorForPrefixTree, fold, prepare_model

    >>> config = Qwen3Config(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=16,
    ...     num_attention_heads=1, num_key_value_heads=1,
    ... )
    >>> model = prepare_model(AutoModelForCausalLM.from_config(config, attn_implementation="prefix_tree"))
    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8], [0, 1, 1])])
    >>> outputs = model(**DataCollatorForPrefixTree(pad_token_id=0)([tree]))
    >>> outputs.logits.shape, outputs.loss.dtype
    (torch.Size([1, 3, 32]), torch.float32)

    ```
    """
    if attn_backend not in ATTN_BACKENDS:
        raise ValueError(f"`attn_backend` must be one of {ATTN_BACKENDS}, got {attn_backend!r}.")
    base = base_causal_lm(model)
    state = getattr(base, _STATE, None)
    if state is not None:
        _set_implementation(base, IMPLEMENTATION)
        if state.attn_backend != attn_backend:
            state.attn_backend = attn_backend
            state.verified_on.clear()
        return model
    check_support(base)
    state = _State(
        attn_backend=attn_backend,
        previous_implementation=base.config._attn_implementation,
        previous_loss=base.__dict__.get("_loss_function"),
        had_loss_kwargs_flag="accepts_loss_kwargs" in base.__dict__,
        previous_loss_kwargs_flag=base.__dict__.get("accepts_loss_kwargs"),
        rope_limit=rope_limit(base.config),
    )
    _set_implementation(base, IMPLEMENTATION)
    setattr(base, _STATE, state)
    base.loss_function = functools.partial(_tree_aware_loss, base.loss_function)
    # Trainer would otherwise pass `num_items_in_batch`, skip its own division by the accumulation steps, and scale
    # loss and gradients with them.
    base.accepts_loss_kwargs = False
    backbone = backbone_of(base)
    assert backbone is not None  # checked above
    state.handles = [
        base.register_forward_pre_hook(_enter, with_kwargs=True),
        base.register_forward_hook(_leave, with_kwargs=True, always_call=True),
        backbone.register_forward_pre_hook(_check_backbone_call, with_kwargs=True),
        backbone.register_forward_hook(_gather_hidden_states, with_kwargs=True),
        *place_by_depth(base),
    ]
    try:
        if weights_are_whole(base) and not (base.device.type == "cpu" and torch.cuda.is_available()):
            _verify(base, state)
    except BaseException:
        unprepare_model(model)
        raise
    return model


def unprepare_model(model: torch.nn.Module) -> torch.nn.Module:
    """
    Undoes [`prepare_model`]; does nothing to a model that is not prepared.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
    """
    base = base_causal_lm(model)
    state = base.__dict__.pop(_STATE, None)
    if state is None:
        return model
    for handle in state.handles:
        handle.remove()
    if state.previous_loss is None:
        del base._loss_function
    else:
        base._loss_function = state.previous_loss
    if state.had_loss_kwargs_flag:
        base.accepts_loss_kwargs = state.previous_loss_kwargs_flag
    else:
        del base.accepts_loss_kwargs
    _set_implementation(base, state.previous_implementation)
    return model


def _set_implementation(base: PreTrainedModel, implementation: str) -> None:
    base.set_attn_implementation(implementation)
    if base.config._attn_implementation != implementation:
        # Architectures outside Transformers' attention interface only warn; their mask functions read this name.
        base.config._attn_implementation_internal = implementation


def is_prepared(model: torch.nn.Module) -> bool:
    """Whether [`prepare_model`] was called on this model."""
    return getattr(base_causal_lm(model), _STATE, None) is not None


def ensure_verified(model: torch.nn.Module, forward: Callable) -> None:
    """
    Checks a prepared model that was not yet checked on its device; every rank must call it, since sharded weights are
    gathered for it.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The prepared model.
        forward (`Callable`): The wrapped model (DDP, FSDP) to call.
    """
    base = base_causal_lm(model)
    state = getattr(base, _STATE)
    if base.device.type not in state.verified_on:
        _verify(base, state, forward)


def _verify(base: PreTrainedModel, state: _State, forward: Callable | None = None) -> None:
    state.verifying = True
    try:
        verify_tree_forward(base, forward or base)
    finally:
        state.verifying = False
    state.verified_on.add(base.device.type)


def _enter(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Pre-hook of the causal LM: batch contract in, context of the call out."""
    if args:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    if kwargs.get("node_lengths") is not None:
        raise ValueError(
            "This batch holds shared prefixes as `node_lengths` and `sample_paths`: convert it with "
            "`PrefixTree.from_node_paths` and collate it with `DataCollatorForPrefixTree`."
        )
    if kwargs.get("prefix_tree") is None:
        for name in ("loss_weights", "tree_stats"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"`{name}` came without `prefix_tree`, so a tree row would be read as one sequence: pass the "
                    "whole batch of `DataCollatorForPrefixTree`."
                )
        return None
    if module.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"The model was prepared, but its attention is {module.config._attn_implementation!r} now, which knows no "
            f"tree: call `model.set_attn_implementation({IMPLEMENTATION!r})` or `prepare_model(model)` again."
        )
    _refuse_options(kwargs)
    _refuse_other_inputs(module, kwargs)
    check_batch(kwargs)
    state: _State = getattr(module, _STATE)
    tree = kwargs["prefix_tree"]
    _refuse_long_branches(tree, state.rope_limit)
    trains = module.training and torch.is_grad_enabled()
    if trains and not state.verifying and tree.device.type not in state.verified_on and weights_are_whole(module):
        _verify(module, state)
    labels = kwargs.get("labels")
    supervised = None if labels is None else gather_supervised(tree, labels, kwargs.get("loss_weights"))
    context = TreeContext(tree, supervised, state.attn_backend)
    kwargs = {name: value for name, value in kwargs.items() if name not in ("loss_weights", "tree_stats")}
    kwargs |= {"prefix_tree": context, "position_ids": tree[:, DEPTH].long(), "use_cache": False}
    if kwargs.get("attention_mask") is None:
        # without one, Transformers takes the restarting positions for packed documents and severs branches
        kwargs["attention_mask"] = torch.ones((tree.shape[0], tree.shape[2]), dtype=torch.int64, device=tree.device)
    if supervised is not None:
        kwargs |= {"labels": supervised.labels, "shift_labels": supervised.labels}
    set_active_context(context)
    return (), kwargs


def _refuse_options(kwargs: dict[str, Any]) -> None:
    for name in ("past_key_values", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` cannot be used together with `prefix_tree`: a KV cache holds one path only.")
    if kwargs.get("shift_labels") is not None:
        raise ValueError("`shift_labels` cannot be used together with `prefix_tree`: pass unshifted `labels`.")
    keep = kwargs.get("logits_to_keep", 0)
    if isinstance(keep, torch.Tensor) or keep != 0:
        raise ValueError(
            "`logits_to_keep` cannot be used together with `prefix_tree`: pass `labels`, which select the logits."
        )
    if kwargs.get("output_attentions"):
        raise ValueError(
            "`output_attentions` cannot be used together with `prefix_tree`: the kernels keep no weights."
        )


def _refuse_long_branches(tree: torch.Tensor, limit: int | None) -> None:
    if limit is None or tree.shape[2] <= limit:
        return
    longest = int(tree[:, DEPTH].max()) + 1
    if longest > limit:
        raise ValueError(
            f"A branch has {longest} tokens, but the rotary frequencies of this model change for the whole call "
            f"beyond {limit} tokens (dynamic or longrope scaling), so it would change the other branches. Use "
            f"branches of at most {limit} tokens."
        )


_TEXT_INPUTS = {"input_ids", "position_ids", "labels", "attention_mask", "loss_weights", "prefix_tree", "tree_stats"}


def _refuse_other_inputs(module: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Images and sounds of a multimodal model: a tree row does not carry their positions and masks."""
    if module.config.get_text_config() is module.config:
        return
    others = [name for name, x in kwargs.items() if isinstance(x, torch.Tensor) and x.dim() > 0]
    others = sorted(set(others) - _TEXT_INPUTS)
    if others:
        raise ValueError(
            f"{others} cannot be used together with `prefix_tree`: of a multimodal model, trees train the text only."
        )


def _leave(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    context = active_context()
    if context is None:
        return None
    set_active_context(None)
    supervised = context.supervised
    if supervised is None or context.loss_computed or getattr(output, "logits", None) is None:
        return None
    # an architecture that computes its loss by itself, without `loss_function`
    output.loss = weighted_token_loss(
        output.logits, supervised.labels, supervised.weights, kwargs.get("num_items_in_batch")
    )
    return output


def _check_backbone_call(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if isinstance(kwargs.get("prefix_tree"), torch.Tensor):
        raise ValueError(
            "`prefix_tree` reached the backbone as a raw tensor: the hook of the causal LM was bypassed. Call the "
            "causal LM itself, and use peft >= 0.21."
        )


def _gather_hidden_states(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    context = active_context()
    if context is None or context.supervised is None:
        return None
    if isinstance(output, tuple):
        return (context.gather(output[0]), *output[1:])
    output.last_hidden_state = context.gather(output.last_hidden_state)
    return output


def _tree_aware_loss(
    default: Callable, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    context = active_context()
    if context is None or context.supervised is None:
        return default(logits, labels, *args, **kwargs)
    supervised = context.supervised
    context.loss_computed = True
    return weighted_token_loss(logits, supervised.labels, supervised.weights, kwargs.get("num_items_in_batch"))
