# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Attention implementations: a model's default, and which parts of it run ours.

The language model runs ours; vision and audio towers keep theirs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

IMPLEMENTATION = "prefix_tree"
DIFFUSION_IMPLEMENTATION = "diffusion"

FALLBACK_HINT = "Train it on unfolded branches with a stock trainer."

_MODELING_UTILS = sys.modules[PreTrainedModel.__module__]  # where the interface itself lives


@functools.cache
def default_implementation(config_class: type) -> str:
    """`"sdpa"` where the models of this config class support it, otherwise `"eager"`."""
    if getattr(config_class, "attn_logit_softcapping", None):  # Transformers before 5.24 lets sdpa drop the softcap
        return "eager"
    model_classes = _model_classes(config_class)
    return "sdpa" if any(c._supports_sdpa and _interface_in_source(c) for c in model_classes) else "eager"


@functools.cache
def uses_attention_interface(config_class: type) -> bool:
    return any(_interface_in_source(model_class) for model_class in _model_classes(config_class))


def _interface_in_source(model_class: type) -> bool:
    """Whether the modeling file calls attention functions by name, as `set_attn_implementation` needs it."""
    files = [sys.modules[c.__module__] for c in model_class.__mro__ if c.__module__ in sys.modules]
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files if file is not _MODELING_UTILS)


def _model_classes(config_class: type) -> list[type[PreTrainedModel]]:
    classes: list[type[PreTrainedModel]] = [PreTrainedModel]
    for model_class in classes:
        classes.extend(model_class.__subclasses__())
    return [c for c in classes if getattr(c, "config_class", None) is config_class]


def default_attention(module: torch.nn.Module) -> Callable:
    config: Any = module.config
    name = default_implementation(config.__class__)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get_interface(name, eager)


def implementations(model: PreTrainedModel) -> dict[str, str]:
    """
    The attention implementations that a model runs now.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
    """
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    named = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": model.config._attn_implementation, **named}


def with_implementation(model: PreTrainedModel, implementation: str) -> dict[str, str]:
    """
    The same with ours for the language model, and the default for a tower that was loaded with ours.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
        implementation (`str`): [`IMPLEMENTATION`] or [`DIFFUSION_IMPLEMENTATION`].
    """
    text, wanted = model.config.get_text_config(), implementations(model)
    for name, present in wanted.items():
        part = getattr(model.config, name) if name else text
        if part is text:
            wanted[name] = implementation
        elif present == implementation:
            wanted[name] = default_implementation(part.__class__)
    return wanted


def set_implementations(model: PreTrainedModel, wanted: dict[str, str]) -> None:
    """
    Makes a model run these.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
        wanted (`dict[str, str]`): The result of [`implementations`] or [`with_implementation`].
    """
    model.set_attn_implementation(wanted)
    if model.config._attn_implementation != wanted[""]:
        # Architectures outside Transformers' attention interface only warn; their mask functions read this name.
        model.config._attn_implementation_internal = wanted[""]


def refuse_attention_dropout(option: str, rate: float | None) -> None:
    """
    Raises `ValueError` for dropout in attention.

    Args:
        option (`str`): The name of the option in the config.
        rate (`float`, *optional*): Its value.
    """
    if rate:
        raise ValueError(
            f"`config.{option}={rate}`: dropout in attention is not supported. Load the model with `{option}=0.0`."
        )
