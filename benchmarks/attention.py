# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Useful TFLOP/s of tree attention, forward and backward, 16 query and 8 key-value heads of 128 in bf16 or float32.

    python -m benchmarks.attention --output attention.csv
    python -m benchmarks.attention --dtype float32 --methods flex sdpa --output attention_float32.csv
    python -m benchmarks.attention --only 1k+64x64 search --methods causal flash rectangle causal-1k --fill 40960

| method | what runs |
|---|---|
| `flex` | the project's path: FlexAttention (Triton), heaviest child first |
| `flash` | the same with the kernels of `flash-attn-4`, if installed |
| `sdpa` | the project's dense mask |
| `flex, leaf first`, `flash, leaf first` | the project's path, children in the reverse order |
| `flex, tiles N` | tiles of N keys in the backward of keys and values; not among the defaults |
| `stock, leaf first` | the same with the mask of `create_block_mask` |
| `gather` | keys and values copied per path from the root to a node, into varlen flash attention |
| `causal` | no tree: plain causal attention over 8,192 tokens, cuDNN |

Controls, which are not among the defaults, show what the hardware reaches on short work without a tree, with cuDNN or,
with `, fa4` after the name, with `flash-attn-4`: `rectangle` (all tokens below the root attend to all tokens of the
root), `causal-1k` (the same number of tokens in sequences of 1,024) and `causal-whole` (in one sequence).

`--fill N` also measures as many copies of each tree as fit into a packed sequence of N tokens, as in training, because
a single short tree has few blocks. `useful` is the share of visible pairs in the visible blocks of 128 by 128.

Only visible pairs count as useful. `error` is the largest error of output and gradients against the dense mask in
float32 (for float32 in float64), for trees of at most 16,384 tokens. `auto` is the choice of `attn_backend="auto"` for
the shape, and `partial` the share of partial blocks among the visible ones.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from benchmarks.common import (
    Row,
    default_device,
    make_parser,
    measure,
    progress,
    relative_error,
    report,
)
from benchmarks.mask import stock_block_mask
from benchmarks.packed import causal, gather_paths, installed_kernels
from benchmarks.shapes import QUICK, SHAPES, build, leaf_first_rows
from hf_prefix_tree.modeling.attention import backend as backends
from hf_prefix_tree.modeling.attention.backend import AttentionCall, choose_backend
from hf_prefix_tree.modeling.attention.interface import prefix_tree_attention
from hf_prefix_tree.modeling.attention.masks.causal import TreeBlockMask, tree_block_mask
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import Mask, TreeContext
from hf_prefix_tree.modeling.flops import attention_flops
from hf_prefix_tree.tree.prefix_tree import PrefixTree

METHODS = ("causal", "flex", "flash", "sdpa", "flex, leaf first", "flash, leaf first", "stock, leaf first", "gather")
# Kernel options: rows and columns of the tiles of the backward, for gradients of keys and values, and of queries.
TILES = {
    f"flex, tiles {keys}": {
        "bwd_BLOCK_M1": min(keys, 64),
        "bwd_BLOCK_N1": keys,
        "bwd_BLOCK_M2": 64,
        "bwd_BLOCK_N2": 64,
    }
    for keys in (32, 64, 128)
}
CONTROLS = tuple(name + kernel for name in ("rectangle", "causal-1k", "causal-whole") for kernel in ("", ", fa4"))
ALONE = ("sdpa", "gather", "flex, leaf first", "flash, leaf first", "stock, leaf first")  # not measured under `--fill`
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # [1, heads, N, head_dim] -> [1, N, ...]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
LONGEST_CHECKED = 16_384
COLUMNS = [
    "shape",
    "method",
    "kernel",
    "tokens",
    "trees",
    "partial",
    "useful",
    "auto",
    "error",
    "forward_ms",
    "forward_tflops",
    "backward_tflops",
    "ms",
    "low",
    "high",
    "tflops",
    "failure",
]
BUSY = 50  # as in a training step, the host runs ahead of the device when short kernels are timed


class StockContext(TreeContext):
    """A context whose block mask comes from PyTorch."""

    def mask(self, *, flex: bool, **limit: int | None) -> Mask:
        return self._masks.setdefault(("causal", None), stock_block_mask(self.prefix_tree))


def through_the_project(rows: torch.Tensor, backend: str, context_class: type[TreeContext] = TreeContext) -> Attend:
    context = context_class(rows, attn_backend=backend)
    mask = context.mask(flex=backend != "sdpa")
    if isinstance(mask, TreeBlockMask):
        mask.backend = backend
    module = torch.nn.Module()
    return lambda q, k, v: prefix_tree_attention(module, q, k, v, mask, prefix_tree=context)[0]


