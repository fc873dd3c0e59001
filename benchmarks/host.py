# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Host time of what depends on the backend in an eager step: the mask of a call, and the attention of its layers.

    python -m benchmarks.host --output host.csv

One tree of 1k + 64 completions of 64 tokens, the heads of Qwen3-0.6B, bf16. The rest of a forward is the same for all
backends, and varies more than they differ. A round of a few calls starts on an idle device and ends before its queue
is full, so that the host never waits; times are medians of rounds. `first_us` is the time of the first layer under a
mask, where FLASH prepares launches that later layers repeat, `forward_us` that of any other layer. `forward_ms` is the
time of mask and attention in a forward of all layers, `step_ms` includes the backward.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Row, default_device, make_parser, progress, report
from benchmarks.flops import shape_config
from benchmarks.shapes import QUICK, SHAPES, build
from hf_prefix_tree.modeling.attention.interface import prefix_tree_attention
from hf_prefix_tree.modeling.attention.masks.causal import TreeBlockMask
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import TreeContext

SHAPE, LAYERS = "1k+64x64", 28
CALLS, WARMUP, ROUNDS = 20, 2, 40  # calls of a round, rounds
BACKENDS = ("flash", "sdpa", "flex")
TIMES = ["mask_us", "first_us", "forward_us", "backward_us", "forward_ms", "step_ms"]


class Layer(torch.nn.Module):
    is_causal = True


def host_us(run: Callable[[], Any], device: torch.device, calls: int = CALLS) -> tuple[float, Any]:
    """Microseconds of each of the calls that `run` makes, and what it returns."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = run()
    return 1e6 * (time.perf_counter() - start) / calls, result


def time_backend(backend: str, tree: Tensor, layers: Sequence[Sequence[Tensor]], device: torch.device) -> Row:
    """The times of one round."""

    def make() -> TreeContext:
        context = TreeContext(tree, attn_backend=backend)
        mask = context.mask(flex=backend != "sdpa")
        if isinstance(mask, TreeBlockMask):
            mask.backend = backend
        return context

    mask_us, contexts = host_us(lambda: [make() for _ in range(CALLS)], device)
    (mask,) = contexts[0].masks.values()
    module, options = Layer(), {"prefix_tree": contexts[0], "scaling": layers[0][0].shape[-1] ** -0.5}

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return prefix_tree_attention(module, query, key, value, mask, **options)[0]

    first_us, _ = host_us(lambda: attend(*layers[0]), device, calls=1)
    forward_us, outputs = host_us(lambda: [attend(*tensors) for tensors in layers], device)
    leaves, grads = [x for tensors in layers for x in tensors], [torch.ones_like(x) for x in outputs]
    backward_us, _ = host_us(lambda: torch.autograd.grad(outputs, leaves, grads), device)
    forward_ms = (mask_us + first_us + (LAYERS - 1) * forward_us) / 1e3
    step_ms = forward_ms + LAYERS * backward_us / 1e3
    return dict(zip(TIMES, (mask_us, first_us, forward_us, backward_us, forward_ms, step_ms), strict=True))


def main(argv: Sequence[str] | None = None) -> list[Row]:
    args = make_parser(__doc__, BACKENDS).parse_args(argv)
    device = default_device(args.quick)
    backends = ["sdpa"] if args.quick else args.only  # the only one that trains on a CPU
    config = shape_config("quick" if args.quick else "0.6b")
    batch = concatenate_trees([build((QUICK if args.quick else SHAPES)[SHAPE])], pad_token_id=0)
    tree = batch["prefix_tree"].to(device)
    tokens = tree.shape[-1]
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    dtype = torch.float32 if args.quick else torch.bfloat16
    # in memory tokens before heads, as in a model
    shapes = [(1, tokens, number, config.head_dim) for number in heads]
    make: Any = partial(torch.randn, dtype=dtype, device=device, requires_grad=True)
    layers = [[make(shape).transpose(1, 2) for shape in shapes] for _ in range(CALLS)]
    rounds: dict[str, list[Row]] = {name: [] for name in backends}
    gc.disable()
    try:
        for number, name in product(range(WARMUP + ROUNDS), backends):  # in turn
            times = time_backend(name, tree, layers, device)
            if number >= WARMUP:
                rounds[name].append(times)
    finally:
        gc.enable()
    rows: list[Row] = []
    for name, of_backend in rounds.items():
        medians = {key: statistics.median(times[key] for times in of_backend) for key in of_backend[0]}
        progress(rows, {"backend": name, "tokens": tokens, "rounds": len(of_backend), **medians})
    return report(rows, ["backend", "tokens", "rounds", *TIMES], device, args)


if __name__ == "__main__":
    main(sys.argv[1:])
