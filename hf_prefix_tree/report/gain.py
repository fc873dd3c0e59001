# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A file of dataset rows to trees, prepared as for training; how much they share, and what training would gain.

Cost: that of `prepare_trees`, which `datasets` caches; all trees are in memory together.
"""

from __future__ import annotations

import functools
import json
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetsError

from hf_prefix_tree.data.counts import described
from hf_prefix_tree.data.messages import Tools
from hf_prefix_tree.data.prepare import check_preparation, prepare_trees
from hf_prefix_tree.modeling.flops import activation_bytes, flop_counts
from hf_prefix_tree.tree.prefix_tree import PrefixTree
from hf_prefix_tree.tree.splitting import split_tree

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


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
        losses (`str`): Data that was dropped or modified, empty if none was.
    """

    name: str
    groups: list[Group]
    losses: str

    @property
    def trees(self) -> list[PrefixTree]:
        """All trees of the file."""
        return [tree for group in self.groups for tree in group.trees]


_FORMATS = {".csv": "csv", ".parquet": "parquet"}  # by suffix; other files are JSON Lines


def load_rows(path: Path) -> Dataset:
    """
    The rows of a JSON Lines, CSV or Parquet file, as training loads them.

    Raises:
        `ValueError`: If there is no such file, no row in it, or it can't be read; of JSON Lines, the line is named.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file; pass a JSON Lines file.")
    if not path.stat().st_size:
        raise ValueError(f"{path} has no rows; pass a file with at least one.")
    try:
        return load_dataset(_FORMATS.get(path.suffix, "json"), data_files=str(path), split="train")
    except (DatasetsError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}{_broken_line(path) or f' could not be read: {error.__cause__ or error}'}") from error


def _broken_line(path: Path) -> str:
    """The first line that is no JSON object, and why; empty if there is none."""
    empty = True
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            empty = False
            try:
                row = json.loads(line)
                json.dumps(row, ensure_ascii=False).encode()  # fails on half of a surrogate pair
            except (ValueError, RecursionError) as error:
                return f", line {number}: broken JSON: {error}."
            if not isinstance(row, dict):
                return f", line {number}: a {type(row).__name__} instead of an object."
    return " has no rows; pass a file with at least one." if empty else ""


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
    except (ValueError, RecursionError) as error:
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
    max_packed_tokens: int | None = None,
) -> Folded:
    """
    Fold the rows of a file with [`prepare_trees`].

    Args:
        path (`Path`):
            The file, see [`load_rows`]. Which rows it may hold: see [`prepare_trees`].
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Needed for rows of text.
        reasoning (`str`, *optional*, defaults to `"per_turn"`), tools (*optional*), max_length (`int`, *optional*):
            See [`prepare_trees`]. Longer branches are truncated.
        group_by (`str`, *optional*):
            Column whose equal values make one tree. Without it each row is a tree, counted under its `group`, if there
            is such a column.
        max_packed_tokens (`int`, *optional*):
            Refuse a branch of more tokens. Trees stay whole.

    Raises:
        `ValueError`: If the file can't be read, an option doesn't fit, a row is malformed (its index is named), or no
            tree is left.
    """
    check_preparation(reasoning=reasoning, max_length=max_length, max_packed_tokens=max_packed_tokens)
    dataset = load_rows(path)
    counts: dict[str, Any] = {}
    try:
        prepared = prepare_trees(
            dataset,
            tokenizer,
            reasoning=reasoning,
            tools=tools,
            group_by=group_by,
            max_length=max_length,
            counts=counts,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if max_packed_tokens is not None and counts["longest_path"] > max_packed_tokens:
        raise ValueError(
            f"{path}: `max_packed_tokens` is {max_packed_tokens}, but a branch has {counts['longest_path']} tokens "
            "and can't be split; raise it, or cap branches with `max_length`."
        )
    label = group_by or ("group" if "group" in dataset.column_names else None)
    names = ["all"] * len(dataset) if label is None else list(map(str, dataset[label]))
    rows = Counter(names)
    of_tree = list(rows) if group_by is not None else names  # the group of each tree, before empty ones are left out
    trees: dict[str, list[PrefixTree]] = {}
    for source, row in zip(counts["sources"], prepared, strict=True):
        trees.setdefault(of_tree[source], []).append(PrefixTree.from_dict(row))
    groups = [Group(name, rows[name], trees[name]) for name in rows if name in trees]
    return Folded(str(path), groups, "; ".join(described(counts)))


def counts_of(groups: Sequence[Group], max_packed_tokens: int | None = None) -> dict[str, int | float]:
    """
    The sizes of the trees of some groups, summed.

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
    """The tree itself, or its parts of at most so many tokens that supervise anything: all that is trained on."""
    parts = [tree] if max_packed_tokens is None else split_tree(tree, max_packed_tokens)
    return [part for part in parts if part.weights.any()] if len(parts) > 1 else parts


