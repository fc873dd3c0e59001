# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Real trajectories through the real Qwen3 tokenizer, against renderings made with `apply_chat_template` alone."""

from __future__ import annotations

import json
import time

import pytest
from datasets import load_dataset

from hf_prefix_tree.data.prepare import prepare_trees
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.tree.prefix_tree import PrefixTree, fold
from tests.support.branch_parts import supervised_parts


@pytest.fixture(scope="module")
def load(shared_data):
    """`load(name, groups)`: rows of the first groups, each with its tools."""

    def rows_of(name: str, groups: int) -> list[dict]:
        rows = [json.loads(line) for line in shared_data(f"data/{name}.jsonl").read_text().splitlines()]
        tools = json.loads(shared_data(f"data/{name}.tools.json").read_text())
        wanted = list(dict.fromkeys(row["group"] for row in rows))[:groups]
        for row in rows:
            row["tools"] = tools if isinstance(tools, list) else tools[row["group"]]
        return [row for row in rows if row["group"] in wanted]

    return rows_of


def plain_turns(row: dict, tokenizer) -> list[tuple[list[int], int]]:
    """Token ids of every turn's rendering, and where the turn starts, in the plainest way."""
    messages = [{**message, "content": message.get("content") or ""} for message in row["messages"]]
    turns = []
    for t, message in enumerate(messages):
        if message["role"] == "assistant":
            thinking = {} if message.get("reasoning_content") else {"enable_thinking": False}
            options = {"tools": row["tools"], "return_dict": False}
            prompt = tokenizer.apply_chat_template(messages[:t], add_generation_prompt=True, **thinking, **options)
            ids = tokenizer.apply_chat_template(messages[: t + 1], **options)
            assert ids[: len(prompt)] == prompt
            turns.append((ids, len(prompt)))
    return turns


@pytest.mark.parametrize(
    ("name", "groups", "num_turns"),
    [
        ("tau_bench_airline", 1, 60),
        ("conversational_reasoning", 3, 19),
        ("reasoning_tools_multitrial", 1, 14),
    ],
)
def test_unfolding_gives_back_every_rendered_turn(load, qwen3_tokenizer, name, groups, num_turns):
    rows = load(name, groups)
    results = [conversation_branches(row["messages"], qwen3_tokenizer, tools=row["tools"]) for row in rows]
    expected = [turn for row in rows for turn in plain_turns(row, qwen3_tokenizer)]
    assert len(expected) == num_turns
    assert all(result.counts == {} for result in results)
    tree = fold([branch for result in results for branch in result.branches], weighting="branch")
    end, newline = qwen3_tokenizer.convert_tokens_to_ids("<|im_end|>"), qwen3_tokenizer.encode("\n")
    for branch, (ids, start) in zip(tree.branches(), expected, strict=True):
        assert branch.input_ids.tolist() == ids
        assert ids[-2:] == [end, *newline]
        assert branch.weights.tolist() == [0.0] * start + [1.0] * (len(ids) - 1 - start) + [0.0]


@pytest.mark.slow
def test_the_same_through_a_dataset_in_two_processes(load, qwen3_tokenizer, shared_data, tmp_path):
    name = "reasoning_tools_multitrial"
    file = str(shared_data(f"data/{name}.jsonl"))
    tools = json.loads(shared_data(f"data/{name}.tools.json").read_text())
    dataset = load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path)).select(range(6))
    trees = prepare_trees(dataset, qwen3_tokenizer, tools=tools, group_by="group", num_proc=2)
    rows = load(name, 2)[:6]
    assert [row["group"] for row in rows] == ["clinic-0"] * 5 + ["newton-0"]
    unfolded = [branch for row in trees for branch in PrefixTree.from_dict(row).branches()]
    expected = [ids for row in rows for ids, _ in plain_turns(row, qwen3_tokenizer)]
    assert [branch.input_ids.tolist() for branch in unfolded] == expected


@pytest.mark.parametrize("name", ["conversational_reasoning", "reasoning_tools_multitrial"])
def test_reasoning_modes_supervise_the_same_texts(load, qwen3_tokenizer, name):
    for row in load(name, 2)[:4]:
        texts = {
            mode: supervised_parts(
                conversation_branches(row["messages"], qwen3_tokenizer, tools=row["tools"], reasoning=mode).branches,
                qwen3_tokenizer,
            )
            for mode in ("per_turn", "side_leaf", "keep")
        }
        turns = [turn for (turn,) in texts["per_turn"]]
        assert texts["keep"] == [turns]
        *leaves, trunk = texts["side_leaf"]
        assert len(leaves) == sum(bool(message.get("reasoning_content")) for message in row["messages"])
        assert [len(leaf) for leaf in leaves] == list(range(1, len(leaves) + 1))  # every turn here reasons
        assert all(leaf[:-1] == trunk[: len(leaf) - 1] for leaf in leaves)
        # the template strips the line breaks before a content beside reasoning only
        whole = [leaf[-1] + "\n\n" + shown.lstrip("\n") for leaf, shown in zip(leaves, trunk, strict=True)]
        assert whole == turns


def test_single_turns_with_long_reasoning(shared_data, qwen3_tokenizer):
    rows = [json.loads(line) for line in shared_data("data/long_reasoning_singleturn.jsonl").read_text().splitlines()]
    for row in rows[:3]:
        ((whole,),) = supervised_parts(
            conversation_branches(row["messages"], qwen3_tokenizer).branches, qwen3_tokenizer
        )
        split = conversation_branches(row["messages"], qwen3_tokenizer, reasoning="think_split").branches
        (thought,), (answer,) = supervised_parts(split, qwen3_tokenizer)
        answer = answer.lstrip("\n")  # which the template strips beside reasoning only
        assert f"{thought}\n\n{answer}" == whole
        assert thought == "<think>\n" + row["messages"][-1]["reasoning_content"].strip("\n") + "\n</think>"


@pytest.mark.perf
def test_preparation_is_five_times_faster_than_tokenizing_every_rendering(load, qwen3_tokenizer):
    rows = load("tau_bench_airline", 12)

    def seconds(function) -> tuple[float, int]:
        start = time.perf_counter()
        tokens = sum(map(function, rows))
        return time.perf_counter() - start, tokens

    def shared(row: dict) -> int:
        branches = conversation_branches(row["messages"], qwen3_tokenizer, tools=row["tools"]).branches
        return len(fold(branches).input_ids) and sum(map(len, branches))

    def naive(row: dict) -> int:
        messages = [{**message, "content": message.get("content") or ""} for message in row["messages"]]
        options = {"tools": row["tools"], "return_dict": False}
        ends = [t + 1 for t, message in enumerate(messages) if message["role"] == "assistant"]
        return sum(len(qwen3_tokenizer.apply_chat_template(messages[:end], **options)) for end in ends)

    fast, tokens = seconds(shared)
    slow, same_tokens = seconds(naive)
    assert tokens == same_tokens == 4_252_743
    assert slow / fast >= 5
