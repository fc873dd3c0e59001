# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which models the tree path serves: what can be told from the config and the modules, before any number is computed.

Everything here refuses with one sentence that names what stands in the way and the way out. What passes is still
checked by [`~hf_prefix_tree.verify.verify_model`], which has the last word.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.attention.interface import WAY_OUT

logger = logging.getLogger(__name__)

# Layers without attention ("mlp", "moe", ...) work on each token by itself.
_SERVED_LAYER_TYPES = {
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"),
    *("mlp", "moe", "dense", "sparse"),
}
_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def base_causal_lm(model: Any) -> PreTrainedModel:
    """
    The causal LM inside `model`, which may be wrapped by PEFT.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model that will be trained.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        for name, config in model.peft_config.items():
            if getattr(config, "is_prompt_learning", False):
                raise ValueError(
                    f"PEFT adapter {name!r} ({type(config).__name__}) prepends virtual tokens, which have no place "
                    f"in a "
                    "prefix tree. Use LoRA or another adapter without virtual tokens."
                )
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"`model` must be a `transformers.PreTrainedModel` or a PEFT model around one, got "
            f"{type(model).__name__}. "
            "Call `prepare_model` before wrapping the model with DDP, FSDP or `torch.compile`."
        )
    return model


def backbone_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """
    The part of a causal LM whose output goes to the head, or `None` where there is no such part.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
    """
    decoder = model.get_decoder()
    if isinstance(decoder, PreTrainedModel) and decoder is not model:
        return decoder
    if model.base_model is not model:
        return model.base_model
    children = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return children[0] if len(children) == 1 else None


def check_support(model: PreTrainedModel) -> None:
    """
    Raises `ValueError` where the architecture or an option of the model cannot be exact on trees.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
    """
    config = model.config
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; prefix trees are for causal LMs. {WAY_OUT}")
    if model.get_output_embeddings() is None or backbone_of(model) is None:
        raise ValueError(f"{name} has no LM head over a backbone: load the model with `AutoModelForCausalLM`.")
    if config.get_text_config() is not config:
        raise ValueError(f"{name} is multimodal, which the tree path does not serve yet. {WAY_OUT}")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise ValueError(f"{name} attends to both sides; a tree row would leak the future. {WAY_OUT}")
    for layer_type in _layer_types(config):
        if layer_type not in _SERVED_LAYER_TYPES:
            raise ValueError(
                f"{name} has `{layer_type}` layers, which the tree path does not serve: they scan the row in order "
                f"and "
                f"would carry one branch into the next. {WAY_OUT}"
            )
    for module_name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.conv._ConvNd):
            raise ValueError(
                f"{name} convolves over the sequence (`{module_name}`), which would mix branches. {WAY_OUT}"
            )
    for option in _ATTENTION_DROPOUTS:
        if getattr(config, option, None):
            raise ValueError(
                f"`config.{option}={getattr(config, option)}`: dropout in attention cannot be shared by the branches "
                f"of a "
                f"tree. Load the model with `{option}=0.0`."
            )
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError(
            "`device_map` spreads the layers over several devices; load the model with `device_map=None`."
        )
    _warn_about_dropout(model)


def attention_windows(config: Any) -> list[int]:
    """The sliding windows and chunk sizes, in tokens, of the layers that have one."""
    types, found = _layer_types(config), []
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True) and (
        not types or "sliding_attention" in types
    ):
        found.append(window)
    if "chunked_attention" in types:
        found.append(config.attention_chunk_size)
    return found


def _layer_types(config: Any) -> list[str]:
    return list(dict.fromkeys(getattr(config, "layer_types", None) or []))


def _warn_about_dropout(model: torch.nn.Module) -> None:
    rates = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout) and module.p > 0}
    if rates:
        warnings.warn(
            f"The model has dropout (p={sorted(rates)}). On a tree a shared token draws one mask for all its "
            f"branches, "
            "where unfolded training draws one each: unbiased, but not the same numbers. Set it to 0 for exactness.",
            stacklevel=3,
        )
