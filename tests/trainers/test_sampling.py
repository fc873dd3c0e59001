# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Parts of one tree stay in one optimizer step: the sampler by itself, in the trainer, resumed, on two processes."""

from __future__ import annotations

import doctest

import pytest
import torch
from accelerate.data_loader import SeedableRandomSampler
from datasets import Dataset
from torch.utils.data import SequentialSampler

from hf_prefix_tree import TreeSFTTrainer
from hf_prefix_tree.training import sampling
from hf_prefix_tree.training.checks import split_tree_ids
from hf_prefix_tree.training.sampling import StepSampler, linked_rows
from tests.support.job_runs import job_rows, run_job, run_jobs
from tests.support.trainer_runs import config, distance, make_model, make_trees, tokenizer, weights


def sampler(units, block_size, strategy="random", seed=0, step=0, **dealing):
    return StepSampler(units, block_size, strategy=strategy, seed=seed, global_step=lambda: step, **dealing)


def blocks(made):
    indices = list(made)
    assert len(indices) == len(made)
    return [indices[i : i + made.block_size] for i in range(0, len(indices), made.block_size)]


def test_example_in_docstring():
    assert doctest.testmod(sampling) == (0, 2)


def test_linked_rows():
    assert linked_rows([[0], [1], [0, 2], [3], [2, 2]]) == [[0, 2, 4], [1], [3]]
    assert linked_rows([[4, 5], [6], [], [6, 4]]) == [[0, 1, 3], [2]]
    assert linked_rows([]) == []


def test_in_order_units_fill_blocks_and_gaps_are_padded():
    units = [[0, 3], [1], [2, 4, 5], [6]]
    # 7 rows: index 7 is an empty row
    assert blocks(sampler(units, 4, "sequential")) == [[0, 3, 1, 7], [2, 4, 5, 6]]
    assert blocks(sampler(units, 3, "sequential")) == [[0, 3, 1], [2, 4, 5], [6, 7, 7]]


@pytest.mark.parametrize("block_size", [4, 5, 16])
def test_shuffled_epochs(block_size):
    units = [[0, 1, 2], [3, 7], [4], [5], [6], [8, 9, 10, 11], [12], [13, 14], [15]]
    rows = 16
    steps = len(blocks(sampler(units, block_size)))
    epochs = []
    for epoch in range(6):
        drawn = blocks(sampler(units, block_size, step=epoch * steps))
        assert len(drawn) == steps  # Trainer counts the steps once
        assert sorted(i for block in drawn for i in block if i < rows) == list(range(rows))
        assert {i for block in drawn for i in block} <= set(range(rows + 1))
        for unit in units:
            assert sum(set(unit) <= set(block) for block in drawn) == 1
        epochs.append(drawn)
        # anywhere in the epoch, the epoch's order is drawn
        assert blocks(sampler(units, block_size, step=epoch * steps + steps - 1)) == drawn
    together = {tuple(sorted(block)) for drawn in epochs for block in drawn}
    assert len(together) > steps or steps == 1  # not the same blocks in another order
    assert len({str(drawn) for drawn in epochs}) == len(epochs)
    assert blocks(sampler(units, block_size, seed=1)) != epochs[0]


def test_single_rows_fill_the_gaps():
    units = [[0, 1, 2], [3, 4, 5], [6], [7]]
    assert len(sampler(units, 4)) == 8


def test_a_tree_that_is_larger_than_a_step():
    with pytest.raises(ValueError, match=r"`gradient_accumulation_steps`.*`max_packed_tokens`"):
        sampler([[0], [1, 2, 3]], 2)


# ---- in the trainer ----


