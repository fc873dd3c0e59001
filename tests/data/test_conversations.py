# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Conversations to branches: what is context and what is supervised, on literal examples."""

from __future__ import annotations

import copy
import json

import pytest

from hf_prefix_tree.data.messages import TurnError
from hf_prefix_tree.data.template import chat_template_of
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.tree.prefix_tree import fold
from tests.support.branch_parts import all_parts, supervised_parts

SYSTEM = {"role": "system", "content": "S"}
HI = {"role": "user", "content": "Hi"}
BYE = {"role": "user", "content": "Bye"}
HELLO = {"role": "assistant", "content": "Hello", "reasoning_content": "why"}
CIAO = {"role": "assistant", "content": "Ciao"}
TALK = [SYSTEM, HI, HELLO, BYE, CIAO]
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
OPEN = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
NEXT = "<|im_start|>assistant\n"
EMPTY_THINK = "<think>\n\n</think>\n\n"


def supervised(messages, tokenizer, **options) -> list[list[str]]:
    result = conversation_branches(messages, tokenizer, **options)
    assert result.counts.keys() <= {"calls_without_tools"}
    return supervised_parts(result.branches, tokenizer)


def with_template(tokenizer, template: str):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


# --- the four modes ------------------------------------------------------------------------------------------------


def test_per_turn_drops_earlier_reasoning_and_puts_the_empty_think_block_into_the_prompt(tiny_tokenizer):
    result = conversation_branches(TALK, tiny_tokenizer)
    assert all_parts(result, tiny_tokenizer) == [
        [OPEN, "<think>\nwhy\n</think>\n\nHello<|im_end|>", "\n"],
        [f"{OPEN}Hello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n{NEXT}{EMPTY_THINK}", "Ciao<|im_end|>", "\n"],
    ]
    assert result.counts == {}


def test_the_empty_think_block_is_supervised_where_the_option_is_off(qwen3_tokenizer):
    def last(**options):
        return supervised([HI, CIAO], qwen3_tokenizer, **options)[-1]

    assert last() == ["Ciao<|im_end|>"]
    assert last(empty_thinking_in_prompt=False) == [f"{EMPTY_THINK}Ciao<|im_end|>"]
    assert last(chat_template_kwargs={"enable_thinking": True}) == [f"{EMPTY_THINK}Ciao<|im_end|>"]
    assert last(chat_template_kwargs={"enable_thinking": False}) == ["Ciao<|im_end|>"]


def test_thinking_is_only_switched_off_for_turns_without_reasoning(tiny_tokenizer):
    with pytest.raises(TurnError, match=r"`messages\[2\]`.*`chat_template_kwargs`") as raised:
        conversation_branches(TALK, tiny_tokenizer, chat_template_kwargs={"enable_thinking": False})
    assert raised.value.name == "refused_starts"  # the prompt of the turn that reasons has an empty block


@pytest.mark.parametrize("name", ["tiny_tokenizer", "qwen3_tokenizer"])
@pytest.mark.parametrize("content", ["<think>\nwhy", "\n<think>why\n"])
def test_reasoning_that_is_never_closed_is_all_reasoning(name, content, request):
    tokenizer = request.getfixturevalue(name)
    cut_off = [HI, {"role": "assistant", "content": content}, BYE, CIAO]
    closed = [HI, {"role": "assistant", "content": "", "reasoning_content": "why"}, BYE, CIAO]
    for reasoning in ("per_turn", "side_leaf", "keep"):
        found = conversation_branches(cut_off, tokenizer, reasoning=reasoning)
        expected = conversation_branches(closed, tokenizer, reasoning=reasoning)
        assert fold(found.branches) == fold(expected.branches)
        assert (found.counts, expected.counts) == ({"unclosed_reasoning": 1}, {})
    found = conversation_branches(cut_off, tokenizer)
    assert supervised_parts(found.branches, tokenizer)[0] == ["<think>\nwhy\n</think>\n\n<|im_end|>"]
    assert conversation_branches(cut_off, tokenizer, num_prompt_messages=2).counts == {}


