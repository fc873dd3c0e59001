# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trainer against trainer: TRL's `SFTTrainer` at its best on flat steps, and `TreeSFTTrainer` on their tree.

    python -m benchmarks.trainers --output trainers.csv
    python -m benchmarks.trainers --models lora-8b qlora-8b --only completions --steps 2 --step-tokens 12288

Both trainers get the same weights and the same rows, and take the same optimizer steps, from the dataloader to the
updated weights; the loss and the gradient norm of the first step must agree, or the run fails. TRL's side uses its
strongest options: `packing="bfd"` without padding, `max_length` as long as the longest packed sequence,
FlashAttention-4 if it is installed (else the first of FlashAttention-3 and -2; `--attention` sets another), its fused
head, bf16, fused AdamW. `trl-compiled` compiles its decoder layers, as `tree-compiled` does. The tree's side uses
`weighting="branch"`, the loss of the flat rows. A step is as many trees as fill `--step-tokens` tokens.

Rows, each a flat step: consecutive turns of a dialogue, merged as long as each extends the previous one.

- `completions`: a prompt of 4k tokens and 16 completions of 512; `short-completions`: 1k and 64 of 64.
- `stripped`: an agent dialogue of 20 turns whose earlier reasoning is stripped, so that every turn is a row.
- `trials`: 4 trials of a task with a template that strips nothing: 4k shared tokens, then 4k separate ones per trial.
- `single`: one trial: nothing is shared, so the tree cannot win.

Models have random weights: the shapes of Qwen3-0.6B, of Qwen3-8B (`lora-8b`: LoRA of rank 16 on all linear layers;
`qlora-8b`: the same on NF4 weights; both with gradient checkpointing), `moe`: six layers of Qwen3-30B-A3B, and
`hybrid`: Qwen3.5-0.8B, both sides with the kernels of flash-linear-attention. TRL's packing mixes sequences in its
short convolutions without causal-conv1d, so TRL's side uses padded batches there, up to `--max-length` tokens, and
SDPA. `s` is the median time of a step, on the device's clock: the benchmark waits for the device after the last step
only (Trainer and TRL wait in every micro-batch, for a check of the loss and for metrics), and only the first and the
last step are logged. `--run-ahead` turns off the check of the loss (`logging_nan_inf_filter=False`) and copies batches
without waiting (`accelerator_config={"non_blocking": True}`). `tokens` are those that the backbone computes in a step.
`--profile` profiles one more step and writes where its time goes to `..._profile.csv`: profiles.py explains the
categories.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    TrainerCallback,
    TrainerState,
)
from trl import SFTConfig, SFTTrainer
from trl.data_utils import pack_dataset

from benchmarks import flops
from benchmarks.common import (
    Row,
    attempted,
    best_attention,
    check_failures,
    check_same_step,
    default_device,
    environment,
    make_parser,
    report,
)
from benchmarks.profiles import COLUMNS as PROFILE_COLUMNS
from benchmarks.profiles import Events, profiled, summary, write_profiles
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
MODELS = ("dense-0.6b", "lora-8b", "qlora-8b", "moe", "hybrid")
SIDES = ("trl", "trl-compiled", "tree", "tree-compiled")
MOE_NAMES = [
    *("vocab_size", "hidden_size", "moe_intermediate_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok"),
]
MOE = (151_936, 2048, 768, 6144, 6, 32, 4, 128, 128, 8)
MOE_SMALL = (512, 32, 16, 48, 2, 4, 2, 8, 8, 2)
COLUMNS = ["model", "rows", "side", "attention", "run_ahead", "flat_rows", "tokens", "sequences", "s", "low", "high"]
COLUMNS += ["peak_gib", "loss", "grad_norm", "token_ratio", "speedup", "failure"]


class Timer(TrainerCallback):
    """When every optimizer step ended; on a GPU by its own clock, without waiting for it."""

    def __init__(self, device: torch.device, profiled_step: int | None = None) -> None:
        self.device, self.ends = device, []  # type: torch.device, list[Any]
        self.profiled_step, self.profile = profiled_step, ExitStack()
        self.events: Events = []

    def on_step_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.profiled_step:
            self.events = self.profile.enter_context(profiled(self.device))

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.device.type == "cuda":
            self.ends.append(torch.cuda.Event(enable_timing=True))
            self.ends[-1].record()
        else:
            self.ends.append(time.perf_counter())
        self.profile.close()

    @property
    def seconds(self) -> list[float]:
        """Of all steps except the first, which compiles, checks and allocates, and the last, if it is profiled."""
        pairs = itertools.pairwise(self.ends[: self.profiled_step])
        if self.device.type != "cuda":
            return [after - before for before, after in pairs]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


