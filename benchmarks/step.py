# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A whole optimizer step, folded against branch by branch: random bf16 weights, fused AdamW, TRL's head.

    python -m benchmarks.step --output step.csv
    python -m benchmarks.step --modes eager compiled --checkpointing off on --only caterpillar-8k
    python -m benchmarks.step --model qwen3.5-0.8b --checkpointing off on --only caterpillar-8k 4k+16x512
    python -m benchmarks.step --modes compiled graphs --methods folded --only 1k+64x64

Both sides train the same branches with the same weights in the same model, so `loss` agrees. Branches are packed into
micro-batches of at most `--micro-batch-tokens` and use the fastest attention kernel on this GPU: `kernels_ms` has
the times of all kernels in packed.py (or of `--kernels`, if it is known which ones are slower), for the attention of
one layer. If the fastest is cuDNN, which breaks compiled layers into two, the next one is tried as well. Trees are
packed into the same budget; a tree or a branch above it is a separate micro-batch. `memory_ratio` compares the peaks
of these micro-batches, `rows_ratio` compares with branches in packed sequences as long as the longest one of the trees
(or of the branches). A step is one tree of a shape; `--fill` takes as many as fill a micro-batch, as in training, so
that costs that do not depend on tokens (optimizer, host calls) matter little on both sides. Steps follow one
another, and every micro-batch is copied to the GPU when it is needed, as in training.

`--backends` sets the `attn_backend` of the trees; `kernel` is the chosen kernel. `compiled` compiles every decoder
layer separately. `graphs`, trees only, records the compiled layers, forward and backward, as two CUDA graphs of this
one tree, which every step replays: the time of a step on a fixed tree without the host's work in the layers. On a CPU
nothing is recorded.

`--methods folded` measures trees only, without ratios to branches. `--profile` profiles another step of each row of
trees and writes where its time goes to `..._profile.csv`: profiles.py explains the categories. `host_forward_ms` is
the time in which the host launches a forward of a micro-batch, `host_backward_ms` its backward; if the device is
slower, they include waiting for it. In eager layers, several `--backends` take turns; host.py times what differs.

`--model` is Qwen3-0.6B, the shape of Qwen3-8B (which fits short steps only), or the hybrid Qwen3.5-0.8B: three of four
layers are a gated delta rule. On a GPU both sides need the kernels of
`flash-linear-attention` for it. microbatches.py explains how its recurrent layers keep packed branches apart. It runs
eagerly only, because recurrent layers on trees are not compiled.

