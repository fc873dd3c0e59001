# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The original chat templates of many models (TRL ships them): every turn as they render it, and where it ends."""

from __future__ import annotations

import copy
import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from tokenizers import AddedToken

from hf_prefix_tree.data.messages import TurnError, split_reasoning
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


PLAIN_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SECOND_HEADER = PLAIN_CHATML.replace("prompt %}", "prompt and messages[-1].role != 'assistant' %}")
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


# --- the invariant: context is the prompt, supervised is what the model must emit from there -----------------------


def turns(messages, tokenizer, tools=None, **options) -> list[tuple[str, str]]:
    """Context and supervised text of each branch; nothing is counted."""
    result = conversation_branches(messages, tokenizer, tools=tools, **options)
    assert result.counts == {}
    both = []
    for branch in result.branches:
        (start,) = (i for i, on in enumerate(branch.weights) if on and not branch.weights[i - 1])
        length = int(branch.weights.sum())
        ids = branch.input_ids
        both.append((tokenizer.decode(ids[:start]), tokenizer.decode(ids[start : start + length])))
    return both


def prompt_of(messages, tokenizer, tools=None, **variables) -> str:
    return tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False, **variables
    )


def refused(name: str, messages, tokenizer, **options) -> None:
    with pytest.raises(TurnError, match=r"`messages\[\d\]` cannot be supervised exactly") as raised:
        conversation_branches(messages, tokenizer, **options)
    assert raised.value.name == name


@pytest.mark.parametrize(
    ("name", "message", "refusal"),
    [
        ("llama3_1", said("I will look.", tool_calls=[CALL]), "refused_content"),  # the template writes one of the two
        ("lfm2", said("", tool_calls=[CALL]), "refused_calls"),
        ("phi3", {"role": "assistant", "tool_calls": [CALL]}, "refused_calls"),
        (
            "gptoss",
            said("", tool_calls=[CALL, {**CALL, "function": {"name": "see", "arguments": {}}}]),
            "refused_calls",
        ),
    ],
)
def test_what_a_template_leaves_out_is_refused(tiny_tokenizer, name, message, refusal):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    refused(refusal, [user("u1"), message], tokenizer, tools=TOOLS)


@pytest.mark.parametrize("name", ["qwen3", "qwen2_5", "llama3_1", "gptoss", "deepseekv3", "idefics3", "llava_next"])
def test_a_list_of_text_parts_is_its_text(tiny_tokenizer, name):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    split = [{**m, "content": [{"type": "text", "text": part} for part in m["content"]]} for m in TALK]
    assert turns(split, tokenizer) == turns(TALK, tokenizer)
    contexts = [context for context, _ in turns(TALK, tokenizer)]
    assert "u1" in contexts[0] and "a1" in contexts[1] and "u2" in contexts[1]


def test_the_output_is_cut_out_where_the_history_is_another_one(tiny_tokenizer):
    tokenizer = tokenizer_of("gptoss", tiny_tokenizer)
    tool = {"role": "tool", "name": "look", "content": "t", "tool_call_id": "call00000"}
    talk = [user("u1"), said("", tool_calls=[CALL], **R1), tool, said("a1", **R2)]
    # The final answer drops the reasoning before the call, which its prompt has.
    rendered = tokenizer.apply_chat_template(talk, tools=TOOLS, tokenize=False)
    assert "r1" in prompt_of(talk[:3], tokenizer, TOOLS) and "r1" not in rendered
    (_, call), (context, answer) = turns(talk, tokenizer, TOOLS)
    assert context == prompt_of(talk[:3], tokenizer, TOOLS)
    assert call.startswith("<|channel|>analysis<|message|>r1<|end|>") and call.endswith('{"x": "1"}<|call|>')
    assert answer == (
        "<|channel|>analysis<|message|>r2<|end|><|start|>assistant<|channel|>final<|message|>a1<|return|>"
    )


