"""Folding: worked examples with literal values, and every bad input's message."""

from __future__ import annotations

import numpy as np
import pytest

from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold


def branch(*ids: int, weights: list[float] | None = None) -> Branch:
    return Branch(list(ids), [1] * len(ids) if weights is None else weights)


def check(tree: PrefixTree, **expected: object) -> None:
    for name, value in expected.items():
        assert getattr(tree, name).tolist() == value, name


def test_two_branches_that_fork():
    tree = fold([branch(5, 6, 7), branch(5, 6, 8, 9)])
    check(
        tree,
        input_ids=[5, 6, 8, 9, 7],
        node_lengths=[2, 2, 1],
        node_parents=[-1, 0, 0],
        node_starts=[0, 2, 4],
        branch_nodes=[2, 1],
        depth=[0, 1, 2, 3, 2],
        subtree_end=[5, 5, 4, 4, 5],
        predecessor=[-1, 0, 1, 2, 1],
        branch_count=[0, 2, 1, 1, 1],
        weights=[0.0, 1.0, 0.5, 0.5, 0.5],
        run_counts=[2, 2],
        run_lengths=[1, 2, 1, 3],
        run_values=[0.0, 1.0, 0.0, 1.0],
    )
    assert (tree.num_branches, tree.weighting, len(tree)) == (2, "tree", 5)


def test_one_branch_of_one_token():
    tree = fold([branch(3)])
    check(tree, input_ids=[3], node_lengths=[1], node_parents=[-1], weights=[0.0], branch_count=[0])
    check(tree, depth=[0], subtree_end=[1], predecessor=[-1], branch_nodes=[0], run_lengths=[1], run_values=[0.0])


def test_strict_prefix_ends_a_node_and_counts():
    tree = fold([branch(1, 2, 3, 4), branch(1, 2)])
    check(tree, input_ids=[1, 2, 3, 4], node_lengths=[2, 2], node_parents=[-1, 0], branch_nodes=[1, 0])
    check(tree, branch_count=[0, 2, 1, 1], weights=[0.0, 1.0, 0.5, 0.5], subtree_end=[4, 4, 4, 4])


def test_duplicates_count():
    tree = fold([branch(1, 2), branch(1, 2), branch(1, 2, 3)])
    check(tree, input_ids=[1, 2, 3], node_lengths=[2, 1], branch_nodes=[0, 0, 1], branch_count=[0, 3, 1])
    assert tree.weights.tolist() == [0.0, 1.0, 1 / 3]


def test_several_roots_are_ordered_by_weight():
    tree = fold([branch(9), branch(4, 1), branch(7, 1, 1), branch(4, 2)])
    check(
        tree,
        input_ids=[4, 1, 2, 7, 1, 1, 9],  # 3 tokens, 3 tokens (seen later), 1 token
        node_lengths=[1, 1, 1, 3, 1],
        node_parents=[-1, 0, 0, -1, -1],
        branch_nodes=[4, 1, 3, 2],
        depth=[0, 1, 1, 0, 1, 2, 0],
        subtree_end=[3, 2, 3, 6, 6, 6, 7],
        predecessor=[-1, 0, 0, -1, 3, 4, -1],
    )


def test_heaviest_child_counts_its_whole_subtree():
    # Below the root: [2] with 1 + 2 + 2 tokens in its subtree, and [3, 3, 3, 3], the longest single node.
    tree = fold([branch(1, 3, 3, 3, 3), branch(1, 2, 5, 5), branch(1, 2, 6, 6)])
    check(tree, input_ids=[1, 2, 5, 5, 6, 6, 3, 3, 3, 3], node_lengths=[1, 1, 2, 2, 4], branch_nodes=[4, 2, 3])


@pytest.mark.parametrize(
    ("order", "expected"), [([8, 3, 5], [1, 8, 3, 5]), ([3, 5, 8], [1, 3, 5, 8]), ([5, 8, 3], [1, 5, 8, 3])]
)
def test_ties_go_to_the_first_seen(order: list[int], expected: list[int]):
    assert fold([branch(1, last) for last in order]).input_ids.tolist() == expected


