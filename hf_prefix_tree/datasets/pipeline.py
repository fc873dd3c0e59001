# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The preparation of a whole dataset: cached, in several processes, or streamed; what is lost on the way is counted.

Every output row carries the counts of the rows that went into it. They are summed at the end, also when the result
comes from the cache, logged once and taken off. A row without a tree is taken out last: its counts come first.

Cost: one pass over the rows; a group's rows are in memory together, and as many trees as are written at once.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import transformers
from datasets import Dataset, Features, IterableDataset, List, Value

from hf_prefix_tree.conversations import REASONING_MODES, Tools
from hf_prefix_tree.datasets.counts import COUNTS, FEATURES, Report
from hf_prefix_tree.datasets.rows import TEXT_KINDS, RowOptions, row_branches, row_kind
from hf_prefix_tree.folding import check_weighting
from hf_prefix_tree.tree import Branch, fold

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OVERLONG = ("truncate", "drop", "raise")
ON_ERROR = ("raise", "skip")
TREE_FEATURES = Features(
    {
        "input_ids": List(Value("int64")),
        "node_lengths": List(Value("int32")),
        "node_parents": List(Value("int32")),
        "weights": List(Value("float64")),
        "branch_count": List(Value("int32")),
        "num_branches": Value("int32"),
        "weighting": Value("string"),
        "branch_nodes": List(Value("int32")),
        "run_counts": List(Value("int32")),
        "run_lengths": List(Value("int32")),
        "run_values": List(Value("float64")),
    }
)
_NO_TREE = {
    name: value[:0] if isinstance(value, np.ndarray) else value
    for name, value in fold([Branch([0], [0])]).to_dict().items()
} | {"num_branches": 0}
_REPORT = "preparation"


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
    max_length: int | None = None,
    overlong: str = "truncate",
    on_error: str = "raise",
    num_proc: int | None = None,
) -> Dataset | IterableDataset:
    """
    Fold a dataset into trees: its rows are then what [`PrefixTree.to_dict`] returns.

    The columns say what the rows are:

    | columns | a row is | its branches |
    |---|---|---|
    | `messages` | a conversation | see [`conversation_branches`]; `tools` and `chat_template_kwargs` may be columns |
    | `prompt`, `completions` or `completion` | strings, or lists of messages | one per completion, or per its turns |
    | `prompt_ids`, `completions` | token ids | one per completion, see [`rollout_branches`] |
    | `branches` | a list of `input_ids`, `weights` | these |
    | `parents`, `nodes` | a tree by its nodes: token ids, or `input_ids`, `weights` | one per leaf |
    | `input_ids` | token ids, with `labels` (unshifted), `weights` or TRL's masks | itself |
    | those of a tree | a tree | the dataset is returned as it is |

    Branches that supervise nothing are dropped, rows without a branch left are taken out. Whatever is dropped,
    truncated or skipped is logged at the end, for a streaming dataset batch by batch. Arrow keeps neither the order of
    keys nor nulls in its structs: tool schemas and arguments are best stored as JSON strings or `Json` features.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            One split.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Needed for rows of text.
        reasoning (`str`, *optional*, defaults to `"per_turn"`):
            See [`conversation_branches`].
        weighting (`str`, *optional*, defaults to `"tree"`):
            See [`fold`].
        group_by (`str`, *optional*):
            Column whose equal values make one tree of their rows, e.g. `"group"`. Of a streaming dataset only
            consecutive rows are put together, by a single reader.
        tools (sequence, `str` or `Mapping`, *optional*):
            Tools of rows that have none of their own: a list, a JSON string, or either by the value of the row's
            `group_by` column (`"group"` without one).
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Further variables for the chat template. A row's own take precedence.
        empty_thinking_in_prompt (`bool`, *optional*, defaults to `True`):
            See [`conversation_branches`].
        max_length (`int`, *optional*):
            Longest branch, in tokens.
        overlong (`str`, *optional*, defaults to `"truncate"`):
            What becomes of a longer branch: `"truncate"` keeps its start, `"drop"` drops it, so that K is smaller,
            `"raise"` makes its row an error.
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a row that can't be read stops the preparation (`"raise"`) or is skipped (`"skip"`).
        num_proc (`int`, *optional*):
            Number of processes. Not for streaming datasets.

    Returns:
        A dataset of the kind that was passed.

    Raises:
        `ValueError`: If an option is unknown or doesn't fit, the columns fit no kind of rows, a row can't be read (its
        index is named), or no tree is left.
    """
    for name, value, known in (
        ("reasoning", reasoning, REASONING_MODES),
        ("overlong", overlong, OVERLONG),
        ("on_error", on_error, ON_ERROR),
    ):
        if value not in known:
            raise ValueError(f"`{name}` is {value!r}; pass one of {', '.join(map(repr, known))}.")
    if max_length is not None and max_length < 2:
        raise ValueError(f"`max_length` is {max_length}; pass at least 2, a branch's first token is not supervised.")
    if not isinstance(dataset, Dataset | IterableDataset):
        raise ValueError(f"`dataset` is a {type(dataset).__name__}; pass one split, a Dataset or an IterableDataset.")
    if isinstance(dataset, Dataset) and dataset.format["type"] is not None:
        raise ValueError(f"`dataset` has the format {dataset.format['type']!r}; pass `dataset.with_format(None)`.")
    columns = dataset.column_names or list(next(iter(dataset), {}))
    kind = row_kind(columns)
    if kind == "tree":
        if group_by is not None or max_length is not None:
            raise ValueError("`dataset` holds trees already; pass `group_by` and `max_length` where they are folded.")
        return dataset
    if kind in TEXT_KINDS and tokenizer is None:
        raise ValueError(f"`tokenizer` is None, but {kind} rows are text; pass the model's tokenizer.")
    if group_by is not None and group_by not in columns:
        raise ValueError(f"`group_by` is {group_by!r}, which is no column; pass one of {', '.join(sorted(columns))}.")
    options = RowOptions(
        kind=kind,
        tokenizer=tokenizer if kind in TEXT_KINDS else None,
        features=dict(dataset.features or {}),
        reasoning=reasoning,
        tools=tools,
        group_column=group_by or "group",
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        empty_thinking_in_prompt=empty_thinking_in_prompt,
        max_length=max_length,
        overlong=overlong,
        code=_code_state(),
    )
    settings = {"options": options, "weighting": check_weighting(weighting), "on_error": on_error}
    if isinstance(dataset, IterableDataset):
        if num_proc is not None:
            raise ValueError(f"`num_proc` is {num_proc}, but a stream is read in one process; leave it out.")
        return _stream(dataset, columns, group_by, settings)
    if not len(dataset):
        raise ValueError("`dataset` has no rows; pass at least one.")
    return _map(dataset, group_by, settings, num_proc)


