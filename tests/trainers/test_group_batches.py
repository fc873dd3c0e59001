"""Which rows share a forward: groups stay together, parts keep to the budget, values follow their rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_prefix_tree.rl.folded_rows import TOO_MANY, SortedRows, select_rows
from hf_prefix_tree.tree.prefix_tree import Branch, fold


def padded(rows, prompt_width):
    """Rows as TRL lays them out: prompts padded on the left, completions on the right."""
    completion_width = max(len(completion) for _, completion in rows)
    ids = torch.zeros(len(rows), prompt_width + completion_width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for i, (prompt, completion) in enumerate(rows):
        start = prompt_width - len(prompt)
        stop = prompt_width + len(completion)
        ids[i, start:stop] = torch.tensor([*prompt, *completion])
        mask[i, start:stop] = 1
    return ids, mask


def random_rows(rng, groups, members, deep=True):
    """Shuffled completions of several prompts; with `deep` some completions share their beginning."""
    rows = []
    for _ in range(groups):
        prompt = rng.integers(3, 60, size=rng.integers(4, 9)).tolist()
        stem = rng.integers(3, 60, size=3).tolist() if deep else []
        for member in range(members):
            own = rng.integers(3, 60, size=rng.integers(1, 6)).tolist()
            rows.append((prompt, (stem if member % 2 else []) + own))
    rng.shuffle(rows)
    return rows


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [1, 2, 3, 5, 12])
def test_tokens_are_those_of_the_folded_parts(seed, number):
    rows = random_rows(np.random.default_rng(seed), groups=3, members=4)
    sorted_rows = SortedRows.of(*padded(rows, prompt_width=10))
    parts = sorted_rows.parts(number)
    assert sorted(row for part in parts for row in part) == list(range(12))
    assert {len(part) for part in parts} <= {12 // number, -(-12 // number)}
    expected = [
        len(
            fold([Branch([*prompt, *own], np.ones(len(prompt) + len(own))) for prompt, own in (rows[i] for i in part)])
        )
        for part in parts
    ]
    assert sorted_rows.tokens(number).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_rows_that_stay_together_are_counted_together(seed, number):
    """Five rollouts of two or three rows, some of which share their beginning with rows of other rollouts."""
    sizes = [3, 2, 2, 3, 2]
    rows = random_rows(np.random.default_rng(seed), groups=3, members=4)
    sorted_rows = SortedRows.of(*padded(rows, prompt_width=10), sizes)
    parts = sorted_rows.parts(number)
    assert sorted(rollout for part in parts for rollout in part) == list(range(5))
    ends = np.cumsum(sizes)
    expected = []
    for part in parts:
        members = [[*prompt, *ids] for i in part for prompt, ids in rows[ends[i] - sizes[i] : ends[i]]]
        expected.append(len(fold([Branch(ids, np.ones(len(ids))) for ids in members])))
    assert sorted_rows.tokens(number).tolist() == expected


def test_parts_hold_whole_groups():
    rows = random_rows(np.random.default_rng(0), groups=4, members=8)
    for part in SortedRows.of(*padded(rows, prompt_width=9)).parts(4):
        assert len({tuple(rows[i][0]) for i in part}) == 1


def test_a_strict_prefix_and_a_duplicate_cost_nothing():
    rows = [([5, 6, 7], [8, 9]), ([5, 6, 7], [8]), ([5, 6, 7], [8, 9]), ([5, 6, 7], [])]
    assert SortedRows.of(*padded(rows, prompt_width=3)).tokens(1).tolist() == [5]


def test_parts_without_reuse_count_their_padding():
    rows = [([5, 6, 7], [8, 9]), ([5, 6, 7], [9]), ([10], [11]), ([12], [13, 14])]
    sorted_rows = SortedRows.of(*padded(rows, prompt_width=4))
    assert sorted_rows.tokens(2).tolist() == [6, 5]
    # 9 tokens fold to 6, 5 to 5
    assert sorted_rows.tokens(2, min_reuse=1.5).tolist() == [6, 2 * 6]
    assert sorted_rows.tokens(2, min_reuse=1.51).tolist() == [2 * 6, 2 * 6]


def test_folded_tokens_are_rounded_up_before_reuse_is_judged():
    rows = [([5, 6, 7], [8, 9]), ([5, 6, 7], [9]), ([10], [11]), ([12], [13, 14])]
    sorted_rows = SortedRows.of(*padded(rows, prompt_width=4))
    assert sorted_rows.tokens(2, min_reuse=1.1, multiple=4).tolist() == [8, 2 * 6]  # reuse 9 / 8 and 5 / 8
    assert sorted_rows.tokens(2, min_reuse=1.2, multiple=4).tolist() == [2 * 6, 2 * 6]
    assert sorted_rows.totals(2, budget=12, min_reuse=1.2, multiple=4).tolist() == [TOO_MANY, 24]


def test_fewest_tokens_within_the_budget():
    # 3 groups of 4, each a prompt of 6 and completions of 2: 14 tokens
    rows = [([i, 1, 2, 3, 4, 5], [10 + j, 7]) for j in range(4) for i in (20, 21, 22)]
    sorted_rows = SortedRows.of(*padded(rows, prompt_width=6))
    one, two, three, four = sorted_rows.totals(4, budget=42).tolist()
    assert (one, two, three, four) == (42, 48, 42, 60)  # two and four parts cut groups
    assert sorted_rows.totals(4, budget=41).tolist() == [TOO_MANY, 48, 42, 60]
    assert sorted_rows.totals(4, budget=14).tolist() == [TOO_MANY, TOO_MANY, 42, 60]
    # streamed, parts of more than the budget cost a forward more
    assert sorted_rows.totals(4, budget=14, streams=True).tolist() == [42 + 14, 48 + 16, 42, 60 + 2 * 6]
    assert sorted_rows.totals(4, budget=13, streams=True).tolist() == [42 + 14, 48 + 16, 42 + 3 * 4, 60 + 2 * 6]
    # the last number is what the caller can do at any rate
    assert sorted_rows.totals(2, budget=1).tolist() == [TOO_MANY, 48]


def test_values_follow_their_rows():
    batches = [
        {"ids": torch.tensor([[1, 2], [3, 4]]), "names": ["a", "b"], "items": torch.tensor(7), "none": None},
        {"ids": torch.tensor([[5, 6], [7, 8]]), "names": ["c", "d"], "items": torch.tensor(7), "none": None},
    ]
    chosen = select_rows(batches, [3, 0, 2])
    assert chosen["ids"].tolist() == [[7, 8], [1, 2], [5, 6]]
    assert chosen["names"] == ["d", "a", "c"]
    assert chosen["items"].item() == 7 and chosen["none"] is None


def test_padding_does_not_matter():
    rows = random_rows(np.random.default_rng(1), groups=2, members=3)
    ids, mask = padded(rows, prompt_width=12)
    other = torch.where(mask.bool(), ids, torch.randint(3, 60, ids.shape))
    one, two = SortedRows.of(ids, mask), SortedRows.of(other, mask)
    assert np.array_equal(one.order, two.order) and np.array_equal(one.shared, two.shared)
