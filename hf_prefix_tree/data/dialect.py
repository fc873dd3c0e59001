# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""How a chat template wants messages, and what ends a turn under it: found once, by rendering small conversations.

Templates disagree on what a call without text has for `content`, whether arguments are objects or JSON strings,
whether `content` is a string or a list of parts, and where reasoning stands. Each gets the form that it renders whole.

Cost: about twenty renderings of two messages per template; then linear in the messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.data.messages import REASONING_KEYS, Message, TurnError, split_reasoning
from hf_prefix_tree.tree.folding import common_prefix

if TYPE_CHECKING:
    from hf_prefix_tree.data.template import SegmentTokenizer

Ids = npt.NDArray[np.int64]

# What a probe says, asks, thinks and calls: words that no template has.
USER, TEXT, THOUGHT, _NAME, _KEY, _VALUE = (
    f"Zq7x{name}" for name in ("User", "Text", "Thought", "Name", "Key", "Val")
)
ASK = {"role": "user", "content": USER}
_ARGUMENTS = {_KEY: _VALUE}
_SCHEMA = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "d",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string", "description": "d"}}},
    },
}
Render = Callable[[Sequence[Message], list[Any] | None], str]


class Dialect:
    """
    The form of messages that one chat template renders whole, and where its turns end.

    Args:
        render (`Callable`):
            Renders messages with tools. Raises `ValueError` where the template does.
        segments ([`SegmentTokenizer`]):
            The tokenizer that goes with the template.
        eos (`int`, *optional*):
            The tokenizer's end token.
    """

    def __init__(self, render: Render, segments: SegmentTokenizer, eos: int | None) -> None:
        self._render = render
        self._segments = segments
        self._parts = self._wants_parts()
        self.reasoning_form = self._find_reasoning_form()
        # Some templates write the reasoning before calls alone, or an empty think block of their own.
        thoughtful = self._formed(_call_message(_ARGUMENTS) | dict.fromkeys(REASONING_KEYS, THOUGHT))
        self._reasons_in_calls = THOUGHT in self._try(thoughtful, tools=True)
        self._writes_block = "</think>" in self._try(self._formed({"role": "assistant", "content": TEXT}))
        self._arguments, self._without_content = self._find_call_form()
        self.turn_end_id, self.past_turn_end_id, self._closing, self._trailer = self._find_end(eos)
        self._call_end_id, self._call_closing = self._find_call_end()

    def adapt(self, message: Message) -> Message:
        """
        A normalized message in the form that the template reads.

        Reasoning that stands inside `content` is moved out of it where the template writes reasoning by itself.
        """
        if message["role"] != "assistant":
            return self._formed(message)
        reasoning, visible = split_reasoning(message)
        writes = self.writes_reasoning(message)
        if reasoning and writes:
            message = visible | dict.fromkeys(REASONING_KEYS, reasoning)
        elif not reasoning and (writes or self._writes_block):  # without an empty block
            message = visible
        if "tool_calls" in message:
            message = {**message, "tool_calls": [self._with_arguments(call) for call in message["tool_calls"]]}
            if message["content"] == "" and self._without_content:
                message = {key: value for key, value in message.items() if key != "content"}
        if self.reasoning_form == "part" and "reasoning_content" in message and isinstance(message["content"], str):
            thought = {"type": "thinking", "thinking": message["reasoning_content"]}
            message = {key: value for key, value in message.items() if key not in REASONING_KEYS}
            text = [{"type": "text", "text": message["content"]}] if message["content"] else []
            return {**message, "content": [thought, *text]}
        return self._formed(message)

    def writes_reasoning(self, message: Message) -> bool:
        """Whether the template writes the reasoning of such a message, if there is any."""
        return self.reasoning_form is not None or (self._reasons_in_calls and "tool_calls" in message)

    def end_turn(self, ids: Ids, start: int, calls: bool, stop_ids: frozenset[int] | None) -> tuple[Ids, int]:
        """
        The rendering of a turn that begins at `start`, and where the turn ends in it, its stop token included.

        The template writes only special tokens and white space after the text of a turn, if anything. The stop token
        among them is the first of `stop_ids`, or else the one that closes the template's own turns. A template may
        leave it to the next message to close a turn: the token is then appended.

        Raises:
            [`TurnError`]: If a template that closes turns doesn't close this one.
        """
        length = len(self._trailer)
        if length and np.array_equal(ids[-length:], self._trailer):
            ids = ids[:-length]
        tail = len(ids)
        while tail > start and self._is_control(int(ids[tail - 1])):
            tail -= 1
        after = ids[tail:].tolist()
        closing = self._call_closing if calls and len(self._call_closing) else self._closing
        for ends in (stop_ids or (), (self.turn_end_id,)):
            if at := [i for i, token_id in enumerate(after) if token_id in ends]:
                return ids, tail + at[0] + 1
        if len(closing) and not (calls and self._call_end_id in after):
            ids = np.concatenate([ids, closing])
            return ids, len(ids)
        special = [i for i, token_id in enumerate(after) if token_id in self._segments.special_ids]
        if special and (not calls or after[special[-1]] == self._call_end_id):
            return ids, tail + special[-1] + 1
        if self.turn_end_id is None and self._writes_end:  # as text
            return ids, len(ids)
        raise TurnError("refused_ends", "the chat template writes no stop token after it")

    def _is_control(self, token_id: int) -> bool:
        return token_id in self._segments.special_ids or self._segments.is_blank(token_id)

    def _try(self, *messages: Message, tools: bool = False) -> str:
        """The rendering of a question and what follows it; empty if the template can't."""
        question = self._formed(ASK)
        for schemas in ([_SCHEMA],) if tools else (None, [_SCHEMA]):
            try:
                return self._render([question, *messages], schemas)
            except ValueError:  # written for another form of messages, or for tools
                continue
        return ""

    def _wants_parts(self) -> bool:
        """Whether `content` has to be a list of parts, as templates of models for images read it."""
        for wants_parts in (False, True):
            self._parts = wants_parts
            text = self._try(self._formed({"role": "assistant", "content": TEXT}))
            if USER in text and TEXT in text:
                return wants_parts
        return False

    def _find_reasoning_form(self) -> str | None:
        """How the template takes the reasoning of the last turn: as a "field", as a "part" of the content, or not."""
        answer = {"role": "assistant", "content": TEXT}
        field = answer | dict.fromkeys(REASONING_KEYS, THOUGHT)
        if THOUGHT in self._try(self._formed(field)):
            return "field"
        parts = [{"type": "thinking", "thinking": THOUGHT}, {"type": "text", "text": TEXT}]
        text = self._try({**answer, "content": parts}).rpartition(USER)[2]
        return "part" if THOUGHT in text and TEXT in text and "{" not in text else None

    def _find_call_form(self) -> tuple[type | None, bool]:
        """The type of arguments, `None` if objects and strings are alike, and whether a call without text has none."""
        rendered: dict[type, list[tuple[int, bool, str]]] = {dict: [], str: []}
        for arguments, without_content in product((_ARGUMENTS, json.dumps(_ARGUMENTS)), (False, True)):
            message = _call_message(arguments)
            if without_content:
                del message["content"]
            text = self._try(message, tools=True).rpartition(USER)[2]
            parts = (_NAME, _VALUE, *([arguments] if isinstance(arguments, str) else []))
            if all(part in text for part in parts) and str(_ARGUMENTS) not in text:
                rendered[type(arguments)].append((len(text), without_content, text))
        if not rendered[dict]:
            return (str, min(rendered[str])[1]) if rendered[str] else (None, False)
        # The shorter one has no "None" for a content, and no header for an empty text.
        _, without_content, text = min(rendered[dict])
        alike = rendered[str] and _squeezed(json.dumps(_ARGUMENTS)) in _squeezed(text)
        return None if alike else dict, without_content

    def _find_end(self, eos: int | None) -> tuple[int | None, int | None, Ids, Ids]:
        """
        The stop token, the one of a turn that is not the last, what has to be appended to a rendering, and what a
        template says after the turn.
        """
        answer = self.adapt({"role": "assistant", "content": TEXT})
        texts = self._try(answer), self._try(answer, self._formed(ASK))
        last, followed = (text.partition(TEXT)[2] for text in texts)
        last_ids, followed_ids = self._segments.encode([last, followed])
        shared = self._first_run(last_ids[: common_prefix(last_ids, followed_ids)])
        past = next(iter(self._special(followed_ids)), None)
        written, nothing = self._special(last_ids), last_ids[:0]
        self._writes_end = bool(last.strip(" ")) or TEXT not in texts[0]
        if written:
            end = eos if eos in shared else shared[-1] if shared else written[0]
            trailer = last_ids[last_ids.tolist().index(end) + 1 :]
            says = not all(map(self._is_control, trailer.tolist()))
            return end, past, nothing, trailer if says else nothing
        closing = self._appended(last, followed)
        return (int(closing[-1]) if len(closing) else None), past, closing, nothing

    def _find_call_end(self) -> tuple[int | None, Ids]:
        """The special token that ends a turn with calls, and what has to be appended to its rendering."""
        message = self.adapt(_call_message(_ARGUMENTS))
        result = self._formed({"role": "tool", "content": TEXT, "name": _NAME, "tool_call_id": "call00000"})
        two = {**message, "tool_calls": message["tool_calls"] * 2}
        turns = [message], [two], [message, result]
        last, twice, followed = (self._try(*turn, tools=True).rpartition(_VALUE)[2] for turn in turns)
        (ids,) = self._segments.encode([twice or last])
        after, nothing = self._special(ids), ids[:0]
        if self.turn_end_id in after or not len(self._closing):
            return (after[-1] if after else None), nothing
        closing = self._appended(last, followed)
        return (None, closing) if len(closing) else (after[-1] if after else None, nothing)

    def _appended(self, last: str, followed: str) -> Ids:
        """What a message that follows closes a turn with: up to its first special token, if only blanks are before."""
        (ids,) = self._segments.encode([followed.removeprefix(last) if followed.startswith(last) else ""])
        at = next((i for i, token_id in enumerate(ids.tolist()) if token_id in self._segments.special_ids), None)
        blank = at is not None and all(self._segments.is_blank(token_id) for token_id in ids[:at].tolist())
        return ids[: at + 1] if at is not None and blank else ids[:0]

    def _first_run(self, ids: Ids) -> list[int]:
        """The special tokens up to the first white space after one: the text after that is not the turn's."""
        run: list[int] = []
        for token_id in ids.tolist():
            if token_id in self._segments.special_ids:
                run.append(token_id)
            elif run and self._segments.is_blank(token_id):
                break
        return run

    def _special(self, ids: Ids) -> list[int]:
        return [token_id for token_id in ids.tolist() if token_id in self._segments.special_ids]

    def _with_arguments(self, call: Message) -> Message:
        """The call with its arguments as the template prints them as its own. A string that isn't JSON stays."""
        arguments = call["function"]["arguments"]
        if self._arguments is str and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif self._arguments is dict:
            arguments = _parsed(arguments)
        return {**call, "function": {**call["function"], "arguments": arguments}}

    def _formed(self, message: Message) -> Message:
        """The message with its content as a list of parts, if the template wants one."""
        text = message.get("content")
        parts = [{"type": "text", "text": text}]
        return {**message, "content": parts} if self._parts and isinstance(text, str) else message


