"""Advantages differ between branches that share a token: each branch clips for itself, and all terms add up."""

from __future__ import annotations

import math

import pytest
import torch
import trl.trainer.utils

from conformance.double import keep_double
from tests.support.models import gradients, relative_error
from tests.support.policy_runs import CountedTokens, build
from tests.support.rollout_loss import DoubleHead
from tests.support.trainer_runs import make_model

EPSILON, BETA = 0.2, 0.1
PROMPT = [7, 8, 9, 10]
# two levels: [20 21] of the first four, [22] of the first two; the third is the beginning of the fourth; a duplicate
COMPLETIONS = [[20, 21, 22, 30], [20, 21, 22, 31, 32], [20, 21, 40], [20, 21, 40, 41], [50, 51], [50, 51]]
ADVANTAGES = [1.5, -0.7, 0.4, -1.2, 0.9, -0.3]


def old_log_ratios(row, length):
    """What the policy has moved since sampling, in another way at every token: ratios from 0.6 to 1.7."""
    return [0.5 * math.sin(1 + 3 * row + 2 * token) for token in range(length)]


def micro_batch(model):
    """The completions as TRL hands them to the loss, prompts padded on the left."""
    width, longest = len(PROMPT) + 2, max(map(len, COMPLETIONS))
    rows = len(COMPLETIONS)
    batch = {
        "prompt_ids": torch.tensor([[0, 0, *PROMPT]] * rows),
        "prompt_mask": torch.tensor([[0, 0] + [1] * len(PROMPT)] * rows),
        "completion_ids": torch.tensor([own + [0] * (longest - len(own)) for own in COMPLETIONS]),
        "completion_mask": torch.tensor([[1] * len(own) + [0] * (longest - len(own)) for own in COMPLETIONS]),
        "advantages": torch.tensor(ADVANTAGES, dtype=torch.float64),
        "num_items_in_batch": torch.tensor(sum(map(len, COMPLETIONS))),
        "old_per_token_logps": torch.zeros(rows, longest, dtype=torch.float64),
        "ref_per_token_logps": torch.full((rows, longest), -4.0, dtype=torch.float64),
    }
    assert batch["prompt_ids"].shape[1] == width
    for row, own in enumerate(COMPLETIONS):
        with torch.no_grad():
            known = log_probs_alone(model, own)
        shift = torch.tensor(old_log_ratios(row, len(own)), dtype=torch.float64)
        batch["old_per_token_logps"][row, : len(own)] = known - shift
    return batch


def log_probs_alone(model, completion):
    """One completion by itself, without padding and without our forward."""
    ids = torch.tensor([PROMPT + completion])
    with keep_double():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    picked = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
    return picked[len(PROMPT) - 1 :]


def independent_loss(model, batch, loss_type, level, advantage_of):
    """The loss by hand, from one forward per completion."""
    total = torch.zeros((), dtype=torch.float64)
    clipped = 0
    for row, own in enumerate(COMPLETIONS):
        log_probs = log_probs_alone(model, own)
        log_ratio = log_probs - batch["old_per_token_logps"][row, : len(own)]
        if level == "sequence":
            log_ratio = log_ratio.mean().expand_as(log_ratio)
        ratio = log_ratio.exp()
        advantage = torch.tensor([advantage_of(row, token) for token in range(len(own))], dtype=torch.float64)
        plain, bounded = ratio * advantage, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantage
        clipped += int((bounded < plain).sum())
        difference = -4.0 - log_probs
        terms = -torch.min(plain, bounded) + BETA * ratio * (
            difference.exp() - difference - 1
        )  # KL corrected for bias
        total = total + (terms.mean() / len(COMPLETIONS) if loss_type == "grpo" else terms.sum())
    if loss_type == "dapo":
        total = total / sum(map(len, COMPLETIONS))
    return total, clipped


def own_advantage(row, token):
    return ADVANTAGES[row]


def merged_advantage(row, token):
    """Wrong: the branches that share a token agree on one advantage before the clip."""
    start = COMPLETIONS[row][: token + 1]
    sharing = [ADVANTAGES[i] for i, own in enumerate(COMPLETIONS) if own[: token + 1] == start]
    return sum(sharing) / len(sharing)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_gradients_equal_those_of_independent_rows(tmp_path, monkeypatch, loss_type, level):
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", DoubleHead)
    trainer = build(
        tmp_path,
        "grpo",
        "tree",
        model=make_model(dtype=torch.float64),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon=EPSILON,
        beta=BETA,
        gradient_accumulation_steps=1,
    )
    trainer.current_gradient_accumulation_steps = 1
    model = trainer.model.train()
    batch = micro_batch(model)
    tokens = CountedTokens(model)
    with keep_double():
        loss = trainer.compute_loss(model, batch)
    loss.backward()
    got = gradients(model)
    # the prompt once, and 4 + 2 + 2 + 2 further tokens of which no two are the same node
    assert tokens.trained == [len(PROMPT) + len({tuple(own[: i + 1]) for own in COMPLETIONS for i in range(len(own))})]

    found = {}
    for name, advantage_of in (("independent", own_advantage), ("merged", merged_advantage)):
        model.zero_grad()
        expected, clipped = independent_loss(model, batch, loss_type, level, advantage_of)
        expected.backward()
        found[name] = expected, gradients(model)
        assert clipped >= 2
    expected, expected_gradients = found["independent"]
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    assert relative_error(got, expected_gradients) < 1e-10
    assert relative_error(found["merged"][1], expected_gradients) > 1e-2
