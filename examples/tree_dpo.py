# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Direct preference optimisation on prefix trees.

Builds pairs from rollouts with a reward: dataset rows with `group` (the prompt's name), `messages` (the last one is
the answer) and `reward`. Each answer is chosen over every answer to the same prompt that has a lower reward.

```shell
python examples/tree_dpo.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name gsm8k_4policies.jsonl \
    --per_device_train_batch_size 4 --train_sampling_strategy sequential \
    --output_dir Qwen3-0.6B-TreeDPO
```

Pairs of one prompt are adjacent: `--train_sampling_strategy sequential` keeps them in one micro-batch, where they
share the prompt and the beginnings of their answers. Without `--model_name_or_path` the script trains a tiny model
with random weights, without `--dataset_name` on invented sums; with `--use_cpu` both run offline in seconds.
Options can come from a YAML file (`--config options.yaml`). Use `accelerate launch` for several GPUs, `--use_peft` for
LoRA, and `--stock` to train with TRL's `DPOTrainer` instead.
"""

import argparse
import gc
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset
from demo.tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config
from trl import (
    DPOConfig,
    DPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from hf_prefix_tree import TreeDPOTrainer


@dataclass
class PairScriptArguments(ScriptArguments):
    """
    Arguments of this script, besides TRL's.

    Args:
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer, if it is not the model's.
        max_pairs_per_prompt (`int`, *optional*, defaults to `4`):
            Maximum pairs per prompt.
        stock (`bool`, *optional*, defaults to `False`):
            Train with TRL's `DPOTrainer`, which computes every sequence by itself.
    """

    tokenizer_name_or_path: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's."})
    max_pairs_per_prompt: int = field(default=4, metadata={"help": "Maximum pairs per prompt."})
    stock: bool = field(default=False, metadata={"help": "Train with TRL's DPOTrainer."})


def invented_rows(prompts: int = 16, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Sums with two right and two wrong worked answers each, with the columns of real data."""
    draw = random.Random(seed)
    for number in range(prompts):
        a, b, c = (draw.randint(2, 9) for _ in range(3))
        question = f"Tom has {a} apples. He picks {b} more and gives {c} away. How many apples does he have?"
        picked, wrong = a + b, a + b + draw.choice([-1, 1])
        answers = [
            f"He has {a} + {b} = {picked} apples at first.\n{picked} - {c} = {picked - c}\nA: {picked - c}",
            f"He has {a} + {b} - {c} = {picked - c} apples.\nA: {picked - c}",
            f"He has {a} + {b} = {wrong} apples at first.\n{wrong} - {c} = {wrong - c}\nA: {wrong - c}",
            f"He has {a} + {b} = {picked} apples.\nA: {picked}",
        ]
        for trial, answer in enumerate(answers):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"group": f"sum-{number}", "trial": trial, "reward": float(trial < 2), "messages": messages}


def pairs_of(rows: Dataset, max_pairs_per_prompt: int) -> Dataset:
    """Pairs of a better and a worse answer; pairs of one prompt are adjacent."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    pairs = []
    for name, group in groups.items():
        prompt = group[0]["messages"][:-1]
        if any(row["messages"][:-1] != prompt for row in group):
            raise ValueError(f"`group` {name!r} has several prompts; give every prompt a group of its own.")
        of_prompt = [
            {"prompt": prompt, "chosen": better["messages"][-1:], "rejected": worse["messages"][-1:]}
            for better in group
            for worse in group
            if better["reward"] > worse["reward"]
        ]
        pairs += of_prompt[:max_pairs_per_prompt]
    if not pairs:
        raise ValueError("`dataset_name` has no prompt with answers of different `reward`, so there are no pairs.")
    return Dataset.from_list(pairs)


def load_pairs(arguments: PairScriptArguments, split: str) -> Dataset:
    """The pairs of a split of a Hub dataset, of a local JSON Lines file, or of the invented sums."""
    if arguments.dataset_name is None:
        rows = Dataset.from_list(list(invented_rows()))
    elif Path(arguments.dataset_name).is_file():
        rows = load_dataset("json", data_files={split: arguments.dataset_name}, split=split)
    else:
        rows = load_dataset(arguments.dataset_name, arguments.dataset_config, split=split)
    return pairs_of(rows, arguments.max_pairs_per_prompt)


def load_model(
    model_args: ModelConfig, arguments: PairScriptArguments, training_args: DPOConfig
) -> tuple[PreTrainedModel | str, PreTrainedTokenizerBase]:
    """The model (or its name, from which the trainer loads the model and the reference) and its tokenizer."""
    if model_args.model_name_or_path is not None:
        kwargs = {"dtype": model_args.dtype, "revision": model_args.model_revision}
        if model_args.attn_implementation is not None:
            kwargs["attn_implementation"] = model_args.attn_implementation
        quantization = get_quantization_config(model_args)
        if quantization is not None:
            kwargs["quantization_config"] = quantization
        training_args.model_init_kwargs = {**kwargs, **(training_args.model_init_kwargs or {})}
        name = model_args.model_name_or_path
        return name, AutoTokenizer.from_pretrained(arguments.tokenizer_name_or_path or name)
    if arguments.tokenizer_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_name_or_path)
    else:
        tokenizer = train_tokenizer(message["content"] for row in invented_rows() for message in row["messages"])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(training_args.seed)
    return AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads)), tokenizer


def main(arguments: PairScriptArguments, training_args: DPOConfig, model_args: ModelConfig) -> DPOTrainer:
    model, tokenizer = load_model(model_args, arguments, training_args)
    reference = None
    if not isinstance(model, str) and not model_args.use_peft:
        reference = AutoModelForCausalLM.from_config(model.config)
        reference.load_state_dict(model.state_dict())
    trainer_class = DPOTrainer if arguments.stock else TreeDPOTrainer
    evaluates = training_args.eval_strategy != "no"
    trainer = trainer_class(
        model=model,
        ref_model=reference,
        args=training_args,
        train_dataset=load_pairs(arguments, arguments.dataset_train_split),
        eval_dataset=load_pairs(arguments, arguments.dataset_test_split) if evaluates else None,
        processing_class=tokenizer,
        peft_config=get_peft_config(model_args),
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=os.path.basename(arguments.dataset_name or "invented sums"))
    return trainer


def make_parser(subparsers: argparse._SubParsersAction | None = None) -> argparse.ArgumentParser:
    dataclass_types = (PairScriptArguments, DPOConfig, ModelConfig)
    if subparsers is not None:
        return subparsers.add_parser("tree-dpo", help="Run tree DPO", dataclass_types=dataclass_types)
    return TrlParser(dataclass_types)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
    # A thread of gloo could abort the process at exit, so all ranks leave together, and no DDP model keeps the group.
    PartialState().wait_for_everyone()
    gc.collect()
    PartialState().destroy_process_group()
