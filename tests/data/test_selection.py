# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Selection of the best rows or groups: literal scores, order, replacements, counts."""

from __future__ import annotations

import pytest
from datasets import Dataset, IterableDataset

from hf_prefix_tree.data.prepare import prepare_trees
from hf_prefix_tree.data.selection import METRICS
from hf_prefix_tree.tree.prefix_tree import PrefixTree

CALL = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(text: str | None, thought: str = "", calls: list | None = None) -> dict:
    return {"role": "assistant", "content": text, "reasoning_content": thought or None, "tool_calls": calls}


# Visible characters before each turn (thoughts don't count): 4, 4 + 2 + 3 = 9, 9 + 1 + 9 (the call) + 2 = 21.
LONG = [user("uuuu"), says("aa"), user("vvv"), says("b", "bbbbbb", [CALL]), user("ww"), says("c")]
REASONS = [user("x" * 20), says("<think>\nhm\n</think>\n\ndone")]
PLAIN = [user("y" * 100), says("no")]
SCORES = {  # per mode: of LONG, REASONS, PLAIN
    "per_turn": (4 + 9, 20, 0),  # LONG: its last turn has no reasoning, so nothing forks there
    "side_leaf": (9, 20, 0),
    "keep": (0, 0, 0),
}


def selected(rows: list[dict], tokenizer=None, **options) -> list[int]:
    """Which rows became trees, in order: each is known by its own last message."""
    prepared = prepare_trees(Dataset.from_list(rows), tokenizer, **options)
    texts = [row["messages"][-1]["content"].split("\n")[-1] for row in rows]
    found = []
    for tree in map(PrefixTree.from_dict, prepared):
        last = tokenizer.decode(tree.branches()[-1].input_ids)
        found.append(next(i for i, text in enumerate(texts) if f"{text}<|im_end|>" in last.replace("\n<|im", "<|im")))
    return found


@pytest.mark.parametrize("mode", ["per_turn", "side_leaf"])
def test_forked_contexts_of_literal_conversations(tiny_tokenizer, mode):
    from hf_prefix_tree.data.rows import RowOptions
    from hf_prefix_tree.data.selection import _score_row

    def score(row: dict, kind: str = "conversation", reasoning: str = mode) -> dict:
        options = RowOptions(kind, reasoning=reasoning)
        return _score_row(row, 0, "forked_context", options, "raise")

    for own_mode, expected in SCORES.items():
        assert [score({"messages": m}, reasoning=own_mode)["score"] for m in (LONG, REASONS, PLAIN)] == list(expected)
    assert score({"messages": LONG})["last"] == 4 + 2 + 3 + 1 + 9 + 2
    assert score({"messages": REASONS})["last"] == 0
    # Completions fork from their prompt: all but the last count where they are.
    assert score({"prompt": "12345", "completions": ["a", "b", "c"]}, "completions") == {"score": 10, "last": 5}
    assert score({"prompt": "12345", "completion": "a"}, "completion") == {"score": 0, "last": 5}
    assert score({"prompt": LONG[:3], "completion": LONG[3:]}, "completion") == {
        "score": 9,
        "last": 21,
    }


def raw(turns: int, thoughts: int, *, num_turns: int | None = None, usage: tuple[int, int] | None = None) -> dict:
    """A raw trajectory: `prompt` and `completion`, and what the environment counted."""
    says_all = [m for i in range(turns) for m in (says(f"a{i}", "hm" if i < thoughts else ""), user(f"u{i}"))]
    tokens = dict(zip(("final_input_tokens", "final_output_tokens"), usage or (None, None), strict=True))
    columns = {"num_turns": num_turns, "token_usage": tokens}
    return {"prompt": [user("q")], "completion": says_all[:-1], **columns}


def test_the_published_branching_score(tiny_tokenizer, caplog):
    rows = [
        raw(1, 1, num_turns=3),  # (1 + 1) * max(3, 1) = 6
        raw(4, 0),  # (0 + 1) * 4 = 4
        raw(3, 2, num_turns=1),  # (2 + 1) * max(1, 3) = 9
        raw(6, 6, usage=(900, 101)),  # 42, but too long
        raw(2, 0, usage=(900, 100)),  # 2
    ]
    counts: dict = {}
    options = {"selection_metric": "branching_score", "max_examples": 9, "counts": counts}
    prepare_trees(Dataset.from_list(rows), tiny_tokenizer, max_length=1000, **options)
    assert counts["sources"].tolist() == [2, 0, 1, 4]
    assert (counts["candidates"], counts["too_long"], counts["selected"]) == (4, 1, 4)
    assert "(4 candidates, 1 more are too long by `token_usage`)" in caplog.text
    prepare_trees(Dataset.from_list(rows), tiny_tokenizer, **options)  # no limit
    assert counts["sources"].tolist() == [3, 2, 0, 1, 4] and counts["too_long"] == 0
    with pytest.raises(ValueError, match=r"`token_usage`.*1 rows.*`max_length`"):
        prepare_trees(Dataset.from_list(rows[3:4]), tiny_tokenizer, max_length=1000, **options)
    # Its trees are rejected, not cut: a branch above `max_length`, or a tree above `max_packed_tokens`.
    limits = {"max_length": 60, "overlong": "raise", "on_error": "skip", "max_packed_tokens": 70, "overflow": "drop"}
    prepare_trees(Dataset.from_list(rows), tiny_tokenizer, reasoning="side_leaf", **limits, **options)
    assert (counts["skipped"], counts["oversized"]) != (0, 0) and counts["truncated"] == counts["overlong"] == 0
    assert 0 < counts["selected"] < 4 and counts["longest_path"] <= 60


