# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The speed of preparing conversations for training, on one core: rendering, tokenizing, folding, splitting, packing.

    python -m benchmarks.prepare dialogues.jsonl --tools dialogues.tools.json --tokenizer Qwen/Qwen3-0.6B \
        --output prepare.csv

Each assistant turn is a branch. Tokens per second count the tokens of all branches, however many a step touches.
`naive` calls `tokenizer.apply_chat_template` for every turn and its prompt and tokenizes each text as a whole; both
must give the same texts and token ids. Times are CPU times, which other work on the machine hardly changes. Caches
start empty. `prepare_trees` runs all steps, including the overhead of `datasets`. `--quick` uses the demo's dialogues
and its tokenizer.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from datasets import (
    Dataset,
    disable_caching,
    disable_progress_bars,
    enable_caching,
    enable_progress_bars,
    is_caching_enabled,
)

from benchmarks.common import Row, make_parser, measure, progress, report
from benchmarks.fold import one_core
from hf_prefix_tree.data.messages import Message, normalize_messages, normalize_tools, split_reasoning
from hf_prefix_tree.data.prepare import prepare_trees
from hf_prefix_tree.data.template import ChatTemplate
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.report.gain import read_tools
from hf_prefix_tree.tree.packing import pack_rows, split_tree
from hf_prefix_tree.tree.prefix_tree import PrefixTree, fold

CPU = torch.device("cpu")
Talk = tuple[list[Message], list[Any] | None]  # normalized messages and tools


def read(path: Path | None, tools_path: Path | None, tokenizer: str | None) -> tuple[list[dict[str, Any]], Any]:
    """Dataset rows with `group`, `messages` and `tools` (the last two as JSON strings), and the tokenizer."""
    if path is None:
        from examples.demo.dialogues import dialogue_texts, generate_dialogues
        from examples.demo.tokenizer import train_tokenizer

        rows = generate_dialogues(num_groups=2, trials=2)
        encoder: Any = train_tokenizer(dialogue_texts(rows))
    else:
        from transformers import AutoTokenizer

        tools = read_tools(tools_path, "--tools") if tools_path is not None else None
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        for number, row in enumerate(rows):
            row.setdefault("group", number)
            row.setdefault("tools", tools[row["group"]] if isinstance(tools, dict) else tools)
        encoder = AutoTokenizer.from_pretrained(tokenizer)
    names = ("messages", "tools")
    return [{"group": str(row["group"])} | {name: json.dumps(row[name]) for name in names} for row in rows], encoder


def turns(messages: list[Message], template: ChatTemplate) -> list[tuple[int, dict[str, bool]]]:
    """The assistant turns, and the variables that each is rendered with."""
    quiet = {"enable_thinking": False} if template.takes_enable_thinking else {}
    assistants = [t for t, message in enumerate(messages) if message["role"] == "assistant"]
    return [(t, {} if split_reasoning(messages[t])[0] else quiet) for t in assistants]


def rendered(talks: list[Talk], template: ChatTemplate) -> list[str]:
    """Prompt and text of every turn, as `conversation_branches` renders them."""
    texts = []
    for messages, tools in talks:
        template.forget()
        for t, variables in turns(messages, template):
            texts += [
                template.render(messages[:t], tools, variables, add_generation_prompt=True),
                template.render(messages[: t + 1], tools, variables),
            ]
    return texts


def naively_rendered(talks: list[Talk], template: ChatTemplate, tokenizer: Any) -> list[str]:
    """The same texts, by `tokenizer.apply_chat_template`."""
    texts = []
    for messages, tools in talks:
        for t, variables in turns(messages, template):
            for end, add_generation_prompt in ((t, True), (t + 1, False)):
                texts.append(
                    tokenizer.apply_chat_template(
                        messages[:end],
                        tools=tools,
                        tokenize=False,
                        add_generation_prompt=add_generation_prompt,
                        **variables,
                    )
                )
    return texts


def packed(trees: list[PrefixTree], max_packed_tokens: int) -> list[list[PrefixTree]]:
    """The trees in packed sequences of at most `max_packed_tokens` tokens; larger trees are split."""
    parts = [part for tree in trees for part in split_tree(tree, max_packed_tokens)]
    return [[parts[i] for i in row] for row in pack_rows(list(map(len, parts)), max_packed_tokens)]


