# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which models and which calls the tree path serves. Everything else is refused before any number is computed.

The checks read configs, modules, names, types and shapes. What passes is still compared with independent runs of the
branches by [`~hf_prefix_tree.modeling.verify.verify_tree_forward`].
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import warnings
from collections import defaultdict
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling.attention.implementations import FALLBACK_HINT
from hf_prefix_tree.modeling.batch import DEPTH
from hf_prefix_tree.modeling.images import IMAGE_INPUTS
from hf_prefix_tree.modeling.recurrent.hooks import has_convolution, why_not_served

logger = logging.getLogger(__name__)

# Layers without attention ("mlp", "moe", ...) work on each token by itself.
_SERVED_LAYER_TYPES = {
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"),
    "deepseek_sparse_attention",  # the name of `indexed_attention` before Transformers 5.24
    *("mlp", "moe", "dense", "sparse"),
}
_REASONS: dict[str, str] = defaultdict(lambda: "it does not know what they do with the tokens of other branches")
_SCANS = "they scan the row in order and would carry one branch into the next"
_REASONS |= dict.fromkeys(("linear_attention", "mamba", "recurrent", "hybrid", "conv", "lightning_attention"), _SCANS)
_REASONS |= dict.fromkeys(
    ("heavily_compressed_attention", "compressed_sparse_attention", "minimax_m3_sparse"),
    "they pool keys over blocks of the row, which mix branches",
)
# Served where modules do the scan or the convolution that can follow the tree.
_RECURRENT_LAYER_TYPES = {"linear_attention", "mamba", "hybrid", "conv"}
_REASONS["hybrid_sliding"] = "they convolve keys and values over the row, which would mix branches"
# Fields that hold a window, but for those of `attention_windows`.
_OWN_WINDOW = re.compile(r"(?<!^sliding_)window(_size|_len|_length)?$|local_attention$")
_ATTENTION_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def base_causal_lm(model: Any) -> PreTrainedModel:
    """
    The causal LM inside `model`, which may be wrapped by PEFT.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model that will be trained.
    """
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        refuse_adapters(model)
        model = model.get_base_model()
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"`model` must be a `transformers.PreTrainedModel` or a PEFT model around one, got "
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
                "of the row, not of each branch. Use LoRA without `alora_invocation_tokens`."
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


def check_support(model: PreTrainedModel) -> None:
    """
    Raises `ValueError` where the architecture or an option of the model cannot be exact on trees.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
    """
    config = model.config.get_text_config()
    name = type(model).__name__
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} is an encoder-decoder model; prefix trees are for causal LMs. {FALLBACK_HINT}")
    if model.get_output_embeddings() is None or backbone_of(model) is None:
        raise ValueError(f"{name} has no LM head over a backbone: load the model with `AutoModelForCausalLM`.")
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise ValueError(f"{name} attends to both sides; a tree row would leak the future. {FALLBACK_HINT}")
    if getattr(config, "keep_window_size", None):
        raise ValueError(
            f"{name} keeps the `keep_window_size={config.keep_window_size}` keys of largest value and breaks ties, "
            f"which repeated tokens give, by their order in the row. {FALLBACK_HINT}"
        )
    backbone = backbone_of(model)
    assert backbone is not None
    towers = _towers(backbone)
    for module_name, module in backbone.named_modules():
        if module_name.startswith(towers):  # a tree call runs no images and sounds through the backbone
            continue
        if "BlockSparse" in type(module).__name__:
            raise ValueError(
                f"{name} has block-sparse attention (`{module_name}`), whose blocks are of the row, not of a branch. "
                "Load it with `attention_type='original_full'`."
            )
        if has_convolution(module) and (reason := why_not_served(module)) is not None:
            raise ValueError(
                f"{name} convolves over the row (`{module_name}`), which would mix branches, and cannot be made to "
                f"follow the tree: {reason}. {FALLBACK_HINT}"
            )
    for buffer_name, buffer in backbone.named_buffers():
        if _hides_by_index(buffer):
            raise ValueError(
                f"{name} hides keys by their distance in the row (`{buffer_name}`), not on the path. {FALLBACK_HINT}"
            )
    is_recurrent = any(
        has_convolution(module) for name, module in backbone.named_modules() if not name.startswith(towers)
    )
    for layer_type in _layer_types(config):
        if layer_type in _SERVED_LAYER_TYPES or (layer_type in _RECURRENT_LAYER_TYPES and is_recurrent):
            continue
        raise ValueError(
            f"{name} has `{layer_type}` layers, which the tree path does not serve: {_REASONS[layer_type]}. "
            f"{FALLBACK_HINT}"
        )
    for part, option in itertools.product((config, getattr(config, "attn_config", None)), _ATTENTION_DROPOUTS):
        if getattr(part, option, None):
            raise ValueError(
                f"`config.{option}={getattr(part, option)}`: dropout in attention cannot be shared by the branches "
                f"of a tree. Load the model with `{option}=0.0`."
            )
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        raise ValueError(
            "`device_map` spreads the layers over several devices; load the model with `device_map=None`."
        )
    _warn_about_dropout(model)


