"""Short trainings in float64 on prompts with images, with TRL's trainers and with ours, in one process or in ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOTrainer, KTOConfig, KTOTrainer, RLOOTrainer

from conformance.build import build_model
from conformance.double import keep_double
from hf_prefix_tree import TreeDPOTrainer, TreeGRPOTrainer, TreeKTOTrainer, TreeRLOOTrainer
from tests.support.image_rows import SeenImages, picture, processor
from tests.support.policy_runs import build
from tests.support.rollout_loss import DoubleHead
from tests.support.trainer_runs import config, weights

CLASSES = {
    "grpo": (GRPOTrainer, TreeGRPOTrainer),
    "rloo": (RLOOTrainer, TreeRLOOTrainer),
    "dpo": (DPOTrainer, TreeDPOTrainer),
    "kto": (KTOTrainer, TreeKTOTrainer),
}
# Of the prompts in their order: the image of each, or no image. Two ranks get one half each.
SHOWN = {"other images": [0, 1, 2, 3], "a rank without images": [0, 1, None, None]}


def text(rng, length):
    return " ".join(f"t{i}" for i in rng.integers(8, 80, size=length))


def questions(shown):
    """Prompts with the given images; every second one is the text before it."""
    rng = np.random.default_rng(0)
    texts = [text(rng, 12) for _ in range(-(-len(shown) // 2))]
    return [
        {
            "prompt": [{"role": "user", "content": texts[i // 2]}],
            "images": [] if image is None else [picture(seed=image)],
        }
        for i, image in enumerate(shown)
    ]


def pairs(shown):
    rng, names = np.random.default_rng(1), ("chosen", "rejected")
    answers = [{name: [{"role": "assistant", "content": text(rng, 4)}] for name in names} for _ in shown]
    return [{**question, **answer} for question, answer in zip(questions(shown), answers, strict=True)]


def unpaired(shown):
    """The answers of `pairs`, each a row of its own with its label."""
    return [
        {"prompt": row["prompt"], "images": row["images"], "completion": row[name], "label": name == "chosen"}
        for row in pairs(shown)
        for name in ("chosen", "rejected")
    ]


class Gradients(TrainerCallback):
    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.steps.append({name: p.grad.clone() for name, p in named if p.grad is not None})


def train(folder: Path, method: str, is_tree: bool, shown: list[int | None]) -> dict[str, Any]:
    """Two optimizer steps: logs, gradients, weights, and the images in each call of the vision tower."""
    model, reference = (build_model("qwen2_5_vl", seed=seed, variant="images").double() for seed in (0, 1))
    seen, gradients = SeenImages(model), Gradients()
    trainer_class = CLASSES[method][is_tree]
    with mock.patch("trl.trainer.utils._ChunkedLogProbFunction", DoubleHead), keep_double():
        if method in ("grpo", "rloo"):  # on one generation, so that old log-probs are scored as well
            trainer = build(
                *(folder, method, "tree"),
                model=model,
                trainer_class=trainer_class,
                train_dataset=Dataset.from_list(questions(shown)),
                processing_class=processor(model.config),
                **{"max_steps": 2, "num_iterations": 2, "num_generations": 4, "shuffle_dataset": False},
                **{"per_device_train_batch_size": 4, "max_completion_length": 6, "optim": "sgd", "max_grad_norm": 0.0},
                **{"learning_rate": 0.05, "log_multimodal": is_tree},  # with it, TRL hangs if a rank has no image
            )
        else:
            config_class, rows, size = {"dpo": (DPOConfig, pairs, 2), "kto": (KTOConfig, unpaired, 4)}[method]
            trainer = trainer_class(
                model=model,
                ref_model=reference,
                args=config(folder, config_class, max_steps=2, per_device_train_batch_size=size, learning_rate=0.5),
                train_dataset=Dataset.from_list(rows(shown)),
                processing_class=processor(model.config),
            )
        trainer.add_callback(gradients)
        start = weights(model)
        seen.calls.clear()
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {"logs": logs, "gradients": gradients.steps, "start": start, "end": weights(model), "seen": seen.calls}


def train_in_rank(folder: str, jobs: list[tuple[str, str]]) -> None:
    """Each job is a method and a key of `SHOWN`, trained stock and on trees."""
    rank = os.environ["RANK"]
    for index, (method, shown) in enumerate(jobs):
        runs = [train(Path(folder, rank), method, is_tree, SHOWN[shown]) for is_tree in (False, True)]
        torch.save(runs, Path(folder, f"runs{index}-{rank}.pt"))
