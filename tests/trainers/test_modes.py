# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The same data in the modes that it can be trained in: the losses and gradients that their definitions predict."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from conformance.double import keep_double
from hf_prefix_tree import DataCollatorForPrefixTree, TreeSFTConfig, TreeSFTTrainer, prepare_model
from hf_prefix_tree.data.baselines import branch_shares, per_branch
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.batch import gather_supervised, summed_weights
from hf_prefix_tree.sft.collator import BranchCollator, branch_batches
from hf_prefix_tree.training.step import without_empty_mask
from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support import models
from tests.support.job_runs import job_rows, run_jobs
from tests.support.trainer_runs import (
    config,
    distance,
    make_model,
    make_trees,
    tokenizer,
    train,
    tree_dataset,
    weights,
)

WEIGHTINGS = ["tree", "branch", "branch_mean", "once"]


def unnormalised(model, rows):
    """sum(w * nll) of rows of the batch contract, with gradients."""
    model.zero_grad()
    total = 0.0
    for row in rows:
        supervised = gather_supervised(row["prefix_tree"], row["labels"], row["loss_weights"])
        nll = torch.nn.functional.cross_entropy(
            model(**row).logits[0], supervised.labels[0], reduction="none", ignore_index=-100
        )
        loss = (nll * supervised.weights[0]).sum()
        loss.backward()
        total += loss.item()
    return total, models.gradients(model)


def stock_sum(model, rows):
    """The summed loss of flat samples, as any trainer computes it, with gradients."""
    model.zero_grad()
    total = 0.0
    for row in rows:
        ids, labels = (torch.tensor(row[name])[None] for name in ("input_ids", "labels"))
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], labels[0, 1:], reduction="sum")
        loss.backward()
        total += loss.item()
    return total, models.gradients(model)


# ---- definitions, in float64 ----


def test_per_branch_is_weighting_branch_and_k_times_weighting_tree():
    model = prepare_model(models.make_model("qwen3"))
    trees = {w: make_trees(1, seed=2, weighting=w, fractional=False, num_branches=5) for w in ("branch", "tree")}
    collator = DataCollatorForPrefixTree(0, pad_to_multiple_of=1)
    with keep_double():
        flat, flat_grads = stock_sum(model, per_branch(trees["tree"]))
        branch, branch_grads = unnormalised(model, [collator(trees["branch"])])
        tree, tree_grads = unnormalised(model, [collator(trees["tree"])])
    assert flat > 1
    assert branch == pytest.approx(flat, rel=1e-12) and tree * 5 == pytest.approx(flat, rel=1e-12)
    assert models.relative_error(branch_grads, flat_grads) < 1e-10
    assert models.relative_error({name: 5 * grad for name, grad in tree_grads.items()}, flat_grads) < 1e-10


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_grouped_is_the_tree(weighting, split):
    trees = make_trees(2, seed=5, weighting=weighting, num_branches=8)
    collator = DataCollatorForPrefixTree(0, pad_to_multiple_of=1)
    features = trees
    if split:
        features = [part for tree in trees for part in split_tree(tree, tree.stats().longest_path)]
        assert len(features) > 3
    batch = BranchCollator(collator)(features)
    rows = branch_batches(batch, number=18)
    assert batch["branch_lengths"].shape == (1, 16) and len(rows) == 18
    assert summed_weights(batch).item() == pytest.approx(sum(tree.weights.sum() for tree in trees), rel=1e-12)
    for row in rows[16:]:
        assert summed_weights(row) == 0 and not row["attention_mask"].any() and (row["labels"] == -100).all()
    with keep_double():
        model = prepare_model(models.make_model("qwen3"))
        tree, expected = unnormalised(model, [collator(trees)])
        grouped, got = unnormalised(model, [without_empty_mask(row)[0] for row in rows])
    assert grouped == pytest.approx(tree, rel=1e-12)
    assert models.relative_error(got, expected) < 1e-10


def test_shares_by_hand():
    branches = [Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8], [0, 0.5, 0]), Branch([5, 6], [0, 1])]
    expected = {
        "tree": [[0, 1 / 3, 1 / 3], [0, 0.5 / 3, 0], [0, 1 / 3]],
        "branch": [[0, 1, 1], [0, 0.5, 0], [0, 1]],
        "branch_mean": [[0, 0.5, 0.5], [0, 0.5, 0], [0, 1]],
        "once": [[0, 2.5 / 3, 1], [0, 0, 0], [0, 0]],
    }
    for weighting, shares in expected.items():
        tree = fold(branches, weighting)
        assert [share.tolist() for share in branch_shares(tree)] == shares
        total = np.zeros(len(tree))
        for path, share in zip(tree.paths(), shares, strict=True):
            total[path] += share
        np.testing.assert_allclose(total, tree.weights, rtol=1e-15)


