# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trees packed into rows: nothing is lost, no row is too long, and parts of a split tree bind no other one."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset, IterableDataset, concatenate_datasets, load_from_disk

from hf_prefix_tree.data import packed as packed_module
from hf_prefix_tree.data.prepare import prepare_trees
from hf_prefix_tree.tree.packing import pack_rows
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

FORK = {
    "branches": [{"input_ids": [5, 6, 7], "weights": [0, 1, 1]}, {"input_ids": [5, 6, 8, 9], "weights": [0, 1, 1, 1]}]
}


def random_rows(num_trees: int, seed: int) -> list[dict]:
    """Trees of 2 to 40 branches; some supervise nothing of their own."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_trees):
        trunk = rng.integers(1, 4, rng.integers(2, 9)).tolist()
        branches = []
        for _ in range(rng.choice([2, 3, 8, 40])):
            ids = trunk[: rng.integers(1, len(trunk) + 1)] + rng.integers(1, 4, rng.integers(1, 9)).tolist()
            branches.append({"input_ids": ids, "weights": rng.choice([0.0, 0.5, 1.0], len(ids)).tolist()})
        rows.append({"branches": branches})
    return rows


def weights_by_path(tree: PrefixTree, tree_id: int) -> dict[tuple, tuple[float, int]]:
    """Weight and g of every supervised token, by the tree and the tokens up to it."""
    found = {}
    for branch, path in zip(tree.branches(), tree.paths(), strict=True):
        for at, index in enumerate(path.tolist()):
            if tree.weights[index] > 0:
                key = (tree_id, *branch.input_ids[: at + 1].tolist())
                found[key] = (float(tree.weights[index]), int(tree.branch_count[index]))
    return found


def rows_of(dataset) -> list[list[tuple[int, PrefixTree]]]:
    rows = [list(zip(row["tree_ids"], map(PrefixTree.from_dict, row["trees"]), strict=True)) for row in dataset]
    assert all(set(row) == {"trees", "tree_ids", "num_parts"} for row in dataset)
    found = Counter(tree_id for row in rows for tree_id, _ in row)
    assert [row["num_parts"] for row in dataset] == [[found[tree_id] for tree_id, _ in row] for row in rows]
    return rows


def numbered(rows, whole: list[PrefixTree]) -> list[list[tuple[int, PrefixTree]]]:
    """The same rows with the index of each tree instead of its id, found by the tree's supervised paths."""
    paths = [weights_by_path(tree, 0).keys() for tree in whole]
    names: dict[int, int] = {}
    for tree_id in {tree_id for row in rows for tree_id, _ in row}:
        own = set().union(*(weights_by_path(tree, 0) for row in rows for i, tree in row if i == tree_id))
        (names[tree_id],) = [i for i, expected in enumerate(paths) if expected == own]
    assert len(set(names.values())) == len(whole) == len(names)
    return [[(names[i], tree) for i, tree in row] for row in rows]


def check_rows(rows, whole: list[PrefixTree], max_tokens: int) -> dict[int, list[int]]:
    """All that must hold for any packing of these trees; gives the rows of each split tree."""
    expected = {key: value for i, tree in enumerate(whole) for key, value in weights_by_path(tree, i).items()}
    found: dict = {}
    rows_of_parts: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        assert 0 < sum(len(tree) for _, tree in row) <= max_tokens
        parts = [tree_id for tree_id, tree in row if tree != whole[tree_id]]
        assert len(parts) <= 1
        for tree_id in parts:
            rows_of_parts.setdefault(tree_id, []).append(number)
        for tree_id, tree in row:
            assert tree.num_branches == whole[tree_id].num_branches
            own = weights_by_path(tree, tree_id)
            assert not own.keys() & found.keys()  # supervised exactly once
            found |= own
    assert found == expected
    for numbers in rows_of_parts.values():
        assert all(after == before + 1 for before, after in pairwise(numbers))
    return rows_of_parts


