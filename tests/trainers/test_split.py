# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Splitting loses nothing: the parts' gradients add up to the whole tree's, and training takes the same step."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from conformance.double import keep_double
from hf_prefix_tree import DataCollatorForPrefixTree, TreeSFTTrainer, prepare_model
from hf_prefix_tree.modeling.batch import gather_supervised, summed_weights
from hf_prefix_tree.tree.packing import split_tree
from tests.support import models
from tests.support.trainer_runs import config, distance, make_model, make_trees, tokenizer, train, weights

WEIGHTINGS = ["tree", "branch", "branch_mean", "once"]
MAX_TOKENS = 34


def longest(tree):
    return tree.stats().longest_path


def split_rows(trees, max_tokens):
    """One row per part, and the id of its tree."""
    return [
        {"trees": [part.to_dict()], "tree_ids": [index]}
        for index, tree in enumerate(trees)
        for part in split_tree(tree, max(max_tokens, longest(tree)))
    ]


def unnormalised(model, trees):
    """Gradients of sum(w * nll), and that sum, row after row."""
    model.zero_grad()
    total = 0.0
    collator = DataCollatorForPrefixTree(pad_token_id=0, pad_to_multiple_of=1)
    for tree in trees:
        row = collator([tree])
        supervised = gather_supervised(row["prefix_tree"], row["labels"], row["loss_weights"])
        logits = model(**row).logits[0]
        nll = torch.nn.functional.cross_entropy(logits, supervised.labels[0], reduction="none", ignore_index=-100)
        loss = (nll * supervised.weights[0]).sum()
        loss.backward()
        total += loss.item()
    return total, models.gradients(model)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_gradients_of_the_parts_sum_to_the_whole_trees(weighting):
    trees = make_trees(3, seed=5, weighting=weighting, num_branches=8)
    parts = [part for tree in trees for part in split_tree(tree, longest(tree))]
    assert len(parts) >= len(trees) + 3
    assert sum(map(len, parts)) > sum(map(len, trees))  # something is computed twice
    with keep_double():
        model = prepare_model(models.make_model("qwen3"))
        whole, expected = unnormalised(model, trees)
        split, got = unnormalised(model, parts)
    assert whole > 1 and split == pytest.approx(whole, rel=1e-12)
    assert models.relative_error(got, expected) < 1e-10


def test_a_part_that_keeps_shared_weights_fails_the_test_above():
    tree = make_trees(1, seed=5, num_branches=8)[0]
    parts = split_tree(tree, longest(tree))
    doubled = [part.branches() for part in parts]
    with keep_double():
        model = prepare_model(models.make_model("qwen3"))
        _, expected = unnormalised(model, [tree])
        # each part folded by itself: shared tokens are supervised in several, and K is the part's
        _, got = unnormalised(model, [models.fold(branches) for branches in doubled])
    assert models.relative_error(got, expected) > 1e-2


@pytest.mark.parametrize("strategy", ["sequential", "random"])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_one_step_with_splitting_on_and_off(tmp_path, weighting, strategy):
    trees = make_trees(3, seed=5, weighting=weighting, num_branches=8)
    rows = split_rows(trees, MAX_TOKENS)
    assert len(rows) > len(trees)
    whole = train(tmp_path, trees, per_device_train_batch_size=3, weighting=weighting)
    trainer = TreeSFTTrainer(
        model=make_model(),
        args=config(
            tmp_path,
            gradient_accumulation_steps=-(-len(rows) // 2) + 1,
            per_device_train_batch_size=2,
            weighting=weighting,
            train_sampling_strategy=strategy,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    start = weights(make_model())
    assert distance(weights(whole.model), start) > 1e-3
    assert distance(weights(trainer.model), weights(whole.model)) < 1e-6
    logs = [run.state.log_history[0] for run in (trainer, whole)]
    for key in ("loss", "loss/sum", "loss/token_count", "grad_norm", "tree/branches"):
        assert logs[0][key] == pytest.approx(logs[1][key], rel=2e-6), key


def test_trees_of_a_row_are_collated_together():
    trees = make_trees(3)
    collator = DataCollatorForPrefixTree(pad_token_id=0)
    rows = Dataset.from_list(
        [
            {"trees": [trees[0].to_dict(), trees[1].to_dict()], "tree_ids": [0, 1]},
            {"trees": [trees[2].to_dict()], "tree_ids": [2]},
        ]
    )
    got, expected = collator(list(rows)), collator(trees)
    assert got.keys() == expected.keys() and all(torch.equal(got[key], expected[key]) for key in got)
    assert summed_weights(got) > 0


def test_an_empty_row_has_no_auxiliary_loss(tmp_path):
    """A router's auxiliary loss of no tokens is 0 / 0 in Transformers; an empty row must not make the step NaN."""
    trees = make_trees(2)
    runs = []
    for features, steps in (([*trees], 1), ([*trees, None, None], 1), ([*trees, None, None], 2)):
        rows = [{"trees": [] if tree is None else [tree.to_dict()]} for tree in features]
        model = make_model("qwen3_moe", attn_implementation=None)
        trainer = TreeSFTTrainer(
            model=model,
            args=config(
                tmp_path,
                gradient_accumulation_steps=len(rows) // steps,
                max_steps=steps,
                router_aux_loss_coef=0.5,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )
        trainer.train()
        runs.append((trainer.state.log_history[0], weights(trainer.model)))
    (log, trained), (padded, padded_weights), (_, after_an_empty_step) = runs
    assert all(value.isfinite().all() for value in padded_weights.values())
    assert all(torch.equal(value, trained[name]) for name, value in after_an_empty_step.items())
    assert padded["loss/sum"] == pytest.approx(log["loss/sum"], rel=1e-6)
    for name in ("entropy", "aux_loss"):  # an empty row has none
        assert padded[name] == pytest.approx(log[name], rel=1e-6) and log[name] > 0
    # the mean of those that have tokens
    auxiliary = [entry["loss"] - entry["loss/sum"] / entry["loss/token_count"] for entry in (log, padded)]
    assert auxiliary[0] > 0.1 and auxiliary[1] == pytest.approx(auxiliary[0], rel=1e-4)