def _ratios(tree: PrefixTree, max_packed_tokens: int | None) -> tuple[float, float, int]:
    """Pair ratio, token ratio and number of branches, after splitting."""
    whole = tree.stats()
    parts = [part.stats() for part in parts_of(tree, max_packed_tokens)]
    pairs, tokens = (sum(getattr(part, name) for part in parts) for name in ("tree_pairs", "tree_tokens"))
    return whole.branch_pairs / pairs, whole.branch_tokens / tokens, whole.branches


# Tree attention is slower per pair than a causal kernel, and a tree has to be built: a smaller gain can be eaten up.
PAYS_FROM = 1.2
ASSUMPTIONS = (
    "speed-up: FLOPs of matrix products, forward and backward, at the same throughput for both; branches are trained "
    "one by one without padding. Not counted: optimizer, data loading, communication, and that a pair costs more in "
    "tree attention than in a causal kernel",
    "a layer with a sliding window counts the pairs inside it; the head runs on supervised tokens only",
    "memory: activations in bfloat16 that a layer of Qwen3 or Qwen3.5 keeps in eager mode, one tree, part or branch "
    "per micro-batch; weights, gradients, optimizer and the chunked head come on top and are the same for both",
)


@dataclass(frozen=True)
class Estimate:
    """
    A prediction of [`estimate`].

    Args:
        branch_tflop (`float`), tree_tflop (`float`): FLOPs of one epoch, in 10^12.
        speedup (`float`): Their ratio.
        pays (`bool`): Whether that is at least `PAYS_FROM`.
        branch_gib (`float`), tree_gib (`float`): Activations of the longest branch, and of the largest tree or part.
        branch_gib_checkpointed (`float`), tree_gib_checkpointed (`float`): The same with gradient checkpointing.
    """

    branch_tflop: float
    tree_tflop: float
    speedup: float
    pays: bool
    branch_gib: float
    tree_gib: float
    branch_gib_checkpointed: float
    tree_gib_checkpointed: float

    def verdict(self) -> str:
        """One sentence: whether folding pays."""
        if self.pays:
            return f"Folding pays: {self.speedup:.2f}x fewer FLOPs than branch by branch."
        return (
            f"Folding does not pay here: {self.speedup:.2f}x fewer FLOPs, and below {PAYS_FROM}x tree attention can "
            "cost more than it saves. Train the branches with SFTTrainer, packed."
        )


def estimate(trees: Sequence[PrefixTree], config: PretrainedConfig, max_packed_tokens: int | None = None) -> Estimate:
    """
    Predict from counts what training on the trees gains over training on their branches. See `ASSUMPTIONS`.

    Args:
        trees (sequence of [`PrefixTree`]):
            At least one.
        config (`PretrainedConfig`):
            The model's.
        max_packed_tokens (`int`, *optional*):
            Splits larger trees first, so that tokens which several parts compute count as often.

    Raises:
        `ValueError`: If the FLOPs of the model are not counted, see [`step_flops`], or a branch is longer than
            `max_packed_tokens`.
    """
    parts = [part for tree in trees for part in parts_of(tree, max_packed_tokens)]
    branch_tflop = flop_counts(trees, config)["branches"]["tflop"]
    tree_tflop = flop_counts(parts, config)["folded"]["tflop"]
    sizes = {"branch": max(tree.stats().longest_path for tree in trees), "tree": max(map(len, parts))}
    gib = {
        f"{name}_gib{suffix}": activation_bytes(config, tokens, checkpointing) / 2**30
        for name, tokens in sizes.items()
        for suffix, checkpointing in (("", False), ("_checkpointed", True))
    }
    speedup = branch_tflop / tree_tflop
    return Estimate(branch_tflop, tree_tflop, speedup, speedup >= PAYS_FROM, **gib)
