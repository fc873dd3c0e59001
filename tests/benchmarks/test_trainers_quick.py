"""The comparison of trainers runs on a CPU: both take the same first step, the tree one from fewer tokens."""

from __future__ import annotations

import csv

import pytest

from benchmarks import trainers


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    output = tmp_path_factory.mktemp("trainers") / "trainers.csv"
    options = ["--quick", "--models", "dense-0.6b", "--only", "completions", "single", "--output", str(output)]
    found = trainers.main(options)
    with output.open() as file:
        assert len(list(csv.DictReader(file))) == len(found) == 4
    return {(row["rows"], row["side"]): row for row in found}


def test_both_sides_take_the_same_step(rows):
    for shape in ("completions", "single"):
        for name in ("loss", "grad_norm"):
            assert rows[shape, "tree"][name] == pytest.approx(rows[shape, "trl"][name], rel=1e-5), (shape, name)
        assert rows[shape, "tree"]["speedup"] == rows[shape, "trl"]["s"] / rows[shape, "tree"]["s"]


def test_tokens_of_a_step(rows):
    assert rows["completions", "tree"]["sequences"] == 2  # accumulates
    assert rows["completions", "trl"]["tokens"] == 4 * 4 * (32 + 8)
    assert rows["completions", "tree"]["tokens"] == 4 * (32 + 4 * 8)
    assert rows["single", "trl"]["tokens"] == rows["single", "tree"]["tokens"] == 8 * 32


def test_another_step_is_an_error(rows):
    stock, tree = rows["completions", "trl"], dict(rows["completions", "tree"])
    with pytest.raises(RuntimeError, match="grad_norm"):
        trainers.compare({**tree, "grad_norm": 1.1 * tree["grad_norm"]}, stock)