`flop_ratio` is the gain of the step if time were FLOPs: linear layers and recurrent scans over all tokens, the head
over supervised tokens, attention over visible pairs. `bound_share` is the reached part of that gain. `roof_share` is
the share of a large matrix product's FLOP/s that a step reaches.
"""

from __future__ import annotations

import copy
import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig
from trl.trainer.utils import add_fused_lm_head

from benchmarks.common import (
    Row,
    default_device,
    environment,
    make_parser,
    matmul_roof,
    measure,
    measure_in_a_row,
    peak_gib,
    progress,
    report,
)
from benchmarks.flops import MODELS, flop_counts, model_config, work_of
from benchmarks.microbatches import BranchStep, FoldedStep, convolution_gap, scan_starts_anew
from benchmarks.packed import IMPLEMENTATION, packed_attention
from benchmarks.profiles import COLUMNS as PROFILE_COLUMNS
from benchmarks.profiles import Events, host_functions, profiled, summary, write_profiles
from benchmarks.shapes import QUICK, SHAPES, build, conversation_trees
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.attention import backend as backends
from hf_prefix_tree.modeling.attention.backend import ATTN_BACKENDS
from hf_prefix_tree.tree.prefix_tree import PrefixTree

Profile = Callable[[Events, float, list[Row]], None]
Side = tuple[torch.nn.Module, FoldedStep | BranchStep]
DEFAULT_SHAPES = ("caterpillar-8k", "4k+16x512", "1k+64x64", "search")
FROM_FILE = "conversations"
COLUMNS = [
    "model",
    "shape",
    "method",
    "mode",
    "checkpointing",
    "backend",
    "kernel",
    "trees",
    "row_tokens",
    "ms",
    "low",
    "high",
]
COLUMNS += ["peak_gib", "roof_share", "loss", "token_ratio", "flop_ratio", "speedup", "bound_share"]
COLUMNS += ["memory_ratio", "rows_ratio", "host_forward_ms", "host_backward_ms", "failure"]


def make_model(
    config: PreTrainedConfig, method: str, backend: str, compiled: bool, device: torch.device, dtype: torch.dtype
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


class Graphed(torch.nn.Module):
    """
    All decoder layers as one. After `record` the next call makes CUDA graphs of their forward and backward, for its
    length and its tree, whose mask must live at the same addresses; later calls replay them. On a CPU nothing is
    recorded.
    """

    def __init__(self, layers: torch.nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self.replay: list[Any] = []  # a list, as its layers are these

    def record(self) -> None:
        self.replay.append(None)

    def forward(self, hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if not self.replay:  # the model checks its layers on other trees first
            return AllLayers(self.layers, kwargs)(hidden)
        if self.replay[0] is None:
            caches = {name: None for name in ("past_key_values", "cache") if name in kwargs}
            run: Any = AllLayers(self.layers, kwargs | caches)
            if hidden.is_cuda:
                example = hidden.detach().clone().requires_grad_()
                run = torch.cuda.make_graphed_callables(run, (example,), allow_unused_input=True)
            self.replay[0] = run
        return self.replay[0](hidden)


class AllLayers(torch.nn.Module):
    def __init__(self, layers: torch.nn.ModuleList, context: dict[str, Any]) -> None:
        super().__init__()
        self.layers, self.context = layers, context

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden, **self.context)
        return hidden


def host_times(sides: Sequence[Side], device: torch.device, repeats: int) -> list[Row]:
    """
    Milliseconds in which the host launches a forward, and a backward, of a micro-batch on an idle device. An untimed
    one of the same model precedes it, so that the caches of the processor are warm.
    """
    times: list[list[tuple[float, float]]] = [[] for _ in sides]
    gc.disable()  # a collection takes tens of milliseconds, and would fall into some of the forwards
    try:
        for _ in range(repeats):
            gc.collect()
            for (model, step), of_side in zip(sides, times, strict=True):
                step.losses[0](model).backward()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                loss = step.losses[0](model)
                middle = time.perf_counter()
                loss.backward()
                of_side.append((1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)))
    finally:
        gc.enable()
    medians = [map(statistics.median, zip(*of_side, strict=True)) for of_side in times]
    return [dict(zip(("host_forward_ms", "host_backward_ms"), both, strict=True)) for both in medians]


def measure_step(
    model: torch.nn.Module,
    step: FoldedStep | BranchStep,
    checkpointing: bool,
    seconds: float | None,
    device: torch.device,
    profile: Profile | None = None,
) -> Row:
    """
    Time and peak memory of a step; only the memory of its second run if `seconds` is `None`. Then `profile` gets the
    events of another one, the milliseconds of the median, and the functions in which the host spends a forward.
    """
    # With a learning rate of 0 a step does all its work and leaves the weights unchanged.
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

    row: Row = {}

    def repeat() -> None:
        if seconds is None:
            run()
        else:
            row.update(measure_in_a_row(run, device, seconds=seconds, max_runs=100)._asdict())

    try:
        losses: list[torch.Tensor] = []
        first = measure(lambda: losses.append(run()), device, warmup=0, max_runs=1, min_runs=1).ms / 1e3
        measured = {"first_step_s": first, "loss": losses[0].item(), "peak_gib": peak_gib(repeat, device), **row}
        try:
            if profile is not None:
                with profiled(device) as events:
                    run()
                measured |= host_times([(model, step)], device, repeats=10 if measured["ms"] < 500 else 1)[0]
                profile(events, measured["ms"], host_functions(lambda: step.losses[0](model)))
        except RuntimeError as error:  # the times stay
            measured["failure"] = f"no profile: {(str(error).splitlines() or [''])[0]}"
        return measured
    except torch.cuda.OutOfMemoryError:
        return {"failure": "out of memory"}
    finally:
        optimizer.zero_grad()


def add_ratios(rows: list[Row]) -> None:
    """Adds speed-up, memory ratio and FLOP ratio to the rows of trees."""
    branches = {(row["shape"], row["mode"], row["checkpointing"]): row for row in rows if row["method"] == "branches"}
    for row in rows:
        unfolded = branches.get((row["shape"], row["mode"], row["checkpointing"]))
        if row["method"] != "folded" or unfolded is None:
            continue
        row["flop_ratio"] = unfolded["tflop"] / row["tflop"]
        if "ms" in row and "ms" in unfolded:
            row["speedup"] = unfolded["ms"] / row["ms"]
            row["bound_share"] = row["speedup"] / row["flop_ratio"]
            if row["peak_gib"] is not None:
                row["memory_ratio"] = row["peak_gib"] / unfolded["peak_gib"]
                if unfolded["peak_gib_in_rows"] is not None:
                    row["rows_ratio"] = row["peak_gib"] / unfolded["peak_gib_in_rows"]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, [*SHAPES, FROM_FILE], DEFAULT_SHAPES)
    parser.add_argument("--model", choices=MODELS, default=MODELS[0])
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=("eager", "compiled", "graphs"),
        help="eager and compiled by default; of a hybrid model, eager",
    )
    parser.add_argument("--methods", nargs="+", choices=("folded", "branches"), default=["folded", "branches"])
    parser.add_argument("--profile", action="store_true", help="another step of each row, by category of kernels")
    parser.add_argument("--backends", nargs="+", choices=ATTN_BACKENDS, default=["auto"])
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument(
        "--kernels", nargs="+", choices=("fa2", "fa4", "cudnn", "flex"), help="for branches; all by default"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=16_384)
    parser.add_argument("--fill", action="store_true", help="as many trees of a shape as fill a micro-batch")
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
    config = model_config(args.quick, args.model)
    gap = convolution_gap(config)
    if gap and {"compiled", "graphs"} & set(args.modes or ()):
        parser.error(f"`--modes compiled`: the recurrent layers of {args.model} follow a tree eagerly only")
    device = default_device(args.quick)
    dtype = torch.float32 if args.quick else torch.bfloat16
    modes = ["eager"] if gap else args.modes or ["eager", "compiled"]
    if args.quick:
        modes = [mode for mode in modes if mode != "compiled"]
    branch_budget = args.micro_batch_tokens
    if gap and not scan_starts_anew(config, device):
        if device.type == "cuda":
            raise SystemExit(f"{args.model} needs `flash-linear-attention`: without it branches can't be packed.")
        branch_budget = gap = 0  # every branch is a separate sequence
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    shapes: dict[str, list[PrefixTree]] = {}
    for name in args.only:
        if name == FROM_FILE:
            shapes[name] = conversation_trees(args.conversations, args.tokenizer, args.tools, args.trees)
        else:
            nodes = (QUICK if args.quick else SHAPES)[name]
            copies = max(1, args.micro_batch_tokens // sum(length for _, length, _ in nodes)) if args.fill else 1
            shapes[name] = [build(nodes, seed, config.vocab_size) for seed in range(copies)]
    roof = matmul_roof(device, dtype)
    folded_steps, branch_steps, short_steps = {}, {}, {}
    kernel_times: dict[str, dict[str, float]] = {}
    for name, trees in shapes.items():
        folded_steps[name] = FoldedStep(trees, args.micro_batch_tokens, device)
        if "branches" not in args.methods:
            continue
        branch_steps[name] = BranchStep(trees, branch_budget, device, gap)
        short_steps[name] = BranchStep(trees, min(branch_budget, folded_steps[name].row_tokens), device, gap)
        kernel_times[name] = branch_steps[name].time_kernels(config, device, dtype, args.kernels)
    rows: list[Row] = []
    profiles: list[Row] = []

    def measure_branches(name: str, model: torch.nn.Module, compiled: bool, checkpointing: bool) -> Row:
        """With the kernel of the fastest step."""
        times = kernel_times[name]
        tried = sorted((kernel for kernel in times if times[kernel] < math.inf), key=times.__getitem__)
        tried = tried[: 2 if compiled and tried[0] == "cudnn" else 1]
        runs: list[Row] = []
        for kernel in tried:
            branch_steps[name].use(kernel)
            measured = measure_step(model, branch_steps[name], checkpointing, args.seconds, device)
            runs.append({"kernel": kernel, **measured})
        best = min(runs, key=lambda row: row.get("ms", float("inf")))
        best["peak_gib_in_rows"] = best.get("peak_gib")
        if short_steps[name].row_tokens < branch_steps[name].row_tokens:
            short_steps[name].use(best["kernel"])
            short = measure_step(model, short_steps[name], checkpointing, None, device)
            best["peak_gib_in_rows"] = short.get("peak_gib")
        best["kernels_ms"] = ", ".join(f"{kernel} {ms:.2f}" for kernel, ms in times.items())
        return best

    def measure_all(mode: str, method: str, backend: str) -> list[tuple[Row, Side]]:
        measured: list[tuple[Row, Side]] = []
        gc.collect()  # compiled layers and hooks keep the previous model in cycles
        torch._dynamo.reset()  # no graph of another mode is used again
        kept = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0  # models that wait for a turn
        model = make_model(config, method, backend, mode != "eager" and not args.quick, device, dtype)
        if mode == "graphs":
            layers = Graphed(model.model.layers)
            model.model.layers = torch.nn.ModuleList([layers])
            folded_steps[args.only[0]].losses[0](model).backward()  # the first call checks the layers and compiles
            layers.record()
        for checkpointing, (name, trees) in product(args.checkpointing, shapes.items()):
            backends._sparse.clear()  # every shape is the first one of its length
            step = (folded_steps if method == "folded" else branch_steps)[name]
            row: Row = {"model": args.model, "shape": name, "method": method}
            row |= {"mode": mode, "checkpointing": checkpointing}
            stats = [tree.stats() for tree in trees]
            row |= {name: sum(getattr(tree, name) for tree in stats) for name in ("branch_tokens", "tree_tokens")}
            row["token_ratio"] = row["branch_tokens"] / row["tree_tokens"]
            row |= {"trees": len(trees), "row_tokens": step.row_tokens, "micro_batches": len(step.losses)}
            row |= flop_counts(trees, config)[method]
            if isinstance(step, FoldedStep):
                row |= {"backend": backend, "kernel": step.kernel(backend, config, dtype)}
                work = work_of(row, config)

                def add_profile(
                    events: Events, ms: float, host: list[Row], row: Row = row, work: dict[str, float] = work
                ) -> None:
                    where = {
                        name: row[name] for name in ("model", "shape", "mode", "checkpointing", "kernel", "trees")
                    }
                    profiles.extend(where | line for line in [*summary(events, ms, work, roof), *host])

                add = add_profile if args.profile else None
                try:
                    row |= measure_step(model, step, checkpointing == "on", args.seconds, device, add)
                except Exception as error:
                    if mode != "graphs":
                        raise
                    row["failure"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            else:
                row |= measure_branches(name, model, mode == "compiled", checkpointing == "on")
            for peak in ("peak_gib", "peak_gib_in_rows"):
                if row.get(peak) is not None:
                    row[peak] -= kept
            if "ms" in row:
                row |= {"roof_tflops": roof, "roof_share": row["tflop"] / row["ms"] * 1e3 / roof}
            progress(rows, row)
            measured.append((rows[-1], (model, step)))
        return measured

    try:
        # beyond the recompile limit, layers would silently run eagerly
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=64):
            for mode in modes:
                # The host's speed varies within minutes: models whose host was timed are kept, and timed in turn.
                takes_turns = mode == "eager" and len(args.backends) > 1 and len(args.checkpointing) == 1
                sides: list[tuple[Row, Side]] = []
                for backend in args.backends if "folded" in args.methods else ():
                    measured = measure_all(mode, "folded", backend)
                    sides += [side for side in measured if takes_turns and "host_forward_ms" in side[0]]
                for (row, _), times in zip(sides, host_times([x for _, x in sides], device, 20), strict=True):
                    row |= times
                if "branches" in args.methods and mode != "graphs":
                    measure_all(mode, "branches", "auto")
    finally:
        add_ratios(rows)
        rows = report(rows, COLUMNS, device, args)
        columns = ["shape", "mode", *PROFILE_COLUMNS]
        write_profiles(profiles, args.output, environment(device, args.commit), columns)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
