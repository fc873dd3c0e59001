# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What a turn must be under a chat template, found in the text of plain renderings.

The model's part is cut out of the rendering that ends with the turn: after the prompt, or after the same header as the
prompt's, up to the first stop token after the turn's last word. An empty think block that only one of the two writes
belongs to the prompt. Where the template does not render the turn as its own prompt begins it, the part is put
together: the reasoning and the end of the think block that the prompt opened, and the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance.dialogues import Dialogue, Message, reasoning_of, words_of
from conformance.message_forms import Form, is_foreign_form, written_as
from conformance.template_sources import NO_STOP_TOKEN, stops_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RAISES, LEAVES_OUT = "the template raises", "the template leaves out"
_BLOCKS = {
    r"<think>": "</think>",
    r"<think:opensource>": "</think:opensource>",
    r"<mm:think>": "</mm:think>",
    r"<seed:think>": "</seed:think>",
    r"<\|channel>thought\n": "<channel|>",
    r"<\|START_THINKING\|>": "<|END_THINKING|>",
    r"\[THINK\]": "[/THINK]",
    r"Here are my reasoning steps:\n": "[BEGIN FINAL RESPONSE]",
}
OPEN_BLOCK = f"(?:{'|'.join(_BLOCKS)})"
CLOSE_BLOCK = f"(?:{'|'.join(map(re.escape, _BLOCKS.values()))})"
_EMPTY_BLOCK = re.compile(rf"(?:{OPEN_BLOCK}\s*)?{CLOSE_BLOCK}\s*")
_AFTER_OPEN = re.compile(rf"({OPEN_BLOCK})\s+")
_OPENED = re.compile(rf"{OPEN_BLOCK}\s*$")
_BLANK = "zthoughtblankq"
_REASONS_THERE = ": it reasons there"


@dataclass(frozen=True)
class Turn:
    """
    What a turn may be.

    Args:
        prompt (`str`): The text of its context.
        emitted (`str`): What is supervised.
        renderings (`tuple[str, ...]`): The renderings that it is taken from; what follows it must be in one of them.
        reasons (`bool`): Whether it has the reasoning of its message, if there is any.
        form ([`~conformance.message_forms.Form`]): How the messages were written.
    """

    prompt: str
    emitted: str
    renderings: tuple[str, ...]
    reasons: bool
    form: Form


class Impossible(Exception):
    """The template can't render the turn so that the model's part can be cut out; the argument says why."""


