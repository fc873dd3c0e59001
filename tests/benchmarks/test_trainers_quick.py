"""The comparison of trainers runs on a CPU: both take the same first step, the tree one from fewer tokens."""

from __future__ import annotations

import csv

import pytest

from benchmarks import trainers


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    output = tmp_path_factory.mktemp("trainers") / "trainers.csv"
    options = ["--quick", "--models", "dense-0.6b", "--only", "completions", "single", "--output", str(output)]
    rows = trainers.main(options)
    with output.open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) == 4
    return {(row["rows"], row["side"]): row for row in rows}


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


def test_a_profiled_step_is_not_timed(tmp_path):
    """Its work is counted where all weights are trained: frozen ones have no gradients."""
    options = ["--quick", "--models", "dense-0.6b", "lora-8b", "--only", "completions", "--sides", "tree", "--profile"]
    rows = trainers.main([*options, "--output", str(tmp_path / "t.csv")])
    with (tmp_path / "t_profile.csv").open() as file:
        lines = [line for line in csv.DictReader(file) if line["name"] == "all"]
    for row in rows:
        mine = {line["category"]: line for line in lines if line["model"] == row["model"]}
        assert mine.keys() >= {"matmul", "optimizer", "head and loss", "idle"}
        assert row["low"] == row["high"] and float(mine["matmul"]["ms"]) == pytest.approx(1e3 * row["s"])
        assert bool(mine["matmul"]["tflop"]) == bool(mine["head and loss"]["tflop"]) == (row["model"] == "dense-0.6b")


@pytest.mark.parametrize("model", ["lora-8b", "moe", "hybrid", "qlora-8b"])
def test_every_kind_of_model(model):
    if model == "qlora-8b":
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install bitsandbytes")
    trl, tree = trainers.main(["--quick", "--models", model, "--only", "stripped"])
    for name in ("loss", "grad_norm"):
        assert tree[name] == pytest.approx(trl[name], rel=1e-4), name
    assert tree["tokens"] < trl["tokens"] and trl["checkpointing"] == model.endswith("8b")


def test_a_failing_side_does_not_end_the_run(monkeypatch, tmp_path):
    measure, output = trainers.measure, tmp_path / "rows.csv"

    def refuse_trees(row, *args):
        if row["side"] == "tree":
            raise ValueError("refused")
        return measure(row, *args)

    monkeypatch.setattr(trainers, "measure", refuse_trees)
    options = ["--quick", "--models", "dense-0.6b", "--only", "single", "--sides", "tree", "trl"]
    with pytest.raises(RuntimeError, match="refused"):
        trainers.main([*options, "--output", str(output)])
    with output.open() as file:
        assert [row["failure"] for row in csv.DictReader(file)] == ["refused", ""]
