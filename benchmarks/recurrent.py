# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The recurrent scans of hybrid models over a tree: forking level by level, linking, and whole branches.

    python -m benchmarks.recurrent --output recurrent.csv

`fork` and `link` scan the tree (see `hf_prefix_tree.modeling.recurrent.scan`), `branches` scans every branch from its
root, like training them one by one. Forward and backward of one layer. `--quick` runs small shapes on a CPU; `--cpu`
runs the real shapes there, with few heads, with the reference scan of Transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from benchmarks.common import Row, default_device, make_parser, measure, peak_gib, progress, relative_error, report
from benchmarks.shapes import QUICK, SHAPES, build
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.recurrent.layers import delta_rule, mamba2
from hf_prefix_tree.modeling.recurrent.scan import Batch, Recurrence, Segments, fork, forking_is_cheaper, link
from hf_prefix_tree.tree.prefix_tree import PrefixTree, fold

WAYS = ("fork", "link", "branches")
RULES = ("delta", "mamba2")
COLUMNS = ["shape", "rule", "way", "chosen", "levels", "calls", "tokens", "ms", "low", "high", "peak_gib", "error"]


def segments_of(trees: list[PrefixTree], device: torch.device) -> Segments:
    row = concatenate_trees(trees, pad_token_id=0)
    context = TreeContext(row["prefix_tree"].to(device))
    context.attention_mask = row["attention_mask"].to(device)
    return Segments(context)


def random_inputs(rule: str, length: int, heads: int, dim: int, device: torch.device) -> list[torch.Tensor]:
    """Query, key, value, decay and overwrite of the delta rule; hidden states, steps and projections of Mamba2."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, length, *shape, device=device, dtype=dtype, generator=generator)

    if rule == "delta":
        q, k, v = normal(heads, dim), normal(heads, dim), normal(heads, dim)
        inputs = [q, k, v, -0.1 * normal(heads).float().sigmoid(), normal(heads).sigmoid()]
    else:
        inputs = [normal(heads, dim), 0.1 * normal(heads).float().sigmoid(), normal(1, dim), normal(1, dim)]
    return [x.detach().requires_grad_() for x in inputs]


def recurrence_of(rule: str, inputs: list[torch.Tensor], counts: list[int]) -> Recurrence:
    """The recurrence of a layer, which adds its calls and their tokens, padding included, to `counts`."""
    if rule == "delta":
        kernel = "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
        recurrence = delta_rule(kernel, torch_chunk_gated_delta_rule, *inputs, use_qk_l2norm_in_kernel=True)
    else:
        rates = -torch.ones(inputs[0].shape[2], device=inputs[0].device)
        recurrence = mamba2(mamba2_chunk_scan, *inputs[:2], rates, *inputs[2:], chunk_size=64)

    def count(batch: Batch) -> None:
        counts[0] += 1
        counts[1] += batch.tokens.numel()

    def scan(batch: Batch, state: torch.Tensor | None) -> Any:
        count(batch)
        return recurrence.scan(batch, state)

    def affine(batch: Batch) -> Any:
        count(batch)
        return recurrence.affine(batch)

    return recurrence._replace(scan=scan, affine=affine)


def measure_way(way: str, rule: str, segments: Segments, inputs: list[torch.Tensor]) -> tuple[Row, torch.Tensor]:
    """Times of a forward and backward pass of one layer, and its outputs."""
    device, counts = inputs[0].device, [0, 0]

    def step() -> torch.Tensor:
        counts[:] = [0, 0]
        for leaf in inputs:
            leaf.grad = None
        out = (link if way == "link" else fork)(segments, recurrence_of(rule, inputs, counts))
        out.float().square().sum().backward()
        return out.detach()

    row: Row = {"peak_gib": peak_gib(step, device), "calls": counts[0], "tokens": counts[1]}
    return row | measure(step, device, warmup=1, min_runs=2)._asdict(), step()


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SHAPES, [name for name in SHAPES if name != "caterpillar-37k"])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, metavar="WAY", help="any of: %(choices)s")
    parser.add_argument("--cpu", action="store_true", help="the real shapes on a CPU, with 2 heads of 64")
    args = parser.parse_args(argv)
    device = torch.device("cpu") if args.cpu else default_device(args.quick)
    heads, dim = (2, 16) if args.quick else (2, 64) if args.cpu else (16, 128)
    rows: list[Row] = []
    try:
        for shape in args.only:
            tree = build((QUICK if args.quick else SHAPES)[shape])
            branches = [fold([branch]) for branch in tree.branches()]
            for rule in RULES:
                expected = None
                for way in args.ways:
                    segments = segments_of(branches if way == "branches" else [tree], device)
                    inputs = random_inputs(rule, segments.num_tokens, heads, dim, device)
                    row, out = measure_way(way, rule, segments, inputs)
                    if way != "branches":  # both ways scan the same inputs
                        row["error"] = None if expected is None else relative_error(out, expected)
                        row["chosen"] = "yes" if forking_is_cheaper(segments) is (way == "fork") else ""
                        expected = out
                    progress(rows, {"shape": shape, "rule": rule, "way": way, "levels": segments.num_levels} | row)
    finally:
        rows = report(rows, COLUMNS, device, args)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
