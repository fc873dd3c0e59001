# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The demo's dialogues, tokenizer and chat template."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from transformers import AutoTokenizer

from examples.demo.dialogues import as_json_strings, dialogue_texts, generate_dialogues
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import PrefixTree, conversation_branches, prepare_trees

ROWS = generate_dialogues(num_groups=6, trials=4, seed=3)
ASSISTANT_TURNS = [
    (row, t) for row in ROWS for t, message in enumerate(row["messages"]) if message["role"] == "assistant"
]


def render(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)


def token_ids(tokenizer: Any, row: dict[str, Any], stop: int, **kwargs: Any) -> list[int]:
    messages = row["messages"][:stop]
    return tokenizer.apply_chat_template(messages, tools=row["tools"], return_dict=False, **kwargs)


def test_dialogues_depend_on_the_seed_alone():
    assert generate_dialogues(6, 4, seed=3) == ROWS
    assert generate_dialogues(6, 4, seed=4) != ROWS
    # A row does not depend on how many others are asked for.
    assert generate_dialogues(2, 1, seed=3) == [ROWS[0], ROWS[4]]


def test_trials_share_the_beginning_and_part_later():
    for group in range(6):
        trials = [row["messages"] for row in ROWS if row["group"] == f"desk-{group}"]
        assert len(trials) == 4
        assert [row["trial"] for row in ROWS if row["group"] == f"desk-{group}"] == [0, 1, 2, 3]
        assert all(messages[:2] == trials[0][:2] for messages in trials)
        assert len({json.dumps(messages) for messages in trials}) == 4
    assert len({row["messages"][1]["content"] for row in ROWS}) == 6


def test_messages_have_the_variety_of_real_agent_data():
    turns = [row["messages"][t] for row, t in ASSISTANT_TURNS]
    tool_turns = [turn for turn in turns if "tool_calls" in turn]
    with_reasoning = sum("reasoning_content" in turn for turn in turns)
    assert 0.6 < with_reasoning / len(turns) < 0.9
    assert {len(turn["tool_calls"]) for turn in tool_turns} == {1, 2}
    assert {turn["content"] for turn in tool_turns} == {None, "One moment, please."}
    assert all(turn["content"] for turn in turns if "tool_calls" not in turn)
    users = [sum(message["role"] == "user" for message in row["messages"]) for row in ROWS]
    assert min(users) == 2 and max(users) >= 4


def test_tool_calls_fit_their_schemas_and_are_answered_in_order():
    for row in ROWS:
        schemas = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in row["tools"]}
        calls: list[dict[str, Any]] = []
        for message in row["messages"]:
            if message["role"] == "tool":
                call = calls.pop(0)
                assert (message["tool_call_id"], message["name"]) == (call["id"], call["function"]["name"])
            else:
                assert calls == []
            for call in message.get("tool_calls", []):
                assert list(call["function"]["arguments"]) == schemas[call["function"]["name"]]
                calls.append(call)


def test_known_conversation_renders_to_known_text(tiny_tokenizer):
    call = {"type": "function", "function": {"name": "find", "arguments": {"plant": "lady fern", "count": 2}}}
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "A fern?"},
        {"role": "assistant", "reasoning_content": "Look.", "tool_calls": [call, call]},  # no content at all
        {"role": "tool", "content": "none"},
        {"role": "assistant", "content": None, "reasoning_content": None, "tool_calls": [call]},
        {"role": "tool", "content": "one"},
        {"role": "assistant", "content": "One left.", "reasoning_content": "Good."},
    ]
    called = '<tool_call>{"name": "find", "arguments": {"plant": "lady fern", "count": 2}}</tool_call>'
    expected = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nA fern?<|im_end|>\n"
        f"<|im_start|>assistant\n<think>\nLook.\n</think>\n\n{called}\n{called}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>none</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{called}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>one</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\nGood.\n</think>\n\nOne left.<|im_end|>\n"
    )
    assert render(tiny_tokenizer, messages) == expected
    # A later user message makes all of them earlier turns.
    thanks = {"role": "user", "content": "Thanks."}
    stripped = expected.replace("<think>\nLook.\n</think>\n\n", "").replace("<think>\nGood.\n</think>\n\n", "")
    assert render(tiny_tokenizer, [*messages, thanks]) == stripped + "<|im_start|>user\nThanks.<|im_end|>\n"
    # Arguments that come as JSON text already are not encoded again.
    as_text = {"function": {"name": "find", "arguments": json.dumps(call["function"]["arguments"])}}
    assert called in render(tiny_tokenizer, [*messages[:2], {"role": "assistant", "tool_calls": [as_text]}])


def test_tools_are_listed_in_the_system_message_with_or_without_one(tiny_tokenizer):
    tool = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": {}}}
    listed = (
        f"These tools are at hand:\n{json.dumps(tool)}\n"
        'To use one, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>. Its answer follows.<|im_end|>\n'
    )
    user = {"role": "user", "content": "Hi"}
    hi = "<|im_start|>user\nHi<|im_end|>\n"
    assert render(tiny_tokenizer, [user], tools=[tool]) == "<|im_start|>system\n" + listed + hi
    with_system = [{"role": "system", "content": "Be kind."}, user]
    assert render(tiny_tokenizer, with_system, tools=[tool]) == "<|im_start|>system\nBe kind.\n\n" + listed + hi
    assert render(tiny_tokenizer, [user]) == hi


