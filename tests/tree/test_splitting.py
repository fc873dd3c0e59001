# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Parts of a split tree: literal examples, random trees by their definition, and duplicated tokens by brute force."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest

from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

WEIGHTINGS = ["tree", "branch", "branch_mean", "once"]
Prefix = tuple[int, ...]  # a token and all tokens before it


def branch(*ids: int, context: int = 1) -> Branch:
    return Branch(ids, [0] * context + [1] * (len(ids) - context))


def state(tree: PrefixTree) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in tree.to_dict().items()}


# --- Literal examples.


def test_caterpillar():
    """Two turns of reasoning that hang off a trunk: the trunk's second part is repeated by no one."""
    tree = fold([branch(1, 2, 10, 11), branch(1, 2, 3, 4, 12, 13), branch(1, 2, 3, 4, 5, 6)])
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 12, 13, 5, 6, 10, 11]
    first, second = split_tree(tree, 8)
    assert state(first) == {
        "input_ids": [1, 2, 3, 4, 12, 13, 5, 6],
        "node_lengths": [4, 2, 2],  # one trunk now: the branch that left it after 2 tokens is elsewhere
        "node_parents": [-1, 0, 0],
        "weights": [0, 1, 2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3],
        "branch_count": [0, 3, 2, 2, 1, 1, 1, 1],
        "num_branches": 3,
        "weighting": "tree",
        "branch_nodes": [1, 2],
        "run_counts": [2, 2],
        "run_lengths": [1, 5, 1, 5],
        "run_values": [0, 1, 0, 1],
    }
    assert state(second) == {
        "input_ids": [1, 2, 10, 11],
        "node_lengths": [4],
        "node_parents": [-1],
        "weights": [0, 0, 1 / 3, 1 / 3],  # token 2 is supervised by the first part
        "branch_count": [0, 0, 1, 1],
        "num_branches": 3,
        "weighting": "tree",
        "branch_nodes": [0],
        "run_counts": [2],
        "run_lengths": [1, 3],
        "run_values": [0, 1],
    }
    assert second.branches() == tree.branches()[:1]


def test_prompt_and_completions():
    """6 + 4 and 6 + 4 tokens fit beside the prompt of 4. Runs of the layout would be three: 6 | 6 + 4 | 4."""
    prompt = (1, 2, 3, 4)
    completions = [(10, *[20] * 3), (11, *[20] * 5), (12, *[20] * 3), (13, *[20] * 5)]
    tree = fold([branch(*prompt, *completion, context=4) for completion in completions], weighting="branch")
    assert len(tree) == 4 + 4 + 6 + 4 + 6
    parts = split_tree(tree, 14)
    assert [[int(b.input_ids[4]) for b in part.branches()] for part in parts] == [[10, 11], [12, 13]]
    assert [part.input_ids.tolist() for part in parts] == [
        [*prompt, *completions[1], *completions[0]],  # the heaviest first again
        [*prompt, *completions[3], *completions[2]],
    ]
    assert [part.weights.tolist() for part in parts] == [[0.0] * 4 + [1.0] * 10] * 2
    assert [len(part) for part in split_tree(tree, 13)] == [10, 10, 12]


def test_strict_prefixes_and_duplicates_stay_with_a_part():
    tree = fold([branch(1, 2, 4), branch(1, 2), branch(1, 2, 3), branch(1, 2), branch(1, 2, 3)])
    parts = split_tree(tree, 3)
    assert [[b.input_ids.tolist() for b in part.branches()] for part in parts] == [
        [[1, 2, 4], [1, 2], [1, 2]],
        [[1, 2, 3], [1, 2, 3]],
    ]
    assert [part.weights.tolist() for part in parts] == [[0, 5 / 5, 1 / 5], [0, 0, 2 / 5]]
    assert [part.branch_count.tolist() for part in parts] == [[0, 5, 1], [0, 0, 2]]
    assert [part.node_lengths.tolist() for part in parts] == [[2, 1], [3]]  # branches end inside the first only


def test_several_roots_share_parts():
    tree = fold([branch(1, 1), branch(2, 2, 2), branch(3)])
    assert [part.input_ids.tolist() for part in split_tree(tree, 4)] == [[2, 2, 2, 3], [1, 1]]


def test_a_tree_that_fits_is_returned_as_it_is():
    tree = fold([branch(1, 2), branch(1, 3)])
    assert len(tree) == 3
    for max_tokens in (3, 4):
        (part,) = split_tree(tree, max_tokens)
        assert part is tree
    assert [part.input_ids.tolist() for part in split_tree(tree, 2)] == [[1, 2], [1, 3]]


