# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Rows are dealt to ranks by what they cost: by hand, on real conversations, and in the trainer."""

from __future__ import annotations

import doctest
import itertools
import json

import numpy as np
import pytest
from datasets import Dataset, load_dataset
from transformers import Qwen3Config

from hf_prefix_tree import DataCollatorForPrefixTree, prepare_trees
from hf_prefix_tree.modeling.flops import cost_per_count
from hf_prefix_tree.sft.collator import RowCounts
from hf_prefix_tree.training import checks, sampling
from hf_prefix_tree.training.checks import split_tree_ids
from hf_prefix_tree.training.sampling import (
    STRATEGIES,
    StepSampler,
    assign_rows,
    linked_rows,
    row_costs,
)
from tests.support.engine_runs import train_saving, uneven_rows
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import make_model, make_trees

QWEN3_06B = Qwen3Config(
    vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128,
)  # fmt: skip


def test_examples_in_docstrings():
    assert doctest.testmod(sampling).failed == 0 and doctest.testmod(checks).failed == 0


def test_counts_of_rows():
    trees = make_trees(3)
    rows = [{"trees": [trees[0].to_dict(), trees[1].to_dict()]}, {"trees": [trees[2].to_dict()]}, {"trees": []}]
    counts = RowCounts(DataCollatorForPrefixTree(0))
    columns = Dataset.from_list(rows).map(counts, batched=True, remove_columns=["trees"])
    stats = [tree.stats() for tree in trees]
    own = [[s.tree_tokens, s.supervised_tokens, s.tree_pairs] for s in stats]
    assert list(columns["counts"]) == [[a + b for a, b in zip(*own[:2], strict=True)], own[2], [0, 0, 0]]
    assert counts.of(trees[0].to_dict()) == own[0]


def of_batches(costs, order, ranks, batch_size):
    """Cost of each batch, `[round, rank]`."""
    return costs[order].reshape(-1, ranks, batch_size).sum(axis=2)


def groups_of(rows, size):
    """All ways to cut rows into groups of `size`."""
    if not rows:
        yield []
        return
    for others in itertools.combinations(rows[1:], size - 1):
        rest = [row for row in rows[1:] if row not in others]
        yield from ([[rows[0], *others], *further] for further in groups_of(rest, size))


def least_time(costs, ranks, batch_size):
    """The least sum over rounds of the heaviest batch, by trying everything."""
    ways = groups_of(list(range(len(costs))), ranks * batch_size)
    return min(
        sum(min(max(costs[b].sum() for b in cut) for cut in groups_of(turn, batch_size)) for turn in way)
        for way in ways
    )


@pytest.mark.parametrize(("batch_size", "above"), [(1, 0.0), (2, 0.03), (4, 0.005)])
def test_dealing_against_every_other_way(batch_size, above):
    """8 rows on 2 ranks. With batches of one row it is the best way, with larger ones next to it."""
    rng, found = np.random.default_rng(0), []
    for _ in range(20):
        costs = rng.lognormal(sigma=0.5, size=8)
        time = of_batches(costs, assign_rows(costs, 2, batch_size), 2, batch_size).max(axis=1).sum()
        found.append(time / least_time(costs, 2, batch_size) - 1)
    assert min(found) > -1e-9 and np.mean(found) <= above + 1e-9


@pytest.mark.parametrize(("ranks", "batch_size", "rounds"), [(1, 1, 4), (2, 3, 2), (4, 1, 4), (8, 2, 1)])
def test_dealing(ranks, batch_size, rounds):
    rng, found = np.random.default_rng(0), []
    for _ in range(20):
        costs = rng.lognormal(sigma=0.5, size=ranks * batch_size * rounds)
        order = assign_rows(costs, ranks, batch_size)
        assert sorted(order) == list(range(len(costs)))
        assert (assign_rows(costs, ranks, batch_size) == order).all()
        batches = [of_batches(costs, rows, ranks, batch_size) for rows in (order, np.arange(len(costs)))]
        found.append([own.max(axis=1).sum() for own in batches])
    dealt, undealt = np.mean(found, axis=0)
    assert dealt < 0.95 * undealt if ranks > 1 else dealt == pytest.approx(undealt)
    assert assign_rows(np.zeros(ranks * batch_size), ranks, batch_size).tolist() == list(range(ranks * batch_size))


def test_dealing_by_hand():
    # a heavy row costs one round, not two; then the heavier row of a round goes to the rank that had less
    order = assign_rows(np.array([1.0, 1.0, 0.0, 3.0, 1.0, 0.0]), ranks=2, batch_size=1)
    assert order.tolist() == [3, 0, 4, 1, 5, 2]
    costs = np.arange(8.0, 0.0, -1.0)
    assert of_batches(costs, assign_rows(costs, 2, 1), 2, 1).tolist() == [[8, 7], [5, 6], [4, 3], [1, 2]]