def test_a_tie_looks_at_the_first_branch_of_a_subtree():
    # Both children weigh 3. The child 9 is first seen in branch 0, the child 2 in branch 1.
    tree = fold([branch(1, 9, 9), branch(1, 2, 2, 2), branch(1, 9, 8)])
    assert tree.input_ids.tolist() == [1, 9, 9, 8, 2, 2, 2]


def test_branches_differ_only_where_their_tokens_do():
    # The same suffix below different tokens is not shared; weights never split a token.
    tree = fold(
        [branch(1, 2, 7, 7, weights=[0, 0, 1, 1]), branch(1, 3, 7, 7), branch(1, 2, 7, 7, weights=[1, 1, 0, 0])]
    )
    check(tree, input_ids=[1, 2, 7, 7, 3, 7, 7], branch_count=[0, 1, 1, 1, 1, 1, 1])


def test_ids_of_more_than_32_bits():
    big = 2**40
    tree = fold([branch(1, big + 1), branch(1, big), branch(1, 2**63 - 1), branch(1, 256), branch(1, 1)])
    assert tree.input_ids.tolist() == [1, big + 1, big, 2**63 - 1, 256, 1]
    assert len(fold([branch(1, 2**32 + 5), branch(1, 5)])) == 3


WEIGHTED = [
    branch(1, 2, 3, 4, weights=[7, 1, 0, 2]),
    branch(1, 2, 3, weights=[0, 3, 0]),
    branch(1, 2, 9, weights=[0, 0, 0]),
    branch(1, 2, 3, 4, weights=[0, 0, 0, 4]),
]


@pytest.mark.parametrize(
    ("weighting", "weights"),
    [
        # tokens 1, 2, 3 (trunk), 4, 9: sums 0, 4, 0, 6, 0; g_t 0, 2, 0, 2, 0; supervised tokens per branch 2, 1, 0, 1
        ("tree", [0.0, 1.0, 0.0, 1.5, 0.0]),
        ("branch", [0.0, 4.0, 0.0, 6.0, 0.0]),
        ("branch_mean", [0.0, 1 / 2 + 3, 0.0, 2 / 2 + 4, 0.0]),
        ("once", [0.0, 2.0, 0.0, 3.0, 0.0]),
    ],
)
def test_weightings(weighting: str, weights: list[float]):
    tree = fold(WEIGHTED, weighting=weighting)
    check(tree, input_ids=[1, 2, 3, 4, 9], weights=weights, branch_count=[0, 2, 0, 2, 0])
    assert tree.weighting == weighting


def test_tree_weights_are_exactly_g_over_k():
    tree = fold([branch(1, 2, *([3] if index % 3 else [4])) for index in range(10)])
    check(tree, input_ids=[1, 2, 4, 3], branch_count=[0, 10, 4, 6], weights=[0.0, 1.0, 4 / 10, 6 / 10])
    assert sum(np.full(10, 1 / 10)) != 1.0  # what dividing first would give


def test_weights_that_vanish_still_count():
    tree = fold([branch(1, 2, weights=[0, 5e-324]), branch(1, 2, weights=[0, 0])])
    check(tree, branch_count=[0, 1], weights=[0.0, 0.0])
    assert fold(tree.branches()) == tree


def test_first_token_is_never_supervised():
    first = branch(1, 2, weights=[1, 1])
    assert first.weights.tolist() == [0.0, 1.0]
    check(fold([first], weighting="branch_mean"), weights=[0.0, 1.0], branch_count=[0, 1])


def test_deep_tree():
    # 1,000 turns: turn t extends the trunk of turn t - 1 by one token and forks off a leaf of one token.
    tree = fold([branch(*range(turn), 10_000) for turn in range(1, 1001)])
    assert tree.input_ids.tolist() == [*range(1000), *[10_000] * 1000]
    assert tree.node_lengths.tolist() == [1] * 999 + [2] + [1] * 999
    assert tree.depth.tolist() == [*range(1000), *range(1000, 0, -1)]
    assert tree.subtree_end[:3].tolist() == [2000, 1999, 1998]


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: np.array(x, dtype=np.uint16)])
def test_branch_takes_any_array_like(kind):
    made = Branch(kind([3, 4]), kind([1, 2]))
    assert made.input_ids.dtype == np.int64
    assert made.weights.dtype == np.float64
    assert (made.input_ids.tolist(), made.weights.tolist(), len(made)) == ([3, 4], [0.0, 2.0], 2)


