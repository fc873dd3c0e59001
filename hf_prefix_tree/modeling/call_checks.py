# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which calls are served. Everything else is refused before any number is computed.

The checks read names, types and shapes, and cost little: together at most 50 microseconds a call.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling.batch import DEPTH
from hf_prefix_tree.modeling.positions import IMAGE_INPUTS

logger = logging.getLogger(__name__)

WITH = {"tree": "together with `prefix_tree`", "diffusion": "with a diffusion language model"}
# By kind: options that a call may not have, with the reason.
_CACHES = ("past_key_values", "cache")
_REFUSED_OPTIONS = {
    "tree": {
        **dict.fromkeys(_CACHES, "a KV cache holds one path only."),
        "shift_labels": "pass unshifted `labels`.",
        "ignore_index": "labels that do not count are -100.",
        "logits_to_keep": "pass `labels`, which select the logits.",
    },
    "diffusion": {
        **dict.fromkeys(_CACHES, "earlier tokens see later ones. Use `diffusion_generate` instead of `generate`."),
        "labels": "they would be shifted by one, but it predicts tokens at their places: use the losses of "
        "`hf_prefix_tree.diffusion.loss`, or `DiffusionSFTTrainer`, or pass `shift_labels` as well.",
    },
}
for _options in _REFUSED_OPTIONS.values():
    _options |= dict.fromkeys(("seq_idx", "cu_seq_lens_q"), "sequences are told apart by the mask alone.")
    _options["output_attentions"] = "the kernels keep no attention weights."
_TEXT_INPUTS = {
    *("input_ids", "position_ids", "labels", "attention_mask"),
    *("prefix_tree", "loss_weights", "token_branches", "tree_stats"),
}


def refuse_partial_batch(kwargs: dict[str, Any]) -> None:
    """
    Raises `ValueError` where a call without `prefix_tree` holds what only makes sense with it.

    Args:
        kwargs (`dict[str, Any]`): Keyword arguments of the call.
    """
    for name in ("loss_weights", "tree_stats", "token_branches"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"`{name}` came without `prefix_tree`, so the trees would be read as one sequence: pass the "
                "whole batch of `DataCollatorForPrefixTree`."
            )


def refuse_options(kind: str, kwargs: dict[str, Any]) -> None:
    """
    Raises `ValueError` for options of a call that have no meaning on a tree, or for a diffusion language model.

    Args:
        kind (`str`): The purpose that the model is prepared for, `"tree"` or `"diffusion"`.
        kwargs (`dict[str, Any]`): Keyword arguments of the call.
    """
    refused = _REFUSED_OPTIONS[kind]
    for name in () if refused.keys().isdisjoint(kwargs) else refused.keys() & kwargs.keys():
        value = kwargs[name]
        is_off = value is None or (isinstance(value, int) and value == 0)
        if is_off or (name == "labels" and kwargs.get("shift_labels") is not None):  # which are used instead
            continue
        raise ValueError(f"`{name}` cannot be used {WITH[kind]}: {_REFUSED_OPTIONS[kind][name]}")
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() != 2:
        raise ValueError(
            f"`attention_mask` has the shape {tuple(mask.shape)}: pass one number per token. Custom masks are not "
            f"taken {WITH[kind]}."
        )


def refuse_other_inputs(model: PreTrainedModel, kwargs: dict[str, Any], image_refusal: str | None) -> None:
    """
    Raises `ValueError` for images, videos and sounds that the tree path cannot place.

    Args:
        model (`PreTrainedModel`): The causal LM.
        kwargs (`dict[str, Any]`): Keyword arguments of a call with `prefix_tree`.
        image_refusal (`str`, *optional*): Why this model's images are not served; `None` where they are.
    """
    if not type(model.config).sub_configs:  # no part for anything but text
        return
    beside_text = {name for name, x in kwargs.items() if isinstance(x, torch.Tensor) and x.dim() > 0} - _TEXT_INPUTS
    images = beside_text & set(IMAGE_INPUTS)
    if beside_text - images:
        raise ValueError(
            f"{sorted(beside_text - images)} cannot be used together with `prefix_tree`: of a multimodal model, trees "
            "train text, and images where the model has multimodal rotary positions."
        )
    if images and image_refusal is not None:
        raise ValueError(f"{sorted(images)} cannot be used together with `prefix_tree`: {image_refusal}")
    if ("pixel_values" in images) != ("image_grid_thw" in images):
        raise ValueError("`pixel_values` and `image_grid_thw` belong together: pass both or none.")


