# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Baselines without trees, from the same branches: dataset rows that TRL's stock `SFTTrainer` takes as they are.

Cost: linear in the tokens of the branches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree

Row = dict[str, list[int]]


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
    for branch in branches:
        if not branch.weights.any():  # such a branch would end the sample before it
            continue
        row = _row(branch)
        start = int(branch.weights.argmax())  # the prompt ends where supervision starts
        last = rows[-1]["input_ids"] if rows else None
        if last is not None and len(last) <= start and row["input_ids"][: len(last)] == last:
            row["labels"][: len(last)] = rows.pop()["labels"]
        rows.append(row)
    return rows


def _row(branch: Branch) -> Row:
    if not np.isin(branch.weights, (0.0, 1.0)).all():
        raise ValueError(
            f"A branch has the weights {np.unique(branch.weights)[:4]}, but labels express 0 and 1 only; train it "
            "with `TreeSFTTrainer`, or use weights of 0 and 1."
        )
    labels = np.where(branch.weights > 0, branch.input_ids, IGNORE_INDEX)
    return {"input_ids": branch.input_ids.tolist(), "labels": labels.tolist()}
