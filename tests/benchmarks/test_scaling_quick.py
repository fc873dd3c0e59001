# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The published comparison: its trees have the published shape, and it runs on a CPU."""

from __future__ import annotations

import csv
import gc
import time
import weakref

import pytest
import torch

from benchmarks import largest_row, published, scaling
from hf_prefix_tree.tree.synthetic import caterpillar, caterpillar_set


@pytest.fixture(autouse=True)
def launched_with_bf16(monkeypatch):
    """As `accelerate launch` with one of the configs in examples/accelerate does."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_the_set_has_the_published_figures():
    trees = caterpillar_set()
    figures = published.set_figures(trees)
    published.check_figures(figures)
    assert len(trees) == 64
    assert figures["branches"] == pytest.approx(20.4, abs=0.2) and figures["tokens"] == pytest.approx(8004, rel=0.02)
    with pytest.raises(ValueError, match="published"):
        published.check_figures(published.set_figures(trees[:1]))


def test_the_flop_bound_of_the_set():
    assert scaling.flop_ratio(caterpillar_set(8), "0.6b") == pytest.approx(6.7, abs=0.3)
    assert scaling.flop_ratio(caterpillar_set(), "0.6b", 8448) == pytest.approx(6.0, abs=0.1)  # splitting makes 1.12x


def test_flat_samples_supervise_every_token_once():
    tree = caterpillar(5, seed=3, vocab_size=50)
    samples = published.turn_samples(tree)
    *leaves, trunk = tree.branches()
    assert len(samples) == 6 and samples[-1]["input_ids"] == trunk.input_ids.tolist()
    supervised = [[label for label in sample["labels"] if label != -100] for sample in samples]
    assert sum(map(len, supervised)) == tree.stats().supervised_tokens
    for leaf, sample, turn in zip(leaves, samples, supervised, strict=False):
        assert sample["input_ids"][: len(leaf)] == leaf.input_ids.tolist()
        assert (
            sample["input_ids"][-len(turn) :] == turn and turn[0] == 1
        )  # reasoning, which starts with this id, output
        context = len(sample["input_ids"]) - len(turn)
        assert sample["input_ids"][:context] == trunk.input_ids[:context].tolist()


@pytest.mark.parametrize(
    ("mode", "coverage", "ranks", "micro_batch", "rows"),
    [
        ("tree", "published", 2, 1, 4),
        ("tree", "equal", 8, 1, 8),
        ("per_branch", "published", 4, 1, 16),
        ("per_branch", "published", 8, 1, 32),  # of 8 trees, which a step has there
        ("per_branch", "equal", 1, 1, 82),
        ("per_branch", "equal", 2, 1, 82),
        ("per_branch", "equal", 2, 4, 80),  # full micro-batches
        ("flat_steps", "equal", 8, 1, 160),
    ],
)
def test_rows_of_a_step(mode, coverage, ranks, micro_batch, rows):
    assert published.rows_per_step(mode, coverage, caterpillar_set(), 4, ranks, micro_batch) == rows


def test_it_runs(tmp_path, monkeypatch):
    output = tmp_path / "scaling.csv"
    models = []
    make_trainer = scaling.make_trainer

    def watched(*args):
        trainer = make_trainer(*args)
        models.append(weakref.ref(trainer.model))
        return trainer

    monkeypatch.setattr(scaling, "make_trainer", watched)
    rows = scaling.main(["--quick", "--steps", "3", "--output", str(output)])
    by_mode = {(row["mode"], row["coverage"]): row for row in rows}
    assert set(by_mode) == {
        ("tree", "published"), ("grouped", "published"), ("per_branch", "published"), ("per_branch", "equal"),
        ("flat_steps", "published"), ("flat_steps", "equal"),
    }  # fmt: skip
    tree, grouped = by_mode["tree", "published"], by_mode["grouped", "published"]
    assert tree["loss"] == pytest.approx(grouped["loss"], rel=1e-5) and tree["loss"] != tree["first_loss"]
    assert tree["ms_per_branch"] == tree["ms"] / 16
    assert by_mode["per_branch", "equal"]["branches_per_step"] == 16
    assert by_mode["flat_steps", "equal"]["rows_per_step"] == 16
    written = read(output)
    assert [(row["mode"], row["coverage"]) for row in written] == [(row["mode"], row["coverage"]) for row in rows]
    assert [float(row["ms"]) for row in written] == [row["ms"] for row in rows]
    assert not any(row.get("failure") for row in written)
    assert written[0].keys() >= {"peak_gib", "imbalance", "flop_ratio", "gpus", "engine", "commit"}
    assert {(row["mixed_precision"], row["weights"]) for row in written} == {("no", "float32")}
    gc.collect()
    assert len(models) == 6 and not any(model() is not None for model in models)  # no memory that the next one counts


def test_trees_of_a_micro_batch_change_no_loss():
    options = ["--quick", "--steps", "2", "--only", "tree", "--trees-per-step", "4"]
    (one,) = scaling.main(options)
    (four,) = scaling.main([*options, "--trees-per-micro-batch", "4"])
    assert four["branches_per_step"] == one["branches_per_step"] == 16
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-5) and four["loss"] != four["first_loss"]
    with pytest.raises(ValueError, match="trees-per-micro-batch 3"):
        scaling.main([*options, "--trees-per-micro-batch", "3"])


@pytest.fixture
def trainers(monkeypatch):
    """The trainers that are made."""
    seen = []
    make_trainer = scaling.make_trainer

    def watched(*args):
        seen.append(make_trainer(*args))
        return seen[-1]

    monkeypatch.setattr(scaling, "make_trainer", watched)
    return seen


def test_splitting_trees_changes_no_loss(trainers):
    options = ["--quick", "--steps", "2", "--only", "tree"]
    (whole,) = scaling.main([*options, "--trees-per-step", "8"])
    (split,) = scaling.main([*options, "--trees-per-step", "16", "--max-packed-tokens", "102"])  # the longest branch
    assert len(trainers[0].train_dataset) == 8 and trainers[1].train_dataset["num_parts"] == [[2]] * 16
    assert split["flop_ratio"] < whole["flop_ratio"]
    assert (whole["max_packed_tokens"], split["max_packed_tokens"]) == (None, 102)
    assert split["branches_per_step"] == whole["branches_per_step"] == 32
    assert split["loss"] == pytest.approx(whole["loss"], rel=1e-5) and split["loss"] != split["first_loss"]


def test_branches_of_a_micro_batch_change_no_loss():
    options = ["--quick", "--steps", "2", "--only", "per_branch", "--coverage", "published"]
    (one,) = scaling.main(options)
    (four,) = scaling.main([*options, "--branches-per-micro-batch", "4"])
    assert (one["rows_per_micro_batch"], four["rows_per_micro_batch"]) == (1, 4)
    assert four["branches_per_step"] == one["branches_per_step"] == 16
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-5) and four["loss"] != four["first_loss"]


def test_a_step_includes_reading_its_rows(monkeypatch):
    make_trainer = scaling.make_trainer

    def slow(*args):
        trainer = make_trainer(*args)
        collate = trainer.data_collator

        def collator(rows):
            time.sleep(0.1)
            return collate(rows)

        trainer.data_collator = collator
        return trainer

    monkeypatch.setattr(scaling, "make_trainer", slow)
    (row,) = scaling.main(["--quick", "--steps", "2", "--only", "tree"])
    assert row["low"] > 3 * 100  # the first of its four was read ahead


def test_rows_are_appended(tmp_path):
    output = tmp_path / "scaling.csv"
    for options in (["tree"], ["grouped", "--append"]):
        scaling.main(["--quick", "--steps", "2", "--output", str(output), "--only", *options])
    tree, grouped = read(output)
    assert (tree["mode"], grouped["mode"]) == ("tree", "grouped")
    assert float(tree["loss"]) == pytest.approx(float(grouped["loss"]), rel=1e-5)
    scaling.main(["--quick", "--steps", "2", "--output", str(output), "--only", "grouped"])
    assert [row["mode"] for row in read(output)] == ["grouped"]
    with pytest.raises(SystemExit):
        scaling.main(["--quick", "--append"])


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError, RuntimeError])
def test_failures_are_written(tmp_path, monkeypatch, error):
    output = tmp_path / "scaling.csv"
    make_trainer = scaling.make_trainer

    def failing(mode, *args):
        if mode == "per_branch":
            raise error("injected")
        return make_trainer(mode, *args)

    monkeypatch.setattr(scaling, "make_trainer", failing)
    options = ["--quick", "--steps", "2", "--output", str(output), "--only", "tree", "per_branch", "grouped"]
    if error is RuntimeError:
        with pytest.raises(RuntimeError, match="injected"):
            scaling.main(options)
    else:
        scaling.main(options)
    got = [(row["mode"], row["failure"], row["ms"] != "") for row in read(output)]
    if error is RuntimeError:
        assert got == [("tree", "", True), ("per_branch", "did not finish", False)]
    else:  # on one GPU the other modes go on
        assert got == [("tree", "", True), ("per_branch", "out of memory", False), ("grouped", "", True)]


def test_sampling_reaches_the_trainer(trainers):
    scaling.main(["--quick", "--steps", "2", "--only", "tree", "--sampling", "group_by_length"])
    scaling.main(["--quick", "--steps", "2", "--only", "tree"])
    assert [trainer.args.train_sampling_strategy for trainer in trainers] == ["group_by_length", "sequential"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [([], [False, False]), (["--checkpointing"], [True, True]), (["--checkpointing", "tree"], [True, False])],
)
def test_modes_are_checkpointed(trainers, options, expected):
    rows = scaling.main(
        ["--quick", "--steps", "2", "--coverage", "published", "--only", "tree", "per_branch", *options]
    )
    assert [row["checkpointing"] for row in rows] == expected
    assert [trainer.args.gradient_checkpointing for trainer in trainers] == expected


@pytest.mark.parametrize(("tokens", "filled"), [(1536, 0.4), (4096, 0.7), (50_000, 0.95)])
def test_rows_of_a_length(tokens, filled):
    row = largest_row.make_row(tokens, torch.device("cpu"))
    assert row["input_ids"].shape[1] == tokens // 128 * 128
    assert row["attention_mask"].float().mean() > filled


def test_the_largest_row_runs():
    rows = largest_row.main(["--quick", "--options", "checkpointing", "lora"])
    assert [(row["shape"], row["option"]) for row in rows] == [("quick", "checkpointing"), ("quick", "lora")]


def test_a_run_that_dies_leaves_its_largest_rows(tmp_path, monkeypatch):
    output = tmp_path / "largest_row.csv"
    make_model = largest_row.make_model

    def failing(shape, option, *args):
        if option == "lora":
            raise RuntimeError("injected")
        return make_model(shape, option, *args)

    monkeypatch.setattr(largest_row, "make_model", failing)
    with pytest.raises(RuntimeError, match="injected"):
        largest_row.main(["--quick", "--options", "plain", "lora", "--output", str(output), "--commit", "abc"])
    assert [(row["shape"], row["option"], row["commit"]) for row in read(output)] == [("quick", "plain", "abc")]


def step_of(capacity):
    """Steps of 10 GiB and 1 MiB a token, on a GPU of that capacity."""

    def step(tokens):
        if (peak := 10 + tokens / 1024) > capacity:
            raise torch.cuda.OutOfMemoryError
        return peak

    return step


@pytest.mark.parametrize(
    ("capacity", "limit", "largest"),
    [
        (79.0, 10**6, 128 * 534),  # 96 % of 80 GiB less 10 are 68,403 tokens, which fit
        (60.0, 10**6, 128 * 394),  # nor do 65,536, which are cut by 5 % five times
        (79.0, 20_000, 128 * 156),
        (79.0, 4096, 4096),
        (79.0, 2048, 2048),
        (17.0, 10**6, 128 * 54),  # 8,192 do not fit, nor do 7,680 and 7,296
        (14.1, 10**6, 4096),
    ],
)
def test_the_largest_row_is_found(capacity, limit, largest):
    row = largest_row.find_largest(step_of(capacity), 4096, limit, total=80.0)
    assert row == {"largest_row": largest, "peak_gib": 10 + largest / 1024}


def test_the_largest_row_where_short_ones_take_the_same():
    """Making gradients and optimizer steps may take more than the layers of a short row."""

    def step(tokens):
        if tokens > 50_000:
            raise torch.cuda.OutOfMemoryError
        return max(20.0, tokens / 1024)

    row = largest_row.find_largest(step, 4096, 10**6, total=80.0)
    assert row["largest_row"] == 128 * 374  # 65,536 cut by 5 % six times


def test_no_row_fits():
    row = largest_row.find_largest(step_of(12.0), 4096, 10**6, total=80.0)
    assert row == {"failure": "out of memory at 4096 tokens"}


def test_quantized_models_are_measured_unless_told_otherwise(monkeypatch):
    monkeypatch.setattr(largest_row.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(largest_row, "make_model", lambda *args: pytest.fail("a model was made"))
    args = ["--quick", "--options"]
    (row,) = largest_row.main([*args, "qlora"])
    assert row["failure"] == "bitsandbytes is not installed"
    assert set(largest_row.OPTIONS) == {"plain", "checkpointing", "offloading", "lora", "qlora"}
