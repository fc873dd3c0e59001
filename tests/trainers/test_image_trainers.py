"""GRPO, RLOO and DPO on prompts with images: TRL's numbers, from fewer tokens and each image once."""

import logging

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from conformance.build import build_model
from hf_prefix_tree import TreeDPOTrainer
from tests.support.image_rows import SeenImages, picture, processor
from tests.support.policy_runs import assert_same_training, run
from tests.support.trainer_runs import config, distance, weights


def text(rng, length):
    return " ".join(f"t{i}" for i in rng.integers(8, 80, size=length))


def questions(number):
    """Prompts with an image each; every second one is the text before it with another image."""
    rng = np.random.default_rng(0)
    texts = [text(rng, 12) for _ in range(number // 2)]
    return [
        {"prompt": [{"role": "user", "content": texts[i // 2]}], "images": [picture(seed=i)]} for i in range(number)
    ]


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_step_of_policy_training_is_that_of_trl(algorithm, tmp_path, caplog):
    """Two steps on one generation, so that old log-probs are scored as well; completions are sampled."""
    runs, seen = [], []
    for kind in ("stock", "tree"):
        torch.manual_seed(0)
        model = build_model("qwen2_5_vl", variant="images")
        seen.append(SeenImages(model))
        with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
            runs.append(
                run(
                    *(tmp_path, algorithm, kind),
                    model=model,
                    train_dataset=Dataset.from_list(questions(2)),
                    processing_class=processor(model.config),
                    **{"max_steps": 2, "num_iterations": 2, "num_generations": 4, "temperature": 0.9},
                    **{"per_device_train_batch_size": 4, "max_completion_length": 6, "learning_rate": 1e-3},
                )
            )
    assert_same_training(runs[1], runs[0], steps=2, moved=1e-3)
    assert "Falling back" not in caplog.text
    stock, tree = (found.tokens for found in runs)
    assert sum(tree.trained) < 0.5 * sum(stock.trained) and sum(tree.forward) < 0.6 * sum(stock.forward)
    tower = [key for key in runs[0].weights if "visual" in key]
    assert distance(*({key: found[key] for key in tower} for found in (runs[0].weights, runs[0].start))) > 1e-4
    # generation; the old log-probs of both micro-batches; the micro-batches of two steps
    assert seen[0].calls[-7:] == [8, *[4, 4], *[4, 4], *[4, 4]] and seen[1].calls[-4:] == [8, 2, 2, 2]


def test_a_step_of_dpo_is_that_of_trl(tmp_path, caplog):
    rng, names = np.random.default_rng(1), ("chosen", "rejected")
    answers = [{name: [{"role": "assistant", "content": text(rng, 4)}] for name in names} for _ in range(4)]
    rows = [{**question, **answer} for question, answer in zip(questions(4), answers, strict=True)]
    found = []
    for kind in (DPOTrainer, TreeDPOTrainer):
        model, reference = (build_model("qwen2_5_vl", seed=seed, variant="images") for seed in (0, 1))
        seen = SeenImages(model)
        trainer = kind(
            model=model,
            ref_model=reference,
            args=config(tmp_path, DPOConfig, per_device_train_batch_size=4, learning_rate=0.05),
            train_dataset=Dataset.from_list(rows),
            processing_class=processor(model.config),
        )
        seen.calls.clear()
        start = weights(model)
        with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
            trainer.train()
        logs = next(entry for entry in trainer.state.log_history if "loss" in entry)
        found.append((logs, weights(model), seen.calls, start))
    (stock, stock_weights, stock_seen, start), (tree, tree_weights, tree_seen, _) = found
    for name in ("loss", "grad_norm", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen"):
        assert tree[name] == pytest.approx(stock[name], rel=1e-5, abs=1e-6), name
    assert distance(tree_weights, stock_weights) < 1e-6 < 1e-3 < distance(stock_weights, start)
    assert "Falling back" not in caplog.text and tree["tree/token_ratio"] > 1.5
    assert (stock_seen, tree_seen) == ([8], [4])
