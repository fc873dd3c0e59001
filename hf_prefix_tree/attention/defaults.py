# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What a model does without a tree: the attention implementation that its classes support."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

_MODELING_UTILS = sys.modules[PreTrainedModel.__module__]  # where the interface itself lives


@functools.cache
def default_implementation(config_class: type) -> str:
    """`"sdpa"` where the models of this config class support it, otherwise `"eager"`."""
    if getattr(config_class, "attn_logit_softcapping", None):  # Transformers before 5.24 lets sdpa drop the softcap
        return "eager"
    found = _model_classes(config_class)
    return "sdpa" if any(c._supports_sdpa and _interface_in_source(c) for c in found) else "eager"


@functools.cache
def uses_attention_interface(config_class: type) -> bool:
    return any(_interface_in_source(model_class) for model_class in _model_classes(config_class))


def _interface_in_source(model_class: type) -> bool:
    """Whether the modeling file calls attention functions by name, as `set_attn_implementation` needs it."""
    files = [sys.modules[c.__module__] for c in model_class.__mro__ if c.__module__ in sys.modules]
    return any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files if file is not _MODELING_UTILS)


def _model_classes(config_class: type) -> list[type[PreTrainedModel]]:
    found: list[type[PreTrainedModel]] = []
    classes: list[type[PreTrainedModel]] = [PreTrainedModel]
    for model_class in classes:
        if getattr(model_class, "config_class", None) is config_class:
            found.append(model_class)
        classes.extend(model_class.__subclasses__())
    return found


def default_attention(module: torch.nn.Module) -> Callable:
    config: Any = module.config
    name = default_implementation(config.__class__)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    return AttentionInterface().get_interface(name, eager)
