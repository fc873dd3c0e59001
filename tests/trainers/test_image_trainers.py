"""GRPO, RLOO, DPO and KTO on prompts with images: TRL's numbers, from fewer tokens and each image once."""

import logging

import pytest
import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from conformance.build import build_model
from hf_prefix_tree import TreeDPOTrainer
from tests.support.image_rows import SeenImages, processor
from tests.support.image_runs import pairs, questions, train, train_in_rank
from tests.support.policy_runs import assert_same_training, run
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import config, distance, weights


def assert_equal_in_double(tree, stock):
    """Gradients to 1e-10 of the largest, as all logged numbers; weights follow from the gradients."""
    assert len(stock["logs"]) == len(tree["logs"]) == len(stock["gradients"]) == len(tree["gradients"]) == 2
    for entry, other in zip(tree["logs"], stock["logs"], strict=True):
        for name in other.keys() - {"step_time"}:
            near = 1e-10 if name not in ("loss", "grad_norm") else 1e-6  # the trainers log these in float32
            assert entry[name] == pytest.approx(other[name], rel=near, abs=near), name
    for got, expected in zip(tree["gradients"], stock["gradients"], strict=True):
        assert got.keys() == expected.keys()
        for name, gradient in expected.items():
            assert (got[name] - gradient).abs().max() <= 1e-10 * max(gradient.abs().max(), 1e-5), name
    assert distance(tree["end"], stock["end"]) < 1e-10 < 1e-3 < distance(stock["end"], stock["start"])


def test_steps_of_kto_are_those_of_trl_in_double(tmp_path, caplog):
    """Images of one text, a prompt without an image; the KL term's completions belong to other prompts."""
    with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
        stock, tree = (train(tmp_path, "kto", is_tree, [0, 1, None, 0]) for is_tree in (False, True))
    assert_equal_in_double(tree, stock)
    assert any(gradient.abs().max() > 1e-4 for name, gradient in tree["gradients"][0].items() if "visual" in name)
    assert "Falling back" not in caplog.text and tree["logs"][0]["tree/token_ratio"] > 1.5
    # the KL term and the loss, of two steps
    assert (stock["seen"], tree["seen"]) == ([4, 4, 2, 2], [2, 2, 1, 1])


JOBS = [("grpo", "other images"), ("grpo", "a rank without images")]
MORE_JOBS = [(method, "a rank without images") for method in ("rloo", "dpo", "kto")] + [("dpo", "other images")]


@pytest.mark.parametrize("jobs", [JOBS, pytest.param(MORE_JOBS, marks=pytest.mark.slow)], ids=["quick", "more"])
def test_two_ranks_with_images_are_those_of_trl_in_double(tmp_path, jobs):
    run_ranks(train_in_rank, tmp_path, jobs, timeout=900)
    for index, (method, shown) in enumerate(jobs):
        ranks = [torch.load(tmp_path / f"runs{index}-{rank}.pt") for rank in range(2)]
        for stock, tree in ranks:
            assert_equal_in_double({**tree, "logs": ranks[0][1]["logs"]}, {**stock, "logs": ranks[0][0]["logs"]})
        first, second = (tree["end"] for _, tree in ranks)
        assert all(torch.equal(value, second[name]) for name, value in first.items())
        assert ranks[0][1]["logs"][0]["tree/token_ratio"] > 1.3
        images = [[sum(found["seen"]) for found in runs] for runs in ranks]
        assert images[0][0] > images[0][1] > 0  # of stock and tree
        if method in ("grpo", "rloo") and shown == "a rank without images":
            assert "leave out images" in (tmp_path / "error0.txt").read_text()
        assert images[1] == ([0, 0] if shown == "a rank without images" else images[0])


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
                    train_dataset=Dataset.from_list(questions(range(2))),
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
    found = []
    for kind in (DPOTrainer, TreeDPOTrainer):
        model, reference = (build_model("qwen2_5_vl", seed=seed, variant="images") for seed in (0, 1))
        seen = SeenImages(model)
        trainer = kind(
            model=model,
            ref_model=reference,
            args=config(tmp_path, DPOConfig, per_device_train_batch_size=4, learning_rate=0.05),
            train_dataset=Dataset.from_list(pairs(range(4))),
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
