# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trees larger than a packed sequence: split and streamed; and the settings for long trees by GPU memory.

    python -m benchmarks.streaming --pass-tokens 8192 16384 --output streaming.csv
    export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
    python -m benchmarks.streaming --only settings --output settings.csv

All steps are whole optimizer steps of `TreeSFTTrainer`, with gradient checkpointing.

- `prompt`: a prompt of 32k tokens and 16 completions of 8k; `caterpillar`: a dialogue of 61 turns, 37k tokens. The
  shape of Qwen3-0.6B in bf16; all sides get the same weights and trees. `path` trains the longest branch alone, in one
  packed sequence; `split` computes parts of at most `--split-tokens` tokens (by default 48k, and 24k for the
  caterpillar, which is smaller than 48k); `stream` passes of `--pass-tokens`, and `stream-offloaded` the same with
  `activation_offloading=True`. Loss and gradient norm of the streamed sides must be those of `split`, or the run
  fails.
- `settings`: for each GPU memory in GB (`--caps`), the settings expected to be the fastest that fit, or the next ones
  if these do not fit. Shape of Qwen3-8B: bf16 weights (`all`), LoRA of rank 16 on them (`lora`) or on NF4 weights
  (`qlora`). One tree is a prompt of 60k tokens and two completions of 4k, so paths of 64k; the other has the lengths
  of the first four airline dialogues of tau-bench. The process may allocate only that memory (GB of 10^9 bytes).

`tokens` are those that the backbone computes in a step, without padding; `passes` the calls of the model; `s` is the
median time of a step, after those that compile and allocate; `peak_gib` includes weights, gradients and the
optimizer; `memory_ratio` is the peak divided by that of `path`, `speedup` the time of `split` divided by that of the
side. Of `settings`, `s` is the second step of each tree, and `hours` the time of 1,000 trees with paths of 64k, or of
an epoch of tau-bench airline at the same tokens/s.
"""

from __future__ import annotations

import argparse
import csv
import gc
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, TrainerCallback

from benchmarks.common import (
    OUT_OF_MEMORY,
    Results,
    Row,
    attempted,
    check_failures,
    default_device,
    environment,
    make_parser,
    progress,
    report,
)
from benchmarks.eagle3_trees import LENGTHS, random_conversations
from benchmarks.flops import shape_config
from benchmarks.shapes import QUICK as QUICK_SHAPES
from benchmarks.shapes import SHAPES as COMMON_SHAPES
from benchmarks.shapes import Nodes, build, rollouts
from benchmarks.trainers import options, quantize
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
from hf_prefix_tree.tree.prefix_tree import PrefixTree, fold

SHAPES: dict[str, Nodes] = {
    "prompt": rollouts(prompt=32_768, completions=16, length=8192),
    "caterpillar": COMMON_SHAPES["caterpillar-37k"],
}
QUICK: dict[str, Nodes] = {
    "prompt": rollouts(prompt=64, completions=4, length=24),
    "caterpillar": QUICK_SHAPES["caterpillar-37k"],
}
SPLIT_TOKENS = {"prompt": 49_152, "caterpillar": 24_576}
QUICK_SPLIT_TOKENS = {"prompt": 120, "caterpillar": 80}
SIDES = ("path", "split", "stream-offloaded", "stream")

LONG_PATH = rollouts(prompt=61_440, completions=2, length=4096)
QUICK_LONG_PATH = rollouts(prompt=100, completions=2, length=12)
EPOCH = {"long-path": 1000 * 69_632, "tau-bench": 276_427}  # tokens; of 12 tasks, see results/prepare_tau_bench.csv
OFFLOADED = {"activation_offloading": True}
STREAM = {"overflow": "stream", "max_packed_tokens": 16_384, **OFFLOADED}
SETTINGS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    24: [("qlora", STREAM), ("qlora", STREAM | {"max_packed_tokens": 8192})],
    48: [("qlora", OFFLOADED), ("qlora", STREAM)],
    80: [("lora", {}), ("lora", OFFLOADED)],
    141: [("all", {}), ("all", OFFLOADED)],
}
COLUMNS = ["shape", "model", "side", "settings", "max_tokens", "tree_tokens", "longest_path", "tokens", "passes", "s"]
COLUMNS += ["peak_gib", "memory_ratio", "speedup", "cap_gb", "tokens_per_s", "hours", "loss", "grad_norm", "failure"]


class Steps(TrainerCallback):
    """Seconds, peak memory, tokens and calls of every optimizer step, also if a later one fails."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.rows, self.calls = device, [], []  # type: torch.device, list[Row], list[torch.Tensor]

    def watch(self, trainer: TreeSFTTrainer) -> None:
        trainer.add_callback(self)
        trainer.accelerator.unwrap_model(trainer.model).register_forward_pre_hook(
            lambda module, inputs, kwargs: self.calls.append(kwargs["attention_mask"].sum()), with_kwargs=True
        )

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.calls.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self.start = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        peak = None
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() / 2**30
        row = {"tokens": int(sum(self.calls)), "passes": len(self.calls), "s": time.perf_counter() - self.start}
        self.rows.append(row | {"peak_gib": peak})
        self.on_train_begin()  # of the next step


