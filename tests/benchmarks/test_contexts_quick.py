"""The experiment on served contexts runs on a CPU; held-out loss and the tool world are as described."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks import contexts
from hf_prefix_tree import Branch, fold
from hf_prefix_tree.data.baselines import per_branch


@pytest.mark.slow
def test_all_arms_train_and_are_evaluated_alike():
    rows = contexts.main(["--quick", "--seeds", "1"])
    assert [row["arm"] for row in rows] == ["stock", "flat", "tree"]
    assert all(row["steps"] == 2 and row["before"] == rows[0]["before"] for row in rows)
    assert all(0 < row["before"] - row["held_out"] < 0.1 for row in rows)  # two steps
    assert len({row["held_out"] for row in rows}) == 3


def test_held_out_loss_is_that_of_the_branches():
    args = argparse.Namespace(gguf=None, quick=True)
    models = contexts.Models(args, vocab_size=64, device=torch.device("cpu"))
    trained = models.fresh("sdpa")
    with torch.no_grad():
        trained.lm_head.weight.mul_(20)
    branches = [[Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1])], [Branch([3, 4], [0, 1])]]
    trees = [fold(of_tree, weighting="branch") for of_tree in branches]
    batches = contexts.held_out_batches([{"tree": tree.to_dict()} for tree in trees], 4, torch.device("cpu"))
    assert len(batches) == 2
    total = 0.0
    for row in per_branch(trees):
        logits = trained(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        total += torch.nn.functional.cross_entropy(logits, torch.tensor(row["labels"][1:]), reduction="sum").item()
    assert models.loss(trained, batches) == pytest.approx(total / 6, rel=1e-5)


def test_the_clock_evaluates_at_halves_and_stops(monkeypatch):
    times = iter([10.0, 10.5, 11.1, 13.1, 13.5, 20.0, 20.0])  # after each step, and after each evaluation
    monkeypatch.setattr(contexts.time, "perf_counter", lambda: next(times))
    clock = contexts.Clock(lambda model: 0.5, seconds=4.0, evaluations=3)
    control = argparse.Namespace()
    for step in range(1, 6):
        clock.on_step_end(None, argparse.Namespace(global_step=step), control, model=None)
        assert step == 1 or control.should_training_stop == (step == 5)
    seconds = [row["seconds"] for row in clock.rows]
    assert [row["steps"] for row in clock.rows] == [3, 5] and seconds == pytest.approx([1.1, 8.0])  # without the 2.0


def test_means_over_seeds():
    losses = {("stock", 0): (3.0, 4.0), ("stock", 1): (2.0, 1.0), ("tree", 0): (1.0, 1.5)}
    rows = [
        {"data": "d", "arm": arm, "seed": seed, "steps": 2, "before": 5.0, "held_out": loss}
        for (arm, seed), values in losses.items()
        for loss in values
    ]
    table = contexts.summary(rows)
    assert [(row["arm"], row["seeds"], row["lowest"], row["last"]) for row in table] == [
        ("stock", 2, 2.0, 2.5),
        ("tree", 1, 1.0, 1.5),
    ]


def test_the_answer_of_the_tool_world_follows_from_stripped_reasoning():
    for row in contexts.tool_world(20, seed=1):
        question, call, *_, asked, answer = row["messages"]
        words = question["content"].split()
        slot = (int(words[4]) + int(words[7])) % 7
        assert call["tool_calls"][0]["function"]["arguments"] == {"slot": slot}
        assert answer["content"] == str(slot * int(asked["content"].split()[-1].rstrip("?")))
