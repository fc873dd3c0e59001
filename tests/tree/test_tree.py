"""The tree: unfolding, statistics, serialisation, explicit nodes, node paths, and how corrupt states are refused."""

from __future__ import annotations

import copy
import pickle

import datasets
import numpy as np
import pytest

from hf_prefix_tree.tree import folding, layout
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, TreeStats, fold

BRANCHES = [
    Branch([1, 2, 3, 4], [0, 0.25, 0.25, 1]),
    Branch([1, 2], [0, 1]),
    Branch([8, 9, 9], [0, 0, 3]),
    Branch([1, 2, 5], [0, 0, 0]),
    Branch([1, 2], [0, 0.5]),
]
ARRAYS = [
    "input_ids",
    "node_lengths",
    "node_parents",
    "weights",
    "branch_count",
    "branch_nodes",
    "run_counts",
    "run_lengths",
    "run_values",
]
DERIVED = ["depth", "subtree_end", "predecessor", "node_starts"]


@pytest.fixture
def tree() -> PrefixTree:
    return fold(BRANCHES)


def test_stored_state(tree: PrefixTree):
    state = {
        name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in tree.to_dict().items()
    }
    assert state == {
        "input_ids": [1, 2, 3, 4, 5, 8, 9, 9],
        "node_lengths": [2, 2, 1, 3],
        "node_parents": [-1, 0, 0, -1],
        "weights": [0.0, 1.75 / 5, 0.25 / 5, 1 / 5, 0.0, 0.0, 0.0, 3 / 5],
        "branch_count": [0, 3, 1, 1, 0, 0, 0, 1],
        "num_branches": 5,
        "weighting": "tree",
        "branch_nodes": [1, 0, 3, 2, 0],
        "run_counts": [3, 2, 2, 1, 2],
        "run_lengths": [1, 2, 1, 1, 1, 2, 1, 3, 1, 1],
        "run_values": [0.0, 0.25, 1.0, 0.0, 1.0, 0.0, 3.0, 0.0, 0.0, 0.5],
    }
    assert {name: getattr(tree, name).dtype.name for name in ARRAYS + DERIVED} == {
        **dict.fromkeys(ARRAYS + DERIVED, "int32"),
        **dict.fromkeys(["input_ids", "node_starts"], "int64"),
        **dict.fromkeys(["weights", "run_values"], "float64"),
    }


def test_unfold_gives_back_every_branch(tree: PrefixTree):
    assert tree.branches() == BRANCHES  # Branch.__eq__ compares tokens and weights exactly


def test_paths_hold_the_tokens_of_every_branch(tree: PrefixTree):
    assert [path.tolist() for path in tree.paths()] == [[0, 1, 2, 3], [0, 1], [5, 6, 7], [0, 1, 4], [0, 1]]
    assert [tree.input_ids[path].tolist() for path in tree.paths()] == [b.input_ids.tolist() for b in BRANCHES]


@pytest.mark.parametrize("weighting", ["tree", "branch", "branch_mean", "once"])
def test_fold_of_unfold_is_the_tree(weighting: str):
    tree = fold(BRANCHES, weighting)
    assert fold(tree.branches(), weighting=tree.weighting) == tree


def test_everything_is_read_only(tree: PrefixTree):
    for name in ARRAYS + DERIVED:
        with pytest.raises(ValueError, match="read-only"):
            getattr(tree, name)[0] = 0
    with pytest.raises(AttributeError):
        tree.num_branches = 1  # type: ignore[misc]
    assert tree.depth is tree.depth