def test_a_template_without_reasoning_keeps_a_think_that_is_never_closed(tiny_tokenizer):
    template = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    result = conversation_branches(
        [HI, {"role": "assistant", "content": "<think>why"}], with_template(tiny_tokenizer, template)
    )
    assert supervised_parts(result.branches, tiny_tokenizer) == [["<think>why<|im_end|>"]]
    assert result.counts == {"unclosed_reasoning": 1}


def test_side_leaf(tiny_tokenizer):
    talk = [*TALK[:4], {**CIAO, "reasoning_content": "so"}]
    to_bye = ["Hello<|im_end|>", f"\n<|im_start|>user\nBye<|im_end|>\n{NEXT}"]
    assert all_parts(conversation_branches(talk, tiny_tokenizer, reasoning="side_leaf"), tiny_tokenizer) == [
        [OPEN, "<think>\nwhy\n</think>"],
        [OPEN, *to_bye, "<think>\nso\n</think>"],
        [OPEN, *to_bye, "Ciao<|im_end|>"],
    ]


def test_side_leaf_has_no_leaf_for_a_turn_without_reasoning(tiny_tokenizer, qwen3_tokenizer):
    for tokenizer in (tiny_tokenizer, qwen3_tokenizer):
        result = conversation_branches(TALK, tokenizer, reasoning="side_leaf")
        assert all_parts(result, tokenizer) == [
            [OPEN, "<think>\nwhy\n</think>"],
            [OPEN, "Hello<|im_end|>", f"\n<|im_start|>user\nBye<|im_end|>\n{NEXT}", "Ciao<|im_end|>"],
        ]
        tree = fold(result.branches)
        assert tree.num_branches == 2
        # Both branches pass through the header; the visible output is on the trunk, the reasoning beside it.
        assert tokenizer.decode(tree.input_ids[: tree.node_lengths[0]]) == OPEN


def test_visible_output_on_the_trunk_is_supervised_by_every_branch_through_it(tiny_tokenizer):
    talk = [*TALK[:4], {**CIAO, "reasoning_content": "so"}]
    tree = fold(conversation_branches(talk, tiny_tokenizer, reasoning="side_leaf").branches)
    at = [i for i, token in enumerate(tree.input_ids) if token == tiny_tokenizer.eos_token_id and tree.weights[i]]
    # The end of "Hello" is on the second leaf and on the trunk, the end of "Ciao" on the trunk alone.
    assert tree.num_branches == 3 and tree.branch_count[at].tolist() == [2, 1]


