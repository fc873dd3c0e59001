# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Do the contexts that an agent is served with make better models? The same dialogues, trained in three ways.

    python -m benchmarks.contexts --prepared FOLDER --gguf FILE.gguf --data DATA   # on a CPU: writes FOLDER
    python -m benchmarks.contexts --prepared FOLDER --gguf FILE.gguf --output contexts.csv

- `stock`: TRL's `SFTTrainer` on whole conversations, `assistant_only_loss=True` (with TRL's own training template),
  `packing="bfd"`. If the template strips earlier reasoning, the model never sees it, and earlier turns have
  contexts that no agent loop serves.
- `flat`: TRL's `SFTTrainer` on flat steps: consecutive turns in the contexts they are served with, merged as long as
  each extends the previous one.
- `tree`: `TreeSFTTrainer` on the same flat steps, folded by `group`: the same loss in fewer tokens.

All start from the same weights, with the same learning rate and packed sequences of the same length, one per step, and
train one after the other on an otherwise idle GPU. `held_out` is the loss per token on held-out tasks: every assistant
turn, reasoning included, in the context that the agent loop serves. It is taken after `--seconds` of training, after
half of them, a quarter, and so on, `--evaluations` times; the clock starts after the first step and is stopped during
evaluation. `before` is the loss of the initial weights. Because small data is soon overfitted, the last table shows,
for every arm, the means over seeds of the lowest and the last held-out loss of a run.