def _hides_by_index(buffer: torch.Tensor) -> bool:
    """Whether a buffer is a mask over all pairs of places in the row that hides the first key from the last query."""
    is_mask = buffer.dim() == 4 and buffer.dtype in (torch.bool, torch.uint8) and buffer.shape[-1] == buffer.shape[-2]
    return is_mask and not buffer.is_meta and not bool(buffer[..., -1, 0].all())


def _towers(backbone: PreTrainedModel) -> tuple[str, ...]:
    """The parts of a backbone that read images or sounds, by the beginning of their modules' names."""
    text = (backbone.config, backbone.config.get_text_config())
    parts = [(name, part.config) for name, part in backbone.named_modules() if isinstance(part, PreTrainedModel)]
    return tuple(f"{name}." for name, config in parts if not any(config is own for own in text))


def attention_windows(config: Any) -> list[int]:
    """The sliding windows and chunk sizes, in tokens, of the layers that have one."""
    types, found = _layer_types(config), []
    window = getattr(config, "sliding_window", None)
    if (
        window is not None
        and getattr(config, "use_sliding_window", True)
        and (not types or "sliding_attention" in types)
    ):
        found.append(window)
    if "chunked_attention" in types:
        found.append(config.attention_chunk_size)
    return found


def checked_length(config: Any) -> int:
    """
    The tokens of the self-verification's longest path: more than the smallest window that the tree path knows, and
    than every window that only the model's own code reads, because errors of a window hide on shorter paths. Windows
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
    own = [value for name, value in config.to_dict().items() if _OWN_WINDOW.search(name) and isinstance(value, int)]
    return min(max(min(known, default=0), *(window for window in own if window < limit), 0) + 24, limit)


def position_limit(config: Any) -> int:
    """The positions that the model has, or from which its rotary frequencies change; 2**31 where nothing says so."""
    limits = (getattr(config, "max_position_embeddings", None), rope_limit(config))
    return min((limit for limit in limits if limit and limit > 0), default=2**31)


def rope_limit(config: Any) -> int | None:
    """
    The number of tokens from which rotary frequencies depend on the longest sequence of the call, or `None` where they
    never do: `"dynamic"` and `"longrope"` scaling would let one branch change the others of its row.
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


def _layer_types(config: Any) -> list[str]:
    return list(dict.fromkeys(getattr(config, "layer_types", None) or []))


def _warn_about_dropout(model: PreTrainedModel) -> None:
    config = model.config.get_text_config()
    jitters = [n for n in ("router_jitter_noise", "input_jitter_noise", "jitter_noise") if getattr(config, n, None)]
    if jitters:
        warnings.warn(
            f"`config` has {jitters}: the router samples in training. On a tree a shared token draws once for all its "
            "branches, where unfolded training draws once each: unbiased, but not the same numbers.",
            stacklevel=3,
        )
    rates = {rate for module in model.modules() for rate in _dropouts(module) if rate > 0}
    if rates:
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


_TEXT_INPUTS = {"input_ids", "position_ids", "labels", "attention_mask", "loss_weights", "prefix_tree", "tree_stats"}


def refuse_partial_batch(kwargs: dict[str, Any]) -> None:
    """
    Raises `ValueError` where a call without `prefix_tree` holds what only makes sense with it.

    Args:
        kwargs (`dict[str, Any]`): Keyword arguments of the call.
    """
    for name in ("loss_weights", "tree_stats"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"`{name}` came without `prefix_tree`, so a tree row would be read as one sequence: pass the "
                "whole batch of `DataCollatorForPrefixTree`."
            )