def test_think_split(tiny_tokenizer):
    question = {"role": "user", "content": "Hi"}
    for message in (HELLO, {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nHello"}):
        result = conversation_branches([question, message], tiny_tokenizer, reasoning="think_split")
        prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        assert all_parts(result, tiny_tokenizer) == [
            [prompt, "<think>\nwhy\n</think>"],
            [prompt, "Hello<|im_end|>"],
        ]
    assert len(conversation_branches([question, CIAO], tiny_tokenizer, reasoning="think_split").branches) == 1


def test_keep_puts_all_reasoning_into_one_branch(tiny_tokenizer, qwen3_tokenizer):
    for tokenizer, before_ciao in ((tiny_tokenizer, ""), (qwen3_tokenizer, EMPTY_THINK)):
        assert all_parts(conversation_branches(TALK, tokenizer, reasoning="keep"), tokenizer) == [
            [
                OPEN,
                "<think>\nwhy\n</think>\n\nHello<|im_end|>",
                f"\n<|im_start|>user\nBye<|im_end|>\n{NEXT}{before_ciao}",
                "Ciao<|im_end|>",
                "\n",
            ]
        ]


def test_keep_is_the_plain_rendering_where_the_template_keeps_reasoning(tiny_tokenizer):
    source = tiny_tokenizer.chat_template
    keeping = with_template(tiny_tokenizer, source.replace("loop.index0 > state.last_user", "true"))
    assert keeping.chat_template != source
    (branch,) = conversation_branches(TALK, keeping, reasoning="keep").branches
    assert branch.input_ids.tolist() == keeping.apply_chat_template(TALK, return_dict=False)
    (branch,) = conversation_branches(TALK, tiny_tokenizer, reasoning="keep").branches
    assert branch.input_ids.tolist() != tiny_tokenizer.apply_chat_template(TALK, return_dict=False)


# --- what real data does ------------------------------------------------------------------------------------------


def tool_talk(arguments, **message):
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [HI, {"role": "assistant", "tool_calls": [call], **message}]


@pytest.mark.parametrize("message", [{}, {"content": None}, {"content": ""}, {"reasoning_content": None}])
def test_missing_and_null_content(tiny_tokenizer, qwen3_tokenizer, message):
    assert supervised(tool_talk({"x": 1}, **message), tiny_tokenizer) == [
        ['<tool_call>{"name": "look", "arguments": {"x": 1}}</tool_call><|im_end|>']
    ]
    assert supervised(tool_talk({"x": 1}, **message), qwen3_tokenizer) == [
        ['<tool_call>\n{"name": "look", "arguments": {"x": 1}}\n</tool_call><|im_end|>']
    ]


def test_argument_strings_are_printed_as_they_were_sampled(tiny_tokenizer):
    for arguments in ('{"x":1}', "not json", '{"x": "\\u00e9"}'):
        assert supervised(tool_talk(arguments), tiny_tokenizer) == [
            [f'<tool_call>{{"name": "look", "arguments": {arguments}}}</tool_call><|im_end|>']
        ]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ('{"x":1}', '{"x": 1}'),
        ({"x": 1}, '{"x": 1}'),
        ("not json", '"not json"'),
        ("[1]", '"[1]"'),
    ],
)
def test_argument_strings_are_parsed_where_the_template_would_encode_them_twice(tiny_tokenizer, arguments, printed):
    source = tiny_tokenizer.chat_template
    encoding = with_template(tiny_tokenizer, source.replace("function.arguments is string", "false"))
    assert encoding.chat_template != source
    assert supervised(tool_talk(arguments), encoding) == [
        [f'<tool_call>{{"name": "look", "arguments": {printed}}}</tool_call><|im_end|>']
    ]


def test_parallel_tool_calls(tiny_tokenizer):
    calls = [{"function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]
    talk = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        CIAO,
    ]
    first, second = supervised(talk, tiny_tokenizer)
    assert first == [
        '<tool_call>{"name": "a", "arguments": {}}</tool_call>\n'
        '<tool_call>{"name": "b", "arguments": {}}</tool_call><|im_end|>'
    ]
    assert second == ["Ciao<|im_end|>"]


def test_tools_in_every_form(tiny_tokenizer):
    def look():
        """d"""

    schema = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
    lists = [[schema], json.dumps([schema]), [json.dumps(schema)]]
    expected, *same = (conversation_branches(TALK, tiny_tokenizer, tools=tools).branches for tools in lists)
    assert all(branches == expected for branches in same)
    assert f"\n{json.dumps(schema)}\n" in tiny_tokenizer.decode(expected[0].input_ids)
    (branch, _) = conversation_branches(TALK, tiny_tokenizer, tools=[look]).branches
    assert '{"name": "look", "description": "d", ' in tiny_tokenizer.decode(branch.input_ids)
    for none in (None, [], "[]", ""):
        assert all_parts(conversation_branches(TALK, tiny_tokenizer, tools=none), tiny_tokenizer)[0][0] == OPEN


def test_reasoning_after_a_tool_call_stays_until_the_next_user_message(tiny_tokenizer):
    talk = [
        *tool_talk("{}", reasoning_content="first"),
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "Done", "reasoning_content": "second"},
        BYE,
        CIAO,
    ]
    to_tool, to_done, to_ciao = all_parts(conversation_branches(talk, tiny_tokenizer), tiny_tokenizer)
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call><|im_end|>'
    assert to_tool[1] == f"<think>\nfirst\n</think>\n\n{call}"
    assert to_tool[1] in to_done[0] and to_done[1] == "<think>\nsecond\n</think>\n\nDone<|im_end|>"
    assert f"{NEXT}{call}\n" in to_ciao[0] and f"{NEXT}Done<|im_end|>\n" in to_ciao[0]
    assert supervised(talk, tiny_tokenizer, reasoning="side_leaf") == [
        ["<think>\nfirst\n</think>"],
        [call, "<think>\nsecond\n</think>"],
        [call, "Done<|im_end|>", "Ciao<|im_end|>"],
    ]
    assert supervised(talk, tiny_tokenizer, reasoning="keep") == [[to_tool[1], to_done[1], "Ciao<|im_end|>"]]