@pytest.mark.parametrize("pack_trees", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_packed_rows_hold_the_whole_trees(seed, pack_trees):
    dataset = Dataset.from_list(random_rows(25, seed))
    whole = [PrefixTree.from_dict(row) for row in prepare_trees(dataset)]
    counts: dict = {}
    packed = prepare_trees(dataset, max_packed_tokens=32, pack_trees=pack_trees, counts=counts)
    rows = rows_of(packed)
    split = check_rows(numbered(rows, whole), whole, 32)
    assert set(split) == {i for i, tree in enumerate(whole) if len(tree) > 32}
    tokens = sum(len(tree) for row in rows for _, tree in row)
    assert counts["packed_rows"] == len(rows) and counts["fill"] == pytest.approx(tokens / (32 * len(rows)))
    assert counts["split_trees"] == len(split) > 3
    assert counts["parts"] - counts["weightless_parts"] == sum(map(len, split.values()))
    if counts["weightless_parts"] == 0:
        assert counts["duplicated_tokens"] == tokens - sum(map(len, whole))
    if pack_trees:
        assert counts["fill"] > 0.8 and len(rows) < len(whole) - len(split) + counts["parts"]
    else:
        assert [len(row) for row in rows] == [1] * len(rows)


def test_two_processes_and_disk_give_the_same(tmp_path):
    Dataset.from_list(random_rows(40, 5)).save_to_disk(tmp_path / "rows")
    dataset = load_from_disk(tmp_path / "rows")
    packed = prepare_trees(dataset, max_packed_tokens=32)
    assert packed.cache_files  # not held in memory
    two = prepare_trees(dataset, max_packed_tokens=32, num_proc=2)
    assert rows_of(two) == rows_of(packed)
    packed.save_to_disk(tmp_path / "packed")
    loaded = load_from_disk(tmp_path / "packed")
    assert rows_of(loaded) == rows_of(packed)
    assert loaded.features["trees"].feature["weights"].feature.dtype == "float64"


def test_best_fit_of_literal_lengths(caplog):
    rows = [{"input_ids": list(range(1, n + 1))} for n in (3, 7, 5, 2, 4)]
    counts: dict = {}
    packed = prepare_trees(Dataset.from_list(rows), max_packed_tokens=10, counts=counts)
    assert [[len(tree["input_ids"]) for tree in row["trees"]] for row in packed] == [[3, 7], [5, 4], [2]]
    assert packed["num_parts"][:] == [[1, 1], [1, 1], [1]]
    assert packed[1]["trees"][1]["input_ids"] == [1, 2, 3, 4]
    assert list(packed[1]["trees"][1]) == list(fold([Branch([1, 2], [0, 1])]).to_dict())
    assert counts["fill"] == 21 / 30
    assert caplog.messages[-1] == "Packed into 3 rows of at most 10 tokens, 70.0 % full."


def test_a_split_tree_of_literal_values(caplog):
    fork = {"branches": [FORK["branches"][0], {"input_ids": [5, 6, 8, 9, 4], "weights": [0, 1, 1, 0, 1]}]}
    rows = [{"branches": [{"input_ids": [1, 2], "weights": [0, 1]}]}, fork]
    counts: dict = {}
    packed = prepare_trees(Dataset.from_list(rows), max_packed_tokens=5, counts=counts)
    (part,), (small, other_part) = packed["tree_ids"]
    assert part == other_part != small
    assert packed["num_parts"][:] == [[2], [1, 2]]
    assert [
        [(tree["input_ids"], tree["weights"], tree["num_branches"]) for tree in row["trees"]] for row in packed
    ] == [
        [([5, 6, 8, 9, 4], [0, 1, 0.5, 0, 0.5], 2)],
        [([1, 2], [0, 1], 1), ([5, 6, 7], [0, 0, 0.5], 2)],
    ]
    assert (counts["split_trees"], counts["parts"], counts["duplicated_tokens"], counts["fill"]) == (1, 2, 2, 1.0)
    assert "Packed into 2 rows of at most 5 tokens, 100.0 % full; 1 trees split into 2 parts, 2 tokens" in caplog.text


def test_a_part_without_supervised_token_is_left_out():
    row = {
        "branches": [
            {"input_ids": [1, 2, 3, 4], "weights": [0, 1, 0, 1]},
            {"input_ids": [1, 2, 5], "weights": [0, 1, 0]},
        ]
    }
    counts: dict = {}
    packed = prepare_trees(Dataset.from_list([row]), max_packed_tokens=4, counts=counts)
    assert [tree["input_ids"] for row in packed for tree in row["trees"]] == [[1, 2, 3, 4]]
    assert packed[0]["trees"][0]["weights"] == [0, 1, 0, 0.5]
    assert packed[0]["num_parts"] == [1]  # what is left out is not waited for
    assert (counts["parts"], counts["weightless_parts"], counts["packed_rows"]) == (2, 1, 1)


def test_trees_apart_open_rows_of_their_own():
    assert pack_rows([3, 3, 4, 7], 10) == [[0, 3], [1, 2]]
    assert pack_rows([3, 3, 4, 7], 10, apart=[0, 1]) == [[0, 3], [1, 2]]
    assert pack_rows([4, 4, 2, 1], 10) == [[0, 1, 2], [3]]
    assert pack_rows([4, 4, 2, 1], 10, apart=[0, 1]) == [[0, 2, 3], [1]]
    assert pack_rows([4, 4], 10, apart=[1, 0]) == [[0], [1]]


# --- trees that are too large ---------------------------------------------------------------------------------------

SMALL = {"branches": [{"input_ids": [1, 2], "weights": [0.0, 1.0]}]}


def test_large_trees_are_dropped_and_counted(caplog):
    counts: dict = {}
    packed = prepare_trees(Dataset.from_list([FORK, SMALL]), max_packed_tokens=4, overflow="drop", counts=counts)
    assert [[tree["input_ids"] for tree in row["trees"]] for row in packed] == [[[1, 2]]]
    assert (counts["oversized"], counts["empty"], counts["trees"], counts["branches"]) == (1, 0, 1, 1)
    assert "1 trees dropped as larger than `max_packed_tokens`" in caplog.text
    with pytest.raises(ValueError, match=r"0 branches.*1 trees"):
        prepare_trees(Dataset.from_list([FORK]), max_packed_tokens=4, overflow="drop")


def test_large_trees_stop_the_preparation(caplog):
    dataset = Dataset.from_list([SMALL, FORK])
    with pytest.raises(ValueError, match=r"row 1.*`max_packed_tokens`.*4"):
        prepare_trees(dataset, max_packed_tokens=4, overflow="raise")
    packed = prepare_trees(dataset, max_packed_tokens=4, overflow="raise", on_error="skip")
    assert [[tree["input_ids"] for tree in row["trees"]] for row in packed] == [[[1, 2]]]
    assert "1 rows skipped" in caplog.text and "row 1: its tree has 5 tokens" in caplog.text
    with pytest.raises(ValueError, match=r"row 1.*`max_packed"):
        prepare_trees(dataset, max_packed_tokens=3)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"max_length": 9, "max_packed_tokens": 8}, "`max_length`.*9.*`max_packed_tokens`.*8"),
        ({"max_packed_tokens": 1}, "`max_packed_tokens`.*1"),
        ({"max_packed_tokens": 8, "overflow": "cut"}, "`overflow`.*'cut'"),
    ],
)
def test_errors(options, expected):
    with pytest.raises(ValueError, match=expected):
        prepare_trees(Dataset.from_list([SMALL]), **options)


