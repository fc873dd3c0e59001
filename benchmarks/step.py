# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A whole optimizer step, folded against branch by branch: Qwen3-0.6B of random bf16 weights, fused AdamW, TRL's head.

    python -m benchmarks.step --output step.csv
    python -m benchmarks.step --modes eager compiled --checkpointing off on --only caterpillar-8k

Both sides train the same branches with the same weights in the same model; `loss` shows it. Branches are packed into
micro-batches of at most `--micro-batch-tokens` and attend through the kernel that is fastest for them here:
`kernels_ms` has the times of all that packed.py lists, for the attention of one layer. Trees are packed under the same
budget; a tree or a branch above it is a micro-batch of its own. `--backends` are the `attn_backend` of the trees;
`kernel` is what `auto` took. `compiled` compiles every decoder layer by itself.

`flop_ratio` is what the step would gain if time were FLOPs: linear layers over all tokens, the head over supervised
ones, attention over visible pairs. `roof_share` is the share of a large matrix product's FLOP/s that a step reaches.
"""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config
from trl.trainer.utils import add_fused_lm_head

from benchmarks.common import Row, default_device, make_parser, matmul_roof, measure, peak_gib, progress, report
from benchmarks.flops import model_config
from benchmarks.microbatches import BranchStep, FoldedStep
from benchmarks.packed import IMPLEMENTATION, packed_attention
from benchmarks.shapes import QUICK, SHAPES, build, conversation_trees
from hf_prefix_tree import prepare_model
from hf_prefix_tree.attention.backend import ATTN_BACKENDS
from hf_prefix_tree.flops import flop_counts
from hf_prefix_tree.tree import PrefixTree

DEFAULT_SHAPES = ("caterpillar-8k", "4k+16x512", "1k+64x64", "search")
FROM_FILE = "conversations"
COLUMNS = ["shape", "method", "mode", "checkpointing", "backend", "kernel", "row_tokens", "ms", "low", "high"]
COLUMNS += ["peak_gib", "roof_share", "loss", "token_ratio", "flop_ratio", "speedup", "memory_ratio", "failure"]


def make_model(
    config: Qwen3Config, method: str, backend: str, compiled: bool, device: torch.device, dtype: torch.dtype
) -> torch.nn.Module:
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation="prefix_tree" if method == "folded" else IMPLEMENTATION,
        )
    model.train()
    add_fused_lm_head(model)
    if method == "folded":
        prepare_model(model, attn_backend=backend, compile_layers=compiled)
    elif compiled:
        for layer in model.model.layers:
            layer.compile()
    return model


def measure_step(
    model: torch.nn.Module, step: FoldedStep | BranchStep, checkpointing: bool, seconds: float, device: torch.device
) -> Row:
    # A learning rate of 0 does all the work of a step and leaves the weights of all runs the same.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.gradient_checkpointing_disable()

    def run() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for loss_of in step.losses:
            loss = loss_of(model)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return total

    try:
        first = measure(run, device, warmup=0, most=1, least=1).ms / 1e3
        losses: list[torch.Tensor] = []
        peak = peak_gib(lambda: losses.append(run()), device)
        row: Row = {"first_step_s": first, "loss": losses[0].item(), "peak_gib": peak}
        return row | measure(run, device, warmup=0, seconds=seconds)._asdict()
    except torch.cuda.OutOfMemoryError:
        return {"failure": "out of memory"}
    finally:
        optimizer.zero_grad()


def add_ratios(rows: list[Row]) -> None:
    """Speed-up, memory ratio and FLOP ratio, on the folded rows."""
    branches = {(row["shape"], row["mode"], row["checkpointing"]): row for row in rows if row["method"] == "branches"}
    for row in rows:
        other = branches.get((row["shape"], row["mode"], row["checkpointing"]))
        if row["method"] != "folded" or other is None:
            continue
        row["flop_ratio"] = other["tflop"] / row["tflop"]
        if "ms" in row and "ms" in other:
            row["speedup"] = other["ms"] / row["ms"]
            if row["peak_gib"] is not None:
                row["memory_ratio"] = row["peak_gib"] / other["peak_gib"]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, [*SHAPES, FROM_FILE], DEFAULT_SHAPES)
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager", "compiled"])
    parser.add_argument("--backends", nargs="+", choices=ATTN_BACKENDS, default=["auto"])
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--seconds", type=float, default=1.5, help="time for the repeats of one measurement")
    parser.add_argument("--conversations", type=Path, help=f"JSONL file for `--only {FROM_FILE}`")
    parser.add_argument("--tokenizer", help="tokenizer with a chat template, for `--conversations`")
    parser.add_argument("--tools", type=Path, help="JSON file with the tools of the conversations")
    parser.add_argument("--trees", type=int, default=2, help="groups of the file that make up the step")
    args = parser.parse_args(argv)
    if FROM_FILE in args.only and not (args.conversations and args.tokenizer):
        parser.error(f"`--only {FROM_FILE}` needs `--conversations` and `--tokenizer`")
    if FROM_FILE in args.only and args.quick:
        parser.error(f"`--quick` has a small vocabulary: leave `{FROM_FILE}` out")
    device = default_device(args.quick)
    dtype, modes = (torch.float32, ["eager"]) if args.quick else (torch.bfloat16, args.modes)
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    config = model_config(args.quick)
    shapes: dict[str, list[PrefixTree]] = {}
    for name in args.only:
        if name == FROM_FILE:
            shapes[name] = conversation_trees(args.conversations, args.tokenizer, args.tools, args.trees)
        else:
            shapes[name] = [build((QUICK if args.quick else SHAPES)[name], vocab=config.vocab_size)]
    roof = matmul_roof(device, dtype)
    steps: dict[tuple[str, str], FoldedStep | BranchStep] = {}
    kernel_times: dict[str, dict[str, float]] = {}
    kernels: dict[str, str] = {}
    for name, trees in shapes.items():
        steps[name, "folded"] = FoldedStep(trees, args.micro_batch_tokens, device)
        steps[name, "branches"] = branches = BranchStep(trees, args.micro_batch_tokens, device)
        kernel_times[name] = times = branches.time_kernels(config, device, dtype)
        kernels[name] = min(times, key=times.__getitem__)
    rows: list[Row] = []

    def measure_all(mode: str, method: str, backend: str) -> None:
        gc.collect()  # compiled layers and hooks keep the previous model in cycles
        torch._dynamo.reset()  # no graph of another mode is used again
        model = make_model(config, method, backend, mode == "compiled", device, dtype)
        for checkpointing, (name, trees) in product(args.checkpointing, shapes.items()):
            step = steps[name, method]
            if isinstance(step, BranchStep):
                step.use(kernels[name])
            row: Row = {"shape": name, "method": method, "mode": mode, "checkpointing": checkpointing}
            if method == "branches":
                row["kernel"] = kernels[name]
                row["kernels_ms"] = ", ".join(f"{kernel} {ms:.2f}" for kernel, ms in kernel_times[name].items())
            else:
                row |= {"backend": backend, "kernel": step.kernel(backend, config, dtype)}
            stats = [tree.stats() for tree in trees]
            row |= {name: sum(getattr(own, name) for own in stats) for name in ("branch_tokens", "tree_tokens")}
            row["token_ratio"] = row["branch_tokens"] / row["tree_tokens"]
            row |= {"row_tokens": step.row_tokens, "micro_batches": len(step.losses)}
            row |= flop_counts(trees, config)[method]
            row |= measure_step(model, step, checkpointing == "on", args.seconds, device)
            if "ms" in row:
                row |= {"roof_tflops": roof, "roof_share": row["tflop"] / row["ms"] * 1e3 / roof}
            progress(rows, row)

    try:
        # beyond the limit of recompilation, layers would run eagerly in silence
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for mode in modes:
                for backend in args.backends:
                    measure_all(mode, "folded", backend)
                measure_all(mode, "branches", "auto")
    finally:
        add_ratios(rows)
        rows = report(rows, COLUMNS, device, args)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
