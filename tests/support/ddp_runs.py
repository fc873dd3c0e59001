"""What each process of `test_ddp.py` does: trains, evaluates, and leaves weights and logs behind."""

import json
from pathlib import Path

import torch

from tests.support.trainer_runs import make_trees, train, weights


def train_and_evaluate(folder, num_trees, accumulation, batch_size, max_steps, stream):
    trainer = train(
        folder,
        make_trees(num_trees),
        eval_trees=make_trees(5, seed=1),
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=1,
        max_steps=max_steps,
        stream=stream,
        eval_strategy="steps",
        eval_steps=max_steps,
        learning_rate=0.5,
    )
    if trainer.accelerator.is_main_process:
        torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/weights.pt")
        Path(folder, "log.json").write_text(json.dumps(trainer.state.log_history))
