# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which parts of a model run the tree's attention: the language model does, vision and audio towers keep their own.

A model's implementations are a `dict`: under `""` that of its own config, under each name that of a config inside it,
as `set_attn_implementation` takes it.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_prefix_tree.attention.defaults import default_implementation
from hf_prefix_tree.attention.interface import IMPLEMENTATION


def implementations(model: PreTrainedModel) -> dict[str, str]:
    """
    The attention implementations that a model runs now.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
    """
    parts = {name: getattr(model.config, name, None) for name in model.config.sub_configs}
    named = {name: part._attn_implementation for name, part in parts.items() if part is not None}
    return {"": model.config._attn_implementation, **named}


def with_tree_attention(model: PreTrainedModel) -> dict[str, str]:
    """
    The same with the tree's for the language model, and the default for a tower that was loaded with the tree's.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
    """
    text, wanted = model.config.get_text_config(), implementations(model)
    for name, implementation in wanted.items():
        part = getattr(model.config, name) if name else text
        if part is text:
            wanted[name] = IMPLEMENTATION
        elif implementation == IMPLEMENTATION:
            wanted[name] = default_implementation(part.__class__)
    return wanted


def set_implementations(model: PreTrainedModel, wanted: dict[str, str]) -> None:
    """
    Makes a model run these.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
        wanted (`dict[str, str]`): What [`implementations`] or [`with_tree_attention`] gave.
    """
    model.set_attn_implementation(wanted)
    if model.config._attn_implementation != wanted[""]:
        # Architectures outside Transformers' attention interface only warn; their mask functions read this name.
        model.config._attn_implementation_internal = wanted[""]
