# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The update of GRPO on agent rollouts of 8 to 16 turns: TRL on the rows and on flat steps, against trees of the rows.

    python -m benchmarks.agent_rollouts --output agent_rollouts.csv
    python -m benchmarks.agent_rollouts --conversations trials.jsonl --tools tools.json --tokenizer Qwen/Qwen3-0.6B

A group of 8 rollouts of one prompt. Each turn is a row: its context and its sampled tokens.

- `stripped`: contexts repeat earlier answers and tool results, but not the reasoning. Each turn forks off.
- `extending`: contexts repeat everything. Each turn continues the previous one.

Sides, all with the same random weights (the shape of Qwen3-0.6B, bfloat16) and the same advantages:

- `trl`: TRL's `GRPOTrainer` on the rows, with the fastest attention that is installed (`--attention`). It pads them to
  the longest prompt and the longest completion of the group; a micro-batch holds up to `--micro-batch-tokens`.
- `trl-flat`: the same on flat steps: consecutive turns are merged as long as each extends the previous one, and the
  tokens between them are masked. Omitted if nothing can be merged.
- `tree`: `TreeGRPOTrainer` on the rows of `trl`, the whole group in one forward.

An update leads from the buffered completions to the updated weights: scoring, loss, backward, fused AdamW. Generation,
rewards and old log-probs are excluded. The weights change after the old log-probs were scored, so ratios are not 1.
Loss (`dapo`, which divides by the tokens of the group) and gradient norm of the first update must agree, or the run
fails. `ms` is the median of `--steps` updates after that one, `peak_gib` the peak memory during these.

`tokens` are those that the backbone computes, including padding; `useful_tokens` and `tflop` exclude padding. Each row
of TRL's sides is compared with the tree: `speedup` is its time divided by the tree's, `flop_ratio` its useful FLOPs
divided by the tree's (the speed-up if time were proportional to them), and `of_bound` the quotient of both, whose goal
is 0.9. TRL also computes padding: `computed_ratio` includes it in everything that scales with tokens, and
`of_computed` is the quotient with it.

With `--conversations`, rollouts are the trials of a `group` of a JSONL file with `messages`: `stripped` renders each
turn with the tokenizer's own chat template, `extending` with the one that TRL trains Qwen3 on.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_training_chat_template

from benchmarks.common import (
    Row,
    attempted,
    best_attention,
    check_failures,
    check_same_step,
    default_device,
    make_parser,
    measure,
    peak_gib,
    report,
)
from benchmarks.flops import flop_counts, model_config, step_flops
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import Branch, TreeGRPOTrainer, fold
from hf_prefix_tree.data.turns import conversation_branches

GOAL = 0.9
CASES = ("stripped", "extending")
COLUMNS = ["turns", "side", "mode", "attention", "rows", "batch_size", "forwards", "tokens", "useful_tokens", "tflop"]
COLUMNS += ["ms", "low", "high", "peak_gib", "loss", "grad_norm", "speedup", "flop_ratio", "of_bound", "goal"]
COLUMNS += ["computed_ratio", "of_computed", "memory_ratio", "failure"]


class Sequences(NamedTuple):
    """The rows of a rollout in the form of a rollout function."""

    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]


class Sizes(NamedTuple):
    """Tokens of the prompt, turns of each rollout, and the ranges of tokens in a turn's parts."""

    prompt: int
    turns: tuple[int, ...]
    reasoning: tuple[int, int]
    answer: tuple[int, int]
    result: tuple[int, int]


# Answers and tool results are as long as in trajectories of tau-bench, reasoning as in short ones of Qwen3.
DEFAULT = Sizes(2048, (8, 9, 10, 11, 13, 14, 15, 16), (60, 200), (40, 120), (20, 220))
QUICK = Sizes(24, (2, 3, 3, 4), (2, 6), (2, 5), (1, 6))