@pytest.mark.parametrize(("name", "block"), [("qwen3", "<think>\n\n</think>\n\n"), ("qwen2_5", ""), ("llama3_1", "")])
def test_adjacent_assistant_messages(tiny_tokenizer, name, block):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    talk = [user("u1"), said("a1"), said("a2")]
    (_, first), (context, second) = turns(talk, tokenizer)
    end = first.removeprefix("a1")
    assert (context, second) == (prompt_of(talk[:2], tokenizer, enable_thinking=False), f"a2{end}")
    assert context.endswith(block)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "glm4moe",
            "\n<think></think>\n<tool_call>look\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n</tool_call><|observation|>",
        ),
        ("gemma4", '<|tool_call>call:look{x:<|"|>1<|"|>}<tool_call|><|tool_response>'),
        ("gemma4_v2", '<|tool_call>call:look{x:<|"|>1<|"|>}<tool_call|><turn|>'),
        ("llama3_1", '{"name": "look", "parameters": {"x": "1"}}<|eot_id|>'),
        ("lfm2_2_5", "<|tool_call_start|>[look(x='1')]<|tool_call_end|><|im_end|>"),
        (
            "deepseekv3",
            "\n</think>\n\n<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
            '<\uff5ctool\u2581sep\uff5c>look\n```json\n{"x": "1"}\n```<\uff5ctool\u2581call\u2581end\uff5c>'
            "<\uff5ctool\u2581calls\u2581end\uff5c><\uff5cend\u2581of\u2581sentence\uff5c>",
        ),
    ],
)
def test_each_template_gets_the_arguments_that_it_prints_as_its_own(tiny_tokenizer, name, expected):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    if "\uff5cend" in expected:
        tokenizer.eos_token = "<\uff5cend\u2581of\u2581sentence\uff5c>"
    for arguments in ({"x": "1"}, '{"x": "1"}'):
        call = {**CALL, "function": {"name": "look", "arguments": arguments}}
        for calls in ([call], json.dumps([call]), [json.dumps(call)]):
            ((_, output),) = turns([user("u1"), said("", tool_calls=calls)], tokenizer, TOOLS)
            assert output == expected


@pytest.mark.parametrize("name", ["qwen3", "qwen3_6", "gemma4", "glm4moe", "gptoss", "nemotron_3_nano"])
def test_no_arguments(tiny_tokenizer, name):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    outputs = set()
    for arguments in ({}, "{}", "", None):
        call = {**CALL, "function": {"name": "look", "arguments": arguments}}
        ((_, output),) = turns([user("u1"), said("", tool_calls=[call])], tokenizer, TOOLS)
        outputs.add(output)
    (output,) = outputs
    assert "look" in output and "null" not in output and '""' not in output


RAW = "six sevens\n</think>\n\nIt is 42."


@pytest.mark.parametrize("name", ["qwen3", "qwen3_8", "nemotron_3_nano", "lfm2_2_5", "glm4moe", "deepseek_r1_distill"])
def test_raw_output_after_a_think_in_the_prompt(tiny_tokenizer, name):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    tokenizer.eos_token = "<\uff5cend\u2581of\u2581sentence\uff5c>" if "deepseek" in name else tokenizer.eos_token
    expected = turns([user("u1"), said("It is 42.", reasoning_content="six sevens")], tokenizer)
    ((context, output),) = expected
    assert (
        output.count("six sevens") == (context + output).count("<think>") == (context + output).count("</think>") == 1
    )
    for raw in (RAW, f"<think>\n{RAW}"):
        assert turns([user("u1"), said(raw)], tokenizer) == expected