class Renderer:
    """One dialogue under one template, written in one of the forms that a template may take."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, form: Form) -> None:
        self.tokenizer, self.tools, self.form = tokenizer, dialogue.tools, form
        self.messages = [written_as(message, form) for message in dialogue.messages]
        self._texts: dict[Any, str] = {}
        self.expected: dict[int, list[Turn | str]] = {}

    def text(self, messages: list[Message], prompt: bool, switch: dict[str, Any]) -> str:
        key = (json.dumps(messages), prompt, *switch)
        if key not in self._texts:
            try:
                self._texts[key] = str(
                    self.tokenizer.apply_chat_template(
                        messages, tools=self.tools, add_generation_prompt=prompt, tokenize=False, **switch
                    )
                )
            except Exception as error:  # whatever a template raises
                raise Impossible(f"{RAISES}: {type(error).__name__}: {error}") from None
        return self._texts[key]


def expected_turns(renderers: list[Renderer], messages: list[Message], t: int) -> list[Turn | str]:
    """
    What the turn at message `t` may be; and why not, for forms in which the template does not render it.

    Args:
        renderers (`list[Renderer]`): The dialogue in every form.
        messages (`list[Message]`): The dialogue as it is given.
        t (`int`): Index of an assistant message.
    """
    known = renderers[0].expected
    if t in known:
        return known[t]
    reasons: list[str] = []
    thinks = reasoning_of(messages[t]) is not None
    switch = {"enable_thinking": thinks}
    switches = [{}, switch] if "enable_thinking" in str(renderers[0].tokenizer.chat_template) else [{}]

    def gather(turns_of: Callable[..., Iterator[Turn]], switches: list[dict[str, Any]]) -> list[Turn]:
        turns: list[Turn] = []
        for text in dict.fromkeys(renderer.form.text for renderer in renderers):
            if text == "one part" and turns:
                break  # only for templates that read nothing but parts
            for renderer in renderers:
                for variables in switches if renderer.form.text == text else []:
                    try:
                        turns += turns_of(renderer, messages, t, variables)
                    except Impossible as why:
                        reasons.append(str(why))
        return _native(turns, reasons, thinks)

    turns = gather(_turns_of, [{}] if thinks else switches)
    if not any(turn.reasons for turn in turns):
        turns += gather(_turns_of, switches[1:] if thinks else [])
        turns += gather(_composed, switches)
    elif any(_OPENED.search(turn.prompt) and not re.search(CLOSE_BLOCK, turn.emitted) for turn in turns):
        turns += gather(_composed, [{}])  # the text alone would be reasoning
    known[t] = [*turns, *reasons]
    return known[t]


def _native(turns: list[Turn], reasons: list[str], thinks: bool) -> list[Turn]:
    """
    Without the turns that a template writes for data that it was not made for, if there are others: arguments that are
    escaped or printed as Python; no reasoning, or as text; arguments that it takes apart, but as a string.
    """
    turns = [turn for turn in turns if not is_foreign_form(turn.emitted)] or turns
    if any(why.endswith(_REASONS_THERE) for why in reasons):  # it writes reasoning, but not as text
        turns = [turn for turn in turns if turn.form.thought != ("content",)]
    apart = [turn for turn in turns if thinks and turn.reasons and turn.form.thought != ("content",)]
    turns = apart or turns
    objects = {"".join(turn.emitted.split()) for turn in turns if turn.form.arguments == "object"}
    return [turn for turn in turns if not objects or "".join(turn.emitted.split()) in objects]


def _turns_of(renderer: Renderer, messages: list[Message], t: int, switch: dict[str, Any]) -> Iterator[Turn]:
    """What the turn may be in one form, as the template renders it."""
    prompt, header = _prompt(renderer, t, switch)
    if renderer.form.thought == ("raw",) and not _OPENED.search(prompt):
        return
    why: Impossible | None = None
    for variables in [switch, {}] if switch else [{}]:
        rendering = renderer.text(renderer.messages[: t + 1], False, variables)
        try:
            words = _words_in(rendering, messages, t)
            for start in _starts(prompt, header, rendering, messages, t):
                emitted, renderings = _until_stop(renderer, rendering, start, t, words, variables)
                emitted = _without_headers(renderer, emitted, words, t)
                wrote = reasoning_of(messages[t]) in [None, *words]
                if reasoning_of(messages[t]) and _EMPTY_BLOCK.match(emitted.lstrip()):
                    raise Impossible(f"{LEAVES_OUT} reasoning, and writes an empty block")
                if wrote or renderer.form.thought != ("blocks",):
                    yield Turn(prompt, emitted, renderings, wrote, renderer.form)
            return
        except Impossible as error:
            why = why or error
    assert why is not None
    raise why


def _composed(renderer: Renderer, messages: list[Message], t: int, switch: dict[str, Any]) -> Iterator[Turn]:
    """What the turn may be in one form, put together from what the template renders."""
    prompt, header = _prompt(renderer, t, switch)
    opened, message = _OPENED.search(prompt), renderer.messages[t]
    reasoning = _reasoning_text(messages[t])
    if opened is None or renderer.form.thought == ("blocks",):
        return
    if not reasoning:  # the end of the block, as the template writes it after reasoning
        blank = dict.fromkeys(("reasoning_content", "thinking"), _BLANK)
        rendering = renderer.text([*renderer.messages[:t], message | blank], False, switch)
        if rendering.startswith(prompt + _BLANK):
            words = _words_in(rendering, messages, t)
            emitted, renderings = _until_stop(renderer, rendering, len(prompt), t, words, switch)
            yield Turn(prompt, emitted.replace(_BLANK, ""), renderings, True, renderer.form)
    rendering = renderer.text(renderer.messages[: t + 1], False, {})
    words = _words_in(rendering, messages, t)
    said = [word for word in words if word != reasoning_of(messages[t])]
    close = next(close for opening, close in _BLOCKS.items() if re.match(opening, opened.group()))
    cut = prompt[: opened.start()]
    for start in _starts(cut, header[: len(header) - len(opened.group())], rendering, messages, t):
        text, renderings = _until_stop(renderer, rendering, start, t, said, {})
        text = _without_headers(renderer, text, said, t)
        if reasoning and reasoning in text:  # without the start of the block
            yield Turn(prompt, text, renderings, True, renderer.form)
            continue
        ends = [""] if text.lstrip().startswith(close) else [close + space for space in ("", "\n", "\n\n")]
        for end in ends:
            for space in ("", "\n", "\n\n"):
                yield Turn(prompt, reasoning + space + end + text, renderings, True, renderer.form)


def _prompt(renderer: Renderer, t: int, switch: dict[str, Any]) -> tuple[str, str]:
    """The prompt of the turn, and what of it comes after the history."""
    history = renderer.messages[:t]
    before, prompt = renderer.text(history, False, {}) if history else "", renderer.text(history, True, switch)
    if switch:
        loud = renderer.text(history, True, {})
        if renderer.text(history, False, switch) != before or _common(prompt, loud) < _common(before, loud):
            raise Impossible(f"{LEAVES_OUT} the switch from the history")
    return prompt, prompt[len(before) :] if prompt.startswith(before) else ""


def _reasoning_text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str) and content.startswith("<think>"):
        return content.removeprefix("<think>\n").split("\n</think>")[0]
    return str(message.get("reasoning_content") or "")


def _words_in(rendering: str, messages: list[Message], t: int) -> list[str]:
    """The words of the turn that its rendering has; raises if any but the reasoning are missing."""
    wanted = words_of(messages[t])
    begin = _end_of_last(_earlier(messages, t), rendering)
    words = [word for word in wanted if word in rendering[begin:]]
    missing = [word for word in wanted if word not in words and word != reasoning_of(messages[t])]
    if missing:
        raise Impossible(f"{LEAVES_OUT} {_kinds(missing)}")
    return words


def _earlier(messages: list[Message], t: int) -> list[str]:
    """The words of the messages before the turn that it doesn't have itself."""
    wanted = words_of(messages[t])
    return [word for message in messages[:t] for word in words_of(message) if word not in wanted]