def random_rollouts(sizes: Sizes, is_stripped: bool, vocab_size: int) -> list[Sequences]:
    """Rollouts of random tokens. No two turns start alike, so only what the contexts repeat is shared."""
    rng = np.random.default_rng(0)
    first = iter(range(vocab_size))

    def draw(bounds: tuple[int, int]) -> list[int]:
        return rng.integers(sum(sizes.turns), vocab_size, size=rng.integers(*bounds)).tolist()

    prompt = draw((sizes.prompt, sizes.prompt + 1))
    rollouts = []
    for num_turns in sizes.turns:
        rollout, context = Sequences([], [], []), prompt
        for _ in range(num_turns):
            reasoning, answer, result = [next(first), *draw(sizes.reasoning)], draw(sizes.answer), draw(sizes.result)
            rollout.prompts.append(context)
            rollout.completions.append(reasoning + answer)
            rollout.masks.append([1] * len(reasoning + answer))
            context = context + ([] if is_stripped else reasoning) + answer + result
        rollouts.append(rollout)
    return rollouts


def recorded_rollouts(args: argparse.Namespace, is_stripped: bool) -> list[Sequences]:
    """The trials of a group of conversations."""
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer)
    template = {} if is_stripped else {"chat_template": qwen3_training_chat_template}
    trials = [json.loads(line) for line in args.conversations.read_text().splitlines()]
    group = args.group or trials[0]["group"]
    tools = json.loads(args.tools.read_text()) if args.tools else None
    tools = tools[group] if isinstance(tools, dict) else tools
    rollouts = []
    for trial in trials:
        if trial["group"] == group:
            made = conversation_branches(trial["messages"], tokenizer, tools=tools, chat_template_kwargs=template)
            pieces = []
            for branch in made.branches:
                sampled = branch.weights.nonzero()[0]
                start, end = int(sampled[0]), int(sampled[-1]) + 1
                ids = branch.input_ids.tolist()
                pieces.append((ids[:start], ids[start:end], [1] * (end - start)))
            rollouts.append(Sequences(*map(list, zip(*pieces, strict=True))))
    while sum(len(rollout.prompts) for rollout in rollouts) % 8:  # so that micro-batches of TRL can be large
        longest = max(rollouts, key=lambda rollout: len(rollout.prompts))
        for values in longest:
            values.pop()
    return rollouts


def flatten(rollout: Sequences) -> Sequences:
    """Consecutive rows merged as long as each extends the previous one. Tokens between them are masked."""
    flat = Sequences([], [], [])
    for prompt, completion, mask in zip(*rollout, strict=True):
        last = flat.prompts[-1] + flat.completions[-1] if flat.prompts else []
        if last and prompt[: len(last)] == last:
            between = prompt[len(last) :]
            flat.completions[-1] = flat.completions[-1] + between + completion
            flat.masks[-1] = flat.masks[-1] + [0] * len(between) + mask
        else:
            for values, value in zip(flat, (prompt, completion, mask), strict=True):
                values.append(value)
    return flat


def counts(rollouts: list[Sequences], config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """Tokens, tokens that pass the head, pairs and TFLOP of the rows, folded and row by row, without padding."""
    branches = [
        Branch(prompt + completion, [0] * len(prompt) + [1] * len(completion))
        for rollout in rollouts
        for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True)
    ]
    return flop_counts([fold(branches)], config)


class ReplayedMixin:
    """Given advantages, and weights that change after the old log-probs were scored, so that ratios are clipped."""

    given_advantages: torch.Tensor

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        output["advantages"] = self.given_advantages.to(output["advantages"])
        with torch.no_grad():
            self.model.lm_head.weight.mul_(2)  # type: ignore[attr-defined]
        return output


class StockTrainer(ReplayedMixin, GRPOTrainer):
    pass


class TreeTrainer(ReplayedMixin, TreeGRPOTrainer):
    pass


