"""The benchmark of agent rollouts runs on a CPU: all sides take the same update, the tree's from the fewest tokens."""

from __future__ import annotations

import argparse
import csv

import pytest

from benchmarks import agent_rollouts
from benchmarks.agent_rollouts import QUICK, Sequences, batch_size_of, flatten, random_rollouts, recorded_rollouts


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    output = tmp_path_factory.mktemp("agent_rollouts") / "rows.csv"
    rows = agent_rollouts.main(["--quick", "--output", str(output)])
    with output.open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) == 5
    assert written[0].keys() >= {*agent_rollouts.COLUMNS} - {"failure", "memory_ratio"}
    return {(row["turns"], row["side"]): row for row in rows}


def distinct_tokens(rollouts):
    """Tokens of a tree, counted by their paths."""
    paths = set()
    for rollout in rollouts:
        for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True):
            ids = prompt + completion
            paths |= {tuple(ids[:end]) for end in range(1, len(ids) + 1)}
    return len(paths)


@pytest.mark.parametrize("turns", ["stripped", "extending"])
def test_tokens_and_updates(rows, turns):
    rollouts = random_rollouts(QUICK, turns == "stripped", 512)
    tree, stock = rows[turns, "tree"], rows[turns, "trl"]
    lengths = [len(ids) for r in rollouts for ids in map(list.__add__, r.prompts, r.completions)]
    width = max(len(ids) for r in rollouts for ids in r.prompts)
    width += max(len(ids) for r in rollouts for ids in r.completions)
    assert tree["tokens"] == tree["useful_tokens"] == distinct_tokens(rollouts) and tree["forwards"] == 1
    assert (stock["tokens"], stock["useful_tokens"]) == (12 * width, sum(lengths))
    assert stock["rows"] == stock["forwards"] * stock["batch_size"] == 12
    for side in ("trl", "trl-flat")[: 1 + (turns == "extending")]:
        row = rows[turns, side]
        assert row["loss"] == pytest.approx(tree["loss"], rel=1e-4) and abs(row["loss"]) > 0.1
        assert row["grad_norm"] == pytest.approx(tree["grad_norm"], rel=1e-4)
        assert row["speedup"] == row["ms"] / tree["ms"]
        assert row["of_bound"] == pytest.approx(row["speedup"] * tree["tflop"] / row["tflop"])
        assert row["goal"] == ("met" if row["of_bound"] >= 0.9 else "missed")
        assert row["computed_ratio"] > row["flop_ratio"] > 1
    assert ((turns, "trl-flat") in rows) == (turns == "extending")


def test_flat_steps(rows):
    assert rows["extending", "trl-flat"]["rows"] == 4
    # the second turn extends the first; the third does not repeat what the second said
    rollout = Sequences([[1], [1, 2, 3], [1, 2, 3, 5]], [[2], [4], [6]], [[1], [1], [1]])
    assert flatten(rollout) == ([[1], [1, 2, 3, 5]], [[2, 3, 4], [6]], [[1, 0, 1], [1]])


def test_another_update_is_an_error(rows):
    stock, tree = rows["stripped", "trl"], rows["stripped", "tree"]
    with pytest.raises(RuntimeError, match="loss"):
        agent_rollouts.compare({**stock, "loss": stock["loss"] + 0.01}, tree, None)


def test_swapped_advantages_are_noticed(monkeypatch):
    """The check of loss and gradient norm tells the advantages of two rollouts apart."""
    make, swapped = agent_rollouts.make_trainer, []

    def swap(row, *args):
        trainer = make(row, *args)
        if row["side"] == "tree":
            swapped.append(trainer.given_advantages[[1, 0, 2, 3]])
            trainer.given_advantages = swapped[0]
        return trainer

    monkeypatch.setattr(agent_rollouts, "make_trainer", swap)
    with pytest.raises(RuntimeError, match="of the first step is"):
        agent_rollouts.main(["--quick", "--only", "stripped"])
    assert len(swapped) == 1


def test_micro_batches_of_the_stock_side():
    rollouts = random_rollouts(QUICK, True, 512)
    sizes = [batch_size_of(rollouts, tokens) for tokens in (1, 200, 300, 10_000)]
    assert sizes == [1, 3, 4, 12]


def test_default_rollouts_have_8_to_16_turns():
    for is_stripped in (True, False):
        rollouts = random_rollouts(agent_rollouts.DEFAULT, is_stripped, 151_936)
        assert [len(rollout.prompts) for rollout in rollouts] == [8, 9, 10, 11, 13, 14, 15, 16]
        flat = [flatten(rollout) for rollout in rollouts]
        assert (flat == rollouts) == is_stripped and sum(len(one.prompts) for one in flat) == (
            96 if is_stripped else 8
        )


@pytest.mark.parametrize("is_stripped", [True, False])
def test_recorded_rollouts(shared_data, is_stripped):
    args = argparse.Namespace(
        conversations=shared_data("data/tau_bench_airline.jsonl"),
        tools=shared_data("data/tau_bench_airline.tools.json"),
        tokenizer=shared_data("tokenizers/qwen3"),
        group="airline-0",
    )
    rollouts = recorded_rollouts(args, is_stripped)
    turns = [len(rollout.prompts) for rollout in rollouts]
    assert len(turns) == 4 and sum(turns) == 56
    flat = [flatten(rollout) for rollout in rollouts]
    assert [len(rollout.prompts) for rollout in flat] == (turns if is_stripped else [1] * 4)
