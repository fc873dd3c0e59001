# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A step of EAGLE-3 draft training on trees, against packed documents: the turns of agent dialogues.

    python -m benchmarks.eagle3_trees --output eagle3_trees.csv
    python -m benchmarks.eagle3_trees --data FOLDER --tokenizer Qwen/Qwen3-0.6B
    python -m benchmarks.eagle3_trees --quick

A step is the turns of `--conversations` dialogues, each turn in the context that it was sampled from: the frozen
target (Qwen3-0.6B's shape, random bf16 weights) runs, and a draft of `--draft-vocabulary` tokens is unrolled for
`--steps` steps, with its backward and fused AdamW. `flat` is the turns as documents in packed sequences, `tree` the
same turns folded, both of at most `--tokens` tokens per micro-batch and both with `Eagle3Trainer`'s collator, target
and draft. The benchmark checks that their losses agree. Micro-batches are collated beforehand (`collate_ms`: by one
process) and copied to the GPU one by one.

Templates: `strips` is Qwen3's own, which omits earlier reasoning; `keeps` is TRL's training template, which strips
nothing. Without `--data`, tokens are random, and lengths are those of 16 dialogues of tau-bench (airline) in
`lengths/`. With it, the dialogues come from its `tau_bench_airline.jsonl` and `.tools.json`, and `--write` writes
their lengths and exits.

`flop_ratio` is the speed-up if time were proportional to FLOPs: linear layers over all tokens or slots, heads where
they run, attention over visible pairs; a forward of the target, forward and backward of the draft. `bound_share` is
the measured speed-up divided by it.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, Qwen3Config
from trl import chat_template_utils

from benchmarks.common import (
    Row,
    default_device,
    make_parser,
    measure,
    peak_gib,
    progress,
    read_csv,
    report,
    write_csv,
)
from benchmarks.flops import shape_config
from hf_prefix_tree import (
    DataCollatorForEagle3,
    Eagle3Config,
    Eagle3DraftConfig,
    Eagle3DraftModel,
    pack_eagle3_dataset,
)
from hf_prefix_tree.data.baselines import prompt_length
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.eagle3.attention import draft_slots
from hf_prefix_tree.eagle3.data import prepare_eagle3_trees
from hf_prefix_tree.eagle3.loss import deciding, needed_targets, weighted_steps
from hf_prefix_tree.eagle3.target import Eagle3Target
from hf_prefix_tree.eagle3.vocabulary import count_supervised
from hf_prefix_tree.modeling.batch import DEPTH
from hf_prefix_tree.modeling.flops import cost_per_count
from hf_prefix_tree.tree.prefix_tree import Branch

TEMPLATES = {"strips": "qwen3_chat_template", "keeps": "qwen3_training_chat_template"}  # of TRL
LENGTHS = Path(__file__).with_name("lengths") / "tau_bench_airline.csv"
SHIPPED = 16  # dialogues
COLUMNS = ["template", "method", "conversations", "tokens", "slots", "micro_batches", "ms", "low", "high", "peak_gib"]
COLUMNS += [
    "collate_ms",
    "loss",
    "tau",
    "tflop",
    "token_ratio",
    "flop_ratio",
    "speedup",
    "bound_share",
    "memory_ratio",
]

Conversation = list[Branch]


def quick_config(**changes: Any) -> PreTrainedConfig:
    """A tiny Qwen3 with enough layers for a draft."""
    return Qwen3Config(**shape_config("quick").to_dict() | {"num_hidden_layers": 4, "layer_types": None} | changes)


def random_target(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """
    A target of random weights that clearly chooses the token that it reads: its embeddings, which are also the head,
    have variance 1. At their initial scale the best two logits differ by less than the rounding of bf16 at one
    token in twenty, where trees and documents would choose different ones.
    """
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight.div_(config.initializer_range)
    return model


def read_conversations(data: Path, tokenizer: str, template: str, count: int) -> list[Conversation]:
    encoder = AutoTokenizer.from_pretrained(tokenizer)
    encoder.chat_template = getattr(chat_template_utils, TEMPLATES[template])
    tools = json.loads((data / "tau_bench_airline.tools.json").read_text())
    conversations = []
    for line in itertools.islice((data / "tau_bench_airline.jsonl").open(), count):
        conversations.append(conversation_branches(json.loads(line)["messages"], encoder, tools=tools).branches)
    return conversations


def lengths_of(template: str, conversations: list[Conversation]) -> list[Row]:
    """Tokens that each turn shares with the previous one, of its context, and of the turn itself."""
    rows: list[Row] = []
    before = np.zeros(0, dtype=np.int64)
    for number, branches in enumerate(conversations):
        for branch in branches:
            context, turn = prompt_length(branch), int((branch.weights > 0).sum())
            assert branch.weights[context : context + turn].all(), "a turn is one run of tokens"
            ids = branch.input_ids[: context + turn]
            size = min(len(before), len(ids))
            differs = np.flatnonzero(before[:size] != ids[:size])
            shared = int(differs[0]) if len(differs) else size
            rows.append(dict(template=template, conversation=number, shared=shared, context=context, turn=turn))
            before = ids
    return rows


def random_conversations(lengths: list[Row], count: int, vocabulary: int, shorter: int) -> list[Conversation]:
    """Conversations of random tokens with these lengths, or shorter by a factor."""
    rng = np.random.default_rng(0)
    conversations: list[Conversation] = [[] for _ in range(count)]
    ids = np.zeros(0, dtype=np.int64)
    for row in lengths:
        shared, context, turn = (-(-int(row[name]) // shorter) for name in ("shared", "context", "turn"))
        if int(row["conversation"]) < count:
            new = rng.integers(1, vocabulary, size=context + turn - shared)
            if len(ids) > shared and len(new) and new[0] == ids[shared]:
                new[0] = 0  # which no other token is: no more is shared
            ids = np.concatenate([ids[:shared], new])
            conversations[int(row["conversation"])].append(Branch(ids, np.arange(len(ids)) >= context))
    return conversations


def rows_of(method: str, conversations: list[Conversation], tokens: int) -> list[Row]:
    """The packed sequences of a method, as the trainer builds them."""
    if method == "tree":
        rows = [
            {"branches": [{"input_ids": b.input_ids.tolist(), "weights": b.weights.tolist()} for b in branches]}
            for branches in conversations
        ]
        with tempfile.TemporaryDirectory() as folder:
            return prepare_eagle3_trees(rows, Eagle3Config(folder, packed_sequence_size=tokens), None, 0)
    documents = [
        {"input_ids": b.input_ids[:end].tolist(), "loss_mask": (b.weights[:end] > 0).astype(int).tolist()}
        for b in itertools.chain(*conversations)
        for end in [int(np.flatnonzero(b.weights)[-1]) + 1]
    ]
    return pack_eagle3_dataset(documents, tokens, 0, "best_fit")


class Step:
    """One optimizer step on collated micro-batches."""

    def __init__(
        self, batches: list[Row], target: Eagle3Target, draft: Eagle3DraftModel, steps: int, device: torch.device
    ) -> None:
        self.batches, self.target, self.draft, self.steps, self.device = batches, target, draft, steps, device
        if device.type == "cuda":
            self.batches = [{name: value.pin_memory() for name, value in batch.items()} for batch in batches]
        # With a learning rate of 0 a step does all its work and leaves the weights unchanged.
        trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0, fused=True)
        self.items: torch.Tensor | None = None  # of the whole step, once it ran
        self.sums: Any = None

    def __call__(self) -> None:
        sums: list[Any] = []
        for given in self.batches:
            batch = {name: value.to(self.device, non_blocking=True) for name, value in given.items()}
            where, targets = needed_targets(draft_slots(batch, self.steps), batch["input_ids"].numel())
            aux, last = self.target.hidden_states(batch)
            last = last.flatten(0, 1)[where]
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
                output = self.draft(
                    **batch,
                    aux_hidden_states=aux,
                    target_logits=self.target.draft_logits(last, self.draft.draft_ids),
                    target_ids=self.target.choices(last),
                    draft_targets=targets,
                    ttt_steps=self.steps,
                    num_items_in_batch=self.items,
                )
            output.loss.backward()
            sums.append(output.sums)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.sums = type(sums[0])(*(sum(parts) for parts in zip(*sums, strict=True)))
        self.items = self.sums.valid

    def counts(self, config: PreTrainedConfig) -> Row:
        """Tokens, slots and TFLOP of the step."""
        per_token, per_head, per_pair = cost_per_count(config)
        draft, vocabulary = self.draft.config, self.draft.config.draft_vocab_size
        hidden, queries = draft.hidden_size, draft.num_attention_heads * draft.head_dim
        keys = draft.num_key_value_heads * draft.head_dim
        layer = 6.0 * hidden * (2 * queries + 4 * keys + queries + 3 * draft.intermediate_size)
        pair = 3.5 * 4 * queries
        tokens = slots = 0
        flops = 0.0
        for batch in self.batches:
            of_draft = draft_slots(batch, self.steps)
            where, _ = needed_targets(of_draft, batch["input_ids"].numel())
            decided = int(deciding(of_draft["draft_weights"]).sum())
            tree = of_draft["draft_tree"][:, DEPTH].double()
            is_real = batch["attention_mask"] > 0
            if "draft_tree" in batch:
                depth, is_slot = batch["prefix_tree"][:, DEPTH].double(), tree_slots(batch)
            else:
                depth, is_slot = tree, is_real
            tokens, slots = tokens + int(is_real.sum()), slots + int(is_slot.sum())
            # the target: a third of forward and backward, of attention 1 / 3.5
            flops += int(is_real.sum()) * (per_token / 3 + 4.0 * 3 * hidden * hidden)
            flops += float((depth[is_real] + 1).sum()) * per_pair / 3.5
            flops += len(where) * (per_head / 3 + 2.0 * hidden * vocabulary)
            flops += self.steps * (int(is_slot.sum()) * layer + float((tree[is_slot] + 1).sum()) * pair)
            flops += decided * 6.0 * hidden * vocabulary
        return {"tokens": tokens, "slots": slots, "tflop": float(flops) / 1e12}


def tree_slots(batch: Row) -> torch.Tensor:
    """Which slots are not padding: padding comes last, as roots of one token."""
    _, _, length = batch["draft_tree"].shape
    weights = batch["draft_weights"].sum(dim=1)[0]
    last = int(weights.nonzero().max()) + 1 if weights.any() else 0
    return torch.arange(length)[None] < last


def timed(step: Step, device: torch.device, seconds: float) -> Row:
    """Time and peak memory of a step that has run before."""
    timing: list[Any] = []
    peak = peak_gib(
        lambda: timing.append(measure(step, device, warmup=0, seconds=seconds, min_runs=3 if seconds else 1)), device
    )
    return {**timing[0]._asdict(), "peak_gib": peak}


def check(flat: Step, tree: Step, exact: bool) -> None:
    """Raises unless both methods train the same: the same positions count, and the loss is as close as bf16 allows."""
    for name in ("supervised", "valid"):  # `valid`: and the draft has the token that the target chooses there
        first, second = (getattr(step.sums, name) for step in (flat, tree))
        if not torch.equal(first, second):
            raise RuntimeError(f"`{name}` is {second} on trees, but {first} in documents.")
    first, second = (weighted_steps(step.sums.loss, step.sums.valid, 0.8).item() for step in (flat, tree))
    if not math.isclose(first, second, rel_tol=1e-5 if exact else 2e-2):
        raise RuntimeError(f"`loss` is {second} on trees, but {first} in documents.")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, TEMPLATES)
    parser.add_argument("--data", type=Path, help="folder with the dialogues of tau-bench (default: shipped lengths)")
    parser.add_argument("--tokenizer", help="Qwen3's tokenizer, for `--data`")
    parser.add_argument("--write", type=Path, help="write the lengths of `--data` to this CSV file, and end")
    parser.add_argument("--conversations", type=int, default=6, help="dialogues of a step")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a packed sequence; the longest turn fits")
    parser.add_argument("--steps", type=int, default=7, help="test-time-training steps of the draft")
    parser.add_argument("--draft-vocabulary", type=int, default=32_000)
    parser.add_argument("--seconds", type=float, default=8.0, help="time for the repeats of one measurement")
    args = parser.parse_args(argv)
    if args.data is not None and args.tokenizer is None:
        parser.error("`--data` needs `--tokenizer`")
    if args.data is not None and args.quick:
        parser.error("`--quick` has a small vocabulary: leave `--data` out")
    if args.write is not None:
        given = {name: read_conversations(args.data, args.tokenizer, name, SHIPPED) for name in args.only}
        write_csv(args.write, [row for name, read in given.items() for row in lengths_of(name, read)])
        return []
    device = default_device(args.quick)
    config = quick_config() if args.quick else shape_config("0.6b")
    if args.quick:
        args.conversations, args.steps, args.draft_vocabulary, args.tokens = 1, 2, 100, 1024
    torch.manual_seed(0)
    with device:
        model = random_target(config, torch.float32 if args.quick else torch.bfloat16)
    target = Eagle3Target(model, [1, 2, 3] if args.quick else None)
    draft_config = Eagle3DraftConfig.from_target(
        config, draft_vocab_size=args.draft_vocabulary, aux_layer_ids=target.aux_layer_ids
    )
    with device:
        draft = Eagle3DraftModel(draft_config).train()
    draft.init_from_target(target.embedding, target.head)
    rows: list[Row] = []
    try:
        for template in args.only:
            if args.data is None:
                shorter = 16 if args.quick else 1
                lengths = [row for row in read_csv(LENGTHS) if row["template"] == template]
                conversations = random_conversations(lengths, args.conversations, config.vocab_size, shorter)
            else:
                conversations = read_conversations(args.data, args.tokenizer, template, args.conversations)
            measured: dict[str, tuple[Step, Row]] = {}
            counted: list[torch.Tensor] = []
            for method in ("flat", "tree"):
                gc.collect()
                collate = DataCollatorForEagle3(0, ttt_steps=args.steps)
                features = rows_of(method, conversations, args.tokens)
                start = time.perf_counter()
                batches = [collate([feature]) for feature in features]
                collate_ms = 1e3 * (time.perf_counter() - start)
                counted.append(count_supervised(batches, config.vocab_size))
                step = Step(batches, target, draft, args.steps, device)
                step()  # compiles, and counts the items of the step
                row: Row = {"template": template, "method": method, "conversations": args.conversations}
                row |= {"micro_batches": len(batches), "collate_ms": collate_ms, **step.counts(config)}
                row |= timed(step, device, 0.0 if args.quick else args.seconds)
                sums = step.sums
                row |= {"loss": weighted_steps(sums.loss, sums.valid, 0.8).item(), "tau": sums.metrics()["tau"]}
                measured[method] = step, row
                progress(rows, row)
            (flat, first), (tree, second) = measured["flat"], measured["tree"]
            check(flat, tree, exact=args.quick)
            if not torch.equal(*counted):
                raise RuntimeError("The counts of the vocabulary differ.")
            second["token_ratio"] = first["tokens"] / second["tokens"]
            second["flop_ratio"] = first["tflop"] / second["tflop"]
            second["speedup"] = first["ms"] / second["ms"]
            second["bound_share"] = second["speedup"] / second["flop_ratio"]
            if second["peak_gib"] is not None:
                second["memory_ratio"] = second["peak_gib"] / first["peak_gib"]
    finally:
        if rows:
            rows = report(rows, COLUMNS, device, args)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
