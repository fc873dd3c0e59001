"""What one of two gloo processes does: trains, evaluates, and leaves weights and logs behind."""

import json
from pathlib import Path

import torch
from eagle3_runs import documents, train, weights


def train_and_evaluate(folder):
    eval_rows = documents(5, seed=1)
    trainer = train(folder, documents(7), eval_rows=eval_rows, gradient_accumulation_steps=2)
    metrics = trainer.evaluate()
    if trainer.accelerator.is_main_process:
        torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/weights.pt")
        Path(folder, "log.json").write_text(json.dumps([*trainer.state.log_history, metrics]))