def test_branch_copies_and_is_read_only():
    ids, weights = np.array([3, 4]), np.array([1.0, 2.0])
    made = Branch(ids, weights)
    ids[0], weights[1] = 9, 9
    assert made == Branch([3, 4], [0, 2])
    assert made != Branch([3, 4], [0, 1])
    assert made != Branch([3, 5], [0, 2])
    for array in (made.input_ids, made.weights):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    with pytest.raises(AttributeError):
        made.weights = weights  # type: ignore[misc]


def test_branch_normalises_negative_zero():
    assert not np.signbit(branch(1, 2, weights=[-0.0, -0.0]).weights).any()


class Fails:
    def __array__(self, dtype=None, copy=None):
        raise RuntimeError("lives on another device")


@pytest.mark.parametrize(
    ("ids", "weights", "message"),
    [
        ([], [], "`input_ids`"),
        ([1, 2], [1], "`weights`.*1.*2.*`input_ids`"),
        ([[1, 2]], [1, 1], r"`input_ids`.*\[\[1, 2\]"),
        (5, [1], "`input_ids`.*5"),
        ([[1], [1, 2]], [1, 1], "`input_ids`"),
        (Fails(), [1], "`input_ids`"),
        ([1, 2.5], [1, 1], "`input_ids`.*2.5.*index 1"),
        (np.array([1.0, 2.0]), [1, 1], "`input_ids`.*1.0.*index 0"),
        ([1, True], [1, 1], "`input_ids`.*True.*index 1"),
        (np.array([True, False]), [1, 1], "`input_ids`.*True.*index 0"),
        ([1, None], [1, 1], "`input_ids`.*None.*index 1"),
        (["1", "2"], [1, 1], "`input_ids`.*'1'.*index 0"),
        ([1, 2**70], [1, 1], "`input_ids`"),
        ([1, 2**63], [1, 1], "`input_ids`"),
        (
            np.array([1, 2**63], dtype=np.uint64),
            [1, 1],
            f"`input_ids`.*{2**63}.*index 1",
        ),
        ([3, -2, -7], [1, 1, 1], "`input_ids`.*-2.*index 1"),
        ([1, 2], [1, -0.5], "`weights`.*-0.5.*index 1"),
        ([1, 2], [1, float("nan")], "`weights`.*nan.*index 1"),
        ([1, 2], [1, float("inf")], "`weights`.*inf.*index 1"),
        ([1, 2], [-1, 1], "`weights`.*-1.0.*index 0"),
        ([1, 2], [1, None], r"`weights`.*\[1, None\]"),
        ([1, 2], [1, 1j], "`weights`"),
        ([1, 2], None, "`weights`.*None"),
    ],
)
def test_bad_branches(ids, weights, message: str):
    with pytest.raises(ValueError, match=message):
        Branch(ids, weights)


@pytest.mark.parametrize(
    ("branches", "weighting", "message"),
    [
        ([], "tree", "`branches`"),
        (7, "tree", "`branches`.*7"),
        (branch(1, 2), "tree", "`branches`"),
        ([branch(1), ([1], [1])], "tree", r"`branches\[1\]`.*tuple"),
        ([branch(1)], "mean", "`weighting`.*'mean'"),
        ([branch(1)], ["tree"], r"`weighting`.*\['tree'\]"),
        ([branch(1, 2, 3, weights=[0, 1e308, 1e308])], "branch", "`weights`.*inf"),
        ([branch(1, 2, weights=[0, 1e308]), branch(1, 3, weights=[0, 1e308])], "tree", "`weights`.*inf"),
        ([branch(1, 2, weights=[0, 1e308])] * 2, "branch", "`weights`.*inf"),
    ],
)
def test_bad_folds(branches, weighting, message: str):
    with pytest.raises(ValueError, match=message):
        fold(branches, weighting)