def test_steps_do_not_depend_on_the_ranks():
    units = [[0, 1, 2], [3, 7], [4], [5], [6], [8, 9, 10, 11], [12], [13, 14], [15]]
    costs = np.arange(1.0, 17.0)
    for strategy in ("random", "sequential", "group_by_length"):
        steps = []
        for ranks in (1, 2, 4):
            made = StepSampler(units, 4, strategy=strategy, seed=0, global_step=lambda: 0, costs=costs, ranks=ranks)
            steps.append([sorted(block) for block in np.array(list(made)).reshape(-1, 4).tolist()])
        assert steps[0] == steps[1] == steps[2]


def test_rows_that_cost_alike_come_together():
    costs = np.random.default_rng(0).lognormal(size=64)
    spread = {}
    for strategy in ("random", "group_by_length"):
        blocks = []
        for epoch in range(2):
            made = StepSampler(
                [[row] for row in range(64)],
                4,
                strategy=strategy,
                seed=0,
                costs=costs,
                global_step=lambda e=epoch: e * 16,
            )
            blocks.append(np.array(list(made)).reshape(-1, 4))
            assert sorted(blocks[-1].reshape(-1)) == list(range(64))
        assert (blocks[0] != blocks[1]).any()
        spread[strategy] = np.ptp(np.log(costs[blocks[0]]), axis=1).mean()
    assert spread["group_by_length"] < spread["random"] / 2.5


def test_few_steps_differ_between_epochs():
    """Sorted all together, the rows of 4 steps would make the same steps in every epoch."""
    costs, epochs = np.random.default_rng(0).lognormal(size=16), []
    for epoch in range(2):
        units = [[row] for row in range(16)]
        made = StepSampler(
            units, 4, strategy="group_by_length", seed=0, costs=costs, global_step=lambda e=epoch: e * 4
        )
        epochs.append({frozenset(block) for block in np.array(list(made)).reshape(-1, 4).tolist()})
    assert epochs[0] != epochs[1]


def imbalance(rows, ranks, batch_size, accumulation=1, strategy="random", dealt=True):
    """What ranks wait for each other at their micro-batches, over 4 epochs."""
    counts = RowCounts(DataCollatorForPrefixTree(0))
    costs = row_costs(rows, counts, QWEN3_06B)
    units = linked_rows(split_tree_ids(list(rows["tree_ids"]), list(rows["num_parts"])))
    most = mean = 0.0
    sampler = StepSampler(
        units, ranks * batch_size * accumulation, strategy=strategy, seed=0, global_step=lambda: step, ranks=ranks,
        batch_size=batch_size, costs=costs if dealt else None,
    )  # fmt: skip
    for epoch in range(4):
        step = epoch * len(sampler.blocks)
        work = of_batches(np.append(costs, 0.0), list(sampler), ranks, batch_size)
        most, mean = most + work.max(axis=1).sum(), mean + work.mean(axis=1).sum()
    return most / mean - 1


@pytest.mark.slow
def test_real_conversations(shared_data, qwen3_tokenizer):
    """Airline dialogues, 4 trees to a micro-batch: each a tree, and four a tree, split at 16,384 tokens."""
    tools = json.loads(shared_data("data/tau_bench_airline.tools.json").read_text())
    rows = load_dataset("json", data_files=str(shared_data("data/tau_bench_airline.jsonl")), split="train")
    rows = rows.add_column(
        "tools", [json.dumps(tools if isinstance(tools, list) else tools[r["group"]]) for r in rows]
    )
    options = {"max_packed_tokens": 16_384, "pack_trees": False}  # of packed rows a micro-batch has one
    whole = prepare_trees(rows, qwen3_tokenizer, **options)
    grouped = prepare_trees(rows, qwen3_tokenizer, group_by="group", **options)
    assert max(max(parts) for parts in grouped["num_parts"]) > 1
    for ranks in (2, 4):
        for strategy in STRATEGIES:
            assert imbalance(whole, ranks, 4, strategy=strategy) < 0.03
        assert imbalance(whole, ranks, 4, dealt=False) > 0.1
        assert imbalance(grouped, ranks, 4, 2) < 0.03


def test_the_trainer_reports_it(tmp_path):
    """Two ranks that each take 2 rows: the heaviest against the second, and the third against the fourth."""
    options = {"save_strategy": "no", "train_sampling_strategy": "sequential", "max_steps": 3}
    run_ranks(train_saving, tmp_path, options, 2, False, ranks=2)
    log = [entry for entry in json.loads((tmp_path / "log.json").read_text()) if "loss" in entry]
    counts = RowCounts(DataCollatorForPrefixTree(0))
    costs = np.append([counts.of(row) for row in uneven_rows(11)] @ cost_per_count(make_model().config), 0.0)
    for step, entry in enumerate(log):
        own = np.sort(costs[4 * step : 4 * step + 4])[::-1]
        expected = (own[0] + own[2]) / (own.sum() / 2) - 1
        assert entry["tree/imbalance"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len(log) == 3 and all(entry["tree/imbalance"] > 0 for entry in log)
