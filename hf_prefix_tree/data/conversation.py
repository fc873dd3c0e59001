# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One conversation under one chat template: what each turn was sampled from, and what the model wrote.

The context of a turn is the rendering of the messages before it, with generation prompt, and its output is
what its own rendering has after that. Where the two renderings differ before the turn, its output is found in the
rendering of a question and the turn, and must end its rendering in the conversation. The output must then have all
that the message has, and a stop token ends it.

Cost: two renderings per turn, and two of a question and the turn where it has to be found.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product, takewhile
from typing import Any

from hf_prefix_tree.data.dialect import ASK, THOUGHT, USER, Ids, beside, lost_part
from hf_prefix_tree.data.messages import Message, TurnError, split_reasoning
from hf_prefix_tree.data.template import ChatTemplate

_MARK = "Zq7xMark"  # stands for a message's text where the template's own text around it is looked for
_EMPTY_BLOCK = re.compile(r"\s*<think>\s*</think>")  # says that the model did not think
_BLOCK = re.compile(r"think|thought", re.IGNORECASE)
# What a header is made of: tags, white space, words.
_ATOM = re.compile(r"<[^<>\s]*>|\[[^\[\]\s]*\]|\s+|[^\s<\[]+|.", re.DOTALL)


@dataclass
class Conversation:
    """
    A conversation, and counts of its parts that the template does not render.

    Args:
        template ([`ChatTemplate`]):
            How it is rendered.
        messages (`list[Message]`):
            Normalized messages.
        tools (`list`, *optional*):
            Tool schemas.
        variables (`dict[str, Any]`):
            Further variables for the template.
        turns (`list[int]`):
            Indices of the assistant messages to train on, at least one.
        stop_ids (`frozenset[int]`):
            The tokens at which generation ends. If empty, the template tells.
    """

    template: ChatTemplate
    messages: list[Message]
    tools: list[Any] | None
    variables: dict[str, Any]
    turns: list[int]
    stop_ids: frozenset[int] = frozenset()
    counts: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        self.dialect = self.template.dialect(self.variables)
        self.shown = list(map(self.dialect.adapt, self.messages))
        self._keeps_history: dict[bool, bool] = {}
        self._headers: dict[str, str] = {}

    @cached_property
    def visible(self) -> list[Message]:
        """The messages without reasoning, as the template reads them."""
        return [self.dialect.adapt(split_reasoning(message)[1]) for message in self.messages]

    def reasoning(self, turn: int) -> str:
        return split_reasoning(self.messages[turn])[0]

    def text(self, messages: Sequence[Message], **variables: Any) -> str:
        """The messages, rendered."""
        return self.template.render(messages, self.tools, self.variables | variables)

    def prompt(self, messages: Sequence[Message], **variables: Any) -> str:
        """The messages and the header of an assistant turn, rendered."""
        return self.template.render(messages, self.tools, self.variables | variables, add_generation_prompt=True)

    def count_left_out(
        self, text: str, render: Callable[[Sequence[Message]], str], messages: Sequence[Message]
    ) -> None:
        """
        Counts the messages whose content is left out of `text`, the rendering of them all.

        Templates change what they print, so that content which isn't found proves little. A mark in its place tells
        which messages to look at: one is left out for certain if the rendering is the same when it is empty. The
        content of assistant messages is not looked at: a template may drop it from the history only.
        """

        def rendered(changed: Sequence[Message]) -> str | None:
            try:
                return render(changed)
            except ValueError:  # needs what was changed, so the template reads it
                return None

        others = {i: f"{_MARK}{i}." for i, message in enumerate(messages) if message["role"] != "assistant"}
        marked = [_with_text(message, others[i]) if i in others else message for i, message in enumerate(messages)]
        shown = rendered(marked) or ""
        for i, mark in others.items():
            empty = _with_text(messages[i], "")
            if mark not in shown and empty != messages[i]:
                self.counts["unrendered_messages"] += rendered([*messages[:i], empty, *messages[i + 1 :]]) == text

    def check_whole(self, text: str, turn: int, message: Message) -> bool:
        """
        Whether the output of a turn has its reasoning, if it has any.

        Raises:
            [`TurnError`]: If it lacks anything else, or reasoning that the template writes for other turns.
        """
        lost = lost_part(text, message)
        if lost is None:
            return True
        if lost == "reasoning" and not self.dialect.writes_reasoning(message) and not _EMPTY_BLOCK.match(text):
            return False
        reason = f"the chat template leaves out its {lost}; change or drop the row, or pass `chat_template_kwargs`"
        raise self.error(f"refused_{lost}", turn, reason)

    def ended(self, ids: Ids, start: int, turn: int) -> tuple[Ids, int]:
        """The rendering of a turn that begins at `start`, and where the turn ends, its stop token included."""
        given = self.stop_ids or self.template.generation_stop_ids
        try:
            ids, end = self.dialect.end_turn(ids, start, "tool_calls" in self.messages[turn], given)
        except TurnError as error:
            raise self.error(error.name, turn, f"{error}; pass another `chat_template`, or drop the row") from None
        stop = int(ids[end - 1])
        if self.stop_ids and stop not in self.stop_ids:
            raise self.error("refused_ends", turn, f"`stop_token_ids` has none of the tokens that end it ({stop})")
        message = self.messages[turn]
        twofold = message["content"] and "tool_calls" in message and self.template.token(stop) not in str(message)
        if twofold and stop in ids[start : end - 1]:  # generation would end between text and calls
            raise self.error("refused_ends", turn, f"the chat template writes its stop token ({stop}) before its end")
        return ids, end

    def error(self, name: str, turn: int, reason: str) -> TurnError:
        return TurnError(name, f"`messages[{turn}]` cannot be supervised exactly: {reason}.")

    def output(self, turn: int, empty_thinking_in_prompt: bool) -> tuple[str, str]:
        """
        The prompt that a turn was sampled from, and what the model wrote.

        A turn without reasoning is rendered with thinking switched off, one with reasoning that cannot be had
        otherwise with thinking switched on; both only where this leaves all before the turn's header as it is.

        Raises:
            [`TurnError`]: If the output cannot be had exactly.
        """
        switches: list[dict[str, bool]] = [{}]
        if self.template.takes_enable_thinking and "enable_thinking" not in self.variables:
            if self.reasoning(turn):
                switches.append({"enable_thinking": True})
            elif empty_thinking_in_prompt:
                switches.insert(0, {"enable_thinking": False})
        forms = [self.shown[turn]]
        if self.reasoning(turn) and not self.dialect.writes_reasoning(self.messages[turn]):
            forms.append(self.visible[turn])  # reasoning in the text that the template doesn't print as text
        elif not self.reasoning(turn) and "</think>" in str(self.shown[turn]["content"]):
            # Or the template would take the text before it for reasoning, as it does in the history.
            forms.insert(0, {**self.shown[turn], "reasoning_content": ""})
        failures: list[TurnError] = []
        best: tuple[bool, str, str, dict[str, bool], Message] | None = None
        for switch, message in product(switches, forms):
            if switch and not self._keeps(switch["enable_thinking"]):
                continue
            prompt, text = self.prompt(self.shown[:turn], **switch), self.text([*self.shown[:turn], message], **switch)
            try:
                output = self._after(prompt, text, turn, message, switch)
                reasons = self.check_whole(output, turn, self.messages[turn])
            except TurnError as error:
                failures.append(error)
                continue
            if best is None or reasons or best[3] == switch:
                best = reasons, prompt, output, switch, message
            if reasons:
                break
        if best is None:
            raise failures[0]
        reasons, prompt, output, switch, message = best
        self.shown[turn] = {key: value for key, value in message.items() if (key, value) != ("reasoning_content", "")}
        self.counts["unrendered_reasoning"] += not reasons
        if turn == self.turns[-1]:
            self.count_left_out(prompt, lambda messages: self.prompt(messages, **switch), self.shown[:turn])
        return prompt, output

    def _after(self, prompt: str, text: str, turn: int, message: Message, switch: dict[str, bool]) -> str:
        """What the model must emit after the prompt, if `text` renders the turn."""
        output = text[len(prompt) :] if text.startswith(prompt) else ""
        if not (prompt and output) or self._leads(output, self._header(switch), turn):
            output = self._cut(prompt, text, turn, message, switch)
        thought, opens = self.reasoning(turn), prompt.rstrip().endswith("<think>")
        if self.dialect.writes_reasoning(message) or not (thought or opens):
            return output
        # The template never writes reasoning: it is part of the text, or its prompt opens a block of it.
        if thought and thought in beside(output, self.messages[turn]):
            if opens + output.partition(thought)[0].count("<think>") > 1:
                raise self.error("refused_starts", turn, "its text opens a block of reasoning that is open")
            return output
        if not opens or switch.get("enable_thinking") or (not thought and text.startswith(prompt)):
            return output
        if not output.lstrip().startswith("</think>"):
            output = ("\n</think>\n\n" if prompt.endswith("\n") else "</think>") + output.lstrip("\n")
        return thought + output

    def _keeps(self, thinking: bool) -> bool:
        """Whether the switch leaves the history of the last turn as it is, and so that of all turns."""
        if thinking not in self._keeps_history:
            history = self.shown[: self.turns[-1]]
            try:
                same = self.text(history) == self.text(history, enable_thinking=thinking)
            except ValueError:  # a template that renders no history alone
                same = False
            self._keeps_history[thinking] = same
        return self._keeps_history[thinking]

    def _header(self, switch: dict[str, bool]) -> str:
        """What a generation prompt adds to a question; nothing matches it where the template always adds it."""
        key = str(switch)
        if key not in self._headers:
            ask = self.dialect.adapt(ASK)
            before, prompt = self.text([ask], **switch), self.prompt([ask], **switch)
            self._headers[key] = prompt.rpartition(USER)[2].removeprefix(before.rpartition(USER)[2]) or USER
        return self._headers[key]

    def _leads(self, output: str, header: str, turn: int) -> bool:
        """Whether the output has a part of the header, other than a think block, before anything of the message."""
        calls = [call["function"]["name"] for call in self.messages[turn].get("tool_calls", ())]
        first = next(filter(None, (self.reasoning(turn), str(self.visible[turn]["content"]), *calls)), "")
        lead = output.partition(first.strip() or output)[0]
        return any(atom in lead for atom in _ATOM.findall(header) if atom.strip() and not _BLOCK.search(atom))

    def _cut(self, prompt: str, text: str, turn: int, message: Message, switch: dict[str, bool]) -> str:
        """The output of a turn whose rendering, `text`, doesn't continue its prompt."""
        ask = self.dialect.adapt(ASK)
        asked, answered = self.prompt([ask], **switch), self.text([ask, message], **switch)
        extra, rest = _after_header(asked, answered)
        start, history = prompt[: len(prompt) - len(extra)], [ask]
        if not text.endswith(rest) and prompt.endswith(self._header(switch)) and text.startswith(start):
            rest, asked, history = text[len(start) :], prompt, self.shown[:turn]  # the template counts its calls
        if not (prompt and rest) or not text.endswith(rest) or not prompt.endswith(extra):
            raise self.error("refused_starts", turn, "its rendering doesn't continue its generation prompt")
        before = prompt.removesuffix(extra), text.removesuffix(rest)
        headers = [_ATOM.findall(side.rstrip()[-60:])[-1:] for side in before]
        # Where a tool's result stands in the turn, its rendering may have a second header.
        is_new = self.messages[turn - 1]["role"] == "assistant"
        same = [prompt + rest] if is_new else [prompt + rest, prompt + self._header(switch) + rest]
        if headers[0] != headers[1] and text not in same:
            raise self.error("refused_starts", turn, "its rendering and its generation prompt have different headers")
        if not extra:
            return rest
        if (thought := self.reasoning(turn).strip()) and thought in beside(rest, self.messages[turn]):  # trimmed
            if "<" in extra or not rest.lstrip().startswith(thought):  # which the turn opens or closes again
                reason = "its generation prompt turns reasoning off; pass `chat_template_kwargs` that turn it on"
                raise self.error("refused_starts", turn, reason)
            return rest
        if self.dialect.reasoning_form is not None:
            # The prompt opens a block of reasoning: what closes it is what reasoning would have after it.
            thoughtful = self.dialect.adapt({**split_reasoning(self.messages[turn])[1], "reasoning_content": THOUGHT})
            thinking = self.text([*history, thoughtful], **switch)
            missing, thinking = _after_header(asked, thinking)
            if thinking.lstrip().startswith(THOUGHT) and not (missing and "<" in extra):
                return thinking.replace(THOUGHT, "", 1)
        if not _BLOCK.search(extra) or self._leads(rest, extra, turn):
            raise self.error("refused_starts", turn, "its header is not that of its generation prompt")
        return rest[next(n for n in range(min(len(extra), len(rest)), -1, -1) if extra.endswith(rest[:n])) :]


def _after_header(asked: str, answered: str) -> tuple[str, str]:
    """What the prompt and the answer to the same question have after their header, which ends with a whole atom."""
    if answered.startswith(asked):
        return "", answered[len(asked) :]
    tails = [text.rpartition(USER)[2] for text in (asked, answered)]
    pairs = zip(*map(_ATOM.findall, tails), strict=False)
    shared = sum(len(one) for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return tails[0][shared:], tails[1][shared:]


def _with_text(message: Message, text: str) -> Message:
    """The message with this text in place of its own; the same where it has none."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return {**message, "content": text} if content.strip() else message
    parts = [
        {**part, "text": text} if isinstance(part, dict) and str(part.get("text") or "").strip() else part
        for part in content
    ]
    return {**message, "content": parts}