def test_empty_think_block_only_where_thinking_is_off(tiny_tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    hi, answer = "<|im_start|>user\nHi<|im_end|>\n", "<|im_start|>assistant\n"
    block = "<think>\n\n</think>\n\n"
    assert render(tiny_tokenizer, messages[:1], add_generation_prompt=True) == hi + answer
    assert render(tiny_tokenizer, messages[:1], add_generation_prompt=True, enable_thinking=True) == hi + answer
    off = render(tiny_tokenizer, messages[:1], add_generation_prompt=True, enable_thinking=False)
    assert off == hi + answer + block
    assert render(tiny_tokenizer, messages) == hi + answer + "Hello<|im_end|>\n"
    assert render(tiny_tokenizer, messages, enable_thinking=False) == off + "Hello<|im_end|>\n"


def test_generation_prompt_is_a_token_prefix_of_every_turn(tiny_tokenizer):
    assert len(ASSISTANT_TURNS) > 100
    for row, t in ASSISTANT_TURNS:
        thinks = "reasoning_content" in row["messages"][t]
        for kwargs in [{}] if thinks else [{}, {"enable_thinking": False}]:
            prompt = token_ids(tiny_tokenizer, row, t, add_generation_prompt=True, **kwargs)
            full = token_ids(tiny_tokenizer, row, t + 1, **kwargs)
            assert full[: len(prompt)] == prompt
            end = [tiny_tokenizer.eos_token_id, *tiny_tokenizer.encode("\n")]
            assert full[-2:] == end and tiny_tokenizer.eos_token_id not in full[len(prompt) : -2]


def test_later_turns_drop_earlier_reasoning(tiny_tokenizer):
    thought = tiny_tokenizer.convert_tokens_to_ids("<think>")
    forks = 0
    for row in ROWS:
        messages = row["messages"]
        for t, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            last_user = max(i for i in range(t) if messages[i]["role"] == "user")
            kept = sum("reasoning_content" in messages[i] for i in range(last_user, t + 1))
            full = token_ids(tiny_tokenizer, row, t + 1)
            assert full.count(thought) == kept
            dropped = sum("reasoning_content" in messages[i] for i in range(last_user))
            forks += dropped > 0
    assert forks > 50  # else the loop above has shown nothing about earlier turns


def test_token_ids_decode_to_the_rendered_text(tiny_tokenizer):
    for row in ROWS:
        text = render(tiny_tokenizer, row["messages"], tools=row["tools"])
        assert tiny_tokenizer.decode(token_ids(tiny_tokenizer, row, len(row["messages"]))) == text
    unseen = "Žluťoučký kůň 🐎\n\n\t漢字  <think>"
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(unseen)) == unseen


def test_line_breaks_are_one_token_whatever_follows():
    tokenizer = train_tokenizer(["a\n\n"] * 4, vocab_size=300)
    breaks = tokenizer.encode("\n\n")
    assert len(breaks) == 1
    assert tokenizer.encode("\n\na") == breaks + tokenizer.encode("a")


def test_tokenizer_ids_and_size(tiny_tokenizer):
    assert len(tiny_tokenizer) == 1024
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tiny_tokenizer.convert_tokens_to_ids(tokens) == [0, 1, 2]
    assert (tiny_tokenizer.pad_token_id, tiny_tokenizer.eos_token_id) == (0, 2)
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
    assert tiny_tokenizer.convert_tokens_to_ids(tags) == list(range(1018, 1024))
    assert tiny_tokenizer.decode([1, 2, 1018], skip_special_tokens=True) == "<think>"
    with pytest.raises(ValueError, match=r"vocab_size=264.*265"):
        train_tokenizer(["a"], vocab_size=264)


def test_tokenizer_is_deterministic_and_survives_saving(tiny_tokenizer, tmp_path):
    texts = list(dialogue_texts(generate_dialogues(num_groups=6, trials=3, seed=0)))
    assert train_tokenizer(texts).get_vocab() == tiny_tokenizer.get_vocab()
    assert train_tokenizer(texts, vocab_size=300).get_vocab() != tiny_tokenizer.get_vocab()
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    row = ROWS[0]
    stop = len(row["messages"])
    assert token_ids(loaded, row, stop) == token_ids(tiny_tokenizer, row, stop)
    assert (loaded.pad_token_id, loaded.eos_token_id) == (0, 2)


def test_nothing_is_lost_as_json_strings(caplog):
    """The same trees as from the rows themselves, which Arrow structs would fill with nulls."""
    tokenizer = train_tokenizer(dialogue_texts(ROWS))
    stored = prepare_trees(Dataset.from_list(as_json_strings(ROWS)), tokenizer, group_by="group")
    assert "Arrow structs" not in caplog.text
    for row, tree in zip(ROWS[::4], stored, strict=True):
        one = conversation_branches(row["messages"], tokenizer, tools=row["tools"]).branches[0]
        assert any(np.array_equal(branch.input_ids, one.input_ids) for branch in PrefixTree.from_dict(tree).branches())
