# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trainer against trainer: TRL's `SFTTrainer` at its best on flat steps, `TreeSFTTrainer` on the tree of the same.

    python -m benchmarks.trainers --output trainers.csv
    python -m benchmarks.trainers --models lora-8b --only completions --sides trl tree-compiled

Both trainers get the same weights and the same rows, and take the same optimizer steps, from the dataloader to the
updated weights; the loss and the gradient norm of the first step must agree, or the run fails. TRL's side is the
strongest that it has: `packing="bfd"` without padding, `max_length` as long as the longest packed sequence,
FlashAttention-4 if it is installed (else the first of FlashAttention-3 and -2; `--attention` sets another), its fused
head, bf16, fused AdamW. `trl-compiled` compiles its decoder layers, as `tree-compiled` does. The tree's side takes
`weighting="branch"`, which is the loss of the flat rows. A step is as many trees as fill `--step-tokens` tokens.

Rows, each a flat step: consecutive turns of a dialogue, merged as long as each extends the last.

- `completions`: a prompt of 4k tokens and 16 completions of 512; `short-completions`: 1k and 64 of 64.
- `stripped`: an agent dialogue of 20 turns whose earlier reasoning is stripped, so that every turn is a row.
- `trials`: 4 trials of a task under a template that strips nothing: 4k shared tokens, then 4k of each trial's own.
- `single`: one trial of it: nothing is shared, and the tree can only lose.

Models have random weights: Qwen3-0.6B and -8B shapes (`lora-8b`: LoRA of rank 16 on all linear layers), and
`moe`, six layers of Qwen3-30B-A3B. `s` is the median time of a step, `tokens` what the backbone computes in it.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3MoeConfig, TrainerCallback
from transformers.utils import is_flash_attn_2_available
from trl import SFTConfig, SFTTrainer
from trl.data_utils import pack_dataset

from benchmarks.common import Row, default_device, make_parser, progress, report
from benchmarks.flops import shape_config
from benchmarks.shapes import Nodes, build, caterpillar, rollouts
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
from hf_prefix_tree.data.baselines import per_branch
from hf_prefix_tree.tree.prefix_tree import PrefixTree

SHAPES: dict[str, Nodes] = {
    "completions": rollouts(prompt=4096, completions=16, length=512),
    "short-completions": rollouts(prompt=1024, completions=64, length=64),
    "stripped": caterpillar(turns=20, prompt=935, context=165, reasoning=60, answer=70),
    "trials": rollouts(prompt=4096, completions=4, length=4096),
    "single": rollouts(prompt=4096, completions=1, length=4096),
}
QUICK: dict[str, Nodes] = {
    "completions": rollouts(prompt=32, completions=4, length=8),
    "short-completions": rollouts(prompt=16, completions=8, length=3),
    "stripped": caterpillar(turns=4, prompt=9, context=5, reasoning=3, answer=4),
    "trials": rollouts(prompt=16, completions=4, length=16),
    "single": rollouts(prompt=16, completions=1, length=16),
}
MODELS = ("dense-0.6b", "lora-8b", "moe")
SIDES = ("trl", "trl-compiled", "tree", "tree-compiled")
COLUMNS = ["model", "rows", "side", "attention", "flat_rows", "tokens", "sequences", "s", "low", "high", "peak_gib"]
COLUMNS += ["loss", "grad_norm", "token_ratio", "speedup", "failure"]
TOLERANCE = {"loss": 2e-3, "grad_norm": 0.05}  # relative, bf16


class Timer(TrainerCallback):
    """Seconds of every optimizer step, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ends = device, []  # type: torch.device, list[float]

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Of all steps but the first, which compiles, checks and allocates."""
        return [after - before for before, after in itertools.pairwise(self.ends)]


def model_config(name: str, quick: bool) -> PreTrainedConfig:
    if quick or name == "dense-0.6b":
        return shape_config("quick" if quick else "0.6b")
    if name == "lora-8b":
        return shape_config("8b")
    return Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        moe_intermediate_size=768,
        intermediate_size=6144,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=65_536,
    )


def best_attention() -> str:
    """The fastest attention that TRL can use for packed rows here; SDPA, which pads, only without any."""
    from transformers.utils import import_utils

    for version in (4, 3):
        is_available = getattr(import_utils, f"is_flash_attn_{version}_available", None)
        if is_available is not None and is_available():
            return f"flash_attention_{version}"
    return "flash_attention_2" if is_flash_attn_2_available() else "sdpa"


