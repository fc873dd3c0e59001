"""What each process of `test_ddp.py` does: trains, evaluates, and leaves weights and logs behind."""

import json
from pathlib import Path

import torch

from hf_prefix_tree import TreeSFTTrainer
from hf_prefix_tree.tree.prefix_tree import fold
from tests.support.trainer_runs import config, make_model, make_trees, tokenizer, train, tree_dataset, weights


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


def predict(folder, num_trees):
    """Predictions on trees of which the ranks have unequal numbers, with unequal numbers of branches."""
    trees = [fold(tree.branches()[: index + 1]) for index, tree in enumerate(make_trees(num_trees, num_branches=4))]
    trainer = TreeSFTTrainer(
        make_model(), config(folder), train_dataset=tree_dataset(trees), processing_class=tokenizer()
    )
    predictions, labels, _ = trainer.predict(tree_dataset(trees))
    if trainer.accelerator.is_main_process:
        torch.save((predictions, labels), f"{folder}/predictions.pt")
