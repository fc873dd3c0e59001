# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What [`DiffusionSFTTrainer`] logs: sums over micro-batches and ranks, and the ratios that they make. Cost: none."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hf_prefix_tree.diffusion.objective import ObjectiveRow
from hf_prefix_tree.loss import safe_divisor


class Sums(NamedTuple):
    """Scalars of some micro-batches, added up."""

    loss: torch.Tensor
    bound: torch.Tensor
    next_token: torch.Tensor
    correct: torch.Tensor
    predicted: torch.Tensor
    supervised: torch.Tensor


def micro_batch_sums(
    row: ObjectiveRow, nll: torch.Tensor, is_top1: torch.Tensor, supervised: torch.Tensor
) -> torch.Tensor:
    """
    The [`Sums`] of a micro-batch as one tensor, so that they can be added up and gathered.

    Args:
        row ([`ObjectiveRow`]): The micro-batch.
        nll (`torch.Tensor` of shape `(M,)`, float64): Of its predictions, detached.
        is_top1 (`torch.Tensor` of shape `(M,)`, bool): Which of them are right.
        supervised (`torch.Tensor`): Scalar: its supervised tokens.

    Returns:
        `torch.Tensor` of shape `(6,)`, float64.
    """
    sums = Sums(
        loss=(nll * row.loss_weights).sum(),
        bound=(nll * row.bound_weights).sum(),
        next_token=nll[row.is_next_token].sum(),
        correct=is_top1.sum(),
        predicted=nll.new_tensor(len(nll)),
        supervised=supervised,
    )
    return torch.stack([value.double() for value in sums])


def training_metrics(sums: Sums, objective: str, has_bound: bool) -> dict[str, float]:
    """
    What a window of training logs besides its loss.

    Args:
        sums ([`Sums`]): Of all micro-batches of the window, on all ranks.
        objective (`str`): `"mdlm"`, `"block"` or `"hybrid"`.
        has_bound (`bool`): Whether the noise bounds the negative log-likelihood, see [`bounds_nll`].
    """
    metrics = {"mean_token_accuracy": _ratio(sums.correct, sums.predicted)}
    if has_bound:
        metrics["nll_bound"] = _ratio(sums.bound, sums.supervised)
    if objective == "hybrid":
        metrics["next_token_loss"] = _ratio(sums.next_token, sums.supervised)
    return metrics


def evaluation_metrics(sums: Sums, objective: str, has_bound: bool) -> dict[str, float]:
    """The same for a whole evaluation, with its loss and perplexity: NaN where it has no supervised token."""
    metrics = {"loss": _ratio(sums.loss, sums.supervised), **training_metrics(sums, objective, has_bound)}
    if has_bound:
        metrics["perplexity"] = math.exp(min(metrics["nll_bound"], 700.0))  # 700: the largest that has one
    # a mean of nothing: 0 would be the best there is, and an error would end the training that evaluates
    return metrics if sums.supervised else dict.fromkeys(metrics, math.nan)


def _ratio(total: torch.Tensor, count: torch.Tensor) -> float:
    return (total / safe_divisor(count, total)).item()
