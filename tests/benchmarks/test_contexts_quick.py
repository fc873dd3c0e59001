"""The experiment on served contexts runs on a CPU; held-out turns and the tool world are as described."""

from __future__ import annotations

import pytest

from benchmarks import contexts


@pytest.mark.slow
def test_all_sides_train_and_are_evaluated_alike():
    rows = contexts.main(["--quick"])
    assert [row["side"] for row in rows] == ["stock", "flat", "tree"]
    assert all(row["steps"] == 1 and row["before"] == rows[0]["before"] for row in rows)
    assert all(0 < row["before"] - row["held_out"] < 0.1 for row in rows)  # one step of a small learning rate
    assert len({row["held_out"] for row in rows}) == 3


def test_held_out_groups_are_not_trained_on():
    train, test = contexts.split([{"group": group} for group in "aabbccddeeffgghh"])
    assert [row["group"] for row in test] == list("ddhh")
    assert [row["group"] for row in train] == list("aabbcceeffgg")


def test_the_answer_of_the_tool_world_follows_from_stripped_reasoning():
    for row in contexts.tool_world(20, seed=1):
        question, call, *_, asked, answer = row["messages"]
        words = question["content"].split()
        slot = (int(words[4]) + int(words[7])) % 7
        assert call["tool_calls"][0]["function"]["arguments"] == {"slot": slot}
        assert answer["content"] == str(slot * int(asked["content"].split()[-1].rstrip("?")))
