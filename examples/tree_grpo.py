# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Group relative policy optimisation on prefix trees. The reward is a rule: the last number must be the answer.

Dataset rows are problems with an answer (`question` or `prompt`, and `answer`, as in GSM8K; the answer's last number
counts), or rollouts with a reward (`group`, `messages`, `reward`): each prompt is used once, with the answer of a
right rollout.

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
With rewards of your own it is `hf-prefix-tree train grpo --reward_funcs module.function`.
"""

import os
import random
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from demo.tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3Config
from trl import GRPOTrainer

from hf_prefix_tree import TreeGRPOConfig
from hf_prefix_tree.cli.train import PolicyArguments, leave, load_split, parse, run


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
        column = "prompt" if "prompt" in rows.column_names else "question"
        pairs = [(row[column], row["answer"]) for row in rows]
        pairs = [([{"role": "user", "content": p}] if isinstance(p, str) else p, answer) for p, answer in pairs]
    problems = [{"prompt": prompt, "answer": last_number(text)} for prompt, text in pairs]
    if not problems or any(problem["answer"] is None for problem in problems):
        raise ValueError("`dataset_name` has no prompts, or an answer without a number.")
    return Dataset.from_list(problems)


def tiny_model(arguments: PolicyArguments, args: TreeGRPOConfig) -> tuple[str, PreTrainedTokenizerBase]:
    """Folder of a model with random weights, from which the trainer loads the reference as well, and its tokenizer."""
    if arguments.tokenizer_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_name_or_path, padding_side="left")
    else:
        tokenizer = train_tokenizer((text for row in invented_rows() for text in row.values()), vocab_size=400)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(args.seed)
    folder = os.path.join(args.output_dir, "start")
    if PartialState().is_local_main_process:  # other processes would overwrite the files that it loads
        model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads))
        model.save_pretrained(folder)
    PartialState().wait_for_everyone()
    return folder, tokenizer


def main(options: Sequence[str]) -> GRPOTrainer:
    arguments, args, model_args = parse("grpo", options)
    parts: dict[str, Any] = {}
    if model_args.model_name_or_path is None:
        folder, tokenizer = tiny_model(arguments, args)
        parts = {"model": folder, "tokenizer": tokenizer}
    splits = [arguments.dataset_train_split, *([arguments.dataset_test_split] if args.eval_strategy != "no" else [])]
    if arguments.dataset_name is None:
        datasets = [Dataset.from_list(list(invented_rows()))] * len(splits)
    else:
        datasets = [load_split(arguments, split, args) for split in splits]
    rewards = [right_answer, states_a_number]
    problems = [problems_of(rows) for rows in datasets]
    return run("grpo", arguments, args, model_args, datasets=problems, reward_funcs=rewards, **parts)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