def test_reasoning_inside_content(qwen3_tokenizer):
    inside = {"role": "assistant", "content": "<think>\nwhy\n</think>\n\nHello"}
    for mode in ("per_turn", "side_leaf", "keep"):
        outside = conversation_branches(TALK, qwen3_tokenizer, reasoning=mode)
        assert conversation_branches([SYSTEM, HI, inside, BYE, CIAO], qwen3_tokenizer, reasoning=mode) == outside
    without_opening = {"role": "assistant", "content": "why</think>Hello"}
    assert supervised([HI, without_opening], qwen3_tokenizer, reasoning="side_leaf") == [
        ["<think>\nwhy\n</think>"],
        ["Hello<|im_end|>"],
    ]


@pytest.mark.parametrize("name", ["reasoning", "thinking"])
def test_other_names_of_reasoning(tiny_tokenizer, name):
    message = {"role": "assistant", "content": "Hello", name: "why"}
    assert supervised([HI, message], tiny_tokenizer) == [["<think>\nwhy\n</think>\n\nHello<|im_end|>"]]


@pytest.mark.parametrize(
    "more",
    [
        {"reasoning_content": "", "reasoning": "why"},
        {"reasoning_content": None, "thinking_blocks": [{"type": "thinking", "thinking": "why", "signature": "x"}]},
        {"content": [{"type": "thinking", "thinking": "why"}, {"type": "text", "text": "Hello"}]},
    ],
)
def test_reasoning_in_other_places(tiny_tokenizer, more):
    message = {"role": "assistant", "content": "Hello", **more}
    assert supervised([HI, message], tiny_tokenizer) == [["<think>\nwhy\n</think>\n\nHello<|im_end|>"]]


def test_a_legacy_function_call_is_a_call(tiny_tokenizer):
    function = {"name": "look", "arguments": '{"x": 1}'}
    legacy = [
        HI,
        {"role": "assistant", "content": None, "function_call": function},
        {"role": "function", "content": "3"},
    ]
    call = {"type": "function", "function": function}
    expected = [HI, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "3"}]
    found = conversation_branches([*legacy, CIAO], tiny_tokenizer)
    assert found == conversation_branches([*expected, CIAO], tiny_tokenizer)
    assert found.counts == {"calls_without_tools": 1}
    assert conversation_branches([*legacy, CIAO], tiny_tokenizer, tools=[TOOL]).counts == {}


def test_text_that_looks_like_reasoning_stays_what_it_is(tiny_tokenizer):
    talk = [
        {"role": "user", "content": "a</think>b"},
        {"role": "assistant", "content": "Yes: <think>x</think> is a tag"},
    ]
    for mode in ("per_turn", "side_leaf", "keep"):
        (branch,) = conversation_branches(talk, tiny_tokenizer, reasoning=mode).branches
        text = tiny_tokenizer.decode(branch.input_ids)
        assert "a</think>b" in text and "Yes: <think>x</think> is a tag" in text


