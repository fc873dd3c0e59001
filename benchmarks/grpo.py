# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The actor update of GRPO, stock against trees: Qwen3-0.6B of random weights, TRL's trainers, AdamW.

    python -m benchmarks.grpo --output grpo.csv
    python -m benchmarks.grpo --checkpointing off on --modes eager compiled --only 4k+16x512
    python -m benchmarks.grpo --only 16k+8x4k --checkpointing on --methods tree split stream stock

Both sides take the same optimizer step on one group of rollouts, from the buffered completions to the updated weights:
scoring, loss, backward, AdamW. Generation and rewards are replayed and not timed; the old log-probs are timed
separately (`old_ms`). TRL divides the group into micro-batches of `batch_size` padded sequences, the most that fit an
80 GB card without checkpointing, and uses the fastest installed attention kernel (`--attention`). All completions have
the same length, so the stock side computes no padding and needs no mask. Loss and gradient norm of a step must agree,
or the run fails, if `stock` is among the methods. `tree` computes the whole group in one forward, `split` and `stream`
(not among the defaults) at most `--max-row-tokens` tokens: `split` repeats the prompt, `stream` scores and trains the
tree in passes. Weights are float32 under bf16 autocast, as TRL trains by default. `compiled` compiles every decoder
layer by itself. `tokens` and `forwards` count the work of the backbone in a step.
"""

from __future__ import annotations

import copy
import gc
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config
from trl import GRPOConfig, GRPOTrainer

from benchmarks.common import (
    Row,
    best_attention,
    check_same_step,
    default_device,
    make_parser,
    measure,
    peak_gib,
    progress,
    report,
)
from benchmarks.flops import model_config
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeGRPOConfig, TreeGRPOTrainer

METHODS = ("tree", "split", "stream", "stock")
COLUMNS = ["shape", "method", "mode", "checkpointing", "attention", "batch_size", "max_row_tokens", "reuse"]
COLUMNS += [
    "forwards",
    "tokens",
    "ms",
    "low",
    "high",
    "old_ms",
    "peak_gib",
    "loss",
    "grad_norm",
    "speedup",
    "old_speedup",
    "memory_ratio",
    "failure",
]


class Group(NamedTuple):
    """One prompt and its completions, in tokens, and TRL's micro-batches, in sequences."""

    prompt: int
    completions: int
    length: int
    batch_size: int

    @property
    def reuse(self) -> float:
        """Tokens of the sequences divided by tokens of the tree."""
        return self.completions * (self.prompt + self.length) / (self.prompt + self.completions * self.length)


SHAPES = {
    "4k+16x512": Group(4096, 16, 512, 4),
    "1k+16x256": Group(1024, 16, 256, 16),
    "reuse-1.1": Group(112, 16, 1024, 16),  # short prompts, long answers: runs as in TRL
    "16k+8x4k": Group(16_384, 8, 4096, 1),  # not among the defaults
}
QUICK = {
    "4k+16x512": Group(64, 4, 8, 2),
    "1k+16x256": Group(32, 4, 8, 4),
    "reuse-1.1": Group(3, 4, 16, 4),
    "16k+8x4k": Group(64, 4, 16, 1),
}


def rollouts(group: Group, vocab_size: int) -> Any:
    """A rollout function for TRL that returns random tokens."""

    def generate(prompts: list[str], trainer: Any) -> dict[str, list[list[Any]]]:
        rng = np.random.default_rng(0)
        prompt = rng.integers(300, vocab_size, size=group.prompt).tolist()
        drawn = rng.integers(300, vocab_size, size=(len(prompts), group.length))
        drawn[:, 0] = 300 + np.arange(len(prompts))  # no two completions share a token
        completions = drawn.tolist()
        return {
            "prompt_ids": [prompt] * len(prompts),
            "completion_ids": completions,
            "logprobs": [[0.0] * group.length for _ in prompts],
        }

    return generate


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(index % 3) for index in range(len(completion_ids))]


def make_trainer(
    row: Row, group: Group, config: Qwen3Config, quick: bool, folder: str, max_row_tokens: int
) -> GRPOTrainer:
    torch.manual_seed(0)
    checkpointing = row["checkpointing"] == "on"
    with default_device(quick):
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config), dtype=torch.float32, attn_implementation=row["attention"]
        )
    steps = group.completions // group.batch_size
    is_stock = row["method"] == "stock"
    options: dict[str, Any] = {}
    if not is_stock:  # `tree` takes the whole group
        options["max_row_tokens"] = group.prompt + group.completions * group.length
    if row["method"] in ("split", "stream"):
        options |= {"max_row_tokens": max_row_tokens, "overflow": row["method"]}
    row |= {"max_row_tokens": options.get("max_row_tokens")}
    args = (GRPOConfig if is_stock else TreeGRPOConfig)(
        folder,
        num_generations=group.completions,
        per_device_train_batch_size=group.batch_size,
        gradient_accumulation_steps=steps,
        max_completion_length=group.length,
        num_iterations=10**6,  # keeps the buffered completions, and old log-probs are computed
        gradient_checkpointing=checkpointing,
        bf16=not quick,
        use_cpu=quick,
        learning_rate=0.0,  # a full step that leaves the weights unchanged
        report_to="none",
        **options,
    )
    tokenizer = train_tokenizer(["A prompt."], vocab_size=265)
    trainer = (GRPOTrainer if is_stock else TreeGRPOTrainer)(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "A prompt."}]),
        processing_class=tokenizer,
        rollout_func=rollouts(group, config.vocab_size),
    )
    if checkpointing:
        trainer.model.gradient_checkpointing_enable({"use_reentrant": False})
    if row["mode"] == "compiled":
        for layer in trainer.model.model.layers:
            layer.compile()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = steps
    return trainer