def test_max_length_caps_branches_before_they_are_packed():
    counts: dict = {}
    packed = prepare_trees(Dataset.from_list([FORK, SMALL]), max_length=3, max_packed_tokens=4, counts=counts)
    assert counts["truncated"] == 1 and counts["split_trees"] == 0
    assert sorted(tree["input_ids"] for row in packed for tree in row["trees"]) == [[1, 2], [5, 6, 7, 8]]


# --- trees that are folded already, and streams ---------------------------------------------------------------------


def test_folded_trees_are_packed_and_packed_rows_are_left_alone():
    dataset = Dataset.from_list(random_rows(12, 7))
    whole = prepare_trees(dataset)
    packed = prepare_trees(whole, max_packed_tokens=32)
    assert rows_of(packed) == rows_of(prepare_trees(dataset, max_packed_tokens=32))
    assert prepare_trees(packed) is packed
    for options in ({"max_packed_tokens": 32}, {"max_examples": 2}, {"counts": {}}):
        with pytest.raises(ValueError, match="`dataset`"):
            prepare_trees(packed, **options)
    for options in ({"max_length": 5}, {"overlong": "drop"}, {"reasoning": "keep"}, {"group_by": "trees"}):
        (name,) = options
        with pytest.raises(ValueError, match=rf"`{name}`.*`dataset`"):
            prepare_trees(packed, **options)