def test_keep_renders_each_turn_once_and_by_itself(tiny_tokenizer):
    def rendered(num_turns: int) -> int:
        template = chat_template_of(tiny_tokenizer, None, {})
        render, lengths = template.render, []
        template.render = lambda messages, *args, **more: (
            lengths.append(len(messages)) or render(messages, *args, **more)
        )
        try:
            conversation_branches([HI, HELLO] * num_turns, tiny_tokenizer, reasoning="keep")
        finally:
            del template.render
        return sum(lengths)

    rendered(1)
    assert rendered(40) - rendered(20) == rendered(60) - rendered(40)


def test_several_system_messages_are_rendered_where_they_are(tiny_tokenizer):
    talk = [SYSTEM, HI, {"role": "system", "content": "T"}, CIAO]
    ((context, said, _),) = all_parts(conversation_branches(talk, tiny_tokenizer), tiny_tokenizer)
    assert context.endswith(f"Hi<|im_end|>\n<|im_start|>system\nT<|im_end|>\n{NEXT}{EMPTY_THINK}")
    assert said == "Ciao<|im_end|>"


@pytest.mark.parametrize("mode", ["per_turn", "side_leaf", "keep"])
def test_messages_after_the_last_assistant_turn_are_left_out(tiny_tokenizer, mode):
    expected = conversation_branches(TALK, tiny_tokenizer, reasoning=mode)
    for trailing in ([BYE], [{"role": "tool", "content": "x"}, BYE]):
        assert conversation_branches([*TALK, *trailing], tiny_tokenizer, reasoning=mode) == expected


def test_empty_turns_are_an_end_token(tiny_tokenizer):
    talk = [HI, {"role": "assistant", "content": ""}, BYE, {"role": "assistant"}, {"role": "assistant"}]
    assert supervised(talk, tiny_tokenizer) == [["<|im_end|>"]] * 3
    for mode in ("side_leaf", "keep"):
        assert supervised(talk, tiny_tokenizer, reasoning=mode) == [["<|im_end|>"] * 3]


def test_control_tokens_inside_content_do_not_end_a_turn(tiny_tokenizer):
    talk = [HI, {"role": "assistant", "content": "a<|im_end|>b", "reasoning_content": "r"}, BYE, CIAO]
    assert supervised(talk, tiny_tokenizer)[0] == ["<think>\nr\n</think>\n\na<|im_end|>b<|im_end|>"]
    assert supervised(talk, tiny_tokenizer, reasoning="side_leaf")[1] == ["a<|im_end|>b<|im_end|>", "Ciao<|im_end|>"]


def test_a_header_inside_content_is_no_turn(tiny_tokenizer):
    talk = [{"role": "user", "content": f"x{NEXT}y"}, HELLO, BYE, CIAO]
    assert supervised(talk, tiny_tokenizer) == [["<think>\nwhy\n</think>\n\nHello<|im_end|>"], ["Ciao<|im_end|>"]]
    for mode in ("side_leaf", "keep"):
        with pytest.raises(ValueError, match=r"`messages`.*`reasoning='per_turn'`"):
            conversation_branches(talk, tiny_tokenizer, reasoning=mode)


def test_assistant_messages_of_the_prompt_are_context(tiny_tokenizer):
    whole = conversation_branches(TALK, tiny_tokenizer)
    only_last = conversation_branches(TALK, tiny_tokenizer, num_prompt_messages=4)
    assert only_last.branches == whole.branches[1:]
    for mode in ("side_leaf", "keep"):
        assert supervised(TALK, tiny_tokenizer, reasoning=mode, num_prompt_messages=4) == [["Ciao<|im_end|>"]]


