# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The losses: the values of the formulas, their normaliser, gradients, and what they refuse."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from hf_prefix_tree.diffusion.loss import (
    block_diffusion_loss,
    hybrid_loss,
    mdlm_loss,
    mdlm_weights,
    next_token_weights,
    objective_inputs,
    objective_loss,
)
from hf_prefix_tree.diffusion.noise import Corrupted, corrupt, noise_seeds

LN4 = math.log(4)
ZERO = torch.zeros(1, 4, 4)
TARGETS = torch.tensor([[0, 1, 2, 3]])
NOISE = torch.tensor([[0, 1, 0, 1]]).bool()
MASK = torch.tensor([[0.0, 1.0, 1.0, 1.0]])
HALF = torch.full((1, 4), 0.5)


def value(loss: torch.Tensor) -> float:
    assert loss.shape == () and loss.dtype == torch.float32
    return loss.item()


def test_values_of_the_formulas():
    """Zero logits over 4 tokens: every nll is ln 4."""
    assert value(mdlm_loss(ZERO, TARGETS, NOISE, HALF, MASK)) == pytest.approx(4 / 3 * LN4, rel=1e-6)
    assert value(mdlm_loss(ZERO, TARGETS, NOISE, HALF, MASK, 1)) == pytest.approx(4 * LN4, rel=1e-6)  # the sum
    assert value(block_diffusion_loss(ZERO, TARGETS, MASK)) == pytest.approx(LN4, rel=1e-6)
    assert value(block_diffusion_loss(ZERO, TARGETS, MASK, 1)) == pytest.approx(3 * LN4, rel=1e-6)
    for alpha in (0.0, 0.3, 2.0):
        loss = hybrid_loss(ZERO, ZERO, TARGETS, NOISE, HALF, MASK, alpha=alpha)
        assert value(loss) == pytest.approx((alpha * 4 / 3 + 1) * LN4, rel=1e-6)
    # A first token that is supervised counts in N, but nothing predicts it.
    everything = torch.ones(1, 4)
    loss = hybrid_loss(ZERO, ZERO, TARGETS, NOISE, HALF, everything, alpha=1.0)
    assert value(loss) == pytest.approx((4 + 3) / 4 * LN4, rel=1e-6)
    # A masked but unsupervised token carries no loss, and nor does a supervised but unmasked one.
    first = torch.tensor([[1, 1, 0, 0]]).bool()
    assert value(mdlm_loss(ZERO, TARGETS, first, HALF, MASK)) == pytest.approx(2 / 3 * LN4, rel=1e-6)