def test_packed_rows_of_another_weighting_are_refused():
    packed = prepare_trees(Dataset.from_list([SMALL, FORK]), max_packed_tokens=4, weighting="branch")
    stream = packed.to_iterable_dataset()
    assert prepare_trees(packed, weighting="branch") is packed
    assert rows_of(list(prepare_trees(stream, weighting="branch"))) == rows_of(packed)
    message = "`weighting` is 'tree'.*`dataset`.*'branch'"
    with pytest.raises(ValueError, match=message):
        prepare_trees(packed)
    with pytest.raises(ValueError, match=message):
        prepare_trees(packed.select([1]))
    with pytest.raises(ValueError, match=message):
        list(prepare_trees(stream))


def test_ids_tell_trees_apart_within_a_dataset_and_across_datasets():
    same = [FORK, SMALL, FORK, SMALL]
    first = prepare_trees(Dataset.from_list(same), max_packed_tokens=4)
    ids = Counter(i for row in first["tree_ids"] for i in row)
    assert sorted(ids.values()) == [1, 1, 2, 2]  # four trees, two of them in two parts each
    assert all(0 <= i < 2**63 for i in ids)
    others = [{"branches": [{**branch, "input_ids": [9, *branch["input_ids"]], "weights": [0, *branch["weights"]]}
                            for branch in row["branches"]]} for row in same]  # fmt: skip
    second = prepare_trees(Dataset.from_list(others), max_packed_tokens=5)
    rows_of(concatenate_datasets([first, second]))  # each id has its number of parts
    again = prepare_trees(Dataset.from_list(same), max_packed_tokens=4, num_proc=2)
    assert again["tree_ids"][:] == first["tree_ids"][:]


@pytest.mark.parametrize("pack_trees", [True, False])
def test_a_stream_is_packed_within_its_buffer(monkeypatch, pack_trees):
    rows = random_rows(25, 1)
    whole = [PrefixTree.from_dict(row) for row in prepare_trees(Dataset.from_list(rows))]

    def packed_stream():
        stream = IterableDataset.from_generator(lambda: iter(rows))
        return prepare_trees(stream, max_packed_tokens=32, pack_trees=pack_trees)

    def checked(dataset) -> list[list[int]]:
        found = numbered(rows_of(list(dataset)), whole)
        check_rows(found, whole, 32)
        return [[i for i, _ in row] for row in found]

    at_once = checked(packed_stream())
    expected = prepare_trees(Dataset.from_list(rows), max_packed_tokens=32, pack_trees=pack_trees)
    assert at_once == checked(expected)
    assert [row["tree_ids"] for row in packed_stream()] == expected["tree_ids"][:]
    monkeypatch.setattr(packed_module, "STREAM_BUFFER", 5)
    in_fives = checked(packed_stream())
    assert all(len({tree // 5 for tree in row}) == 1 for row in in_fives)
    assert (in_fives == at_once) is not pack_trees
    assert prepare_trees(packed_stream()).features == packed_module.PACKED_FEATURES
