# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Baseline rows and synthetic caterpillars: values by hand, on real conversations, and the published shape."""

from __future__ import annotations

import doctest
import importlib
import json

import numpy as np
import pytest

from hf_prefix_tree.data.baselines import flat_steps, per_branch
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from hf_prefix_tree.tree.synthetic import caterpillar, caterpillar_set


@pytest.mark.parametrize("name", ["data.baselines", "tree.synthetic", "nemo"])
def test_examples_in_docstrings(name):
    failed, tried = doctest.testmod(importlib.import_module(f"hf_prefix_tree.{name}"))
    assert failed == 0 and tried > 0


# --- Rows that a stock trainer takes.


def test_per_branch_of_whole_and_split_trees():
    branches = [
        Branch([1, 2, 10, 11], [0, 1, 1, 1]),
        Branch([1, 2, 3, 4, 12], [0, 1, 1, 0, 1]),
        Branch([1, 2], [0, 1]),
    ]
    tree = fold(branches)
    expected = [
        {"input_ids": [1, 2, 10, 11], "labels": [-100, 2, 10, 11]},
        {"input_ids": [1, 2, 3, 4, 12], "labels": [-100, 2, 3, -100, 12]},
        {"input_ids": [1, 2], "labels": [-100, 2]},
    ]
    assert per_branch([tree]) == expected
    parts = split_tree(tree, 5)
    assert len(parts) == 2

    def in_order(rows):
        return sorted(rows, key=lambda row: row["input_ids"])

    assert in_order(per_branch(parts)) == in_order(expected)


@pytest.mark.parametrize(
    "function", [lambda branch: per_branch([fold([branch])]), lambda branch: flat_steps([branch])]
)
def test_fractional_weights_are_refused(function):
    with pytest.raises(ValueError, match=r"\[0\.  0\.5\]"):
        function(Branch([1, 2], [0, 0.5]))


def test_flat_steps_start_anew_where_the_prompt_does_not_extend_the_sample():
    turns = [
        Branch([1, 2, 50, 3, 9], [0, 0, 1, 1, 0]),  # 50 is reasoning, 9 a newline after the turn
        Branch([1, 2, 3, 9, 4, 5, 9], [0, 0, 0, 0, 0, 1, 0]),  # the reasoning is gone: a new sample
        Branch([1, 2, 3, 9, 4, 5, 9, 6, 7, 9], [0] * 8 + [1, 0]),  # its prompt extends the sample
        Branch([1, 2, 3, 9, 4, 5, 9, 6, 7, 9, 8], [0] * 6 + [1] * 5),  # has the tokens, but its prompt is shorter
    ]
    assert flat_steps(turns) == [
        {"input_ids": [1, 2, 50, 3, 9], "labels": [-100, -100, 50, 3, -100]},
        {
            "input_ids": [1, 2, 3, 9, 4, 5, 9, 6, 7, 9],
            "labels": [-100, -100, -100, -100, -100, 5, -100, -100, 7, -100],
        },
        {"input_ids": [1, 2, 3, 9, 4, 5, 9, 6, 7, 9, 8], "labels": [-100] * 6 + [9, 6, 7, 9, 8]},
    ]
    unsupervised = Branch([1, 2], [0, 0])  # as a cap leaves it of a turn whose prompt is too long
    assert flat_steps([unsupervised, *turns[:2], unsupervised, *turns[2:]]) == flat_steps(turns)


def test_flat_steps_of_real_conversations(shared_data, qwen3_tokenizer):
    """Every turn is supervised once, with its reasoning; a sample goes on where the template changed nothing."""
    lines = shared_data("data/conversational_reasoning.jsonl").read_text().splitlines()
    found = []
    for line in lines[:3]:
        turns = conversation_branches(json.loads(line)["messages"], qwen3_tokenizer).branches
        rows = flat_steps(turns)
        supervised = [token for row in rows for token in row["labels"] if token != -100]
        assert supervised == [token for turn in turns for token in turn.input_ids[turn.weights > 0].tolist()]
        assert rows[-1]["input_ids"] == turns[-1].input_ids.tolist()
        found.append((len(turns), len(rows)))
    assert found == [(2, 1), (2, 2), (15, 8)]


# --- Caterpillars.


def test_caterpillar_by_its_definition():
    tree = caterpillar(5, seed=3, prompt_tokens=4, reasoning_tokens=6, output_tokens=3, reply_tokens=5, final_tokens=7)
    branches = tree.branches()
    assert tree.num_branches == len(branches) == 6
    assert fold(branches) == tree
    *leaves, trunk = branches
    for leaf, later in zip(leaves, [*leaves[1:], trunk], strict=True):
        at = leaf.input_ids.tolist().index(1)  # where the reasoning starts
        np.testing.assert_array_equal(leaf.input_ids[:at], trunk.input_ids[:at])
        assert 3 <= len(leaf) - at <= 9 and leaf.weights[at:].all()
        np.testing.assert_array_equal(leaf.weights[1:at], trunk.weights[1:at])
        assert len(later) > at
    assert tree.stats().depth == 6 and len(tree.node_lengths) == 11  # 5 forks of two sides each
    assert caterpillar(5, seed=3) == caterpillar(5, seed=3) != caterpillar(5, seed=4)
    assert caterpillar(2, weighting="branch").weighting == "branch"


@pytest.mark.parametrize("seed", [0, 1])
def test_published_shape(seed):
    stats = [tree.stats() for tree in caterpillar_set(seed=seed)]
    means = {
        "branches": np.mean([s.branches for s in stats]),
        "tree_tokens": np.mean([s.tree_tokens for s in stats]),
        "longest_path": np.mean([s.longest_path for s in stats]),
        "token_ratio": np.mean([s.token_ratio for s in stats]),
        "pair_ratio": np.mean([s.pair_ratio for s in stats]),
    }
    assert len(stats) == 64 and len({s.branches for s in stats}) == 8
    assert means == pytest.approx(
        {"branches": 20.4, "tree_tokens": 8004, "longest_path": 6615, "token_ratio": 8.11, "pair_ratio": 5.38},
        rel=0.03,
    )


@pytest.mark.parametrize("name", ["num_turns", "final_tokens"])
def test_numbers_that_are_too_small(name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        caterpillar(**{"num_turns": 2, name: 0})
