# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The forms in which templates read messages: keys of reasoning, arguments as objects or strings, text or parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from conformance.dialogues import Message, reasoning_of


@dataclass(frozen=True)
class Form:
    """How messages are written down for a template."""

    thought: tuple[str, ...]  # the keys of reasoning, or "content" for a think block in the text, "raw" for its end
    # alone (the prompt has its start), "blocks" for a part of its own
    arguments: str  # of calls: "object", "string" or "as given"
    empty: str | None  # what stands for no text
    text: str  # "text", "parts", or "one part"


def forms_of(messages: list[Message]) -> list[Form]:
    """
    The forms that templates take, the most common first: of reasoning, tool-call arguments, no text, and text.

    Reasoning in the text is looked at only if the data has it there: as text it is printed by any template.
    """
    inline = any("<think>" in str(message.get("content")) for message in messages)
    reasons = inline or any(reasoning_of(message) for message in messages)
    calls = any("tool_calls" in message for message in messages)
    parts = any(isinstance(message.get("content"), list) for message in messages)
    keys = (("reasoning_content", "thinking"), ("reasoning_content",), ("thinking",), ("reasoning",))
    thoughts = (*keys, ("blocks",), ("raw",))
    return [
        Form(thought, arguments, empty, text)
        for text in (("text", "parts", "one part") if parts else ("text", "one part"))
        for arguments in (("object", "string", "as given") if calls else ("object",))
        for thought in ((*thoughts, ("content",)) if inline else thoughts if reasons else thoughts[:1])
        for empty in (("", None) if calls else ("",))
    ]


def written_as(message: Message, form: Form) -> Message:
    """The message in this form."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list) and form.text != "parts":
        content = "".join(part["text"] for part in content)
    reasoning = message.pop("reasoning_content", None)
    if isinstance(content, str) and content.startswith("<think>") and form.thought != ("content",):
        reasoning, content = content.removeprefix("<think>\n").split("\n</think>\n\n")
    if reasoning is not None and form.thought == ("raw",):
        content = f"{reasoning}\n</think>\n\n{content or ''}"
    elif reasoning is not None and form.thought == ("blocks",):
        content = [{"type": "thinking", "thinking": reasoning}, {"type": "text", "text": content or ""}]
    elif form.text == "one part":
        content = [{"type": "text", "text": content or ""}]
    message["content"] = content or form.empty
    if form.thought not in (("raw",), ("blocks",), ("content",)):
        message |= {key: reasoning for key in form.thought if reasoning is not None}
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"], form)}}
            for call in message["tool_calls"]
        ]
    return message


def _arguments(given: Any, form: Form) -> Any:
    if form.arguments == "as given" and isinstance(given, str) and given:
        return given
    value = (json.loads(given or "{}") if isinstance(given, str) else given) or {}
    return value if form.arguments == "object" else json.dumps(value)


def is_foreign_form(text: str) -> bool:
    """Whether a rendering has escaped JSON, Python, or `None` in it, as of data that the template was not made for."""
    return any(sign in text for sign in ('\\"', "{'", "': ", '{{"', '"type": "text"', "None"))
