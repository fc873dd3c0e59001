# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The weighted token loss, `sum_t w_t * nll_t / sum_t w_t`.

Products and sums run in float64: a float32 weight alone would cost 3e-8 to 6e-8 in the loss.
"""

from __future__ import annotations

import torch

from hf_prefix_tree.data.supervision import IGNORE_INDEX


def weighted_token_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """
    The weighted mean of the negative log-likelihood of compacted tokens.

    Args:
        logits (`torch.Tensor` of shape `(1, M, vocab)`): Distribution from which each token is predicted.
        labels (`torch.Tensor` of shape `(1, M)`, int64): The tokens; -100 is ignored.
        weights (`torch.Tensor` of shape `(1, M)`, float64): Weight of each token.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): Divisor, the summed weights of the whole optimizer
            step. Defaults to the summed weights of this call. Never clamped: weights of 1/K make it smaller than 1.

    Returns:
        `torch.Tensor`: scalar, float64 for float64 logits and float32 otherwise. A call without weight gives a
        differentiable zero.

    Example:

    ```python
    >>> import torch
    >>> logits = torch.tensor([[[0.0, 0.0], [0.0, 0.0]]])
    >>> weighted_token_loss(logits, torch.tensor([[0, 1]]), torch.tensor([[0.5, 1.0]]).double())
    tensor(0.6931)

    ```
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.reshape(-1, logits.shape[-1]).to(dtype)
    labels, weights = (x.reshape(-1).to(logits.device) for x in (labels, weights))
    nll = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    return weighted_mean(nll, weights, weights.sum() if num_items_in_batch is None else num_items_in_batch).to(dtype)


def weighted_mean(nll: torch.Tensor, weights: torch.Tensor, divisor: torch.Tensor | float) -> torch.Tensor:
    """
    `sum(weights * nll) / divisor` as a float64 scalar, for `nll` and float64 `weights` of one shape. Without weight it
    is a differentiable 0, whatever the divisor; with weight and a divisor of 0 it is not finite.
    """
    divisor = torch.as_tensor(divisor, dtype=torch.float64, device=weights.device)
    return (nll.double() * weights / torch.where(weights.any(), divisor, 1.0)).sum()


def safe_divisor(divisor: torch.Tensor | float, like: torch.Tensor) -> torch.Tensor:
    """`divisor` as float64 on the device of `like`; 1 where it is 0, since a sum without weight is 0 anyway."""
    divisor = torch.as_tensor(divisor, dtype=torch.float64, device=like.device)
    return torch.where(divisor == 0, torch.ones_like(divisor), divisor)
