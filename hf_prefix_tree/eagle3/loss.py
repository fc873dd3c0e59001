# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The EAGLE-3 loss: where a step counts, and the cross-entropy with the target's distribution.

Step k at slot t reads the token t + 1 + k, and is compared with the target's distribution after that token. A slot
counts once for each branch that supervises this token. With `L_k = mean over all that is valid of -sum_v p_v log q_v`,
the loss is `sum_k decay^k L_k / sum_k decay^k`.

Cost: the heads of draft and target where something counts; that of the draft in chunks that are recomputed in the
backward: no step keeps its logits, and all steps read one copy of the target's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

CHUNK_SIZE = 1024  # positions whose logits exist at a time


class StepSums(NamedTuple):
    """Sums of each of K steps over the positions of all branches of a batch. Sums of several batches add up."""

    loss: torch.Tensor  # [K] float64: cross-entropy of the valid positions
    valid: torch.Tensor  # [K] int64: supervised positions whose target token is in the draft vocabulary
    supervised: torch.Tensor  # [K] int64: supervised positions
    correct: torch.Tensor  # [K] int64: supervised positions where the draft's first choice is the target's
    hits: torch.Tensor  # [K] int64: positions that are correct at this step and at every step before

    def metrics(self) -> dict[str, float]:
        """
        Accuracy per step, and tau, the expected tokens per round of the target: `1 + sum_k hits_k / supervised_k`. A
        token outside of the draft vocabulary misses.

        Example:

        ```python
        >>> import torch
        >>> hits, supervised = torch.tensor([6, 3, 1]), torch.tensor([8, 6, 4])
        >>> StepSums(torch.zeros(3), supervised, supervised, hits, hits).metrics()["tau"]
        2.5

        ```
        """
        supervised = self.supervised.double().clamp(min=1)
        accuracy, tau = (self.correct / supervised).tolist(), 1.0 + (self.hits / supervised).sum().item()
        return {**{f"accuracy/step_{k}": a for k, a in enumerate(accuracy)}, "tau": tau}


def deciding(weights: torch.Tensor) -> torch.Tensor:
    """
    Where the draft's choice matters: at slots that count at this step, or at a later one, which is then no hit.

    Args:
        weights (`torch.Tensor` of shape `(B, K, M)`, int64): `draft_weights`, see [`draft_slots`].

    Example:

    ```python
    >>> import torch
    >>> deciding(torch.tensor([[[1, 0, 0], [0, 2, 0]]])).int()
    tensor([[[1, 1, 0],
             [0, 1, 0]]], dtype=torch.int32)

    ```
    """
    return weights.flip(1).cumsum(1).flip(1) > 0


def needed_targets(slots: Mapping[str, torch.Tensor], num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The tokens after which the target's distribution is needed, and the one of each slot and step among them.

    Args:
        slots (`Mapping[str, torch.Tensor]`): See [`draft_slots`].
        num_tokens (`int`): Positions of the batch, B * N.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: indices into the flattened `B * N`, ascending, int64 of shape `(S,)`, at
        least one; and for each slot and step an index into these, int64 of shape `(B, K, M)`.
    """
    ahead = slots["draft_sources"][:, 1:]
    is_needed = torch.zeros(num_tokens, dtype=torch.bool, device=ahead.device)
    is_needed[ahead[deciding(slots["draft_weights"])]] = True
    is_needed[:1] = True
    return is_needed.nonzero().squeeze(-1), (is_needed.cumsum(0) - 1)[ahead]


def position_losses(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    target_logits: torch.Tensor,
    where: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Cross-entropy of each position with the target's distribution over the draft vocabulary, and the first choice.

    Args:
        head (`Callable`): Hidden states to draft logits.
        hidden (`torch.Tensor` of shape `(M, hidden)`): Normed hidden states of the positions.
        target_logits (`torch.Tensor` of shape `(S, draft_vocab_size)`): The target's logits of the draft vocabulary.
        where (`torch.Tensor` of shape `(M,)`, int64): The index into `target_logits` for each position.

    Returns:
        `tuple`: `-sum p log q`, `(M,)`, in float32 or better; the draft's first choices, int64 `(M,)`.
    """

    def chunk(hidden: torch.Tensor, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = head(hidden)
        dtype = torch.promote_types(logits.dtype, torch.float32)
        probabilities = torch.softmax(target_logits[where].to(dtype), dim=-1)
        losses = -(probabilities * torch.log_softmax(logits.to(dtype), dim=-1)).sum(dim=-1)
        return losses, logits.argmax(dim=-1)

    run = partial(checkpoint, chunk, use_reentrant=False) if torch.is_grad_enabled() else chunk
    parts = [run(*part) for part in zip(hidden.split(CHUNK_SIZE), where.split(CHUNK_SIZE), strict=True)]
    losses, choices = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(choices)


def weighted_steps(loss_sums: torch.Tensor, counts: torch.Tensor, decay: float) -> torch.Tensor:
    """
    The loss of summed steps: `sum_k decay^k (S_k / C_k) / sum_k decay^k`. A step without a valid position gives 0.

    Args:
        loss_sums (`torch.Tensor` of shape `(K,)`, float64): S_k.
        counts (`torch.Tensor` of shape `(K,)`, int64): C_k, of the whole optimizer step where the sums are of a part.
        decay (`float`): Weight of a step, relative to the one before.
    """
    weights = decay ** torch.arange(len(loss_sums), dtype=torch.float64, device=loss_sums.device)
    return (weights * loss_sums / counts.to(loss_sums.device).clamp(min=1)).sum() / weights.sum()
