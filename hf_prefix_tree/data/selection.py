# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The rows or groups that make the best trees: scored, ordered, and prepared until enough of them are valid.

Cost: a cheap score is one pass over the messages; then as many units are prepared as it takes to find enough valid
ones. `token_ratio` and `pair_ratio` prepare all units.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value, concatenate_datasets

from hf_prefix_tree.data.counts import Report, counts_at
from hf_prefix_tree.data.messages import Message, normalize_messages, split_reasoning
from hf_prefix_tree.data.rows import RowOptions, checked_row, row_conversations
from hf_prefix_tree.data.trees import Plan, cached_map, skipped_row
from hf_prefix_tree.tree.prefix_tree import Branch, fold

logger = logging.getLogger(__name__)

SCORES = ("branching_score", "forked_context", "num_turns")  # known before anything is tokenized
RATIOS = {"token_ratio": ("branch_tokens", "tree_tokens"), "pair_ratio": ("branch_pairs", "tree_pairs")}
METRICS = (*SCORES, *RATIOS)
_UNREADABLE, _TOO_LONG = -1, -2


def order_units(dataset: Dataset, units: list[list[int]] | None, plan: Plan, report: Report) -> list[int]:
    """
    Indices of the units, highest score first, ties by index. A unit is one row, or the rows that `units` lists.

    - `"num_turns"` is the number of assistant turns to train on.
    - `"branching_score"` is prime-rl's, `(turns with reasoning + 1) * max(num_turns, assistant turns)`, summed over
      the rows of a unit. `num_turns` is the column of that name, if there is one. A row whose column `token_usage` has
      `final_input_tokens` and `final_output_tokens` of more than `max_length` together is left out with its unit; the
      report gets the number of these units, `too_long`.
    - `"forked_context"` is the characters of visible context (contents and tool calls of the messages before, without
      reasoning) before each turn that forks, summed. A turn forks if it has reasoning, which later turns don't see;
      under `reasoning="per_turn"` also if another turn of its conversation follows, because its rendering ends or
      forks there; and the last turn of each conversation of a unit but the last one, because the next one forks from
      it. Under `"keep"` only the last of these counts.

    Raises:
        `ValueError`: If a row can't be read, unless `on_error` is `"skip"`: its unit then comes last.
    """
    scored = cached_map(
        dataset,
        _score_row,
        with_indices=True,
        remove_columns=dataset.column_names,
        features=Features({"score": Value("int64"), "last": Value("int64")}),
        fn_kwargs=plan.some(("selection_metric", "options", "on_error")),
        num_proc=plan.selection_num_proc,
        desc="Scoring rows",
    )
    scores, lasts = np.array(scored["score"][:]), np.array(scored["last"][:])
    totals = scores
    if units is not None:
        lowest = np.array([scores[rows].min() for rows in units])
        sums = np.array([scores[rows].sum() + lasts[rows[:-1]].sum() for rows in units])
        totals = np.where(lowest < 0, lowest, sums)
    if plan.selection_metric == "branching_score":
        report.further["too_long"] = int((totals == _TOO_LONG).sum())
        if report.further["too_long"] == len(totals):
            raise ValueError(f"`token_usage` of all {len(totals)} rows or groups is above `max_length`; raise it.")
    if totals.max() <= 0:
        problem = f"`selection_metric={plan.selection_metric!r}` is 0 for all of {len(totals)} rows or groups"
        logger.warning("%s: the first ones are taken.", problem)
    return [unit for unit in np.argsort(-totals, kind="stable").tolist() if totals[unit] != _TOO_LONG]


def select_trees(
    prepare: Callable[[Sequence[int]], tuple[Dataset, dict[str, Any]]],
    candidates: Sequence[int],
    plan: Plan,
    report: Report,
) -> Dataset:
    """
    The first `max_examples` valid trees of the candidates, or those with the highest ratio; fewer if there are not
    enough. Without `max_examples` all valid ones.

    Args:
        prepare (`Callable[[list[int]], tuple[Dataset, dict]]`):
            Prepares units: a row for each, and the columns of their counts, no branches if a unit is invalid.
        candidates (sequence of `int`):
            Units, best first.
        plan ([`Plan`]):
            How many to take; all candidates are prepared and ordered by a metric of `RATIOS`, ties as they come.
        report ([`Report`]):
            Is added the counts of those taken, and of the invalid ones among those prepared.
    """
    tables: list[Dataset] = []
    taken: list[int] = []
    valid = 0
    waiting, ratio = candidates, RATIOS.get(plan.selection_metric or "")
    max_examples = len(candidates) if plan.max_examples is None else plan.max_examples
    size = len(candidates) if ratio else max_examples
    while waiting and len(taken) < max_examples:
        chunk, waiting = waiting[:size], waiting[size:]
        before = sum(map(len, tables))
        table, counts = prepare(chunk)
        tables.append(table)
        order = np.arange(len(chunk))
        if ratio:
            over, under = ratio
            order = np.argsort(-counts[over] / np.maximum(counts[under], 1), kind="stable")
        is_valid = counts["branches"][order] > 0
        valid += int(is_valid.sum())
        is_taken = is_valid & (is_valid.cumsum() <= max_examples - len(taken))
        taken += (before + order[is_taken]).tolist()
        report.add(counts_at(counts, order[is_taken | ~is_valid]))
        size = max(max_examples - len(taken), 8)  # replacements, a few at a time
    report.further["sources"] = np.array([candidates[index] for index in taken], dtype=np.int64)
    if plan.max_examples is not None:
        report.further |= {"candidates": len(candidates), "valid": valid, "selected": len(taken)}
    if plan.max_examples is not None and taken:
        too_long = report.further.get("too_long")
        more = f", {too_long} more are too long by `token_usage`" if too_long else ""
        among = f"{valid} valid ones among {sum(map(len, tables))} prepared ({len(candidates)} candidates{more})"
        # not a loss of data, but visible without further settings, as all reports of a preparation
        logger.warning("Selected %d trees of %s: %s.", len(taken), among, report.sizes())
    return concatenate_datasets(tables).select(taken)