def test_equality_sees_every_field(tree: PrefixTree):
    same = PrefixTree(**tree.to_dict())
    assert tree == same
    assert tree != "tree"
    # States that are still valid. The last one has the branches in another order.
    for change in (
        {"input_ids": [1, 2, 3, 4, 5, 8, 9, 7]},
        {"weights": tree.weights * 2},
        {"num_branches": 6},
        {"weighting": "once"},
        {
            "branch_nodes": [1, 0, 3, 2, 0][::-1],
            "run_counts": [2, 1, 2, 2, 3],
            "run_lengths": [1, 1, 3, 2, 1, 1, 1, 1, 2, 1],
            "run_values": [0, 0.5, 0, 0, 3, 0, 1, 0, 0.25, 1],
        },
    ):
        assert PrefixTree(**{**tree.to_dict(), **change}) != tree, change


def test_repr_is_short(tree: PrefixTree):
    assert repr(tree) == "PrefixTree(tokens=8, nodes=4, branches=5, weighting='tree')"


def test_stats(tree: PrefixTree):
    stats = tree.stats()
    assert stats == TreeStats(
        branches=5,
        branch_tokens=4 + 2 + 3 + 3 + 2,
        tree_tokens=8,
        branch_pairs=10 + 3 + 6 + 6 + 3,
        tree_pairs=(1 + 2 + 3 + 4) + 3 + (1 + 2 + 3),
        longest_path=4,
        depth=2,
        nodes=4,
        supervised_tokens=4,
    )
    assert (stats.token_ratio, stats.pair_ratio) == (14 / 8, 28 / 19)


def test_stats_add_up(tree: PrefixTree):
    both = tree.stats() + fold([Branch(range(100), [1] * 100)]).stats()
    assert both == TreeStats(6, 114, 108, 28 + 5050, 19 + 5050, 100, 2, 5, 4 + 99)


def test_stats_do_not_overflow():
    # 100,000 tokens have 5e9 pairs, more than int32 holds.
    long = fold([Branch(np.zeros(100_000, dtype=int), np.ones(100_000))]).stats()
    assert long.branch_pairs == long.tree_pairs == 100_000 * 100_001 // 2


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_pickle(tree: PrefixTree, clone):
    expected_depth = tree.depth.tolist()  # cached before pickling
    again = clone(tree)
    assert again == tree
    assert again.depth.tolist() == expected_depth
    assert not any(getattr(again, name).flags.writeable for name in ARRAYS + DERIVED)
    first = clone(BRANCHES[0])
    assert first == BRANCHES[0]
    assert not first.weights.flags.writeable


def test_dict_survives_arrow(tree: PrefixTree, tmp_path):
    exact = fold([Branch([1, 2**62, 3], [0, 0.1, 1 / 3]), Branch([1, 2**62 + 1], [0, 5e-324])], "branch_mean")
    data = datasets.Dataset.from_list([tree.to_dict(), exact.to_dict()])
    data.save_to_disk(tmp_path / "trees")
    for rows in (data, datasets.load_from_disk(tmp_path / "trees"), data.map(lambda row: {"extra": 1})):
        assert [PrefixTree.from_dict(row) for row in rows] == [tree, exact]