def trainer(folder, rows, **options):
    return TreeSFTTrainer(
        model=make_model(),
        args=config(folder, **{"dataset_kwargs": {"skip_prepare_dataset": True}, **options}),
        train_dataset=rows if isinstance(rows, torch.utils.data.IterableDataset) else Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def test_the_trainer_takes_steps_of_whole_trees(tmp_path):
    """Every step's divisor is that of whole trees: parts in two steps would each have less."""
    rows = job_rows(6, split=True)
    trees = make_trees(6, seed=5, num_branches=8)
    assert len(rows) > 6
    made = run_job(
        tmp_path, gradient_accumulation_steps=3, per_device_train_batch_size=2, num_train_epochs=2, max_steps=-1,
        train_sampling_strategy="random",
    )  # fmt: skip
    logs = [entry for entry in made.state.log_history if "loss/token_count" in entry]
    parts = [sum(row["tree_ids"] == [index] for row in rows) for index in range(6)]
    own = [tree.weights.sum() for tree in trees]
    units = linked_rows([row["tree_ids"] for row in rows])
    assert max(parts) > 1
    expected = []
    for step in range(len(logs)):
        drawn = StepSampler(units, 6, strategy="random", seed=made.args.seed, global_step=lambda step=step: step)
        per_epoch = len(drawn) // 6
        block = list(drawn)[step % per_epoch * 6 :][:6]
        found = {rows[i]["tree_ids"][0] for i in block if i < len(rows)}
        expected.append(sum(own[index] for index in found))
    assert len(logs) == 2 * per_epoch and made.state.max_steps == len(logs)
    assert [entry["loss/token_count"] for entry in logs] == pytest.approx(expected, rel=1e-12)
    assert sum(entry["loss/token_count"] for entry in logs) == pytest.approx(2 * sum(own))


def test_which_sampler(tmp_path):
    whole = job_rows(3, split=False)
    made = trainer(tmp_path, whole).get_train_dataloader()
    assert isinstance(made.batch_sampler.sampler, SequentialSampler)  # one rank, in order: nothing to lay out
    made = trainer(tmp_path, whole, train_sampling_strategy="random", dataloader_drop_last=True).get_train_dataloader()
    assert isinstance(made.batch_sampler.sampler, SeedableRandomSampler)
    for strategy in ("random", "group_by_length"):
        made = trainer(tmp_path, whole, train_sampling_strategy=strategy).get_train_dataloader()
        assert isinstance(made.batch_sampler.sampler, StepSampler) and made.batch_sampler.sampler.strategy == strategy
    split = trainer(tmp_path, job_rows(3, split=True), gradient_accumulation_steps=8).get_train_dataloader()
    assert isinstance(split.batch_sampler.sampler, StepSampler)
    assert split.batch_sampler.sampler.strategy == "sequential"


def test_refused(tmp_path):
    rows = job_rows(3, split=True)
    with pytest.raises(ValueError, match="`gradient_accumulation_steps`"):
        trainer(tmp_path, rows).train()
    made = trainer(tmp_path, rows)
    made.args.train_sampling_strategy = "other"
    with pytest.raises(ValueError, match="`train_sampling_strategy='other'`"):
        made.train()
    stream = Dataset.from_list(rows).to_iterable_dataset()
    with pytest.raises(ValueError, match=r"`train_dataset`.*`tree_ids`"):
        trainer(tmp_path, stream).train()
    stream = Dataset.from_list(counted(rows)).to_iterable_dataset()
    trainer(tmp_path, stream, overflow="raise", dataset_kwargs=None).train()


def counted(rows):
    """The rows with the column that says how many parts each tree has."""
    ids = [tree_id for row in rows for tree_id in row["tree_ids"]]
    return [row | {"num_parts": [ids.count(tree_id) for tree_id in row["tree_ids"]]} for row in rows]


def test_ids_of_split_trees():
    assert split_tree_ids([[3, 4], [4], [3]], [[1, 2], [2], [1]]) == [[4], [4], []]  # 3 twice, but whole each time
    assert split_tree_ids([[4], [4], [4], [4]], [[2]] * 4) == [[4]] * 4  # the same tree twice
    assert split_tree_ids([], []) == []
    with pytest.raises(ValueError, match=r"tree 4.*3 parts.*2"):
        split_tree_ids([[3], [4], [4], [5]], [[1], [3], [3], [2]])


def test_missing_parts(tmp_path):
    rows = counted(job_rows(3, split=True))
    parts = [at for at, row in enumerate(rows) if row["num_parts"] != [1]]
    assert len(parts) < len(rows)
    options = {"gradient_accumulation_steps": len(rows)}
    for at in parts:
        made = trainer(tmp_path, rows[:at] + rows[at + 1 :], **options)
        with pytest.raises(ValueError, match="parts"):
            made.train()
    (whole,) = (at for at in range(len(rows)) if at not in parts)
    made = trainer(tmp_path, rows[:whole] + rows[whole + 1 :], **options)
    made.train()
    # the column itself changes nothing
    plain = trainer(tmp_path, [{k: v for k, v in row.items() if k != "num_parts"} for row in rows], **options)
    plain.train()
    for removed in (True, False):
        with_column = trainer(tmp_path, rows, remove_unused_columns=removed, **options)
        with_column.train()
        for name, value in weights(plain.model).items():
            assert torch.equal(value, weights(with_column.model)[name]), name


def test_the_padded_dataset_fills_every_step(tmp_path):
    """Accelerate cuts the last metrics by what the dataset's length leaves over."""
    rows = job_rows(3, split=True)
    made = trainer(tmp_path, rows, gradient_accumulation_steps=8).get_train_dataloader()
    assert len(made.dataset) == len(made.batch_sampler.sampler) == 16 and 8 < len(rows) < 16


RANDOM = {
    "gradient_accumulation_steps": 4,
    "train_sampling_strategy": "random",
    "num_train_epochs": 3,
    "max_steps": -1,
}


def steps_per_epoch(block_size):
    return len(sampler(linked_rows([row["tree_ids"] for row in job_rows(6, split=True)]), block_size)) // block_size


def test_workers_and_resuming_in_a_later_epoch(tmp_path):
    steps = steps_per_epoch(4)
    assert steps > 2
    saves = {"save_strategy": "steps", "save_steps": steps + 1}
    whole = run_job(tmp_path / "whole", **RANDOM, **saves)
    workers = run_job(tmp_path / "workers", **RANDOM, dataloader_num_workers=2)
    resumed = run_job(tmp_path / "resumed", **RANDOM, resume=(tmp_path / "whole", steps + 1))
    other = run_job(tmp_path / "other", **RANDOM, data_seed=7)
    for name, value in weights(whole.model).items():
        assert torch.equal(value, weights(workers.model)[name]), name
        assert torch.equal(value, weights(resumed.model)[name]), name
    assert distance(weights(other.model), weights(whole.model)) > 1e-6


def test_two_processes(tmp_path):
    steps = steps_per_epoch(4)
    options = {**RANDOM, "gradient_accumulation_steps": 2}
    jobs = {
        "whole": {**options, "save_strategy": "steps", "save_steps": steps + 1},
        "resumed": {**options, "resume": [str(tmp_path / "whole"), steps + 1]},
    }
    found = run_jobs(tmp_path, jobs)
    one = run_job(tmp_path / "one", **RANDOM)
    start = weights(make_model())
    assert distance(found["whole"][0], start) > 1e-3
    assert distance(found["whole"][0], weights(one.model), start) < 1e-5
    assert distance(found["resumed"][0], found["whole"][0], start) < 1e-6
    counts = [
        [entry["loss/token_count"] for entry in log if "loss/token_count" in entry]
        for log in (found["whole"][1], one.state.log_history)
    ]
    assert counts[0] == pytest.approx(counts[1], rel=1e-12) and len(counts[0]) == 3 * steps
