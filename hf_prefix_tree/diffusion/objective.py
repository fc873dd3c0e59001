# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""An objective in tensors: the noise, the inputs, which hidden states go to the head, and the loss weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_prefix_tree.diffusion.collator import SAMPLE_INDEX
from hf_prefix_tree.diffusion.loss import block_diffusion_terms, hybrid_terms, mdlm_terms, next_token_terms, noisy_half
from hf_prefix_tree.diffusion.noise import (
    Corrupted,
    corrupt_all_masked,
    corrupt_blockwise,
    corrupt_uniform,
    corrupt_uniform_random,
    noise_seeds,
)
from hf_prefix_tree.modeling.attention.masks.spans import spans

if TYPE_CHECKING:
    from hf_prefix_tree.diffusion.config import DiffusionSFTConfig


@dataclass
class ObjectiveRow:
    """A micro-batch as the model takes it, and the weights of its M predictions."""

    inputs: dict[str, torch.Tensor]  # the arguments of a prepared model
    targets: torch.Tensor  # [M] int64
    loss_weights: torch.Tensor  # [M] float64: the objective is sum(loss_weights * nll) / N
    bound_weights: torch.Tensor  # [M] float64: sum(bound_weights * nll) estimates an upper bound of the NLL
    is_next_token: torch.Tensor  # [M] bool: whether it predicts the next token