QUOTES = [
    "Use `</think>` to end.",
    "The </think> tag ends it.",
    'It writes "</think>".',
    "```\n</think>\n```\nends it.",
    "It ends with (</think>)",
]


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_6", "qwen3_8", "nemotron_3_nano", "glm4moe", "deepseek_r1_distill"]
)
def test_a_quoted_end_of_reasoning_is_text(tiny_tokenizer, name):
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    tokenizer.eos_token = "<\uff5cend\u2581of\u2581sentence\uff5c>" if "deepseek" in name else tokenizer.eos_token
    for quote in QUOTES:
        try:
            ((_, output),) = turns([user("u1"), said(quote)], tokenizer)
        except TurnError as error:  # a template that cuts its text there, whatever it is given
            assert (name, error.name) == ("deepseek_r1_distill", "refused_content")
            continue
        ((_, plain),) = turns([user("u1"), said("a1")], tokenizer)
        assert output == plain.replace("a1", quote)
        if name not in ("qwen2_5", "deepseek_r1_distill"):  # these write no reasoning of other turns
            thought = {"reasoning_content": "r1"}
            ((_, whole),) = turns([user("u1"), said(quote, **thought)], tokenizer)
            assert turns([user("u1"), said(f"<think>\nr1\n</think>\n\n{quote}")], tokenizer)[0][1] == whole
            assert turns([user("u1"), said(f"r1\n</think>\n\n{quote}")], tokenizer)[0][1] == whole
            assert whole.count("r1") == 1 and quote in whole


@pytest.mark.parametrize(
    "raw", ["r1</think>a1", "r1\n</think>\n\na1", "r1.</think>\n\na1", "r1 `</think>`\n</think>\na1"]
)
def test_an_end_of_reasoning_without_a_start(raw):
    reasoning, visible = split_reasoning({"role": "assistant", "content": raw})
    assert reasoning.startswith("r1") and visible["content"] == "a1"
    for text in ("</think>\n\na1", "\n</think>a1", "</think> a1"):
        reasoning, visible = split_reasoning({"role": "assistant", "content": text})
        assert reasoning == "" and visible["content"].strip() == "a1"


def test_an_opened_block_is_closed(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen3_8", tiny_tokenizer)
    assert turns([user("u1"), said("a1")], tokenizer) == [
        (prompt_of([user("u1")], tokenizer), "\n</think>\n\na1<|im_end|>")
    ]


@pytest.mark.parametrize("name", ["qwen3_5_nothink", "qwen3_6", "nemotron_3_nano"])
def test_reasoning_between_spaces_is_not_written_after_a_closed_block(tiny_tokenizer, name):
    (branch,) = conversation_branches(
        [user("u"), said("a", reasoning_content=" r ")], tokenizer_of(name, tiny_tokenizer)
    ).branches
    context = tokenizer_of(name, tiny_tokenizer).decode(branch.input_ids[branch.weights == 0])
    assert "</think>" not in context.rpartition("assistant")[2]


@pytest.mark.parametrize("answer", ["blue", "it is blue"])
def test_an_answer_that_repeats_its_reasoning_does_not_hide_its_loss(tiny_tokenizer, answer):
    talk, end = [user("u"), said(answer, reasoning_content="blue")], "<|im_end|>"
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)
    for mode in ("per_turn", "side_leaf", "think_split", "keep"):
        result = conversation_branches(talk, tokenizer, reasoning=mode)
        assert result.counts == {"unrendered_reasoning": 1}
        assert supervised_parts(result.branches, tokenizer) == [[answer + end]]
    assert supervised(talk, tokenizer_of("qwen3", tiny_tokenizer)) == [[f"<think>\nblue\n</think>\n\n{answer}{end}"]]
    distilled = supervised(talk, tokenizer_of("deepseek_r1_distill", tiny_tokenizer))
    assert [part[0].startswith(f"blue\n</think>\n\n{answer}") for part in distilled] == [True]


@pytest.mark.parametrize("mode", ["side_leaf", "keep"])
def test_a_system_message_after_a_turn_is_not_supervised_on_a_trunk(tiny_tokenizer, mode):
    talk = [user("u1"), said("a1"), {"role": "system", "content": "s"}, user("u2"), said("a2")]
    tokenizer = tokenizer_of("glm4moe", tiny_tokenizer)  # ends turns with the next header
    with pytest.raises(TurnError) as refusal:
        conversation_branches(talk, tokenizer, reasoning=mode)
    assert refusal.value.name == "refused_trunks"
    assert supervised([*talk[:2], *talk[3:]], tokenizer, reasoning=mode) == [["\na1<|user|>", "\na2<|user|>"]]


