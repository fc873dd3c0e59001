"""A dialogue in every chat format that is read gives the branches of the same in OpenAI's, token for token."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_prefix_tree.data.rows import MESSAGE_KINDS, RowOptions, row_branches, row_kind
from tests.fuzz.inputs import inputs
from tests.support.byte_tokenizer import byte_tokenizer

# Prints all of a message, each with marks of its own, and takes reasoning as a field.
TEMPLATE = (
    "{{ tools | tojson if tools }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOKENIZER = byte_tokenizer()
TOKENIZER.chat_template = TEMPLATE
Message = dict[str, Any]

WORDS = st.text(st.sampled_from("ab é😀{[\"'\\"), min_size=1, max_size=5).map(lambda text: f"x{text}x")
THOUGHTS = st.one_of(st.just(""), WORDS)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["p", "q"]),
    st.one_of(WORDS, st.integers(-2, 2), st.booleans(), st.lists(WORDS, max_size=2)),
    max_size=2,
)
CALLS = st.lists(st.tuples(st.sampled_from(["look", "find.it"]), ARGUMENTS), max_size=2)
TOOLS = [{"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}]


@st.composite
def dialogues(draw: Any) -> list[Message]:
    """OpenAI messages: each turn may think, says something or calls, and calls have a result each."""
    talk: list[Message] = [{"role": "system", "content": draw(WORDS)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 2))):
        talk.append({"role": "user", "content": draw(WORDS)})
        for calls in (draw(CALLS), []):
            said = draw(st.one_of(st.just(""), WORDS)) if calls else draw(WORDS)
            turn = {"role": "assistant", "content": said, "reasoning_content": draw(THOUGHTS)}
            if calls:
                functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
                turn["tool_calls"] = [{"type": "function", "function": function} for function in functions]
            talk.append({key: value for key, value in turn.items() if value or key == "content"})
            talk += [{"role": "tool", "content": draw(WORDS)} for _ in calls]
            if not calls:
                break
    return talk


def functions(message: Message) -> list[Message]:
    return [call["function"] for call in message.get("tool_calls", ())]


def in_content(message: Message) -> str:
    """The text with the reasoning in front, as raw output has it."""
    thought = message.get("reasoning_content")
    return f"<think>\n{thought}\n</think>\n\n{message['content']}" if thought else message["content"]


def rows(talk: list[Message], roles: dict[str, str], keys: tuple[str, str], call_role: str) -> list[Message]:
    """Messages whose calls are messages of their own, after what was said; reasoning stands in the text."""
    written = []
    for message in talk:
        said = in_content(message)
        if said or not functions(message):
            written.append(dict(zip(keys, (roles.get(message["role"], message["role"]), said), strict=True)))
        calls = functions(message)
        together = [calls] if len(calls) > 1 and call_role == "function_call" else calls  # a message for all, or each
        written += [dict(zip(keys, (call_role, json.dumps(call)), strict=True)) for call in together]
    return written


def sharegpt(talk: list[Message]) -> Message:
    roles = {"user": "human", "assistant": "gpt", "tool": "observation"}
    return {"conversations": rows(talk, roles, ("from", "value"), "function_call")}


def call_roles(talk: list[Message]) -> Message:
    return {"messages": rows(talk, {"tool": "tool_response"}, ("role", "content"), "tool_call")}


def anthropic(talk: list[Message]) -> Message:
    written: list[Message] = []
    for message in talk:
        if message["role"] == "tool":
            written.append({"role": "user", "content": [{"type": "tool_result", "content": message["content"]}]})
            continue
        thought = (
            [{"type": "thinking", "thinking": message["reasoning_content"]}] if "reasoning_content" in message else []
        )
        text = [{"type": "text", "text": message["content"]}] if message["content"] else []
        uses = [{"type": "tool_use", "name": f["name"], "input": f["arguments"]} for f in functions(message)]
        blocks = [*thought, *text, *uses]
        written.append({"role": message["role"], "content": blocks if thought or uses else message["content"]})
    system = [message["content"] for message in talk if message["role"] == "system"]
    row: Message = {"messages": [message for message in written if message["role"] != "system"]}
    return row | ({"system": system[0]} if system else {})


def hermes(talk: list[Message]) -> Message:
    written = []
    for message in talk:
        calls = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in functions(message))
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        said = result if message["role"] == "tool" else in_content(message) + calls
        written.append({"role": message["role"], "content": said})
    return {"messages": written}


def raw_trajectory(talk: list[Message]) -> Message:
    """Calls, arguments and reasoning under other names, as strings, and the whole as a string."""
    written = []
    for message in talk:
        changed = {key: value for key, value in message.items() if key != "reasoning_content"}
        changed |= {"reasoning": message["reasoning_content"]} if "reasoning_content" in message else {}
        if calls := functions(message):
            strings = [f | {"arguments": json.dumps(f["arguments"]) if f["arguments"] else None} for f in calls]
            changed["tool_calls"] = [json.dumps({"function": call}) for call in strings]
        written.append(changed)
    return {"messages": json.dumps(written)}


def prompted(talk: list[Message]) -> Message:
    """The messages before the first turn are the prompt; content comes in parts."""
    first = next(i for i, message in enumerate(talk) if message["role"] == "assistant")
    parts = [m | {"content": [{"type": "text", "text": part} for part in m["content"]] or None} for m in talk]
    return {"prompt": parts[:first], "completion": parts[first:]}


def alpaca(talk: list[Message]) -> Message:
    """The texts alone: a question and an answer each."""
    texts = [message["content"] for message in talk if message["role"] != "system"]
    *history, (instruction, output) = zip(texts[::2], texts[1::2], strict=True)
    return {"instruction": instruction, "output": output, "history": list(map(list, history))}


WRITERS = (sharegpt, call_roles, anthropic, hermes, raw_trajectory, prompted)


def branches(row: Message, tools: Any) -> list[tuple[list[int], list[float]]]:
    kind = row_kind(row)
    assert kind in MESSAGE_KINDS
    options = RowOptions(kind, TOKENIZER)
    read = row_branches({**row, "tools": tools}, options, Counter())
    return [(branch.input_ids.tolist(), branch.weights.tolist()) for branch in read]


@pytest.mark.parametrize("write", WRITERS)
def test_a_format_gives_the_branches_of_openai_messages(write):
    @inputs(40)
    @given(dialogues())
    def run(talk):
        tools = [{"type": "function", "function": TOOLS[0]}]
        bare = [TOOLS[0] if write is not anthropic else {**TOOLS[0], "input_schema": TOOLS[0]["parameters"]}]
        if write is anthropic:
            bare[0].pop("parameters")
        assert branches(write(talk), bare) == branches({"messages": talk}, tools)

    run()


def test_alpaca_gives_the_branches_of_openai_messages():
    @inputs(20)
    @given(dialogues())
    def run(talk):
        plain = [{"role": m["role"], "content": m["content"]} for m in talk if m["role"] in ("user", "assistant")]
        said = [m for m in plain if m["content"]]
        talk = [m for m, after in zip(said, [*said[1:], {"role": "user"}], strict=True) if m["role"] != after["role"]]
        assert branches(alpaca(talk), None) == branches({"messages": talk}, None)

    run()