def train(
    steps: Steps,
    shape: str,
    weights: str,
    trees: Sequence[PrefixTree],
    settings: dict[str, Any],
    args: argparse.Namespace,
    epochs: int | None = None,
) -> list[Row]:
    """Trains a model; with `epochs`, each is one step of all trees, otherwise each tree is a step. Returns the log."""
    torch.manual_seed(0)
    is_quick, device = args.quick, steps.device
    with device:
        model = AutoModelForCausalLM.from_config(
            shape_config("quick" if is_quick else shape),
            dtype=torch.float32 if is_quick else torch.bfloat16,
            attn_implementation="prefix_tree",
        )
    if weights == "qlora" and not is_quick:
        quantize(model)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # of the weights before they were quantized
        torch._C._host_emptyCache()  # of earlier steps, whose sizes differ; PyTorch 2.11 has no public name for this
    with tempfile.TemporaryDirectory() as folder:
        common = options({"checkpointing": True}, folder, args, accumulation=1)
        common |= {"num_train_epochs": epochs or 1, "train_sampling_strategy": "sequential", "logging_steps": 1}
        common |= {name: value for name, value in settings.items() if name != "activation_offloading" or not is_quick}
        trainer = TreeSFTTrainer(
            model=model,
            args=TreeSFTConfig(**common),
            train_dataset=Dataset.from_list([tree.to_dict() for tree in trees]),
            processing_class=train_tokenizer(["A text."], vocab_size=265),
            peft_config=LoraConfig(r=16, target_modules="all-linear") if "lora" in weights else None,
        )
        trainer.args.activation_offloading = settings.get("activation_offloading", False)  # TRL's part needs a GPU
        if epochs:
            trainer.args.gradient_accumulation_steps = len(trainer.train_dataset)  # known after packing
        steps.watch(trainer)
        trainer.train()
        return [entry for entry in trainer.state.log_history if "loss" in entry]


def measure_side(row: Row, tree: PrefixTree, args: argparse.Namespace, device: torch.device) -> Row:
    """A median of steps after one that compiles."""
    side = row["side"]
    settings = {
        "max_packed_tokens": row["max_tokens"],
        "overflow": "stream" if side.startswith("stream") else "split",
        "activation_offloading": side == "stream-offloaded",
    }
    if side == "path":
        tree = fold([max(tree.branches(), key=len)])
    log = train(steps := Steps(device), row["model"], "all", [tree], settings, args, epochs=args.steps + 1)
    assert len(log) == len(steps.rows) == args.steps + 1
    seconds = statistics.median(step["s"] for step in steps.rows[1:])
    return steps.rows[-1] | {"s": seconds, "loss": log[0]["loss"], "grad_norm": log[0]["grad_norm"]}


def check_same(row: Row, other: Row) -> None:
    """Raises unless both sides took the same step, up to bf16 rounding."""
    for name, relative in (("loss", 2e-3), ("grad_norm", 0.05)):
        if not math.isclose(row[name], other[name], rel_tol=relative):
            raise RuntimeError(f"{row['shape']}: `{name}` is {row[name]} streamed and {other[name]} split.")


def add_ratios(rows: list[Row]) -> None:
    """Memory relative to the longest path alone, and speed-up over the split side, if both were measured."""
    measured = {(row["shape"], row["side"]): row for row in rows if "s" in row}
    for row in (row for row in rows if "s" in row):
        path, split = (measured.get((row["shape"], side)) for side in ("path", "split"))
        if path is not None and path["peak_gib"]:
            row["memory_ratio"] = row["peak_gib"] / path["peak_gib"]
        if split is not None:
            row["speedup"] = split["s"] / row["s"]