def random_case(dtype: torch.dtype = torch.float64, size: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(0, 11, (size, 9), generator=generator)
    loss_mask = (torch.rand((size, 9), generator=generator) < 0.7).float()
    noisy = corrupt(
        "uniform", targets, loss_mask, mask_token_id=11, seeds=noise_seeds(torch.arange(size), 5), eps=0.05
    )
    return {
        "logits": torch.randn((size, 9, 12), generator=generator, dtype=dtype),
        "next_token_logits": torch.randn((size, 9, 12), generator=generator, dtype=dtype),
        "targets": targets,
        "is_masked": noisy.is_masked,
        "p": noisy.p,
        "loss_mask": loss_mask,
    }


def sums(case: dict[str, Any]) -> tuple[float, float, float, int]:
    """Weighted, flat and next-token sums, and N, token by token."""
    nll = -torch.log_softmax(case["logits"], dim=-1)
    next_nll = -torch.log_softmax(case["next_token_logits"], dim=-1)
    weighted = flat = following = 0.0
    count = 0
    for row in range(len(nll)):
        for t, target in enumerate(case["targets"][row].tolist()):
            if not case["loss_mask"][row, t]:
                continue
            count += 1
            flat += nll[row, t, target].item()
            if case["is_masked"][row, t]:
                weighted += nll[row, t, target].item() / case["p"][row, t].item()
            if t > 0:
                following += next_nll[row, t - 1, target].item()
    return weighted, flat, following, count


def test_random_values_in_float64():
    case = random_case()
    weighted, flat, following, count = sums(case)
    flat_case = {name: case[name] for name in ("logits", "targets", "loss_mask")}
    mdlm_case = {name: x for name, x in case.items() if name != "next_token_logits"}
    assert min(weighted, flat, following) > 0
    for n, own in ((None, count), (70, 70), (torch.tensor(3), 3), (0.5, 0.5)):
        for loss, expected in (
            (mdlm_loss(**mdlm_case, num_items_in_batch=n), weighted / own),
            (block_diffusion_loss(**flat_case, num_items_in_batch=n), flat / own),
            (hybrid_loss(**case, alpha=0.3, num_items_in_batch=n), (0.3 * weighted + following) / own),
        ):
            assert loss.dtype == torch.float64
            assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_labels_may_be_the_targets():
    case = random_case()
    labels = torch.where(case["loss_mask"] != 0, case["targets"], -100)
    assert torch.equal(hybrid_loss(**case, alpha=1.0), hybrid_loss(**{**case, "targets": labels}, alpha=1.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logits_are_scored_in_float32(dtype: torch.dtype):
    case = random_case()
    case["logits"], case["next_token_logits"] = case["logits"].to(dtype), case["next_token_logits"].to(dtype)
    exact = {**case, "logits": case["logits"].double(), "next_token_logits": case["next_token_logits"].double()}
    loss = hybrid_loss(**case, alpha=1.0)
    assert value(loss) == pytest.approx(hybrid_loss(**exact, alpha=1.0).item(), rel=1e-6)


@pytest.mark.parametrize("response_window", [True, False])
@pytest.mark.parametrize("objective", ["mdlm", "block", "hybrid"])
def test_the_head_at_predicted_positions_gives_the_same_loss_and_gradients(objective: str, response_window: bool):
    """As the trainer does: hidden states of predicted positions, the head on those alone, then their log-probs."""
    case = random_case()
    args = SimpleNamespace(
        objective=objective, block_size=4, response_window=response_window, alpha=0.3, group_by=None
    )
    noise = Corrupted(torch.full_like(case["targets"], 11), case["is_masked"], case["p"])
    batch = {"input_ids": case["targets"], "loss_mask": case["loss_mask"], "input_lengths": torch.ones(4)}
    batch["attention_mask"] = torch.ones_like(case["targets"])
    inputs, targets, is_predicted, _ = objective_inputs(batch, noise, args)
    assert inputs["input_ids"].shape == targets.shape == (4, 9 if objective == "mdlm" else 18)
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn((*targets.shape, 5), generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn((5, 12), generator=generator, dtype=torch.float64, requires_grad=True)
    assert 0 < is_predicted.sum() < targets.numel() * 3 / 4
    nll = cross_entropy(hidden[is_predicted] @ head, targets[is_predicted], reduction="none")
    log_probs = torch.zeros(targets.shape, dtype=torch.float64).masked_scatter(is_predicted, -nll)
    loss = objective_loss(log_probs, batch, noise, args, torch.tensor(20))
    case["logits"], case["next_token_logits"] = (hidden @ head)[:, :9], (hidden @ head)[:, 9:]
    if objective == "hybrid":
        expected = hybrid_loss(**case, num_items_in_batch=20, alpha=0.3)
    elif objective == "mdlm":
        case.pop("next_token_logits")
        expected = mdlm_loss(**case, num_items_in_batch=20)
    else:
        expected = block_diffusion_loss(case["logits"], case["targets"], case["loss_mask"], 20)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13)
    got = torch.autograd.grad(loss, (hidden, head))
    for one, other in zip(got, torch.autograd.grad(expected, (hidden, head)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


def test_weights():
    weights = mdlm_weights(NOISE, torch.tensor([[0.0, 0.5, 0.0, 0.25]]), MASK)
    assert weights.tolist() == [[0.0, 2.0, 0.0, 4.0]] and weights.dtype == torch.float64
    # the first token of the second sequence is not predicted from the last position of the first one
    assert next_token_weights(torch.ones(2, 4)).tolist() == [[1.0, 1.0, 1.0, 0.0]] * 2


@pytest.mark.parametrize("kind", ["mdlm", "block", "hybrid"])
def test_micro_batches_add_up_to_the_step(kind: str):
    """Split anyhow, with N of the whole step, losses and gradients add up; a mean of own means would not."""
    case = random_case(size=6)
    count = (case["loss_mask"] != 0).sum()

    def loss(rows: slice, n: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        own = {name: x[rows] for name, x in case.items()}
        logits = own["logits"] = own["logits"].clone().requires_grad_()
        if kind == "hybrid":
            result = hybrid_loss(**own, num_items_in_batch=n, alpha=0.7)
        elif kind == "mdlm":
            own.pop("next_token_logits")
            result = mdlm_loss(**own, num_items_in_batch=n)
        else:
            result = block_diffusion_loss(own["logits"], own["targets"], own["loss_mask"], n)
        return result, torch.autograd.grad(result, logits)[0]

    whole, gradient = loss(slice(0, 6), None)
    parts = [loss(rows, count) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), rel=1e-13)
    torch.testing.assert_close(torch.cat([g for _, g in parts]), gradient, rtol=1e-13, atol=0)
    means = [loss(rows, None)[0].item() for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    assert abs(sum(means) / 3 - whole.item()) > 1e-3


def test_weighted_loss_estimates_the_loss_of_all_tokens():
    """With p per sequence, `sum nll [corrupted] / p` has the flat sum as its mean over the noise."""
    count = 20000
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(0, 4, (1, 6), generator=generator)
    logits = torch.randn((1, 6, 4), generator=generator, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]])
    many = targets.expand(count, -1).contiguous()
    noisy = corrupt(
        "uniform", many, mask.expand(count, -1), mask_token_id=9, seeds=noise_seeds(torch.arange(count)), eps=0.1
    )
    got = mdlm_loss(logits.expand(count, -1, -1), many, noisy.is_masked, noisy.p, mask.expand(count, -1))
    assert got.item() == pytest.approx(block_diffusion_loss(logits, targets, mask).item(), rel=0.02)


@pytest.mark.parametrize("n", [None, 0, 5])
def test_without_supervision_the_loss_is_a_differentiable_zero(n: int | None):
    nothing = torch.zeros(1, 4)
    logits, next_logits = (torch.randn(1, 4, 4, requires_grad=True) for _ in range(2))
    for loss in (
        mdlm_loss(logits, TARGETS, NOISE, HALF, nothing, n),
        mdlm_loss(logits, TARGETS, torch.zeros_like(NOISE), HALF, MASK, n),  # supervised, but nothing was corrupted
        block_diffusion_loss(logits, TARGETS, nothing, n),
        hybrid_loss(logits, next_logits, TARGETS, NOISE, HALF, nothing, n, alpha=1.0),
    ):
        assert value(loss) == 0
        assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros_like(logits))


def test_small_probabilities_are_not_clamped():
    tiny = torch.full((1, 4), 1e-12)
    assert value(mdlm_loss(ZERO, TARGETS, NOISE, tiny, MASK)) == pytest.approx(2e12 / 3 * LN4, rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"p": torch.zeros(1, 4)},
        {"p": torch.full((1, 4), math.nan)},
        {"num_items_in_batch": 0},
        {"num_items_in_batch": math.nan},
    ],
)
def test_a_wrong_divisor_is_no_number(change: dict[str, Any]):
    good = {"logits": ZERO, "targets": TARGETS, "is_masked": NOISE, "p": HALF, "loss_mask": MASK}
    assert mdlm_loss(**good).isfinite()
    assert not mdlm_loss(**{**good, **change}).isfinite()


@pytest.mark.parametrize(
    "change",
    [
        {"is_masked": NOISE[:, 1:]},
        {"loss_mask": MASK[:, 1:]},
        {"targets": torch.tensor([[0, -100, 2, 3]])},
        {"targets": TARGETS[:, 1:]},
        {"logits": torch.zeros(1, 3, 4)},
        {"logits": torch.zeros(1, 5, 4)},
    ],
)
def test_what_does_not_fit_fails(change: dict[str, Any]):
    good = {"logits": ZERO, "targets": TARGETS, "is_masked": NOISE, "p": HALF, "loss_mask": MASK}
    with pytest.raises((RuntimeError, IndexError)):
        mdlm_loss(**{**good, **change})


def test_both_logits_of_the_hybrid_loss_have_the_shape_of_the_sample():
    """Their lengths may not make up for each other."""
    for noisy, clean in ((3, 5), (5, 3)):
        with pytest.raises(IndexError):
            hybrid_loss(torch.zeros(1, noisy, 4), torch.zeros(1, clean, 4), TARGETS, NOISE, HALF, MASK, alpha=1.0)