def _starts(prompt: str, header: str, rendering: str, messages: list[Message], t: int) -> list[int]:
    """Where the model's part may begin in the rendering that ends with it; more than one place if only white space
    lies between them."""
    if rendering.startswith(prompt):
        return [len(prompt)]
    # What follows the last word that the messages before it wrote.
    tail = prompt[_end_of_last(_earlier(messages, t), prompt) :]
    begin = _end_of_last(_earlier(messages, t), rendering)
    turn = rendering[begin:]
    first = min(turn.find(word) for word in words_of(messages[t]) if word in turn)
    if turn.startswith(tail):
        return [begin + len(tail)]
    told = [part for part in (header, tail) if "<" in part or "[" in part]
    for part in told:
        at = turn.find(part, 0, first)
        if at >= 0:
            return [begin + at + len(part)]
    plain = _without_empty_blocks(turn)
    if re.search(CLOSE_BLOCK, tail) and re.search(OPEN_BLOCK, plain):
        raise Impossible(f"{LEAVES_OUT} the think block that its prompt closes, {tail[-40:]!r}{_REASONS_THERE}")
    for part in told:
        for cut in range(first, -1, -1):
            if plain.endswith(_without_empty_blocks(part + turn[cut:])):
                blank = len(turn[:cut]) - len(turn[:cut].rstrip())
                return [begin + cut - back for back in range(blank + 1)]
    raise Impossible(
        f"{LEAVES_OUT} what its prompt ends with, {tail[-40:]!r}, where it renders the turn: {turn[:40]!r}"
    )


