# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Host time of the checks that a prepared model makes in each call with a tree, before and after its forward, without
gathering and masks.

    python -m benchmarks.call_overhead --launches 5 --output call.csv

The calls are training calls of Qwen3-0.6B with its 28 layers. On a CPU the layers are narrow, because the checks read
modules and the batch, never weights. `loss` names who weights the tokens: the model, as with a plain `Trainer`, or the
caller, as in `TreeSFTTrainer`. On a GPU the device is idle when a call starts, and every eighth
call compares the inputs of eight; `mean_us` includes its share. `--launches` measures in fresh processes, one after
the other; the last rows, without a `launch`, are the medians.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from benchmarks.common import Row, make_parser, progress, read_csv, report
from benchmarks.flops import shape_config
from benchmarks.shapes import QUICK, SHAPES, build
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.batch import UNPREPARED_SENTINEL, concatenate_trees, gather_supervised
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.prepare import TREE, check_call

CALLS, QUICK_CALLS, WARMUP = 200, 5, 20
TIMES = ("median_us", "mean_us", "low_us", "high_us")
COLUMNS = ["launch", "shape", "tokens", "layers", "loss", "median_us", "mean_us", "low_us", "high_us", "calls"]


def make_model(quick: bool, device: torch.device) -> torch.nn.Module:
    config = shape_config("0.6b" if device.type == "cuda" else "quick")
    if not quick:
        config.num_hidden_layers = shape_config("0.6b").num_hidden_layers
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="prefix_tree")
    return prepare_model(model).train()


def time_checks(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], is_weighted: bool, calls: int, device: torch.device
) -> Row:
    times = []
    # what the checks see when the forward returns
    context = TreeContext(batch["prefix_tree"], gather_supervised(batch["prefix_tree"], batch["labels"]))
    output = CausalLMOutputWithPast(loss=torch.zeros((), device=device))
    context.is_weighted, context.loss, context.masks = is_weighted, output.loss, {("causal", None): output}
    for _ in range(WARMUP + calls):
        kwargs = dict(batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        check_call(model, kwargs, is_weighted)
        TREE.leave(model, context, kwargs, output)
        times.append(1e6 * (time.perf_counter() - start))
    times = times[WARMUP:]
    middle = {"median_us": statistics.median(times), "mean_us": statistics.mean(times)}
    return {**middle, "low_us": min(times), "high_us": max(times), "calls": calls}


def launch(args: argparse.Namespace) -> list[Row]:
    """The rows of `args.launches` fresh processes, and their medians."""
    rows: list[Row] = []
    command = [sys.executable, "-m", "benchmarks.call_overhead", *["--quick"] * args.quick, "--only", *args.only]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "call.csv"
        for number in range(1, args.launches + 1):
            subprocess.run([*command, "--output", str(output)], check=True)
            measured = [row | {name: float(row[name]) for name in TIMES} for row in read_csv(output)]
            rows += [{"launch": number, **row} for row in measured]
    kinds = len(rows) // args.launches
    for first in rows[:kinds]:
        same = [row for row in rows if (row["shape"], row["loss"]) == (first["shape"], first["loss"])]
        medians = {name: statistics.median(row[name] for row in same) for name in TIMES}
        rows.append({**first, "launch": "", **medians})
    return rows


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SHAPES, defaults=["caterpillar-8k"])
    parser.add_argument("--launches", type=int, default=0, help="fresh processes to measure in (default: this one)")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() and not args.quick else "cpu")
    if args.launches:
        return report(launch(args), COLUMNS, device, args)
    model = make_model(args.quick, device)
    rows: list[Row] = []
    for shape in args.only:
        batch = concatenate_trees([build((QUICK if args.quick else SHAPES)[shape])], pad_token_id=0)
        batch = {name: value.to(device) for name, value in batch.items() if name != UNPREPARED_SENTINEL}
        for loss in ("model", "caller"):
            row = {"shape": shape, "tokens": batch["input_ids"].numel(), "layers": model.config.num_hidden_layers}
            timing = time_checks(model, batch, loss == "caller", QUICK_CALLS if args.quick else CALLS, device)
            progress(rows, {**row, "loss": loss, **timing})
    return report(rows, COLUMNS, device, args)


if __name__ == "__main__":
    main(sys.argv[1:])