@pytest.mark.parametrize(
    ("max_tokens", "message"),
    [
        (4, "`max_tokens` is 4; pass an integer of at least 5"),
        (0, "`max_tokens` must be between 1 and"),
        (-3, "`max_tokens` must be between 1 and .* got -3"),
        (6.0, "`max_tokens` must be integers, got 6.0"),
        (True, "`max_tokens` must be integers, got True"),
        (None, "`max_tokens` must be integers, got None"),
    ],
)
def test_errors(max_tokens: Any, message: str):
    tree = fold([branch(1, 2), branch(1, 2, 3, 4), branch(1, 2, 3, 5, 6)])
    with pytest.raises(ValueError, match=message):
        split_tree(tree, max_tokens)
    assert len(split_tree(tree, 5)) == 2


# --- Random trees.


def random_branches(rng: np.random.Generator, count: int) -> list[Branch]:
    """Forks, strict prefixes, duplicates and several roots. Their weights tell the branches apart."""
    lists: list[list[int]] = []
    for _ in range(count):
        ids = rng.integers(0, 30, rng.integers(1, 9)).tolist()
        if lists and rng.random() < 0.8:
            earlier = lists[rng.integers(len(lists))]
            ids = earlier[: rng.integers(1, len(earlier) + 1)] + ids[: rng.integers(0, len(ids) + 1)]
        lists.append(ids)
    return [
        Branch(ids, np.where(rng.random(len(ids)) < 0.7, index + 1, 0) / 64) if len(ids) > 1 else Branch(ids, [0])
        for index, ids in enumerate(lists)
    ]


def tokens(tree: PrefixTree) -> dict[Prefix, tuple[float, int]]:
    """Weight and g of every token, by the tokens on its path."""
    found = {}
    for path in tree.paths():
        ids = tree.input_ids[path].tolist()
        for depth, at in enumerate(path.tolist()):
            found[tuple(ids[: depth + 1])] = (float(tree.weights[at]), int(tree.branch_count[at]))
    assert len(found) == len(tree)
    return found


def check_parts(tree: PrefixTree, parts: list[PrefixTree], max_tokens: int) -> None:
    whole = tokens(tree)
    left = dict(whole)
    remaining = [(b.input_ids.tobytes(), b.weights.tobytes()) for b in tree.branches()]
    for part in parts:
        assert len(part) <= max_tokens
        assert (part.num_branches, part.weighting) == (tree.num_branches, tree.weighting)
        # Weight and g are in the first part that holds the token; each part is the first for some.
        held = tokens(part)
        assert left.keys() & held.keys()
        assert held == {prefix: left.pop(prefix, (0.0, 0)) for prefix in held}
        # Its branches come in the whole tree's order, none comes twice.
        at = 0
        for b in part.branches():
            at = remaining.index((b.input_ids.tobytes(), b.weights.tobytes()), at)
            del remaining[at]
        # It is laid out as the fold of its branches.
        of_whole = {name: getattr(part, name) for name in ("weights", "branch_count", "num_branches")}
        assert part == PrefixTree(**{**fold(part.branches(), part.weighting).to_dict(), **of_whole})
        assert pickle.loads(pickle.dumps(part)) == part == PrefixTree.from_dict(part.to_dict())
    assert not left
    assert not remaining


@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.slow)])
def test_random_trees(count: int):
    rng = np.random.default_rng(0)
    seen: Counter[str] = Counter()
    for trial in range(count):
        tree = fold(random_branches(rng, count=int(rng.integers(2, 25))), WEIGHTINGS[trial % 4])
        longest = tree.stats().longest_path
        max_tokens = int(rng.integers(longest, max(longest, len(tree)) + 1))
        parts = split_tree(tree, max_tokens)
        check_parts(tree, parts, max_tokens)
        again = [smaller for part in parts for smaller in split_tree(part, longest)]  # parts of parts
        check_parts(tree, again, longest)
        ends = tree.branch_nodes.tolist()
        seen["split"] += len(parts) > 1
        seen["many parts"] += len(parts) > 3
        seen["split again"] += len(again) > len(parts) > 1
        seen["several roots"] += len(parts) > 1 and (tree.node_parents < 0).sum() > 1
        seen["duplicates"] += len(parts) > 1 and len(set(ends)) < len(ends)
        seen["strict prefixes"] += len(parts) > 1 and bool(set(ends) & set(tree.node_parents.tolist()))
    assert min(seen.values()) > count * 0.08, seen
    assert len(seen) == 6


# --- How many tokens are computed again.


