# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What folding gains on a data set: its trees, prepared as for training, against the ways to train without trees.

Cost: that of `prepare_trees`, once per dataset row and once per group, which `datasets` caches; all trees are
in memory together.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, load_dataset
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_prefix_tree.data.baselines import Sequences, sequences_of_rows
from hf_prefix_tree.data.counts import described
from hf_prefix_tree.data.messages import Tools, plain_data
from hf_prefix_tree.data.prepare import check_preparation, prepare_trees
from hf_prefix_tree.data.rows import MESSAGE_KINDS, RowOptions, row_kind
from hf_prefix_tree.data.selection import find_group_column
from hf_prefix_tree.data.supervision import located
from hf_prefix_tree.data.trees import overflow_problem
from hf_prefix_tree.modeling.attention.masks.causal import mean_keys_seen
from hf_prefix_tree.modeling.flops import model_costs
from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Group:
    """
    The trees of one group of dataset rows.

    Args:
        name (`str`): The group's value.
        rows (`int`): Dataset rows that it was made of.
        trees (`list[PrefixTree]`): Its trees: one per dataset row, or a single one where several are folded together.
    """

    name: str
    rows: int
    trees: list[PrefixTree]


@dataclass(frozen=True)
class Folded:
    """
    The trees of a data set, and what the other ways to train on it compute.

    Args:
        name (`str`): The data set.
        groups (`list[Group]`): Its groups that have a tree, by first appearance.
        losses (`str`): Data that was dropped or modified, empty if none was.
        group_by (`str`, *optional*): Column whose equal values make one tree.
        ungrouped (`int`): Tokens of the trees if each dataset row is one.
        contexts (`int`): Served contexts: turns, or completions of a prompt.
        ways (`dict[str, Sequences]`):
            `"stock_defaults"` (TRL's `SFTTrainer` as it is), `"stock_best"`, `"flat_steps"` (consecutive turns are one
            sequence as long as each extends the last), `"per_turn"` and `"tree"`.
        has_training_template (`bool`): Whether TRL can train on the assistant's turns alone with this chat template.
    """

    name: str
    groups: list[Group]
    losses: str
    group_by: str | None
    ungrouped: int
    contexts: int
    ways: dict[str, Sequences]
    has_training_template: bool

    @property
    def trees(self) -> list[PrefixTree]:
        """All trees of the data set."""
        return [tree for group in self.groups for tree in group.trees]


_BUILDERS = {".csv": "csv", ".tsv": "csv", ".parquet": "parquet", ".arrow": "arrow"}  # other files are JSON (Lines)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip")


def load_rows(data: str | Path, split: str = "train", config: str | None = None) -> Dataset:
    """
    One split of a file, a folder or a data set of the Hub, as `load_dataset` reads it.

    Args:
        data (`str` or `Path`): JSON, JSON Lines, CSV, Parquet or Arrow, compressed or not; a folder; or a name.
        split (`str`, *optional*, defaults to `"train"`): Split of a folder or name; a file has the split `"train"`.
        config (`str`, *optional*): Configuration of a data set that has several.

    Raises:
        `ValueError`: If it can't be read or has no dataset row; of JSON Lines, the line is named.
    """
    path = Path(data)
    is_file = path.is_file()
    suffix = path.with_suffix("").suffix if path.suffix in _COMPRESSED else path.suffix
    builder = _BUILDERS.get(suffix, "json")
    is_json = is_file and builder == "json" and suffix == path.suffix
    if not is_file and not path.is_dir() and (path.suffix or path.is_absolute() or str(data).count("/") > 1):
        raise ValueError(f"{data} is no file or folder; pass one, or the name of a data set on the Hub.")
    if is_file and not path.stat().st_size:
        raise ValueError(f"{data} has no rows; pass a file with at least one.")
    try:
        if is_file:
            options = {"sep": "\t"} if suffix == ".tsv" else {}
            rows = load_dataset(builder, data_files=str(path), split=split, **options)
        else:
            rows = load_dataset(str(data), config, split=split)
    except Exception as error:  # a builder, a codec or the Hub: each has errors of its own
        reason = _broken_json(path) if is_json else ""
        causes = f"{error}; {error.__cause__}" if error.__cause__ else f"{type(error).__name__}: {error}"
        raise ValueError(f"{data}{reason or f' could not be read: {causes}'}") from error
    if not len(rows):
        raise ValueError(f"{data} has no rows; pass at least one.")
    if is_json:
        with path.open("rb") as file:
            is_one_line = bool(file.readline()) and not file.readline()
        if is_one_line and (reason := _broken_json(path)):  # `datasets` reads such a line in another way
            raise ValueError(f"{data}{reason}")
    return rows