def test_rounding_formats_are_refused(tree: PrefixTree):
    row = datasets.Dataset.from_list([tree.to_dict()]).with_format("numpy")[0]
    assert row["weights"].dtype == np.float32  # what makes it necessary
    with pytest.raises(ValueError, match="`weights`"):
        PrefixTree.from_dict(row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "`input_ids`.*0.*1"),
        ({"input_ids": [1, 2]}, "`weights`.*8.*2"),
        ({"input_ids": None}, "`input_ids`"),
        ({"input_ids": [1, 2, 3, None, 5, 8, 9, 9]}, "`input_ids`.*None.*index 3"),
        ({"node_lengths": [2, 2, 1, 2]}, "`node_lengths`.*8"),
        ({"node_lengths": [4, 0, 1, 3]}, "`node_lengths`.*0.*index 1"),
        ({"node_lengths": [2, 2, 4]}, "`node_parents`.*4.*3"),
        ({"node_lengths": "2213"}, "`node_lengths`.*0"),
        ({"node_parents": [-1, 0, 0, -2]}, "`node_parents`.*-2.*index 3"),
        ({"node_parents": [-1, 0, 3, -1]}, "`node_parents`.*2.*3"),
        ({"node_parents": [-1, -1, 0, -1]}, "`node_parents`.*2.*0"),
        ({"node_parents": [0, 0, 0, -1]}, "`node_parents`.*0"),
        ({"weights": [1] * 8}, "`weights`.*0"),
        ({"weights": [0, 1, 1, 1, 1, 0, 0, 1]}, "`branch_count`.*0"),
        ({"weights": [0, float("nan")]}, "`weights`.*nan.*index 1"),
        ({"weights": np.zeros(8, dtype=np.float16)}, "`weights`"),
        ({"branch_count": [0, 3, 1, 1, 0, 0, 1, 1]}, "`branch_count`.*6"),
        ({"branch_count": [0, 9, 1, 1, 0, 0, 0, 1]}, "`num_branches`.*5"),
        ({"num_branches": 4}, "`num_branches`.*4"),
        ({"num_branches": 0}, "`num_branches`.*0"),
        ({"num_branches": 5.0}, "`num_branches`.*5.0"),
        ({"num_branches": True}, "`num_branches`.*True"),
        ({"weighting": "none"}, "`weighting`.*'none'"),
        ({"branch_nodes": []}, "`branch_nodes`.*0.*1"),
        ({"branch_nodes": [1, 0, 4, 2, 0]}, "`branch_nodes`.*4"),
        ({"branch_nodes": [1, 0, 3, 3, 0]}, "`branch_nodes`.*2"),
        ({"branch_nodes": [1, 0, 3, 2]}, "`run_counts`.*5.*4"),
        ({"run_counts": [3, 2, 2, 1, 1]}, "`run_lengths`.*10.*9"),
        ({"run_counts": [3, 2, 2, 3, 0]}, "`run_counts`.*0.*index 4"),
        ({"run_counts": [3, 2, 2, 2, 1]}, "`run_lengths`.*4.*3"),
        ({"run_lengths": [1, 2, 1, 1, 1, 3, 1, 3, 1, 1]}, "`run_lengths`.*4.*2"),
        ({"run_values": [0, 1]}, "`run_values`.*2.*10"),
        ({"run_values": [0, 0.25, 1, 0, 1, 1, 3, 0, 0, 0.5]}, "`run_values`.*0"),
        (
            {"run_values": [0, 0.25, 1, 0, 1, 0, -3, 0, 0, 0.5]},
            "`run_values`.*-3.0",
        ),
    ],
)
def test_corrupt_rows(tree: PrefixTree, change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        PrefixTree.from_dict({**tree.to_dict(), **change})


def test_missing_columns(tree: PrefixTree):
    for name in tree.to_dict():
        row = {key: value for key, value in tree.to_dict().items() if key != name}
        with pytest.raises(ValueError, match=f"`{name}` is missing"):
            PrefixTree.from_dict(row)
    with pytest.raises(ValueError, match=r"`mapping`.*list"):
        PrefixTree.from_dict([1])  # type: ignore[arg-type]


def test_a_part_of_a_tree_keeps_its_k():
    # One of two parts: the branch [5, 6, 7] alone, whose shared token 6 is supervised in the other part.
    part = PrefixTree(
        **{**fold([Branch([5, 6, 7], [0, 1, 1])]).to_dict(), "num_branches": 2}
        | {"weights": [0, 0, 0.5], "branch_count": [0, 2, 1]}
    )
    assert (part.num_branches, part.weights.tolist(), part.branch_count.tolist()) == (2, [0, 0, 0.5], [0, 2, 1])
    assert part.branches() == [Branch([5, 6, 7], [0, 1, 1])]
    assert PrefixTree.from_dict(part.to_dict()) == part
    assert part.stats().supervised_tokens == 1


def test_from_nodes():
    tree = PrefixTree.from_nodes([-1, 0, 0, None, 1], [[5, 6], [7], [8, 9], [5], [7, 7]])
    expected = fold([Branch(ids, [1] * len(ids)) for ids in ([5, 6, 8, 9], [5], [5, 6, 7, 7, 7])])
    assert tree == expected
    assert tree.node_lengths.tolist() == [1, 1, 3, 2]  # the root [5] is a strict prefix


def test_from_nodes_merges_siblings_that_start_alike():
    tree = PrefixTree.from_nodes([None, 0, 0], [[1], [2, 3], [2, 4]], [[9], [1, 0.5], [2, 1]], weighting="branch")
    assert tree.input_ids.tolist() == [1, 2, 3, 4]
    assert tree.weights.tolist() == [0.0, 3.0, 0.5, 1.0]
    assert tree.branch_count.tolist() == [0, 2, 1, 1]


def test_from_nodes_takes_empty_nodes():
    tree = PrefixTree.from_nodes([None, 0, 1, 1], [[], [4, 5], [], [6]], weighting="once")
    assert tree == fold([Branch([4, 5], [0, 1]), Branch([4, 5, 6], [0, 1, 1])], weighting="once")


@pytest.mark.parametrize(
    ("parents", "input_ids", "weights", "message"),
    [
        ([], [], None, "`parents`"),
        (None, [[1]], None, "`parents`.*None"),
        ([-1, 2, 0], [[1]] * 3, None, r"`parents\[1\]`.*2"),
        ([1, 0], [[1]] * 2, None, r"`parents\[0\]`.*1"),
        ([-1, 1], [[1]] * 2, None, r"`parents\[1\]`.*1"),
        ([-1, 7], [[1]] * 2, None, r"`parents\[1\]`.*7.*2"),
        ([-1, -2], [[1]] * 2, None, "`parents`.*-2.*index 1"),
        ([-1, 0.5], [[1]] * 2, None, "`parents`.*0.5.*index 1"),
        ([-1, 0], [[1]], None, "`input_ids`.*1.*2.*`parents`"),
        ([-1], [[1]], [[1], [1]], "`weights`.*2.*1.*`parents`"),
        ([-1, 0], [[1], [2, 3]], [[1], [1]], r"`weights\[1\]`.*1.*2"),
        ([-1, 0], [[1], [-2]], None, r"`input_ids\[1\]`.*-2.*index 0"),
        ([-1, 0], [[1], [2]], [[1], [-1]], r"`weights\[1\]`.*-1.0.*index 0"),
        (
            [-1, 0, -1],
            [[], [], [3]],
            None,
            r"`input_ids`.*\[0, 1\]",
        ),
        ([-1], 5, None, "`input_ids`.*5"),
        ([-1], [5], None, r"`input_ids\[0\]`.*5"),
    ],
)
def test_bad_nodes(parents, input_ids, weights, message: str):
    with pytest.raises(ValueError, match=message):
        PrefixTree.from_nodes(parents, input_ids, weights)


# Layouts of one prompt and its completions in the order given: (input_ids, node_lengths, sample_paths, position_ids),
# what they fold to (heaviest first, nothing empty), and the order of the tokens in the fold.
NODE_PATHS = [
    (
        ([5, 6, 7, 11, 12, 21, 31, 32, 33], [3, 2, 1, 3], [[0, 1], [0, 2], [0, 3]], [0, 1, 2, 3, 4, 3, 3, 4, 5]),
        ([3, 3, 2, 1], [[0, 2], [0, 3], [0, 1]]),
        [0, 1, 2, 6, 7, 8, 3, 4, 5],
    ),
    (([11, 12, 21], [0, 2, 1], [[1], [2]], [0, 1, 0]), ([2, 1], [[0], [1]]), [0, 1, 2]),
    (
        ([1, 2, 10, 11, 20, 21, 22], [2, 2, 3], [[0, 1], [0, 2]], [0, 1, 2, 3, 2, 3, 4]),
        ([2, 3, 2], [[0, 2], [0, 1]]),
        [0, 1, 4, 5, 6, 2, 3],
    ),
    (([1, 2, 3, 4], [3, 1], [[0, 1]], [0, 1, 2, 3]), ([4], [[0]]), [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("given", "expected", "order"), NODE_PATHS)
def test_node_paths(given, expected, order: list[int]):
    input_ids, node_lengths, sample_paths, position_ids = given
    tree = PrefixTree.from_node_paths(input_ids, node_lengths, sample_paths)
    assert tree.to_node_paths() == expected
    assert tree.input_ids.tolist() == [input_ids[index] for index in order]
    assert tree.depth.tolist() == [position_ids[index] for index in order]
    assert PrefixTree.from_node_paths(tree.input_ids, *tree.to_node_paths()) == tree


def test_node_paths_share_weights():
    tree = PrefixTree.from_node_paths([1, 2, 3], [2, 1, 0], [[0, 1], [0, 2], [0]], [5, 1, 2], weighting="branch")
    assert tree.weights.tolist() == [0.0, 3.0, 2.0]
    assert [branch.input_ids.tolist() for branch in tree.branches()] == [[1, 2, 3], [1, 2], [1, 2]]


@pytest.mark.parametrize(
    ("input_ids", "node_lengths", "sample_paths", "weights", "message"),
    [
        ([1, 2], [1, 2], [[0, 1]], None, "`node_lengths`.*3.*2.*`input_ids`"),
        ([1, 2], [3, -1], [[0, 1]], None, "`node_lengths`.*-1.*index 1"),
        ([], [], [[0]], None, "`node_lengths`"),
        ([1, 2], [1, 1], [[0, 2]], None, r"`sample_paths\[0\]`.*2.*index 1"),
        ([1, 2], [1, 1], [[0, 1], [-1]], None, r"`sample_paths\[1\]`.*-1.*index 0"),
        ([1, 2], [1, 1], [[0, 1, 1]], None, r"`sample_paths\[0\]`.*1"),
        ([1, 2], [1, 1], [[1, 0]], None, r"`sample_paths\[0\]`.*1.*0"),
        (
            [1, 2],
            [1, 1],
            [[0, 1], [1]],
            None,
            r"`sample_paths\[1\]`.*1.*-1.*0",
        ),
        (
            [1, 2],
            [1, 1],
            [[0]],
            None,
            "`sample_paths`.*1",
        ),
        ([1, 2], [2, 0], [[0], []], None, r"`input_ids`.*\[\]"),
        ([1, 2], [2, 0], [[0], [1]], None, r"`input_ids`.*\[1\]"),
        ([1, 2], [2], [], None, "`sample_paths`"),
        ([1, 2], [2], 0, None, "`sample_paths`.*0"),
        ([1, 2], [2], [[0]], [1], "`weights`.*1.*2"),
        ([1, 2], [2], [[0]], [1, -1], "`weights`.*-1.0.*index 1"),
    ],
)
def test_bad_node_paths(input_ids, node_lengths, sample_paths, weights, message: str):
    with pytest.raises(ValueError, match=message):
        PrefixTree.from_node_paths(input_ids, node_lengths, sample_paths, weights)


def test_layout_of_a_chain_of_50000_nodes():
    count = 50_000
    lengths, parents = np.full(count, 2), np.arange(-1, count - 1)
    assert layout.heavy_first_order(lengths, parents, np.array([count - 1]))[0].tolist() == [*range(count)]
    assert layout.first_out_of_preorder(parents) is None
    assert layout.depth(lengths, parents).tolist() == [*range(2 * count)]
    assert layout.subtree_end(lengths, parents).tolist() == [2 * count] * (2 * count)
    assert layout.predecessor(lengths, parents).tolist() == [*range(-1, 2 * count - 1)]
    (positions,) = layout.branch_positions(lengths, parents, np.array([count - 1]))
    assert positions.tolist() == [*range(2 * count)]
    assert len(folding.leaf_paths(parents.tolist())[0]) == count
