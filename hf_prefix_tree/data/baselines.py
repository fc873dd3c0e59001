# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Training without trees, on the same branches: samples for diffusion and EAGLE-3, rows for TRL's stock `SFTTrainer`.

Cost: linear in the tokens of the branches.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, Features, IterableDataset, List, Value
from transformers import PreTrainedTokenizerBase

from hf_prefix_tree.data.counts import Report
from hf_prefix_tree.data.prepare import check_preparation, prepare_dataset, prepare_stream, prepare_trees
from hf_prefix_tree.data.rows import (
    MESSAGE_KINDS,
    SAMPLE_KINDS,
    TEXT_KINDS,
    RowOptions,
    columns_of,
    row_branches,
    row_kind,
    rows_of_batch,
    whole_conversations,
)
from hf_prefix_tree.data.supervision import IGNORE_INDEX, located, read_sample
from hf_prefix_tree.data.trees import FOLDING, REPORT, TREE_FEATURES, Plan, cached_map, tree_of_rows
from hf_prefix_tree.tree.folding import check_choice, common_prefix
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree

logger = logging.getLogger(__name__)

Row = dict[str, list[int]]
STOCK_MAX_LENGTH = 1024  # the default of TRL's `SFTConfig`
_SAMPLE_FEATURES = Features({name: List(Value("int64")) for name in ("input_ids", "loss_mask")})
_GROUP_FEATURES = Features({name: List(feature) for name, feature in _SAMPLE_FEATURES.items()})


def read_samples(
    rows: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    on_error: str = "raise",
    num_proc: int | None = None,
    group_by: str | None = None,
    **options: Any,
) -> Any:
    """
    Rows as samples without weights, for training without trees: one for each branch that `prepare_trees` would make.

    A sample ends with its last supervised token: text of the chat template after a turn would tell where it ends. A
    branch that supervises nothing is no sample. Counts are logged as by `prepare_trees`.

    Args:
        rows (`Dataset`, `IterableDataset` or list of `dict`):
            Rows of one of the `SAMPLE_KINDS`. Rows with `input_ids` are returned as they are.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Renders and tokenizes.
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a row that can't be read is an error, of `input_ids` one of the next reader, or skipped (`"skip"`).
        num_proc (`int`, *optional*):
            Processes, for a `Dataset`.
        group_by (`str`, *optional*):
            Column whose equal values make one row of a dataset or stream out of all their samples, in lists; those of
            `input_ids` too are then read as by `prepare_trees`.
        options:
            Further ones of [`RowOptions`].

    Returns:
        `input_ids` and `loss_mask`, in the form of `rows`.

    Raises:
        `ValueError`: If the rows are of no kind that becomes samples, or one can't be read, unless `on_error` is
            `"skip"`; its index is named.
    """
    check_preparation(on_error=on_error, num_proc=num_proc)
    columns = columns_of(rows)
    if group_by is None and ("input_ids" in columns or not columns):
        return rows if on_error == "raise" else _readable(rows)
    folded = read_branches(rows, tokenizer, (*SAMPLE_KINDS, "tokens"), on_error, num_proc, group_by, **options)
    if isinstance(folded, list):
        return [sample for tree in folded for sample in _samples(tree)]
    schema = _SAMPLE_FEATURES if group_by is None else _GROUP_FEATURES
    options = {"batched": True, "remove_columns": list(TREE_FEATURES), "features": schema}
    options["fn_kwargs"] = {"is_grouped": group_by is not None}
    return cached_map(folded, _unfold, **options, num_proc=num_proc, desc="Unfolding samples")


