# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which models are served, on trees and as diffusion language models. Others are refused before anything is computed.

The checks read configs and modules. A model that passes is still compared with independent runs of its branches by
[`~hf_prefix_tree.modeling.verify.verify_tree_forward`].
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections import defaultdict
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling.attention.implementations import (
    FALLBACK_HINT,
    refuse_attention_dropout,
    uses_attention_interface,
)
from hf_prefix_tree.modeling.attention.masks.causal import KINDS
from hf_prefix_tree.modeling.recurrent.hooks import has_convolution, why_not_served

# Layers without attention ("mlp", "moe", ...) work on each token by itself.
_ORDINARY = {"full_attention", "sliding_attention", "chunked_attention", "mlp", "moe", "dense", "sparse"}
# By kind. Windows and chunks of a diffusion language model must hold the whole sequence, which each call checks.
# `deepseek_sparse_attention` is the name of `indexed_attention` before Transformers 5.24.
_SERVED_LAYER_TYPES = {"tree": _ORDINARY | {"indexed_attention", "deepseek_sparse_attention"}, "diffusion": _ORDINARY}
_HINTS = {"tree": FALLBACK_HINT, "diffusion": "A diffusion language model needs plain attention in every layer."}
_REASONS: dict[str, str] = defaultdict(lambda: "it does not know what they do with the tokens of other branches")
_SCANS = "they scan the packed sequence in order and would carry one branch into the next"
_REASONS |= dict.fromkeys(("linear_attention", "mamba", "recurrent", "hybrid", "conv", "lightning_attention"), _SCANS)
_REASONS |= dict.fromkeys(
    ("heavily_compressed_attention", "compressed_sparse_attention", "minimax_m3_sparse"),
    "they pool keys over blocks of the packed sequence, which mix branches",
)
# Served where modules do the scan or the convolution that can follow the tree.
_RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "hybrid", "conv"}
_REASONS["hybrid_sliding"] = "they convolve keys and values over the packed sequence, which would mix branches"
# Fields that hold a window, but for those of `attention_windows`.
_UNKNOWN_WINDOW = re.compile(r"(?<!^sliding_)window(_size|_len|_length)?$|local_attention$")
_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def base_causal_lm(model: Any, name: str = "model") -> PreTrainedModel:
    """
    The causal LM inside `model`, which may be wrapped by PEFT.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model that will be trained.
        name (`str`, *optional*, defaults to `"model"`): How errors call it.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        refuse_adapters(model)
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"`{name}` must be a `transformers.PreTrainedModel` or a PEFT model around one, got "
            f"{type(model).__name__}. "
            "Call `prepare_model` before wrapping the model with DDP, FSDP or `torch.compile`."
        )
    return model


def refuse_adapters(model: Any) -> None:
    """
    Raises `ValueError` for adapters of PEFT that depend on more than the tokens of a branch.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model, with or without adapters.
    """
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"PEFT adapter {name!r} ({type(config).__name__}) prepends virtual tokens, which have no place "
                "in a prefix tree. Use LoRA or another adapter without virtual tokens."
            )
        if getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"PEFT adapter {name!r} is an activated LoRA (`alora_invocation_tokens`), which starts at one place "
                "of the packed sequence, not of each branch. Use LoRA without `alora_invocation_tokens`."
            )
        if hasattr(config, "xlora_depth") or hasattr(config, "shadow_model"):
            raise ValueError(
                f"PEFT adapter {name!r} ({type(config).__name__}) runs a model once more (X-LoRA to mix its experts, "
                "Shadow beside the backbone), without the tree. Use LoRA."
            )


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


def check_support(model: PreTrainedModel, kind: str) -> None:
    """
    Raises `ValueError` where the architecture or an option of the model cannot be served.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
        kind (`str`): `"tree"` or `"diffusion"`.
    """
    config, backbone = model.config.get_text_config(), backbone_of(model)
    name, hint = type(model).__name__, _HINTS[kind]
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model: use a decoder-only causal LM. {hint}")
    if model.get_output_embeddings() is None or backbone is None:
        raise ValueError(f"{name} has no LM head over a backbone: load the model with `AutoModelForCausalLM`.")
    both_sides = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if kind == "tree" and (both_sides or not getattr(config, "is_causal", True)):
        raise ValueError(f"{name} attends to both sides; a packed sequence would leak the future. {hint}")
    if kind == "diffusion" and not uses_attention_interface(model.config.__class__):
        raise ValueError(
            f"{name} computes its attention by itself, so that its causal mask can't be taken away: use an "
            "architecture that goes through Transformers' attention interface, such as Llama, Qwen or Gemma."
        )
    if getattr(config, "keep_window_size", None):
        raise ValueError(
            f"{name} keeps the `keep_window_size={config.keep_window_size}` keys of largest value and breaks ties, "
            f"which repeated tokens give, by their order. Set it to `None`. {hint}"
        )
    # a call with a tree runs no images and sounds through the backbone: leave out the towers that read them
    parts = [(part, x.config) for part, x in backbone.named_modules() if isinstance(x, PreTrainedModel)]
    towers = tuple(f"{part}." for part, x in parts if x is not backbone.config and x is not config)
    modules = {name: part for name, part in backbone.named_modules() if not name.startswith(towers)}
    is_recurrent = kind == "tree" and any(map(has_convolution, modules.values()))
    for layer_type in dict.fromkeys(getattr(config, "layer_types", None) or []):
        if layer_type in _SERVED_LAYER_TYPES[kind] or (layer_type in _RECURRENT_LAYER_TYPES and is_recurrent):
            continue
        raise ValueError(f"{name} has `{layer_type}` layers, which are not served: {_REASONS[layer_type]}. {hint}")
    for module_name, module in modules.items():
        if "BlockSparse" in type(module).__name__:
            raise ValueError(
                f"{name} has block-sparse attention (`{module_name}`), whose blocks are of the packed sequence, not "
                "of a branch. Load it with `attention_type='original_full'`."
            )
        if not has_convolution(module):
            continue
        refusal = why_not_served(module) if kind == "tree" else "a convolution looks one way only"
        if refusal is not None:
            raise ValueError(f"{name} convolves over the sequence (`{module_name}`): {refusal}. {hint}")
    for buffer_name, buffer in backbone.named_buffers():
        if _hides_by_index(buffer):
            raise ValueError(f"{name} hides keys by their distance in the sequence (`{buffer_name}`). {hint}")
    for part, option in itertools.product((config, getattr(config, "attn_config", None)), _ATTENTION_DROPOUTS):
        refuse_attention_dropout(option, getattr(part, option, None))
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError(
            "`device_map` spreads the layers over several devices; load the model with `device_map=None`."
        )
    if kind == "tree":
        warn_of_dropout(model)


def _hides_by_index(buffer: torch.Tensor) -> bool:
    """Whether a buffer is a mask of all pairs of a sequence that hides the first key from the last query."""
    is_mask = buffer.dim() == 4 and buffer.dtype in (torch.bool, torch.uint8) and buffer.shape[-1] == buffer.shape[-2]
    return is_mask and not buffer.is_meta and not bool(buffer[..., -1, 0].all())


def attention_windows(config: Any) -> list[int]:
    """The sliding windows and chunk sizes, in tokens, of the layers that have one."""
    return [size for kind in KINDS.values() if (size := kind.size_in(config)) is not None]


def checked_length(config: Any) -> int:
    """
    The tokens of the self-verification's longest path: more than the smallest window that the tree path knows, and
    than every window that only the code of the model reads, because errors of a window hide on shorter paths. Windows
    that no branch can outgrow don't count.

    Args:
        config (`PretrainedConfig`): The config of the language model.

    Example:

    ```python
    >>> from transformers import GPTNeoConfig, MistralConfig
    >>> checked_length(MistralConfig(sliding_window=128)), checked_length(GPTNeoConfig(window_size=256))
    (152, 280)

    ```
    """
    limit = position_limit(config)
    known = [window for window in attention_windows(config) if window < limit]
    unknown = [x for name, x in config.to_dict().items() if _UNKNOWN_WINDOW.search(name) and isinstance(x, int)]
    return min(max(min(known, default=0), *(window for window in unknown if window < limit), 0) + 24, limit)


def position_limit(config: Any) -> int:
    """The positions that the model has, or from which its rotary frequencies change; 2**31 where nothing says so."""
    limits = (getattr(config, "max_position_embeddings", None), rope_limit(config))
    return min((limit for limit in limits if limit and limit > 0), default=2**31)


def rope_limit(config: Any) -> int | None:
    """
    The number of tokens from which rotary frequencies depend on the longest sequence of the call, or `None` where they
    never do: `"dynamic"` and `"longrope"` scaling would let one branch change the others of the call.
    """
    config = config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    varying = [part for part in parts if part.get("rope_type", part.get("type")) in ("dynamic", "longrope")]
    if not varying:
        return None
    known = [part.get("original_max_position_embeddings") for part in varying]
    known += [getattr(config, name, None) for name in ("original_max_position_embeddings", "max_position_embeddings")]
    return min(limit for limit in known if limit)


def rope_limit_of(model: PreTrainedModel) -> int | None:
    """[`rope_limit`] of all configs that the modules of a model read, and of rotary embeddings that say otherwise."""
    parts = [vars(module) for module in model.modules()]
    configs = {id(config): config for part in parts if hasattr(config := part.get("config"), "get_text_config")}
    limits = [rope_limit(config) for config in configs.values()]
    limits += [part.get("original_max_seq_len") for part in parts if "dynamic" in str(part.get("rope_type"))]
    return min((limit for limit in limits if limit), default=None)


def warn_of_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    jitters = [n for n in ("router_jitter_noise", "input_jitter_noise", "jitter_noise") if getattr(config, n, None)]
    if jitters:
        warnings.warn(
            f"`config` has {jitters}: the router samples in training. On a tree a shared token draws once for all its "
            "branches, where unfolded training draws once each: unbiased, but not the same numbers.",
            stacklevel=3,
        )
    if rates := {rate for module in model.modules() for rate in _dropouts(module) if rate > 0}:
        warnings.warn(
            f"The model has dropout (p={sorted(rates)}). On a tree a shared token draws one mask for all its branches"
            ", where unfolded training draws one each: unbiased, but not the same numbers. Set it to 0 for exactness.",
            stacklevel=3,
        )


def _dropouts(module: torch.nn.Module) -> list[float]:
    """The rates that a module drops with, by itself (layers among them) or as a module for that."""
    if isinstance(module, torch.nn.Dropout):
        return [module.p]
    named = [x for name, x in vars(module).items() if "drop" in name]
    rates = [rate for x in named for rate in (x.values() if isinstance(x, dict) else [x])]  # by adapter in PEFT
    return [rate for rate in rates if isinstance(rate, float)]
