# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The steps of a checked preparation: fold, select, pack.

Every tree carries the counts of the rows that went into it. They are summed at the end, also when the result comes
from the cache, logged once and taken off. A row without a tree is taken out last: its counts come first.

Cost: one pass over the rows, one over the trees to pack them; a group's rows are in memory together, and as many trees
as are written at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset

from hf_prefix_tree.datasets.counts import Report
from hf_prefix_tree.datasets.packed import log_packing, pack_dataset, pack_stream
from hf_prefix_tree.datasets.rows import group_key
from hf_prefix_tree.datasets.selection import SCORES, order_units, select_trees
from hf_prefix_tree.datasets.trees import (
    COUNTED_FEATURES,
    REPORT,
    TREE_FEATURES,
    skipped_row,
    tree_of_unit,
    trees_of_batch,
    trees_of_stream,
)


@dataclass(frozen=True)
class Plan:
    """What `prepare_trees` was asked for, checked. `settings` are those of `tree_of_rows`."""

    settings: dict[str, Any]
    group_by: str | None
    max_packed_tokens: int | None
    pack_trees: bool
    selection_metric: str | None
    selection_num_proc: int | None
    max_examples: int | None
    num_proc: int | None


def prepare_dataset(dataset: Dataset, plan: Plan, report: Report) -> Dataset:
    """The trees of a dataset, or the rows that they are packed in. The report is added what was counted."""
    units: list[list[int]] | None = None
    if plan.group_by is not None:
        members: dict[Any, list[int]] = {}
        for index, group in enumerate(dataset[plan.group_by]):
            try:
                members.setdefault(group_key(group, plan.group_by), []).append(index)
            except ValueError as error:
                report.add(skipped_row(index, error, plan.settings["on_error"]))
        units = list(members.values())
        if not units:
            raise ValueError(f"no tree is left of {report} ({report.losses()}); pass another `group_by`.")

    def prepare(chosen: list[int] | None, num_proc: int | None = plan.num_proc) -> Dataset:
        rows = units
        if chosen is not None:
            rows = [units[unit] if units is not None else [unit] for unit in chosen]
        # One row stands for each unit; the others of a group are read when its turn comes.
        return (dataset if rows is None else dataset.select([own[0] for own in rows])).map(
            tree_of_unit,
            with_indices=True,
            remove_columns=dataset.column_names,
            features=COUNTED_FEATURES,
            fn_kwargs=plan.settings | {"source": None if units is None else dataset, "units": rows},
            num_proc=num_proc if num_proc is None or rows is None else min(num_proc, len(rows)),
            writer_batch_size=100,
            desc="Folding trees",
        )

    if plan.max_examples is None:
        trees = prepare(None)
        for tree_counts in trees[REPORT]:
            report.add(tree_counts)
        filled = [index for index, tree_counts in enumerate(trees[REPORT]) if tree_counts["branches"]]
        if len(filled) < len(trees):
            trees = trees.select(filled)
    else:
        candidates = list(range(len(dataset) if units is None else len(units)))
        ratio = None
        if plan.selection_metric in SCORES:
            assert plan.selection_metric is not None
            candidates = order_units(
                dataset,
                units,
                plan.selection_metric,
                plan.settings["options"],
                plan.settings["on_error"],
                plan.selection_num_proc,
            )
        elif plan.selection_metric is not None:
            ratio = plan.selection_metric
        processes = (plan.selection_num_proc if ratio else None) or plan.num_proc
        trees = select_trees(lambda chosen: prepare(chosen, processes), candidates, plan.max_examples, ratio, report)
    report.log()
    if not len(trees):
        raise ValueError(f"no tree is left of {report} ({report.losses()}); change the rows, or what drops them.")
    lengths = [tree_counts["tree_tokens"] for tree_counts in trees[REPORT]]
    trees = trees.remove_columns(REPORT)
    if plan.max_packed_tokens is not None:
        trees, packing = pack_dataset(trees, lengths, plan.max_packed_tokens, plan.pack_trees, plan.num_proc)
        report.further |= packing
        log_packing(packing, plan.max_packed_tokens)
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
            fn_kwargs=plan.settings,
        )
    else:
        trees = IterableDataset.from_generator(
            trees_of_stream,
            features=TREE_FEATURES,
            gen_kwargs={"dataset": dataset, "group_by": plan.group_by, "settings": plan.settings},
        )
    if plan.max_examples is not None:
        trees = trees.take(plan.max_examples)
    if plan.max_packed_tokens is not None:
        trees = pack_stream(trees, plan.max_packed_tokens, plan.pack_trees)
    return trees
