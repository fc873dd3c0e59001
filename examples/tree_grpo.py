# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Group relative policy optimisation on prefix trees. The reward is a rule: the last number must be the answer.

Dataset rows are problems with an answer (`question` and `answer`, as in GSM8K; the answer's last number counts), or
rollouts with a reward (`group`, `messages`, `reward`): each prompt is used once, with the answer of a right rollout.

```shell
python examples/tree_grpo.py \
    --model_name_or_path Qwen/Qwen3-0.6B \
    --dataset_name gsm8k_4policies.jsonl \
    --num_generations 16 --per_device_train_batch_size 16 --max_completion_length 512 \
    --output_dir Qwen3-0.6B-TreeGRPO
```

Without `--model_name_or_path` the script trains a tiny model with random weights, without `--dataset_name` on invented
sums; with `--use_cpu` both run offline, on a CPU, in minutes (with `--max_steps 5 --max_completion_length 32` in
seconds). Options can come from a YAML file (`--config options.yaml`). Use `accelerate launch` for several GPUs,
`--use_peft` for LoRA, `--use_vllm` to generate with vLLM, and `--stock` to train with TRL's `GRPOTrainer` instead.
"""

import argparse
import gc
import os
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset
from demo.tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config
from trl import (
    GRPOConfig,
    GRPOTrainer,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)

from hf_prefix_tree import TreeGRPOTrainer


@dataclass
class RolloutScriptArguments(ScriptArguments):
    """
    Arguments of this script, besides TRL's.

    Args:
        tokenizer_name_or_path (`str`, *optional*):
            Tokenizer, if it is not the model's.
        max_row_tokens (`int`, *optional*, defaults to `0`):
            Maximum tokens of one forward, if memory allows more than `per_device_train_batch_size` padded sequences.
        stock (`bool`, *optional*, defaults to `False`):
            Train with TRL's `GRPOTrainer`, which computes every sequence by itself.
    """

    tokenizer_name_or_path: str | None = field(default=None, metadata={"help": "Tokenizer, if not the model's."})
    max_row_tokens: int = field(default=0, metadata={"help": "Maximum tokens of one forward."})
    stock: bool = field(default=False, metadata={"help": "Train with TRL's GRPOTrainer."})


def last_number(text: str) -> float | None:
    """The last number in a text (`"1,234 / 2 = $617."` has 617), or `None`."""
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def right_answer(completions: list[list[dict[str, str]]], answer: list[float], **kwargs: Any) -> list[float]:
    """1 if the completion's last number is the answer, else 0."""
    numbers = [last_number(completion[-1]["content"]) for completion in completions]
    return [float(number == expected) for number, expected in zip(numbers, answer, strict=True)]


def states_a_number(completions: list[list[dict[str, str]]], **kwargs: Any) -> list[float]:
    """0.2 if the completion has any number: a signal before the first right answer."""
    return [0.2 * (last_number(completion[-1]["content"]) is not None) for completion in completions]


def invented_rows(prompts: int = 32, seed: int = 0) -> Iterator[dict[str, str]]:
    """Sums with their answers."""
    draw = random.Random(seed)
    for _ in range(prompts):
        a, b, c = (draw.randint(2, 9) for _ in range(3))
        question = f"Tom has {a} apples. He picks {b} more and gives {c} away. How many apples does he have?"
        yield {"question": question, "answer": f"He has {a} + {b} - {c} = {a + b - c} apples."}


def problems_of(rows: Dataset) -> Dataset:
    """Prompts (`prompt`, a conversation) and their answers (`answer`, a number)."""
    if "messages" in rows.column_names:
        right = {row["group"]: row["messages"] for row in rows if row["reward"] > 0}
        if missing := len({row["group"] for row in rows}) - len(right):
            print(f"{missing} of {missing + len(right)} prompts have no right rollout to take the answer from.")
        pairs = [(messages[:-1], messages[-1]["content"]) for messages in right.values()]
    else:
        pairs = [([{"role": "user", "content": row["question"]}], row["answer"]) for row in rows]
    problems = [{"prompt": prompt, "answer": last_number(text)} for prompt, text in pairs]
    if not problems or any(problem["answer"] is None for problem in problems):
        raise ValueError("`dataset_name` has no prompts, or an answer without a number.")
    return Dataset.from_list(problems)


def load_problems(arguments: RolloutScriptArguments, split: str) -> Dataset:
    """The problems of a split of a Hub dataset, of a local JSON Lines file, or invented ones."""
    if arguments.dataset_name is None:
        return problems_of(Dataset.from_list(list(invented_rows())))
    if Path(arguments.dataset_name).is_file():
        return problems_of(load_dataset("json", data_files={split: arguments.dataset_name}, split=split))
    return problems_of(load_dataset(arguments.dataset_name, arguments.dataset_config, split=split))


def load_model(
    model_args: ModelConfig, arguments: RolloutScriptArguments, training_args: GRPOConfig
) -> tuple[str, PreTrainedTokenizerBase]:
    """Name or folder of the model (the trainer loads the reference from it as well), and its tokenizer."""
    tokenizer_name = arguments.tokenizer_name_or_path or model_args.model_name_or_path
    if tokenizer_name is not None:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, padding_side="left")
    else:
        tokenizer = train_tokenizer((text for row in invented_rows() for text in row.values()), vocab_size=400)
    if model_args.model_name_or_path is not None:
        kwargs = {"dtype": model_args.dtype, "revision": model_args.model_revision}
        if model_args.attn_implementation is not None:
            kwargs["attn_implementation"] = model_args.attn_implementation
        training_args.model_init_kwargs = {**kwargs, **(training_args.model_init_kwargs or {})}
        return model_args.model_name_or_path, tokenizer
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(training_args.seed)
    folder = os.path.join(training_args.output_dir, "start")
    if PartialState().is_local_main_process:  # other processes would overwrite the files that it loads
        model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads))
        model.save_pretrained(folder)
    PartialState().wait_for_everyone()
    return folder, tokenizer


def main(arguments: RolloutScriptArguments, training_args: GRPOConfig, model_args: ModelConfig) -> GRPOTrainer:
    model, tokenizer = load_model(model_args, arguments, training_args)
    trainer_class = GRPOTrainer if arguments.stock else TreeGRPOTrainer
    evaluates = training_args.eval_strategy != "no"
    trainer = trainer_class(
        model=model,
        reward_funcs=[right_answer, states_a_number],
        args=training_args,
        train_dataset=load_problems(arguments, arguments.dataset_train_split),
        eval_dataset=load_problems(arguments, arguments.dataset_test_split) if evaluates else None,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    trainer.max_row_tokens = arguments.max_row_tokens
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    trainer.save_model(training_args.output_dir)
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=os.path.basename(arguments.dataset_name or "invented sums"))
    return trainer


def make_parser(subparsers: argparse._SubParsersAction | None = None) -> argparse.ArgumentParser:
    dataclass_types = (RolloutScriptArguments, GRPOConfig, ModelConfig)
    if subparsers is not None:
        return subparsers.add_parser("tree-grpo", help="Run tree GRPO", dataclass_types=dataclass_types)
    return TrlParser(dataclass_types)


if __name__ == "__main__":
    main(*make_parser().parse_args_and_config())
    # A thread of gloo could abort the process at exit, so all ranks leave together, and no DDP model keeps the group.
    PartialState().wait_for_everyone()
    gc.collect()
    PartialState().destroy_process_group()
