# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Does a served model accept more draft tokens if the draft was trained in the contexts that are served?

    python -m benchmarks.contexts --prepared FOLDER --gguf FILE.gguf --data DATA   # on a CPU: writes FOLDER
    python -m benchmarks.eagle3_contexts --prepared FOLDER --gguf FILE.gguf --output eagle3_contexts.csv

- `served`: drafts train on the turns of dialogues, each in the context that the agent loop serves, in which the chat
  template has stripped earlier reasoning.
- `restored`: on whole conversations in TRL's training template, which puts earlier reasoning back.

Both supervise the same turns in the same steps, with one tree per group of dialogues, and start from the same weights.
Every seed has different weights and a different order, and holds out a different quarter of the groups (tasks).
`accepted` is the number of tokens that `speculative_generate` yields per round of the target, after `--prompts`
held-out contexts of at most `--prompt-tokens` tokens; the last table has the mean difference over seeds with its 95%
interval (Student's t).
"""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, disable_progress_bars
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import contexts
from benchmarks.common import Row, default_device, make_parser, print_table, progress, report
from benchmarks.eagle3_trees import quick_config
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import Eagle3Config, Eagle3Trainer, PrefixTree, fold
from hf_prefix_tree.eagle3.model import speculative_generate
from hf_prefix_tree.eagle3.target import Eagle3Target

ARMS = ("served", "restored")
COLUMNS = ["data", "arm", "seed", "steps", "loss", "tau", "accepted", "rounds"]
STUDENT_T = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}  # 97.5%


def training_trees(groups: list[Row], arm: str) -> Dataset:
    """A tree per group."""
    trees = [group["tree"] for group in groups]
    if arm == "restored":
        trees = [fold(map(contexts.as_branch, group["stock"]), weighting="branch").to_dict() for group in groups]
    return Dataset.from_list(trees)


def served_prompts(groups: list[Row], longest: int) -> list[list[int]]:
    """The contexts of the turns: what comes before each run of supervised tokens."""
    prompts = {}
    for group in groups:
        for branch in PrefixTree.from_dict(group["tree"]).branches():
            supervised = branch.weights > 0
            for start in np.flatnonzero(supervised[1:] & ~supervised[:-1]) + 1:
                prompts[tuple(branch.input_ids[:start].tolist())] = None
    return [list(prompt) for prompt in prompts if len(prompt) <= longest]


def train(target: Eagle3Target, data: Dataset, seed: int, args: Any) -> Eagle3Trainer:
    with tempfile.TemporaryDirectory() as folder:
        config = Eagle3Config(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=args.groups_per_step,
            learning_rate=args.learning_rate,
            warmup_steps=args.steps // 10,
            ttt_steps=args.draft_tokens,
            bf16=not args.quick,
            use_cpu=args.quick,
            logging_steps=args.steps,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )
        trainer = Eagle3Trainer(target_model=target, args=config, train_dataset=data, processing_class=args.tokenizer)
        trainer.train()
    return trainer


def accepted(target: Eagle3Target, trainer: Eagle3Trainer, prompts: list[list[int]], args: Any) -> Row:
    draft = trainer.accelerator.unwrap_model(trainer.model).eval()
    stop = args.tokenizer.eos_token_id
    runs = [speculative_generate(target, draft, ids, args.new_tokens, args.draft_tokens, stop) for ids in prompts]
    rounds = sum(len(run.accepted) for run in runs)
    return {"accepted": 1 + sum(sum(run.accepted) for run in runs) / max(rounds, 1), "rounds": rounds}


def summary(rows: list[Row]) -> list[Row]:
    """Mean over seeds of each arm, and of their difference, with half of its 95% interval."""
    table = []
    for data in dict.fromkeys(row["data"] for row in rows):
        by_arm = {arm: [row["accepted"] for row in rows if (row["data"], row["arm"]) == (data, arm)] for arm in ARMS}
        pairs = [served - restored for served, restored in zip(*by_arm.values(), strict=True)]
        line = {"data": data, "seeds": len(pairs), **{arm: statistics.mean(of_arm) for arm, of_arm in by_arm.items()}}
        spread = statistics.stdev(pairs) / math.sqrt(len(pairs)) if len(pairs) > 1 else math.nan
        half = STUDENT_T.get(len(pairs) - 1, math.nan) * spread
        table.append(line | {"difference": statistics.mean(pairs), "plus_minus": half})
    return table


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, ARMS)
    parser.add_argument("--prepared", type=Path, help="folder that benchmarks.contexts wrote (default: a tiny one)")
    parser.add_argument("--gguf", type=Path, help="GGUF file of the target; a tiny random one by default")
    parser.add_argument("--names", nargs="+", choices=contexts.FILES, default=["tool-world", "airline"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--groups-per-step", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--prompts", type=int, default=12, help="held-out contexts")
    parser.add_argument("--prompt-tokens", type=int, default=6144, help="of the longest one")
    parser.add_argument("--new-tokens", type=int, default=32, help="to generate after each context")
    parser.add_argument("--draft-tokens", type=int, default=4, help="per round, and steps of the training")
    args = parser.parse_args(argv)
    if set(args.only) != set(ARMS):
        parser.error("both arms are needed")
    disable_progress_bars()
    device = default_device(args.quick)
    args.dialogues, args.max_length, args.data = 40, 8192, None
    with tempfile.TemporaryDirectory() as folder:
        if args.prepared is None:
            args.prepared, args.names = Path(folder), ["tool-world"]
            texts = [json.dumps(row["messages"]) for row in contexts.tool_world(40, seed=0)]
            contexts.write_prepared(args, train_tokenizer(texts, vocab_size=512))
        args.tokenizer = AutoTokenizer.from_pretrained(args.prepared)
        files = {name: gzip.decompress((args.prepared / f"{name}.jsonl.gz").read_bytes()) for name in args.names}
    if args.quick:
        args.seeds, args.steps, args.prompts, args.new_tokens, args.draft_tokens = [0, 1], 2, 2, 6, 2
    if args.quick:
        model = AutoModelForCausalLM.from_config(quick_config(vocab_size=len(args.tokenizer)))
    else:
        model = contexts.Models(args, len(args.tokenizer), device).fresh("prefix_tree").bfloat16()
    target = Eagle3Target(model, [0, 1, 2] if args.quick else None)
    rows: list[Row] = []
    try:
        for name, seed in itertools.product(args.names, args.seeds):
            groups = list(map(json.loads, files[name].splitlines()))
            held_out = groups[seed % 4 :: 4]
            prompts = served_prompts(held_out, args.prompt_tokens)
            prompts = random.Random(seed).sample(prompts, min(args.prompts, len(prompts)))
            for arm in ARMS:
                gc.collect()  # a trainer is in cycles
                data = training_trees([group for group in groups if group not in held_out], arm)
                trainer = train(target, data, seed, args)
                logged = {key: trainer.state.log_history[0][key] for key in ("loss", "tau")}
                row = {"data": name, "arm": arm, "seed": seed, "steps": args.steps, **logged}
                progress(rows, row | accepted(target, trainer, prompts, args))
    finally:
        if rows:
            rows = report(rows, COLUMNS, device, args)
    print_table(summary(rows))
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
