# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Rows that do not fill the last batch: none is dropped from an evaluation, and torch datasets are filled as well."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from tests.support.engine_runs import plain_trainer, train_plain
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import distance, make_trees, tree_dataset, weights


class TorchDataset(torch.utils.data.Dataset):
    """Map-style, of folded trees, without `column_names`."""

    def __init__(self, number):
        self.rows = make_trees(number)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.parametrize("drop_last", [False, True])
def test_an_evaluation_is_of_all_rows(tmp_path, drop_last):
    """5 rows in batches of 2."""
    trees = make_trees(5, seed=1)
    options = {"dataloader_drop_last": drop_last}
    losses = [
        plain_trainer(
            tmp_path, eval_dataset=tree_dataset(trees), per_device_eval_batch_size=size, **options
        ).evaluate()
        for size in (5, 2)
    ]
    assert losses[1]["eval_loss"] == pytest.approx(losses[0]["eval_loss"], rel=1e-6)
    four = plain_trainer(tmp_path, eval_dataset=tree_dataset(trees[:4]), **options).evaluate()["eval_loss"]
    assert abs(four / losses[0]["eval_loss"] - 1) > 1e-4


def test_torch_datasets(tmp_path):
    """As those of `datasets`, where steps are laid out by `StepSampler` (shuffled), and filled on several ranks."""
    options = {
        "train_sampling_strategy": "random",
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 1,
        "max_steps": -1,
    }
    found = []
    for dataset, removes in ((TorchDataset(7), True), (tree_dataset(make_trees(7)), False)):
        trainer = plain_trainer(tmp_path, train_dataset=dataset, remove_unused_columns=removes, **options)
        trainer.train()
        assert trainer.state.global_step == 2
        found.append(weights(trainer.model))
    assert distance(*found) == 0.0
    rows = TorchDataset(5)
    options = {"train_dataset": rows, "eval_dataset": rows, "eval_strategy": "epoch", "remove_unused_columns": True}
    run_ranks(train_plain, tmp_path, options, ranks=2)


def test_what_drop_last_leaves_undealt_is_said(tmp_path, caplog):
    options = {"dataloader_drop_last": True}
    with caplog.at_level(logging.WARNING):
        plain_trainer(tmp_path, **options).get_train_dataloader()
        assert "dataloader_drop_last" not in caplog.text
        plain_trainer(tmp_path, **options, train_sampling_strategy="group_by_length").get_train_dataloader()
    assert "`dataloader_drop_last=True`" in caplog.text


def train_apart(folder, as_stream):
    """Each rank with rows of its own, 9 and 5; saves the error."""
    rank = int(os.environ["RANK"])
    rows = tree_dataset(make_trees((9, 5)[rank]))
    trainer = plain_trainer(
        folder,
        train_dataset=rows.to_iterable_dataset() if as_stream else rows,
        gradient_accumulation_steps=4,
        per_device_train_batch_size=1,
        max_steps=10,
    )
    with pytest.raises(ValueError) as error:
        trainer.train()
    Path(folder, f"raised{rank}.txt").write_text(str(error.value))


@pytest.mark.parametrize("as_stream", [False, True], ids=["rows", "stream"])
def test_ranks_with_different_numbers_of_batches_say_so(tmp_path, as_stream):
    """A gather of different sizes would abort the processes."""
    run_ranks(train_apart, tmp_path, as_stream, timeout=120)
    first, second = ((tmp_path / f"raised{rank}.txt").read_text() for rank in range(2))
    assert first == second and ("[4, 0] micro-batches" if as_stream else "[9, 5] rows in `train_dataset`") in first