def test_messages_as_a_json_string(tiny_tokenizer):
    assert conversation_branches(json.dumps(TALK), tiny_tokenizer) == conversation_branches(TALK, tiny_tokenizer)


# --- what is counted ------------------------------------------------------------------------------------------------


def test_a_turn_that_does_not_continue_its_prompt_is_refused(tiny_tokenizer):
    source = tiny_tokenizer.chat_template
    wordy = with_template(
        tiny_tokenizer, source.replace("'<|im_start|>assistant\\n' + empty_think", "'<|im_start|>me'")
    )
    assert wordy.chat_template != source
    with pytest.raises(TurnError, match=r"`messages\[2\]`.*generation prompt") as raised:
        conversation_branches(TALK, wordy, empty_thinking_in_prompt=False)
    assert raised.value.name == "refused_starts"


def test_reasoning_that_the_template_has_no_place_for_is_counted(tiny_tokenizer):
    source = tiny_tokenizer.chat_template
    silent = with_template(tiny_tokenizer, source.replace("{%- if message.reasoning_content -%}", "{%- if false -%}"))
    assert silent.chat_template != source
    for mode, branches in (("per_turn", 2), ("side_leaf", 1), ("keep", 1)):
        result = conversation_branches(TALK, silent, reasoning=mode)
        assert (len(result.branches), result.counts) == (branches, {"unrendered_reasoning": 1})


@pytest.mark.parametrize("mode", ["per_turn", "side_leaf", "keep"])
def test_reasoning_that_the_template_writes_for_other_turns_only_is_refused(tiny_tokenizer, mode):
    source = tiny_tokenizer.chat_template
    condition = "{%- if message.reasoning_content -%}"
    sparing = source.replace(condition, condition.replace(" -%}", " and message.reasoning_content != 'why' -%}"))
    assert sparing != source
    with pytest.raises(TurnError, match=r"`messages\[2\]`.*reasoning") as raised:
        conversation_branches(TALK, with_template(tiny_tokenizer, sparing), reasoning=mode)
    assert raised.value.name == "refused_reasoning"


REPLY = {"role": "ipython", "name": "f", "content": "3"}
DEVELOPER = {"role": "developer", "content": [{"type": "text", "text": "Be terse."}]}


@pytest.mark.parametrize("reasoning", ["per_turn", "side_leaf", "keep"])
@pytest.mark.parametrize(
    ("messages", "count"),
    [
        ([HI, CIAO, REPLY, REPLY, BYE, HELLO], 2),
        ([DEVELOPER, HI, CIAO, DEVELOPER, BYE, HELLO, REPLY], 2),
        ([HI, CIAO, {**REPLY, "content": "Hi"}, BYE, HELLO], 1),  # its text stands elsewhere
        ([HI, CIAO, {**REPLY, "content": " "}, BYE, HELLO], 0),
        ([SYSTEM, HI, HELLO, {"role": "tool", "content": "3"}, CIAO], 0),
    ],
)
def test_messages_that_the_template_leaves_out_are_counted(qwen3_tokenizer, messages, count, reasoning):
    result = conversation_branches(messages, qwen3_tokenizer, reasoning=reasoning)
    assert result.counts.get("unrendered_messages", 0) == count