def refuse_options(kwargs: dict[str, Any]) -> None:
    """
    Raises `ValueError` for options of a call that have no meaning on a tree.

    Args:
        kwargs (`dict[str, Any]`): Keyword arguments of a call with `prefix_tree`.
    """
    for name in ("past_key_values", "cache"):
        if kwargs.get(name) is not None:
            raise ValueError(f"`{name}` cannot be used together with `prefix_tree`: a KV cache holds one path only.")
    if kwargs.get("seq_idx") is not None:
        raise ValueError("`seq_idx` cannot be used together with `prefix_tree`, which tells sequences apart itself.")
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


def refuse_other_inputs(model: PreTrainedModel, kwargs: dict[str, Any], image_refusal: str | None) -> None:
    """
    Raises `ValueError` for images, videos and sounds that the tree path cannot place.

    Args:
        model (`PreTrainedModel`): The causal LM.
        kwargs (`dict[str, Any]`): Keyword arguments of a call with `prefix_tree`.
        image_refusal (`str`, *optional*): Why this model's images are not served; `None` where they are.
    """
    if not model.config.sub_configs:  # no part for anything but text
        return
    others = {name for name, x in kwargs.items() if isinstance(x, torch.Tensor) and x.dim() > 0} - _TEXT_INPUTS
    images = others & set(IMAGE_INPUTS)
    if others - images:
        raise ValueError(
            f"{sorted(others - images)} cannot be used together with `prefix_tree`: of a multimodal model, trees "
            "train text, and images where the model has multimodal rotary positions."
        )
    if images and image_refusal is not None:
        raise ValueError(f"{sorted(images)} cannot be used together with `prefix_tree`: {image_refusal}")
    if ("pixel_values" in images) != ("image_grid_thw" in images):
        raise ValueError("`pixel_values` and `image_grid_thw` belong together: pass both or none.")


def refuse_long_branches(tree: torch.Tensor, limit: int | None) -> None:
    """
    Raises `ValueError` for a branch beyond which the rotary frequencies of the whole call would change.

    Args:
        tree (`torch.Tensor` of shape `(B, 3, N)`, int32): The tree rows.
        limit (`int`, *optional*): Tokens, from [`~hf_prefix_tree.modeling.checks.rope_limit`].
    """
    if limit is None or tree.shape[2] <= limit:
        return
    longest = int(tree[:, DEPTH].max()) + 1
    if longest > limit:
        raise ValueError(
            f"A branch has {longest} tokens, but the rotary frequencies of this model change for the whole call "
            f"beyond {limit} tokens (dynamic or longrope scaling), so it would change the other branches. Use "
            f"branches of at most {limit} tokens."
        )


def refuse_overwritten_inputs(kwargs: dict[str, Any]) -> None:
    """
    Raises `ValueError` where `position_ids` are not the depths of the tree, or `attention_mask` hides a token of it:
    the tree path would ignore both. On CUDA the values are compared without waiting for the device, so that the error
    is a device-side assertion with the same text.

    Args:
        kwargs (`dict[str, Any]`): Keyword arguments of a call with `prefix_tree`, of the shapes of the contract.
    """
    tree, position_ids, mask = kwargs["prefix_tree"], kwargs.get("position_ids"), kwargs.get("attention_mask")
    if tree.is_meta or (position_ids is None and mask is None):
        return
    message = (
        "`position_ids` must be the depth of each token and `attention_mask` must be 1 at every token of the tree, "
        "but something overwrote them: pass both as `DataCollatorForPrefixTree` makes them, or neither."
    )
    if torch.compiler.is_compiling() or tree.is_cuda:
        torch._assert_async(_agree(tree[:, DEPTH], position_ids, mask), message)
    elif not _agree_on_host(*(None if value is None else value.cpu().numpy() for value in (tree, position_ids, mask))):
        raise ValueError(message)