def refuse_section(model: PreTrainedModel, tree: torch.Tensor, is_recurrent: bool, limit: int | None) -> None:
    """
    Raises `ValueError` where a model cannot compute a packed sequence in sections.

    Args:
        model (`PreTrainedModel`): The causal LM.
        tree (`torch.Tensor` of shape `(B, 3, N)`, int32): That of the section, see the batch contract.
        is_recurrent (`bool`): Whether it has recurrent layers.
        limit (`int`, *optional*): As for [`refuse_long_branches`].
    """
    if is_recurrent:
        raise ValueError(
            f"{type(model).__name__} has recurrent layers, whose states are not handed from section to section "
            "(`overflow='stream'`). Use `overflow='split'`."
        )
    refuse_long_branches(tree, limit, is_section=True)


def refuse_long_branches(tree: torch.Tensor, limit: int | None, is_section: bool = False) -> None:
    """
    Raises `ValueError` for a branch beyond which the rotary frequencies of the whole call would change.

    Args:
        tree (`torch.Tensor` of shape `(B, 3, N)`, int32): As in the batch contract.
        limit (`int`, *optional*): Tokens, from [`~hf_prefix_tree.modeling.checks.rope_limit`].
        is_section (`bool`, *optional*, defaults to `False`): Whether other tokens come before these.
    """
    if limit is None or (tree.shape[2] <= limit and not is_section):
        return
    if (longest := int(tree[:, DEPTH].max()) + 1) > limit:
        raise ValueError(
            f"A branch has {longest} tokens, but the rotary frequencies of this model change for the whole call "
            f"beyond {limit} tokens (dynamic or longrope scaling), so it would change the other branches. Use "
            f"branches of at most {limit} tokens."
        )