def _broken_json(path: Path) -> str:
    """The first line that is no JSON object, or what is wrong with a JSON array; empty if nothing is."""
    content = path.read_bytes()
    if not content.strip():
        return " has no rows; pass a file with at least one."
    first, _, rest = content.strip().partition(b"\n")
    is_array = first.startswith(b"[") and not (rest and first.rstrip().endswith(b"]"))
    for number, line in enumerate([content] if is_array else content.splitlines(), 1):
        where = "" if is_array else f" line {number}:"
        try:
            row = json.loads(line) if line.strip() else {}
            json.dumps(row, ensure_ascii=False).encode()  # fails on half of a surrogate pair
        except (ValueError, RecursionError) as error:
            return f",{where} broken JSON: {error}."
        if not isinstance(row, list if is_array else dict):
            return f",{where} a {type(row).__name__} instead of an object."
    return ""


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
    try:
        tools = plain_data(json.loads(path.read_bytes()), option)  # Python 3.12 reads any depth
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"`{option}` is {path}, which is no JSON file that can be read: {error}.") from error
    if isinstance(tools, list | dict):
        return tools
    raise ValueError(f"`{option}` is {path}, which holds a {type(tools).__name__}; pass a list, or lists by group.")


def fold_rows(
    dataset: Dataset,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    reasoning: str = "per_turn",
    tools: Tools | Mapping[str, Tools] | None = None,
    group_by: str | None = "auto",
    max_length: int | None = None,
    max_packed_tokens: int | None = None,
) -> Folded:
    """
    Fold a data set with [`prepare_trees`], and count what training on it without trees would compute.

    Args:
        dataset ([`~datasets.Dataset`]):
            The dataset rows, see [`prepare_trees`].
        name (`str`):
            How results and errors call it.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Needed for dataset rows of text.
        reasoning (`str`, *optional*, defaults to `"per_turn"`), tools (*optional*), max_length (`int`, *optional*):
            See [`prepare_trees`]. Longer branches are truncated.
        group_by (`str`, *optional*, defaults to `"auto"`):
            Column whose equal values make one tree. `"auto"` looks for one, `None` makes each dataset row a tree,
            counted under its `group`, if there is such a column.
        max_packed_tokens (`int`, *optional*):
            Split larger trees. A longer branch is refused.

    Raises:
        `ValueError`: If an option doesn't fit, a dataset row is malformed (its index is named), or no tree is left.
    """
    check_preparation(reasoning=reasoning, max_length=max_length, max_packed_tokens=max_packed_tokens)
    options: dict[str, Any] = {"tools": tools, "max_length": max_length}
    with located(name):
        kind = row_kind(dataset.column_names)
        as_served = "per_turn" if kind in MESSAGE_KINDS else reasoning
        # dataset rows that are not grouped find their tools by the column that they will be grouped by
        is_renamed = isinstance(tools, Mapping) and group_by != "group" and group_by in dataset.column_names
        names = {"group": group_by} if is_renamed else None
        served, counts = _prepare(dataset, tokenizer, **options, column_names=names, reasoning=as_served)
        trees = served
        branches = {row: tree.branches() for row, tree in served.items()}
        if group_by == "auto":
            group_by = find_group_column(dataset, branches)
            if isinstance(tools, Mapping) and group_by != "group":  # they are looked up by the column
                group_by = None
        if group_by is not None or reasoning != as_served:
            trees, counts = _prepare(dataset, tokenizer, **options, reasoning=reasoning, group_by=group_by)
        reading = RowOptions(kind, tokenizer, dict(dataset.features), group_column=group_by or "group", **options)
        at_best = stock_at_best(reading)
        ways = sequences_of_rows(branches, dataset, reading, at_best)
    if max_packed_tokens is not None and (problem := overflow_problem(counts, max_packed_tokens, "split")):
        raise ValueError(f"{name}: {problem}")
    cut = {"truncated": counts["truncated"], "missing": 0 if reasoning == as_served else None}
    ways["tree"] = sequences_of_trees(list(trees.values()), max_packed_tokens, **cut)
    label = group_by or ("group" if "group" in dataset.column_names else None)
    of_row = ["all"] * len(dataset) if label is None else list(map(str, dataset[label]))
    rows = Counter(of_row)
    of_tree = list(rows) if group_by is not None else of_row  # the group of each tree, before empty ones are left out
    members: dict[str, list[PrefixTree]] = {}
    for source, tree in trees.items():
        members.setdefault(of_tree[source], []).append(tree)
    return Folded(
        name=name,
        groups=[Group(group, rows[group], members[group]) for group in rows if group in members],
        losses="; ".join(described(counts)),
        group_by=group_by,
        ungrouped=sum(map(len, served.values())),
        contexts=sum(bool(branch.weights.any()) for items in branches.values() for branch in items),
        ways=ways,
        has_training_template=at_best is not None,
    )