def read_branches(
    rows: Any,
    tokenizer: Any,
    kinds: Sequence[str],
    on_error: str,
    num_proc: int | None,
    group_by: str | None = None,
    **options: Any,
) -> Any:
    """
    The tree of each row: as by `prepare_trees`, with further options of how a row is read, also for a list of rows.

    Args:
        rows (`Dataset`, `IterableDataset` or list of `dict`):
            Rows of one of the `kinds`.
        kinds (sequence of `str`):
            Keys of `ROW_KINDS`.
        tokenizer, on_error, num_proc, group_by, options:
            As for [`read_samples`].

    Returns:
        Rows that are trees, in the form of `rows`, without those that supervise nothing. Their counts are logged.
    """
    columns = columns_of(rows)
    kind = row_kind(columns, kinds)
    if group_by is not None:
        check_choice(group_by, "group_by", sorted(columns))
    if tokenizer is None and kind in TEXT_KINDS:
        raise ValueError(f"`tokenizer` is None, but {kind} rows are text; pass the model's tokenizer.")
    read = RowOptions(kind, tokenizer, dict(getattr(rows, "features", None) or {}), **options)
    plan = Plan(read, "branch", on_error, group_by=group_by, num_proc=num_proc)
    if isinstance(rows, Dataset):
        return prepare_dataset(rows, plan, Report())
    if isinstance(rows, IterableDataset):
        return prepare_stream(rows, columns, plan)
    report, folded = Report(), [tree_of_rows([item], **plan.some(FOLDING)) for item in enumerate(rows)]
    for tree in folded:
        report.add(tree.pop(REPORT))
    report.log()
    return [tree for tree in folded if tree["num_branches"]]


def _readable(rows: Any) -> Any:
    """The rows of token ids that can be read. What is skipped is logged, of a dataset batch by batch."""
    if isinstance(rows, Dataset | IterableDataset):
        return rows.filter(_can_read, with_indices=True, batched=True)
    return list(itertools.compress(rows, _can_read(rows, range(len(rows)))))


def _can_read(rows: Any, indices: Sequence[int]) -> list[bool]:
    errors: dict[int, str] = {}
    for index, row in zip(indices, rows_of_batch(rows) if isinstance(rows, Mapping) else rows, strict=True):
        try:
            read_sample(row, f"row {index}")
        except ValueError as error:
            errors[index] = str(error)
    if errors:
        logger.warning("Skipped %d of %d rows: %s", len(errors), len(indices), "; ".join([*errors.values()][:3]))
    return [index not in errors for index in indices]


def _samples(tree: Mapping[str, Any]) -> Iterator[Row]:
    for branch in PrefixTree.from_dict(tree).branches():
        if branch.weights.any():
            mask = branch.weights > 0
            end = int(np.flatnonzero(mask)[-1]) + 1
            yield {"input_ids": branch.input_ids[:end].tolist(), "loss_mask": mask[:end].astype(int).tolist()}


def _unfold(batch: Mapping[str, list[Any]], is_grouped: bool) -> dict[str, list[Any]]:
    groups = [list(_samples(tree)) for tree in rows_of_batch(batch)]
    columns = {name: [[sample[name] for sample in group] for group in groups] for name in _SAMPLE_FEATURES}
    return columns if is_grouped else {name: [*itertools.chain(*values)] for name, values in columns.items()}


def per_branch(trees: Iterable[PrefixTree]) -> list[Row]:
    """
    Every branch as a sample of its own: what `weighting="branch"` trains, without sharing anything.

    Args:
        trees (iterable of [`PrefixTree`]):
            The trees, whole or split: each branch is in one part.

    Returns:
        `list` of `dict`: `input_ids` and unshifted `labels`, -100 where not supervised, one per branch.

    Raises:
        `ValueError`: If a branch has weights other than 0 and 1, which labels can't express.

    Example:

    ```python
    >>> from hf_prefix_tree import Branch, fold

    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8], [0, 0, 1])])
    >>> per_branch([tree])
    [{'input_ids': [5, 6, 7], 'labels': [-100, 6, 7]}, {'input_ids': [5, 6, 8], 'labels': [-100, -100, 8]}]

    ```
    """
    return [_row(branch) for tree in trees for branch in tree.branches()]


