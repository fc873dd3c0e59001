# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Chat messages and tool schemas as real data has them, brought to the one form that chat templates agree on.

Cost: linear in the messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_prefix_tree.tree.folding import check_type

Message = dict[str, Any]
Tools = Sequence[Mapping[str, Any] | str | Callable[..., Any]] | str

# Names that data uses for a message's reasoning. Templates read the first; gpt-oss reads the second.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")

_BEFORE_WORD, _AFTER_WORD = " \t`'\"*([{<\u201c\u2018\u00ab", "`'\"*)]}\u201d\u2019\u00bb"  # of a quoted tag
MAX_DEPTH = 100  # levels of a message; Python recurses over them


class TurnError(ValueError):
    """A turn that cannot be supervised exactly. `name` is what counts it, see `hf_prefix_tree.data.counts.LOSSES`."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[type[TurnError], tuple[str, str]]:
        return type(self), (self.name, str(self))


def normalize_messages(messages: Sequence[Mapping[str, Any]] | str) -> list[Message]:
    """
    Copy messages into plain data of one form. [`Dialect`] then gives a template the form that it reads.

    Keys that are `None` are dropped, and a missing `content` becomes `""`. A list of text parts becomes its text. The
    reasoning, under whatever name, is found under `reasoning_content` and `thinking`. Calls are dicts: those given as
    JSON strings are parsed, a legacy `function_call` is one of them, and no arguments are `{}`.

    Args:
        messages (sequence of mappings, or a JSON string of one):
            OpenAI chat messages.

    Raises:
        `ValueError`: If there is no message, a message has no role, or something in it is not plain data.
    """
    messages = parsed_json(messages, "messages")
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"`messages` is a {type(messages).__name__}; pass a list of dicts with `role` and `content`.")
    if not messages:
        raise ValueError("`messages` is empty; drop the row or give it at least one assistant message.")
    return [_normalize_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def normalize_tools(tools: Tools | None) -> list[Any] | None:
    """
    Tool schemas as a list of dicts, `None` if there are none.

    Args:
        tools (sequence or `str`, *optional*):
            JSON schemas, JSON strings of them, or documented functions; or one JSON string of a list.

    Raises:
        `ValueError`: If it is not a list of tools, or not JSON.
    """
    if tools is None or (isinstance(tools, str) and not tools.strip()):
        return None
    tools = parsed_json(tools, "tools")
    if isinstance(tools, (str, Mapping)) or not isinstance(tools, Sequence):
        raise ValueError(f"`tools` is a {type(tools).__name__}; pass a list of tool schemas, or a JSON string of one.")
    return [_normalize_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None


def split_reasoning(message: Message) -> tuple[str, Message]:
    """
    The reasoning of a normalized message, `""` if there is none, and the message without it.

    Reasoning is `reasoning_content` as it is, or what stands in `content` up to `</think>` (see [`split_thought`]),
    without the line breaks around the tags. Content that begins with a `<think>` which is never closed is all
    reasoning.
    """
    if (unclosed := unclosed_reasoning(message)) is not None:
        return unclosed, {**message, "content": ""}
    visible = {key: value for key, value in message.items() if key not in REASONING_KEYS}
    reasoning, content = message.get("reasoning_content", ""), message["content"]
    if message["role"] != "assistant" or not isinstance(content, str):
        return reasoning, visible
    if not reasoning:
        thought, content = split_thought(content)
        reasoning = thought.lstrip().removeprefix("<think>").removesuffix("</think>").strip("\n")
        visible["content"] = content.lstrip("\n") if thought else content
    return reasoning if reasoning.strip() else "", visible


def split_thought(content: str) -> tuple[str, str]:
    """
    The reasoning at the start of an assistant's text, tags included, and the rest; `("", content)` if there is none.

    It ends with `</think>`, and begins with `<think>` unless that was in the prompt. A `</think>` between spaces, in
    quotes, brackets or a block of code is a word of the text: one that ends reasoning follows the last word directly,
    or begins a line and stands alone there or directly before the answer, or begins the text.
    """
    opened = content.lstrip().startswith("<think>")
    for match in re.finditer("</think>", content):
        before, after = content[: match.start()], content[match.end() :]
        if not opened and "<think>" in before:
            break
        left, right = before.rpartition("\n")[2], after.partition("\n")[0]
        if left.strip():
            ends = left[-1] not in _BEFORE_WORD and (not right or right[0] not in _AFTER_WORD)
        else:
            ends = not right.strip() or right[0] not in _AFTER_WORD + " \t" or not before.strip()
        if ends and before.count("```") % 2 == 0:
            return content[: match.end()], after
    if opened:
        thought, closed, after = content.partition("</think>")
        return thought + closed, after if closed else content
    return "", content


def unclosed_reasoning(message: Message) -> str | None:
    """The reasoning of a normalized message that was cut off in the middle of it: `<think>` without `</think>`."""
    content = message["content"]
    if message["role"] != "assistant" or not isinstance(content, str) or "reasoning_content" in message:
        return None
    opening, opened, reasoning = content.partition("<think>")
    return reasoning.strip() if opened and not opening.strip() and "</think>" not in reasoning else None


def _normalize_message(message: Any, name: str) -> Message:
    check_type(message, name, Mapping, "a dict with `role` and `content`")
    plain = {key: value for key, value in plain_data(message, name).items() if value is not None}
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise ValueError(f"`{name}` has the keys {list(message)} and no `role`; name who says it, e.g. 'user'.")
    content = plain.setdefault("content", "")
    check_type(content, f"{name}.content", str | list, "a string, e.g. with `json.dumps`")
    reasoning = [*map(plain.get, REASONING_KEYS), _thoughts(plain.pop("thinking_blocks", []))]
    if isinstance(content, list):
        reasoning.append(_thoughts(content))
        content = [part for part in content if not (isinstance(part, dict) and "thinking" in part)]
        texts = list(map(_text, content))
        plain["content"] = content if None in texts else "".join(map(str, texts))
    plain = {key: value for key, value in plain.items() if key not in REASONING_KEYS}
    if thought := next(filter(None, reasoning), ""):
        if not isinstance(thought, str):
            raise ValueError(f"the reasoning of `{name}` is a {type(thought).__name__}; pass a string.")
        plain |= {"thinking": thought, "reasoning_content": thought}
    legacy = plain.pop("function_call", None)
    calls = plain.pop("tool_calls", None) or ([{"type": "function", "function": legacy}] if legacy else [])
    if plain["role"] == "function":
        plain["role"] = "tool"
    if isinstance(calls, str):
        calls = parsed_json(calls.strip() or "[]", f"{name}.tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, (dict, str)) for call in calls):
        raise ValueError(f"`{name}.tool_calls` is {str(calls)[:80]!r}; pass a list of dicts with a `function`.")
    if calls:
        plain["tool_calls"] = [_normalize_call(call, f"{name}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return plain


def _normalize_call(call: Any, name: str) -> Message:
    call = parsed_json(call, name)
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"`{name}` is {str(call)[:80]!r}; pass a dict whose `function` has `name` and `arguments`.")
    if function.get("arguments") in (None, ""):  # no arguments
        function = {**function, "arguments": {}}
    if "function" in call:
        return {**call, "function": function}
    parts = {key: function[key] for key in ("name", "arguments")}
    return {"type": "function", **{key: call[key] for key in ("id",) if key in call}, "function": parts}


def _text(part: Any) -> str | None:
    """The text of a part of a content, `None` if it is another kind of part, like an image."""
    if isinstance(part, str):
        return part
    text = part.get("text") if isinstance(part, dict) and str(part.get("type") or "text").endswith("text") else None
    return text if isinstance(text, str) else None


def _thoughts(parts: Any) -> str:
    """The reasoning among the parts of a content."""
    thoughts = [part.get("thinking") for part in parts if isinstance(part, dict)]
    return "".join(thought for thought in thoughts if isinstance(thought, str))


def _normalize_tool(tool: Any, name: str) -> Any:
    tool = parsed_json(tool, name)
    if callable(tool):
        from transformers.utils import get_json_schema

        tool = get_json_schema(tool)
    check_type(tool, name, Mapping, "a tool's JSON schema, a dict")
    if {"role", "content", "messages"} & tool.keys() and "function" not in tool:
        raise ValueError(f"`{name}` has the keys {sorted(tool)}, as dialogues have; pass a tool's JSON schema.")
    return plain_data(tool, name)


def parsed_json(value: Any, name: str, of_format: str = "") -> Any:
    """The object of a JSON string; other values as they are. A `ValueError` names `name` for a string that is none."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"`{name}` is no JSON{of_format} ({error}), got {value[:80]!r}; pass the object itself."
        ) from None


def check_text(text: Any, name: str) -> str:
    """`text`, if a tokenizer can read it; a `ValueError` that names `name` otherwise."""
    check_type(text, name, str, "a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"`{name}` has {text[error.start]!r} at index {error.start}, half of a surrogate pair, as JSON has where "
            "an emoji was cut in two; remove it."
        ) from None
    return text


def plain_data(value: Any, name: str, depth: int = 0) -> Any:
    """A copy made of dicts, lists and JSON scalars: templates print anything else as a placeholder, or crash."""
    if depth > MAX_DEPTH:
        raise ValueError(f"`{name[:80]}` is nested more than {MAX_DEPTH} levels deep; pass it as a JSON string.")
    if value is None or type(value) in (int, float, bool):
        return value
    if isinstance(value, str):
        return check_text(value, name)
    if isinstance(value, Mapping):
        return {check_text(key, name): plain_data(item, f"{name}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{name}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise ValueError(f"`{name}` is a {type(value).__name__}, which is not JSON; pass a string or a number.")
