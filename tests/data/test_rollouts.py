# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Rollouts of one prompt, as branches and in NeMo Automodel's form."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hf_prefix_tree.data.nodes import rollout_branches
from hf_prefix_tree.nemo import CROSS_ENTROPY_IGNORE_IDX, fold_shared_prefix_rollouts
from hf_prefix_tree.tree.prefix_tree import fold

# The values of the interface that this one has to agree with: prompt, completions, what comes out.
GOLDENS = [
    (
        [5, 6, 7],
        [[11, 12], [21], [31, 32, 33]],
        {
            "input_ids": [5, 6, 7, 11, 12, 21, 31, 32, 33],
            "labels": [-100, -100, -100, 12, -100, -100, 32, 33, -100],
            "position_ids": [0, 1, 2, 3, 4, 3, 3, 4, 5],
            "node_lengths": [3, 2, 1, 3],
            "sample_paths": [[0, 1], [0, 2], [0, 3]],
        },
    ),
    (
        [],
        [[11, 12], [21]],
        {
            "input_ids": [11, 12, 21],
            "labels": [12, -100, -100],
            "position_ids": [0, 1, 0],
            "node_lengths": [0, 2, 1],
            "sample_paths": [[1], [2]],
        },
    ),
    (
        [1, 2],
        [[10, 11], [20, 21, 22]],
        {
            "input_ids": [1, 2, 10, 11, 20, 21, 22],
            "labels": [-100, -100, 11, -100, 21, 22, -100],
            "position_ids": [0, 1, 2, 3, 2, 3, 4],
            "node_lengths": [2, 2, 3],
            "sample_paths": [[0, 1], [0, 2]],
        },
    ),
    (
        [1, 2, 3],
        [[4]],
        {
            "input_ids": [1, 2, 3, 4],
            "labels": [-100, -100, -100, -100],
            "position_ids": [0, 1, 2, 3],
            "node_lengths": [3, 1],
            "sample_paths": [[0, 1]],
        },
    ),
]


@pytest.mark.parametrize(("prompt", "completions", "expected"), GOLDENS)
def test_goldens(prompt, completions, expected):
    assert dataclasses.asdict(fold_shared_prefix_rollouts(prompt, completions)) == expected


def test_goldens_are_those_of_the_shared_file(shared_data):
    file = json.loads(shared_data("goldens/shared_prefix_fold.json").read_text())
    assert [(case["prompt_ids"], case["completions"], case["expect"]) for case in file] == GOLDENS


def test_ignore_index():
    assert CROSS_ENTROPY_IGNORE_IDX == -100
    assert fold_shared_prefix_rollouts([1], [[2, 3]], ignore_idx=-1).labels == [-1, 3, -1]


def test_equal_completions_stay_apart_until_they_become_a_tree():
    folded = fold_shared_prefix_rollouts([1, 2], [[3, 4], [3, 5]])
    assert folded.input_ids == [1, 2, 3, 4, 3, 5]
    tree = folded.to_tree(weighting="branch")
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert tree.weights.tolist() == [0.0, 0.0, 0.0, 1.0, 1.0]  # not the first token of a completion
    assert fold(rollout_branches([1, 2], [[3, 4], [3, 5]]), "branch").weights.tolist() == [0.0, 0.0, 2.0, 1.0, 1.0]


def test_to_tree_takes_the_weighting_and_an_empty_prompt():
    tree = fold_shared_prefix_rollouts([], [[11, 12], [21]]).to_tree()
    assert (tree.input_ids.tolist(), tree.weights.tolist()) == ([11, 12, 21], [0.0, 0.5, 0.0])
    assert [branch.input_ids.tolist() for branch in tree.branches()] == [[11, 12], [21]]


def test_rollout_branches():
    first, second = rollout_branches([5, 6], [[7], [8, 9]])
    assert (first.input_ids.tolist(), first.weights.tolist()) == ([5, 6, 7], [0, 0, 1])
    assert (second.input_ids.tolist(), second.weights.tolist()) == ([5, 6, 8, 9], [0, 0, 1, 1])
    (without_prompt,) = rollout_branches([], [[7, 8]])
    assert without_prompt.weights.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("function", [rollout_branches, fold_shared_prefix_rollouts])
@pytest.mark.parametrize(
    ("prompt", "completions", "expected"),
    [
        ([1], [], "`completions`"),
        ([1], [[2], []], r"`completions\[1\]`"),
        ([1], 5, "`completions`.*5"),
        ([1], [[2, -3]], r"`completions\[0\]`.*-3.*index 1"),
        ([1.5], [[2]], "`prompt_ids`.*1.5"),
        ([[1]], [[2]], "`prompt_ids`.*2"),
        ([1], [[True]], r"`completions\[0\]`.*True"),
    ],
)
def test_errors(function, prompt, completions, expected):
    with pytest.raises(ValueError, match=expected):
        function(prompt, completions)