def _prepare(
    dataset: Dataset, tokenizer: PreTrainedTokenizerBase | None, **options: Any
) -> tuple[dict[int, PrefixTree], dict[str, Any]]:
    """The trees by the dataset row or group that they are made of, and the counts."""
    counts: dict[str, Any] = {}
    trees = map(PrefixTree.from_dict, prepare_trees(dataset, tokenizer, **options, counts=counts))
    return dict(zip(counts["sources"].tolist(), trees, strict=True)), counts


def stock_at_best(reading: RowOptions) -> RowOptions | None:
    """How TRL reads dataset rows for `assistant_only_loss=True`; `None` if it has no chat template for that."""
    if reading.kind not in MESSAGE_KINDS:
        return reading
    from trl.chat_template_utils import get_training_chat_template

    try:
        template = get_training_chat_template(reading.tokenizer)
    except ValueError:  # TRL knows no training template for the tokenizer's and refuses the option
        return None
    return dataclasses.replace(reading, chat_template_kwargs={"chat_template": template}) if template else reading


def _summed(trees: Iterable[PrefixTree]) -> Any:
    stats = [tree.stats() for tree in trees]
    return sum(stats[1:], stats[0])


_SIZES = ("branches", "branch_tokens", "tree_tokens", "supervised_tokens", "token_ratio", "pair_ratio", "longest_path")


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
    stats = _summed(trees)
    counts: dict[str, int | float] = {
        "rows": sum(group.rows for group in groups),
        "trees": len(trees),
        **{name: getattr(stats, name) for name in _SIZES},
        "max_branches": max(len(tree.branch_nodes) for tree in trees),
        "largest_tree": max(map(len, trees)),
    }
    if max_packed_tokens is not None:
        large = [tree for tree in trees if len(tree) > max_packed_tokens]
        parts = [part for tree in large for part in parts_of(tree, max_packed_tokens)]
        duplicated = sum(map(len, parts)) - sum(map(len, large))
        counts |= {"split_trees": len(large), "parts": len(parts), "duplicated_tokens": duplicated}
    return counts


def sequences_of_trees(trees: Sequence[PrefixTree], max_packed_tokens: int | None = None, **counts: Any) -> Sequences:
    """The sequences of training on trees, larger ones split."""
    parts = [part for tree in trees for part in parts_of(tree, max_packed_tokens)]
    stats, at_depth = _summed(parts), np.bincount(np.concatenate([part.depth for part in parts]))
    sizes = stats.tree_tokens, stats.tree_pairs, stats.supervised_tokens, max(map(len, parts)), at_depth
    return Sequences(len(parts), *sizes, **counts)


def parts_of(tree: PrefixTree, max_packed_tokens: int | None) -> list[PrefixTree]:
    """The tree itself, or its parts of at most so many tokens that supervise anything: all that is trained on."""
    parts = [tree] if max_packed_tokens is None else split_tree(tree, max_packed_tokens)
    return [part for part in parts if part.weights.any()] if len(parts) > 1 else parts