def model_config(name: str, quick: bool) -> PreTrainedConfig:
    if name == "hybrid":
        return flops.model_config(quick, "qwen3.5-0.8b")
    if name != "moe":
        return flops.shape_config("quick" if quick else name.partition("-")[2])
    sizes = MOE_SMALL if quick else MOE
    return Qwen3MoeConfig(
        **dict(zip(MOE_NAMES, sizes, strict=True)), norm_topk_prob=True, max_position_embeddings=65_536
    )


def quantize(model: PreTrainedModel) -> None:
    """Replaces the linear layers of the backbone by NF4 ones, as `BitsAndBytesConfig` does for a checkpoint."""
    import bitsandbytes

    for parent in list(model.model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is torch.nn.Linear:
                narrow = bitsandbytes.nn.Linear4bit(
                    layer.in_features, layer.out_features, bias=False, compute_dtype=model.dtype, quant_type="nf4",
                    device="meta",
                )  # fmt: skip
                narrow.weight = bitsandbytes.nn.Params4bit(layer.weight.data, requires_grad=False, quant_type="nf4")
                narrow.support_avx512bf16_for_cpu = False  # would round the scales at the first evaluation
                setattr(parent, name, narrow.to(model.device))  # quantizes
    model.is_loaded_in_4bit = True


def options(row: Row, folder: str, args: argparse.Namespace, accumulation: int) -> dict[str, Any]:
    """Common options of both configurations: every epoch is one optimizer step over all rows."""
    run_ahead = getattr(args, "run_ahead", False)  # streaming.py has no such option
    return {
        "output_dir": folder,
        "num_train_epochs": args.steps + 1,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_checkpointing": row["checkpointing"],
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "bf16": not args.quick,
        "use_cpu": args.quick,
        "learning_rate": 0.0,  # a full step that leaves the weights unchanged
        "optim": "adamw_torch" if args.quick else "adamw_torch_fused",
        "logging_first_step": True,
        "logging_steps": args.steps + 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
        "logging_nan_inf_filter": not run_ahead,
        "accelerator_config": {"non_blocking": run_ahead},
    }


def make_trainer(
    row: Row, trees: list[PrefixTree], args: argparse.Namespace, folder: str, device: torch.device
) -> tuple[SFTTrainer, int]:
    """A trainer, and its number of packed sequences in a step."""
    torch.manual_seed(0)
    name, side = row["model"], row["side"]
    config = copy.deepcopy(model_config(name, args.quick))
    is_tree, is_compiled = side.startswith("tree"), side.endswith("compiled")
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32 if args.quick else torch.bfloat16, attn_implementation=row["attention"]
        )
    if name.startswith("qlora"):
        quantize(model)
    common: dict[str, Any] = {
        "model": model,
        "processing_class": train_tokenizer(["A text."], vocab_size=265),
        "peft_config": LoraConfig(r=16, target_modules="all-linear") if name.endswith("8b") else None,
    }
    if is_tree:
        rows = Dataset.from_list([tree.to_dict() for tree in trees])
        settings = TreeSFTConfig(
            **options(row, folder, args, accumulation=1),
            max_packed_tokens=args.max_length,
            weighting="branch",
            compile_layers=is_compiled,
        )
        trainer = TreeSFTTrainer(args=settings, train_dataset=rows, **common)
        sequences = len(trainer.train_dataset)  # known after packing
        trainer.args.gradient_accumulation_steps = sequences
        return trainer, sequences
    flat = Dataset.from_list(per_branch(trees))
    if name == "hybrid":
        batch_size = args.max_length // max(map(len, flat["input_ids"]))
        sequences = math.ceil(len(flat) / batch_size)
        packing: dict[str, Any] = {"per_device_train_batch_size": batch_size}
    else:
        sequences = len(pack_dataset(flat, args.max_length, "bfd"))
        packing = {"packing": True, "packing_strategy": "bfd"}
    settings = SFTConfig(**(options(row, folder, args, sequences) | packing), max_length=args.max_length)
    trainer = SFTTrainer(args=settings, train_dataset=flat, **common)
    if is_compiled:
        base = trainer.model.get_base_model() if name.endswith("8b") else trainer.model
        for layer in base.model.layers:
            layer.compile()
    return trainer, sequences