def test_the_highest_score_comes_first_ties_by_index(tiny_tokenizer):
    rows = [{"messages": m} for m in (PLAIN, LONG, REASONS)]
    options = {"selection_metric": "forked_context", "selection_num_proc": 2}
    assert selected(rows, tiny_tokenizer, max_examples=3, **options) == [2, 1, 0]
    assert selected(rows, tiny_tokenizer, max_examples=2, **options) == [2, 1]
    twice = [{"messages": [*m[:-1], says(f"{i}{i}{i}")]} for i, m in enumerate((PLAIN, LONG, PLAIN, LONG))]
    assert selected(twice, tiny_tokenizer, max_examples=9, **options) == [1, 3, 0, 2]
    assert selected(twice, tiny_tokenizer, max_examples=2, selection_metric="num_turns") == [1, 3]


def test_nothing_that_forks_is_said(tiny_tokenizer, caplog):
    rows = [{"messages": m} for m in (PLAIN, LONG)]
    options = {"selection_metric": "forked_context", "reasoning": "keep", "max_examples": 1}
    assert selected(rows, tiny_tokenizer, **options) == [0]
    assert "`selection_metric='forked_context'` is 0 for all of 2 rows or groups" in caplog.text


def test_groups_are_scored_and_taken_whole(tiny_tokenizer):
    rows = [
        {"messages": [user("q" * 9), says(f"{group}{i}")], "group": group}
        for i, group in enumerate(["a", "b", "b", "c", "b", "c"])
    ]
    options = {"group_by": "group", "max_examples": 2, "selection_num_proc": 2}
    for metric in METRICS:  # 3 trials share their prompt twice, 2 once, 1 never
        prepared = prepare_trees(Dataset.from_list(rows), tiny_tokenizer, selection_metric=metric, **options)
        texts = [
            [
                tiny_tokenizer.decode(branch.input_ids[branch.weights > 0])
                for branch in PrefixTree.from_dict(tree).branches()
            ]
            for tree in prepared
        ]
        end = "<|im_end|>"
        assert texts == [[f"b1{end}", f"b2{end}", f"b4{end}"], [f"c3{end}", f"c5{end}"]], metric
    (first,) = prepare_trees(Dataset.from_list(rows), tiny_tokenizer, group_by="group", max_examples=1)
    assert first["num_branches"] == 1


def token_row(*branches: list[int]) -> dict:
    return {"branches": [{"input_ids": ids, "weights": [1.0] * len(ids)} for ids in branches]}


# Token ratios 1, 7 / 5, 4 / 3, 7 / 5; pair ratios 1, 16 / 13, 6 / 5, 16 / 13.
TOKEN_ROWS = [
    token_row([1, 2, 3]),
    token_row([1, 2, 3], [1, 2, 4, 5]),
    token_row([1, 2], [1, 3]),
    token_row([1, 2, 3], [1, 2, 4, 6]),
]


@pytest.mark.parametrize("metric", ["token_ratio", "pair_ratio"])
def test_ratios_order_the_prepared_trees(metric, caplog):
    counts: dict = {}
    options = {"selection_metric": metric, "counts": counts}
    prepared = prepare_trees(Dataset.from_list(TOKEN_ROWS), max_examples=3, selection_num_proc=2, **options)
    assert [row["input_ids"] for row in prepared] == [[1, 2, 4, 5, 3], [1, 2, 4, 6, 3], [1, 2, 3]]
    # Pairs: branches 6 + 10, 6 + 10, 3 + 3; trees 1 + 2 + 3 + 4 + 3, the same, 1 + 2 + 2.
    assert (counts["branch_pairs"], counts["tree_pairs"]) == (16 + 16 + 6, 13 + 13 + 5)
    assert {name: counts[name] for name in ("candidates", "valid", "selected", "rows", "trees", "max_branches")} == {
        "candidates": 4,
        "valid": 4,
        "selected": 3,
        "rows": 3,
        "trees": 3,
        "max_branches": 2,
    }
    assert caplog.messages[0] == (
        "Selected 3 trees of 4 valid ones among 4 prepared (4 candidates): K 2.00 on average and 2 at most, 13 "
        "tokens, longest path 4, token ratio 1.38, pair ratio 1.23."
    )
    assert len(prepare_trees(Dataset.from_list(TOKEN_ROWS), max_examples=99, **options)) == 4


