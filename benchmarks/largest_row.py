# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The longest packed sequence that a GPU trains, by model size and memory option: the limit for `max_packed_tokens`.

    python -m benchmarks.largest_row --only 0.6b 4b 8b --output largest_row_h100.csv

Options: `plain`, `checkpointing`, and on top of checkpointing `offloading` (saved activations move to the CPU's
memory), `lora` and `qlora` (which needs bitsandbytes). A step is a forward and a backward of one packed sequence of
caterpillars, with weights, gradients and AdamW's state in memory, all of them in bfloat16 (`lora`, `qlora`: gradients
and state of the adapter only, in float32). DDP with `bf16` also keeps a copy of the gradients;
`examples/accelerate/fsdp2.yaml` keeps its share in float32. The length is doubled until a sequence does not fit. The
benchmark then tries the length that would fill the GPU according to the last two peaks, and reduces it by 5 % until it
fits. `peak_gib` is the peak of the longest sequence. The CSV file is written after every row.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl.models.activation_offloading import get_act_offloading_ctx_manager
from trl.trainer.utils import add_fused_lm_head

from benchmarks.common import Results, Row, default_device, environment, make_parser, peak_gib, progress, report
from benchmarks.flops import SHAPES, shape_config
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.batch import BLOCK_SIZE, WEIGHTED_BY_CALLER, concatenate_trees
from hf_prefix_tree.tree.prefix_tree import PrefixTree
from hf_prefix_tree.tree.synthetic import caterpillar

OPTIONS = ("plain", "checkpointing", "offloading", "lora", "qlora")
COLUMNS = ["shape", "option", "largest_row", "peak_gib", "failure"]
SHORTEST = 4096  # tokens


def make_row(tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A packed sequence of `tokens` tokens: dialogues of about 8,000, a shorter one at the end, and some padding."""
    trees: list[PrefixTree] = []
    left = tokens = tokens // BLOCK_SIZE * BLOCK_SIZE
    while (turns := min(20, (left - 900) // 400)) >= 1:
        tree = caterpillar(turns, seed=len(trees), vocab_size=512)
        if len(tree) > left:
            break
        trees.append(tree)
        left -= len(tree)
    row = concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=tokens)
    return {name: value.to(device) for name, value in row.items()}


def make_model(shape: str, option: str, device: torch.device, dtype: torch.dtype) -> torch.nn.Module:
    config = copy.deepcopy(shape_config(shape))
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="prefix_tree")
    if option == "qlora":
        model.save_pretrained(folder := tempfile.mkdtemp())
        del model
        gc.collect()
        torch.cuda.empty_cache()
        quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantization, attn_implementation="prefix_tree", device_map={"": device}
        )
    add_fused_lm_head(model)
    if option in ("lora", "qlora"):
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.enable_input_require_grads()
    prepare_model(model)
    if option != "plain":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def attempt(step: Callable[[int], float], tokens: int) -> float | None:
    """Peak memory of a step in GiB, `None` if it runs out of memory."""
    try:
        return step(tokens)
    except torch.cuda.OutOfMemoryError:
        return None


def find_largest(step: Callable[[int], float], shortest: int, limit: int, total: float) -> Row:
    """
    The longest packed sequence, up to `limit` tokens, that `step` can run.

    Args:
        step (`Callable`): Peak memory in GiB of a step on a number of tokens; raises if memory is too small.
        shortest (`int`): First length of the search.
        limit (`int`): Longest sequence to try.
        total (`float`): Memory of the GPU in GiB.
    """
    limit = limit // BLOCK_SIZE * BLOCK_SIZE
    fits = tokens = min(shortest, limit)
    slope = 0.0
    peak = attempt(step, fits)
    if peak is None:
        return {"failure": f"out of memory at {fits} tokens"}
    while fits < limit:
        tokens = min(2 * fits, limit)
        measured = attempt(step, tokens)
        if measured is None:
            break
        slope = (measured - peak) / (tokens - fits)
        fits, peak = tokens, measured
    tokens = int(0.95 * tokens)
    if slope > 0:
        tokens = min(tokens, fits + int((0.96 * total - peak) / slope))
    tokens = tokens // BLOCK_SIZE * BLOCK_SIZE
    while fits < tokens < limit:
        measured = attempt(step, tokens)
        if measured is not None:
            fits, peak = tokens, measured
        tokens = int(0.95 * tokens) // BLOCK_SIZE * BLOCK_SIZE
    return {"largest_row": fits, "peak_gib": peak}


def measure_option(shape: str, option: str, args: Any, device: torch.device) -> Row:
    row: Row = {"shape": shape, "option": option, "checkpointing": option != "plain"}
    if option == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        return row | {"failure": "bitsandbytes is not installed"}
    try:
        model = make_model(shape, option, device, torch.float32 if args.quick else torch.bfloat16)
    except torch.cuda.OutOfMemoryError:
        return row | {"failure": "out of memory, the model"}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.0)
    # Once for each model: building it adds hooks to the head.
    is_offloading = option == "offloading" and device.type == "cuda"
    context = get_act_offloading_ctx_manager(model) if is_offloading else nullcontext()

    def step(tokens: int) -> float:
        optimizer.zero_grad()  # gradients of a step that ran out of memory
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            # Sequences of other lengths left pinned memory of other sizes. (PyTorch 2.11 has no public name for this.)
            torch._C._host_emptyCache()
        batch = make_row(tokens, device)

        def run() -> None:
            with context:
                model(**batch, fused_lm_head=True, **{WEIGHTED_BY_CALLER: True}).log_probs.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        if not optimizer.state:
            run()  # builds it, and compiles kernels
        return peak_gib(run, device) or 0.0

    if device.type != "cuda":
        step(1536)
        return row
    total = torch.cuda.get_device_properties(device).total_memory / 2**30
    return row | find_largest(step, SHORTEST, args.limit, total)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SHAPES)
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS))
    parser.add_argument("--limit", type=int, default=262_144, help="longest packed sequence to try, in tokens")
    args = parser.parse_args(argv)
    device = default_device(args.quick)
    results = Results(args.output, environment(device, args.commit))
    for shape in ["quick"] if args.quick else args.only:
        for option in args.options:
            progress(results.rows, measure_option(shape, option, args, device))
            results.write()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return report(results.rows, COLUMNS, device, argparse.Namespace(output=None, commit=args.commit))


if __name__ == "__main__":
    main(sys.argv[1:])