def test_branches_are_padded_one_by_one():
    trees = [fold([Branch(range(3, 103), [1] * 100), Branch(range(3, 133), [1] * 130)])]
    batch = BranchCollator(DataCollatorForPrefixTree(1))(trees)
    assert batch["branch_lengths"].tolist() == [[128, 256]] and batch["input_ids"].shape == (1, 384)
    alone = [DataCollatorForPrefixTree(1)([fold([branch])]) for branch in trees[0].branches()]
    for row, expected in zip(branch_batches(batch, 2), alone, strict=True):
        for name in ("input_ids", "position_ids", "labels", "attention_mask", "prefix_tree"):
            assert torch.equal(row[name], expected[name]), name
    assert torch.equal(batch["tree_stats"], DataCollatorForPrefixTree(1)(trees)["tree_stats"])
    empty = BranchCollator(DataCollatorForPrefixTree(1))([{"input_ids": []}])
    assert empty["branch_lengths"].tolist() == [[128]] and summed_weights(empty) == 0


# ---- through the trainer ----


def trainer(folder, trees, model=None, **options):
    return TreeSFTTrainer(
        model=model or make_model(),
        args=config(folder, **options),
        train_dataset=tree_dataset(trees),
        processing_class=tokenizer(),
    )


STEP = ("loss", "loss/sum", "loss/token_count", "grad_norm", "tree/branches", "tree/tokens", "tree/token_ratio")


@pytest.mark.parametrize(("weighting", "accumulation"), [("tree", 1), ("tree", 2), ("branch_mean", 1), ("once", 2)])
def test_grouped_trains_the_same(tmp_path, weighting, accumulation):
    trees = make_trees(2, weighting=weighting)
    options = {
        "weighting": weighting,
        "gradient_accumulation_steps": accumulation,
        "per_device_train_batch_size": 2 // accumulation,
        "max_steps": 2,
        "learning_rate": 0.3,
    }
    tree, grouped = (train(tmp_path, trees, eval_trees=trees, mode=mode, **options) for mode in ("tree", "grouped"))
    start = weights(make_model())
    assert distance(weights(tree.model), start) > 1e-3
    assert distance(weights(grouped.model), weights(tree.model)) < 1e-6
    for ours, theirs in zip(grouped.state.log_history[:2], tree.state.log_history[:2], strict=True):
        for key in (*STEP, "tree/pair_ratio"):
            assert ours[key] == pytest.approx(theirs[key], rel=5e-6), key
    first = grouped.state.log_history[0]
    assert first["num_tokens"] == sum(tree.stats().branch_tokens for tree in trees)
    assert first["tree/padding"] == pytest.approx(1 - first["num_tokens"] / (12 * 128))  # each branch below 128 tokens
    assert grouped.evaluate()["eval_loss"] == pytest.approx(tree.evaluate()["eval_loss"], rel=1e-5)


def test_grouped_runs_one_branch_at_a_time(tmp_path):
    """Backward follows every forward, and a forward has one branch: that is what bounds its memory. Gradients are held
    back from the other ranks until the last one."""
    trees, order = make_trees(1), []
    model = make_model()
    model.model.layers[0].register_forward_hook(lambda m, a, out: order.append(("forward", m.training)))
    model.model.embed_tokens.weight.register_hook(lambda grad: order.append(("backward", True)))
    run = trainer(tmp_path, trees, model, mode="grouped")

    @contextmanager
    def no_sync(model):
        order.append(("hold", True))
        yield
        order.append(("release", True))

    run.accelerator.no_sync = no_sync
    run.train()
    trained = [name for name, training in order if training]
    assert trained == ["hold", "forward", "backward", "release"] * 5 + ["forward", "backward"]


def test_a_routers_auxiliary_loss_is_a_mean_over_branches(tmp_path):
    trees = make_trees(2)
    logs = {}
    for batch_size in (1, 2):
        run = train(
            tmp_path,
            trees,
            make_model("qwen3_moe", attn_implementation=None),
            mode="grouped",
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=2 // batch_size,
            router_aux_loss_coef=0.5,
        )
        log = run.state.log_history[0]
        logs[batch_size] = log["loss"] - log["loss/sum"] / log["loss/token_count"]
        assert logs[batch_size] == pytest.approx(0.5 * log["aux_loss"], rel=1e-4) and logs[batch_size] > 0.1
    assert logs[1] == pytest.approx(logs[2], rel=1e-4)


@pytest.mark.parametrize(("mode", "num_branches"), [("tree", [1, 1, 1]), ("grouped", [2, 5])])
def test_a_routers_auxiliary_loss_in_a_step_that_is_filled_up(tmp_path, mode, num_branches):
    """As in TRL, whose last step has as many micro-batches as there are sequences; here it gets empty ones."""
    trees = [make_trees(1, seed, "branch", False, number)[0] for seed, number in enumerate(num_branches)]
    branches = [branch for tree in trees for branch in tree.branches()]
    rows = [
        {"input_ids": branch.input_ids, "labels": np.where(branch.weights > 0, branch.input_ids, IGNORE_INDEX)}
        for branch in branches
    ]
    options = {"num_train_epochs": 1, "max_steps": -1, "gradient_accumulation_steps": 8, "router_aux_loss_coef": 1.0}
    of_trees = {"mode": mode, "weighting": "branch", "train_sampling_strategy": "random"}
    runs = []
    for trainer_class, config_class, dataset, further in (
        (SFTTrainer, SFTConfig, Dataset.from_list(rows), {}),
        (TreeSFTTrainer, TreeSFTConfig, tree_dataset(trees), of_trees),
    ):
        trainer = trainer_class(
            make_model("qwen3_moe", torch.float64, attn_implementation=None),
            config(tmp_path, config_class, **options, **further),
            train_dataset=dataset,
            processing_class=tokenizer(),
        )
        trainer.train()
        runs.append((trainer.state.log_history[0], weights(trainer.model)))
    (stock_log, stock), (log, tree) = runs
    assert log["loss"] == pytest.approx(stock_log["loss"], rel=1e-6) and stock_log["aux_loss"] > 1
    assert distance(tree, stock, weights(make_model("qwen3_moe", torch.float64, attn_implementation=None))) < 1e-6