@pytest.mark.parametrize("mode", ["per_turn", "side_leaf", "keep"])
def test_a_call_is_not_found_in_the_tools(tiny_tokenizer, mode):
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)
    tokenizer.chat_template = "{{ tools | tojson }}" + PLAIN_CHATML  # writes no calls
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    with pytest.raises(TurnError) as refusal:
        conversation_branches([user("u"), said("", tool_calls=[call])], tokenizer, tools=TOOLS, reasoning=mode)
    assert refusal.value.name == "refused_calls"


THINKING_CHATML = PLAIN_CHATML.replace("assistant\n{%", "assistant\n<think>{%").replace(
    "{{ m.content", "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content"
)


@pytest.mark.parametrize("content", ["a", "<think></think>a", "<think>\n\n</think>\n\na"])
def test_an_empty_block_in_the_data_is_not_written_twice(tiny_tokenizer, content):
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)
    tokenizer.chat_template = THINKING_CHATML
    assert supervised([user("u"), said(content)], tokenizer) == [["</think>a<|im_end|>"]]


def test_a_block_that_the_template_writes_by_itself(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)  # reasoning before calls alone, an empty block in answers
    tokenizer.chat_template = PLAIN_CHATML.replace(
        "{{ m.content",
        "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content if m.tool_calls }}</think>{% endif %}"
        "{{ m.content",
    ).replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")
    for content in ("a", "<think>\n\n</think>\n\na"):
        assert supervised([user("u"), said(content)], tokenizer) == [["<think></think>a<|im_end|>"]]
    refused("refused_reasoning", [user("u"), said("a", reasoning_content="r")], tokenizer)
    for message in (said("<think>\nr\n</think>\n\na"), said("a", reasoning_content="r")):
        ((output,),) = supervised([user("u"), {**message, "tool_calls": [CALL]}], tokenizer, tools=TOOLS)
        assert output.startswith("<think>r</think>a[{")


def test_reasoning_before_a_call_is_not_lost_where_the_prompt_closes_the_block(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)  # answers have no reasoning, calls have
    tokenizer.chat_template = (
        PLAIN_CHATML.replace("assistant\n{%", "assistant\n<think></think>{%")
        .replace(
            "{{ m.content", "{% if m.tool_calls %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content"
        )
        .replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}")
    )
    for message in (said("a", reasoning_content="r"), said("<think>\nr\n</think>\n\na")):
        refused("refused_starts", [user("u"), {**message, "tool_calls": [CALL]}], tokenizer, tools=TOOLS)
    result = conversation_branches([user("u"), said("a", reasoning_content="r")], tokenizer)
    assert result.counts == {"unrendered_reasoning": 1}


def test_line_breaks_around_reasoning_are_what_the_template_writes(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)
    tokenizer.chat_template = THINKING_CHATML.replace("assistant\n<think>{%", "assistant\n{%")
    talk = [user("u"), said("\n\na", reasoning_content="r\n")]
    assert supervised(talk, tokenizer) == [["<think>r\n</think>\n\na<|im_end|>"]]
    inside = [user("u"), said("<think>\nr\n</think>\n\na")]  # there they belong to the tags
    assert supervised(inside, tokenizer) == [["<think>r</think>a<|im_end|>"]]