def leaf_paths(tree: PrefixTree) -> list[frozenset[int]]:
    """Token indices of every leaf's path, in the order of the layout."""
    paths = {path[-1]: frozenset(path.tolist()) for path in tree.paths()}
    inner = set(tree.predecessor.tolist())
    return [paths[end] for end in sorted(paths) if end not in inner]


def fewest_tokens(paths: list[frozenset[int]], max_tokens: int, consecutive: bool) -> int:
    """Fewest tokens of parts that hold all paths: of all ways to group them, or of those that cut their sequence."""
    best = sum(map(len, paths))

    def place(index: int, groups: list[frozenset[int]], total: int) -> None:
        nonlocal best
        if total >= best:
            return
        if index == len(paths):
            best = total
            return
        path = paths[index]
        for at, group in enumerate(groups):
            joined = group | path
            if len(joined) <= max_tokens and (at == len(groups) - 1 or not consecutive):
                place(index + 1, [*groups[:at], joined, *groups[at + 1 :]], total + len(joined) - len(group))
        place(index + 1, [*groups, path], total + len(path))

    place(0, [], 0)
    return best


def test_brute_force_itself():
    paths = [frozenset(range(4)), frozenset({0, 5, 6, 7}), frozenset({0, 8}), frozenset({0, 9})]
    assert fewest_tokens(paths, 5, consecutive=False) == 5 + 5
    assert fewest_tokens(paths, 5, consecutive=True) == 4 + 5 + 2
    assert fewest_tokens(paths, 4, consecutive=False) == 4 + 4 + 3


def random_shape(rng: np.random.Generator, kind: str) -> PrefixTree:
    """A prompt and its completions, a trunk with a leaf at each turn, or any tree; 3 to 8 leaves, no token twice."""
    leaves = int(rng.integers(3, 9))
    parents = [-1]
    while len(set(range(len(parents))) - set(parents)) < leaves:
        last = len(parents) - 1
        if kind == "turns":
            parents += [last, last]
        else:
            parents.append(0 if kind == "prompt" else int(rng.integers(0, last + 1)))
    lengths = rng.integers(1, 13, len(parents))
    if kind == "prompt":
        lengths[0] = rng.integers(1, 21)
    return PrefixTree.from_nodes(parents, np.split(np.arange(lengths.sum()), np.cumsum(lengths)[:-1]))


def test_few_tokens_are_duplicated():
    rng = np.random.default_rng(0)
    sums: Counter[str] = Counter()
    while sums["trees"] < 900:
        tree = random_shape(rng, ["prompt", "turns", "any"][sums["trees"] % 3])
        longest = tree.stats().longest_path
        if longest == len(tree):
            continue
        max_tokens = int(rng.integers(longest, min(len(tree), 3 * longest)))
        total = sum(len(part) for part in split_tree(tree, max_tokens))
        paths = leaf_paths(tree)
        least = fewest_tokens(paths, max_tokens, consecutive=False)
        in_runs = fewest_tokens(paths, max_tokens, consecutive=True)
        assert total >= least  # the brute force misses nothing
        sums["trees"] += 1
        sums["minimal"] += total == least
        sums["worse than runs"] += total > in_runs
        sums["ours"] += total - len(tree)
        sums["least"] += least - len(tree)
        sums["runs"] += in_runs - len(tree)
    assert sums["minimal"] >= 0.99 * sums["trees"], sums
    assert sums["ours"] <= 1.01 * sums["least"], sums
    assert sums["runs"] >= 1.04 * sums["least"], sums
    assert sums["worse than runs"] <= 0.002 * sums["trees"], sums


def test_a_long_caterpillar_is_minimal():
    """20 turns of 3 tokens, a leaf of 2 at each: deep leaves share most, so they are what a part holds together."""
    branches = [branch(*range(100, 100 + 3 * turn), turn, 50) for turn in range(1, 21)]
    tree = fold(branches)
    parts = split_tree(tree, 75)
    assert len(tree) == 20 * 5
    # Turns 20 to 14 beside the trunk's 60 tokens, then 13 to 1 beside the first 39.
    assert [sorted(int(b.input_ids[-2]) for b in part.branches()) for part in parts] == [
        list(range(14, 21)),
        list(range(1, 14)),
    ]
    assert [len(part) for part in parts] == [60 + 7 * 2, 39 + 13 * 2]


def test_message_names_the_longest_branch_of_all():
    """A strict prefix is no leaf, a duplicate is named by its first occurrence."""
    tree = fold([branch(7), branch(7, 8, 9), branch(7, 8), branch(7, 8, 9)])
    with pytest.raises(ValueError, match=r"`max_tokens`.*2.*3"):
        split_tree(tree, 2)
