# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Do the contexts that an agent is served with make better models? The same dialogues, trained in three ways.

    python -m benchmarks.contexts --model FOLDER --gguf FILE.gguf --data dialogues.jsonl --tools dialogues.tools.json

- `stock`: TRL's `SFTTrainer` on whole conversations, `assistant_only_loss=True` (with TRL's own training template),
  `packing="bfd"`. Where the template strips earlier reasoning, the model never sees it, and earlier turns stand in
  contexts that no agent loop serves.
- `flat`: TRL's `SFTTrainer` on flat steps: consecutive turns in the contexts they are served with, merged as long as
  each extends the last.
- `tree`: `TreeSFTTrainer` on the same flat steps, folded by `group`: the same loss in fewer tokens.

All start from the same weights, with the same learning rate and packed sequences of the same length, one per step, and
train for `--seconds` of wall time after the first step. `held_out` is the loss per token on held-out dialogues: every
assistant turn, reasoning included, in the context that the agent loop serves. `before` is that of the weights at the
start.

Without `--data` the dialogues are a synthetic tool world: a slot is computed in the reasoning of the first turn, which
the template strips, and the last turn needs it again. Data files are split by `group`: every fourth one is held out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen3_chat_template

from benchmarks.common import Row, default_device, make_parser, progress, report
from benchmarks.flops import shape_config
from benchmarks.trainers import best_attention
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
from hf_prefix_tree.cli.train import expanded
from hf_prefix_tree.data.baselines import flat_steps
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.tree.prefix_tree import Branch, fold

SIDES = ("stock", "flat", "tree")
COLUMNS = ["data", "side", "seed", "seconds", "steps", "tokens", "train_loss", "before", "held_out", "failure"]


class Clock(TrainerCallback):
    """Stops a training after so many seconds, counted from the end of its first step."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.start = seconds, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if state.global_step == 1:
            self.start = time.perf_counter()
        control.should_training_stop = time.perf_counter() - self.start >= self.seconds


def tool_world(count: int, seed: int) -> list[Row]:
    """Dialogues of two user turns. The slot of the first is worked out in reasoning that later turns no longer see."""
    draw = random.Random(seed)
    rows = []
    for number in range(count):
        left, right, key = draw.randrange(10, 100), draw.randrange(10, 100), draw.randrange(2, 10)
        total, slot = left + right, (left + right) % 7
        call = {"type": "function", "function": {"name": "store", "arguments": {"slot": slot}}}
        messages = [
            {"role": "user", "content": f"Store a box of {left} red and {right} blue balls."},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": f"{left} + {right} = {total}. {total} mod 7 = {slot}.",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "done"},
            {"role": "assistant", "content": "It is stored.", "reasoning_content": "The box is in its slot."},
            {"role": "user", "content": f"What is the number of its slot times {key}?"},
            {
                "role": "assistant",
                "content": f"{slot * key}",
                "reasoning_content": f"{left} + {right} = {total}, mod 7 is {slot}. {slot} * {key} = {slot * key}.",
            },
        ]
        rows.append({"group": str(number), "messages": messages, "tools": [STORE]})
    return rows


STORE = {
    "type": "function",
    "function": {
        "name": "store",
        "description": "Store a box.",
        "parameters": {"type": "object", "properties": {"slot": {"type": "integer"}}, "required": ["slot"]},
    },
}


def read_dialogues(path: Path, tools: Path | None) -> list[Row]:
    schemas = json.loads(tools.read_text()) if tools is not None else None
    rows = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        of_row = schemas[row["group"]] if isinstance(schemas, dict) else schemas
        rows.append({"group": row["group"], "messages": row["messages"], "tools": of_row})
    return rows


def split(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows: every fourth group."""
    groups = list(dict.fromkeys(row["group"] for row in rows))
    held_out = set(groups[3::4])
    return [row for row in rows if row["group"] not in held_out], [row for row in rows if row["group"] in held_out]


def turns(row: Row, tokenizer: Any, max_length: int) -> list[Branch]:
    """The assistant turns of a dialogue, each in its served context; those that don't fit are left out."""
    found = conversation_branches(row["messages"], tokenizer, tools=row["tools"]).branches
    return [branch for branch in found if len(branch) <= max_length]


def flat_rows(rows: list[Row], tokenizer: Any, max_length: int) -> dict[str, list[Row]]:
    """The flat steps of the dialogues, by group."""
    by_group: dict[str, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row["group"], []).extend(flat_steps(turns(row, tokenizer, max_length)))
    return by_group


def as_branch(row: Row) -> Branch:
    return Branch(row["input_ids"], [float(label != -100) for label in row["labels"]])


