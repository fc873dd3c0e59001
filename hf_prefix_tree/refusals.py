# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which calls of a prepared model the tree path serves: what is refused by the arguments alone, with the way out.

Looks at names, types and shapes; it waits for the device only where a row is longer than the rotary scaling allows.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.batch import DEPTH
from hf_prefix_tree.images import IMAGE_INPUTS

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
        limit (`int`, *optional*): Tokens, from [`~hf_prefix_tree.support.rope_limit`].
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