def rollout_function(rollouts: list[Sequences], is_tree: bool) -> Any:
    """Returns rollouts of several rows for trees, and for TRL each row as a rollout."""

    def generate(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        fields = zip(*rollouts, strict=True)
        values = [list(field) if is_tree else list(itertools.chain(*field)) for field in fields]
        output = dict(zip(("prompt_ids", "completion_ids", "env_mask"), values, strict=True))
        assert len(prompts) == len(output["prompt_ids"])
        return {**output, "logprobs": _zeros(output["completion_ids"])}

    return generate


def _zeros(ids: Any) -> Any:
    return [_zeros(each) for each in ids] if isinstance(ids, list) else 0.0


def batch_size_of(rollouts: list[Sequences], tokens: int) -> int:
    """The largest micro-batch size that divides the rows and stays within the padded tokens."""
    prompts, completions = ([len(ids) for rollout in rollouts for ids in rollout[field]] for field in (0, 1))
    width = max(prompts) + max(completions)
    fitting = [size for size in range(1, len(prompts) + 1) if len(prompts) % size == 0 and size * width <= tokens]
    return max(fitting, default=1)


def make_trainer(
    row: Row, rollouts: list[Sequences], config: PreTrainedConfig, quick: bool, folder: str, device: torch.device
) -> GRPOTrainer:
    torch.manual_seed(0)
    is_tree = row["side"] == "tree"
    with device:
        model = AutoModelForCausalLM.from_config(
            copy.deepcopy(config),
            dtype=torch.float32 if quick else torch.bfloat16,
            attn_implementation=row["attention"],
        )
    number = len(rollouts) if is_tree else row["rows"]
    advantages = np.linspace(-1, 1, len(rollouts))
    if not is_tree:
        advantages = advantages.repeat([len(rollout.prompts) for rollout in rollouts])
    args = GRPOConfig(
        folder,
        num_generations=number,
        per_device_train_batch_size=row["batch_size"],
        gradient_accumulation_steps=number // row["batch_size"],
        max_completion_length=config.max_position_embeddings,
        num_iterations=10**6,  # keeps the buffered completions, and old log-probs are computed
        loss_type="dapo",
        gradient_checkpointing=False,
        bf16=not quick,
        use_cpu=quick,
        learning_rate=0.0,  # a full step that leaves the weights unchanged
        report_to="none",
    )
    trainer = (TreeTrainer if is_tree else StockTrainer)(
        model=model,
        reward_funcs=lambda prompts, **kwargs: [0.0] * len(prompts),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "A prompt."}]),
        processing_class=train_tokenizer(["A prompt."], vocab_size=265),
        rollout_func=rollout_function(rollouts, is_tree),
    )
    trainer.given_advantages = torch.from_numpy(advantages)
    if row["mode"] == "compiled":
        for layer in trainer.model.model.layers:
            layer.compile()
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    return trainer


def measure_update(trainer: GRPOTrainer, steps: int, device: torch.device) -> Row:
    model, forwards = trainer.model, trainer.args.gradient_accumulation_steps
    examples = [{"prompt": "A prompt."}] * trainer.args.num_generations
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=device.type == "cuda")
    tokens: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: tokens.append(kwargs["input_ids"].numel()), with_kwargs=True
    )

    def gradients() -> Any:
        return sum(trainer.training_step(model, examples, None) for _ in range(forwards))

    def update() -> None:
        gradients()
        optimizer.step()
        optimizer.zero_grad()

    row: Row = {"forwards": forwards, "loss": float(gradients())}  # generates, checks the model, compiles
    row["tokens"] = sum(tokens[-forwards:])
    row["grad_norm"] = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    optimizer.step()  # has its states before memory is measured
    optimizer.zero_grad()
    timings: list[Any] = []
    row["peak_gib"] = peak_gib(
        lambda: timings.append(measure(update, device, warmup=0, min_runs=steps, max_runs=steps)), device
    )
    return row | timings[0]._asdict()


