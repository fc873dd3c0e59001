# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
`python -m examples.demo`, run from the root of the repository: tree SFT on small tool-use dialogues, and a comparison
of one step with the same step branch by branch.

The demo generates the dialogues, trains a tokenizer on them, trains a Qwen3-shaped model of a few million parameters
with [`TreeSFTTrainer`] (`--model qwen3_5`: a model with recurrent layers, in the shape of Qwen3.5), then runs one step
folded and the same step branch by branch. It exits with 1 if no token is supervised by several branches, if the loss
does not fall, or if the two steps differ by more than float32 rounding. With recurrent layers the two steps run in
float64, because in float32 the gradients of decays are small differences of large terms, mostly rounding.
"""

from __future__ import annotations

import argparse
import functools
import operator
import statistics
import sys
import tempfile
from contextlib import nullcontext

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3_5TextConfig, Qwen3Config

from conformance.double import keep_double
from hf_prefix_tree import PrefixTree, TreeSFTConfig, TreeSFTTrainer

from .compare import Comparison, compare_step
from .dialogues import as_json_strings, dialogue_texts, generate_dialogues
from .tokenizer import train_tokenizer

LOSS_BOUND, GRADIENT_BOUND = 1e-6, 1e-4  # relative; float32 sums in a different order
STEPS = 30
COMPARED_TREES = 3


def make_config(model_type: str, vocab_size: int) -> PreTrainedConfig:
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": True,
    }
    if model_type == "qwen3":
        return Qwen3Config(**sizes)
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 32}
    layer_types = ["linear_attention"] * 3 + ["full_attention"]
    return Qwen3_5TextConfig(**sizes, **heads, linear_value_head_dim=32, layer_types=layer_types)


def make_model(model_type: str, vocab_size: int) -> PreTrainedModel:
    torch.manual_seed(0)
    config = make_config(model_type, vocab_size)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="prefix_tree")


def train(rows: list[dict], model_type: str) -> TreeSFTTrainer:
    tokenizer = train_tokenizer(dialogue_texts(rows))
    with tempfile.TemporaryDirectory() as folder:
        args = TreeSFTConfig(
            folder,
            group_by="group",
            max_steps=STEPS,
            per_device_train_batch_size=1,
            learning_rate=2e-3,
            warmup_steps=4,
            gradient_checkpointing=False,
            bf16=False,
            logging_steps=5,
            save_strategy="no",
            dataloader_pin_memory=torch.cuda.is_available(),
            report_to="none",
        )
        trainer = TreeSFTTrainer(
            model=make_model(model_type, len(tokenizer)),
            args=args,
            train_dataset=Dataset.from_list(as_json_strings(rows)),
            processing_class=tokenizer,
        )
        trainer.train()
    return trainer


def report(
    trees: list[PrefixTree], steps: list[Comparison], losses: list[float], precision: str = "float32"
) -> list[str]:
    """Prints the table and returns the failures."""
    stats = functools.reduce(operator.add, (tree.stats() for tree in trees))
    shared = sum(int((tree.branch_count > 1).sum()) for tree in trees)
    folded, unfolded = (
        statistics.median(times) for times in zip(*((s.tree_seconds, s.branch_seconds) for s in steps), strict=True)
    )
    loss_difference = float(np.max([step.loss_difference for step in steps]))  # `np.max` keeps a NaN
    gradient_difference = float(np.max([step.gradient_difference for step in steps]))
    table = Table(title=f"The same step, branch by branch and folded ({precision})")
    for column in ("", "branch by branch", "folded", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("tokens", f"{stats.branch_tokens:,}", f"{stats.tree_tokens:,}", f"{stats.token_ratio:.1f}x")
    table.add_row("attention pairs", f"{stats.branch_pairs:,}", f"{stats.tree_pairs:,}", f"{stats.pair_ratio:.1f}x")
    table.add_row("seconds per step", f"{unfolded:.2f}", f"{folded:.2f}", f"{unfolded / folded:.1f}x")
    table.add_section()
    table.add_row("largest relative difference, loss", "", f"{loss_difference:.1e}", f"bound {LOSS_BOUND:.0e}")
    table.add_row(
        "largest relative difference, gradients", "", f"{gradient_difference:.1e}", f"bound {GRADIENT_BOUND:.0e}"
    )
    table.add_row("tokens supervised by several branches", "", f"{shared:,}", "")
    table.add_row("training loss, first and last", "", f"{losses[0]:.3f} -> {losses[-1]:.3f}", "")
    Console(width=110).print(table)
    wrong = []
    if shared == 0:
        wrong.append("no token is supervised by several branches")
    if not losses[-1] < losses[0]:
        wrong.append("the training loss did not fall")
    if not loss_difference <= LOSS_BOUND:
        wrong.append(f"the losses differ by {loss_difference:.1e}")
    if not gradient_difference <= GRADIENT_BOUND:
        wrong.append(f"the gradients differ by {gradient_difference:.1e}")
    return wrong


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--model", choices=("qwen3", "qwen3_5"), default="qwen3", help="shape of the model")
    args = parser.parse_args(argv)
    console = Console(width=110)
    rows = generate_dialogues(num_groups=6, trials=3)
    console.print(
        f"{len(rows)} tool-use dialogues of {len({row['group'] for row in rows})} groups; one tree per group."
    )
    trainer = train(rows, args.model)
    trees = [PrefixTree.from_dict(row) for row in trainer.train_dataset]
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    precision = "float32" if args.model == "qwen3" else "float64"
    with keep_double() if precision == "float64" else nullcontext():
        model = trainer.model.to(getattr(torch, precision))
        steps = [compare_step(model, [tree]) for tree in trees[:COMPARED_TREES]]
    wrong = report(trees[:COMPARED_TREES], steps, losses, precision)
    for problem in wrong:
        console.print(f"FAILED: {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
