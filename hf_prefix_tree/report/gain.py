# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A JSON Lines file to trees, group by group, and what they add up to: the numbers of `hf-prefix-tree`.

Cost: that of rendering, tokenizing and folding every row once; all trees are in memory together.
"""

from __future__ import annotations

import functools
import json
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_prefix_tree.data.counts import LOSSES
from hf_prefix_tree.data.messages import Tools
from hf_prefix_tree.data.rows import ROW_KINDS, TEXT_KINDS, RowOptions, group_key, row_branches, row_kind
from hf_prefix_tree.data.turns import REASONING_MODES
from hf_prefix_tree.tree.prefix_tree import PrefixTree, fold
from hf_prefix_tree.tree.splitting import split_tree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = tuple[int, dict[str, Any]]


@dataclass(frozen=True)
class Group:
    """
    The trees of one group of rows.

    Args:
        name (`str`): The group's value.
        rows (`int`): Rows that it was made of.
        trees (`list[PrefixTree]`): Its trees: one per row, or a single one where rows are folded together.
    """

    name: str
    rows: int
    trees: list[PrefixTree]


@dataclass(frozen=True)
class Folded:
    """
    A file's trees.

    Args:
        name (`str`): The file.
        groups (`list[Group]`): Its groups that have a tree, by first appearance.
        losses (`str`): What was truncated or dropped on the way, empty if nothing was.
    """

    name: str
    groups: list[Group]
    losses: str

    @property
    def trees(self) -> list[PrefixTree]:
        """All trees of the file."""
        return [tree for group in self.groups for tree in group.trees]


def read_json_lines(path: Path) -> list[Row]:
    """
    Rows of a JSON Lines file with their line numbers, from 1. Empty lines are no rows.

    Raises:
        `ValueError`: If there is no such file, no row in it, or a line is no JSON object (the line is named).
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file; pass a JSON Lines file.")
    rows = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: broken JSON: {error}.") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a {type(row).__name__} instead of an object.")
            rows.append((number, row))
    if not rows:
        raise ValueError(f"{path} has no rows; pass a file with at least one.")
    return rows


def read_tools(path: Path, option: str) -> list[Any] | dict[str, list[Any]]:
    """
    Tool schemas of a JSON file: a list, or an object of lists by group.

    Args:
        path (`Path`):
            The file.
        option (`str`):
            How errors call it.

    Raises:
        `ValueError`: If there is no such file, or it holds something else.
    """
    if not path.is_file():
        raise ValueError(f"`{option}` is {path}, which is no file; pass a JSON file.")
    try:
        tools = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"`{option}` is {path}, which is broken JSON: {error}.") from error
    if not isinstance(tools, list | dict):
        raise ValueError(
            f"`{option}` is {path}, which holds a {type(tools).__name__}; pass a list, or lists by group."
        )
    return tools


def fold_file(
    path: Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    reasoning: str = "per_turn",
    tools: Tools | Mapping[str, Tools] | None = None,
    group_by: str | None = None,
    max_length: int | None = None,
    progress: Callable[[Sequence[Row]], Iterable[Row]] = iter,
) -> Folded:
    """
    Fold the rows of a JSON Lines file, as [`prepare_trees`] does.

    Args:
        path (`Path`):
            The file. What its rows may be: see [`prepare_trees`].
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Needed for rows of text.
        reasoning (`str`, *optional*, defaults to `"per_turn"`), tools (*optional*), max_length (`int`, *optional*):
            See [`prepare_trees`]. Longer branches are truncated.
        group_by (`str`, *optional*):
            Column whose equal values make one tree. Without it each row is a tree, counted under its `group`, if there
            is such a column.
        progress (callable, *optional*):
            Wraps the rows, to show how far it is.

    Raises:
        `ValueError`: If the file can't be read, an option doesn't fit, a row is malformed (its line is named), or no
            tree is left.
    """
    rows = read_json_lines(path)
    columns = {name for _, row in rows for name in row}
    if reasoning not in REASONING_MODES:
        raise ValueError(f"`reasoning` is {reasoning!r}; pass one of {', '.join(map(repr, REASONING_MODES))}.")
    if max_length is not None and max_length < 2:
        raise ValueError(f"`max_length` is {max_length}; pass at least 2, a branch's first token is not supervised.")
    if group_by is not None and group_by not in columns:
        raise ValueError(f"`group_by` is {group_by!r}, no column of {path}; it has {', '.join(sorted(columns))}.")
    try:
        kind = row_kind(columns)
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).replace('`dataset`', 'it', 1)}") from error
    if kind == "packed":
        raise ValueError(f"{path} holds packed rows; pass the file that they were made of.")
    if kind in TEXT_KINDS and tokenizer is None:
        raise ValueError(f"`tokenizer` is missing, but {path} holds text ({kind} rows); pass the model's tokenizer.")
    label = group_by or ("group" if "group" in columns else None)
    options = RowOptions(
        kind=kind,
        tokenizer=tokenizer,
        features={},
        reasoning=reasoning,
        tools=tools,
        group_column=label or "group",
        chat_template_kwargs={},
        empty_thinking_in_prompt=True,
        max_length=max_length,
        overlong="truncate",
        code="",
    )
    counts: Counter[str] = Counter()
    of_group: dict[Hashable, list[Any]] = {}
    for number, row in progress(rows):
        try:
            group = "all" if label is None else row.get(label)
            group = str(group) if group_by is None else group_key(group, group_by)
            branches = _branches(row, options, counts)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
        of_group.setdefault(group, []).append(branches)
    groups = []
    for name, members in of_group.items():
        sets = [[branch for branches in members for branch in branches]] if group_by is not None else members
        trees = [fold(branches) for branches in sets if kind == "tree" or any(b.weights.any() for b in branches)]
        counts["empty"] += len(sets) - len(trees)
        if trees:
            groups.append(Group(str(name), len(members), trees))
    losses = "; ".join(f"{counts[name]} {what}" for name, what in LOSSES.items() if counts[name])
    if not groups:
        raise ValueError(f"{path}: no tree is left of its {len(rows)} rows ({losses}).")
    return Folded(str(path), groups, losses)


