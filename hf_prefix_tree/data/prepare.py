# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`prepare_trees`]: a dataset of any supported row kind to a dataset of folded trees.

The steps are fold, select, pack. `datasets` runs and caches them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_prefix_tree.data.counts import Report, read_counts
from hf_prefix_tree.data.messages import Tools
from hf_prefix_tree.data.packed import check_weightings, log_packing, pack_dataset, pack_stream
from hf_prefix_tree.data.rows import MESSAGE_KINDS, TEXT_KINDS, RowOptions, columns_of, group_key, row_kind
from hf_prefix_tree.data.selection import METRICS, RATIOS, SCORES, order_units, select_trees
from hf_prefix_tree.data.trees import (
    COUNTED_FEATURES,
    FOLDING,
    REPORT,
    TREE_FEATURES,
    Plan,
    cached_map,
    drop_oversized_trees,
    skipped_row,
    tree_of_unit,
    trees_of_batch,
    trees_of_stream,
)
from hf_prefix_tree.data.turns import REASONING_MODES
from hf_prefix_tree.tree.folding import INT64_MAX, WEIGHTINGS, check_choice, check_integer, check_not_empty, check_type


def prepare_dataset(dataset: Dataset, plan: Plan, report: Report) -> Dataset:
    """The trees of a dataset, or the rows that they are packed in. Counts are added to the report."""
    units: list[list[int]] | None = None
    if plan.group_by is not None:
        members: dict[Any, list[int]] = {}
        for index, group in enumerate(dataset[plan.group_by][:]):
            try:
                members.setdefault(group_key(group, plan.group_by), []).append(index)
            except ValueError as error:
                report.add(skipped_row(index, error, plan.on_error))
        units = list(members.values())
        if not units:
            raise ValueError(f"no tree is left of {report} ({report.losses()}); pass another `group_by`.")

    processes = (plan.selection_num_proc if plan.selection_metric in RATIOS else None) or plan.num_proc
    everything = range(len(dataset) if units is None else len(units))

    def prepare(chosen: Sequence[int]) -> tuple[Dataset, dict[str, Any]]:
        rows = units
        if chosen != everything:
            rows = [units[unit] if units is not None else [unit] for unit in chosen]
        # The first row stands for its unit; the rest of a group is read when the unit is folded.
        trees = cached_map(
            dataset if rows is None else dataset.select([unit[0] for unit in rows]),
            tree_of_unit,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=COUNTED_FEATURES,
            fn_kwargs=plan.some(FOLDING) | {"source": None if units is None else dataset, "units": rows},
            num_proc=processes,
            writer_batch_size=100,
            desc="Folding trees",
        )
        counts = read_counts(trees, REPORT)
        drop_oversized_trees(counts, lambda index: index if rows is None else rows[index][-1], plan)
        return trees, counts

    candidates = order_units(dataset, units, plan, report) if plan.selection_metric in SCORES else everything
    trees = select_trees(prepare, candidates, plan, report)
    report.log()
    if not len(trees):
        raise ValueError(f"no tree is left of {report} ({report.losses()}); change the rows, or what drops them.")
    lengths, trees = read_counts(trees, REPORT)["tree_tokens"], trees.remove_columns(REPORT)
    if (max_tokens := plan.max_packed_tokens) is not None:
        if plan.overflow == "stream":  # larger trees stay whole, each in a row of its own
            lengths = np.minimum(lengths, max_tokens)
        trees, packing = pack_dataset(trees, lengths, max_tokens, plan.pack_trees, plan.num_proc)
        report.further |= packing
        log_packing(packing, max_tokens)
    return trees


def prepare_stream(dataset: IterableDataset, columns: list[str], plan: Plan) -> IterableDataset:
    """The same for a stream, which is counted batch by batch, while it is read."""
    if plan.group_by is None:
        trees = dataset.map(
            trees_of_batch,
            with_indices=True,
            batched=True,
            batch_size=64,
            remove_columns=columns,
            features=TREE_FEATURES,
            fn_kwargs={"plan": plan},
        )
    else:
        arguments = {"dataset": dataset, "group_by": plan.group_by, "plan": plan}
        trees = IterableDataset.from_generator(trees_of_stream, features=TREE_FEATURES, gen_kwargs=arguments)
    if plan.max_examples is not None:
        trees = trees.take(plan.max_examples)
    if plan.max_packed_tokens is not None:
        trees = pack_stream(trees, plan.max_packed_tokens, plan.pack_trees, plan.overflow != "stream")
    return trees


