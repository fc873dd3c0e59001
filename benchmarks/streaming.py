# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trees that fit no packed sequence: split, streamed, and the memory of their longest path alone.

    python -m benchmarks.streaming --output streaming.csv
    python -m benchmarks.streaming --only long-path --cap-gib 24 --output streaming_24gib.csv

All sides get the same weights and trees and take whole optimizer steps of `TreeSFTTrainer`, with gradient
checkpointing; loss and gradient norm of the first step of `split` and `stream` must agree, or the run fails.

- `prompt`: a prompt of 32k tokens and 16 completions of 8k; `caterpillar`: a dialogue of 61 turns, 37k tokens. The
  shape of Qwen3-0.6B in bf16. `split` computes parts of at most `--split-tokens` tokens (by default 48k, and 24k for
  the caterpillar, which is smaller than 48k), `stream` passes of `--pass-tokens`; `path` trains the longest branch
  alone, in one packed sequence.
- `long-path`: a prompt of 60k tokens and two completions of 4k, so paths of 64k, with the shape of Qwen3-8B, LoRA of
  rank 16 on NF4 weights, streamed, all that waits kept by the host.

`--cap-gib` lets the process allocate so much of the GPU's memory. `tokens` are those that the backbone computes in a
step, without padding; `passes` the calls of the model; `s` the median time of a step; `peak_gib` includes weights,
gradients and the optimizer.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from benchmarks.common import Row, attempted, check_failures, default_device, make_parser, report
from benchmarks.flops import shape_config
from benchmarks.shapes import QUICK as QUICK_SHAPES
from benchmarks.shapes import SHAPES as COMMON_SHAPES
from benchmarks.shapes import Nodes, build, rollouts
from benchmarks.trainers import Timer, options, quantize
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
from hf_prefix_tree.tree.prefix_tree import PrefixTree, fold

SHAPES: dict[str, Nodes] = {
    "prompt": rollouts(prompt=32_768, completions=16, length=8192),
    "caterpillar": COMMON_SHAPES["caterpillar-37k"],
    "long-path": rollouts(prompt=61_440, completions=2, length=4096),
}
QUICK: dict[str, Nodes] = {
    "prompt": rollouts(prompt=64, completions=4, length=24),
    "caterpillar": QUICK_SHAPES["caterpillar-37k"],
    "long-path": rollouts(prompt=100, completions=2, length=12),
}
SPLIT_TOKENS = {"prompt": 49_152, "caterpillar": 24_576}
QUICK_SPLIT_TOKENS = {"prompt": 120, "caterpillar": 80}
SIDES = ("split", "stream", "path")
COLUMNS = ["shape", "model", "side", "max_tokens", "tree_tokens", "longest_path", "tokens", "passes", "s", "peak_gib"]
COLUMNS += ["cap_gib", "loss", "grad_norm", "failure"]


def make_trainer(
    row: Row, tree: PrefixTree, args: argparse.Namespace, folder: str, device: torch.device
) -> TreeSFTTrainer:
    """A trainer whose epochs are one step each."""
    torch.manual_seed(0)
    is_long, is_path = row["shape"] == "long-path", row["side"] == "path"
    with device:
        model = AutoModelForCausalLM.from_config(
            shape_config("quick" if args.quick else row["model"]),
            dtype=torch.float32 if args.quick else torch.bfloat16,
            attn_implementation="prefix_tree",
        )
    if is_long and not args.quick:
        quantize(model)
    if is_path:
        tree = fold([max(tree.branches(), key=len)])
    settings = TreeSFTConfig(
        **options(row, folder, args, accumulation=1),
        max_packed_tokens=None if is_path else row["max_tokens"],
        overflow="split" if is_path else row["side"],
        activation_offloading=is_long and not args.quick,
    )
    trainer = TreeSFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_list([tree.to_dict()]),
        processing_class=train_tokenizer(["A text."], vocab_size=265),
        peft_config=LoraConfig(r=16, target_modules="all-linear") if is_long else None,
    )
    trainer.args.gradient_accumulation_steps = len(trainer.train_dataset)
    return trainer


def measure(row: Row, tree: PrefixTree, args: argparse.Namespace, device: torch.device) -> Row:
    tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(row, tree, args, folder, device)
        base = trainer.model.get_base_model() if row["shape"] == "long-path" else trainer.model
        base.register_forward_pre_hook(
            lambda module, inputs, kwargs: tokens.append(int(kwargs["attention_mask"].sum())), with_kwargs=True
        )
        timer = Timer(device)
        trainer.add_callback(timer)
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()  # of the weights before they were quantized
            torch.cuda.reset_peak_memory_stats()
        tokens.clear()
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(steps) == args.steps + 1
        passes = len(tokens) // len(steps)
        return {
            "tokens": sum(tokens[-passes:]),
            "passes": passes,
            "s": statistics.median(timer.seconds),
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
            "loss": steps[0]["loss"],
            "grad_norm": steps[0]["grad_norm"],
        }


def check_same(row: Row, other: Row) -> None:
    """Raises unless both sides took the same step, as closely as bf16 rounds."""
    for name, relative in (("loss", 2e-3), ("grad_norm", 0.05)):
        if not math.isclose(row[name], other[name], rel_tol=relative):
            raise RuntimeError(f"{row['shape']}: `{name}` is {row[name]} streamed and {other[name]} split.")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SHAPES, ("prompt", "caterpillar"))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--pass-tokens", type=int, default=8192, help="tokens of a pass of `stream`")
    parser.add_argument("--split-tokens", type=int, help="tokens of a part of `split`")
    parser.add_argument("--cap-gib", type=float, help="memory of the GPU that may be allocated")
    parser.add_argument("--steps", type=int, default=1, help="steps to measure, after one that compiles")
    args = parser.parse_args(argv)
    device = default_device(args.quick)
    if args.quick:
        args.pass_tokens, args.split_tokens = 32, None
    if args.cap_gib is not None and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap_gib * 2**30 / total)
    rows: list[Row] = []
    try:
        for shape, side in itertools.product(args.only, args.sides):
            is_long = shape == "long-path"
            if is_long and side != "stream":
                continue
            split_tokens = args.split_tokens or (QUICK_SPLIT_TOKENS if args.quick else SPLIT_TOKENS).get(shape)
            tree = build((QUICK if args.quick else SHAPES)[shape], vocab=256 if args.quick else 32_000)
            row: Row = {"shape": shape, "model": "8b" if is_long else "0.6b", "side": side, "checkpointing": True}
            row |= {"max_tokens": {"split": split_tokens, "stream": args.pass_tokens}.get(side)}
            row |= {"tree_tokens": len(tree), "longest_path": tree.stats().longest_path, "cap_gib": args.cap_gib}
            with attempted(rows, row, device):
                row |= measure(row, tree, args, device)
                split = [other for other in rows if other["shape"] == shape and other["side"] == "split"]
                if side == "stream" and split and "loss" in split[0]:
                    check_same(row, split[0])
    finally:
        rows = report(rows, COLUMNS, device, args)
    check_failures(rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
