# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trains and evaluates under samplers that need lengths, in this process or as one of several ranks."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments

from hf_prefix_tree import DataCollatorForPrefixTree, TreeLossMixin, TreeSFTTrainer
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import random_branches
from tests.support.trainer_runs import config, make_model, tokenizer

# Name -> what is trained on, and the options.
CASES = {
    "by length": ("branches", {"train_sampling_strategy": "group_by_length", "per_device_eval_batch_size": 2}),
    "rebalanced": ("branches", {"train_sampling_strategy": "batch_rebalance"}),
    "packed": ("branches", {"train_sampling_strategy": "group_by_length", "max_packed_tokens": 60}),
    "stream": ("stream", {"train_sampling_strategy": "group_by_length"}),
    "torch": ("torch", {"train_sampling_strategy": "group_by_length", "per_device_eval_batch_size": 2}),
    "dropped": (
        "branches",
        {"train_sampling_strategy": "group_by_length", "max_packed_tokens": 200, "dataloader_drop_last": True},
    ),
}


def groups_of(number, seed):
    """Branches of some trees; one branch of each supervises nothing, which counts in K."""
    rng = np.random.default_rng(seed)
    groups = [random_branches(rng, num_branches=4, fractional=True) for _ in range(number)]
    return [[*group, Branch(group[0].input_ids, np.zeros(len(group[0])))] for group in groups]


def sums_of(groups, model=None):
    """sum(w * nll), of a given model with gradients, and sum(w): each branch by itself, weighing 1/K."""
    with torch.set_grad_enabled(model is not None):
        model = make_model() if model is None else model
        loss_sum, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
        for group in groups:
            for branch in group:
                ids, own = torch.tensor(branch.input_ids)[None], torch.tensor(branch.weights[1:]) / len(group)
                logits = model(input_ids=ids, use_cache=False).logits[0, :-1].double()
                loss_sum = loss_sum + torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none") @ own
                weight_sum += own.sum().item()
    return loss_sum, weight_sum


class TorchDataset(torch.utils.data.Dataset):
    """Map-style, of folded trees, without `column_names`."""

    def __init__(self, groups):
        self.trees = [fold(group) for group in groups]

    def __len__(self):
        return len(self.trees)

    def __getitem__(self, index):
        return self.trees[index]


class _PlainTrainer(TreeLossMixin, Trainer):
    pass


def _dataset(kind, number, seed):
    groups = groups_of(number, seed)
    if kind == "torch":
        return TorchDataset(groups)
    rows = [
        {"branches": [{"input_ids": b.input_ids.tolist(), "weights": b.weights.tolist()} for b in group]}
        for group in groups
    ]
    return Dataset.from_list(rows).to_iterable_dataset() if kind == "stream" else Dataset.from_list(rows)


def _trainer(folder, kind, options):
    datasets = {"train_dataset": _dataset(kind, 7, 0)}
    datasets["eval_dataset"] = {"five": _dataset(kind, 5, 1), "three": _dataset(kind, 3, 2)}
    options = {"gradient_accumulation_steps": 2, "learning_rate": 0.0, "eval_strategy": "epoch", **options}
    # a stream has no length: seven rows are four rounds of two ranks
    options |= {"max_steps": 2} if kind == "stream" else {"num_train_epochs": 1, "max_steps": -1}
    if kind == "torch":
        options = config(folder, **options).to_dict()
        options = {k: v for k, v in options.items() if k in TrainingArguments.__dataclass_fields__ and v is not None}
        args = TrainingArguments(**{**options, "remove_unused_columns": False})
        return _PlainTrainer(model=make_model(), args=args, data_collator=DataCollatorForPrefixTree(0), **datasets)
    args = config(folder, **options)
    return TreeSFTTrainer(model=make_model(), args=args, processing_class=tokenizer(), **datasets)


def run_cases(folder):
    """Rank 0 leaves what was logged in `log.json`."""
    found = {}
    for name, (kind, options) in CASES.items():
        if os.environ.get("WORLD_SIZE", "1") == "1":
            options = {"gradient_accumulation_steps": 4, **options}
        trainer = _trainer(f"{folder}/{name}", kind, options)
        before = trainer.evaluate()
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset["five"]) if kind == "branches" else None
        log = trainer.state.log_history
        steps = [entry for entry in log if "loss/sum" in entry]
        found[name] = {
            "before": [before["eval_five_loss"], before["eval_three_loss"]],
            "after": [entry[key] for key in ("eval_five_loss", "eval_three_loss") for entry in log if key in entry],
            "predicted": predicted and predicted.metrics["test_loss"],
            "sums": [[entry["loss/sum"], entry["loss/token_count"]] for entry in steps],
        }
    if os.environ.get("RANK", "0") == "0":
        Path(folder, "log.json").write_text(json.dumps(found))