def compare(stock: Row, tree: Row, config: PreTrainedConfig) -> None:
    """Adds the ratios to a row of TRL; raises if the first updates differ."""
    if "ms" not in stock or "ms" not in tree:
        return
    check_same_step(tree, stock)
    stock["speedup"], stock["flop_ratio"] = stock["ms"] / tree["ms"], stock["tflop"] / tree["tflop"]
    stock["of_bound"] = stock["speedup"] / stock["flop_ratio"]
    stock["goal"] = "met" if stock["of_bound"] >= GOAL else "missed"
    padding = [step_flops(config, row["tokens"] - row["useful_tokens"], 0, 0) / 1e12 for row in (stock, tree)]
    stock["computed_ratio"] = (stock["tflop"] + padding[0]) / (tree["tflop"] + padding[1])
    stock["of_computed"] = stock["speedup"] / stock["computed_ratio"]
    if stock["peak_gib"] is not None:
        stock["memory_ratio"] = tree["peak_gib"] / stock["peak_gib"]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = make_parser(__doc__, CASES)
    parser.add_argument("--modes", nargs="+", choices=("eager", "compiled"), default=["eager"])
    parser.add_argument("--attention", help="attention of TRL's sides (default: the best that is installed)")
    parser.add_argument("--steps", type=int, default=3, help="updates to measure, after one that compiles")
    parser.add_argument("--micro-batch-tokens", type=int, default=40_000, help="padded tokens of TRL's micro-batches")
    parser.add_argument("--conversations", type=Path, help="JSONL file with `messages` and `group` (default: random)")
    parser.add_argument("--tools", type=Path, help="its tool schemas: JSON, a list or one list per group")
    parser.add_argument("--tokenizer", help="its tokenizer")
    parser.add_argument("--group", help="the group to take (default: the first)")
    args = parser.parse_args(argv)
    device, config = default_device(args.quick), model_config(args.quick)
    if args.quick:
        args.micro_batch_tokens, args.modes, args.steps = 200, ["eager"], 1
    attention = args.attention or best_attention(args.quick)
    rows: list[Row] = []
    try:
        # beyond the recompile limit, layers would silently run eagerly
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=64):
            for mode, turns in itertools.product(args.modes, args.only):
                if args.conversations:
                    rollouts = recorded_rollouts(args, turns == "stripped")
                    ids = itertools.chain.from_iterable(ids for r in rollouts for ids in r.prompts + r.completions)
                    config.vocab_size = max(config.vocab_size, 1 + max(ids))
                else:
                    sizes = QUICK if args.quick else DEFAULT
                    rollouts = random_rollouts(sizes, turns == "stripped", config.vocab_size)
                flat = [flatten(rollout) for rollout in rollouts]
                sides = {"tree": rollouts, "trl": rollouts} | ({"trl-flat": flat} if flat != rollouts else {})
                tree: Row = {}
                for side, given in sides.items():
                    is_tree = side == "tree"
                    count = counts(given, config)["folded" if is_tree else "branches"]
                    row: Row = {"turns": turns, "side": side, "mode": mode}
                    row |= {"attention": "prefix_tree" if is_tree else attention}
                    row["rows"] = sum(len(rollout.prompts) for rollout in given)
                    row["batch_size"] = len(given) if is_tree else batch_size_of(given, args.micro_batch_tokens)
                    row |= {"useful_tokens": count["tokens"], "tflop": count["tflop"]}
                    with attempted(rows, row, device):
                        with tempfile.TemporaryDirectory() as folder:
                            trainer = make_trainer(row, given, config, args.quick, folder, device)
                            row |= measure_update(trainer, args.steps, device)
                            del trainer
                        if is_tree:
                            tree = row
                        else:
                            compare(row, tree, config)
    finally:
        rows = report(rows, COLUMNS, device, args)
    check_failures(rows)
    return rows


if __name__ == "__main__":
    main(sys.argv[1:])