@functools.cache
def _compiled_with(options: tuple[tuple[str, int], ...]) -> Callable:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> torch.Tensor:
        output = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, kernel_options=dict(options))
        return output.transpose(1, 2).contiguous()

    return torch.compile(attend, dynamic=False)


def through_tiles(rows: torch.Tensor, options: dict[str, int]) -> Attend:
    mask = tree_block_mask(rows)
    return lambda q, k, v: _compiled_with(tuple(options.items()))(q, k, v, mask)


def control_of(method: str, tree: PrefixTree, trees: int, quick: bool) -> tuple[Attend, int, tuple[int, int, int]]:
    """The function, its pairs, and its batch size, queries and keys."""
    is_causal = method.startswith("causal")
    if is_causal:
        length = trees * len(tree) if method.startswith("causal-whole") else 16 if quick else 1024
        sizes = (max(1, trees * len(tree) // length), length, length)
        pairs = sizes[0] * length * (length + 1) // 2
    else:
        root = int(tree.node_lengths[0])
        sizes = (trees, len(tree) - root, root)
        pairs = math.prod(sizes)
    if not method.endswith("fa4"):
        return lambda q, k, v: causal(q, k, v, is_causal=is_causal).transpose(1, 2), pairs, sizes

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        from flash_attn.cute.interface import flash_attn_func

        return flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), causal=is_causal)[0]

    return attend, pairs, sizes


def attend_of(
    method: str, tree: PrefixTree, device: torch.device, trees: int = 1
) -> tuple[Attend, torch.Tensor, str] | None:
    """A method's function, its tree tensors and its kernel; `None` if it is not available."""
    if trees > 1 and method in ALONE:
        return None
    rows = leaf_first_rows(tree) if "leaf first" in method else concatenate_trees([tree] * trees, 0)["prefix_tree"]
    rows = rows.to(device)
    flash_kernel = "fa4" if "fa4" in installed_kernels(device) else "fa2"
    if method == "gather":
        return gather_paths(tree, device, flash_kernel), rows, flash_kernel if device.type == "cuda" else "sdpa"
    if method == "sdpa" or device.type == "cpu":
        # FlexAttention does not train on a CPU; the other order of children still runs
        available = method in ("sdpa", "flex", "flex, leaf first")
        return (through_the_project(rows, "sdpa"), rows, "dense") if available else None
    if method.startswith("flash"):
        return (through_the_project(rows, "flash"), rows, "FLASH") if flash_kernel == "fa4" else None
    if method in TILES:
        return through_tiles(rows, TILES[method]), rows, "Triton"
    context_class = StockContext if method.startswith("stock") else TreeContext
    return through_the_project(rows, "flex", context_class), rows, "Triton"


