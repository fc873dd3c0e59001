# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Tables of counts, and one tree, to print."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from hf_prefix_tree.tree.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMNS = {
    "rows": "rows",
    "trees": "trees",
    "branches": "branches",
    "branch_tokens": "branch tokens",
    "tree_tokens": "tree tokens",
    "token_ratio": "token ratio",
    "pair_ratio": "pair ratio",
    "longest_path": "longest path",
    "split_trees": "split trees",
    "parts": "parts",
    "duplicated_tokens": "duplicated",
    "mean_branches": "mean branches",
    "mean_token_ratio": "mean token ratio",
    "max_token_ratio": "max",
    "mean_pair_ratio": "mean pair ratio",
    "max_pair_ratio": "max",
}
_DEEPEST_INDENT = 12  # levels; deeper nodes are drawn at this one


def console() -> Console:
    """Standard output; as wide as the tables need where it is no terminal."""
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False, markup=False)


def printable(text: str) -> str:
    """The text with control characters escaped: a terminal would obey those of a group's name."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)


def counts_table(
    title: str, name: str, rows: Sequence[tuple[str, Mapping[str, Any]]], total: Mapping[str, Any] | None = None
) -> Table:
    """A table with a line for each mapping of counts, under its name, and one for the total."""
    table = Table(title=printable(title), title_justify="left")
    columns = [key for key in _COLUMNS if key in rows[0][1]]
    table.add_column(name, overflow="fold")
    for key in columns:
        table.add_column(_COLUMNS[key], justify="right")
    for label, counts in rows:
        table.add_row(printable(label), *(_cell(counts[key]) for key in columns))
    if total is not None:
        table.add_section()
        table.add_row("total", *(_cell(total[key]) for key in columns))
    return table


def _cell(value: float) -> str:
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"


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
    through = _branches_through(tree)
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
        line += f"{_number(length, 'token')}, {_number(int(through[node]), 'branch')}, "
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


def _branches_through(tree: PrefixTree) -> npt.NDArray[np.int64]:
    through = np.bincount(tree.branch_nodes, minlength=len(tree.node_parents))
    for node in range(len(through) - 1, 0, -1):
        if (parent := tree.node_parents[node]) >= 0:
            through[parent] += through[node]
    return through
