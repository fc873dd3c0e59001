# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The published comparison on any number of GPUs: whole training steps of the trainers, on 64 caterpillars.

    torchrun --nproc-per-node 2 -m benchmarks.scaling --output scaling_2.csv
    accelerate launch --config_file examples/accelerate/fsdp2.yaml --num_processes 8 --module benchmarks.scaling \\
        --shape 8b --output scaling_8b_8.csv

Modes: `tree` (folded trees), `per_branch` (TRL's SFTTrainer on the branches), `grouped` (the trees branch by branch)
and `flat_steps` (SFTTrainer on one sample per turn, each token supervised once). A step of the `published` coverage
has 4 trees, or 16 branches or samples, over all GPUs (at least one for each); of the `equal` coverage the baselines
take as many branches as 4 trees hold, 20.4 each. `--trees-per-step` makes steps larger, whose trees can be balanced.
Times are the median of all steps but the first, `ms_per_branch` is a step over the branches (for `flat_steps`:
samples) that it covers, and memory is the peak of the fullest GPU. `flop_ratio` is what `tree` would gain per branch
if time were FLOPs.
"""

from __future__ import annotations

import copy
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.common import Row, default_device, make_parser, progress, report
from benchmarks.flops import model_config
from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
from hf_prefix_tree.baselines import per_branch
from hf_prefix_tree.flops import flop_counts
from hf_prefix_tree.rollouts import CROSS_ENTROPY_IGNORE_IDX
from hf_prefix_tree.synthetic import caterpillar, caterpillar_set
from hf_prefix_tree.tree import PrefixTree

MODES = ("tree", "per_branch", "grouped", "flat_steps")
BRANCHES_PER_TREE = 4  # of the published batches: 16 branches against 4 trees
# Of the 64 published trees: means of K, tokens and longest path, and sums over branches over sums over trees.
PUBLISHED = {"branches": 20.4, "tokens": 8004.0, "longest_path": 6615.0, "token_ratio": 8.11, "pair_ratio": 5.38}
TOLERANCE = 0.02
# vocabulary, hidden, MLP, layers, heads, key-value heads, tied embeddings
SHAPES = {
    "0.6b": (151_936, 1024, 3072, 28, 16, 8, True),
    "4b": (151_936, 2560, 9728, 36, 32, 8, True),
    "8b": (151_936, 4096, 12_288, 36, 32, 8, False),
}
# As `torchrun` and `accelerate launch` say; the process group starts with the first trainer.
RANKS, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
COLUMNS = ["mode", "coverage", "shape", "dtype", "gpus", "engine", "rows_per_step", "ms", "low", "high", "peak_gib"]
COLUMNS += ["ms_per_branch", "loss", "imbalance", "flop_ratio", "failure"]


def shape_config(name: str) -> Qwen3Config:
    """Qwen3 of a size."""
    if name == "quick":
        return model_config(quick=True)
    vocab, hidden, mlp, layers, heads, kv_heads, tied = SHAPES[name]
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        tie_word_embeddings=tied,
        max_position_embeddings=65_536,
    )


def set_figures(trees: Sequence[PrefixTree]) -> dict[str, float]:
    """The figures that were published of the 64 trees, of these ones."""
    stats = [tree.stats() for tree in trees]

    def total(name: str) -> int:
        return sum(getattr(own, name) for own in stats)

    return {
        "branches": total("branches") / len(stats),
        "tokens": total("tree_tokens") / len(stats),
        "longest_path": total("longest_path") / len(stats),
        "token_ratio": total("branch_tokens") / total("tree_tokens"),
        "pair_ratio": total("branch_pairs") / total("tree_pairs"),
    }


def check_figures(figures: dict[str, float]) -> None:
    """Raises `ValueError` where a figure is not the published one."""
    off = {name: value for name, value in figures.items() if abs(value / PUBLISHED[name] - 1) > TOLERANCE}
    if off:
        raise ValueError(f"the set of trees is off the published figures {PUBLISHED}: {off}")


def turn_samples(tree: PrefixTree) -> list[Row]:
    """
    The flat samples of a caterpillar: per turn its context, reasoning and output, supervised where the turn wrote; and
    the final response.
    """
    *leaves, trunk = tree.branches()
    samples = []
    done = 0  # supervised tokens of the trunk before it belong to earlier turns
    for leaf in leaves:
        shared = min(len(leaf), len(trunk))
        differs = leaf.input_ids[:shared] != trunk.input_ids[:shared]
        fork = int(differs.argmax()) if differs.any() else shared
        silent = trunk.weights[fork:] == 0
        done = fork + int(silent.argmax())
        ids = np.concatenate([leaf.input_ids, trunk.input_ids[fork:done]])
        samples.append({"input_ids": ids.tolist(), "labels": [CROSS_ENTROPY_IGNORE_IDX] * fork + ids[fork:].tolist()})
    weights = trunk.weights.copy()
    weights[:done] = 0
    labels = np.where(weights > 0, trunk.input_ids, CROSS_ENTROPY_IGNORE_IDX)
    return [*samples, {"input_ids": trunk.input_ids.tolist(), "labels": labels.tolist()}]


class Clock(TrainerCallback):
    """Seconds of every optimizer step; the peak of the GPU's memory is that of all of them."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, []
        self.start = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.start = self._now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(self._now() - self.start)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def tokenizer() -> PreTrainedTokenizerFast:
    """Something to pad with: the rows are token ids already."""
    made = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def baseline_rows(mode: str, trees: Sequence[PrefixTree]) -> list[Row]:
    """The rows of a baseline, shuffled so that a step's rows come from anywhere."""
    rows = per_branch(trees) if mode == "per_branch" else [row for tree in trees for row in turn_samples(tree)]
    return [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]


def rows_per_step(mode: str, coverage: str, trees: Sequence[PrefixTree], trees_per_step: int, ranks: int) -> int:
    """Rows of a step over all ranks, a multiple of them."""
    if mode in ("tree", "grouped"):
        wanted = float(trees_per_step)
    elif coverage == "published":
        wanted = float(trees_per_step * BRANCHES_PER_TREE)
    else:
        wanted = trees_per_step * set_figures(trees)["branches"]
    return max(1, round(wanted / ranks)) * ranks


def make_trainer(mode: str, coverage: str, trees: Sequence[PrefixTree], args: Any, device: torch.device) -> SFTTrainer:
    """The trainer of a mode; the models of all modes have the same weights."""
    dtype = getattr(torch, args.dtype)
    on_trees = mode in ("tree", "grouped")
    folder = tempfile.mkdtemp()
    options: dict[str, Any] = {
        "max_steps": args.steps,
        "gradient_accumulation_steps": rows_per_step(mode, coverage, trees, args.trees_per_step, RANKS) // RANKS,
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": dtype == torch.bfloat16 and not args.quick,
        "gradient_checkpointing": args.checkpointing,
        "train_sampling_strategy": "sequential",
        "max_length": None,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": args.quick,
        "ddp_find_unused_parameters": False,
    }
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(shape_config(args.shape)),
            dtype=dtype,
            attn_implementation="prefix_tree" if on_trees else args.baseline_attention,
        )
    if on_trees:
        options |= {"mode": mode, "compile_layers": args.compile, "dataset_kwargs": {"skip_prepare_dataset": True}}
        rows = [{"trees": [tree.to_dict()], "tree_ids": [index]} for index, tree in enumerate(trees)]
        return TreeSFTTrainer(
            model=model,
            args=TreeSFTConfig(folder, **options),
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
        )
    if args.compile:
        for layer in model.model.layers:
            layer.compile()
    return SFTTrainer(
        model=model,
        args=SFTConfig(folder, dataset_kwargs={"skip_prepare_dataset": True}, **options),
        train_dataset=Dataset.from_list(baseline_rows(mode, trees)),
        processing_class=tokenizer(),
    )