def supervised_tokens(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """
    Which tokens of a collated batch are supervised: its `loss_mask`, without rows that fill an uneven step.

    Args:
        batch (`Mapping[str, torch.Tensor]`): Of [`DataCollatorForDiffusionLM`].

    Returns:
        `torch.Tensor` of shape `(B, L)`, bool.
    """
    return (batch["loss_mask"] != 0) & (batch["input_lengths"] > 0)[:, None]


def window_starts(supervised: torch.Tensor) -> torch.Tensor:
    """
    Where the response of each sample begins: its first supervised token, or the end of a row without one.

    Args:
        supervised (`torch.Tensor` of shape `(B, L)`, bool): See [`supervised_tokens`].

    Returns:
        `torch.Tensor` of shape `(B,)`, int64.
    """
    return torch.where(supervised.any(dim=1), supervised.int().argmax(dim=1), supervised.shape[1])


def objective_row(
    batch: Mapping[str, torch.Tensor],
    noised: Corrupted,
    objective: str,
    block_size: int,
    *,
    response_window: bool,
    alpha: float,
) -> ObjectiveRow:
    """
    One micro-batch of an objective.

    Args:
        batch (`Mapping[str, torch.Tensor]`):
            Of [`DataCollatorForDiffusionLM`].
        noised ([`Corrupted`]):
            Its noisy ids.
        objective (`str`):
            `"mdlm"`, `"block"` or `"hybrid"`.
        block_size (`int`):
            Tokens of a block.
        response_window (`bool`):
            Whether blocks begin with the first supervised token instead of the row.
        alpha (`float`):
            Weight of the diffusion loss in `"hybrid"`.

    Returns:
        [`ObjectiveRow`].
    """
    ids, attention_mask, supervised = batch["input_ids"], batch["attention_mask"], supervised_tokens(batch)
    batch_size, length = ids.shape
    positions = torch.arange(length, device=ids.device).expand(batch_size, -1)
    bound = mdlm_terms(ids, noised.is_masked, noised.p, supervised)
    if objective == "mdlm":
        layout = spans(attention_mask)
        inputs = {"input_ids": noised.input_ids, "attention_mask": attention_mask, "position_ids": positions}
        where, targets = bound.where, bound.targets
        loss_weights = bound_weights = bound.weights
        is_next_token = torch.zeros_like(where, dtype=torch.bool)
    else:
        layout = spans(
            attention_mask,
            "block_diffusion" if objective == "block" else "hybrid",
            block_size,
            window_start=window_starts(supervised) if response_window else None,
        )
        inputs = {
            "input_ids": torch.cat([noised.input_ids, ids], dim=1),
            "attention_mask": torch.cat([attention_mask, attention_mask], dim=1),
            "position_ids": torch.cat([positions, positions], dim=1),
        }
        if objective == "block":
            terms = block_diffusion_terms(ids, supervised)
            where, targets, loss_weights = noisy_half(terms.where, length), terms.targets, terms.weights
            weight_of = torch.zeros(ids.numel(), dtype=torch.float64, device=ids.device)
            bound_weights = weight_of.index_copy(0, bound.where, bound.weights)[terms.where]
            is_next_token = torch.zeros_like(where, dtype=torch.bool)
        else:
            following = next_token_terms(ids, supervised)
            where, targets, loss_weights = hybrid_terms(bound, following, length, alpha)
            bound_weights = torch.cat([bound.weights, torch.zeros_like(following.weights)])
            is_next_token = torch.arange(len(where), device=where.device) >= len(bound.where)
    inputs |= {"diffusion_layout": layout, "predict_positions": where}
    return ObjectiveRow(inputs, targets, loss_weights, bound_weights, is_next_token)


EVALUATION = -1  # in the place of the epoch, from which training draws its noise


def noise_kind(args: DiffusionSFTConfig, is_training: bool) -> str:
    """The `corruption` of training; evaluation draws `"uniform"` for `"blockwise"`, which has no bound of the NLL."""
    return "uniform" if args.corruption == "blockwise" and not is_training else args.corruption


def bounds_nll(kind: str) -> bool:
    """
    Whether the masked tokens' `nll / p`, in expectation over the noise, bounds the negative log-likelihood: for
    `"blockwise"` p is not the probability of the single token, and `"random"` noise has none.
    """
    return kind in ("uniform", "all_masked")


def draw_noise(
    batch: Mapping[str, torch.Tensor],
    args: DiffusionSFTConfig,
    kind: str,
    salts: tuple[int, ...],
    *,
    mask_token_id: int | None,
    vocab_size: int,
) -> Corrupted:
    """
    The noise of a micro-batch.

    Args:
        batch (`Mapping[str, torch.Tensor]`): Of [`DataCollatorForDiffusionLM`], with `sample_index`.
        args ([`DiffusionSFTConfig`]): The configuration.
        kind (`str`): See [`noise_kind`].
        salts (`tuple` of `int`): The noise depends on them, the sample and `args.seed`: the pass over the
            dataset, or `EVALUATION` and the number of the draw.
        mask_token_id (`int`, *optional*): The mask token; `None` for `"random"` noise.
        vocab_size (`int`): For `"random"` noise: how many tokens there are to draw from.

    Returns:
        [`Corrupted`].

    Raises:
        `ValueError`: If the batch has no `sample_index`.
    """
    if SAMPLE_INDEX not in batch:
        raise ValueError(
            f"The batch has no `{SAMPLE_INDEX}`, on which the noise depends: add a column of that name, counting "
            "from 0, or leave out `skip_prepare_dataset`."
        )
    ids, supervised = batch["input_ids"], supervised_tokens(batch)
    options: dict[str, Any] = {"seeds": noise_seeds(batch[SAMPLE_INDEX], args.seed, *salts), "eps": args.noise_eps}
    if args.objective != "mdlm":
        options["block_size"] = args.block_size
        options["block_start"] = window_starts(supervised) if args.response_window else None
    if kind == "random":
        return corrupt_uniform_random(ids, supervised, vocab_size=vocab_size, **options)
    assert mask_token_id is not None  # only "random" noise goes without
    if kind == "all_masked":
        return corrupt_all_masked(ids, supervised, mask_token_id=mask_token_id)
    if kind == "blockwise":
        options["half_life"] = args.half_life
        return corrupt_blockwise(ids, supervised, mask_token_id=mask_token_id, **options)
    return corrupt_uniform(ids, supervised, mask_token_id=mask_token_id, **options)
