# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One K everywhere: the branches given, those that supervise nothing included, less those that a cap drops."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_prefix_tree import DataCollatorForPrefixTree, prepare_trees
from hf_prefix_tree.data.baselines import flat_steps, per_branch
from hf_prefix_tree.nemo import fold_shared_prefix_rollouts, prefix_tree_collate_fn
from hf_prefix_tree.report.gain import counts_of, fold_rows, load_rows
from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

# Three branches supervise something, two don't: one starts like the others, one doesn't.
BRANCHES = [
    Branch([5, 6, 7, 8], [0, 0, 1, 1]),
    Branch([5, 6, 9], [0, 0, 0]),
    Branch([5, 6, 7, 3, 4], [0, 1, 0.5, 1, 1]),
    Branch([11, 12, 13], [0, 0, 0]),
    Branch([5, 2], [0, 1]),
]
WEIGHTINGS = ("tree", "branch", "branch_mean", "once")


def row_of(branches, **columns):
    return {
        "branches": [{"input_ids": b.input_ids.tolist(), "weights": b.weights.tolist()} for b in branches],
        **columns,
    }


def trees_of(dataset):
    return [PrefixTree.from_dict(row) for row in dataset]


def weights_of(*trees):
    """What each path to a supervised token weighs, summed over the trees."""
    found: dict = {}
    for tree in trees:
        for path in tree.paths():
            for at in path[tree.weights[path] > 0].tolist():
                prefix = tuple(tree.input_ids[path[: path.tolist().index(at) + 1]].tolist())
                found[prefix] = (id(tree), tree.weights[at])
    return {prefix: weight for prefix, (_, weight) in found.items()}


def by_definition(branches, weighting, number):
    """Every branch by itself: its weights, over K, over what it supervises, or over g."""
    total: dict = {}
    count: dict = {}
    for branch in branches:
        share = {"tree": 1 / number, "branch_mean": 1 / max(np.count_nonzero(branch.weights), 1)}.get(weighting, 1.0)
        for at in np.flatnonzero(branch.weights):
            prefix = tuple(branch.input_ids[: at + 1].tolist())
            total[prefix] = total.get(prefix, 0.0) + branch.weights[at] * share
            count[prefix] = count.get(prefix, 0) + 1
    return {prefix: x / count[prefix] if weighting == "once" else x for prefix, x in total.items()}


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("streams", [False, True])
def test_prepared_as_folded(weighting, streams):
    expected = by_definition(BRANCHES, weighting, 5)
    rows = [row_of(BRANCHES[:2], group="a"), row_of(BRANCHES[2:], group="a")]
    for given, options in (([row_of(BRANCHES)], {}), (rows, {"group_by": "group"})):
        dataset = Dataset.from_list(given)
        dataset = dataset.to_iterable_dataset() if streams else dataset
        (prepared,) = trees_of(prepare_trees(dataset, weighting=weighting, **options))
        (collated,) = DataCollatorForPrefixTree(0, weighting=weighting).trees([row_of(BRANCHES)])
        for tree in (prepared, collated, fold(BRANCHES, weighting)):
            assert weights_of(tree) == pytest.approx(expected, rel=1e-15)
            assert tree.num_branches == tree.stats().branches == 5
        # the branches that supervise nothing are not laid out, but for the token that starts them
        assert len(prepared) == 8 and len(collated) == 11
        (again,) = trees_of(prepare_trees(Dataset.from_list([prepared.to_dict()]), weighting="branch"))
        assert fold(again.branches(), weighting) == prepared


def test_parts_of_a_split_tree():
    (row, *others) = prepare_trees(Dataset.from_list([row_of(BRANCHES)]), max_packed_tokens=5)
    parts = [PrefixTree.from_dict(tree) for packed in (row, *others) for tree in packed["trees"]]
    assert len(parts) > 1 and {part.num_branches for part in parts} == {5}
    assert weights_of(*parts) == pytest.approx(by_definition(BRANCHES, "tree", 5), rel=1e-15)
    whole = split_tree(fold(BRANCHES), 5)
    assert weights_of(*whole) == pytest.approx(weights_of(*parts), rel=1e-15)


@pytest.mark.parametrize(
    ("overlong", "number"),
    [("truncate", 5), ("drop", 4)],  # truncated, a branch is still given; dropped, it is not
)
def test_what_a_cap_does(overlong, number):
    branches = [*BRANCHES[:4], Branch([5, 6, 7, 1, 1, 1], [0, 0, 0, 0, 0, 1])]
    (tree,) = trees_of(prepare_trees(Dataset.from_list([row_of(branches)]), max_length=5, overlong=overlong))
    assert tree.num_branches == number
    assert weights_of(tree) == pytest.approx(by_definition(BRANCHES[:4], "tree", number), rel=1e-15)


def test_the_report_counts_as_the_preparation(tmp_path):
    unsupervised = row_of([BRANCHES[1]], group="b")
    rows = [row_of(BRANCHES[:2], group="a"), row_of(BRANCHES[2:], group="a"), unsupervised]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for options in ({"group_by": None}, {"group_by": "group"}):
        prepared = trees_of(prepare_trees(Dataset.from_list(rows), **options))
        folded = fold_rows(load_rows(tmp_path / "rows.jsonl"), "rows", **options)
        assert folded.trees == prepared
        assert counts_of(folded.groups)["branches"] == sum(tree.num_branches for tree in prepared) == 5


def test_nothing_supervised_is_no_tree(caplog):
    rows = [row_of(BRANCHES), row_of([BRANCHES[1], BRANCHES[3]])]
    assert len(prepare_trees(Dataset.from_list(rows))) == 1
    assert (
        "4 branches without a supervised token; 1 trees left out because nothing in them is supervised" in caplog.text
    )


def test_rollouts_of_one_token():
    """In NeMo Automodel's form a completion's first token is not supervised; one of a single token still counts."""
    prompt, completions = [5, 6], [[7, 8, 9], [7], [4, 3]]
    supervised = [
        Branch([5, 6, 7, 8, 9], [0, 0, 0, 1, 1]),
        Branch([5, 6, 7], [0, 0, 0]),
        Branch([5, 6, 4, 3], [0, 0, 0, 1]),
    ]
    rollouts = fold_shared_prefix_rollouts(prompt, completions)
    expected = by_definition(supervised, "tree", 3)
    assert weights_of(rollouts.to_tree()) == pytest.approx(expected, rel=1e-15)
    summed = prefix_tree_collate_fn([rollouts])["loss_weights"].view(torch.float64).sum().item()
    assert summed == pytest.approx(sum(expected.values()), rel=1e-15)
    (tree,) = trees_of(prepare_trees(Dataset.from_list([row_of(supervised)])))
    assert weights_of(tree) == pytest.approx(expected, rel=1e-15)


def test_baselines_train_what_is_supervised():
    branches = [Branch(b.input_ids, b.weights > 0) for b in BRANCHES]
    (tree,) = trees_of(prepare_trees(Dataset.from_list([row_of(branches)]), weighting="branch"))
    rows = per_branch([tree])
    assert len(rows) == 5 and [row for row in rows if max(row["labels"]) > 0] == [
        row for row in per_branch([fold(branches)]) if max(row["labels"]) > 0
    ]
    assert flat_steps(tree.branches()) == flat_steps([branches[0], branches[2], branches[4]])
