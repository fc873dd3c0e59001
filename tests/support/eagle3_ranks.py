"""What one of two gloo processes does: trains, evaluates, and leaves weights and logs behind."""

import json
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk

from tests.support.eagle3_runs import BY_LENGTH, branch_rows, documents, train, weights


def train_and_evaluate(folder):
    """
    On rows, on trees, on streams of rows, on precomputed states, and under samplers that need lengths: an uneven last
    step in training and evaluation each.
    """
    states = Path(folder, "states")
    sets = documents(7), documents(5, seed=1)
    kinds = {
        "rows": (*sets, None),
        "trees": (branch_rows(7), branch_rows(5, seed=1), None),
        "stream": (*(Dataset.from_list(rows).to_iterable_dataset() for rows in sets), None),
        "group_by_length": (*sets, None),
        "batch_rebalance": (*sets, None),
        "precomputed": (*(load_from_disk(str(states / "rows" / split)) for split in ("train", "test")), str(states)),
    }
    for kind, (rows, eval_rows, target) in kinds.items():
        strategy = {"train_sampling_strategy": kind} if kind in BY_LENGTH else {}
        trainer = train(folder, rows, eval_rows=eval_rows, target=target, gradient_accumulation_steps=2, **strategy)
        metrics = trainer.evaluate()
        if trainer.accelerator.is_main_process:
            torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/{kind}.pt")
            Path(folder, f"{kind}.json").write_text(json.dumps([*trainer.state.log_history, metrics]))