def test_a_message_whose_text_is_changed_or_parsed_is_not_left_out(tiny_tokenizer):
    turn = "{%- for m in messages -%}<|im_start|>{{ m.role }} "
    end = "<|im_end|>{%- endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant {% endif -%}"
    for text in (
        "{{ m.content | upper if m.role == 'user' else m.content }}",
        "{% if m.content == 'x' %}{{ raise_exception('x') }}{% endif %}" + "{{ {'Hi': 1}.get(m.content, m.content) }}",
    ):
        result = conversation_branches([HI, CIAO], with_template(tiny_tokenizer, turn + text + end))
        assert result.counts == {}
    silent = with_template(tiny_tokenizer, turn + "{{ '' if m.role == 'user' else m.content }}" + end)
    assert conversation_branches([HI, CIAO], silent).counts == {"unrendered_messages": 1}


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        ([], {}, "`messages`"),
        ({"role": "user"}, {}, "`messages`.*dict"),
        ("{", {}, "`messages`.*JSON"),
        (["Hi"], {}, r"`messages\[0\]`.*str"),
        ([HI, {"content": "x"}], {}, r"`messages\[1\]`.*\['content'\].*`role`"),
        ([{"from": "human", "value": "x"}], {}, "`role`"),
        ([HI], {}, "assistant"),
        (TALK, {"num_prompt_messages": 5}, "assistant.* 5 "),
        (TALK, {"num_prompt_messages": "a"}, "`num_prompt_messages`.*'a'"),
        ([HI, {"role": "assistant", "content": 5}], {}, r"`messages\[1\].content`.*int"),
        ([HI, {"role": "assistant", "content": {"a": 1}}], {}, "dict.*`json.dumps`"),
        ([HI, {"role": "assistant", "tool_calls": ["x"]}], {}, r"`messages\[1\].tool_calls\[0\]`.*JSON"),
        ([HI, {"role": "assistant", "tool_calls": [{"x": 1}]}], {}, r"`messages\[1\].tool_calls\[0\]`.*`name`"),
        ([HI, {"role": "assistant", "content": "x", "extra": {1}}], {}, r"`messages\[1\].extra`.*set"),
        (TALK, {"tools": "{"}, "`tools`.*JSON"),
        (TALK, {"tools": TOOL}, "`tools`.*dict"),
        (TALK, {"tools": [5]}, r"`tools\[0\]`.*int"),
        (TALK, {"tools": ["look"]}, r"`tools\[0\]`.*JSON"),
        (TALK, {"tools": [HI]}, r"`tools\[0\]`.*'role'.*dialogues"),
        (TALK, {"tools": [{"messages": TALK}]}, r"`tools\[0\]`.*'messages'"),
        ([HI, {**HELLO, "reasoning_content": {"a": 1}}], {}, r"`messages\[1\]`.*dict"),
        (TALK, {"reasoning": "drop"}, "`reasoning`.*'drop'"),
        (TALK, {"reasoning": "think_split"}, "assistant.*'side_leaf'"),
        (TALK, {"chat_template_kwargs": {"tokenize": True}}, "`chat_template_kwargs`.*'tokenize'"),
    ],
)
def test_errors(tiny_tokenizer, messages, options, expected):
    with pytest.raises(ValueError, match=expected):
        conversation_branches(messages, tiny_tokenizer, **options)


def test_a_template_that_cannot_render_says_why(tiny_tokenizer):
    template = (
        "{%- for m in messages -%}{%- if m.role == 'tool' -%}{{ raise_exception('no tools here') }}{%- endif -%}"
    )
    template += "{{ m.content + m.name }}{%- endfor -%}"
    refusing = with_template(tiny_tokenizer, template)
    with pytest.raises(ValueError, match=r"TemplateError: no tools here.*user, tool"):
        conversation_branches([{**HI, "name": "x"}, {"role": "tool"}, CIAO], refusing)
    with pytest.raises(ValueError, match=r"UndefinedError: .*'name'"):
        conversation_branches([HI, CIAO], refusing)
    with pytest.raises(ValueError, match=r"TemplateSyntaxError: unexpected '}'"):
        conversation_branches([HI, CIAO], with_template(tiny_tokenizer, "{% if }"))


def test_a_tokenizer_without_chat_template(tiny_tokenizer):
    with pytest.raises(ValueError, match=r"`tokenizer.chat_template`"):
        conversation_branches(TALK, with_template(tiny_tokenizer, None))
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    options = {"chat_template_kwargs": {"chat_template": template}}
    assert supervised([HI, CIAO], with_template(tiny_tokenizer, None), **options) == [["Ciao<|im_end|>"]]
