# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trains on split or whole trees as jobs say, in this process or, with `run_jobs`, in several."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from datasets import Dataset

from hf_prefix_tree import TreeSFTTrainer
from hf_prefix_tree.tree.packing import split_tree
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import config, make_model, make_trees, tokenizer, weights


def job_rows(num_trees, split):
    """Rows of one tree or part each; every second tree is split as far as its branches allow."""
    rows = []
    for index, tree in enumerate(make_trees(num_trees, seed=5, num_branches=8)):
        smallest = tree.stats().longest_path if split and index % 2 == 0 else len(tree)
        rows += [{"trees": [part.to_dict()], "tree_ids": [index]} for part in split_tree(tree, smallest)]
    return rows


def run_job(folder, num_trees=6, split=True, resume=None, **options):
    """Trains; returns the trainer. `resume` is a folder that another job saved in, and the step to resume from."""
    checkpoint = None if resume is None else f"{resume[0]}/checkpoint-{resume[1]}"
    trainer = TreeSFTTrainer(
        model=make_model(),
        args=config(folder, dataset_kwargs={"skip_prepare_dataset": True}, learning_rate=0.3, **options),
        train_dataset=Dataset.from_list(job_rows(num_trees, split)),
        processing_class=tokenizer(),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def run_jobs(folder, jobs, processes=2):
    """The jobs in processes of their own: weights and logs by the jobs' names."""
    run_ranks(_run_all, folder, jobs, ranks=processes)
    return {
        name: (torch.load(folder / f"{name}.pt"), json.loads((folder / f"{name}.json").read_text())) for name in jobs
    }


def _run_all(folder, jobs):
    for name, job in jobs.items():
        trainer = run_job(f"{folder}/{name}", **job)
        if trainer.accelerator.is_main_process:
            torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/{name}.pt")
            Path(folder, f"{name}.json").write_text(json.dumps(trainer.state.log_history))