def options(folder: str, args: argparse.Namespace, accumulation: int) -> dict[str, Any]:
    """What both configurations have in common: every epoch is one optimizer step over all rows."""
    return {
        "output_dir": folder,
        "num_train_epochs": args.steps + 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": args.checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": not args.quick,
        "use_cpu": args.quick,
        "learning_rate": 0.0,  # a full step that leaves the weights unchanged
        "optim": "adamw_torch" if args.quick else "adamw_torch_fused",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def make_trainer(
    side: str, name: str, trees: list[PrefixTree], args: argparse.Namespace, folder: str, device: torch.device
) -> tuple[SFTTrainer, int]:
    """A trainer, and its number of packed sequences in a step."""
    torch.manual_seed(0)
    config = copy.deepcopy(model_config(name, args.quick))
    is_tree, is_compiled = side.startswith("tree"), side.endswith("compiled")
    attention = "prefix_tree" if is_tree else args.attention
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if args.quick else torch.bfloat16, attn_implementation=attention
        )
    common: dict[str, Any] = {
        "model": model,
        "processing_class": train_tokenizer(["A text."], vocab_size=265),
        "peft_config": LoraConfig(r=16, target_modules="all-linear") if name.startswith("lora") else None,
    }
    if is_tree:
        rows = Dataset.from_list([tree.to_dict() for tree in trees])
        settings = TreeSFTConfig(
            **options(folder, args, accumulation=1),
            max_packed_tokens=args.max_length,
            weighting="branch",
            compile_layers=is_compiled,
        )
        trainer = TreeSFTTrainer(args=settings, train_dataset=rows, **common)
        sequences = len(trainer.train_dataset)  # known after packing
        trainer.args.gradient_accumulation_steps = sequences
        return trainer, sequences
    flat = Dataset.from_list(per_branch(trees))
    sequences = len(pack_dataset(flat, args.max_length, "bfd"))
    settings = SFTConfig(
        **options(folder, args, sequences),
        max_length=args.max_length,
        packing=True,
        packing_strategy="bfd",
    )
    trainer = SFTTrainer(args=settings, train_dataset=flat, **common)
    if is_compiled:
        base = trainer.model.get_base_model() if name.startswith("lora") else trainer.model
        for layer in base.model.layers:
            layer.compile()
    return trainer, sequences


def measure(side: str, name: str, trees: list[PrefixTree], args: argparse.Namespace, device: torch.device) -> Row:
    tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer, sequences = make_trainer(side, name, trees, args, folder, device)
        base = trainer.model.get_base_model() if name.startswith("lora") else trainer.model
        base.model.register_forward_pre_hook(
            lambda module, inputs, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        timer = Timer(device)
        trainer.add_callback(timer)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        times = timer.seconds
        assert len(steps) == args.steps + 1 and len(times) == args.steps, (len(steps), len(times))
        return {
            "sequences": sequences,
            "tokens": sum(tokens[-sequences:]),
            "s": statistics.median(times),
            "low": min(times),
            "high": max(times),
            "loss": steps[0]["loss"],
            "grad_norm": steps[0]["grad_norm"],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        }


def compare(row: Row, stock: Row | None) -> None:
    """Adds the ratios to TRL's eager side; raises where the first steps are not the same step."""
    if stock is None or "s" not in row or "s" not in stock:
        return
    for name, tolerance in TOLERANCE.items():
        if abs(row[name] / stock[name] - 1) > tolerance:
            raise RuntimeError(f"`{name}` of the first step is {row[name]} for {row['side']}, {stock[name]} for TRL")
    row["token_ratio"], row["speedup"] = stock["tokens"] / row["tokens"], stock["s"] / row["s"]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SHAPES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--attention", help="attention of TRL's side (default: the best that is installed)")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="steps to measure, after one that compiles")
    parser.add_argument("--step-tokens", type=int, default=32_768, help="tree tokens of a step")
    parser.add_argument("--max-length", type=int, default=16_384, help="tokens of a packed sequence")
    args = parser.parse_args(argv)
    device = default_device(args.quick)
    if args.quick:
        args.step_tokens, args.max_length, args.steps = 256, 128, 1
        args.sides = [side for side in args.sides if not side.endswith("compiled")]
    args.attention = args.attention or ("sdpa" if args.quick else best_attention())
    rows: list[Row] = []
    try:
        for name, shape in itertools.product(args.models, args.only):
            nodes = (QUICK if args.quick else SHAPES)[shape]
            count = max(1, args.step_tokens // len(build(nodes)))
            vocab = model_config(name, args.quick).vocab_size
            trees = [build(nodes, seed, min(vocab, 32_000)) for seed in range(count)]
            stock: Row | None = None
            for side in args.sides:
                row: Row = {"model": name, "rows": shape, "side": side, "trees": count}
                row |= {"attention": args.attention if side.startswith("trl") else "prefix_tree"}
                row["flat_rows"] = sum(tree.num_branches for tree in trees)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                torch._dynamo.reset()
                try:
                    row |= measure(side, name, trees, args, device)
                except torch.cuda.OutOfMemoryError:
                    row["failure"] = "out of memory"
                compare(row, stock)
                stock = stock or (row if side == "trl" else None)
                progress(rows, row)
    finally:
        rows = report(rows, COLUMNS, device, args)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
