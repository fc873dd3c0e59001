# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The original chat templates of many models (TRL ships them): every turn as they render it, and where it ends."""

from __future__ import annotations

import copy
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken

from hf_prefix_tree.data.turns import conversation_branches
from tests.support.branch_parts import supervised_parts

# Turn-end tokens and other control tokens, as templates write them.
CONTROL = re.compile(
    r"<\|[^|<>\s'\"]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_turn>|\[/?[A-Z_]+\]|<\uff5c.+?\uff5c>"
)
EOS = {"phi3": "<|endoftext|>", "gemma3": "<end_of_turn>", "gptoss": "<|return|>", "glm4moe": "<|endoftext|>"}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}]
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"x": "1"}}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def said(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


TALK = [user("u1"), said("a1"), user("u2"), said("a2")]
R1, R2 = ({"reasoning_content": text, "thinking": text} for text in ("r1", "r2"))  # gpt-oss reads the second
THOUGHT = [user("u1"), said("a1", **R1), user("u2"), said("a2", **R2)]
AGENT = [
    {"role": "system", "content": "S"},
    user("u1"),
    said("", **R1, tool_calls=[CALL]),
    {"role": "tool", "name": "look", "content": "t", "tool_call_id": "call00000"},
    said("a2", **R2),
    user("u2"),
    said("a3"),
]


def tokenizer_of(name: str, tiny_tokenizer):
    """The tiny tokenizer with the model's template and control tokens."""
    template = Path(find_spec("trl").origin).parent / "chat_templates" / f"{name}.jinja"
    if not template.exists():
        pytest.skip(f"this TRL has no template {name}")
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = template.read_text()
    control = {*CONTROL.findall(tokenizer.chat_template), "<s>", EOS.get(name, "<|im_end|>")}
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(control)])
    tokenizer.bos_token, tokenizer.eos_token = "<s>", EOS.get(name, "<|im_end|>")
    return tokenizer


def supervised(messages, tokenizer, **options) -> list[list[str]]:
    return supervised_parts(conversation_branches(messages, tokenizer, **options).branches, tokenizer)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("qwen2_5", "a1<|im_end|>", "a2<|im_end|>"),
        ("llama3_1", "a1<|eot_id|>", "a2<|eot_id|>"),
        ("gemma3", "a1<end_of_turn>", "a2<end_of_turn>"),
        ("phi3", "a1<|end|>", "a2<|end|>"),  # the template writes <|endoftext|> after the last turn's end
        ("lfm2", "a1<|im_end|>", "a2<|im_end|>"),
        ("gptoss", "<|channel|>final<|message|>a1<|return|>", "<|channel|>final<|message|>a2<|return|>"),
        # Writes no turn-end token: generation ends with the header of the next message. Thinking is not switched off,
        # as this would change the messages of users.
        ("glm4moe", "\n<think></think>\na1<|user|>", "\n<think></think>\na2<|user|>"),
        ("cohere2", "a1<|END_RESPONSE|><|END_OF_TURN_TOKEN|>", "a2<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
        ("qwen3_6", "a1<|im_end|>", "a2<|im_end|>"),
        ("nemotron_3_nano", "a1<|im_end|>", "a2<|im_end|>"),
    ],
)
def test_where_a_turn_ends(tiny_tokenizer, name, first, second):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    assert conversation_branches(TALK, tokenizer).counts == {}
    assert supervised(TALK, tokenizer) == [[first], [second]]


@pytest.mark.parametrize("talk", [TALK, THOUGHT, AGENT], ids=["talk", "thought", "agent"])
@pytest.mark.parametrize(
    "name",
    [
        "qwen2_5",
        "qwen3",
        "qwen3_5_think",
        "qwen3_6",
        "qwen3_training",
        "qwen3_instruct_2507",
        "llama3_1",
        "lfm2_v2",
        "nemotron_3_nano",
        "nemotron_3_ultra",
    ],
)
def test_every_turn_is_what_the_template_renders(tiny_tokenizer, name, talk):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    tools = TOOLS if talk is AGENT else None
    branches = iter(conversation_branches(talk, tokenizer, tools=tools).branches)
    for turn, message in enumerate(talk):
        if message["role"] == "assistant":
            switch = {} if "reasoning_content" in message else {"enable_thinking": False}
            expected = tokenizer.apply_chat_template(talk[: turn + 1], tools=tools, return_dict=False, **switch)
            assert next(branches).input_ids.tolist() == expected
    assert next(branches, None) is None


CALLS = {
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"x": "1"}}\n</tool_call><|im_end|>',
    "qwen3_6": "<tool_call>\n<function=look>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call><|im_end|>",
    "glm4moe": "\n<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
    "gptoss": ' to=functions.look<|channel|>commentary json<|message|>{"x": "1"}<|call|>',
}


@pytest.mark.parametrize(
    ("name", "leaf", "shown", "end"),
    [
        ("qwen3", "<think>\n{}\n</think>", "{}<|im_end|>", "\n\n"),
        ("qwen3_6", "{}\n</think>", "{}<|im_end|>", "\n\n"),  # the prompt opens the block
        ("glm4moe", "\n<think>{}</think>", "\n{}<|user|>", ""),  # the trunk has an empty block, which is context
        (
            "gptoss",
            "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
            "<|channel|>final<|message|>{}<|end|>",
            "",
        ),
    ],
)
def test_reasoning_on_side_leaves_and_kept(tiny_tokenizer, name, leaf, shown, end):
    tokenizer, call = tokenizer_of(name, tiny_tokenizer), CALLS[name]
    assert supervised(AGENT, tokenizer, tools=TOOLS, reasoning="side_leaf") == [
        [leaf.format("r1")],
        [call, leaf.format("r2")],
        [call, shown.format("a2"), shown.format("a3")],
    ]
    ((first, second, third),) = supervised(AGENT, tokenizer, tools=TOOLS, reasoning="keep")
    last_shown = [text.replace("<|end|>", "<|return|>") for text in (shown.format("a2"), shown.format("a3"))]
    assert first == leaf.format("r1") + end + call
    assert second == leaf.format("r2") + end + last_shown[0]
    assert third == last_shown[1]


@pytest.mark.parametrize("mode", ["side_leaf", "keep"])
def test_a_template_without_headers_after_tool_results_has_no_trunk(tiny_tokenizer, mode):
    with pytest.raises(ValueError, match="`reasoning='per_turn'`"):
        conversation_branches(AGENT, tokenizer_of("deepseekv3", tiny_tokenizer), reasoning=mode)


def test_a_tokenizer_that_renders_in_its_own_way(tiny_tokenizer):
    class Shouting(type(tiny_tokenizer)):
        def apply_chat_template(self, conversation, **options):
            return super().apply_chat_template(
                [{**m, "content": m["content"] + "!"} for m in conversation], **options
            )

    shouting = copy.deepcopy(tiny_tokenizer)
    shouting.__class__ = Shouting
    assert supervised(TALK, shouting) == [["a1!<|im_end|>"], ["a2!<|im_end|>"]]
    assert supervised(TALK, tiny_tokenizer) == [["a1<|im_end|>"], ["a2<|im_end|>"]]