def _until_stop(
    renderer: Renderer,
    rendering: str,
    start: int,
    t: int,
    words: list[str],
    variables: dict[str, Any],
) -> tuple[str, tuple[str, ...]]:
    """The model's part up to the stop token, which may stand only where a message follows."""
    written = renderer.messages
    stops = stops_of(str(renderer.tokenizer.chat_template))
    end = _end_of_last(words, rendering)
    stop = _first_of(stops, rendering, end)
    if stop is not None:
        return rendering[start:stop], (rendering,)
    if stops == NO_STOP_TOKEN:
        raise Impossible(f"{LEAVES_OUT} a stop token: {rendering[end:]!r}")
    follower: Message = {"role": "user", "content": "zafterq"}
    if written[t].get("tool_calls"):
        follower = next(m for m in written if m["role"] == "tool")
    longer = renderer.text([*written[: t + 1], follower], False, variables)
    again = _end_of_last(words, longer)
    stop = _first_of(stops, longer, again)
    if stop is None:
        raise Impossible(f"{LEAVES_OUT} a stop token: {rendering[end:]!r}")
    # The rest of the turn may look another way when a message follows; its last characters tell where it ends.
    for cut in range(end, len(rendering)):
        at = longer.find(rendering[cut:], again, stop)
        if at >= 0:
            again = at + len(rendering) - cut
            break
    return rendering[start:] + longer[again:stop], (rendering, longer)


def _without_headers(renderer: Renderer, emitted: str, words: list[str], t: int) -> str:
    """
    The model's part without the turn's header, which a template may write where a tool's result stands in the turn.

    Raises where the prompt lacks the header of a new turn, or has another one. Between reasoning and text there may
    be one, as of channels.
    """
    said = [word for word in words if not word.startswith("zthought")] or words
    asked = renderer.messages[: 1 + [message["role"] for message in renderer.messages].index("user")]
    header = renderer.text(asked, True, {}).removeprefix(renderer.text(asked, False, {}))
    stops = stops_of(str(renderer.tokenizer.chat_template))
    before = _first_of(stops, header, 0)  # of the question, where only a message after it ends it
    opening = header[before or 0 :].lstrip().split("\n")[0]
    stop = _first_of(stops, emitted[min(map(emitted.find, said)) : _end_of_last(said, emitted)], 0)
    if stop is not None:
        raise Impossible(f"{LEAVES_OUT} one turn for what was said, it stops before the end: {emitted!r}")
    mark = re.match(r"<[^<>]+>|\[[^\[\]]+\]", opening)
    if mark and mark.group() in emitted[_end_of_last(words, emitted) :]:
        raise Impossible(f"{LEAVES_OUT} a stop token before the next header: {emitted!r}")
    lead = emitted[: min(map(emitted.find, words))]
    if not opening or opening not in lead:
        return emitted
    if header not in lead or _first_of(stops, lead, 0) is not None or renderer.messages[t - 1]["role"] == "assistant":
        raise Impossible(f"{LEAVES_OUT} what comes before the turn from its prompt: {lead!r}")
    return emitted[lead.index(header) + len(header) :]


def _without_empty_blocks(text: str) -> str:
    return _AFTER_OPEN.sub(r"\1", _EMPTY_BLOCK.sub("", text))


def _first_of(stops: tuple[str, ...], text: str, start: int) -> int | None:
    """The end of the stop token that comes first."""
    ends = [(at, at + len(stop)) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(ends)[1] if ends else None


def _end_of_last(words: list[str], text: str) -> int:
    return max((text.rfind(word) + len(word) for word in words if word in text), default=0)


def _common(first: str, second: str) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _kinds(words: list[str]) -> str:
    text = any(word.startswith("zreply") for word in words)
    return "text and calls" if text and len(words) > 1 else "text" if text else "calls"
