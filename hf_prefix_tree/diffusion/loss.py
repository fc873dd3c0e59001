# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The losses of diffusion language models: masked diffusion, block diffusion, and both with next-token prediction.

Each is `sum_t w_t * nll_t / N` with N the supervised tokens of the whole optimizer step. Diffusion predicts a token at
its own position, next-token prediction at the position before.

The `*_terms` functions say which positions carry loss and with which weight. The trainer runs the head at those M
positions alone and takes the weighted mean of their NLLs; the `*_loss` functions take the logits of all positions, for
training loops that have them, and compute the same mean over the same terms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_prefix_tree.modeling.loss import weighted_token_loss


class LossTerms(NamedTuple):
    """The M terms of a loss that are not zero."""

    where: torch.Tensor  # [M] int64: position in the flattened `(B * L)` whose logits predict the token
    targets: torch.Tensor  # [M] int64: the token
    weights: torch.Tensor  # [M] float64


def mdlm_terms(targets: torch.Tensor, is_masked: torch.Tensor, p: torch.Tensor, loss_mask: torch.Tensor) -> LossTerms:
    """
    The terms of masked diffusion (MDLM, LLaDA): masked and supervised tokens, each weighted `1 / p`.

    Args:
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised.
        is_masked (`torch.Tensor` of shape `(B, L)`, bool): Which tokens were masked or replaced.
        p (`torch.Tensor` of shape `(B, L)`, float32): Probability with which each was masked.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised.

    Returns:
        [`LossTerms`], in the order of the flattened batch.

    Raises:
        `ValueError`: If shapes differ, a supervised target is negative, or a masked token has `p <= 0`.
    """
    _check_shapes(targets, is_masked=is_masked, p=p, loss_mask=loss_mask)
    terms = _flat_terms(targets, (is_masked != 0) & (loss_mask != 0))
    probabilities = p.flatten()[terms.where].double()
    if not bool((probabilities > 0).all()):
        raise ValueError("`p` is not above 0 at a masked position: pass the `p` that was drawn with `is_masked`.")
    return terms._replace(weights=1 / probabilities)


def block_diffusion_terms(targets: torch.Tensor, loss_mask: torch.Tensor) -> LossTerms:
    """
    The terms of block diffusion with a flat loss: every supervised token, masked or not, with weight 1.

    Args:
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised.

    Returns:
        [`LossTerms`], in the order of the flattened batch.

    Raises:
        `ValueError`: If shapes differ or a supervised target is negative.
    """
    _check_shapes(targets, loss_mask=loss_mask)
    return _flat_terms(targets, loss_mask != 0)


def next_token_terms(targets: torch.Tensor, loss_mask: torch.Tensor) -> LossTerms:
    """
    The terms of next-token prediction: every supervised token at the position before it, with weight 1.

    The first token of a sequence has no position before it and is in no term.

    Args:
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised. Not
            shifted.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised. Not shifted.

    Returns:
        [`LossTerms`], in the order of the flattened batch.

    Raises:
        `ValueError`: If shapes differ or a supervised target is negative.

    Example:

    ```python
    >>> import torch
    >>> terms = next_token_terms(torch.tensor([[5, 6, 7]]), torch.tensor([[1, 0, 1]]))
    >>> terms.where, terms.targets
    (tensor([1]), tensor([7]))

    ```
    """
    _check_shapes(targets, loss_mask=loss_mask)
    is_predicted = loss_mask != 0
    is_predicted[:, :1] = False
    terms = _flat_terms(targets, is_predicted)
    return terms._replace(where=terms.where - 1)


def hybrid_terms(diffusion: LossTerms, next_token: LossTerms, length: int, alpha: float) -> LossTerms:
    """
    The terms of masked diffusion on x_t, times `alpha`, and those of next-token prediction on x_0.

    Args:
        diffusion ([`LossTerms`]): Of [`mdlm_terms`].
        next_token ([`LossTerms`]): Of [`next_token_terms`].
        length (`int`): L, the tokens of a sample.
        alpha (`float`): Weight of the diffusion part.

    Returns:
        [`LossTerms`], diffusion first, at positions of the flattened `[x_t | x_0]` of shape `(B, 2 L)`.
    """
    return LossTerms(
        torch.cat([noisy_half(diffusion.where, length), noisy_half(next_token.where, length) + length]),
        torch.cat([diffusion.targets, next_token.targets]),
        torch.cat([alpha * diffusion.weights, next_token.weights]),
    )


def noisy_half(where: torch.Tensor, length: int) -> torch.Tensor:
    """Positions in the flattened `(B, L)` as positions in x_t of the flattened `[x_t | x_0]`, `(B, 2 L)`."""
    return where + where // length * length


