"""`TreeSFTTrainer` on a GPU with TRL's defaults: float32 weights, bf16 autocast, checkpointing. Needs a GPU."""

import warnings

import pytest
import torch

from tests.support.gpu_rows import forest, model_of
from tests.support.models import branch_runs, gradients
from tests.support.trainer_runs import distance, train, weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("checkpointing", [True, False])
def test_autocast_is_as_close_to_float32_as_the_branches_are(tmp_path, checkpointing):
    trees = forest(4, 2, num_branches=8, max_length=300)
    model = model_of("gemma3", window=100)
    start = weights(model)
    loss, _ = branch_runs(model, trees)
    loss.backward()
    exact = gradients(model)
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        rounded, _ = branch_runs(model, trees)
    rounded.backward()
    by_branch = distance(gradients(model), exact)
    model.zero_grad()
    trainer = train(
        tmp_path,
        trees,
        model,
        per_device_train_batch_size=2,
        bf16=True,
        use_cpu=False,
        gradient_checkpointing=checkpointing,
    )
    moved = {name: start[name] - value for name, value in weights(trainer.model).items() if name in exact}
    assert 1e-4 < distance(moved, exact) <= 2 * by_branch
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-2)


def waits(folder, trees):
    """How often the host waits for the device in a step with one tree per micro-batch."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train(folder, trees, model_of("qwen3"), use_cpu=False, gradient_accumulation_steps=len(trees))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(own.message) for own in caught)


def test_the_host_rarely_waits_for_the_device(tmp_path):
    """
    After each wait the device is idle until the host has launched the next kernel. These trees are short, and their
    mask is dense; block masks wait for nothing (test_gpu_backends.py).
    """
    trees = forest(4, 24)
    waits(tmp_path, trees)  # choices that are made once
    of_few, of_many = waits(tmp_path, trees[:8]), waits(tmp_path, trees)
    # nine copies of a batch, Trainer's check of the loss (two), the supervised tokens; every eighth call, its inputs
    assert of_many - of_few <= 12 * 16 + 2, (of_few, of_many)