def measure_sides(results: Results, shape: str, args: argparse.Namespace, device: torch.device) -> None:
    rows = results.rows
    tree = build((QUICK if args.quick else SHAPES)[shape], vocab=256 if args.quick else 32_000)
    split_tokens = args.split_tokens or (QUICK_SPLIT_TOKENS if args.quick else SPLIT_TOKENS)[shape]
    lengths = {"path": [None], "split": [split_tokens]}
    for side in (side for side in SIDES if side in args.sides):
        for max_tokens in lengths.get(side, args.pass_tokens):
            row: Row = {"shape": shape, "model": "0.6b", "side": side, "max_tokens": max_tokens}
            row |= {"tree_tokens": len(tree), "longest_path": tree.stats().longest_path}
            with attempted(rows, row, device):
                row |= measure_side(row, tree, args, device)
                split = [other for other in rows if other["shape"] == shape and other["side"] == "split"]
                if side.startswith("stream") and split and "loss" in split[0]:
                    check_same(row, split[0])
            add_ratios(rows)
            results.write()


def tau_bench_tree(quick: bool) -> PrefixTree:
    """Random tokens with the lengths of the first task's four dialogues."""
    with LENGTHS.open() as file:
        lengths = [row for row in csv.DictReader(file) if row["template"] == "strips"]
    talks = random_conversations(lengths, 4, 256 if quick else 32_000, 64 if quick else 1)
    return fold([branch for branches in talks for branch in branches])


def measure_settings(results: Results, cap: int, args: argparse.Namespace, device: torch.device) -> None:
    """The first settings of a cap that fit, and those that did not."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap * 1e9 / total))
    nodes = QUICK_LONG_PATH if args.quick else LONG_PATH
    trees = {"tau-bench": tau_bench_tree(args.quick), "long-path": build(nodes, vocab=256 if args.quick else 32_000)}
    for weights, given in SETTINGS[cap]:
        settings = given | ({"max_packed_tokens": 32} if args.quick and "overflow" in given else {})
        # The first step compiles. Memory is allocated, and pinned on the host, at the first step of a size.
        order = ["tau-bench", "tau-bench", "long-path", "long-path"]
        shown = ", ".join(f"{name}={value!r}" for name, value in ({"gradient_checkpointing": True} | settings).items())
        new: dict[str, Row] = {}
        for shape, tree in trees.items():
            new[shape] = {"shape": shape, "model": "8b", "side": weights, "settings": shown, "cap_gb": cap}
            new[shape] |= {"tree_tokens": len(tree), "longest_path": tree.stats().longest_path}
            new[shape] |= {"max_tokens": settings.get("max_packed_tokens")}
        steps = Steps(device)
        with attempted(results.rows, new["long-path"], device):
            try:
                train(steps, "8b", weights, [trees[shape] for shape in order], settings, args)
            finally:
                for shape, measured in zip(order, steps.rows, strict=False):  # the last step of a tree stays
                    new[shape] |= measured | {"tokens_per_s": new[shape]["tree_tokens"] / measured["s"]}
                    new[shape]["hours"] = EPOCH[shape] / new[shape]["tokens_per_s"] / 3600
        progress(results.rows, new["tau-bench"])
        results.write()
        if new["long-path"].get("failure") != OUT_OF_MEMORY:
            break


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, [*SHAPES, "settings"], SHAPES)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--pass-tokens", type=int, nargs="+", default=[8192], help="tokens of a pass of `stream`")
    parser.add_argument("--split-tokens", type=int, help="tokens of a part of `split`")
    parser.add_argument("--caps", type=int, nargs="+", choices=SETTINGS, default=list(SETTINGS), help="GB of a GPU")
    parser.add_argument("--steps", type=int, default=1, help="steps of a side to measure, after one that compiles")
    args = parser.parse_args(argv)
    device = default_device(args.quick)
    if args.quick:
        args.pass_tokens, args.split_tokens = [32, 48], None
    results = Results(args.output, environment(device, args.commit))
    for shape in args.only:
        if shape != "settings":
            measure_sides(results, shape, args, device)
            continue
        for cap in args.caps:
            measure_settings(results, cap, args, device)
    rows = report(results.rows, COLUMNS, device, args)
    check_failures(rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