Every seed orders the data differently and holds out a different quarter of the groups (tasks). The data are
`tool-world` (synthetic: a slot is computed in the reasoning of the first turn, which the template strips, and the last
turn needs it again), `reasoning` and `airline` (agent dialogues of the folder `DATA`).
"""

from __future__ import annotations

import argparse
import copy
import gc
import gzip
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, TrainerCallback
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen3_chat_template

from benchmarks.common import Row, best_attention, default_device, make_parser, print_table, progress, report
from benchmarks.flops import shape_config
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import DataCollatorForPrefixTree, TreeSFTConfig, TreeSFTTrainer, prepare_model
from hf_prefix_tree.cli.train import expanded
from hf_prefix_tree.data.baselines import flat_steps, per_branch
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.modeling.batch import decode_weights
from hf_prefix_tree.tree.packing import pack_rows
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

ARMS = ("stock", "flat", "tree")
FILES = {
    "tool-world": (),
    "reasoning": ("conversational_reasoning", "reasoning_tools_multitrial"),
    "airline": ("tau_bench_airline",),
}
COLUMNS = ["data", "arm", "seed", "seconds", "steps", "before", "held_out"]


def tool_world(count: int, seed: int) -> list[Row]:
    """Dialogues of two user turns. The slot of the first is computed in reasoning that later turns no longer see."""
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


def read_dialogues(data: Path, name: str, count: int) -> list[Row]:
    if name == "tool-world":
        return tool_world(count, seed=0)
    rows = []
    for file in FILES[name]:
        tools = json.loads((data / f"{file}.tools.json").read_text())
        for row in map(json.loads, (data / f"{file}.jsonl").read_text().splitlines()):
            of_row = tools[row["group"]] if isinstance(tools, dict) else tools
            rows.append({"group": row["group"], "messages": row["messages"], "tools": of_row})
    return rows


def turns(row: Row, tokenizer: Any, max_length: int) -> list[Branch]:
    """The assistant turns of a dialogue up to the first that is too long; `row` is cut there, for every arm."""
    branches = conversation_branches(row["messages"], tokenizer, tools=row["tools"]).branches
    fitting = list(itertools.takewhile(lambda branch: len(branch) <= max_length, branches))
    ends = [end for end, message in enumerate(row["messages"], 1) if message["role"] == "assistant"]
    assert len(ends) == len(branches), "every assistant turn is a branch"
    row["messages"] = row["messages"][: ends[len(fitting) - 1] if fitting else 0]
    return fitting


def as_branch(row: Row) -> Branch:
    return Branch(row["input_ids"], [float(label != -100) for label in row["labels"]])


def prepare(rows: list[Row], tokenizer: Any, max_length: int, path: Path) -> None:
    """Writes one line per group: the tree of its flat steps, and its whole conversations as TRL prepares them."""
    steps: dict[str, list[Row]] = {}
    for row in rows:
        steps.setdefault(row["group"], []).extend(flat_steps(turns(row, tokenizer, max_length)))
    whole = [
        {"group": row["group"], "messages": row["messages"], "tools": json.dumps(row["tools"])}
        for row in rows
        if row["messages"]
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(folder, assistant_only_loss=True, max_length=None, bf16=False, use_cpu=True)
        model = AutoModelForCausalLM.from_config(shape_config("quick"))
        stock = SFTTrainer(model, config, train_dataset=Dataset.from_list(whole), processing_class=tokenizer)
        conversations = stock.train_dataset.to_list()
    with gzip.open(path, "wt") as file:
        for group, flat in steps.items():
            tree = fold(map(as_branch, flat), weighting="branch").to_dict()
            of_group = [
                {name: row[name] for name in ("input_ids", "labels")} for row in conversations if row["group"] == group
            ]
            line = {"group": group, "tree": tree, "stock": of_group}
            file.write(json.dumps(line, default=np.ndarray.tolist) + "\n")


def training_data(groups: list[Row], arm: str) -> Dataset:
    if arm == "stock":
        return Dataset.from_list([row for group in groups for row in group["stock"]])
    if arm == "tree":
        return Dataset.from_list([group["tree"] for group in groups])
    return Dataset.from_list(per_branch(PrefixTree.from_dict(group["tree"]) for group in groups))


class Models:
    """Fresh copies of one model, and a prepared one that computes held-out losses."""

    def __init__(self, args: argparse.Namespace, vocab_size: int, device: torch.device) -> None:
        self.args, self.device = args, device
        if args.gguf is None:
            self.config = shape_config("quick")
            self.config.vocab_size = vocab_size
            self.weights = AutoModelForCausalLM.from_config(self.config).state_dict()
        else:
            folder, name = args.gguf.parent, args.gguf.name
            loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
            plain = expanded(loaded, None)
            self.weights, self.config = plain.state_dict(), plain.config
        self.judge = prepare_model(self.fresh("prefix_tree")).eval()

    def fresh(self, attention: str) -> PreTrainedModel:
        with self.device:
            model = AutoModelForCausalLM.from_config(
                copy.deepcopy(self.config), dtype=torch.float32, attn_implementation=attention
            )
        model.load_state_dict(self.weights)
        return model

    @torch.no_grad()
    def loss(self, model: PreTrainedModel, batches: list[dict[str, torch.Tensor]]) -> float:
        """Loss per supervised token, by the tree path for every arm."""
        for mine, trained in zip(self.judge.parameters(), model.parameters(), strict=True):
            mine.copy_(trained)
        total, weight = 0.0, 0.0
        with torch.autocast(self.device.type, torch.bfloat16, enabled=not self.args.quick):
            for batch in batches:
                of_batch = decode_weights(batch["loss_weights"]).sum().item()
                total, weight = total + self.judge(**batch).loss.item() * of_batch, weight + of_batch
        return total / weight


def held_out_batches(groups: list[Row], sequence_tokens: int, device: torch.device) -> list[dict[str, torch.Tensor]]:
    trees = [PrefixTree.from_dict(group["tree"]) for group in groups]
    collate = DataCollatorForPrefixTree(pad_token_id=0)
    packed = pack_rows(list(map(len, trees)), max(sequence_tokens, *map(len, trees)))
    batches = [collate([trees[index] for index in indices]) for indices in packed]
    return [{name: value.to(device) for name, value in batch.items()} for batch in batches]


class Clock(TrainerCallback):
    """Calls `evaluate` after `seconds` of training and at halves, quarters, ... of them, and then stops."""

    def __init__(self, evaluate: Callable[[PreTrainedModel], float], seconds: float, evaluations: int) -> None:
        self.evaluate = evaluate
        self.marks = [seconds / 2**part for part in range(evaluations)]
        self.start = 0.0
        self.rows: list[Row] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: PreTrainedModel, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        if state.global_step == 1:
            self.start = now
            return
        elapsed, pending = now - self.start, len(self.marks)
        self.marks = [mark for mark in self.marks if mark > elapsed]
        if len(self.marks) < pending:
            self.rows.append({"seconds": elapsed, "steps": state.global_step, "held_out": self.evaluate(model)})
            self.start += time.perf_counter() - now
        control.should_training_stop = not self.marks


def train(arm: str, seed: int, data: Dataset, tokenizer: Any, models: Models, clock: Clock) -> None:
    args = models.args
    common: dict[str, Any] = {"processing_class": tokenizer, "callbacks": [clock]}
    with tempfile.TemporaryDirectory() as folder:
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
            "logging_strategy": "no",
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "seed": seed,
        }
        if arm == "tree":
            folded = TreeSFTConfig(**options, max_packed_tokens=args.sequence_tokens, weighting="branch")
            trainer: SFTTrainer = TreeSFTTrainer(models.fresh("prefix_tree"), folded, train_dataset=data, **common)
        else:
            packed = SFTConfig(**options, packing=True, max_length=args.sequence_tokens)
            trainer = SFTTrainer(models.fresh(args.attention), packed, train_dataset=data, **common)
        trainer.train()


def summary(rows: list[Row]) -> list[Row]:
    """Means over seeds, one row for each arm: of the lowest held-out loss of a run, and of its last."""
    runs: dict[tuple[str, str], dict[int, list[Row]]] = {}
    for row in rows:
        runs.setdefault((row["data"], row["arm"]), {}).setdefault(row["seed"], []).append(row)
    table: list[Row] = []
    for (data, arm), by_seed in runs.items():
        lowest = [min(row["held_out"] for row in run) for run in by_seed.values()]
        steps, before, last = (
            statistics.mean(run[-1][name] for run in by_seed.values()) for name in ("steps", "before", "held_out")
        )
        line = {"data": data, "arm": arm, "seeds": len(by_seed), "steps": steps, "before": before}
        table.append(line | {"lowest": statistics.mean(lowest), "from": min(lowest), "to": max(lowest), "last": last})
    return table


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, ARMS)
    parser.add_argument("--prepared", type=Path, help="folder with the prepared data (default: prepared anew)")
    parser.add_argument("--data", type=Path, help="folder with the dialogues; writes `--prepared` and ends")
    parser.add_argument("--gguf", type=Path, help="GGUF file of the model; a tiny random one by default")
    parser.add_argument("--names", nargs="+", choices=FILES, default=list(FILES), help="data to train on")
    parser.add_argument("--seconds", type=float, default=8.0, help="of training, for each arm")
    parser.add_argument("--evaluations", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dialogues", type=int, default=400, help="of the tool world")
    parser.add_argument("--max-length", type=int, default=8192, help="longest turn with its context, in tokens")
    parser.add_argument("--sequence-tokens", type=int, default=24_576, help="of a packed sequence; each tree fits")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--attention", help="attention of TRL's arms (default: the best that is installed)")
    args = parser.parse_args(argv)
    disable_progress_bars()
    if args.data is not None:
        tokenizer = AutoTokenizer.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name)
        return write_prepared(args, tokenizer)
    device = default_device(args.quick)
    if args.quick:
        args.seconds, args.evaluations = 0.0, 1
    args.attention = args.attention or best_attention(args.quick)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        if args.prepared is None:
            args.prepared, args.names, args.dialogues, args.sequence_tokens = Path(folder), ["tool-world"], 40, 4096
            texts = [json.dumps(row["messages"]) for row in tool_world(40, seed=0)]
            write_prepared(args, train_tokenizer(texts, vocab_size=512))
        tokenizer = AutoTokenizer.from_pretrained(args.prepared)
        files = {name: gzip.decompress((args.prepared / f"{name}.jsonl.gz").read_bytes()) for name in args.names}
    groups = {name: list(map(json.loads, lines.splitlines())) for name, lines in files.items()}
    models = Models(args, len(tokenizer), device)
    try:
        for seed, name in itertools.product(range(args.seeds), args.names):
            is_held_out = [number % 4 == seed % 4 for number in range(len(groups[name]))]
            test = list(itertools.compress(groups[name], is_held_out))
            training = [group for group, flag in zip(groups[name], is_held_out, strict=True) if not flag]
            batches = held_out_batches(test, args.sequence_tokens, device)
            before = models.loss(models.fresh("prefix_tree"), batches)
            for arm in args.only:
                gc.collect()
                clock = Clock(lambda model, held=batches: models.loss(model, held), args.seconds, args.evaluations)
                train(arm, seed, training_data(training, arm), tokenizer, models, clock)
                for row in clock.rows:
                    progress(rows, {"data": name, "arm": arm, "seed": seed, **row, "before": before})
    finally:
        if rows:
            rows = report(rows, COLUMNS, device, args)
            print_table(summary(rows))
    return rows


def write_prepared(args: argparse.Namespace, tokenizer: Any) -> list[Row]:
    tokenizer.chat_template = qwen3_chat_template
    args.prepared.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.prepared)
    for name in args.names:
        dialogues = read_dialogues(args.data, name, args.dialogues)
        prepare(dialogues, copy.deepcopy(tokenizer), args.max_length, args.prepared / f"{name}.jsonl.gz")
    return []


if __name__ == "__main__":
    main(sys.argv[1:])
