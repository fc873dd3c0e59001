# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Time and memory of the block mask for 8 thousand to a million tokens, against `create_block_mask`.

    python -m benchmarks.mask --output mask.csv

`create_block_mask` evaluates every pair of tokens, stock with an N x N tensor in memory, compiled without one. It is
omitted for lengths at which it takes tens of GiB (stock) or seconds (compiled).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from benchmarks.common import Row, default_device, make_parser, measure, peak_gib, progress, report
from benchmarks.shapes import QUICK, SHAPES, build
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask, tree_block_mask
from hf_prefix_tree.modeling.batch import SUBTREE_END, concatenate_trees

COPIES = (1, 4, 16, 128)  # of the 8k caterpillar
# Maximum length for each way.
METHODS = {
    "tree_block_mask": 2**21,
    "create_block_mask": 2**15 + 2**12,
    "create_block_mask, compiled": 2**18,
    "dense_mask": 2**15 + 2**12,
}


def stock_block_mask(prefix_tree: torch.Tensor, compiled: bool = False) -> BlockMask:
    """The same mask through PyTorch's function."""
    end = prefix_tree[:, SUBTREE_END].contiguous()
    length = end.shape[1]

    def visible(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (k <= q) & (q < end[b, k])

    return create_block_mask(visible, end.shape[0], None, length, length, device=end.device, _compile=compiled)


def builder(method: str, prefix_tree: torch.Tensor) -> Callable[[], object]:
    if method == "tree_block_mask":
        return lambda: tree_block_mask(prefix_tree)
    if method == "dense_mask":
        return lambda: dense_mask(prefix_tree)
    return lambda: stock_block_mask(prefix_tree, compiled="compiled" in method)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    args = make_parser(__doc__, METHODS).parse_args(argv)
    device = default_device(args.quick)
    tree = build((QUICK if args.quick else SHAPES)["caterpillar-8k"])
    rows: list[Row] = []
    for copies in COPIES[:2] if args.quick else COPIES:
        prefix_tree = concatenate_trees([tree] * copies, pad_token_id=0)["prefix_tree"].to(device)
        length = prefix_tree.shape[2]
        for method in args.only:
            if length > METHODS[method] or (args.quick and "compiled" in method):
                continue
            build_mask = builder(method, prefix_tree)
            timing = measure(build_mask, device, warmup=1 if args.quick else 2, seconds=0.3)
            before = torch.cuda.memory_allocated() / 2**30 if device.type == "cuda" else 0.0
            peak = peak_gib(build_mask, device)
            peak = None if peak is None else peak - before
            progress(rows, {"method": method, "tokens": length, "trees": copies, **timing._asdict(), "peak_gib": peak})
    return report(rows, ["method", "tokens", "ms", "low", "high", "runs", "peak_gib"], device, args)


if __name__ == "__main__":
    main(sys.argv[1:])
