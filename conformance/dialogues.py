# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The dialogues that every chat template is judged on. Every text in them has a word of its own ("zuser1q"), so that a
piece of a rendering tells which field of which message wrote it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True)
class Dialogue:
    """
    One way to write one kind of dialogue down.

    Args:
        cell (`str`): The kind, a column of the table.
        form (`str`): How this one is written, e.g. its tool-call arguments as JSON strings.
        messages (`list[Message]`): The data, as a dataset row has it.
        tools (`list`, *optional*): Tool schemas.
    """

    cell: str
    form: str
    messages: list[Message]
    tools: list[Any] | None = None


def _tool(name: str, **properties: str) -> Message:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind, "description": f"zabout{key}q"} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": f"About {name}.", "parameters": schema}}


TOOLS = [_tool("zlookq", place="string", limit="integer"), _tool("zlistq")]


def _user(n: int) -> Message:
    return {"role": "user", "content": f"Tell zuser{n}q now."}


def _said(n: int, text: bool = True, **more: Any) -> Message:
    return {"role": "assistant", "content": f"It is zreply{n}q there." if text else None, **more}


def _call(n: int, arguments: Any = ..., name: str = "zlookq", write: Any = lambda value: value) -> Message:
    values = {"place": f"zplace{n}q", "limit": 73000 + n} if arguments is ... else arguments
    return {
        "id": f"call0000{n}",
        "type": "function",
        "function": {"name": name, "arguments": write(values)},
    }


def _result(n: int, text: str = "", name: str = "zlookq") -> Message:
    content = text or f"Found ztool{n}q."
    return {"role": "tool", "name": name, "tool_call_id": f"call0000{n}", "content": content}


def _thought(n: int, form: str, text: str | None = None) -> Message:
    """An assistant message that reasons, under a key of its own or in the text."""
    message, thought = _said(n), f"I think zthought{n}q first."
    if form == "<think>":
        return {**message, "content": f"<think>\n{thought}\n</think>\n\n{message['content']}"}
    return {**message, form: thought}


def _parts(message: Message) -> Message:
    """The message with its text in two parts, as multimodal data has it."""
    head, tail = message["content"][:4], message["content"][4:]
    return {**message, "content": [{"type": "text", "text": head}, {"type": "text", "text": tail}]}


def _agent(call: Message, *more: Message, text: bool = False) -> list[Message]:
    """A user asks, the model calls (and maybe says so), the tools answer, the model answers."""
    calls = [call, *more]
    results = [_result(i, name=c["function"]["name"]) for i, c in enumerate(calls, 1)]
    return [_user(1), _said(1, text, tool_calls=calls), *results, _said(2)]


def _dialogues() -> list[Dialogue]:
    talk = [_user(1), _said(1), _user(2), _said(2)]
    forms = {"objects": lambda value: value, "strings": lambda value: json.dumps(value, separators=(",", ":"))}
    dialogues = [Dialogue("plain", "text", talk[:2]), Dialogue("two turns", "text", talk)]
    for key in ("reasoning_content", "<think>"):
        dialogues.append(Dialogue("reasoning", key, [_user(1), _thought(1, key)]))
        dialogues.append(
            Dialogue("reasoning + two turns", key, [_user(1), _thought(1, key), _user(2), _thought(2, key)])
        )
    for form, write in forms.items():
        dialogues.append(Dialogue("call", form, _agent(_call(1, write=write)), TOOLS))
        dialogues.append(Dialogue("call + text", form, _agent(_call(1, write=write), text=True), TOOLS))
        both = _agent(_call(1, write=write), _call(2, write=write))
        dialogues.append(Dialogue("several calls", form, both, TOOLS))
    nothings: dict[str, Any] = {"{}": {}, '"{}"': "{}", '""': "", "null": None}
    for form, nothing in nothings.items():
        dialogues.append(Dialogue("no arguments", form, _agent(_call(1, nothing, "zlistq")), TOOLS))
    dialogues.append(Dialogue("parts", "list of text", [_parts(message) for message in talk]))
    dialogues.append(Dialogue("adjacent assistants", "text", [_user(1), _said(1), _said(2), _user(2), _said(3)]))
    dialogues.append(Dialogue("system", "text", [{"role": "system", "content": "Be zsystemq."}, *talk[:2]]))
    failed = [
        *_agent(_call(1))[:2],
        _result(1, "Error: ztool1q is not there."),
        _said(2, False, tool_calls=[_call(2)]),
        _result(2),
        _said(3),
    ]
    dialogues.append(Dialogue("tool error", "text", failed, TOOLS))
    return dialogues


DIALOGUES = _dialogues()
CELLS = list(dict.fromkeys(dialogue.cell for dialogue in DIALOGUES))


def reasoning_of(message: Message) -> str | None:
    """The word of an assistant message's reasoning, if it has any."""
    return next((word for word in words_of(message) if word.startswith("zthought")), None)


def words_of(message: Message) -> list[str]:
    """The words of a message's own text, reasoning and calls (names and argument values)."""
    words = [str(message.get(key)) for key in ("reasoning_content", "thinking", "reasoning")]
    content = message.get("content")
    words.append("".join(part["text"] for part in content) if isinstance(content, list) else str(content))
    for call in message.get("tool_calls") or ():
        words += [call["function"]["name"], str(call["function"]["arguments"])]
    text = " ".join(words)
    parts = "".join(c if c.isalnum() else " " for c in text).split()
    return [word for word in parts if (word[0] == "z" and word[-1] == "q") or word.startswith("7300")]