def values(attend: Attend, leaves: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    """The output and the gradients of query, key and value."""
    output = attend(*leaves)
    return [output, *torch.autograd.grad(output, leaves, grad[:, : output.shape[1]].to(output.dtype))]


def largest_error(got: list[torch.Tensor], exact: list[torch.Tensor], tokens: int) -> float:
    """Largest relative error of the output and the gradients, without padding."""
    dims = (1, 2, 2, 2)  # of the tokens
    return max(
        relative_error(x.narrow(d, 0, tokens), y.narrow(d, 0, tokens))
        for x, y, d in zip(got, exact, dims, strict=True)
    )


def measure_method(
    attend: Attend,
    expected: Attend | None,
    tokens: int,
    heads: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int] | None = None,
) -> Row:
    """
    Times of a forward, and of forward and backward, over `tokens` random tokens padded to a multiple of 128, or over
    a batch of queries and keys of these `sizes`.
    """
    generator = torch.Generator(device).manual_seed(0)
    length = -(-tokens // 128) * 128
    batch, queries, keys = sizes or (1, length, length)
    leaves = [  # tokens before heads, as in a model
        torch.randn(batch, size, n, heads[2], device=device, dtype=dtype, generator=generator).transpose(1, 2)
        for n, size in ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    ]
    leaves = [x.requires_grad_() for x in leaves]
    grad = torch.randn(batch, queries, heads[0], heads[2], device=device, dtype=dtype, generator=generator)
    grad[:, tokens:] = 0
    row: Row = {}
    got = values(attend, leaves, grad)
    if expected is not None:
        finer = torch.float64 if dtype == torch.float32 else torch.float32
        exact = values(expected, [x.detach().to(finer).requires_grad_() for x in leaves], grad)
        row["error"] = largest_error(got, exact, tokens)
        if not row["error"] < TOLERANCE[dtype]:
            raise RuntimeError(f"an output or a gradient is off by {row['error']:.1e}")
        del exact
    row["forward_ms"] = measure(lambda: attend(*leaves), device, seconds=0.3, max_runs=30, busy=BUSY).ms
    return row | measure(lambda: values(attend, leaves, grad), device, seconds=0.3, max_runs=30, busy=BUSY)._asdict()


def mask_facts(rows: torch.Tensor, heads: tuple[int, int, int], dtype: torch.dtype, pairs: int) -> Row:
    """The share of partial blocks and of visible pairs, and the choice of `"auto"` if this shape is the first."""
    backends._sparse.clear()
    mask = tree_block_mask(rows)
    partial, full = (count.sum().item() for count in (mask.kv_num_blocks, mask.full_kv_num_blocks))
    call = AttentionCall(rows.device, dtype, rows.shape[2], *heads, heads[2])
    facts = {"partial": partial / (partial + full), "useful": pairs / ((partial + full) * mask.BLOCK_SIZE[0] ** 2)}
    return {**facts, "auto": choose_backend("auto", call, lambda: mask)}


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SHAPES)
    parser.add_argument(
        "--methods", nargs="+", choices=[*METHODS, *TILES, *CONTROLS], default=METHODS, metavar="METHOD"
    )
    parser.add_argument("--fill", type=int, default=0, help="also measure as many copies as fit into this many tokens")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="`--quick` takes float32")
    args = parser.parse_args(argv)
    device = default_device(args.quick)
    dtype_name = "float32" if args.quick else args.dtype
    dtype = getattr(torch, dtype_name)
    heads = (4, 2, 16) if args.quick else (16, 8, 128)
    rows: list[Row] = []

    def add(
        shape: str,
        method: str,
        kernel: str,
        attend: Attend,
        expected: Attend | None,
        tokens: int,
        pairs: int,
        heads: tuple[int, int, int] = heads,
        sizes: tuple[int, int, int] | None = None,
        **facts: object,
    ) -> None:
        row: Row = {"shape": shape, "method": method, "kernel": kernel, "dtype": dtype_name}
        row |= {"tokens": tokens, "pairs": pairs, **facts}
        try:
            row |= measure_method(attend, expected, tokens, heads, device, dtype, sizes)
            forward = attention_flops(pairs, heads[0], heads[2], factor=1.0) / 1e9
            both = attention_flops(pairs, heads[0], heads[2]) / 1e9
            row["forward_tflops"], row["tflops"] = forward / row["forward_ms"], both / row["ms"]
            row["backward_tflops"] = (both - forward) / (row["ms"] - row["forward_ms"])
        except Exception as error:  # any error: the table has a line for a kernel that cannot run
            row["failure"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        progress(rows, row)

    try:
        if "causal" in args.methods:
            tokens = 128 if args.quick else 8192
            kernel = "SDPA" if args.quick else "cuDNN"
            pairs = tokens * (tokens + 1) // 2
            add("causal-8k", "causal", kernel, lambda q, k, v: causal(q, k, v).transpose(1, 2), None, tokens, pairs)
        for shape in args.only:
            tree = build((QUICK if args.quick else SHAPES)[shape])
            for trees, method in product(sorted({1, args.fill // len(tree)} - {0}), args.methods):
                if method in CONTROLS and (not args.quick or not method.endswith("fa4")):
                    attend, pairs, sizes = control_of(method, tree, trees, args.quick)
                    kernel = "FLASH" if method.endswith("fa4") else "SDPA" if args.quick else "cuDNN"
                    # the project's path gives every query head the keys of its own, as far as the kernel knows
                    alike = (heads[0], heads[0], heads[2]) if kernel == "FLASH" else heads
                    add(shape, method, kernel, attend, None, sizes[0] * sizes[1], pairs, alike, sizes, trees=trees)
                    continue
                available = attend_of(method, tree, device, trees) if method not in ("causal", *CONTROLS) else None
                if available is None:
                    continue
                attend, prefix_tree, kernel = available
                tokens, pairs = trees * len(tree), trees * tree.stats().tree_pairs
                expected = through_the_project(prefix_tree, "sdpa") if tokens <= LONGEST_CHECKED else None
                facts = mask_facts(prefix_tree, heads, dtype, pairs)
                add(shape, method, kernel, attend, expected, tokens, pairs, trees=trees, **facts)
    finally:
        rows = report(rows, COLUMNS, device, args)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
