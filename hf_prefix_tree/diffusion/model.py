# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`prepare_diffusion_model`]: an ordinary causal LM becomes a diffusion language model.

No weight changes and no forward is replaced. The attention loses its causal mask, and hooks on the causal LM and its
backbone take two more inputs: who sees whom, and which hidden states go to the head. Cost: none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.diffusion.interface import (
    ATTN_BACKENDS,
    IMPLEMENTATION,
    DiffusionContext,
    active_context,
    register,
    set_active_context,
)
from hf_prefix_tree.modeling.attention.implementations import uses_attention_interface
from hf_prefix_tree.modeling.attention.spans import ATTENDED
from hf_prefix_tree.modeling.checks import backbone_of, base_causal_lm
from hf_prefix_tree.modeling.prepare import is_prepared

_STATE = "_hf_prefix_tree_diffusion"
# Windows and chunks must hold the whole sequence, which is checked at each call. Layers without attention work on each
# token by itself.
_SERVED_LAYER_TYPES = {
    *("full_attention", "sliding_attention", "chunked_attention"),
    *("mlp", "moe", "dense", "sparse"),
}
_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")

register()


@dataclass
class _State:
    """What was done to a model, so that it can be undone."""

    attn_backend: str
    implementation: str
    had_is_causal: bool
    is_causal: Any
    handles: list[Any] = field(default_factory=list)


def prepare_diffusion_model(model: torch.nn.Module, *, attn_backend: str = "auto") -> torch.nn.Module:
    """
    Makes a diffusion language model of a causal LM, in place. A second call changes nothing but `attn_backend`.

    Afterwards `model(input_ids, attention_mask=...)` attends both ways: the logits at a position predict its own
    token. Two keyword arguments are new: `diffusion_layout`, from [`~hf_prefix_tree.modeling.attention.spans.spans`],
    says who sees whom (with `position_ids`, which the two halves of an `[x_t | x_0]` row share), and
    `predict_positions`,
    `(M,)` indices into the flattened batch, which hidden states go to the head: `outputs.logits` is then
    `[1, M, vocab]`. `config.is_causal` is `False`.

    A checkpoint keeps that, and must be prepared again once it is loaded: until then it may look both ways or not, and
    `generate` writes nonsense. To save a causal model, after `"hybrid"` training say, call
    [`unprepare_diffusion_model`] first.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal LM. Wrap it with DDP, FSDP or `torch.compile` afterwards.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            `"flex"` runs FlexAttention and raises where it cannot serve, `"sdpa"` runs a dense mask, `"auto"` takes
            FlexAttention wherever it can train.

    Returns:
        The same `model`.

    Raises:
        `ValueError`: If the architecture or an option of the model can't be a diffusion language model.

    Example:

    ```python
    >>> import torch
    >>> from transformers import AutoModelForCausalLM, Qwen3Config

    >>> config = Qwen3Config(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=16,
    ...     num_attention_heads=1, num_key_value_heads=1,
    ... )
    >>> model = prepare_diffusion_model(AutoModelForCausalLM.from_config(config))
    >>> first, second = (model(torch.tensor([[5, last]])).logits[0, 0] for last in (6, 7))
    >>> torch.equal(first, second)  # the first token sees the second
    False

    ```
    """
    if attn_backend not in ATTN_BACKENDS:
        raise ValueError(f"`attn_backend` must be one of {ATTN_BACKENDS}, got {attn_backend!r}.")
    base = base_causal_lm(model)
    state = getattr(base, _STATE, None)
    if state is not None:
        state.attn_backend = attn_backend
        return model
    if is_prepared(model):
        raise ValueError("The model is prepared for prefix trees: call `unprepare_model(model)` first.")
    _check_support(base)
    state = _State(
        attn_backend=attn_backend,
        implementation=base.config._attn_implementation,
        had_is_causal="is_causal" in base.config.__dict__,
        is_causal=getattr(base.config, "is_causal", None),
    )
    base.set_attn_implementation(IMPLEMENTATION)
    base.config.is_causal = False
    setattr(base, _STATE, state)
    backbone = backbone_of(base)
    assert backbone is not None  # checked above
    state.handles = [
        base.register_forward_pre_hook(_enter, with_kwargs=True),
        base.register_forward_hook(_leave, always_call=True),
        backbone.register_forward_pre_hook(_check_backbone_call, with_kwargs=True),
        backbone.register_forward_hook(_gather_hidden_states),
    ]
    return model


def unprepare_diffusion_model(model: torch.nn.Module) -> torch.nn.Module:
    """
    Undoes [`prepare_diffusion_model`]; does nothing to a model that is not prepared.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
    """
    base = base_causal_lm(model)
    state = base.__dict__.pop(_STATE, None)
    if state is None:
        return model
    for handle in state.handles:
        handle.remove()
    base.set_attn_implementation(state.implementation)
    if state.had_is_causal:
        base.config.is_causal = state.is_causal
    else:
        del base.config.is_causal
    return model


