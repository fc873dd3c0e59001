"""Random inputs, valid and broken, against a plain reference fold that goes token by token."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

WEIGHTINGS = ["tree", "branch", "branch_mean", "once"]
Plain = tuple[list[int], list[float]]  # a branch: token ids and weights


# --- The reference: a trie of single tokens in dicts, straight from the definitions.


@dataclass
class Token:
    id: int
    parent: int
    passing: list[int]  # branches through this token
    sums: list[float] = field(default_factory=list)  # of each supervising branch
    children: dict[int, int] = field(default_factory=dict)


def reference_fold(branches: list[Plain], weighting: str) -> dict[str, Any]:
    trie = [Token(-1, -1, [])]  # above the roots
    ends = []
    for index, (ids, weights) in enumerate(branches):
        weights = [0.0, *weights[1:]]
        supervised = sum(weight > 0 for weight in weights)
        at = 0
        for token, weight in zip(ids, weights, strict=True):
            if token not in trie[at].children:
                trie[at].children[token] = len(trie)
                trie.append(Token(token, at, []))
            at = trie[at].children[token]
            trie[at].passing.append(index)
            if weight > 0:
                trie[at].sums.append(weight / supervised if weighting == "branch_mean" else weight)
        ends.append(at)

    below = [1] * len(trie)
    for token in range(len(trie) - 1, 0, -1):
        below[trie[token].parent] += below[token]
    order, stack = [], [0]
    while stack:
        token = stack.pop()
        order.append(token)
        by_weight = sorted(trie[token].children.values(), key=lambda child: (-below[child], trie[child].passing[0]))
        stack += reversed(by_weight)
    order = order[1:]
    rank = {token: index for index, token in enumerate(order)} | {0: -1}

    starts = [t for t in order if trie[t].parent == 0 or trie[t].passing != trie[trie[t].parent].passing]
    node_of = dict(zip(order, np.cumsum([t in starts for t in order]) - 1, strict=True)) | {0: -1}
    divisor = {"tree": lambda token: len(branches), "once": lambda token: max(len(token.sums), 1)}
    depth = {0: -1}
    for token in order:
        depth[token] = depth[trie[token].parent] + 1
    return {
        "input_ids": [trie[t].id for t in order],
        "node_lengths": [list(node_of.values()).count(node) for node in range(len(starts))],
        "node_parents": [node_of[trie[t].parent] for t in starts],
        "weights": [sum(trie[t].sums) / divisor.get(weighting, lambda token: 1)(trie[t]) for t in order],
        "branch_count": [len(trie[t].sums) for t in order],
        "branch_nodes": [node_of[end] for end in ends],
        "depth": [depth[t] for t in order],
        "predecessor": [rank[trie[t].parent] for t in order],
        "subtree_end": [rank[t] + below[t] for t in order],
    }


def check_against_reference(tree: PrefixTree, branches: list[Plain], weighting: str) -> None:
    expected = reference_fold(branches, weighting)
    weights = expected.pop("weights")
    # Sums of the dyadic weights are exact; only dividing by a branch's supervised tokens rounds.
    np.testing.assert_allclose(tree.weights, weights, rtol=1e-15 if weighting == "branch_mean" else 0, atol=0)
    for name, values in expected.items():
        assert getattr(tree, name).tolist() == values, name
    assert tree.num_branches == len(branches)
    unfolded = [(b.input_ids.tolist(), b.weights.tolist()) for b in tree.branches()]
    assert unfolded == [(ids, [0.0, *weights[1:]]) for ids, weights in branches]


# --- Random inputs.


def random_branches(rng: np.random.Generator, count: int = 6, length: int = 7) -> list[Plain]:
    """Few different tokens, so that forks, strict prefixes, duplicates, single tokens and several roots all occur."""
    vocabulary = rng.integers(1, 4)
    branches: list[Plain] = []
    for _ in range(rng.integers(1, count + 1)):
        ids = rng.integers(0, vocabulary, rng.integers(1, length + 1)).tolist()
        if branches and rng.random() < 0.5:  # continue or repeat an earlier branch
            earlier = branches[rng.integers(len(branches))][0]
            ids = earlier[: rng.integers(1, len(earlier) + 1)] + ids[: rng.integers(0, len(ids) + 1)]
        branches.append((ids, rng.choice([0.0, 0.0, 1.0, 1.0, 0.25, 2.5], len(ids)).tolist()))
    return branches


def random_nodes(rng: np.random.Generator) -> dict[str, list]:
    count = int(rng.integers(1, 7))
    parents = [int(rng.integers(-1, node)) if node else -1 for node in range(count)]
    ids = [rng.integers(0, 2, rng.integers(0 if node in parents else 1, 4)).tolist() for node in range(count)]
    weights = [rng.choice([0.0, 1.0, 0.5], len(node)).tolist() for node in ids]
    return {"parents": parents, "input_ids": ids, "weights": weights}


def branches_of_nodes(parents: list, input_ids: list, weights: list) -> list[Plain]:
    branches = []
    for leaf in range(len(parents)):
        if leaf not in parents:
            ids: list[int] = []
            own: list[float] = []
            node = leaf
            while node != -1:
                ids, own, node = input_ids[node] + ids, weights[node] + own, parents[node]
            branches.append((ids, own))
    return branches


def paths_of_nodes(parents: list, input_ids: list, weights: list) -> dict[str, list]:
    paths = []
    for leaf in range(len(parents)):
        path, node = [], leaf
        while node != -1:
            path, node = [node, *path], parents[node]
        if leaf not in parents:
            paths.append(path)
    return {
        "input_ids": [token for ids in input_ids for token in ids],
        "node_lengths": [len(ids) for ids in input_ids],
        "sample_paths": paths,
        "weights": [weight for own in weights for weight in own],
    }


# --- Ways to break them: each changes the input in place and returns what the message must match.

BAD_IDS = {
    -1: r"must be between 0 and \d+, got -1 at index {at}; replace it",
    1.5: r"must be integers, got .* at index \d+; pass `int`s",
    True: r"must be integers, got True at index {at}; pass `int`s",
    None: r"must be integers, got None at index {at}; pass `int`s",
    "7": r"must be integers, got .* at index \d+; pass `int`s",
    2**63: r"(must be between 0 and|has the dtype (float64|object)).*; (replace it|pass integers that fit int64)",
    10**30: r"has the dtype object.*; pass integers that fit int64",
}
BAD_WEIGHTS: dict[Any, str] = {
    -0.5: r"must be finite and not negative, got -0\.5 at index {at}; replace it",
    float("nan"): r"must be finite and not negative, got nan at index {at}; replace it",
    float("inf"): r"must be finite and not negative, got inf at index {at}; replace it",
    None: r"must be real numbers, got .*; pass one number per token",
    "x": r"must be real numbers, got .*; pass one number per token",
    1j: r"must be real numbers, got .*; pass one number per token",
}


def spoil(rng: np.random.Generator, values: list, name: str, bad: dict[Any, str]) -> str:
    """Put a bad value into a list."""
    value = list(bad)[rng.integers(len(bad))]
    at = int(rng.integers(len(values)))
    values[at] = value
    return f"^`{re.escape(name)}` {bad[value].format(at=at)}"


def break_branches(rng: np.random.Generator, given: dict[str, Any]) -> str:
    branches = given["branches"]
    ids, weights = branches[rng.integers(len(branches))]
    match rng.integers(8):
        case 0:
            return spoil(rng, ids, "input_ids", BAD_IDS)
        case 1:
            return spoil(rng, weights, "weights", BAD_WEIGHTS)
        case 2:
            weights.append(1.0)
            return rf"^`weights` has {len(weights)} entries for {len(ids)} `input_ids`; pass"
        case 3:
            ids.clear()
            return "^`input_ids` is empty; "
        case 4:
            ids[0] = [1, 2]
            return r"^`input_ids` (is no array|has 2 dimensions|must be integers).*; pass "
        case 5:
            given["weighting"] = ["mean", "", None, 3, ["tree"], np.ones(2)][rng.integers(6)]
            return "^`weighting` is .*; pass one of 'tree', 'branch', 'branch_mean', 'once'"
        case 6:
            given["branches"] = [[], None, 5, {}][rng.integers(4)]
            return "^`branches` is .*; pass (a list|at least one)"
        case _:
            given["items"] = [None, "a", ([1], [1]), 3][rng.integers(4)]
            return r"^`branches\[\d\]` is a (NoneType|str|tuple|int); make it a `Branch`"


def break_nodes(rng: np.random.Generator, given: dict[str, Any]) -> str:
    parents, ids, weights = given["parents"], given["input_ids"], given["weights"]
    at = int(rng.integers(len(parents)))
    match rng.integers(9):
        case 0:
            parents[at] = at
            return rf"^`parents\[{at}\]` is {at} of \d+ nodes, not an earlier node; .* use -1 for a root"
        case 1:
            parents.append(-1)
            return rf"^`input_ids` has {len(ids)} entries for {len(parents)} `parents`; pass"
        case 2:
            parents[at] = len(parents) + 3
            return rf"^`parents\[{at}\]` is {len(parents) + 3} of {len(parents)} nodes, not an earlier node"
        case 3:
            parents[at] = -3
            return rf"^`parents` must be between -1 and \d+, got -3 at index {at}; replace it"
        case 4:
            for value in (parents, ids, weights):
                value.append(value[-1])
            parents[at] = len(parents) - 1
            return rf"^`parents\[{at}\]` is {len(parents) - 1} of \d+ nodes, not an earlier node; order the nodes"
        case 5:
            weights[at].append(1.0)
            return rf"^`weights\[{at}\]` has {len(weights[at])} entries for {len(ids[at])} `input_ids"
        case 6:
            ids[at].append(0)
            weights[at].append(0.0)
            return spoil(rng, ids[at], f"input_ids[{at}]", BAD_IDS)
        case 7:
            ids[at].append(0)
            weights[at].append(0.0)
            return spoil(rng, weights[at], f"weights[{at}]", BAD_WEIGHTS)
        case _:
            for value, new in ((parents, -1), (ids, []), (weights, [])):
                value.append(new)
            return rf"^`input_ids` has no token on the path \[{len(parents) - 1}\]; give it a token or drop it"


def break_paths(rng: np.random.Generator, given: dict[str, Any]) -> str:
    lengths, paths = given["node_lengths"], given["sample_paths"]
    at = int(rng.integers(len(paths)))
    match rng.integers(8):
        case 0:
            paths[at].append(len(lengths))
            return rf"^`sample_paths\[{at}\]` must be between 0 and \d+, got {len(lengths)} at index \d+; replace it"
        case 1:
            paths[at].append(paths[at][-1])
            return rf"^`sample_paths\[{at}\]` goes from node \d+ to node \d+; number the nodes parents first"
        case 2:
            lengths[at] += 1
            return r"^`node_lengths` sums to \d+ for \d+ `input_ids`; make them agree"
        case 3:
            lengths.append(1)
            given["input_ids"].append(1)
            given["weights"].append(1.0)
            return rf"^`sample_paths` never visits node {len(lengths) - 1} of 1 tokens; add its path or remove"
        case 4:
            paths.append([])
            return r"^`input_ids` has no token on the path \[\]; give it a token or drop it"
        case 5:
            given["weights"] = [*given["weights"], 0.0]
            return r"^`weights` has \d+ entries for \d+ `input_ids`; pass"
        case 6:
            lengths += [0, 0]
            paths += [[len(lengths) - 2, len(lengths) - 1], [len(lengths) - 1]]
            return rf"^`sample_paths\[{len(paths) - 1}\]` gives node \d+ the parent -1, .*; give every node one parent"
        case _:
            paths.clear()
            return "^`sample_paths` is empty; "


def run(kind: str, given: dict[str, Any]) -> PrefixTree:
    if kind == "fold":
        branches = given["branches"]
        if isinstance(branches, list):
            branches = [Branch(ids, weights) for ids, weights in branches]
        if "items" in given:
            branches.append(given["items"])
        return fold(branches, given["weighting"])
    return (PrefixTree.from_nodes if kind == "nodes" else PrefixTree.from_node_paths)(**given)


MANY = pytest.mark.parametrize("count", [2_500, pytest.param(10_000, marks=pytest.mark.slow)])


@MANY
def test_random_inputs_give_the_right_tree_or_a_helpful_error(count: int):
    rng = np.random.default_rng(0)
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        weighting = WEIGHTINGS[rng.integers(4)]
        kind = ["fold", "nodes", "paths"][rng.integers(3)]
        nodes = random_nodes(rng)
        if kind == "fold":
            plain = random_branches(rng)
            given = {"branches": [(list(ids), list(weights)) for ids, weights in plain]}
        else:
            plain = branches_of_nodes(**nodes)
            given = nodes if kind == "nodes" else paths_of_nodes(**nodes)
        given["weighting"] = weighting
        if rng.random() < 0.5:
            message = {"fold": break_branches, "nodes": break_nodes, "paths": break_paths}[kind](rng, given)
            with pytest.raises(ValueError) as error:
                run(kind, given)
            assert re.search(message, str(error.value), re.DOTALL), (given, str(error.value), message)
            outcomes["refused"] += 1
            continue
        tree = run(kind, given)
        check_against_reference(tree, plain, weighting)
        assert fold(tree.branches(), weighting) == tree
        outcomes["folded"] += 1
        outcomes["several roots"] += (tree.node_parents == -1).sum() > 1
        outcomes["strict prefix"] += len(set(tree.branch_nodes.tolist()) & set(tree.node_parents.tolist())) > 0
        outcomes["duplicate"] += len(set(tree.branch_nodes.tolist())) < tree.num_branches
        outcomes["deep"] += tree.stats().depth > 3
    # The inputs are worth something only if every case is among them.
    assert min(outcomes.values()) > count / 40, outcomes
    assert len(outcomes) == 6


@MANY
def test_corrupted_rows_are_refused_or_hold_together(count: int):
    """A row with one changed entry is refused by name, or it still is a tree whose parts agree."""
    rng = np.random.default_rng(1)
    outcomes: Counter[str] = Counter()
    rows = [
        fold([Branch(*b) for b in random_branches(rng)], WEIGHTINGS[rng.integers(4)]).to_dict() for _ in range(200)
    ]
    for _ in range(count):
        row = dict(rows[rng.integers(len(rows))])
        name = list(row)[rng.integers(len(row))]
        value: Any = row[name]
        if isinstance(value, np.ndarray):
            value = value.tolist()
            at = rng.integers(len(value))
            change = rng.integers(6)
            if change < 3:
                value[at] = [int(rng.integers(-2, 6)), float(rng.random()), None][change]
            elif change < 5:
                value = value[:at] + value[at + change - 3 :] + [0] * (change - 3)  # one fewer, or moved by one
            else:
                value = [None, [], [value], "row", {}][rng.integers(5)]
        else:
            value = [None, 0, -1, int(rng.integers(1, 9)), 2.0, "once", [3]][rng.integers(7)]
        row[name] = value
        try:
            tree = PrefixTree.from_dict(row)
        except ValueError as error:
            found = re.match(r"`(\w+)`.*; ", str(error), re.DOTALL)
            assert found and found[1] in row, str(error)
            outcomes["refused"] += 1
            continue
        outcomes["accepted"] += 1
        assert sum(map(len, tree.branches())) == tree.stats().branch_tokens
        above = tree.predecessor
        assert np.array_equal(tree.depth, np.where(above >= 0, tree.depth[above] + 1, 0))
        assert all(above[t] < t < tree.subtree_end[above[t]] for t in np.flatnonzero(above >= 0))
        assert PrefixTree.from_dict(tree.to_dict()) == tree
    assert min(outcomes["refused"], outcomes["accepted"]) > count / 20, outcomes


# --- The layout by its definitions, on larger forests.


@pytest.mark.parametrize("seed", range(20))
def test_layout_by_brute_force(seed: int):
    rng = np.random.default_rng(seed)
    plain = random_branches(rng, count=40, length=25)
    tree = fold([Branch(ids, weights) for ids, weights in plain])
    check_against_reference(tree, plain, "tree")

    # Key k is visible to query q iff k is on the path from q up to its root.
    visible = np.zeros((len(tree), len(tree)), dtype=bool)
    for query in range(len(tree)):
        key = query
        while key != -1:
            visible[query, key] = True
            key = tree.predecessor[key]
    index = np.arange(len(tree))
    assert np.array_equal(visible, (index <= index[:, None]) & (index[:, None] < tree.subtree_end))
    assert np.array_equal(visible.sum(1), tree.depth + 1)
    assert visible.sum() == tree.stats().tree_pairs

    # Preorder, heaviest child first, ties by the first branch: the tuples of every family of siblings ascend.
    for parent in range(-1, len(tree.node_lengths)):
        family = []
        for node in np.flatnonzero(tree.node_parents == parent):
            first = tree.node_starts[node]
            below = visible[:, first]
            branches = [b for b, end in enumerate(tree.branch_nodes) if below[tree.node_starts[end]]]
            assert np.array_equal(np.flatnonzero(below), np.arange(first, first + below.sum()))  # one range
            family.append((-int(below.sum()), min(branches)))
        assert family == sorted(family)
        assert len(set(family)) == len(family)


def test_large_ids_sort_as_small_ones():
    rng = np.random.default_rng(3)
    for plain in (random_branches(rng, count=20, length=10) for _ in range(50)):
        scale = [1, 2**20, 2**31, 2**33, 2**60][rng.integers(5)]
        tree = fold([Branch([token * scale for token in ids], weights) for ids, weights in plain])
        small = fold([Branch(ids, weights) for ids, weights in plain])
        assert tree == PrefixTree(**{**small.to_dict(), "input_ids": small.input_ids * scale})