def _agree(depth: torch.Tensor, position_ids: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    """Padding, whose depth is 0, comes last in a row."""
    positions = depth if position_ids is None else position_ids
    if mask is None:
        return (positions == depth).all()
    is_right = (mask * positions == depth).all()  # a hidden token's product is 0
    # the product says nothing about roots: what follows a hidden one is visible
    return is_right & (mask[:, 1:] <= mask[:, :-1]).all()


def _agree_on_host(tree: Any, position_ids: Any, mask: Any) -> bool:
    """The same on arrays, in fewer and cheaper operations: the first hidden token must begin the padding."""
    for row, depth in enumerate(tree[:, DEPTH]):
        length = len(depth)
        if mask is not None and not mask[row, first := mask[row].argmin()]:
            length = first
            if depth[length:].any():
                return False
        if position_ids is not None and not (position_ids[row, :length].astype(depth.dtype) == depth[:length]).all():
            return False
    return True


def refuse_counted_items(num_items_in_batch: Any) -> None:
    """
    Raises `ValueError` where the divisor of the loss is a number of labels. The summed weights of a step are a Python
    float or a float64 tensor; `Trainer` passes its count of labels as an integer or, divided by its parallel ranks,
    in float32.

    Args:
        num_items_in_batch (`Any`): What the call has under this name.
    """
    if num_items_in_batch is None or isinstance(num_items_in_batch, float):
        return
    is_tensor = isinstance(num_items_in_batch, torch.Tensor)
    if is_tensor and num_items_in_batch.dtype == torch.float64:
        return
    what = f"a tensor of {num_items_in_batch.dtype}" if is_tensor else repr(num_items_in_batch)
    raise ValueError(
        f"`num_items_in_batch` is {what}, which counts labels where trees divide by weights: call "
        "`prepare_model(model)` before making the Trainer, use `TreeSFTTrainer`, or pass the summed weights of the "
        "step as a float (or a float64 tensor)."
    )


def refuse_missing_labels(kwargs: dict[str, Any], trains: bool) -> None:
    """
    Raises `ValueError` for a training call that has weights but no labels, so that a loss is computed elsewhere, from
    logits alone. Without gradients that is an ordinary way to get logits: it is only logged, once.

    Args:
        kwargs (`dict[str, Any]`): Keyword arguments of a call with `prefix_tree`.
        trains (`bool`): Whether it is a training call.
    """
    if kwargs.get("labels") is not None or kwargs.get("loss_weights") is None:
        return
    if trains:
        raise ValueError(
            "A training call has `loss_weights` but no `labels`, so that a loss of its logits would know neither the "
            "weights nor the branches: leave out `label_smoothing_factor`, `compute_loss_func` or the `compute_loss` "
            "that takes the labels, or, where your loss follows `prefix_tree`, leave out `loss_weights`."
        )
    _warn_of_logits_without_labels()


@functools.cache
def _warn_of_logits_without_labels() -> None:
    logger.warning(
        "A call has `loss_weights` but no `labels`. Its logits are those after each token on its path: a loss that "
        "shifts labels along the row, as label smoothing and `compute_loss_func` of a stock `Trainer` do, is wrong. "
        "Leave out `loss_weights` where only logits are wanted."
    )


def refuse_noisy_embeddings(embeddings: Any) -> None:
    """
    Raises `ValueError` where NEFTune is on, by Trainer or by hand: the size of its noise follows the length of the
    row, and a shared token would draw one noise for all its branches.

    Args:
        embeddings (`torch.nn.Module`): The input embeddings of the model.
    """
    hooks, patched = embeddings._forward_hooks, embeddings.__dict__.get("forward")
    if not hooks and patched is None:
        return
    alpha = getattr(embeddings, "neftune_noise_alpha", None)
    names = [getattr(call, "__qualname__", "").lower() for call in (*hooks.values(), patched)]
    if alpha or (alpha is None and any("neftune" in name for name in names)):
        raise ValueError(
            f"NEFTune (`neftune_noise_alpha={alpha!r}`) scales its noise by the length of the row, not of a branch: "
            "leave it out, or train the unfolded branches."
        )


def warn_of_router_loss(config: Any, kwargs: dict[str, Any]) -> None:
    """
    Logs once that the auxiliary loss of a router is one of the tree's tokens, where branches are weighted.

    Args:
        config (`PretrainedConfig`): The config of a language model with routers.
        kwargs (`dict[str, Any]`): Keyword arguments of a call with `prefix_tree` and `labels`.
    """
    is_on = kwargs.get("output_router_logits")
    if is_on is None:
        is_on = config.output_router_logits
    if is_on and kwargs.get("loss_weights") is not None and getattr(config, "router_aux_loss_coef", None) != 0:
        _warn_of_router_loss()


@functools.cache
def _warn_of_router_loss() -> None:
    logger.warning(
        "The auxiliary loss of the router counts a token that branches share once on a tree, where unfolded branches "
        "count it once each: training balances the experts over other counts. `router_aux_loss_coef=0` turns it off."
    )