def stock_samples(
    rows: Dataset, tokenizer: Any, args: Any, baseline: str | None, counts: dict[str, Any], is_training: bool = True
) -> tuple[Dataset | None, list[PrefixTree]]:
    """
    The trees that `TreeSFTTrainer` makes of dataset rows, and the samples of a baseline for `SFTTrainer` from them.

    Args:
        rows ([`~datasets.Dataset`]): The rows.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Renders and tokenizes.
        args ([`TreeSFTConfig`]): Its options have the names of those of `prepare_trees`.
        baseline (`str`, *optional*): `"per_branch"` or `"flat_steps"`; `None` makes no samples.
        counts (`dict`): As for `prepare_trees`.
        is_training (`bool`, *optional*): Whether it is training data, to which `max_examples` applies.
    """
    refuse_preferences(rows, args.column_names)
    is_flat = baseline == "flat_steps"
    if is_flat and (args.reasoning != "per_turn" or args.group_by is not None):
        raise ValueError(
            "`baseline='flat_steps'` joins the turns of one conversation: leave out `reasoning`, `group_by`."
        )
    options = {name: getattr(args, name) for name in signature(prepare_trees).parameters if hasattr(args, name)}
    options["num_proc"] = args.dataset_num_proc
    if not is_training:
        options |= dict.fromkeys(("selection_metric", "selection_num_proc", "max_examples"))
    if is_flat or (baseline is not None and args.overflow == "split"):
        options["max_packed_tokens"] = None
    prepared = prepare_trees(rows, tokenizer, counts=counts, **options)
    trees = [PrefixTree.from_dict(tree) for row in prepared for tree in row.get("trees", [row])]
    if baseline is None:
        return None, trees
    samples = [row for tree in trees for row in flat_steps(tree.branches())] if is_flat else per_branch(trees)
    return Dataset.from_list(samples), trees


def refuse_preferences(dataset: Any, column_names: Any) -> None:
    """Raises `ValueError` for pairs of answers, which SFT would both imitate."""
    if {"chosen", "rejected"} <= {*columns_of(dataset), *(column_names or ())}:
        raise ValueError(
            "the dataset has `chosen` and `rejected`, and SFT would imitate both; train with `TreeDPOTrainer`, or "
            "rename `chosen` to `completion` and remove `rejected`."
        )


def branch_shares(tree: PrefixTree) -> list[npt.NDArray[np.float64]]:
    """
    The weights of a tree's tokens, handed to its branches: over the branches through a token they sum to its weight.

    Args:
        tree ([`PrefixTree`]): A tree, or a part of a split one.

    Returns:
        `list` of float64 `[L]`, one per branch: its weights over K (weighting `"tree"`), as they are (`"branch"`),
        or over its supervised tokens (`"branch_mean"`); for `"once"` a token's weight goes to the first branch there.
    """
    of_branches = [branch.weights for branch in tree.branches()]
    if tree.weighting == "tree":
        return [weights / tree.num_branches for weights in of_branches]
    if tree.weighting == "branch_mean":
        return [weights / max(int(np.count_nonzero(weights)), 1) for weights in of_branches]
    if tree.weighting == "branch":
        return of_branches
    left = tree.weights.copy()
    shares = []
    for path in tree.paths():
        shares.append(left[path])
        left[path] = 0.0
    return shares