def measure_update(trainer: GRPOTrainer, group: Group, seconds: float, device: torch.device) -> Row:
    """The times of an optimizer step on buffered completions, and of the old log-probs."""
    model = trainer.model
    examples = [{"prompt": "A prompt."}] * group.completions
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    forwards: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda module, args, kwargs: forwards.append(kwargs["input_ids"].numel()), with_kwargs=True
    )

    def gradients() -> Any:
        return sum(trainer.training_step(model, examples, None) for _ in range(group.completions // group.batch_size))

    def update() -> None:
        gradients()
        optimizer.step()
        optimizer.zero_grad()

    try:
        update()  # generates, checks the model, compiles
        with torch.no_grad():  # the policy has moved since the rollouts: ratios are not 1, some are clipped
            model.lm_head.weight.mul_(2)
        forwards.clear()
        row: Row = {"loss": float(gradients()), "forwards": len(forwards), "tokens": sum(forwards)}
        row["grad_norm"] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
        optimizer.zero_grad()
        row["peak_gib"] = peak_gib(update, device)
        row |= measure(update, device, warmup=1, seconds=seconds)._asdict()
        old = measure(lambda: trainer._generate_and_score_completions(examples), device, warmup=1, seconds=seconds)
        return row | {"old_ms": old.ms}
    except torch.cuda.OutOfMemoryError:
        return {"failure": "out of memory"}
    finally:
        hook.remove()
        optimizer.zero_grad()


def measured_pairs(rows: list[Row]) -> list[tuple[Row, Row]]:
    """Each measured row of trees with the stock one of its shape, mode and checkpointing, if that was measured."""
    of_run = {(row["shape"], row["mode"], row["checkpointing"], row["method"]): row for row in rows if "ms" in row}
    pairs = ((row, of_run.get((*run, "stock"))) for (*run, method), row in of_run.items() if method != "stock")
    return [(row, stock) for row, stock in pairs if stock is not None]


def add_ratios(rows: list[Row]) -> None:
    """Adds speed-up and memory ratio to the rows of trees."""
    for row, stock in measured_pairs(rows):
        row["speedup"], row["old_speedup"] = stock["ms"] / row["ms"], stock["old_ms"] / row["old_ms"]
        if row["peak_gib"] is not None:
            row["memory_ratio"] = row["peak_gib"] / stock["peak_gib"]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, SHAPES, list(SHAPES)[:3])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["tree", "stock"])
    parser.add_argument("--max-row-tokens", type=int, default=24_576, help="tokens of a forward of `split`, `stream`")
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager"])
    parser.add_argument("--checkpointing", nargs="+", choices=("off", "on"), default=["off"])
    parser.add_argument("--batch-size", type=int, help="sequences of TRL's micro-batches (default: by shape)")
    parser.add_argument("--attention", help="attention of TRL's side (default: the best that is installed)")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for the repeats of one measurement")
    args = parser.parse_args(argv)
    device, modes = default_device(args.quick), ["eager"] if args.quick else args.modes
    args.max_row_tokens = 100 if args.quick else args.max_row_tokens
    config, attention = model_config(args.quick), args.attention or best_attention(args.quick)
    rows: list[Row] = []
    try:
        # beyond the recompile limit, layers would silently run eagerly
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=64):
            for mode, checkpointing, name, method in product(modes, args.checkpointing, args.only, args.methods):
                group = (QUICK if args.quick else SHAPES)[name]
                group = group._replace(batch_size=args.batch_size or group.batch_size)
                gc.collect()  # compiled layers and hooks keep the previous model in cycles
                with tempfile.TemporaryDirectory() as folder:
                    row: Row = {"shape": name, "method": method, "mode": mode, "checkpointing": checkpointing}
                    row |= {"attention": attention if method == "stock" else "prefix_tree"}
                    row |= {"batch_size": group.batch_size, "reuse": group.reuse}
                    trainer = make_trainer(row, group, config, args.quick, folder, args.max_row_tokens)
                    progress(rows, row | measure_update(trainer, group, args.seconds, device))
                    del trainer
    finally:
        add_ratios(rows)
        rows = report(rows, COLUMNS, device, args)
    for row, stock in measured_pairs(rows):
        check_same_step(row, stock)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