def measure(
    row: Row, trees: list[PrefixTree], args: argparse.Namespace, device: torch.device, profiles: list[Row]
) -> Row:
    tokens: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer, sequences = make_trainer(row, trees, args, folder, device)
        base = trainer.model.get_base_model() if row["model"].endswith("8b") else trainer.model
        base.model.register_forward_pre_hook(
            lambda module, inputs, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
        )
        timer = Timer(device, args.steps if args.profile else None)
        trainer.add_callback(timer)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        trainer.train()
        first = next(entry for entry in trainer.state.log_history if "loss" in entry)
        times = timer.seconds
        assert len(timer.ends) == args.steps + 1 and len(times) == args.steps - args.profile, (timer.ends, times)
        if args.profile:
            where = {name: row[name] for name in ("model", "rows", "side")}
            config = model_config(row["model"], args.quick)
            counts = flops.flop_counts(trees, config)["folded" if row["side"].startswith("tree") else "branches"]
            # the counts are those of training all weights: frozen ones have no gradients
            work = None if row["model"].endswith("8b") else flops.work_of(counts, config)
            profiles += [where | line for line in summary(timer.events, 1e3 * statistics.median(times), work)]
        return {
            "sequences": sequences,
            "tokens": sum(tokens[-sequences:]),
            "s": statistics.median(times),
            "low": min(times),
            "high": max(times),
            "loss": first["loss"],
            "grad_norm": first["grad_norm"],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        }


def compare(row: Row, stock: Row | None) -> None:
    """Adds the ratios to TRL's eager side; raises if the first steps differ."""
    if stock is None or "s" not in row or "s" not in stock:
        return
    check_same_step(row, stock)
    row["token_ratio"], row["speedup"] = stock["tokens"] / row["tokens"], stock["s"] / row["s"]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SHAPES)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--attention", help="attention of TRL's side (default: the best that is installed)")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--steps", type=int, default=3, help="steps to measure, after one that compiles")
    parser.add_argument("--step-tokens", type=int, default=32_768, help="tree tokens of a step")
    parser.add_argument("--profile", action="store_true", help="another step of each row, by category of kernels")
    parser.add_argument("--max-length", type=int, default=16_384, help="tokens of a packed sequence")
    parser.add_argument("--run-ahead", action="store_true", help="options of Trainer with which the host waits less")
    args = parser.parse_args(argv)
    device = default_device(args.quick)
    if args.quick:
        args.step_tokens, args.max_length, args.steps = 256, 128, 1
        args.sides = [side for side in args.sides if not side.endswith("compiled")]
    args.steps += args.profile  # the last one
    args.attention = args.attention or best_attention(args.quick)
    rows: list[Row] = []
    profiles: list[Row] = []
    try:
        for name, shape in itertools.product(args.models, args.only):
            nodes = (QUICK if args.quick else SHAPES)[shape]
            count = max(1, args.step_tokens // len(build(nodes)))
            vocab = model_config(name, args.quick).vocab_size
            trees = [build(nodes, seed, min(vocab, 32_000)) for seed in range(count)]
            stock: Row | None = None
            for side in args.sides:
                row: Row = {"model": name, "rows": shape, "side": side, "trees": count}
                stock_attention = "sdpa" if name == "hybrid" else args.attention
                row |= {"attention": stock_attention if side.startswith("trl") else "prefix_tree"}
                row |= {"checkpointing": args.checkpointing or name.endswith("8b"), "run_ahead": args.run_ahead}
                row["flat_rows"] = sum(tree.num_branches for tree in trees)
                torch._dynamo.reset()
                with attempted(rows, row, device):
                    row |= measure(row, trees, args, device, profiles)
                    compare(row, stock)
                stock = stock or (row if side == "trl" else None)
    finally:
        rows = report(rows, COLUMNS, device, args)
        write_profiles(profiles, args.output, environment(device, args.commit), ["side", *PROFILE_COLUMNS])
    check_failures(rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
