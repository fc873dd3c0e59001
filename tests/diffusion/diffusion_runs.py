"""Small training runs of diffusion models."""

import functools
import json
from pathlib import Path

import torch
from datasets import Dataset
from models import VOCAB, make_model

from hf_prefix_tree import DiffusionSFTConfig, DiffusionSFTTrainer
from hf_prefix_tree.demo.tokenizer import train_tokenizer

MASK, SIZE = VOCAB - 1, 4
OPTIONS = {
    "block_size": SIZE,
    "mask_token_id": MASK,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "learning_rate": 0.02,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "max_grad_norm": 0.0,
    "max_steps": 3,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "train_sampling_strategy": "sequential",
    "dataloader_pin_memory": False,
}


@functools.cache
def tokenizer():
    """Only its special tokens matter to rows of ids."""
    found = train_tokenizer(["a b c"], vocab_size=265)
    assert found.eos_token_id == 2 and found.pad_token_id == 0
    return found


def rows_of_ids(count, seed=0):
    """Samples of different lengths, the end of each supervised."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, 14, (1,), generator=generator))
        start = int(torch.randint(0, length - 1, (1,), generator=generator))
        ids = torch.randint(3, VOCAB - 1, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "loss_mask": [int(i >= start) for i in range(length)]})
    return Dataset.from_list(rows)


def small_model(name="qwen3"):
    return make_model(name, dtype=torch.float32, amplify=2.0)


def trainer_of(folder, rows, model=None, eval_rows=None, **options):
    kwargs = {key: options.pop(key) for key in ("peft_config", "data_collator", "processing_class") if key in options}
    return DiffusionSFTTrainer(
        model=small_model() if model is None else model,
        args=DiffusionSFTConfig(str(folder), **{**OPTIONS, **options}),
        train_dataset=rows,
        eval_dataset=eval_rows,
        **{"processing_class": tokenizer(), **kwargs},
    )


def train(folder, rows, **kwargs):
    trainer = trainer_of(folder, rows, **kwargs)
    trainer.train()
    return trainer


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def distance(got, expected, start):
    """Largest difference of an update, relative to the largest update, over all parameters."""
    change = max((expected[n] - start[n]).abs().max().item() for n in expected)
    assert change > 1e-4  # something was learned
    return max((got[n] - expected[n]).abs().max().item() for n in expected) / change


def train_and_evaluate(folder, objectives):
    """What one of two gloo processes does: trains, evaluates, and leaves weights and logs behind."""
    for objective in objectives:
        trainer = train(
            folder,
            rows_of_ids(7),
            eval_rows=rows_of_ids(5, seed=1),
            objective=objective,
            gradient_accumulation_steps=2,
            supervise_padding=objective == "block",
        )
        metrics = trainer.evaluate()
        if trainer.accelerator.is_main_process:
            torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/{objective}.pt")
            Path(folder, f"{objective}.json").write_text(json.dumps([*trainer.state.log_history, metrics]))
    torch.distributed.destroy_process_group()
