# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The published comparison on any number of GPUs: whole training steps of the trainers, on 64 caterpillars.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.scaling --checkpointing --output scaling_2.csv
    accelerate launch --config_file examples/accelerate/fsdp2.yaml --num_processes 4 --module benchmarks.scaling \\
        --shape 8b --checkpointing --output scaling_8b_4.csv

Modes: `tree` (folded trees), `per_branch` (TRL's SFTTrainer on the branches), `grouped` (the trees branch by branch)
and `flat_steps` (SFTTrainer on one sample per turn, each token supervised once). A step has 4 trees over all GPUs, at
least one per GPU. `--trees-per-step` makes it larger, so that its trees can be balanced, best with several of them in
a micro-batch (`--trees-per-micro-batch`). `--max-packed-tokens` splits larger trees: a step then has as many parts,
which cover fewer branches. For each tree of a step a baseline's step has 4 samples at the `published` coverage, and as
many as a tree has branches, 20.5, at the `equal` coverage. Its micro-batch is one sample, which takes the least
memory, or `--branches-per-micro-batch` samples, padded as in TRL's trainer.

The baselines attend through PyTorch's FlashAttention-2 in bfloat16, and through its memory-efficient kernel in float32
or with padding (`--baseline-attention sdpa`): cuDNN would make a new plan for every length, and no other kernel takes
float32 or masks. Ranks wait for each other at every micro-batch, because TRL gathers its metrics there. Trees are
assigned to ranks so that these have equal cost; the samples of the baselines keep their order.

A step lasts from the end of the previous step, so it includes reading its data, until the slowest rank is done. `ms`
is the median of all steps except the first, `ms_per_branch` is `ms` divided by the branches (for `flat_steps`:
samples) of a step, `imbalance` the mean of `tree/imbalance`, and `peak_gib` the peak of the fullest GPU from the first
step on. `flop_ratio` is the gain of `tree` per branch if time were FLOPs. With `bfloat16` DDP trains weights and
optimizer states in bfloat16, FSDP2 keeps them in float32 (`weights`). FSDP2 reduces gradients in every micro-batch,
since otherwise each GPU would hold all of them.

The CSV file is written before and after each mode, so a launch that dies leaves its results, and its last mode with
the `failure`. If one rank of several runs out of memory, the launch ends: `--append` adds the remaining modes in
another launch.
"""

from __future__ import annotations

import argparse
import copy
import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from accelerate import PartialState
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.integrations import sdpa_attention
from trl import SFTConfig, SFTTrainer

from benchmarks.common import Results, Row, default_device, environment, make_parser, progress, report
from benchmarks.flops import SHAPES, flop_counts, shape_config
from benchmarks.published import MODES, ON_TREES, baseline_rows, check_figures, rows_per_step, set_figures
from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
from hf_prefix_tree.modeling.attention.kernels import one_graph_for_all_lengths
from hf_prefix_tree.report.gain import parts_of
from hf_prefix_tree.tree.prefix_tree import PrefixTree
from hf_prefix_tree.tree.synthetic import caterpillar, caterpillar_set

# Set by `torchrun` and `accelerate launch`.
RANKS, RANK = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
IS_FSDP = os.environ.get("ACCELERATE_USE_FSDP", "false") == "true"
COLUMNS = ["mode", "coverage", "shape", "dtype", "gpus", "engine", "rows_per_step", "ms", "low", "high", "peak_gib"]
COLUMNS += ["ms_per_branch", "loss", "imbalance", "flop_ratio", "failure"]


class Clock(TrainerCallback):
    """Seconds of every optimizer step, including reading its data; the peak memory counts from the first step on."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds = device, []
        self.last = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.last = self._now()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # building and sharding the model may have taken more

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = self._now()
        self.seconds.append(now - self.last)
        self.last = now

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer for padding only: the data is token ids already."""
    made = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def attention(mode: str, args: Any) -> str:
    return "prefix_tree" if mode in ON_TREES else args.baseline_attention


def rows_per_micro_batch(mode: str, args: Any) -> int:
    """Trees or branches of a rank's micro-batch; `grouped` takes a tree and runs it branch by branch."""
    return {"tree": args.trees_per_micro_batch, "grouped": 1}.get(mode, args.branches_per_micro_batch)


def is_checkpointed(mode: str, args: Any) -> bool:
    """`--checkpointing` alone means all modes."""
    return args.checkpointing is not None and (not args.checkpointing or mode in args.checkpointing)


def choose_kernels(dtype: str) -> None:
    """Selects the kernel of SDPA for the baselines on a GPU."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if dtype == "float32":  # its memory-efficient kernel does not support shared keys
        sdpa_attention.use_gqa_in_sdpa = lambda *args, **kwargs: False


def make_trainer(mode: str, coverage: str, trees: Sequence[PrefixTree], args: Any, device: torch.device) -> SFTTrainer:
    """The trainer of a mode; the models of all modes have the same weights."""
    dtype = getattr(torch, args.dtype)
    # The launcher's config would override `bf16=False`.
    os.environ["ACCELERATE_MIXED_PRECISION"] = precision = "bf16" if dtype == torch.bfloat16 else "no"
    on_trees = mode in ON_TREES
    batch_size = rows_per_micro_batch(mode, args)
    own_rows = rows_per_step(mode, coverage, trees, args.trees_per_step, RANKS, batch_size) // RANKS
    if own_rows % batch_size:
        raise ValueError(
            f"`--trees-per-micro-batch {batch_size}` does not divide the {own_rows} trees of a rank's step"
        )
    folder = tempfile.mkdtemp()
    options: dict[str, Any] = {
        "max_steps": args.steps,
        "gradient_accumulation_steps": own_rows // batch_size,
        "per_device_train_batch_size": batch_size,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused",
        "bf16": dtype == torch.bfloat16,
        "gradient_checkpointing": is_checkpointed(mode, args),
        "train_sampling_strategy": args.sampling,
        "max_length": None,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": args.quick,
        "ddp_find_unused_parameters": False,
    }
    if IS_FSDP:
        options["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(shape_config(args.shape)), dtype=dtype, attn_implementation=attention(mode, args)
        )
    if on_trees:
        options |= {"mode": mode, "compile_layers": args.compile}
        if mode == "tree":
            options |= {"max_packed_tokens": args.max_packed_tokens, "pack_trees": False}
        rows = [tree.to_dict() for tree in trees]
    else:
        options["dataset_kwargs"] = {"skip_prepare_dataset": True}
        rows = baseline_rows(mode, trees)
        if args.compile:
            for layer in model.model.layers:
                layer.compile()
    trainer_class, config_class = (TreeSFTTrainer, TreeSFTConfig) if on_trees else (SFTTrainer, SFTConfig)
    trainer = trainer_class(
        model=model,
        args=config_class(folder, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    if trainer.accelerator.mixed_precision != precision:
        raise RuntimeError(f"`--dtype {args.dtype}` trains with `{trainer.accelerator.mixed_precision}`")
    return trainer


def measure_mode(mode: str, coverage: str, trees: Sequence[PrefixTree], args: Any, device: torch.device) -> Row:
    """Trains in a mode. Every rank must call it, and gets the same figures."""
    clock = Clock(device)
    trainer = make_trainer(mode, coverage, trees, args, device)
    trainer.add_callback(clock)
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    measured = torch.tensor([peak, *clock.seconds], dtype=torch.float64, device=device)
    peak, first, *seconds = trainer.accelerator.gather(measured[None]).amax(dim=0).tolist()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    per_step = trainer.args.gradient_accumulation_steps * trainer.args.per_device_train_batch_size * RANKS
    covered = statistics.mean(entry.get("tree/branches", per_step) for entry in log[1:])
    imbalance = [entry["tree/imbalance"] for entry in log[1:] if "tree/imbalance" in entry]
    median = 1e3 * statistics.median(seconds)
    return {
        "engine": trainer.accelerator.distributed_type.value,
        "mixed_precision": trainer.accelerator.mixed_precision,
        "weights": str(next(trainer.model_wrapped.parameters()).dtype).removeprefix("torch."),
        "branches_per_step": covered,
        "steps": len(clock.seconds),
        "first_step_s": first,
        "ms": median,
        "low": 1e3 * min(seconds),
        "high": 1e3 * max(seconds),
        "peak_gib": peak if device.type == "cuda" else None,
        "ms_per_branch": median / covered,
        "first_loss": log[0]["loss"],
        "loss": log[-1]["loss"],
        "imbalance": statistics.mean(imbalance) if imbalance else None,
        "flop_ratio": flop_ratio(trees, args.shape, args.max_packed_tokens) if mode == "tree" else None,
    }


def flop_ratio(trees: Sequence[PrefixTree], shape: str, max_packed_tokens: int | None = None) -> float:
    """FLOPs of the branches divided by those of the trees, larger trees split."""
    parts = [part for tree in trees for part in parts_of(tree, max_packed_tokens)]
    counts = flop_counts(parts, shape_config(shape))
    return counts["branches"]["tflop"] / counts["folded"]["tflop"]


def measure(trees: Sequence[PrefixTree], args: Any, device: torch.device, state: PartialState) -> list[Row]:
    """The rows of all modes and coverages, printed and written one by one."""
    results = Results(args.output, environment(device, args.commit), args.append)
    for mode in args.only:
        # trees have the same step at any coverage
        for coverage in args.coverage[:1] if mode in ON_TREES else args.coverage:
            row: Row = {"mode": mode, "coverage": coverage, "shape": args.shape, "dtype": args.dtype, "gpus": RANKS}
            row |= {"checkpointing": is_checkpointed(mode, args), "compiled": args.compile, "sampling": args.sampling}
            row |= {"attention": attention(mode, args)}
            if mode == "tree":
                row["max_packed_tokens"] = args.max_packed_tokens
            row["rows_per_micro_batch"] = size = rows_per_micro_batch(mode, args)
            row["rows_per_step"] = rows_per_step(mode, coverage, trees, args.trees_per_step, RANKS, size)
            state.wait_for_everyone()  # all ranks have read the file
            if RANK == 0:
                results.write({**row, "failure": "did not finish"})
            state.wait_for_everyone()
            try:
                row |= measure_mode(mode, coverage, trees, args, device)
            except torch.cuda.OutOfMemoryError:
                row["failure"] = "out of memory"
                if RANKS > 1:  # the others wait for this rank, until the launcher ends them because of its exit code
                    results.write(row)
                    print(f"rank {RANK}: out of memory in {mode}, {coverage}", flush=True)
                    os._exit(1)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            if RANK == 0:
                progress(results.rows, row)
                results.write()
            else:
                results.rows.append(row)
            if "failure" in row:
                break  # a step with more samples needs the same memory
    return results.rows


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, MODES)
    parser.add_argument("--append", action="store_true", help="keep the rows that `--output` has")
    parser.add_argument("--coverage", nargs="+", choices=("published", "equal"), default=["published", "equal"])
    parser.add_argument("--shape", choices=[*SHAPES, "quick"], default="0.6b")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--trees-per-step", type=int, default=4, help="over all GPUs; 4 were published")
    parser.add_argument("--trees-per-micro-batch", type=int, default=1, help="of the mode `tree`")
    parser.add_argument("--branches-per-micro-batch", type=int, default=1, help="of `per_branch` and `flat_steps`")
    parser.add_argument("--max-packed-tokens", type=int, help="of the mode `tree`; larger trees are split")
    parser.add_argument("--sampling", choices=("sequential", "group_by_length"), default="sequential")
    parser.add_argument(
        "--checkpointing",
        nargs="*",
        choices=MODES,
        metavar="MODE",
        help="gradient checkpointing, of these modes or all",
    )
    parser.add_argument("--compile", action="store_true", help="compile every decoder layer by itself")
    parser.add_argument("--baseline-attention", default="sdpa", help="attention of the modes without trees")
    args = parser.parse_args(argv)
    if args.append and args.output is None:
        parser.error("`--append` needs `--output`, the CSV file to add to")
    if args.steps < 2:
        parser.error(f"`--steps {args.steps}`: the first step is not counted, at least 2 are needed")
    for name in ("trees_per_micro_batch", "branches_per_micro_batch"):
        if getattr(args, name) < 1:
            parser.error(f"`--{name.replace('_', '-')} {getattr(args, name)}`: at least 1")
    device = default_device(args.quick)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        choose_kernels(args.dtype)
    if args.quick:
        args.shape, args.dtype, args.steps = "quick", "float32", min(args.steps, 3)
        transformers.utils.logging.set_verbosity_error()
        sizes = {"reasoning_tokens": 6, "output_tokens": 5, "reply_tokens": 9, "final_tokens": 9, "vocab_size": 99}
        trees = [caterpillar(3, seed, **sizes) for seed in range(8)]
    else:
        trees = caterpillar_set()
        check_figures(set_figures(trees))
    if RANK == 0:
        print("  ".join(f"{name}={value:.2f}" for name, value in set_figures(trees).items()), flush=True)
    state = PartialState(cpu=args.quick)  # starts the process group
    with one_graph_for_all_lengths():  # for the baselines, which then compile as trees do
        rows = measure(trees, args, device, state)
    if RANK == 0:  # the file is written
        rows = report(rows, COLUMNS, device, argparse.Namespace(output=None, commit=args.commit))
    state.destroy_process_group()
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