# Tree attention is slower per pair than a causal kernel, and a tree has to be built: a smaller gain can be eaten up.
PAYS_FROM = 1.2
STATE_BYTES = 16  # of a parameter: TRL's default of float32 weights, their gradients, and the two moments of AdamW
# TFLOP/s of a whole optimizer step in full packed sequences, layers compiled: medians over trees and branches of the
# files in `benchmarks/results`, which a test compares. Other GPUs were not measured so.
MEASURED_TFLOPS = {"h100": 467.0}
ASSUMPTIONS = (
    "speed-up: FLOPs of matrix products, forward and backward, at the same throughput for flat steps and trees, both "
    "packed without padding. Not counted: optimizer, data loading, communication, and that a pair costs more in tree "
    "attention than in a causal kernel",
    "a layer with a sliding window or chunks counts the pairs inside it; the head runs on supervised tokens only",
    f"memory: {STATE_BYTES} bytes for each parameter (float32 weights and gradients, AdamW, nothing sharded, no "
    "adapters), and the bfloat16 activations of one sequence, tree or part per micro-batch; the chunked head comes on "
    "top. Packed sequences of equal length take the same",
)


@dataclass(frozen=True)
class Estimate:
    """
    A prediction of [`estimate`].

    Args:
        tflop (`dict[str, float]`): FLOPs of one epoch, in 10^12, of every way to train.
        speedup (`float`): Those of flat steps, or of the branches, over those of the trees.
        pays (`bool`): Whether that is at least `PAYS_FROM`.
        parameters (`int`), state_gib (`float`): Parameters; their weights, gradients and optimizer state.
        activations_gib (`dict[str, float]`), checkpointed_gib (`dict[str, float]`):
            Activations of the longest sequence of every way to train, without and with gradient checkpointing.
    """

    tflop: dict[str, float]
    speedup: float
    pays: bool
    parameters: int
    state_gib: float
    activations_gib: dict[str, float]
    checkpointed_gib: dict[str, float]

    def verdict(self) -> str:
        """One sentence: whether folding pays."""
        if self.pays:
            return f"Folding pays: {self.speedup:.2f}x fewer FLOPs than without trees."
        return (
            f"Folding does not pay here: {self.speedup:.2f}x fewer FLOPs, and below {PAYS_FROM}x tree attention can "
            "cost more than it saves. Train the sequences with SFTTrainer, packed."
        )

    def hours(self, gpu: str) -> dict[str, float]:
        """Hours of an epoch on one GPU of `MEASURED_TFLOPS`, for every way to train."""
        return {name: tflop / MEASURED_TFLOPS[gpu] / 3600 for name, tflop in self.tflop.items()}


def estimate(
    trees: Sequence[PrefixTree],
    config: PretrainedConfig,
    max_packed_tokens: int | None = None,
    ways: Mapping[str, Sequences] | None = None,
) -> Estimate:
    """
    Predict from counts what training on the trees gains over training without. See `ASSUMPTIONS`.

    Args:
        trees (sequence of [`PrefixTree`]):
            At least one.
        config (`PretrainedConfig`):
            The model's.
        max_packed_tokens (`int`, *optional*):
            Splits larger trees first, so that tokens which several parts compute count as often.
        ways (`Mapping[str, Sequences]`, *optional*):
            The other ways to train, see [`Folded`]; the branches one by one if not given.

    Raises:
        `ValueError`: If the costs of the model are not counted, see [`model_costs`], or a branch is longer than
            `max_packed_tokens`.
    """
    if ways is None:
        lengths = [len(branch) for tree in trees for branch in tree.branches()]
        ways = {"flat_steps": Sequences.of(lengths, sum(int(tree.branch_count.sum()) for tree in trees))}
    ways = {**ways, "tree": sequences_of_trees(trees, max_packed_tokens)}
    costs = model_costs(config)
    longest = max(len(way.at_depth) for way in ways.values())
    keys = mean_keys_seen(config.get_text_config(), costs.attention_layers, longest)
    tflop = {
        name: float(costs.flops @ np.array([way.tokens, way.supervised, way.at_depth @ keys[: len(way.at_depth)]]))
        / 1e12
        for name, way in ways.items()
    }
    activations = {name: costs.activation_bytes * way.longest / 2**30 for name, way in ways.items()}
    checkpointed = {name: costs.checkpointed_bytes * way.longest / 2**30 for name, way in ways.items()}
    speedup = tflop["flat_steps"] / tflop["tree"]
    state_gib = STATE_BYTES * costs.parameters / 2**30
    return Estimate(tflop, speedup, speedup >= PAYS_FROM, costs.parameters, state_gib, activations, checkpointed)