def mdlm_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    is_masked: torch.Tensor,
    p: torch.Tensor,
    loss_mask: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """
    The masked-diffusion loss (MDLM, LLaDA): `sum nll * [masked and supervised] / p` over N.

    Args:
        logits (`torch.Tensor` of shape `(B, L, vocab)`): The logits at a position predict its own token.
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised.
        is_masked (`torch.Tensor` of shape `(B, L)`, bool): Which tokens were masked or replaced.
        p (`torch.Tensor` of shape `(B, L)`, float32): Probability with which each was masked.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): N, the supervised tokens, masked or not, of the
            whole optimizer step on all ranks. Defaults to those of this call.

    Returns:
        `torch.Tensor`: scalar, float64 for float64 logits and float32 otherwise. Without terms a differentiable zero.

    Raises:
        `ValueError`: See [`mdlm_terms`], or if N is not positive although there are terms.

    Example:

    ```python
    >>> import torch
    >>> masked, mask = torch.tensor([[False, True, False, True]]), torch.tensor([[0, 1, 1, 1]])
    >>> mdlm_loss(torch.zeros(1, 4, 4), torch.tensor([[0, 1, 2, 3]]), masked, torch.full((1, 4), 0.5), mask)
    tensor(1.8484)

    ```
    """
    return _full_loss([logits], mdlm_terms(targets, is_masked, p, loss_mask), loss_mask, num_items_in_batch)


def block_diffusion_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss_mask: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """
    The flat block-diffusion loss: `sum nll` of all supervised tokens, masked or not, over N.

    Args:
        logits (`torch.Tensor` of shape `(B, L, vocab)`): The logits at a position predict its own token.
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): N, as in [`mdlm_loss`].

    Returns:
        `torch.Tensor`: scalar, as [`mdlm_loss`].

    Raises:
        `ValueError`: See [`block_diffusion_terms`], or if N is not positive although there are terms.

    Example:

    ```python
    >>> import torch
    >>> block_diffusion_loss(torch.zeros(1, 4, 4), torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 1, 1]]))
    tensor(1.3863)

    ```
    """
    return _full_loss([logits], block_diffusion_terms(targets, loss_mask), loss_mask, num_items_in_batch)


def hybrid_loss(
    logits: torch.Tensor,
    next_token_logits: torch.Tensor,
    targets: torch.Tensor,
    is_masked: torch.Tensor,
    p: torch.Tensor,
    loss_mask: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
    *,
    alpha: float,
) -> torch.Tensor:
    """
    `alpha` times the masked-diffusion loss, plus next-token cross-entropy; both over the same N.

    Args:
        logits (`torch.Tensor` of shape `(B, L, vocab)`): Of the noisy tokens; predict their own position.
        next_token_logits (`torch.Tensor` of shape `(B, L, vocab)`): Of the clean tokens under a causal mask; predict
            the next position.
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised.
        is_masked (`torch.Tensor` of shape `(B, L)`, bool): Which tokens were masked or replaced.
        p (`torch.Tensor` of shape `(B, L)`, float32): Probability with which each was masked.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised, in both parts.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): N, as in [`mdlm_loss`].
        alpha (`float`): Weight of the diffusion part.

    Returns:
        `torch.Tensor`: scalar, as [`mdlm_loss`].

    Raises:
        `ValueError`: See [`mdlm_terms`], or if N is not positive although there are terms.
    """
    diffusion, next_token = mdlm_terms(targets, is_masked, p, loss_mask), next_token_terms(targets, loss_mask)
    terms = hybrid_terms(diffusion, next_token, targets.shape[1], alpha)
    return _full_loss([logits, next_token_logits], terms, loss_mask, num_items_in_batch)


def _full_loss(
    parts: list[torch.Tensor],
    terms: LossTerms,
    loss_mask: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None,
) -> torch.Tensor:
    """The loss of the logits of x_t, or of those of x_t and x_0."""
    for logits in parts:
        if logits.ndim != 3 or logits.shape[:2] != loss_mask.shape:
            raise ValueError(f"`logits` must have the shape {(*loss_mask.shape, 'vocab')}, got {tuple(logits.shape)}.")
    if num_items_in_batch is None:
        num_items_in_batch = (loss_mask != 0).sum()
    if len(terms.where) and not float(num_items_in_batch) > 0:
        raise ValueError(
            f"`num_items_in_batch` is {float(num_items_in_batch)} although {len(terms.where)} tokens carry loss: pass "
            "the number of supervised tokens of the optimizer step."
        )
    logits = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
    logits = logits.flatten(0, 1)[terms.where.to(logits.device)]
    return weighted_token_loss(logits, terms.targets, terms.weights, num_items_in_batch)


def _flat_terms(targets: torch.Tensor, selected: torch.Tensor) -> LossTerms:
    """The selected targets at their own positions, with weight 1."""
    where = selected.flatten().nonzero().squeeze(1)
    targets = targets.flatten()[where]
    if bool((targets < 0).any()):
        raise ValueError(
            "`targets` is negative at a position that `loss_mask` supervises: pass the clean ids, or `labels` and "
            "`loss_mask` of one collator."
        )
    return LossTerms(where, targets, torch.ones_like(where, dtype=torch.float64))


def _check_shapes(targets: torch.Tensor, **others: torch.Tensor) -> None:
    for name, value in others.items():
        if value.shape != targets.shape or targets.ndim != 2:
            raise ValueError(
                f"`{name}` has the shape {tuple(value.shape)} and `targets` {tuple(targets.shape)}; make both (B, L)."
            )