def main(argv: Sequence[str] | None = None) -> list[Row]:
    cached = is_caching_enabled()
    disable_caching()  # a cached result would take no time
    disable_progress_bars()
    try:
        return run(argv)
    finally:
        enable_progress_bars()
        if cached:
            enable_caching()


def run(argv: Sequence[str] | None) -> list[Row]:
    names = ("rendering", "tokenizing", "folding", "splitting and packing", "prepare_trees", "naive")
    parser = make_parser(__doc__, names)
    parser.add_argument("data", nargs="?", type=Path, help="JSON Lines file: `messages`, optionally `group`, `tools`")
    parser.add_argument("--tools", type=Path, help="JSON file with tool schemas: a list, or lists by group")
    parser.add_argument("--tokenizer", help="tokenizer, a folder or a name on the Hub")
    parser.add_argument("--max-packed-tokens", type=int, help="of a packed sequence (default: the longest branch)")
    parser.add_argument("--seconds", type=float, default=3.0, help="time to spend on each row")
    args = parser.parse_args(argv)
    if (args.data is None) is not args.quick or (args.data is None) is not (args.tokenizer is None):
        parser.error("pass a file and `--tokenizer`, or `--quick`")
    lines, tokenizer = read(args.data, args.tools, args.tokenizer)
    template = ChatTemplate(tokenizer, tokenizer.get_chat_template())
    adapt = template.dialect({}).adapt
    talks = [(list(map(adapt, normalize_messages(row["messages"]))), normalize_tools(row["tools"])) for row in lines]
    of_group: dict[str, list[Any]] = {}
    for row in lines:
        result = conversation_branches(row["messages"], tokenizer, tools=row["tools"])
        of_group.setdefault(row["group"], []).extend(result.branches)
    sets = list(of_group.values())
    trees = list(map(fold, sets))
    longest = max(tree.stats().longest_path for tree in trees)
    budget = args.max_packed_tokens or longest
    branches = [branch for group in sets for branch in group]
    tokens = sum(map(len, branches))
    counts = {
        "data": args.data.name if args.data is not None else "demo dialogues",
        "conversations": len(lines),
        "trees": len(trees),
        "branches": len(branches),
        "branch_tokens": tokens,
        "tree_tokens": sum(map(len, trees)),
        "max_packed_tokens": budget,
    }
    texts = rendered(talks, template)
    # Each run starts with a new tokenizer.
    fresh = iter([copy.deepcopy(tokenizer) for _ in range(3)])
    source = Dataset.from_list(lines)
    options: dict[str, Any] = {"group_by": "group", "max_packed_tokens": budget}
    steps: dict[str, list[tuple[str, Callable[[], Any]]]] = {
        "rendering": [("ours", lambda: rendered(talks, ChatTemplate(tokenizer, tokenizer.get_chat_template())))],
        "tokenizing": [
            ("ours", lambda: ChatTemplate(tokenizer, tokenizer.get_chat_template()).segments.encode(texts))
        ],
        "folding": [("ours", lambda: list(map(fold, sets)))],
        "splitting and packing": [("ours", lambda: packed(trees, budget))],
        "prepare_trees": [("ours", lambda: prepare_trees(source, next(fresh), **options))],
        "naive": [
            ("rendering", lambda: naively_rendered(talks, template, tokenizer)),
            ("tokenizing", lambda: tokenizer(texts, add_special_tokens=False, return_attention_mask=False)),
        ],
    }
    few = rendered(talks[:2], template)
    assert naively_rendered(talks[:2], template, tokenizer) == few
    whole = tokenizer(few, add_special_tokens=False)["input_ids"]
    assert all(map(np.array_equal, template.segments.encode(few), whole))
    rows: list[Row] = []
    for name in args.only:
        for label, function in steps[name]:
            with one_core():
                timing = measure(
                    function, CPU, warmup=0, seconds=args.seconds, min_runs=1, max_runs=3, clock=process_time
                )
            step = {"method": "ours", "step": name} if label == "ours" else {"method": name, "step": label}
            speed = tokens / timing.ms * 1e3
            progress(rows, {**step, **counts, **timing._asdict(), "tokens_per_s": speed})
    return report(
        rows, ["method", "step", "branches", "branch_tokens", "ms", "low", "high", "tokens_per_s"], CPU, args
    )


if __name__ == "__main__":
    main(sys.argv[1:])
