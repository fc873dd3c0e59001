# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Group relative policy optimisation of an agent with a tool, in a world that needs no network.

A box holds a colour that is drawn anew for every task. Only the tool `look` tells it, so a policy that guesses is
right once in eight times. Each turn is sampled and trained as a serving loop has it (`rollout_rows="as_sampled"`).

```shell
python examples/agent_grpo.py --model_name_or_path Qwen/Qwen3-0.6B --num_generations 16 \
    --per_device_train_batch_size 16 --max_completion_length 1024 --output_dir Qwen3-0.6B-Agent
```

Without `--model_name_or_path` the script makes a tiny model that has seen the format, and looks in half of the tasks;
with `--use_cpu` it learns to look in minutes. Then the rewards of held-out tasks are printed: its own, and that of a
random policy.
"""

import json
import os
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset
from demo.tokenizer import train_tokenizer
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import get_json_schema
from trl.chat_template_utils import qwen3_template

from hf_prefix_tree import TreeGRPOTrainer
from hf_prefix_tree.cli.train import leave, parse, run

COLOURS = ("red", "blue", "green", "white", "black", "pink", "brown", "gold")
NUM_BOXES = 8
NUM_HELD_OUT = 64


class World:
    """A box with a colour in it, of which TRL makes one per rollout. Its method is the tool."""

    def reset(self, seed: int, box: int, **row: Any) -> None:
        self.box, self.colour = box, random.Random(seed).choice(COLOURS)

    def look(self, box: int) -> str:
        """
        Looks into a box.

        Args:
            box: The number of the box.
        """
        return self.colour if int(box) == self.box else "empty"


def names_the_colour(completions: list[list[dict[str, Any]]], environments: list[World], **kwargs: Any) -> list[float]:
    """1 if the last message names the colour in the box and no other one."""
    last = [completion[-1].get("content") or "" for completion in completions]
    named = [[colour for colour in COLOURS if colour in text.lower()] for text in last]
    return [float(colours == [world.colour]) for colours, world in zip(named, environments, strict=True)]


def tasks(number: int, first_seed: int) -> Dataset:
    """Tasks of different seeds, so that colours of one set tell nothing about those of another."""
    rows = [{"seed": seed, "box": seed % NUM_BOXES} for seed in range(first_seed, first_seed + number)]
    return Dataset.from_list([{"prompt": [question(row["box"])], **row} for row in rows])


def random_reward(rows: Dataset, rollouts: int, seed: int = 0) -> float:
    """The mean reward of a random policy, which names a colour without looking, in as many rollouts of each task."""
    draw = random.Random(seed)
    worlds, completions = [], []
    for row in rows:
        for _ in range(rollouts):
            worlds.append(World())
            worlds[-1].reset(**row)
            completions.append([{"role": "assistant", "content": f"It is {draw.choice(COLOURS)}."}])
    return sum(names_the_colour(completions, worlds)) / len(worlds)


def question(box: int) -> dict[str, str]:
    return {"role": "user", "content": f"Which colour is in box {box}?"}


def demonstration(draw: random.Random) -> list[dict[str, Any]]:
    """A right format: the agent looks in half of the tasks, and guesses in the others."""
    box, colour = draw.randrange(NUM_BOXES), draw.choice(COLOURS)
    answer = {"role": "assistant", "content": f"It is {colour}."}
    if draw.random() < 0.5:
        return [question(box), answer]
    call = {"type": "function", "function": {"name": "look", "arguments": {"box": box}}}
    looking = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [question(box), looking, {"role": "tool", "name": "look", "content": colour}, answer]


def tiny_model(folder: str, seed: int, steps: int = 320) -> PreTrainedTokenizerBase:
    """Saves a model that has seen demonstrations; returns its tokenizer."""
    draw = random.Random(seed)
    tools = [get_json_schema(World.look)]
    talks = [demonstration(draw) for _ in range(2000)]
    tokenizer = train_tokenizer([json.dumps(talk) for talk in talks] + [json.dumps(tools)] * 200, vocab_size=450)
    tokenizer.response_template = qwen3_template
    tokenizer.padding_side = "left"
    if not PartialState().is_main_process:
        PartialState().wait_for_everyone()
        return tokenizer
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.15,
    }  # large: copying is learnt soon
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **sizes, **heads, **tokens))
    texts = [tokenizer.apply_chat_template(talk, tools=tools, tokenize=False) for talk in talks]
    prompt = tokenizer.apply_chat_template(talks[0][:1], tools=tools, add_generation_prompt=True, return_dict=False)
    num_prompt_tokens = len(prompt)  # alike for all boxes, which are one token each
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = tokenizer(draw.choices(texts, k=16), return_tensors="pt", padding=True, padding_side="right")
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        labels[:, :num_prompt_tokens] = -100
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    PartialState().wait_for_everyone()
    return tokenizer


def main(options: Sequence[str]) -> TreeGRPOTrainer:
    arguments, args, model_args = parse("grpo", ["--rollout_rows", "as_sampled", *options])
    parts: dict[str, Any] = {}
    if model_args.model_name_or_path is None:
        parts["model"] = os.path.join(args.output_dir, "start")
        parts["tokenizer"] = tiny_model(parts["model"], args.seed)
    trainer = run(
        "grpo",
        arguments,
        args,
        model_args,
        datasets=[tasks(256, 0)],
        reward_funcs=[names_the_colour],
        environment_factory=World,
        **parts,
    )
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    held_out = tasks(NUM_HELD_OUT, 10_000)
    at_random, trained = random_reward(held_out, args.num_generations), trainer.evaluate(held_out)["eval_reward"]
    print(
        f"Reward of held-out tasks: {at_random:.3f} of a random policy ({1 / len(COLOURS):.3f} expected), "
        f"{trained:.3f} after training. Logged in the first step: {rewards[0]:.3f}."
    )
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
    leave()
