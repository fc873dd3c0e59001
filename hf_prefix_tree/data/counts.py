# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Counts of rows, branches and trees, and of all that was dropped or truncated: per tree, summed, logged."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import transformers
from datasets import Dataset, IterableDataset, List, Value

from hf_prefix_tree.data.formats import FORMATS
from hf_prefix_tree.tree.layout import MAXIMA, TreeStats

logger = logging.getLogger(__name__)

# The counts of losses, and their names in the log.
LOSSES = {
    "truncated": "branches truncated to `max_length`",
    "overlong": "branches dropped as longer than `max_length`",
    "unsupervised": "branches without a supervised token",
    "unrendered_reasoning": "turns whose reasoning the chat template has no place for",
    "unclosed_reasoning": "turns whose `<think>` is never closed, trained on as if the reasoning had ended there",
    "unrendered_messages": "messages whose content the chat template leaves out",
    "calls_without_tools": "turns with tool calls in conversations without `tools`",
    "filled": "rows whose tool schemas or arguments are Arrow structs, which lose nulls and the order of their keys "
    "(store them as JSON strings, or build the dataset with `on_mixed_types='use_json'`)",
    "skipped": "rows skipped",
    # Why rows were skipped, where a turn could not be supervised exactly: the first such turn of each.
    "refused_content": "of them for a turn whose text the chat template leaves out",
    "refused_calls": "of them for a turn whose tool calls it leaves out",
    "refused_reasoning": "of them for a turn whose reasoning it leaves out, though it writes that of others",
    "refused_starts": "of them for a turn that doesn't continue its generation prompt",
    "refused_ends": "of them for a turn without a stop token",
    "refused_trunks": "of them for turns that don't fit on a trunk",
    "oversized": "trees dropped as larger than `max_packed_tokens`",
    "empty": "trees left out because nothing in them is supervised",
}
COUNTS = ("rows", *LOSSES, *FORMATS)
SIZES = tuple(field.name for field in dataclasses.fields(TreeStats))
FEATURES = {**dict.fromkeys((*COUNTS, *SIZES), Value("int64")), "errors": List(Value("string"))}
NO_SIZES = dict.fromkeys(SIZES, 0)
# Rooms whose code decides what a dataset becomes: everything that this room imports.
CODE = ("tree", "data")


def code_state(package: Path = Path(__file__).parents[1]) -> str:
    """
    A hash of the code that preparation runs: `datasets` knows a function by its name, and would take the result of
    other code from its cache.
    """
    digest = hashlib.sha256(transformers.__version__.encode())
    for room in CODE:
        for file in sorted((package / room).rglob("*.py")) or [package / f"{room}.py"]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def read_counts(trees: Dataset, name: str) -> dict[str, Any]:
    """
    The counts of trees as columns: int64 arrays, and the list `errors`. Row by row it takes 0.2 ms a tree.

    Args:
        trees ([`~datasets.Dataset`]): Rows are trees.
        name (`str`): The column, of values of `FEATURES`.
    """
    rows = pa.concat_arrays(trees.select_columns(name).with_format("arrow")[:][name].chunks)
    columns: dict[str, Any] = {name: np.array(rows.field(name)) for name in (*COUNTS, *SIZES)}
    return columns | {"errors": rows.field("errors").to_pylist()}


def counts_at(columns: Mapping[str, Any], indices: npt.NDArray[np.int64]) -> dict[str, Any]:
    """The counts of some of the trees, as columns."""
    errors = [columns["errors"][index] for index in indices]
    return {name: values[indices] for name, values in columns.items() if name != "errors"} | {"errors": errors}


def described(counts: Mapping[str, int]) -> list[str]:
    """The losses among the counts, in words."""
    return [f"{counts[name]} {meaning}" for name, meaning in LOSSES.items() if counts.get(name)]