# The options of `prepare_trees` that take one of a few strings, and which these are.
PREPARATION_CHOICES: dict[str, tuple[str, ...]] = {
    "reasoning": REASONING_MODES,
    "weighting": WEIGHTINGS,
    "overlong": ("truncate", "drop", "raise"),
    "overflow": ("split", "stream", "drop", "raise"),
    "selection_metric": METRICS,
    "on_error": ("raise", "skip"),
}
# Those that take an integer or `None`, and the least one.
_LIMITS = {"max_length": 2, "max_packed_tokens": 2, "selection_num_proc": 1, "max_examples": 1, "num_proc": 1}
CHECKED_OPTIONS = (*PREPARATION_CHOICES, *_LIMITS)


def check_preparation(**options: Any) -> None:
    """
    Check those of the `CHECKED_OPTIONS` of [`prepare_trees`] that are given.

    Raises:
        `ValueError`: If an option is unknown or out of range, or two of them contradict each other.

    Example:

    ```python
    >>> check_preparation(overlong="shorten")
    Traceback (most recent call last):
    ValueError: `overlong` is 'shorten'; pass one of 'truncate', 'drop', 'raise'.

    ```
    """
    for name, known in PREPARATION_CHOICES.items():
        if name in options and not (name == "selection_metric" and options[name] is None):
            check_choice(options[name], name, known)
    given = {name: value for name, value in options.items() if value is not None}
    for name, least in _LIMITS.items():
        if name in given:
            check_integer(given[name], name, least)
    max_length, max_packed_tokens = given.get("max_length", 0), given.get("max_packed_tokens", INT64_MAX)
    if options.get("overflow") != "stream" and max_length > max_packed_tokens:
        raise ValueError(
            f"`max_length` is {max_length}, above `max_packed_tokens`, which is {max_packed_tokens}: a packed "
            "sequence holds whole branches; lower the first or raise the second."
        )
    if "selection_metric" in given and "max_examples" not in given:
        raise ValueError(
            f"`selection_metric` is {given['selection_metric']!r}, but `max_examples` is None; pass how many."
        )