def make_trainer(side: str, seed: int, data: dict[str, Any], args: argparse.Namespace, folder: str) -> SFTTrainer:
    options: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": 1_000_000,  # the clock stops it
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        "learning_rate": args.learning_rate,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch" if args.quick else "adamw_torch_fused",
        "bf16": not args.quick,
        "use_cpu": args.quick,
        "logging_steps": 10,
        "logging_first_step": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": seed,
    }
    if side == "tree":
        config = TreeSFTConfig(**options, weighting="branch", max_packed_tokens=args.sequence_tokens)
        rows, kind = data["trees"], TreeSFTTrainer
    else:
        config = SFTConfig(
            **options, packing=True, max_length=args.sequence_tokens, assistant_only_loss=side == "stock"
        )
        rows, kind = data[side], SFTTrainer
    model = load_model(args, "prefix_tree" if side == "tree" else args.attention)
    return kind(model=model, args=config, train_dataset=rows, processing_class=data["tokenizer"])


def load_model(args: argparse.Namespace, attention: str) -> PreTrainedModel:
    if args.model is None:
        torch.manual_seed(0)
        config = shape_config("quick")
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    loaded = AutoModelForCausalLM.from_pretrained(args.model, gguf_file=args.gguf, dtype=torch.float32)
    if args.gguf is None:
        loaded.set_attn_implementation(attention)
        return loaded
    return expanded(loaded, attention)


def held_out_loss(model: PreTrainedModel, data: dict[str, Any], args: argparse.Namespace, folder: str) -> float:
    """Loss per supervised token of the held-out turns, by the tree path for every side."""
    config = TreeSFTConfig(
        folder, weighting="branch", max_packed_tokens=args.sequence_tokens,
        bf16=not args.quick, use_cpu=args.quick, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    model.set_attn_implementation("prefix_tree")
    trainer = TreeSFTTrainer(
        model=model, args=config, train_dataset=data["held_out"], eval_dataset=data["held_out"],
        processing_class=data["tokenizer"],
    )  # fmt: skip
    return trainer.evaluate()["eval_loss"]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SIDES)
    parser.add_argument("--model", help="folder or name of a model; a tiny random one by default")
    parser.add_argument("--gguf", help="GGUF file in that folder")
    parser.add_argument("--data", type=Path, nargs="+", help="JSONL files with `group` and `messages`")
    parser.add_argument("--tools", type=Path, nargs="+", help="JSON files with their tools, in the same order")
    parser.add_argument("--name", help="what the column `data` says")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=8192, help="longest turn with its context, in tokens")
    parser.add_argument(
        "--sequence-tokens", type=int, default=32_768, help="tokens of a packed sequence, of every side"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-5)
    parser.add_argument("--attention", help="attention of TRL's side (default: the best that is installed)")
    args = parser.parse_args(argv)
    device = default_device(args.quick)
    if args.quick:
        args.seconds, args.seeds, args.max_length, args.sequence_tokens = 0.0, 1, 2048, 4096
    args.attention = args.attention or ("sdpa" if args.quick else best_attention())
    if args.data is None:
        dialogues = tool_world(40 if args.quick else 400, seed=0)
    else:
        tools = args.tools or [None] * len(args.data)
        dialogues = [row for pair in zip(args.data, tools, strict=True) for row in read_dialogues(*pair)]
    if args.model is None:
        tokenizer = train_tokenizer([json.dumps(row["messages"]) for row in dialogues], vocab_size=512)
    else:
        tokenizer = AutoTokenizer.from_pretrained(args.model, gguf_file=args.gguf)
    tokenizer.chat_template = qwen3_chat_template
    train, test = split(dialogues)
    flat = flat_rows(train, tokenizer, args.max_length)
    trees = [fold([as_branch(row) for row in rows]) for rows in flat.values() if rows]
    served = [branches for row in test if (branches := turns(row, tokenizer, args.max_length))]
    data = {
        "tokenizer": tokenizer,
        "stock": Dataset.from_list(
            [{"messages": row["messages"], "tools": json.dumps(row["tools"])} for row in train]
        ),
        "flat": Dataset.from_list([row for rows in flat.values() for row in rows]),
        "trees": Dataset.from_list([tree.to_dict() for tree in trees]),
        "held_out": Dataset.from_list([fold(branches).to_dict() for branches in served]),
    }
    name = args.name or ("tool world" if args.data is None else ", ".join(path.stem for path in args.data))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        before = held_out_loss(load_model(args, "prefix_tree").to(device), data, args, folder)
        for seed in range(args.seeds):
            for side in args.only:
                gc.collect()
                trainer, clock = make_trainer(side, seed, data, args, folder), Clock(args.seconds)
                trainer.add_callback(clock)
                trainer.train()
                history = trainer.state.log_history
                losses = [entry["loss"] for entry in history if "loss" in entry]
                tokens = max((entry.get("num_tokens", 0) for entry in history), default=0)
                row = {"data": name, "side": side, "seed": seed, "seconds": args.seconds}
                row |= {"steps": trainer.state.global_step, "tokens": tokens, "train_loss": losses[-1]}
                model = trainer.accelerator.unwrap_model(trainer.model)
                del trainer
                loss = held_out_loss(model, data, args, folder)
                assert math.isfinite(loss)
                progress(rows, row | {"before": before, "held_out": loss})
    return report(rows, COLUMNS, device, args)


if __name__ == "__main__":
    main(sys.argv[1:])
