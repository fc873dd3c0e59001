# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The published comparison: its trees have the published shape, and it runs on a CPU."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks import largest_row, scaling
from hf_prefix_tree.synthetic import caterpillar, caterpillar_set


def test_the_set_has_the_published_figures():
    trees = caterpillar_set()
    figures = scaling.set_figures(trees)
    scaling.check_figures(figures)
    assert len(trees) == 64
    assert figures["branches"] == pytest.approx(20.4, abs=0.2) and figures["tokens"] == pytest.approx(8004, rel=0.02)
    with pytest.raises(ValueError, match="off the published figures"):
        scaling.check_figures(scaling.set_figures(trees[:1]))


def test_the_flop_bound_of_the_set():
    assert scaling.flop_ratio(caterpillar_set(8), "0.6b") == pytest.approx(6.7, abs=0.3)


def test_flat_samples_supervise_every_token_once():
    tree = caterpillar(5, seed=3, vocab_size=50)
    samples = scaling.turn_samples(tree)
    *leaves, trunk = tree.branches()
    assert len(samples) == 6 and samples[-1]["input_ids"] == trunk.input_ids.tolist()
    supervised = [[label for label in sample["labels"] if label != -100] for sample in samples]
    assert sum(map(len, supervised)) == tree.stats().supervised_tokens
    for leaf, sample, own in zip(leaves, samples, supervised, strict=False):
        assert sample["input_ids"][: len(leaf)] == leaf.input_ids.tolist()
        assert sample["input_ids"][-len(own) :] == own and own[0] == 1  # reasoning, which starts with this id, output
        context = len(sample["input_ids"]) - len(own)
        assert sample["input_ids"][:context] == trunk.input_ids[:context].tolist()


@pytest.mark.parametrize(
    ("mode", "coverage", "ranks", "rows"),
    [
        ("tree", "published", 2, 4),
        ("tree", "equal", 8, 8),
        ("per_branch", "published", 4, 16),
        ("per_branch", "equal", 2, 82),
        ("flat_steps", "equal", 8, 80),
    ],
)
def test_rows_of_a_step(mode, coverage, ranks, rows):
    assert scaling.rows_per_step(mode, coverage, caterpillar_set(), 4, ranks) == rows


def test_it_runs(tmp_path):
    output = tmp_path / "scaling.csv"
    rows = scaling.main(
        ["--quick", "--steps", "2", "--only", "tree", "grouped", "per_branch", "--output", str(output)]
    )
    by_mode = {(row["mode"], row["coverage"]): row for row in rows}
    assert set(by_mode) == {
        ("tree", "published"), ("grouped", "published"), ("per_branch", "published"), ("per_branch", "equal"),
    }  # fmt: skip
    tree, grouped = by_mode["tree", "published"], by_mode["grouped", "published"]
    assert tree["loss"] == pytest.approx(grouped["loss"], rel=1e-5) and tree["loss"] != tree["first_loss"]
    assert tree["ms_per_branch"] == tree["ms"] / 16
    assert by_mode["per_branch", "equal"]["branches_per_step"] == 16
    with output.open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == 4 and written[0].keys() >= {
        "peak_gib",
        "imbalance",
        "flop_ratio",
        "gpus",
        "engine",
        "commit",
    }


@pytest.mark.parametrize(("tokens", "filled"), [(1536, 0.4), (4096, 0.7), (50_000, 0.95)])
def test_rows_of_a_length(tokens, filled):
    row = largest_row.make_row(tokens, torch.device("cpu"))
    assert row["input_ids"].shape[1] == tokens // 128 * 128
    assert row["attention_mask"].float().mean() > filled


def test_the_largest_row_runs():
    rows = largest_row.main(["--quick", "--options", "checkpointing", "lora"])
    assert [(row["shape"], row["option"]) for row in rows] == [("quick", "checkpointing"), ("quick", "lora")]