def _score_row(
    row: Mapping[str, Any], index: int, selection_metric: str, options: RowOptions, on_error: str
) -> dict[str, int]:
    try:
        read = row_conversations(checked_row(row, options, Counter()), options.kind, Counter())
        conversations = [_turns(normalize_messages(messages), num_prompt) for messages, num_prompt in read]
    except ValueError as error:
        skipped_row(index, error, on_error)
        return {"score": _UNREADABLE, "last": 0}
    num_turns = sum(map(len, conversations))
    if selection_metric == "num_turns":
        return {"score": num_turns, "last": 0}
    if selection_metric == "branching_score":
        usage = row.get("token_usage")
        usage = usage if isinstance(usage, Mapping) else {}
        estimate = sum(usage.get(f"final_{part}_tokens") or 0 for part in ("input", "output"))
        reasoning = sum(reasons for turns in conversations for _, reasons in turns)
        score = (reasoning + 1) * max(int(row.get("num_turns") or 0), num_turns)
        return {"score": _TOO_LONG if estimate > (options.max_length or np.inf) else score, "last": 0}
    keeps, is_per_turn = options.reasoning == "keep", options.reasoning == "per_turn"
    score = last = 0
    for *earlier, (context, reasons) in filter(None, conversations):
        score += last + sum(before for before, forks in earlier if is_per_turn or (forks and not keeps))
        last = 0 if reasons and not keeps else context
        score += context - last
    return {"score": score, "last": last}


def _turns(messages: list[Message], num_prompt_messages: int) -> list[tuple[int, bool]]:
    """Characters of visible context before each assistant turn to train on, and whether it has reasoning."""
    turns, context = [], 0
    for index, message in enumerate(messages):
        reasoning, visible = split_reasoning(message)
        if message["role"] == "assistant" and index >= num_prompt_messages:
            turns.append((context, bool(reasoning)))
        context += _characters(visible)
    return turns


def _characters(message: Message) -> int:
    content = message["content"]
    parts = [content] if isinstance(content, str) else content
    texts = [str(part.get("text", "") if isinstance(part, Mapping) else part) for part in parts]
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        texts += [name, arguments if isinstance(arguments, str) else json.dumps(arguments)]
    return sum(map(len, texts))


def find_group_column(dataset: Dataset, branches: Mapping[int, list[Branch]]) -> str | None:
    """
    The column whose equal values mark rows that share prefixes, e.g. those of a task; `None` if there is none.

    Columns of strings and integers are tried whose values repeat. Rows of an equal value must save at least 1% of the
    tokens; if the column is not called `group`, they must save more than in each of 20 shufflings of the values: a
    shared system prompt alone marks no groups. Of several such columns, it is `group`, or the one of most values that
    saves at least 0.8 of what the best one saves.

    Args:
        dataset ([`~datasets.Dataset`]): The rows.
        branches (`Mapping[int, list[Branch]]`): The branches of each row that has any.
    """
    alone = sum(len(fold(items)) for items in branches.values())
    saved: dict[str, int] = {}
    distinct: dict[str, int] = {}
    for name, feature in dataset.features.items():
        if not isinstance(feature, Value) or not ("string" in feature.dtype or "int" in feature.dtype):
            continue
        values = dataset[name]
        distinct[name] = len(set(values))
        least = 1 if name == "group" else 2
        if not least <= distinct[name] < len(values) or None in values:
            continue
        tokens = _grouped_tokens(values, branches)
        if alone - tokens < 0.01 * alone:
            continue
        if name == "group":
            return name
        draw = random.Random(0)
        shuffled = (_grouped_tokens(draw.sample(list(values), len(values)), branches) for _ in range(20))
        if all(tokens < by_chance for by_chance in shuffled):
            saved[name] = alone - tokens
    best = [name for name in saved if saved[name] >= 0.8 * max(saved.values())]
    return max(best, key=lambda name: distinct[name], default=None)


def _grouped_tokens(values: Sequence[Any], branches: Mapping[int, list[Branch]]) -> int:
    groups: dict[Any, list[Branch]] = {}
    for row, items in branches.items():
        groups.setdefault(values[row], []).extend(items)
    return sum(len(fold(items)) for items in groups.values())
