# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Fine-tune a causal LM as a diffusion language model, and generate with it.

Without arguments the script trains a tiny random model on invented sentences ("Anna calls Ben." becomes "Ben is called
by Anna."), which takes a minute on a CPU and needs no network:

```shell
python examples/diffusion_sft.py
python examples/diffusion_sft.py --objective hybrid
```

It also takes a model and a Hub dataset or a JSON Lines file, in any form that `DiffusionSFTTrainer` reads (`messages`,
`prompt` + `completion`, token ids with a `loss_mask`):

```shell
python examples/diffusion_sft.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name dialogues.jsonl \
    --objective block --block_size 32 --eval_strategy epoch \
    --output_dir Qwen3-0.6B-Diffusion
```

Training and evaluation use the same rows of a JSON Lines file. Options can come from a YAML file (`--config
options.yaml`). Use `accelerate launch` for several GPUs, `--use_peft` for LoRA, and `--use_cpu` without a GPU.
"""

import itertools
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import log
from typing import Any

import torch
from datasets import Dataset
from demo.tokenizer import train_tokenizer
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from hf_prefix_tree import DiffusionSFTTrainer, diffusion_generate
from hf_prefix_tree.cli.train import MASK_TOKEN, WeightsArguments, leave, parse, run
from hf_prefix_tree.report.text import console

NAMES = ("Anna", "Ben", "Carl", "Dora", "Emma", "Finn", "Gina", "Hugo", "Iris", "Jack", "Kate", "Leo")
VERBS = {"calls": "called", "helps": "helped", "thanks": "thanked", "asks": "asked", "visits": "visited"}
# Defaults for the tiny model; options on the command line take precedence.
DEMO: dict[str, Any] = {
    "objective": "block",
    "block_size": 4,
    "learning_rate": 5e-3,
    "warmup_steps": 20,
    "max_steps": 150,
    "per_device_train_batch_size": 64,
    "per_device_eval_batch_size": 64,
    "eval_noise_draws": 16,
    "gradient_checkpointing": False,
    "bf16": False,
    "logging_steps": 50,
    "eval_strategy": "steps",
    "eval_steps": 50,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "output_dir": "diffusion-demo",
    "max_new_tokens": 8,
}


@dataclass
class DiffusionScriptArguments(WeightsArguments):
    """
    Arguments of this script, besides those of `hf-prefix-tree train diffusion`.

    Args:
        num_prompts (`int`, *optional*, defaults to `8`):
            Number of prompts of the test split to complete at the end.
        max_new_tokens (`int`, *optional*, defaults to `64`):
            Maximum tokens of a completion.
    """

    num_prompts: int = field(default=8, metadata={"help": "Number of prompts of the test split to complete."})
    max_new_tokens: int = field(default=64, metadata={"help": "Maximum tokens of a completion."})


def demo_rows(seed: int = 0, held_out: int = 64) -> tuple[Dataset, Dataset]:
    """Sentences and their passive voice; no combination of the test split is in the training split."""
    rows = [
        {"prompt": f"{subject} {verb} {object_}.", "completion": f" {object_} is {VERBS[verb]} by {subject}."}
        for subject, verb, object_ in itertools.product(NAMES, VERBS, NAMES)
        if subject != object_
    ]
    random.Random(seed).shuffle(rows)
    return Dataset.from_list(rows[held_out:]), Dataset.from_list(rows[:held_out])


def demo_tokenizer(rows: Dataset) -> PreTrainedTokenizerBase:
    """One token per word, both with a space before it and at the start of a sentence."""
    tokenizer = train_tokenizer([row["prompt"] + row["completion"] for row in rows], vocab_size=384)
    tokenizer.add_special_tokens({"mask_token": MASK_TOKEN})
    return tokenizer


def demo_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(config)


def unigram_entropy(trainer: DiffusionSFTTrainer) -> float:
    """Entropy in nats of the evaluation set's supervised tokens: the NLL of knowing only their frequencies."""
    counts: Counter[int] = Counter()
    for row in trainer.eval_dataset:
        labels = trainer.data_collator([row])["labels"]  # including the EOS tokens that fill the last block
        counts.update(labels[labels >= 0].tolist())
    total = sum(counts.values())
    return -sum(count / total * log(count / total) for count in counts.values())


def complete(trainer: DiffusionSFTTrainer, num_prompts: int, max_new_tokens: int) -> list[tuple[str, str, str]]:
    """Prompt, reference and completion for the first samples of the evaluation set."""
    tokenizer, args = trainer.processing_class, trainer.args
    texts = []
    for row in itertools.islice(trainer.eval_dataset, num_prompts):
        batch = trainer.data_collator([row])
        ids = batch["input_ids"][0, : batch["input_lengths"][0]]
        start = int(batch["loss_mask"][0].argmax())  # the prompt as in training
        generated = diffusion_generate(
            trainer.accelerator.unwrap_model(trainer.model),
            ids[None, :start].to(args.device),
            max_new_tokens,
            args.block_size,
            trainer.mask_token_id,
            objective=args.objective,
            response_window=args.response_window,
            eos_token_id=tokenizer.eos_token_id,
        )
        parts = (ids[:start], ids[start:], generated[0, start:])
        texts.append(tuple(tokenizer.decode(part, skip_special_tokens=True).strip() for part in parts))
    return texts


def main(options: Sequence[str]) -> DiffusionSFTTrainer:
    is_demo = not any(option.split("=")[0] in ("--model_name_or_path", "--config") for option in options)
    arguments, args, model_args = parse("diffusion", options, DiffusionScriptArguments, DEMO if is_demo else {})
    parts: dict[str, Any] = {}
    if model_args.model_name_or_path is None:
        rows = demo_rows()
        tokenizer = demo_tokenizer(rows[0])
        evaluates = args.eval_strategy != "no"
        parts = {"datasets": rows if evaluates else rows[:1], "tokenizer": tokenizer, "model": demo_model(tokenizer)}
    trainer = run("diffusion", arguments, args, model_args, **parts)
    if trainer is not None and trainer.eval_dataset is not None and trainer.is_world_process_zero():
        report(trainer, arguments)
    return trainer


def report(trainer: DiffusionSFTTrainer, arguments: DiffusionScriptArguments) -> None:
    """Prints the last NLL bound beside the unigram entropy, and some completions."""
    bounds = [entry["eval_nll_bound"] for entry in trainer.state.log_history if "eval_nll_bound" in entry]
    if bounds:
        print(f"NLL bound {bounds[-1]:.3f}, unigram entropy {unigram_entropy(trainer):.3f} nats per token.")
    if trainer.mask_token_id is None:  # trained with `--corruption random`, for which there is no sampler
        return
    table = Table("prompt", "reference", "completion")
    for row in complete(trainer, arguments.num_prompts, arguments.max_new_tokens):
        table.add_row(*row)
    console().print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