@contextmanager
def prepared_for_diffusion(model: torch.nn.Module) -> Iterator[None]:
    """
    The model prepared while the context is open; one that is prepared already stays so.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
    """
    if hasattr(base_causal_lm(model), _STATE):
        yield
        return
    prepare_diffusion_model(model)
    try:
        yield
    finally:
        unprepare_diffusion_model(model)


def _check_support(model: PreTrainedModel) -> None:
    """Raises `ValueError` where the architecture or an option of the model is in the way, and says what to do."""
    config, name = model.config.get_text_config(), type(model).__name__
    backbone = backbone_of(model)
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: use a decoder-only one.")
    if model.get_output_embeddings() is None or backbone is None:
        raise ValueError(f"{name} has no LM head over a backbone: load the model with `AutoModelForCausalLM`.")
    if not uses_attention_interface(model.config.__class__):
        raise ValueError(
            f"{name} computes its attention by itself, so that its causal mask can't be taken away: use an "
            "architecture that goes through Transformers' attention interface, such as Llama, Qwen or Gemma."
        )
    for layer_type in dict.fromkeys(getattr(config, "layer_types", None) or []):
        if layer_type not in _SERVED_LAYER_TYPES:
            raise ValueError(
                f"{name} has `{layer_type}` layers, which read the tokens in order, or pick them by rules of a causal "
                "model: a diffusion language model needs plain attention in every layer."
            )
    for module_name, module in backbone.named_modules():
        if isinstance(module, torch.nn.Conv1d):
            raise ValueError(
                f"{name} convolves over the sequence (`{module_name}`) and looks one way only: a diffusion language "
                "model needs plain attention in every layer."
            )
    if getattr(config, "keep_window_size", None):
        raise ValueError(f"{name} drops keys by `keep_window_size={config.keep_window_size}`: set it to `None`.")
    for option in _ATTENTION_DROPOUTS:
        if getattr(config, option, None):
            raise ValueError(
                f"`config.{option}={getattr(config, option)}`: dropout in attention is not supported. Load the model "
                f"with `{option}=0.0`."
            )
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError(
            "`device_map` spreads the layers over several devices; load the model with `device_map=None`."
        )


def _enter(module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Pre-hook of the causal LM: layout and positions in, context of the call out."""
    if args:
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    _refuse_options(module, kwargs)
    layout, where = kwargs.pop("diffusion_layout", None), kwargs.pop("predict_positions", None)
    longest = None
    if layout is not None:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        if layout.shape != (ids.shape[0], 5, ids.shape[1]):
            raise ValueError(
                f"`diffusion_layout` has the shape {tuple(layout.shape)} for {tuple(ids.shape[:2])} tokens: make it "
                "with `spans(attention_mask, ...)` of the same batch."
            )
        if kwargs.get("position_ids") is None:
            raise ValueError(
                "`diffusion_layout` needs `position_ids`: those of the sequence, twice over for `[x_t | x_0]`."
            )
        longest = int(kwargs["position_ids"].max()) + 1 if _has_windows(module.config) else None
        if kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = layout[:, ATTENDED].long()
    state: _State = getattr(module, _STATE)
    set_active_context(DiffusionContext(layout, where, state.attn_backend, longest))
    return (), {**kwargs, "use_cache": False}


def _refuse_options(module: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    if module.config._attn_implementation != IMPLEMENTATION:
        raise ValueError(
            f"The model was made a diffusion language model, but its attention is "
            f"{module.config._attn_implementation!r} now: call `model.set_attn_implementation({IMPLEMENTATION!r})`."
        )
    for name in ("past_key_values", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"`{name}` cannot be used with a diffusion language model: earlier tokens see later ones. Use "
                "`diffusion_generate` instead of `generate`."
            )
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ValueError(
            "`labels` would be shifted by one, but a diffusion language model predicts tokens at their own place: use "
            "the losses of `hf_prefix_tree.diffusion.loss`, or `DiffusionSFTTrainer`."
        )
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() != 2:
        raise ValueError(
            f"`attention_mask` has {mask.dim()} dimensions: pass one number per token, and `diffusion_layout` for the "
            "rest."
        )
    if kwargs.get("output_attentions"):
        raise ValueError("`output_attentions` is not supported: the kernels keep no weights.")


def _has_windows(config: Any) -> bool:
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))


def _leave(module: torch.nn.Module, args: Any, output: Any) -> None:
    set_active_context(None)


def _check_backbone_call(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if kwargs.get("diffusion_layout") is not None or kwargs.get("predict_positions") is not None:
        raise ValueError(
            "`diffusion_layout` reached the backbone: the hook of the causal LM was bypassed. Call the causal LM "
            "itself, and use peft >= 0.21."
        )


def _gather_hidden_states(module: torch.nn.Module, args: tuple, output: Any) -> Any:
    context = active_context()
    if context is None or context.predict_positions is None:
        return None
    if isinstance(output, tuple):
        return (context.gather(output[0]), *output[1:])
    output.last_hidden_state = context.gather(output.last_hidden_state)
    return output
