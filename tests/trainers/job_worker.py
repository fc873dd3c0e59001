# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trains on split or whole trees as jobs say, in this process or, started by `run_jobs`, in two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from runs import config, make_model, make_trees, tokenizer, weights  # noqa: E402

from hf_prefix_tree import TreeSFTTrainer  # noqa: E402
from hf_prefix_tree.splitting import split_tree  # noqa: E402


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
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}", "--master-port=0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--standalone", __file__, str(folder), json.dumps(jobs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {
        name: (torch.load(folder / f"{name}.pt"), json.loads((folder / f"{name}.json").read_text())) for name in jobs
    }


def main(folder, jobs):
    torch.set_num_threads(1)
    for name, job in jobs.items():
        trainer = run_job(f"{folder}/{name}", **job)
        if trainer.accelerator.is_main_process:
            torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/{name}.pt")
            Path(folder, f"{name}.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