def flat_steps(branches: Sequence[Branch]) -> list[Row]:
    """
    The samples of RL pipelines: the turns of one conversation, as few samples as their contexts allow.

    A sample starts as one turn's branch. It grows by the next turn as long as that turn's prompt still extends the
    sample; where the template has changed what came before (earlier reasoning is gone), a new sample starts.

    Args:
        branches (sequence of [`Branch`]):
            The turns of one conversation in order, each with its context, as [`conversation_branches`] makes them with
            `reasoning="per_turn"`. Whole trees of one conversation give them back: `tree.branches()`.

    Returns:
        `list` of `dict`: `input_ids` and unshifted `labels`, -100 where not supervised. Every turn is supervised once,
        reasoning and visible output. A branch that supervises nothing is no turn: it becomes no sample.

    Raises:
        `ValueError`: If a branch has weights other than 0 and 1.

    Example:

    ```python
    >>> from hf_prefix_tree import Branch

    >>> turns = [Branch([5, 6], [0, 1]), Branch([5, 6, 7, 8], [0, 0, 0, 1]), Branch([5, 7, 9], [0, 0, 1])]
    >>> flat_steps(turns)
    [{'input_ids': [5, 6, 7, 8], 'labels': [-100, 6, -100, 8]}, {'input_ids': [5, 7, 9], 'labels': [-100, -100, 9]}]

    ```
    """
    rows: list[Row] = []
    for turns in merged_turns(branches):
        labels: list[int] = []
        for turn in map(_row, turns):
            labels = [*labels, *turn["labels"][len(labels) :]]
        rows.append({"input_ids": turn["input_ids"], "labels": labels})
    return rows


def merged_turns(branches: Iterable[Branch]) -> list[list[Branch]]:
    """
    The turns that each sample of [`flat_steps`] holds, the last of which has all its tokens.

    Args:
        branches (iterable of [`Branch`]): As for [`flat_steps`], with any weights.
    """
    samples: list[list[Branch]] = []
    for branch in branches:
        if not branch.weights.any():  # such a branch would end the sample before it
            continue
        last = samples[-1][-1].input_ids if samples else None
        if last is not None and common_prefix(branch.input_ids[: prompt_length(branch)], last) == len(last):
            samples[-1].append(branch)
        else:
            samples.append([branch])
    return samples


def prompt_length(branch: Branch) -> int:
    """Where supervision starts: the tokens before are what the turn was sampled from. Of a supervised branch."""
    return int((branch.weights > 0).argmax())


def difference(rows: Iterable[Mapping[str, Any]], reading: RowOptions, stock: Dataset) -> str:
    """
    In words, by how much training on trees differs from what TRL's `SFTTrainer` makes of the same rows.

    Args:
        rows (iterable of `Mapping`): The rows.
        reading ([`RowOptions`]): How they become branches.
        stock ([`~datasets.Dataset`]): The `input_ids` and `labels` of TRL.
    """
    every = [row_branches(row, reading, Counter()) for row in rows]
    branches = [branch for of_row in every for branch in of_row if branch.weights.any()]
    sequences = [np.array(ids, dtype=np.int64).tobytes() for ids in stock["input_ids"]]
    contexts = [branch.input_ids[: prompt_length(branch)].tobytes() for branch in branches]
    starts = sum(any(ids.startswith(context) for ids in sequences) for context in contexts)
    return (
        f"of the first {len(every)} dataset rows, trees train on "
        f"{sum(int(np.count_nonzero(branch.weights)) for branch in branches)} tokens of {len(branches)} branches, TRL "
        f"on {sum(label != IGNORE_INDEX for labels in stock['labels'] for label in labels[1:])} tokens of "
        f"{len(stock)} sequences, which start with {starts} of the {len(branches)} contexts of the branches"
    )