def prepare_trees(
    dataset: Dataset | IterableDataset,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    reasoning: str = "per_turn",
    weighting: str = "tree",
    group_by: str | None = None,
    tools: Tools | Mapping[str, Tools] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    empty_thinking_in_prompt: bool = True,
    stop_token_ids: Sequence[int] | None = None,
    max_length: int | None = None,
    overlong: str = "truncate",
    max_packed_tokens: int | None = None,
    overflow: str = "split",
    pack_trees: bool = True,
    selection_metric: str | None = None,
    selection_num_proc: int | None = None,
    max_examples: int | None = None,
    column_names: Mapping[str, str] | None = None,
    on_error: str = "raise",
    num_proc: int | None = None,
    counts: MutableMapping[str, Any] | None = None,
) -> Dataset | IterableDataset:
    """
    Fold a dataset into trees: its rows are then what [`PrefixTree.to_dict`] returns, one tree a row.

    With `max_packed_tokens`, a row holds several trees, up to so many tokens. It has the columns `trees`, a list of
    what [`PrefixTree.to_dict`] returns, and, one `int` for each, `tree_ids` and `num_parts`. A tree that is larger is
    split with [`split_tree`]: its parts have the same id, which no other tree has, and must be trained on in one
    optimizer step. `num_parts` says how many they are, 1 for a whole tree. Each part has a row of its own, which only
    whole trees fill up; the rows of a tree's parts come one after another. The id is made of a tree's tokens and its
    index, so that data sets which were prepared apart can be concatenated.

    The columns tell the kind of rows:

    | columns | a row is | its branches |
    |---|---|---|
    | `messages` or `conversations` | a conversation in a format of `docs/data.md` | see [`conversation_branches`] |
    | `instruction`, `output` | one in Alpaca's format, maybe with `input`, `history` | the same |
    | `prompt`, `completions` or `completion` | strings, or lists of messages | one per completion, or per its turns |
    | `chosen`, `rejected` | two completions of a `prompt`, to count; not for SFT | one per completion |
    | `text` | a text | itself, all supervised |
    | `prompt_ids`, `completions` | token ids | one per completion, see [`rollout_branches`] |
    | `branches` | a list of `input_ids`, `weights` | these |
    | `parents`, `nodes` | a tree by its nodes: token ids, or `input_ids`, `weights` | one per leaf |
    | `parents`, `texts` | a tree by its nodes' texts, with `weights`: one per node | one per leaf |
    | `input`, `nodes` | a search: nodes are `step`, `text`, `kept`, see [`search_tree_branches`] | one per kept leaf |
    | `input_ids` | token ids, with `loss_mask`, `labels`, `weights` or TRL's masks | itself, see [`read_sample`] |
    | those of a tree | a tree | it is weighted anew if its `weighting` is another one, selected and packed |
    | `trees`, `tree_ids`, `num_parts` | packed trees | the dataset is returned as it is |

    K of a tree is the number of branches that its rows hold, those that supervise nothing included (also where
    `overlong="truncate"` left nothing to supervise); of such a branch the tree keeps the first token. Branches that
    `overlong="drop"` drops, and those of skipped rows, are not counted. Trees that supervise nothing are left out.
    Dropped or truncated data is always reported: at the end, for a streaming dataset batch by batch. Arrow keeps
    neither the order of keys nor nulls in its structs: tool schemas and arguments are best stored as JSON strings or
    `Json` features.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            One split.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Needed for rows of text.
        reasoning (`str`, *optional*, defaults to `"per_turn"`):
            See [`conversation_branches`].
        weighting (`str`, *optional*, defaults to `"tree"`):
            See [`fold`]. Packed trees and parts of split ones must have it already.
        group_by (`str`, *optional*):
            Column whose equal values make one tree of their rows, e.g. `"group"`. A null is an error. Of a streaming
            dataset only consecutive rows are put together, by a single reader.
        tools (sequence, `str` or `Mapping`, *optional*):
            Tools of rows that have none of their own: a list, a JSON string, or either by the value of the row's
            `group_by` column (`"group"` without one).
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Further variables for the chat template. A row's own take precedence.
        empty_thinking_in_prompt (`bool`, *optional*, defaults to `True`):
            See [`conversation_branches`].
        stop_token_ids (sequence of `int`, *optional*):
            See [`conversation_branches`].
        max_length (`int`, *optional*):
            Longest branch, in tokens.
        overlong (`str`, *optional*, defaults to `"truncate"`):
            How to treat a longer branch: `"truncate"` keeps its start, `"drop"` drops it, so that K is smaller,
            `"raise"` makes its row an error.
        max_packed_tokens (`int`, *optional*):
            Tokens that a row of packed trees holds. At least `max_length`, if that is given. Of a streaming dataset,
            up to 1,000 consecutive trees are packed together.
        overflow (`str`, *optional*, defaults to `"split"`):
            How to treat a larger tree: `"split"` splits it (a longer branch makes its row an error), `"stream"` leaves
            it whole, in a row of its own, `"drop"` drops it, `"raise"` makes its row an error.
        pack_trees (`bool`, *optional*, defaults to `True`):
            Whether trees share rows. If not, each row holds one tree or part.
        selection_metric (`str`, *optional*):
            The `max_examples` trees with the highest value are taken, highest first, ties by index: `"num_turns"`,
            `"branching_score"`, `"forked_context"` (see [`order_units`]), `"token_ratio"` or `"pair_ratio"` (see
            [`TreeStats`]; all trees are prepared for it). Not for streaming datasets.
        selection_num_proc (`int`, *optional*):
            Number of processes for the metric.
        max_examples (`int`, *optional*):
            Largest number of trees, before they are split. Without a metric, the first ones. One that is invalid (its
            rows can't be read under `on_error="skip"`, no branch is left, or it is dropped) is replaced by the next.
        column_names (`Mapping[str, str]`, *optional*):
            Columns of `dataset` that have another name than here, e.g. `{"messages": "conversation"}`. All other
            arguments use the names here. A column that has such a name already is not read.
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a row that can't be read stops the preparation (`"raise"`) or is skipped (`"skip"`).
        num_proc (`int`, *optional*):
            Number of processes. Not for streaming datasets.
        counts (`MutableMapping[str, Any]`, *optional*):
            Is filled with counts. Not for streaming datasets, which are counted while they are read.

            - `rows` that were read, `trees`, `max_branches` of one, the fields of [`TreeStats`], and `errors`;
            - the losses: branches `truncated`, `overlong`, `unsupervised`; turns with `unrendered_reasoning` etc.;
              `unrendered_messages`; rows `filled`, `skipped` or `refused_*`; trees `oversized` or `empty`;
            - `sources`, an int64 array: of which row, or group by first appearance, each tree was made;
            - rows converted, by format: `sharegpt`, `call_roles`, `anthropic`, `hermes`, `bare_tools`, `alpaca`,
              `preference`, `text`, and rows with turns `switched` off;
            - with `max_examples`: `candidates` (rows or groups), `valid` ones of those prepared, `selected`, and with
              `"branching_score"` those that are `too_long`;
            - with `max_packed_tokens`: `packed_rows`, their `fill` (0 to 1), `split_trees`, `parts`,
              `weightless_parts` (left out: all that they supervise is in other parts), `duplicated_tokens`.

    Returns:
        A dataset of the kind that was passed.

    Raises:
        `ValueError`: If an option is unknown or doesn't fit, the columns fit no kind of rows, a row can't be read (its
            index is named), or no tree is left.
    """
    given = dict(locals())
    check_preparation(**{name: given[name] for name in CHECKED_OPTIONS})
    check_type(dataset, "dataset", Dataset | IterableDataset, "one split, a Dataset or an IterableDataset")
    if isinstance(dataset, Dataset) and dataset.format["type"] is not None:
        raise ValueError(f"`dataset` has the format {dataset.format['type']!r}; pass `dataset.with_format(None)`.")
    columns = columns_of(dataset)
    if column_names:
        dataset, columns = renamed(dataset, columns, column_names)
    kind = row_kind(columns)
    if kind in ("tree", "packed"):
        for name, default in _OF_THE_FOLD.items():
            if given[name] != default:
                raise ValueError(
                    f"`{name}` is {given[name]!r}, but `dataset` holds trees already; pass it where they are folded."
                )
        nothing_asked = max_packed_tokens is max_examples is counts is None
        if kind == "packed":
            if not nothing_asked:
                raise ValueError(
                    "`dataset` holds packed rows already; pass `max_packed_tokens`, `max_examples` and `counts` where "
                    "they are packed."
                )
            return check_weightings(dataset, "trees", weighting)
        if nothing_asked and isinstance(dataset, Dataset) and set(dataset.unique("weighting")) <= {weighting}:
            return dataset
    if kind in TEXT_KINDS and tokenizer is None:
        raise ValueError(f"`tokenizer` is None, but {kind} rows are text; pass the model's tokenizer.")
    if group_by is not None:
        check_choice(group_by, "group_by", sorted(columns))
    if selection_metric in SCORES and kind not in MESSAGE_KINDS:
        raise ValueError(
            f"`selection_metric` is {selection_metric!r}, but {kind} rows have no messages; pass 'token_ratio' or "
            "'pair_ratio'."
        )
    given |= {"kind": kind, "features": dict(dataset.features or {}), "group_column": group_by or "group"}
    given["tokenizer"] = tokenizer if kind in TEXT_KINDS else None
    given["chat_template_kwargs"] = dict(chat_template_kwargs or {})
    given["options"] = RowOptions(**{name: given[name] for name in RowOptions.__dataclass_fields__ if name in given})
    plan = Plan(**{name: given[name] for name in Plan.__dataclass_fields__})
    if isinstance(dataset, IterableDataset):
        for name in ("num_proc", "selection_num_proc", "selection_metric", "counts"):
            if given[name] is not None:
                raise ValueError(
                    f"`{name}` is {given[name]!r}, but `dataset` is a stream, which one process reads, row by row; "
                    "leave it out, or pass a `Dataset`."
                )
        return prepare_stream(dataset, columns, plan)
    check_not_empty(dataset, "dataset")
    report = Report()
    trees = prepare_dataset(dataset, plan, report)
    if counts is not None:
        counts.update(report.as_dict())
    return trees


# Options of `prepare_trees` that change nothing about trees that are folded already, with their defaults.
_OF_THE_FOLD = {"group_by": None, "max_length": None, "overlong": "truncate", "reasoning": "per_turn"}


def renamed(
    dataset: Dataset | IterableDataset, columns: list[str], column_names: Mapping[str, str]
) -> tuple[Dataset | IterableDataset, list[str]]:
    """
    A dataset with the names of columns that are used here, and its columns; a column of such a name gives way.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): The dataset.
        columns (`list[str]`): Its columns.
        column_names (`Mapping[str, str]`): As for [`prepare_trees`].
    """
    for name, theirs in column_names.items():
        check_choice(theirs, f"column_names[{name!r}]", sorted(columns))
    if len(set(column_names.values())) < len(column_names):
        raise ValueError(f"`column_names` is {dict(column_names)!r}; name each column once.")
    hidden = [name for name in column_names if name in columns and name not in column_names.values()]
    new = {theirs: name for name, theirs in column_names.items() if name != theirs}
    dataset = dataset.remove_columns(hidden).rename_columns(new)
    return dataset, [new.get(name, name) for name in columns if name not in hidden]