def test_a_prompt_without_the_header_of_its_turn_is_refused(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)
    late = "{% for m in messages %}{{ '<|im_end|>\\n' if loop.index0 }}<|im_start|>{{ m.role }}\n{{ m.content }}"
    late += "{{ '<|im_end|>\\n' if loop.last and (add_generation_prompt or m.role == 'assistant') }}{% endfor %}"
    late += "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<|im_start|>assistant\n{% endif %}"
    spaced = PLAIN_CHATML.replace("<|im_start|>assistant\n", "  <|im_start|>assistant\n<think></think>")
    for template in (NO_SECOND_HEADER, late):  # the user's end may be written with the header
        tokenizer.chat_template = template
        refused("refused_starts", [user("u"), said("a1"), said("a2")], tokenizer)
    tokenizer.chat_template = spaced
    refused("refused_starts", [user("u"), said("a1")], tokenizer)
    tokenizer.chat_template = NO_SECOND_HEADER
    assert supervised(TALK, tokenizer) == [["a1<|im_end|>"], ["a2<|im_end|>"]]
    # Neither has a header after another assistant message: the second text follows the first.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>{{ m.content }}\n{% else %}"
        "{% if messages[loop.index0 - 1].role == 'user' %}</think>{% endif %}{{ m.content }}<|im_end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt and messages[-1].role == 'user' %}<think></think>{% endif %}"
    )
    assert turns([user("u"), said("a1"), said("a2")], tokenizer) == [
        ("<|im_start|>u\n<think></think>", "a1<|im_end|>"),
        ("<|im_start|>u\n</think>a1<|im_end|>", "a2<|im_end|>"),
    ]


