# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What a model computes for an objective: its inputs, which hidden states go to the head, and the weights of the loss.

- `"mdlm"`: the noisy row, under full attention. Noised tokens weigh `1 / p`.
- `"block"`: the row `[x_t | x_0]` of block diffusion. Every supervised token of x_t weighs 1.
- `"hybrid"`: the same row, but x_0 attends causally. Noised tokens of x_t weigh `alpha / p`; the tokens of x_0 predict
  the supervised tokens after them, with weight 1. One forward serves both: what x_t sees of the earlier blocks is what
  an autoregressive model has in its cache, and under a block-causal mask x_0 would see the tokens that it predicts.

Cost: `"block"` and `"hybrid"` compute rows of twice the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hf_prefix_tree.diffusion.attention import spans
from hf_prefix_tree.diffusion.corruption import Noised
from hf_prefix_tree.diffusion.loss import block_diffusion_terms, hybrid_terms, mdlm_terms, next_token_terms, noisy_half


@dataclass
class ObjectiveRow:
    """A micro-batch as the model takes it, and the weights of its M predictions."""

    inputs: dict[str, torch.Tensor]  # what a prepared model is called with
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
    noised: Noised,
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
        noised ([`Noised`]):
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
    bound = mdlm_terms(ids, noised.is_noised, noised.p, supervised)
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
