"""TreeRLOOTrainer against TRL's RLOOTrainer: the same numbers step by step, from fewer tokens."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig

from tests.support.policy_runs import assert_same_training, run


def both(folder, steps=5, **options):
    """The stock run and the tree run of the same options, compared; returns them. TRL generates the completions."""
    # SGD: the loss is near 0, and Adam makes whole steps of what rounding leaves of its smallest gradients
    options = {"max_steps": steps, "optim": "sgd", "learning_rate": 0.3, **options}
    runs = [run(folder, "rloo", kind, **options) for kind in ("stock", "tree")]
    assert_same_training(runs[1], runs[0], steps)
    return runs


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.05, "num_iterations": 2, "epsilon": 0.002},
        {"normalize_advantages": True, "max_completion_length": 12},
    ],
    ids=["clipped", "normalized"],
)
def test_equals_stock(tmp_path, options):
    stock, tree = both(tmp_path, **options)
    assert sum(tree.tokens.trained) < 0.8 * sum(stock.tokens.trained)
    assert sum(tree.tokens.forward) < 0.8 * sum(stock.tokens.forward)
    if "epsilon" in options:
        assert any(entry["clip_ratio/region_mean"] > 0.1 for entry in stock.logs)
        assert abs(stock.logs[-1]["kl"]) > 1e-5


def test_windows_that_do_not_match_generations(tmp_path):
    both(tmp_path, steps=3, gradient_accumulation_steps=2, steps_per_generation=4)


def test_micro_batches_smaller_than_a_group(tmp_path):
    """The mean over two completions becomes one over eight: 4 micro-batches of a step are computed as one."""
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "prompt_lengths": (60, 60)}
    stock, tree = both(tmp_path, steps=3, **options)
    assert len(stock.tokens.trained) == 12 and len(tree.tokens.trained) == 3


def test_lora(tmp_path):
    peft_config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    stock, _ = both(tmp_path, steps=3, beta=0.05, peft_config=peft_config)
    moved = [name for name, value in stock.weights.items() if not torch.equal(value, stock.start[name])]
    assert moved and all("lora_" in name for name in moved)