def lost_part(text: str, message: Message) -> str | None:
    """
    What a turn's own rendering lacks of a normalized message: `"content"`, `"calls"`, `"reasoning"`, or `None`.

    Templates trim and indent, so white space does not count; nor does how a value of an argument is quoted.
    """
    reasoning, visible = split_reasoning(message)
    squeezed = _squeezed(text)

    def has(part: str) -> bool:
        return _squeezed(part) in squeezed

    def has_value(value: Any) -> bool:
        if isinstance(value, dict):
            return all(has_value(key) and has_value(item) for key, item in value.items())
        if isinstance(value, list):
            return all(map(has_value, value))
        if isinstance(value, str):
            escaped = (json.dumps(value, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False))
            return any(map(has, (value, value.replace("\n", "\\n"), repr(value)[1:-1], *escaped)))
        return has(json.dumps(value)) or has(str(value))

    texts = [message["content"], visible["content"]]
    if isinstance(texts[0], list):  # with parts other than text
        texts = ["".join(part.get("text") or "" for part in texts[0] if isinstance(part, dict))]
    if not any(map(has, texts)):
        return "content"
    for function in (call["function"] for call in message.get("tool_calls", ())):
        arguments = function["arguments"]
        if not (has(function["name"]) and (has_value(arguments) or has_value(_parsed(arguments)))):
            return "calls"
    return None if _squeezed(reasoning) in _squeezed(beside(text, message)) else "reasoning"


def beside(text: str, message: Message) -> str:
    """The rendering of a turn without its visible text, which may repeat the reasoning."""
    content = split_reasoning(message)[1]["content"]
    said = content.strip() if isinstance(content, str) else ""
    return "".join(text.rpartition(said)[::2]) if said else text


def _parsed(arguments: Any) -> Any:
    """Arguments as an object, if they are the JSON string of one."""
    try:
        parsed = json.loads(arguments)
    except (TypeError, ValueError):  # an object already, or no JSON
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _call_message(arguments: Any) -> Message:
    call = {"type": "function", "id": "call00000", "function": {"name": _NAME, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