class OverwrittenInputs:
    """
    Raises `ValueError` where `position_ids` are not the depths of the tree, or `attention_mask` hides a token of it:
    the tree path would ignore both.

    On CUDA it takes longer to launch the comparison than to make all other checks. Only the first training calls are
    compared one by one; later ones by eights, so that the error may come up to seven calls late.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.pending: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]] = []

    def refuse(self, kwargs: dict[str, Any], trains: bool) -> None:
        """
        Compares the inputs of a call, or keeps them to compare them with those of later calls.

        Args:
            kwargs (`dict[str, Any]`): Keyword arguments of a call with `prefix_tree`, of the shapes of the contract.
            trains (`bool`): Whether it is a training call.
        """
        inputs = (kwargs["prefix_tree"], kwargs.get("position_ids"), kwargs.get("attention_mask"))
        tree = inputs[0]
        if not trains:
            self.settle()
        if inputs[1] is inputs[2] is None or tree.is_meta:
            return
        if torch.compiler.is_compiling() or (tree.is_cuda and not trains and kwargs.get("labels") is None):
            torch._assert_async(~_differ(*inputs), _OVERWRITTEN)  # nothing else in the call waits for the device
        elif tree.is_cuda:
            self.calls += 1
            self.pending.append(inputs)
            if not trains or self.calls <= _TOGETHER or len(self.pending) == _TOGETHER:
                self.settle()
        elif not _agree_on_host(*inputs):
            raise ValueError(_OVERWRITTEN)

    def settle(self) -> None:
        """Compares what was kept, and waits for the result."""
        pending, self.pending = self.pending, []
        for _, group in itertools.groupby(pending, lambda x: (len(x[0]), x[1] is None, x[2] is None)):
            together: list[Any] = [None if x[0] is None else torch.cat(x, dim=-1) for x in zip(*group, strict=True)]
            if _differ(*together):
                raise ValueError(_OVERWRITTEN)


_TOGETHER = 8  # calls
_OVERWRITTEN = (
    "`position_ids` must be the depth of each token and `attention_mask` must be 1 at every token of the tree, but "
    "something overwrote them: pass both as `DataCollatorForPrefixTree` makes them, or neither."
)


def _differ(tree: torch.Tensor, position_ids: torch.Tensor | None, mask: torch.Tensor | None) -> torch.Tensor:
    """Whether a token has another position, or is hidden without being a tree by itself, as padding is."""
    depth = tree[:, DEPTH]
    positions = depth if position_ids is None else position_ids
    if mask is None:
        return (positions != depth).any()
    differs = mask * positions != depth  # a hidden token's product is 0
    differs[:, :-1] |= (depth[:, 1:] == 1) > mask[:, :-1]  # that says nothing about roots, whose depth is 0
    return differs.any()


def _agree_on_host(tree: torch.Tensor, position_ids: torch.Tensor | None, mask: torch.Tensor | None) -> bool:
    """In fewer and cheaper operations, of NumPy: the first hidden token must begin the padding, whose depth is 0."""
    depths = tree.numpy()[:, DEPTH]
    agree = None if position_ids is None else position_ids.numpy().astype(depths.dtype) == depths
    for index, shown in enumerate(() if mask is None else mask.numpy()):
        if not shown[first := shown.argmin()]:
            if depths[index, first:].any():
                return False
            if agree is not None:
                agree[index, first:] = True
    return agree is None or bool(agree.flat[agree.argmin()])


def refuse_counted_items(num_items_in_batch: Any, loss_weights: torch.Tensor | None = None) -> None:
    """
    Raises `ValueError` where the divisor of the loss is a number of labels, or no sum of weights. The summed weights
    of a step are a Python float or a float64 tensor; `Trainer` passes its count of labels as an integer or, divided by
    its parallel ranks, in float32.

    Args:
        num_items_in_batch (`Any`): The argument of the call with this name.
        loss_weights (`torch.Tensor`, *optional*): That of the call: where all are 0, the divisor may be 0.
    """
    value = num_items_in_batch
    if value is None or (isinstance(value, float) and 0 < value < math.inf):
        return
    if isinstance(value, float) and value == 0 and loss_weights is not None and not loss_weights.any():
        return
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.dtype == torch.float64:
        return
    what = f"a tensor of {value.dtype}" if is_tensor else repr(value)
    raise ValueError(
        f"`num_items_in_batch` is {what}, which counts labels or is no sum of weights, by which trees divide: call "
        "`prepare_model(model)` before making the Trainer, use `TreeSFTTrainer`, or pass the summed weights of the "
        "step as a float above 0 (or a float64 tensor)."
    )


def refuse_missing_labels(kwargs: dict[str, Any], trains: bool) -> None:
    """
    Raises `ValueError` for a call of training, or of a stock `Trainer`'s loss, that has weights but no labels, so that
    a loss is computed elsewhere, from logits alone. Otherwise that is an ordinary way to get logits: it is only
    logged, once, and so is a training call without both. Labels of the collator whose weights are gone are refused.

    Args:
        kwargs (`dict[str, Any]`): Keyword arguments of a call with `prefix_tree`.
        trains (`bool`): Whether it is a training call.
    """
    has_weights = kwargs.get("loss_weights") is not None
    if kwargs.get("labels") is not None:
        if not has_weights and kwargs.get("tree_stats") is not None:
            raise ValueError(
                "A batch of `DataCollatorForPrefixTree` lost its `loss_weights` on the way, so that a shared token "
                "would weigh as much as any other: pass the whole batch, or leave out `tree_stats`, too, where each "
                "supervised token weighs 1."
            )
        return
    if has_weights and (trains or _is_in_stock_loss()):
        raise ValueError(
            "A call for a loss has `loss_weights` but no `labels`, so that a loss of its logits would know neither "
            "the weights nor the branches: leave out `label_smoothing_factor`, `compute_loss_func` or the "
            "`compute_loss` that takes the labels, or leave out `loss_weights`, too, where your loss follows "
            "`prefix_tree`."
        )
    if has_weights or trains:
        logger.warning_once(  # type: ignore[attr-defined]
            "A call has no `labels`, and it trains or has `loss_weights`. Its logits are those after each token on "
            "its path: a loss that shifts labels along the packed sequence, as label smoothing does, or that knows "
            "no weights is wrong. Leave out `loss_weights` where only logits are wanted."
        )


def _is_in_stock_loss() -> bool:
    """Whether `Trainer.compute_loss` runs: it takes labels out to compute the loss by itself, in evaluation, too."""
    trainer: Any = sys.modules.get("transformers.trainer")  # where nobody imported it, it does not run
    frame: Any = None if trainer is None else sys._getframe()
    while frame is not None and frame.f_code is not trainer.Trainer.compute_loss.__code__:
        frame = frame.f_back
    return frame is not None


def refuse_noisy_embeddings(embeddings: Any) -> None:
    """
    Raises `ValueError` where NEFTune is on, by Trainer or by hand: the size of its noise follows the length of the
    packed sequence, and a shared token would draw one noise for all its branches.

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
            f"NEFTune (`neftune_noise_alpha={alpha!r}`) scales its noise by the length of the packed sequence, not of "
            "a branch: leave it out, or train the unfolded branches."
        )


