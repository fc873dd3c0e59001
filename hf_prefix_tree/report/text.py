# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Tables of counts, and one tree, to print."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree
from transformers import PreTrainedTokenizerBase

from hf_prefix_tree.report.gain import ASSUMPTIONS, Estimate, Folded
from hf_prefix_tree.tree.prefix_tree import PrefixTree

_COLUMNS = (
    *("rows", "trees", "branches", "branch_tokens", "tree_tokens", "token_ratio", "pair_ratio", "longest_path"),
    *("split_trees", "parts", "duplicated_tokens"),
)
_DEEPEST_INDENT = 12  # levels; deeper nodes are drawn at this one


def console() -> Console:
    """Standard output; as wide as the tables need where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """A table to print; its first row is the head."""
    drawn = Table(title=printable(title) or None, title_justify="left")
    for index, name in enumerate(rows[0]):
        drawn.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows[1:]:
        drawn.add_row(*map(printable, row))
    return drawn


def counts_rows(groups: Sequence[tuple[str, Mapping[str, Any]]], total: Mapping[str, Any]) -> list[list[str]]:
    """A row for each mapping of counts, under its name, and one for the total; a head before them."""
    columns = [key for key in _COLUMNS if key in total]
    named = [*groups, ("total", total)]
    head = ["group", *(key.replace("_", " ") for key in columns)]
    return [head, *([name, *(_cell(counts[key]) for key in columns)] for name, counts in named)]


def preparation_tables(title: str, counts: Mapping[str, Any], trees: Sequence[PrefixTree]) -> tuple[Table, Table]:
    """
    The counts of a preparation that are not 0, and the table by which prime-rl describes its selection: means and
    maxima over the trees, and the ratios, whose mean is that of all trees together.
    """
    stats = [tree.stats() for tree in trees]
    ratios = {f"{name}_ratio": counts[f"branch_{name}s"] / counts[f"tree_{name}s"] for name in ("token", "pair")}
    numbers = {name: count for name, count in {**counts, **ratios}.items() if isinstance(count, int | float) and count}
    total = sum(stats[1:], stats[0])
    labels = {"branches": "K", "tree_tokens": "packed tokens", "longest_path": "longest path"}
    selection = [["", "mean", "max"]]
    for name in (*labels, "token_ratio", "pair_ratio"):
        values, digits = [getattr(of_tree, name) for of_tree in stats], 2 if "ratio" in name else 1
        mean = getattr(total, name) if "ratio" in name else sum(values) / len(values)
        selection.append([labels.get(name, name.replace("_", " ")), f"{mean:,.{digits}f}", _cell(max(values))])
    counted = [[title, ""], *([name.replace("_", " "), _cell(count)] for name, count in numbers.items())]
    return table("", counted), table(f"{len(stats)} trees", selection)


def printable(text: str) -> str:
    """The text without characters that a terminal would obey."""
    return "".join(char if char.isprintable() else " " for char in text)


def _cell(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


# The ways to train, in the order of the table. A footnote has `per_turn`.
_WAYS = {"stock_defaults": "stock defaults", "stock_best": "stock at its best", "flat_steps": "flat steps"}
_WAYS["tree"] = "tree"


def gain_lines(folded: Folded, predicted: Estimate | None) -> list[str]:
    """The sentences around the table of [`gain_rows`]."""
    flat, tree, per_turn = (folded.ways[name] for name in ("flat_steps", "tree", "per_turn"))
    rows, trees = sum(group.rows for group in folded.groups), len(folded.trees)
    lines = [f"{folded.name}: {_number(rows, 'row')}, {_number(folded.contexts, 'turn')}, {_number(trees, 'tree')}."]
    grouped = f"{per_turn.tokens / tree.tokens:.2f}x fewer tokens than turn by turn"
    alone = f"{per_turn.tokens / folded.ungrouped:.2f}x"
    if folded.group_by is None:
        lines.append(f"Each row is a tree: {grouped}. No column marks rows that share more (`--group-by`).")
    else:
        lines.append(
            f"Rows with an equal `{folded.group_by}` are one tree: {grouped}, {alone} without. Train with "
            f"`group_by={folded.group_by!r}`."
        )
    if folded.losses:
        lines.append(f"Some data was dropped or modified: {folded.losses}.")
    lines.append(f"Trees compute {flat.tokens / tree.tokens:.2f}x fewer tokens than flat steps.")
    if predicted is not None:
        lines.append(predicted.verdict())
    return lines


def footnotes(folded: Folded, predicted: Estimate | None) -> list[str]:
    """What the table of [`gain_rows`] means."""
    best = "assistant_only_loss=True, max_length=None, packed"
    if not folded.has_training_template:
        best += "; TRL refuses the first with this chat template, so all tokens are trained on"
    return [
        "stock defaults: TRL's SFTTrainer, a conversation per sequence, all tokens trained on, cut at 1,024",
        f"stock at its best: {best}",
        "flat steps: consecutive turns are one sequence as long as each extends the last; one sequence per turn has "
        f"{folded.ways['per_turn'].tokens:,} tokens",
        "missing contexts: what a turn was sampled from, but no sequence starts with",
        *(ASSUMPTIONS if predicted is not None else ()),
    ]


def gain_rows(folded: Folded, predicted: Estimate | None = None, gpu: str | None = None) -> list[list[str]]:
    """A row for each figure, with a column for every way to train; a head before them."""
    ways = [folded.ways[name] for name in _WAYS]
    missing = ["not counted" if way.missing is None else f"{way.missing:,}" for way in ways]
    rows = [
        ["", *_WAYS.values()],
        ["sequences", *(f"{way.sequences:,}" for way in ways)],
        ["tokens", *(f"{way.tokens:,}" for way in ways)],
        ["tokens / tree tokens", *(f"{way.tokens / folded.ways['tree'].tokens:.2f}" for way in ways)],
        ["longest sequence", *(f"{way.longest:,}" for way in ways)],
        ["truncated sequences", *(f"{way.truncated:,}" for way in ways)],
        [f"missing contexts, of {folded.contexts:,}", *missing],
    ]
    if predicted is not None:
        figures = {
            "TFLOP of an epoch": predicted.tflop,
            "GiB: weights, gradients, optimizer": dict.fromkeys(_WAYS, predicted.state_gib),
            "GiB: activations, longest sequence": predicted.activations_gib,
            "  with checkpointing": predicted.checkpointed_gib,
        }
        if gpu is not None:
            figures[f"hours of an epoch, one {gpu.upper()}"] = predicted.hours(gpu)
        rows += [[label, *(f"{values[name]:,.4g}" for name in _WAYS)] for label, values in figures.items()]
    return rows


def draw_tree(tree: PrefixTree, tokenizer: PreTrainedTokenizerBase | None = None, max_nodes: int = 40) -> Tree:
    """
    A tree to print: a line for each node, with its tokens, the branches through it and g.

    Args:
        tree ([`PrefixTree`]):
            The tree.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Adds how each node's text starts.
        max_nodes (`int`, *optional*, defaults to 40):
            Nodes drawn; the last line says how many are left out.

    Returns:
        [`rich.tree.Tree`]

    Example:

    ```python
    >>> from hf_prefix_tree import Branch, fold

    >>> console().print(draw_tree(fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1])])))
    2 tokens, 2 branches, g 0-2
    ├── 2 tokens, 1 branch, g 1
    └── 1 token, 1 branch, g 1

    ```
    """
    parents = tree.node_parents.tolist()
    through = Counter(node for path in tree.to_node_paths()[1] for node in path)
    drawn = Tree("", hide_root=True, highlight=False)
    levels: list[int] = []
    places: list[Tree] = []  # where the children of each node are drawn
    for node, parent in enumerate(parents[:max_nodes]):
        level, place = (levels[parent] + 1, places[parent]) if parent >= 0 else (0, drawn)
        start = int(tree.node_starts[node])
        length = int(tree.node_lengths[node])
        g = tree.branch_count[start : start + length]
        low, high = int(g.min()), int(g.max())
        line = f"(level {level}) " if level > _DEEPEST_INDENT else ""
        line += f"{_number(length, 'token')}, {_number(through[node], 'branch')}, "
        line += f"g {low}" if low == high else f"g {low}-{high}"
        if tokenizer is not None:
            text = tokenizer.decode(tree.input_ids[start : start + min(length, 16)].tolist())
            line += f"  {text[:32]!r}" + ("..." if length > 16 or len(text) > 32 else "")
        line_of_node = place.add(Text(line))
        levels.append(level)
        places.append(line_of_node if level < _DEEPEST_INDENT else place)
    if len(parents) > max_nodes:
        drawn.add(f"... and {_number(len(parents) - max_nodes, 'more node')}")
    return drawn


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith("ch") else "s")
