"""The noise of `DiffusionSFTTrainer`: every kind by hand, and what it does and does not depend on."""

import math

import pytest
import torch

from hf_prefix_tree.diffusion.model import prepare_diffusion_model
from tests.support.diffusion_runs import (
    EVALUATION,
    MASK,
    OBJECTIVES,
    collated,
    distance,
    logs_of,
    losses_of,
    rows_of_ids,
    small_model,
    train,
    trainer_of,
    weights,
)

# in training, in evaluation, whether each bounds the NLL
KINDS = {
    "uniform": ("uniform", "uniform", True, True),
    "blockwise": ("blockwise", "uniform", False, True),
    "random": ("random", "random", False, False),
    "all_masked": ("all_masked", "all_masked", True, True),
}


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("corruption", KINDS)
def test_every_kind(corruption, objective, tmp_path):
    in_training, in_evaluation, bounds_training, bounds_evaluation = KINDS[corruption]
    rows = rows_of_ids(4)
    options = {"corruption": corruption, "response_window": False, "per_device_train_batch_size": 2}
    options |= {"gradient_accumulation_steps": 2, "max_steps": 1, "learning_rate": 0.0, "eval_noise_draws": 2}
    trainer = train(tmp_path, rows, objective=objective, **options)
    model, batch = prepare_diffusion_model(small_model()), collated(rows, False)

    (entry,) = logs_of(trainer)
    loss, bound = losses_of(model, batch, objective, (0,), in_training, False)
    assert entry["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert entry.get("nll_bound") == (pytest.approx(bound.item(), rel=1e-5) if bounds_training else None)

    metrics = trainer.evaluate(rows)
    draws = [losses_of(model, batch, objective, (EVALUATION, draw), in_evaluation, False) for draw in range(2)]
    loss, bound = (sum(values).item() / 2 for values in zip(*draws, strict=True))
    assert metrics["eval_loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics.get("eval_nll_bound") == (pytest.approx(bound, rel=1e-5) if bounds_evaluation else None)
    assert metrics.get("eval_perplexity") == (pytest.approx(math.exp(bound), rel=1e-4) if bounds_evaluation else None)


def test_random_noise_needs_no_mask_token(tmp_path):
    trainer = train(tmp_path, rows_of_ids(2), corruption="random", mask_token_id=None, max_steps=1)
    assert trainer.mask_token_id is None and logs_of(trainer)[0]["loss"] > 0


def test_all_masked_evaluates_once(tmp_path):
    trainer = trainer_of(tmp_path, rows_of_ids(1), corruption="all_masked", eval_noise_draws=4)
    calls = []
    trainer.model.register_forward_pre_hook(lambda module, args: calls.append(1))
    trainer.evaluate(rows_of_ids(3))
    assert len(calls) == 3


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_same_when_resumed_in_other_batches(objective, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 5, "max_steps": 7, "train_sampling_strategy": "random"}
    options |= {"optim": "adamw_torch", "learning_rate": 1e-3, "objective": objective}
    whole = train(tmp_path, rows_of_ids(8), per_device_train_batch_size=2, **options)  # four steps an epoch
    resumed = trainer_of(tmp_path, rows_of_ids(8), gradient_accumulation_steps=2, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert distance(weights(resumed.model), weights(whole.model), weights(small_model())) < 1e-4
    for one, other in zip(logs_of(whole), logs_of(resumed), strict=True):
        assert other["nll_bound"] == pytest.approx(one["nll_bound"], rel=1e-4)


def test_another_in_every_epoch_and_under_another_seed(tmp_path):
    still = train(tmp_path, rows_of_ids(1), learning_rate=0.0)
    first, second, third = (entry["nll_bound"] for entry in logs_of(still))
    assert len({first, second, third}) == 3
    other = train(tmp_path, rows_of_ids(1), learning_rate=0.0, seed=1)
    assert logs_of(other)[0]["nll_bound"] != first


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_stream_trains_as_the_dataset_does(accumulation, tmp_path):
    """Also in its second and third epoch: Trainer does not know when those of a stream begin."""
    options = {"gradient_accumulation_steps": accumulation, "max_steps": 8, "per_device_train_batch_size": 2}
    whole = train(tmp_path, rows_of_ids(6), **options)
    stream = train(tmp_path, rows_of_ids(6).to_iterable_dataset(), **options)
    assert distance(weights(stream.model), weights(whole.model), weights(small_model())) < 1e-6


def test_nothing_that_is_not_supervised_is_hidden(tmp_path):
    """What the model reads: prompts, and whatever pads, as they are."""
    rows = rows_of_ids(6)
    trainer = trainer_of(tmp_path, rows, objective="block", per_device_train_batch_size=6, max_steps=1)
    seen = []
    trainer.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    trainer.train()
    (inputs,), batch = seen, collated(rows)
    noisy, clean = inputs["input_ids"].chunk(2, dim=1)
    changed = noisy != clean
    assert torch.equal(clean, batch["input_ids"])
    assert (noisy[changed] == MASK).all() and changed.any()
    assert not changed[batch["loss_mask"] == 0].any()
