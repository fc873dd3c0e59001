"""
The loss over rollouts of several rows by definition, for each loss type of GRPO: every row runs by itself through the
model, and every formula is over the tokens of a rollout. No code of the package, and none of TRL but its options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.double import keep_double


class DoubleHead:
    """TRL's fused head computes in float32; the same quantities in the dtype of the hidden states."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, chunk_size, softcap, logit_scale, outputs):
        logits = hidden @ weight.T * logit_scale / temperature
        log_probs = logits.log_softmax(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        own = log_probs.gather(-1, labels[:, None])[:, 0]
        squares = (2 * log_probs).logsumexp(-1)
        return own, entropy, squares.detach(), logits.mean(-1).detach(), own == log_probs.amax(-1)


@dataclass
class GivenRow:
    """One (prompt, completion) sequence; `mask` is 1 where the policy sampled the token."""

    prompt: list[int]
    completion: list[int]
    mask: list[int]
    sampled: list[float]  # log-probs that the sampler returned


@dataclass
class GivenRollout:
    rows: list[GivenRow]
    score: float
    row_scores: list[float] | None = None
    advantages: list[float] = field(default_factory=list)  # of each row


def completion_log_probs(model: Any, row: GivenRow) -> torch.Tensor:
    """The log-prob of each token of the completion, from a forward over this row alone."""
    if not row.completion:
        return torch.zeros(0, dtype=torch.float64)
    ids = torch.tensor([row.prompt + row.completion])
    with keep_double():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    return logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[len(row.prompt) - 1 :, 0]


def rollout_log_probs(model: Any, rollout: GivenRollout) -> torch.Tensor:
    """The log-probs of the tokens that count: those of every row whose mask is 1, row after row."""
    pieces = [completion_log_probs(model, row)[torch.tensor(row.mask, dtype=torch.bool)] for row in rollout.rows]
    return torch.cat(pieces)


def token_terms(
    args: Any, rollout: GivenRollout, now: torch.Tensor, old: torch.Tensor, reference: torch.Tensor, vllm: bool
) -> torch.Tensor:
    """The term of each token that counts. All arguments are values of these tokens, of shape `(n,)`."""
    n = max(len(now), 1)
    advantage = torch.tensor(
        [a for a, row in zip(rollout.advantages, rollout.rows, strict=True) for _ in range(sum(row.mask))],
        dtype=torch.float64,
    )
    sampled = [s for row in rollout.rows for s, counts in zip(row.sampled, row.mask, strict=True) if counts]
    sampled = torch.tensor(sampled, dtype=torch.float64)
    log_ratio = now - old
    importance = log_ratio if args.importance_sampling_level == "token" else (log_ratio.sum() / n).expand_as(now)
    ratio = importance.exp()
    correction = torch.ones_like(now)
    if vllm:
        drift = old - sampled
        is_sequence = args.vllm_importance_sampling_mode.startswith("sequence")
        correction = (drift.sum().expand_as(now) if is_sequence else drift).exp()
        low, high = args.vllm_importance_sampling_clip_min, args.vllm_importance_sampling_clip_max
        if args.vllm_importance_sampling_mode.endswith("truncate"):
            correction = correction.clamp(low, high)
        else:
            outside = (correction > high) | (correction < (-torch.inf if low is None else low))
            correction = correction.masked_fill(outside, 0.0)
    if args.loss_type == "cispo":
        terms = -ratio.clamp(max=args.epsilon_high).detach() * advantage * now
    elif args.loss_type == "sapo":
        temperature = torch.where(advantage > 0, args.sapo_temperature_pos, args.sapo_temperature_neg).double()
        terms = -4 / temperature * torch.sigmoid(temperature * (ratio - 1)) * advantage
    elif args.loss_type == "vespo":
        with torch.no_grad():
            log_weight = log_ratio.clamp(-20, 20).sum()
            if vllm:
                log_weight = log_weight + correction.log().clamp(-18.420680743952367, 20).sum()
            log_weight = log_weight.clamp(-18.420680743952367, 20)
            positive = advantage >= 0
            k = torch.where(positive, args.vespo_k_pos, args.vespo_k_neg).double()
            rate = torch.where(positive, args.vespo_lambda_pos, args.vespo_lambda_neg).double()
            factor = (rate + k * log_weight - rate * log_weight.exp()).exp()
        terms = -factor * advantage * now
    else:
        bounded = ratio.clamp(1 - args.epsilon, 1 + args.epsilon_high)
        free = ratio if args.delta is None else ratio.clamp(max=args.delta)
        terms = -torch.min(free * advantage, bounded * advantage)
    if args.off_policy_mask_threshold is not None:
        drift = (sampled - now.detach()).sum() / n
        terms = terms * ((advantage >= 0) | (drift <= args.off_policy_mask_threshold))
    if vllm and args.loss_type != "vespo":
        terms = terms * correction
    if args.beta:
        difference = reference - now
        kl = difference.exp() - difference - 1
        terms = terms + args.beta * (kl * ratio if args.use_bias_correction_kl else kl)
    return terms


def step_loss(
    model: Any,
    old: Any,
    reference: Any,
    args: Any,
    micro_batches: Sequence[Sequence[GivenRollout]],
    vllm: bool = False,
) -> torch.Tensor:
    """
    The loss of an optimizer step.

    Args:
        model, old, reference: The policy, the policy that scored the rollouts first, and the reference policy.
        args (`GRPOConfig`): TRL's options.
        micro_batches: The rollouts of each of TRL's micro-batches, of all ranks and accumulation steps.
        vllm: Whether log-probs of the sampler correct the ratio.
    """
    sums: list[list[torch.Tensor]] = []
    counts: list[list[int]] = []
    for batch in micro_batches:
        terms = []
        for rollout in batch:
            with torch.no_grad():
                fixed = rollout_log_probs(old, rollout), rollout_log_probs(reference, rollout)
            terms.append(token_terms(args, rollout, rollout_log_probs(model, rollout), *fixed, vllm))
        sums.append([values.sum() for values in terms])
        counts.append([len(values) for values in terms])
    flat_sums = torch.stack([value for batch in sums for value in batch])
    flat_counts = torch.tensor([float(count) for batch in counts for count in batch], dtype=torch.float64)
    if args.loss_type in ("grpo", "sapo"):
        return (flat_sums / flat_counts.clamp(min=1)).mean()
    if args.loss_type == "luspo":
        return flat_sums.mean()
    if args.loss_type == "dr_grpo":
        return flat_sums.sum() / (len(flat_sums) * args.max_completion_length)
    if args.loss_type == "bnpo":
        pairs = zip(sums, counts, strict=True)
        return torch.stack([sum(batch) / max(sum(tokens), 1) for batch, tokens in pairs]).mean()
    assert args.loss_type in ("dapo", "cispo", "vespo")
    return flat_sums.sum() / flat_counts.sum().clamp(min=1)