BAD = {"branches": [{"input_ids": [1], "weights": [1.0, 1.0]}]}
UNSUPERVISED = {"branches": [{"input_ids": [1, 2], "weights": [0.0, 0.0]}]}


@pytest.mark.parametrize("metric", [None, "token_ratio"])
def test_invalid_trees_are_replaced_by_the_next(metric, caplog):
    rows = [BAD, UNSUPERVISED, TOKEN_ROWS[1], token_row([1, 2, 3, 4, 5, 6]), TOKEN_ROWS[2], TOKEN_ROWS[0]]
    counts: dict = {}
    prepared = prepare_trees(
        Dataset.from_list(rows),
        selection_metric=metric,
        max_examples=2,
        on_error="skip",
        max_packed_tokens=5,
        overflow="drop",
        counts=counts,
    )
    trees = [tree["input_ids"] for row in prepared for tree in row["trees"]]
    assert sorted(trees) == [[1, 2, 3], [1, 2, 4, 5, 3]]
    assert counts["tree_tokens"] == 8 and counts["selected"] == 2
    assert (counts["skipped"], counts["unsupervised"], counts["oversized"]) == (1, 1, 1)
    assert "1 rows skipped; 1 trees dropped as larger" in caplog.text and "row 0: `weights` has 2" in caplog.text
    with pytest.raises(ValueError, match=r"row 0.*`weights`.*2"):
        prepare_trees(Dataset.from_list(rows), selection_metric=metric, max_examples=2)


def test_an_error_names_the_row_of_the_dataset_not_of_the_candidates(tiny_tokenizer):
    rows = [
        {"messages": m} for m in (PLAIN, PLAIN, [*LONG, user("late"), {"role": "nobody", "content": "x"}, says("z")])
    ]
    options = {"selection_metric": "num_turns", "max_examples": 1}
    with pytest.raises(ValueError, match="row 2"):
        prepare_trees(Dataset.from_list(rows), tiny_tokenizer, max_length=2, overlong="raise", **options)


def test_an_unreadable_row_comes_last(tiny_tokenizer):
    rows = [{"messages": "[1"}, {"messages": "[]"}]
    rows += [
        {"messages": f'[{{"role": "user", "content": "u"}}, {{"role": "assistant", "content": "{i}"}}]'}
        for i in range(2)
    ]
    options = {"selection_metric": "num_turns", "max_examples": 3, "on_error": "skip"}
    counts: dict = {}
    prepared = prepare_trees(Dataset.from_list(rows), tiny_tokenizer, counts=counts, **options)
    assert len(prepared) == 2 and counts["skipped"] == 2 and counts["candidates"] == 4
    with pytest.raises(ValueError, match=r"row 0.*`messages`.*JSON"):
        prepare_trees(Dataset.from_list(rows), tiny_tokenizer, **{**options, "on_error": "raise"})


def test_the_first_of_a_stream():
    stream = IterableDataset.from_generator(lambda: iter([UNSUPERVISED, *TOKEN_ROWS]))
    trees = [list(row["input_ids"]) for row in prepare_trees(stream, max_examples=2)]
    assert trees == [[1, 2, 3], [1, 2, 4, 5, 3]]
    (row,) = prepare_trees(stream, max_examples=2, max_packed_tokens=8)
    assert [list(tree["input_ids"]) for tree in row["trees"]] == trees


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"selection_metric": "size", "max_examples": 1},
            "`selection_metric`.*'size'",
        ),
        ({"selection_metric": "token_ratio"}, "`selection_metric`.*'token_ratio'.*`max_examples`.*None"),
        ({"max_examples": 0}, "`max_examples`.*0"),
        (
            {"selection_metric": "num_turns", "max_examples": 1},
            "branches.*'token_ratio'",
        ),
    ],
)
def test_errors(options, expected):
    with pytest.raises(ValueError, match=expected):
        prepare_trees(Dataset.from_list(TOKEN_ROWS), **options)


def test_what_a_stream_can_not_do():
    stream = IterableDataset.from_generator(lambda: iter(TOKEN_ROWS))
    for options, expected in (
        ({"selection_metric": "token_ratio", "max_examples": 1}, "`selection_metric`"),
        ({"counts": {}}, "`counts`"),
        ({"selection_num_proc": 2}, "`selection_num_proc`.*2"),
    ):
        with pytest.raises(ValueError, match=expected):
            prepare_trees(stream, **options)