def test_two_processes(tmp_path):
    """Four rows of one to three branches: ranks differ in their number, and the last step holds an empty row."""
    options = {"num_train_epochs": 1, "max_steps": -1, "per_device_train_batch_size": 1, "num_trees": 4}
    found = run_jobs(
        tmp_path,
        {
            "grouped": {**options, "mode": "grouped", "gradient_accumulation_steps": 4},
            "tree": {**options, "gradient_accumulation_steps": 4},
        },
    )
    assert len({len(row["trees"][0]["branch_nodes"]) for row in job_rows(4, split=True)}) > 1
    (grouped, grouped_log), (tree, tree_log) = found["grouped"], found["tree"]
    start = weights(make_model())
    assert distance(tree, start) > 1e-3 and distance(grouped, tree) < 1e-6
    assert len(grouped_log) == len(tree_log)
    for ours, theirs in zip(grouped_log[:-1], tree_log[:-1], strict=True):
        for key in STEP:
            assert ours[key] == pytest.approx(theirs[key], rel=5e-6), key


# ---- options ----


@pytest.mark.parametrize("name", ["overflow", "selection_metric", "mode"])
def test_choices(tmp_path, name):
    with pytest.raises(ValueError, match=rf"`{name}`.*'other'"):
        config(tmp_path, **{name: "other"})


def test_limits(tmp_path):
    for name in ("max_packed_tokens", "selection_num_proc", "max_examples"):
        with pytest.raises(ValueError, match=f"`{name}`.*0"):
            config(tmp_path, **{name: 0})
    with pytest.raises(ValueError, match=r"`max_length`.*9.*`max_packed_tokens`.*8"):
        config(tmp_path, max_length=9, max_packed_tokens=8)
    assert config(tmp_path, max_length=8, max_packed_tokens=8).max_packed_tokens == 8
    made = TreeSFTConfig("x", use_cpu=True, bf16=False)
    assert (made.mode, made.overflow, made.pack_trees, made.selection_metric) == ("tree", "split", True, None)


def test_options_reach_the_preparation(tmp_path):
    """Trees are split and packed on the way in, and one step of them is the step of the whole trees."""
    trees = make_trees(4, seed=5, num_branches=8)
    whole = train(tmp_path, trees, per_device_train_batch_size=4)
    limit = max(tree.stats().longest_path for tree in trees)
    assert max(map(len, trees)) > limit
    options = {"max_packed_tokens": limit, "gradient_accumulation_steps": 12}
    packed = train(tmp_path, trees, **options)
    lengths = [sum(len(tree["input_ids"]) for tree in row["trees"]) for row in packed.train_dataset]
    assert max(lengths) <= limit and {"trees", "tree_ids"} <= set(packed.train_dataset.column_names)
    assert distance(weights(packed.model), weights(whole.model)) < 1e-6
    apart = trainer(tmp_path, trees, pack_trees=False, **options).train_dataset
    assert {len(row["trees"]) for row in apart} == {1}
    dropped = trainer(tmp_path, trees, overflow="drop", **options).train_dataset
    assert len({i for row in dropped for i in row["tree_ids"]}) == sum(len(t) <= limit for t in trees)
    with pytest.raises(ValueError, match="max_packed_tokens"):
        trainer(tmp_path, trees, overflow="raise", **options)
    chosen = trainer(tmp_path, trees, max_examples=2, selection_metric="token_ratio").train_dataset
    best = sorted(range(4), key=lambda i: -trees[i].stats().token_ratio)[:2]
    expected = {tuple(trees[i].input_ids) for i in best}
    assert {tuple(row["input_ids"]) for row in chosen} == expected


def test_grouped_is_refused_under_deepspeed(tmp_path):
    made = trainer(tmp_path, make_trees(1), mode="grouped")
    made.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="`mode='grouped'`"):
        made.get_train_dataloader()


def test_rows_of_a_stock_trainer(tmp_path):
    """`per_branch` rows load into a dataset that `SFTTrainer` takes; test_sft.py holds that it trains the same."""
    rows = Dataset.from_list(per_branch(make_trees(2, fractional=False)))
    assert rows.column_names == ["input_ids", "labels"] and len(rows) == 12
