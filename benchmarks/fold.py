# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""How fast branches fold: branch tokens per second of CPU time on one core.

    python -m benchmarks.fold --output fold.csv

`fold` is folding alone; `fold+check` also creates each `Branch` from plain arrays, which checks and copies them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import process_time

import torch

from benchmarks.common import Row, make_parser, measure, report
from benchmarks.shapes import FOLD_SHAPES, QUICK, build
from hf_prefix_tree.tree.prefix_tree import Branch, fold


@contextmanager
def one_core() -> Iterator[None]:
    """Binds the process to one core, if the system supports it."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    args = make_parser(__doc__, FOLD_SHAPES).parse_args(argv)
    device = torch.device("cpu")
    # the smallest shapes instead of the large ones
    shapes = dict(zip(FOLD_SHAPES, QUICK.values(), strict=False)) if args.quick else FOLD_SHAPES
    rows = []
    for name in args.only:
        tree = build(shapes[name])
        branches = tree.branches()
        arrays = [(branch.input_ids, branch.weights) for branch in branches]
        with one_core():
            timings = [
                measure(function, device, warmup=1, seconds=3, clock=process_time)
                for function in (
                    lambda branches=branches: fold(branches),
                    lambda arrays=arrays: fold([Branch(*parts) for parts in arrays]),
                )
            ]
        stats = tree.stats()
        assert fold(branches) == tree
        for method, timing in zip(("fold", "fold+check"), timings, strict=True):
            rows.append(
                {
                    "shape": name,
                    "method": method,
                    "branches": stats.branches,
                    "branch_tokens": stats.branch_tokens,
                    "tree_tokens": stats.tree_tokens,
                    **timing._asdict(),
                    "tokens_per_s": stats.branch_tokens / timing.ms * 1e3,
                }
            )
    columns = ["shape", "method", "branches", "branch_tokens", "tree_tokens", "ms", "low", "high", "tokens_per_s"]
    return report(rows, columns, device, args)


if __name__ == "__main__":
    main(sys.argv[1:])