@dataclass(frozen=True)
class Sequences:
    """
    What one way of training computes in an epoch.

    Args:
        sequences (`int`), tokens (`int`), pairs (`int`): Sequences, their tokens, and their visible pairs of tokens.
        supervised (`int`): Tokens that pass the head.
        longest (`int`): Tokens of the longest sequence.
        at_depth (`np.ndarray`, int64): How many of the tokens have so many tokens before them in their branch.
        truncated (`int`): Sequences that were truncated.
        missing (`int`, *optional*):
            Served contexts that no sequence starts with: what was read when a turn was sampled, and is not trained on.
    """

    sequences: int
    tokens: int
    pairs: int
    supervised: int
    longest: int
    at_depth: npt.NDArray[np.int64] = field(repr=False, compare=False)
    truncated: int = 0
    missing: int | None = 0

    @classmethod
    def of(cls, lengths: Sequence[int], supervised: int, **counts: Any) -> Sequences:
        """Those of sequences without trees, by their lengths."""
        pairs = sum(n * (n + 1) // 2 for n in lengths)
        at_depth = np.bincount(lengths, minlength=1)[:0:-1].cumsum()[::-1]
        return cls(len(lengths), sum(lengths), pairs, supervised, max(lengths, default=0), at_depth, **counts)


def sequences_of_rows(
    rows: Mapping[int, Sequence[Branch]], dataset: Dataset, reading: RowOptions, at_best: RowOptions | None
) -> dict[str, Sequences]:
    """
    The sequences of the ways to train without trees, by name: `"stock_defaults"` (TRL's `SFTTrainer` as it is),
    `"stock_best"` (only the assistant's tokens, nothing truncated), `"flat_steps"` and `"per_turn"`.

    Args:
        rows (`Mapping[int, Sequence[Branch]]`):
            The turns of each row of the dataset that has any, each with its context.
        dataset ([`~datasets.Dataset`]):
            The rows.
        reading ([`RowOptions`]):
            How a conversation becomes one rendering.
        at_best ([`RowOptions`], *optional*):
            The same with the chat template for training. `None` if TRL has none: all tokens are trained on.
    """
    limits = {"stock_defaults": STOCK_MAX_LENGTH, "stock_best": reading.max_length}
    lengths, missing, truncated = defaultdict[str, list[int]](list), Counter[str](), Counter[str]()
    supervised = 0
    for index, given in rows.items():
        branches = [branch for branch in given if branch.weights.any()]
        turns = [branch.input_ids for branch in branches]
        contexts = [branch.input_ids[: prompt_length(branch)] for branch in branches]
        supervised += sum(int(np.count_nonzero(branch.weights)) for branch in branches)
        stock = best = turns
        row, is_completed = dataset[index], reading.kind in ("completions", "completion", "preference")
        is_text = is_completed and any(isinstance(row.get(name), str) for name in ("prompt", "chosen"))
        if reading.kind in MESSAGE_KINDS and not is_text:
            with located(f"row {index}, rendered at once as TRL does"):
                stock = best = whole_conversations(row, reading)
                if at_best is not None and at_best is not reading:
                    best = whole_conversations(row, at_best)
        flat = [sample[-1].input_ids for sample in merged_turns(branches)]
        ways = {"stock_defaults": stock, "stock_best": best, "flat_steps": flat, "per_turn": turns}
        for name, sequences in ways.items():
            kept = [ids[: limits.get(name)] for ids in sequences]
            lengths[name] += map(len, kept)
            truncated[name] += sum(len(after) < len(before) for after, before in zip(kept, sequences, strict=True))
            missing[name] += sum(
                not any(common_prefix(ids, context) == len(context) for ids in kept) for context in contexts
            )
    whole = ("stock_defaults", "stock_best") if at_best is None else ("stock_defaults",)
    trained = {name: sum(of_way) if name in whole else supervised for name, of_way in lengths.items()}
    return {
        name: Sequences.of(of_way, trained[name], truncated=truncated[name], missing=missing[name])
        for name, of_way in lengths.items()
    }


def _row(branch: Branch) -> Row:
    if not np.isin(branch.weights, (0.0, 1.0)).all():
        raise ValueError(
            f"A branch has the weights {np.unique(branch.weights)[:4]}, but labels express 0 and 1 only; train it "
            "with `TreeSFTTrainer`, or use weights of 0 and 1."
        )
    labels = np.where(branch.weights > 0, branch.input_ids, IGNORE_INDEX)
    return {"input_ids": branch.input_ids.tolist(), "labels": labels.tolist()}