def _branches(row: dict[str, Any], options: RowOptions, counts: Counter[str]) -> list[Any]:
    if options.kind == "tree":
        return PrefixTree.from_dict(row).branches()
    missing = [name for name in ROW_KINDS[options.kind] if row.get(name) is None]
    if missing:
        raise ValueError(f"`{missing[0]}` is missing; give every row the same columns.")
    return row_branches(row, options, counts)


def counts_of(groups: Sequence[Group], max_packed_tokens: int | None = None) -> dict[str, int | float]:
    """
    What the trees of some groups add up to.

    Args:
        groups (sequence of [`Group`]):
            At least one.
        max_packed_tokens (`int`, *optional*):
            Adds how many trees are split to fit into it, into how many parts, and how many tokens are computed again.

    Example:

    ```python
    >>> from hf_prefix_tree import Branch, fold

    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1])])
    >>> counts = counts_of([Group("a", 1, [tree])], max_packed_tokens=4)
    >>> counts["branch_tokens"], counts["tree_tokens"], counts["token_ratio"]
    (7, 5, 1.4)
    >>> counts["split_trees"], counts["parts"], counts["duplicated_tokens"]
    (1, 2, 2)

    ```
    """
    trees = [tree for group in groups for tree in group.trees]
    stats = functools.reduce(operator.add, (tree.stats() for tree in trees))
    counts: dict[str, int | float] = {
        "rows": sum(group.rows for group in groups),
        "trees": len(trees),
        "branches": stats.branches,
        "max_branches": max(len(tree.branch_nodes) for tree in trees),
        "branch_tokens": stats.branch_tokens,
        "tree_tokens": stats.tree_tokens,
        "supervised_tokens": stats.supervised_tokens,
        "token_ratio": stats.token_ratio,
        "pair_ratio": stats.pair_ratio,
        "longest_path": stats.longest_path,
        "largest_tree": max(map(len, trees)),
    }
    if max_packed_tokens is not None:
        split = [(tree, parts_of(tree, max_packed_tokens)) for tree in trees if len(tree) > max_packed_tokens]
        counts["split_trees"] = len(split)
        counts["parts"] = sum(len(parts) for _, parts in split)
        counts["duplicated_tokens"] = sum(sum(map(len, parts)) - len(tree) for tree, parts in split)
    return counts


def top_counts(trees: Sequence[PrefixTree], top: int | None, max_packed_tokens: int | None) -> dict[str, int | float]:
    """
    Mean and maximum ratios of the trees with the highest pair ratio: how much a selection of a data set can gain.

    Args:
        trees (sequence of [`PrefixTree`]):
            At least one.
        top (`int`, *optional*):
            How many of them; all, if not given or there are fewer.
        max_packed_tokens (`int`, *optional*):
            Counts trees as they are after splitting.
    """
    ratios = sorted((_ratios(tree, max_packed_tokens) for tree in trees), reverse=True)[:top]
    pair_ratios, token_ratios, branches = zip(*ratios, strict=True)
    return {
        "trees": len(ratios),
        "mean_branches": sum(branches) / len(ratios),
        "mean_token_ratio": sum(token_ratios) / len(ratios),
        "max_token_ratio": max(token_ratios),
        "mean_pair_ratio": sum(pair_ratios) / len(ratios),
        "max_pair_ratio": max(pair_ratios),
    }


def parts_of(tree: PrefixTree, max_packed_tokens: int | None) -> list[PrefixTree]:
    """What is trained of a tree: itself, or the parts of at most so many tokens that supervise anything."""
    parts = [tree] if max_packed_tokens is None else split_tree(tree, max_packed_tokens)
    return [part for part in parts if part.weights.any()] if len(parts) > 1 else parts


def _ratios(tree: PrefixTree, max_packed_tokens: int | None) -> tuple[float, float, int]:
    """Pair ratio, token ratio and number of branches, after splitting."""
    whole = tree.stats()
    parts = [part.stats() for part in parts_of(tree, max_packed_tokens)]
    pairs, tokens = (sum(getattr(part, name) for part in parts) for name in ("tree_pairs", "tree_tokens"))
    return whole.branch_pairs / pairs, whole.branch_tokens / tokens, whole.branches