def has_router_loss(config: Any, kwargs: dict[str, Any]) -> bool:
    """
    Whether a call computes the auxiliary loss of routers.

    Args:
        config (`PretrainedConfig`, *optional*): The config of a language model with routers.
        kwargs (`dict[str, Any]`): Keyword arguments of the call.
    """
    is_on = kwargs.get("output_router_logits")
    return config is not None and bool(config.output_router_logits if is_on is None else is_on)


def refuse_uncounted(token_branches: torch.Tensor | None) -> torch.Tensor:
    """
    `token_branches`; raises `ValueError` where a call with a router's auxiliary loss has none.

    Args:
        token_branches (`torch.Tensor`, *optional*): That of the call.
    """
    if token_branches is None:
        raise ValueError(
            "The call computes a router's auxiliary loss (`output_router_logits`) without `token_branches`, so that a "
            "shared token would count once instead of once for each branch: pass the whole batch of "
            "`DataCollatorForPrefixTree`, or `output_router_logits=False`."
        )
    return token_branches


def refuse_changed_loss(model: PreTrainedModel, output: Any, loss: torch.Tensor) -> None:
    """
    Raises `ValueError` where the model returns another loss than the weighted one: its forward adds a term that the
    self-check did not see, of a schedule say. The values are compared only where the tensors are two, a cast one say.

    Args:
        model (`PreTrainedModel`): The causal LM.
        output (`Any`): What it returned.
        loss (`torch.Tensor`): The weighted loss of the tree.
    """
    returned = output[0] if isinstance(output, tuple) else output.loss
    if returned is loss:
        return
    rounding = 1e-5 if returned.dtype in (torch.float32, torch.float64) else 1e-2
    if not torch.isclose(returned.double(), loss.to(returned.device).double(), rtol=rounding, equal_nan=True):
        raise ValueError(
            f"{type(model).__name__} returns the loss {returned.item():.6g} where the weighted cross-entropy of the "
            f"tree is {loss.item():.6g}: it has another term, which is not weighted. Turn that term off, or add it "
            "to `outputs.loss` outside of the model."
        )