def measure_mode(mode: str, coverage: str, trees: Sequence[PrefixTree], args: Any, device: torch.device) -> Row:
    row: Row = {"mode": mode, "coverage": coverage, "shape": args.shape, "dtype": args.dtype, "gpus": RANKS}
    row |= {"checkpointing": args.checkpointing, "compiled": args.compile, "attention": args.baseline_attention}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(device)
    trainer = make_trainer(mode, coverage, trees, args, device)
    trainer.add_callback(clock)
    row["engine"] = trainer.accelerator.distributed_type.value
    try:
        trainer.train()
    except torch.cuda.OutOfMemoryError:
        return row | {"failure": "out of memory"}
    own = torch.tensor(
        [torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0, clock.seconds[0]], device=device
    )
    peak, first = trainer.accelerator.gather(own[None]).amax(dim=0).tolist()
    milliseconds = [1e3 * seconds for seconds in clock.seconds[1:]]
    per_step = trainer.args.gradient_accumulation_steps * RANKS
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    covered = statistics.mean(entry.get("tree/branches", per_step) for entry in log[1:])
    median = statistics.median(milliseconds)
    return row | {
        "rows_per_step": per_step,
        "branches_per_step": covered,
        "steps": len(clock.seconds),
        "first_step_s": first,
        "ms": median,
        "low": min(milliseconds),
        "high": max(milliseconds),
        "peak_gib": peak if device.type == "cuda" else None,
        "ms_per_branch": median / covered,
        "first_loss": log[0]["loss"],
        "loss": log[-1]["loss"],
        "imbalance": log[-1].get("tree/imbalance"),
        "flop_ratio": flop_ratio(trees, args.shape) if mode == "tree" else None,
    }


def flop_ratio(trees: Sequence[PrefixTree], shape: str) -> float:
    counts = flop_counts(trees, shape_config(shape))
    return counts["branches"]["tflop"] / counts["folded"]["tflop"]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, MODES)
    parser.add_argument("--coverage", nargs="+", choices=("published", "equal"), default=["published", "equal"])
    parser.add_argument("--shape", choices=[*SHAPES, "quick"], default="0.6b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trees-per-step", type=int, default=4, help="over all GPUs; 4 were published")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing")
    parser.add_argument("--compile", action="store_true", help="compile every decoder layer by itself")
    parser.add_argument("--baseline-attention", default="sdpa", help="attention of the modes without trees")
    args = parser.parse_args(argv)
    device = default_device(args.quick)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if args.quick:
        args.shape, args.dtype, args.steps = "quick", "float32", min(args.steps, 3)
        transformers.utils.logging.set_verbosity_error()
        sizes = {"reasoning_tokens": 6, "output_tokens": 5, "reply_tokens": 9, "final_tokens": 9, "vocab_size": 99}
        trees = [caterpillar(3, seed, **sizes) for seed in range(8)]
    else:
        trees = caterpillar_set()
        check_figures(set_figures(trees))
    is_main = RANK == 0
    if is_main:
        print("  ".join(f"{name}={value:.2f}" for name, value in set_figures(trees).items()), flush=True)
    rows: list[Row] = []
    for mode in args.only:
        for coverage in args.coverage:
            if mode in ("tree", "grouped") and coverage != args.coverage[0]:
                continue  # the same step
            row = measure_mode(mode, coverage, trees, args, device)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if is_main or "failure" in row:
                progress(rows, row)
            if "failure" in row:
                break
    if is_main:
        rows = report(rows, COLUMNS, device, args)
    if any("failure" in row for row in rows):
        raise SystemExit("out of memory")  # the launcher then ends the ranks that wait
    PartialState().destroy_process_group()
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
