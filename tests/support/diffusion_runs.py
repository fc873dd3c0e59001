"""Small training runs of diffusion models."""

import functools
import json
from pathlib import Path

import torch
from datasets import Dataset

from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import DataCollatorForDiffusionLM, DiffusionSFTConfig, DiffusionSFTTrainer
from hf_prefix_tree.diffusion.loss import block_diffusion_loss, hybrid_loss, mdlm_loss
from hf_prefix_tree.diffusion.noise import corrupt, noise_seeds
from hf_prefix_tree.modeling.attention.masks.spans import spans
from tests.support.models import VOCAB, make_model

MASK, SIZE = VOCAB - 1, 4
OBJECTIVES = ("mdlm", "block", "hybrid")
BY_LENGTH = ("group_by_length", "batch_rebalance")  # sampling strategies that need the length of every row
EVALUATION = -1
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


def rows_of_ids(count, seed=0, longest=13):
    """Samples of different lengths, the end of each supervised."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(4, longest + 1, (1,), generator=generator))
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


def logs_of(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def collated(rows, response_window=True, indices=None):
    collator = DataCollatorForDiffusionLM(0, 2, block_size=SIZE, response_window=response_window)
    return collator([{**rows[i], "sample_index": i} for i in (range(len(rows)) if indices is None else indices)])


def losses_of(model, batch, objective, salts, kind="uniform", response_window=True, alpha=1.0):
    """The objective and the NLL bound from all logits: the losses of the notes, nothing left out before the head."""
    ids, mask = batch["input_ids"], batch["loss_mask"]
    length = ids.shape[1]
    starts = mask.argmax(dim=1) if response_window else torch.zeros(len(ids), dtype=torch.int64)
    blocks = {} if objective == "mdlm" else {"block_size": SIZE, "block_start": starts}
    seeds = noise_seeds(batch["sample_index"], 42, *salts)
    corrupted = corrupt(kind, ids, mask, mask_token_id=MASK, vocab_size=VOCAB, seeds=seeds, **blocks)
    positions = torch.arange(length).expand_as(ids)
    with torch.no_grad():
        if objective == "mdlm":
            logits = model(corrupted.input_ids, attention_mask=batch["attention_mask"]).logits
            bound = mdlm_loss(logits, ids, corrupted.is_masked, corrupted.p, mask)
            return bound, bound
        layout = {"block": "block_diffusion", "hybrid": "hybrid"}[objective]
        logits = model(
            torch.cat([corrupted.input_ids, ids], dim=1),
            position_ids=positions.repeat(1, 2),
            diffusion_layout=spans(batch["attention_mask"], layout, SIZE, window_start=starts),
        ).logits
    noisy, clean = logits[:, :length], logits[:, length:]
    bound = mdlm_loss(noisy, ids, corrupted.is_masked, corrupted.p, mask)
    if objective == "block":
        return block_diffusion_loss(noisy, ids, mask), bound
    return hybrid_loss(noisy, clean, ids, corrupted.is_masked, corrupted.p, mask, alpha=alpha), bound


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def distance(got, expected, start):
    """Largest difference of an update, relative to the largest update, over all parameters."""
    change = max((expected[n] - start[n]).abs().max().item() for n in expected)
    assert change > 1e-4  # something was learned
    return max((got[n] - expected[n]).abs().max().item() for n in expected) / change


def train_and_evaluate(folder, objectives):
    """What one of two gloo processes does: trains, evaluates, and leaves weights and logs behind."""
    runs = {name: {"objective": name, "supervise_padding": name == "block"} for name in objectives}
    runs |= {name: {"objective": "mdlm", "train_sampling_strategy": name} for name in BY_LENGTH}
    for name, options in runs.items():
        trainer = train(
            folder,
            rows_of_ids(7),
            eval_rows=rows_of_ids(5, seed=1),
            gradient_accumulation_steps=2,
            **options,
        )
        metrics = trainer.evaluate()
        if trainer.accelerator.is_main_process:
            torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/{name}.pt")
            Path(folder, f"{name}.json").write_text(json.dumps([*trainer.state.log_history, metrics]))
    streamed = train(folder, rows_of_ids(7).to_iterable_dataset(), objective="mdlm", gradient_accumulation_steps=2)
    if streamed.accelerator.is_main_process:
        torch.save(weights(streamed.accelerator.unwrap_model(streamed.model)), f"{folder}/stream.pt")