class Report:
    """The sum of the counts of many trees, and the counts of selection and packing (`further`)."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys((*COUNTS, "trees", "max_branches", *SIZES), 0)
        self._errors: list[str] = []
        self.further: dict[str, Any] = {}

    def add(self, counts: Mapping[str, Any]) -> None:
        """Add what one tree's rows counted, a value of `FEATURES`, or the columns of several."""
        columns = {name: np.atleast_1d(counts[name]) for name in (*COUNTS, *SIZES)}
        columns |= {"trees": columns["branches"] > 0, "max_branches": columns["branches"]}
        for name, values in columns.items():
            if name in (*MAXIMA, "max_branches"):
                self._counts[name] = max(self._counts[name], int(values.max(initial=0)))
            else:
                self._counts[name] += int(values.sum())
        for errors in counts["errors"]:
            self._errors += [errors] if isinstance(errors, str) else errors

    def losses(self) -> str:
        """The losses, with the first few errors; empty if there are none."""
        errors = [error.rstrip(".") for error in self._errors[:3]]
        return "; ".join([*described(self._counts), *errors, *(["..."] if len(self._errors) > 3 else [])])

    def sizes(self) -> str:
        """The trees in one line. There is at least one."""
        counts, stats = self._counts, TreeStats(**{name: self._counts[name] for name in SIZES})
        return (
            f"K {stats.branches / counts['trees']:.2f} on average and {counts['max_branches']} at most, "
            f"{stats.tree_tokens} tokens, longest path {stats.longest_path}, token ratio {stats.token_ratio:.2f}, "
            f"pair ratio {stats.pair_ratio:.2f}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything that was counted, by name. `prepare_trees` documents the names."""
        return {**self._counts, "errors": list(self._errors), **self.further}

    def __str__(self) -> str:
        return f"{self._counts['rows']} rows: {self._counts['branches']} branches"

    def log(self) -> None:
        """Log the sum: a warning if something was lost."""
        if losses := self.losses():
            logger.warning("Prepared %s. Some data was dropped or modified: %s.", self, losses)
        else:
            logger.info("Prepared %s.", self)


TRUNCATION = "_truncation"  # the column: one of the values below
WHOLE, TRUNCATED, UNSUPERVISED = range(3)


def truncation_of(supervised: Sequence[Any] | np.ndarray, length: int, first: int = 0) -> int:
    """
    Whether a length limit truncates a sample, and whether any supervised token remains.

    Args:
        supervised (sequence or `np.ndarray`): Weight of each token: 0 or `False` where it is not supervised.
        length (`int`): The limit.
        first (`int`, *optional*, defaults to 0): Index of the first token that can be supervised.

    Example:

    ```python
    >>> truncation_of([0, 0, 1], 3) == WHOLE
    True
    >>> truncation_of([0, 0, 1, 1], 3) == TRUNCATED, truncation_of([0, 0, 1], 2) == UNSUPERVISED
    (True, True)

    ```
    """
    if len(supervised) <= length:
        return WHOLE
    return TRUNCATED if any(supervised[first:length]) else UNSUPERVISED


def kept_of(truncations: Sequence[int], cap: tuple[str, int]) -> list[int]:
    """
    The indices of the samples that stay; logs a warning if any was truncated.

    Args:
        truncations (sequence of `int`): The [`truncation_of`] each sample.
        cap (`tuple[str, int]`): The argument that sets the limit, and its value.

    Raises:
        `ValueError`: If no sample stays, though there were some.
    """
    name, value = cap
    kept = [index for index, truncation in enumerate(truncations) if truncation != UNSUPERVISED]
    truncated, left_out = sum(truncation != WHOLE for truncation in truncations), len(truncations) - len(kept)
    losses = (
        f"{truncated} samples truncated to `{name}={value}`, {left_out} of them left out because no supervised token "
        "remained"
    )
    if left_out and not kept:
        raise ValueError(f"no sample is left of {len(truncations)} ({losses}); raise `{name}` or shorten them.")
    if truncated:
        losses += f"; raise `{name}`, or shorten the samples"
        logger.warning("Prepared %d samples. Some data was dropped or modified: %s.", len(truncations), losses)
    return kept


def without_unsupervised(dataset: Dataset | IterableDataset, cap: tuple[str, int]) -> Dataset | IterableDataset:
    """
    The samples that stay, without the column `TRUNCATION`. A stream is not counted: it warns once, while it is read.

    Args:
        dataset (`Dataset` or `IterableDataset`): Has the column `TRUNCATION`.
        cap (`tuple[str, int]`): As for [`kept_of`].
    """
    if isinstance(dataset, IterableDataset):
        return dataset.filter(_Keeps(cap), input_columns=TRUNCATION).remove_columns(TRUNCATION)
    kept = kept_of(dataset[TRUNCATION][:], cap)
    dataset = dataset.remove_columns(TRUNCATION)
    return dataset.select(kept) if len(kept) < len(dataset) else dataset


class _Keeps:
    """Whether a sample of a stream stays; warns of the first one that is truncated."""

    def __init__(self, cap: tuple[str, int]) -> None:
        self.cap = cap
        self.has_warned = False

    def __call__(self, truncation: int) -> bool:
        if truncation != WHOLE and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "A sample of a stream is truncated to `%s=%d`, and so are all longer ones, uncounted; those left with "
                "no supervised token are left out. Raise `%s`, or shorten the samples.",
                *self.cap,
                self.cap[0],
            )
        return truncation != UNSUPERVISED