def test_a_template_that_numbers_its_calls(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)  # its prompt opens a block, which a call leaves out
    tokenizer.chat_template = (
        "{% set all = namespace(n=0) %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}[{{ all.n }} {{ c.function.name }} {{ c.function.arguments | tojson }}]"
        "{% set all.n = all.n + 1 %}{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    talk = [user("u"), said("", tool_calls=[CALL]), {"role": "tool", "content": "t"}, said("", tool_calls=[CALL])]
    outputs = [output for _, output in turns(talk, tokenizer, TOOLS)]
    assert outputs == [f'</think>[{n} look {{"x": "1"}}]<|im_end|>' for n in (0, 1)]


def test_an_assistant_message_without_context_is_refused(tiny_tokenizer):
    tokenizer = tokenizer_of("qwen2_5", tiny_tokenizer)
    tokenizer.chat_template = (
        PLAIN_CHATML.replace("{% endfor %}", "").replace("{% if", "{% if loop.last and") + "{% endfor %}"
    )
    with pytest.raises(TurnError) as refusal:  # its first token could not be predicted from anything
        conversation_branches([said("welcome"), user("u"), said("a")], tokenizer)
    assert refusal.value.name == "refused_starts"
    assert supervised([user("u"), said("a")], tokenizer) == [["a<|im_end|>"]]


def test_thinking_is_switched_only_where_the_history_stays(tiny_tokenizer):
    tokenizer = tokenizer_of("glm4moe", tiny_tokenizer)
    assert "/nothink" in prompt_of([user("u1")], tokenizer, enable_thinking=False)
    assert all("/nothink" not in context for context, _ in turns(TALK, tokenizer))
    tokenizer = tokenizer_of("qwen3_5_nothink", tiny_tokenizer)  # its prompt turns thinking off by itself
    (_, (context, output)) = turns(THOUGHT, tokenizer)
    assert context == prompt_of(THOUGHT[:3], tokenizer, enable_thinking=True)
    assert output == "r2\n</think>\n\na2<|im_end|>"


def test_stop_tokens(tiny_tokenizer, tmp_path):
    talk = [user("u1"), said("a1")]
    tokenizer = tokenizer_of("phi3", tiny_tokenizer)
    end, last = (tokenizer.convert_tokens_to_ids(token) for token in ("<|end|>", "<|endoftext|>"))

    def output(**options) -> str:
        return turns(talk, tokenizer, **options)[0][1]

    assert output() == output(stop_token_ids=[end, last]) == "a1<|end|>"
    assert output(stop_token_ids=[last]) == "a1<|end|>\n<|endoftext|>"
    refused("refused_ends", talk, tokenizer, stop_token_ids=tokenizer.encode("a")[:1])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": last}))
    tokenizer.save_pretrained(tmp_path)
    tokenizer = type(tokenizer).from_pretrained(tmp_path)
    assert output() == "a1<|end|>\n<|endoftext|>"
    assert output(stop_token_ids=[end]) == "a1<|end|>"


def test_a_turn_that_nothing_ends_is_refused(tiny_tokenizer):
    template = "{% for m in messages %}\n{{ m.role }}: {{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %}\nassistant: {% endif %}"
    options = {"chat_template_kwargs": {"chat_template": template}}
    refused("refused_ends", TALK, tiny_tokenizer, **options)
    options = {"chat_template_kwargs": {"chat_template": template.replace("{% endfor", "\n\n{% endfor")}}
    assert [output for _, output in turns(TALK, tiny_tokenizer, **options)] == ["a1\n\n", "a2\n\n"]


def test_a_token_over_the_seam(tiny_tokenizer):
    talk = [user("u1"), said("\n\na1")]
    options = {"chat_template_kwargs": {"chat_template": PLAIN_CHATML}}
    (branch,) = conversation_branches(talk, tiny_tokenizer, **options).branches
    ids, on = branch.input_ids, branch.weights > 0
    prompt = tiny_tokenizer.apply_chat_template(
        talk[:1], chat_template=PLAIN_CHATML, add_generation_prompt=True, return_dict=False
    )
    whole = tiny_tokenizer.apply_chat_template(talk, chat_template=PLAIN_CHATML, return_dict=False)
    assert whole[: len(prompt)] != prompt  # a token reaches over the seam
    assert ids[: on.argmax()].tolist() == prompt
    assert ids[on].tolist() == tiny_tokenizer.encode("\n\na1<|im_end|>")


@pytest.mark.parametrize(
    "name",
    [
        *("cohere", "cohere2", "gemma", "gemma3", "glm4moe", "gptoss", "lfm2_v2", "llama3", "muse_glimmer"),
        *("nemotron_3_nano", "nemotron_3_ultra", "phi3", "phi3_5", "qwen2_5", "qwen3", "qwen3_5_think", "qwen3_6"),
        *("qwen3_5_nothink", "qwen3_8", "qwen3_instruct_2507"),
    ],
)
def test_supervised_is_what_the_training_twin_marks(tiny_tokenizer, name):
    """TRL's twins of templates mark what the model generates; some mark text after the stop token, too."""
    tokenizer = tokenizer_of(name, tiny_tokenizer)
    twin = tokenizer_of(f"{name}_training", tiny_tokenizer)
    talk = [user("u1"), said("a1", **R1)]
    marked = twin.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
    on = [i for i, mask in zip(marked["input_ids"], marked["assistant_masks"], strict=True) if mask]
    (branch,) = conversation_branches(talk, tokenizer).branches
    context = tokenizer.decode(branch.input_ids[: branch.weights.argmax()])
    output = tokenizer.decode(branch.input_ids[branch.weights > 0])
    expected = twin.decode(on)
    before, found, after = expected.partition(output)
    # Some mark the header of the first turn, or a think block that the prompt opens.
    assert found and context.endswith(before) and after.strip() in ("", "<|im_end|>", "<|endoftext|>")


def test_a_tokenizer_that_renders_in_its_own_way(tiny_tokenizer):
    class Shouting(type(tiny_tokenizer)):
        def apply_chat_template(self, conversation, **options):
            return super().apply_chat_template([{**m, "content": m["content"] + "!"} for m in conversation], **options)

    shouting = copy.deepcopy(tiny_tokenizer)
    shouting.__class__ = Shouting
    assert supervised(TALK, shouting) == [["a1!<|im_end|>"], ["a2!<|im_end|>"]]
    assert supervised(TALK, tiny_tokenizer) == [["a1<|im_end|>"], ["a2<|im_end|>"]]