def _map(dataset: Dataset, group_by: str | None, settings: dict[str, Any], num_proc: int | None) -> Dataset:
    firsts = dataset
    function: Callable[..., dict[str, Any]] = _tree_of_row
    if group_by is not None:
        members: dict[Any, list[int]] = {}
        for index, group in enumerate(dataset[group_by]):
            members.setdefault(group, []).append(index)
        # One row stands for each group; the others are read when its turn comes.
        firsts, function = dataset.select([rows[0] for rows in members.values()]), _tree_of_group
        settings = settings | {"source": dataset, "members": list(members.values())}
    trees = firsts.map(
        function,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=Features({**TREE_FEATURES, _REPORT: FEATURES}),
        fn_kwargs=settings,
        num_proc=num_proc,
        writer_batch_size=100,
        desc="Folding trees",
    )
    report = Report()
    for counts in trees[_REPORT]:
        report.add(counts)
    filled = [index for index, count in enumerate(trees["num_branches"]) if count]
    report.log()
    if not filled:
        raise ValueError(f"no tree is left of {report} ({report.losses()}); change the rows, or what drops them.")
    trees = trees.remove_columns(_REPORT)
    return trees if len(filled) == len(trees) else trees.select(filled)


def _stream(
    dataset: IterableDataset, columns: list[str], group_by: str | None, settings: dict[str, Any]
) -> IterableDataset:
    if group_by is None:
        return dataset.map(
            _trees_of_batch,
            with_indices=True,
            batched=True,
            batch_size=64,
            remove_columns=columns,
            features=TREE_FEATURES,
            fn_kwargs=settings,
        )
    return IterableDataset.from_generator(
        _trees_of_stream,
        features=TREE_FEATURES,
        gen_kwargs={"dataset": dataset, "group_by": group_by, "settings": settings},
    )


def _code_state() -> str:
    """A hash of this package's code: `datasets` would take a result of other code from its cache, by function name."""
    digest = hashlib.sha256(transformers.__version__.encode())
    for file in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _tree_of_row(row: Mapping[str, Any], index: int, **settings: Any) -> dict[str, Any]:
    return _tree_of([(index, row)], **settings)


def _tree_of_group(
    row: Mapping[str, Any], index: int, source: Dataset, members: list[list[int]], **settings: Any
) -> dict[str, Any]:
    return _tree_of(((member, source[member]) for member in members[index]), **settings)


def _trees_of_batch(batch: Mapping[str, list[Any]], indices: list[int], **settings: Any) -> dict[str, list[Any]]:
    rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
    trees = list(_logged(_tree_of([item], **settings) for item in zip(indices, rows, strict=True)))
    return {name: [tree[name] for tree in trees] for name in TREE_FEATURES}


def _trees_of_stream(dataset: IterableDataset, group_by: str, settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for _, rows in groupby(enumerate(dataset), key=lambda item: item[1][group_by]):
        yield from _logged([_tree_of(rows, **settings)])


def _logged(trees: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The trees that have a branch, without their counts; what was lost is logged after the last one."""
    report = Report()
    for tree in trees:
        report.add(tree.pop(_REPORT))
        if tree["num_branches"]:
            yield tree
    if report.losses():
        report.log()


def _tree_of(
    rows: Iterable[tuple[int, Mapping[str, Any]]], options: RowOptions, weighting: str, on_error: str
) -> dict[str, Any]:
    """The tree of some rows, given with their indices, and what was lost. Where no branch is left, without tokens."""
    counts: Counter[str] = Counter()
    errors, branches = [], []
    for index, row in rows:
        counts["rows"] += 1
        try:
            branches += row_branches(row, options, counts)
        except ValueError as error:
            if on_error == "raise":
                raise ValueError(f"row {index}: {error}") from error
            errors.append(f"row {index}: {error}")
    counts.update(branches=len(branches), skipped=len(errors), empty=not branches)
    tree = fold(branches, weighting).to_dict() if branches else _NO_TREE
    return tree | {_REPORT: {name: counts[name] for name in COUNTS} | {"errors": errors}}
