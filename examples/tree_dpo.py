# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Direct preference optimisation on prefix trees.

Takes pairs (`prompt`, `chosen`, `rejected`), or builds them from rollouts with a reward: dataset rows with `group`
(the prompt's name), `messages` (the last one is the answer) and `reward`. Each answer is chosen over every answer to
the same prompt that has a lower reward.

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
LoRA, and `--stock` to train with TRL's `DPOTrainer` instead. For pairs it is `hf-prefix-tree train dpo`.
"""

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from datasets import Dataset
from demo.tokenizer import train_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config
from trl import DPOTrainer

from hf_prefix_tree.cli.train import PreferenceArguments, leave, load_split, parse, run


@dataclass
class PairArguments(PreferenceArguments):
    """
    Arguments of this script, besides those of `hf-prefix-tree train dpo`.

    Args:
        max_pairs_per_prompt (`int`, *optional*, defaults to `4`):
            Maximum pairs per prompt that are built from rollouts.
    """

    max_pairs_per_prompt: int = field(default=4, metadata={"help": "Maximum pairs per prompt."})


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


def tiny_model(
    arguments: PairArguments, seed: int
) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]:
    """A model with random weights, the same as a reference, and their tokenizer."""
    if arguments.tokenizer_name_or_path is not None:
        tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer_name_or_path)
    else:
        tokenizer = train_tokenizer(message["content"] for row in invented_rows() for message in row["messages"])
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads))
    reference = AutoModelForCausalLM.from_config(model.config)
    reference.load_state_dict(model.state_dict())
    return model, reference, tokenizer


def main(options: Sequence[str]) -> DPOTrainer:
    arguments, args, model_args = parse("dpo", options, PairArguments)
    parts: dict[str, Any] = {}
    if model_args.model_name_or_path is None:
        model, reference, tokenizer = tiny_model(arguments, args.seed)
        parts = {"model": model, "tokenizer": tokenizer, "ref_model": None if model_args.use_peft else reference}
    splits = [arguments.dataset_train_split, *([arguments.dataset_test_split] if args.eval_strategy != "no" else [])]
    if arguments.dataset_name is None:
        datasets = [Dataset.from_list(list(invented_rows()))] * len(splits)
    else:
        datasets = [load_split(arguments, split, args) for split in splits]
    datasets = [
        rows if "chosen" in rows.column_names else pairs_of(rows, arguments.max_pairs_per_prompt) for rows in datasets
    ]
    return run("dpo", arguments, args, model_args, datasets=datasets, **parts)


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
