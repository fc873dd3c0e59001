# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Judges the branches of a dialogue by plain `apply_chat_template`, without the package's way of finding turns.

For every turn, the prompt is the rendering of the messages before it with `add_generation_prompt=True`. What the model
must emit from there is cut out of the rendering that ends with the turn, as text: after the prompt, or after the same
header as the prompt's, up to the first stop token after the turn's last word. An empty think block that only one of
the two writes belongs to the prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from conformance.dialogues import Dialogue, Message, reasoning_of, words_of
from conformance.template_sources import stops_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

EXACT, NO_REASONING, COUNTED, REFUSED = "exact", "exact, reasoning counted", "counted", "refused"
RAISES, LEAVES_OUT = "the template raises", "the template leaves out"
LOSS, PROMPT, NO_STOP, OTHER = "SILENT LOSS", "PROMPT SUPERVISED", "NO STOP", "OTHER TURN"
WRONG = (LOSS, PROMPT, NO_STOP, OTHER)
# From best to worst: a cell has the worst result of its dialogues.
ORDER = (EXACT, NO_REASONING, RAISES, LEAVES_OUT, COUNTED, REFUSED, NO_STOP, OTHER, LOSS, PROMPT)

OPEN_BLOCK = r"(?:<think(?::\w+)?>|<mm:think>|<seed:think>|<\|channel>thought\n|<\|START_THINKING\|>|\[THINK\])"
CLOSE_BLOCK = r"(?:</think(?::\w+)?>|</mm:think>|</seed:think>|<channel\|>|<\|END_THINKING\|>|\[/THINK\])"
_EMPTY_BLOCK = re.compile(rf"(?:{OPEN_BLOCK}\s*)?{CLOSE_BLOCK}\s*")
_AFTER_OPEN = re.compile(rf"({OPEN_BLOCK})\s+")


@dataclass(frozen=True)
class Emitted:
    """
    An exact turn.

    Args:
        prompt (`str`): Its context.
        text (`str`): What is supervised.
        messages (`list[Message]`): The messages up to it, in the form that the template reads.
    """

    prompt: str
    text: str
    messages: list[Message]


@dataclass
class Result:
    """
    The judgement on one dialogue.

    Args:
        status (`str`): One of `ORDER`.
        reason (`str`, *optional*): What was counted, raised or is wrong.
        possible (`bool`, *optional*): Whether the template renders every turn so that it could be exact.
        turns (`list[Emitted]`, *optional*): The exact turns.
    """

    status: str
    reason: str = ""
    possible: bool = True
    turns: list[Emitted] = field(default_factory=list)


@dataclass(frozen=True)
class _Form:
    """How messages are written down for a template."""

    thought: tuple[str, ...]  # the keys of reasoning; "content" is the text itself
    arguments: str  # of calls: "object", "string" or "as given"
    empty: str | None  # what stands for no text
    text: str  # "text", "parts", or "one part"


@dataclass(frozen=True)
class _Turn:
    """What a turn must be: the prompt's text, the supervised text, and the renderings that its branch is part of."""

    prompt: str
    emitted: str
    renderings: tuple[str, ...]
    reasons: bool  # whether it has the reasoning of its message, if there is any
    form: _Form


class _Impossible(Exception):
    """The template can't render the turn so that the model's part can be cut out; the argument says why."""


class _Renderer:
    """One dialogue under one template, written in one of the forms that a template may take."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, dialogue: Dialogue, form: _Form) -> None:
        self.tokenizer, self.tools, self.form = tokenizer, dialogue.tools, form
        self.messages = [_written(message, form) for message in dialogue.messages]
        self._texts: dict[Any, str] = {}
        self.expected: dict[int, list[_Turn | str]] = {}

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
                raise _Impossible(f"{RAISES}: {type(error).__name__}: {error}") from None
        return self._texts[key]


def judge(
    dialogue: Dialogue,
    tokenizer: PreTrainedTokenizerBase,
    conversation_branches: Callable[..., Any],
) -> Result:
    """
    Compare what the package makes of a dialogue with what the template says.

    Args:
        dialogue ([`~conformance.dialogues.Dialogue`]): The data.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): A tokenizer with the template.
        conversation_branches (`Callable`): `hf_prefix_tree.data.turns.conversation_branches`, or a broken one.
    """
    positions = [i for i, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    renderers = [_Renderer(tokenizer, dialogue, form) for form in _forms(dialogue.messages)]
    why_not = _why_not(renderers, dialogue.messages, positions)
    fault = RAISES if why_not.startswith(RAISES) else LEAVES_OUT
    try:
        answer = conversation_branches(dialogue.messages, tokenizer, tools=dialogue.tools)
    except ValueError as error:
        clause = re.split(r"[;.] |: (?=Fix)", str(error))[0]
        return Result(fault, f"{why_not}; refused: {clause}", False) if why_not else Result(REFUSED, clause)
    counts = list(_counts(answer))
    branches = [_Branch(branch, tokenizer) for branch in answer.branches]
    worst = Result(EXACT)
    if len(branches) > len(positions):
        return Result(OTHER, f"{len(branches)} branches of {len(positions)} turns")
    for t, branch in zip(positions, _of_turns(branches, renderers, dialogue.messages, positions), strict=True):
        found = _judge_turn(dialogue.messages, renderers, branch, t, counts)
        worst.turns += found.turns
        if ORDER.index(found.status) > ORDER.index(worst.status):
            worst.status, worst.reason = found.status, found.reason
    worst.possible = not why_not
    if worst.status == COUNTED and why_not:
        worst.status, worst.reason = fault, f"{why_not}; counted: {worst.reason}"
    return worst


class _Branch:
    """A branch as text: its context's token ids, the supervised tokens, and all after the context."""

    def __init__(self, branch: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        ids, on = branch.input_ids.tolist(), (branch.weights > 0).tolist()
        start = on.index(True) if True in on else len(ids)
        end = on.index(False, start) if False in on[start:] else len(ids)
        self.context_ids: list[int] = ids[:start]
        self.in_one_piece = not any(on[end:])
        self.supervised: str = tokenizer.decode([i for i, yes in zip(ids, on, strict=True) if yes])
        self.after_context: str = tokenizer.decode(ids[start:])


def _judge_turn(
    messages: list[Message], renderers: list[_Renderer], branch: _Branch | None, t: int, counts: list[str]
) -> Result:
    """The judgement on the branch of the turn at message `t`, `None` if there is none."""
    names = ", ".join(counts)
    if branch is None:
        return Result(COUNTED, names) if counts else Result(LOSS, "the turn is gone, without a count")
    expected = _expected(renderers, messages, t)
    turns = [turn for turn in expected if isinstance(turn, _Turn)]
    tokenizer = renderers[0].tokenizer
    in_context = [turn for turn in turns if branch.context_ids == _ids(tokenizer, turn.prompt)]
    for turn in in_context:
        if branch.supervised == turn.emitted and branch.in_one_piece:
            if not any(branch.after_context in rendering for rendering in turn.renderings):
                return Result(OTHER, f"no rendering has {branch.after_context[-60:]!r}")
            through = [_written(message, turn.form) for message in messages[: t + 1]]
            judged = [Emitted(turn.prompt, turn.emitted, through)]
            if turn.reasons:
                return Result(EXACT, turns=judged)
            if counts:
                return Result(NO_REASONING, names, turns=judged)
            return Result(LOSS, "the template leaves the reasoning out, which is not counted", turns=judged)
    nearest = next(iter(in_context or turns), None)
    wanted = f"expected {nearest.prompt[-60:]!r} + {nearest.emitted!r}" if nearest else str(expected[0])
    what = f"{tokenizer.decode(branch.context_ids)[-60:]!r} + {branch.supervised!r}; {wanted}"
    emitted = nearest.emitted if nearest else ""
    too_early = emitted and branch.supervised != emitted and branch.supervised.endswith(emitted)
    if too_early or any(word in branch.supervised for word in _foreign(messages, t)):
        return Result(PROMPT, what)
    if set(counts) - {"unrendered_reasoning", "unclosed_reasoning"}:
        return Result(COUNTED, names)
    missing = [word for word in words_of(messages[t]) if word not in branch.supervised]
    if missing and counts and missing == [reasoning_of(messages[t])]:
        missing = []
    if missing:
        return Result(LOSS, f"without {', '.join(missing)}: {what}")
    if emitted.startswith(branch.supervised) and emitted != branch.supervised:
        return Result(NO_STOP, what)
    return Result(OTHER, what)


def _of_turns(
    branches: list[_Branch], renderers: list[_Renderer], messages: list[Message], positions: list[int]
) -> list[_Branch | None]:
    """The branch of every turn: in order; where some are missing, the one with the context of a turn."""
    if len(branches) == len(positions):
        return list(branches)
    found: list[_Branch | None] = []
    for t in positions:
        prompts = [turn.prompt for turn in _expected(renderers, messages, t) if isinstance(turn, _Turn)]
        contexts = [_ids(renderers[0].tokenizer, prompt) for prompt in prompts]
        found.append(next((branch for branch in branches if branch.context_ids in contexts), None))
    return found


def _why_not(renderers: list[_Renderer], messages: list[Message], positions: list[int]) -> str:
    """Why the template can't render the turns so that they could be exact; empty if it can."""
    for t in positions:
        expected = _expected(renderers, messages, t)
        if not any(isinstance(turn, _Turn) for turn in expected):
            return next((str(why) for why in expected if not str(why).startswith(RAISES)), str(expected[0]))
    return ""


def _counts(answer: Any) -> Iterator[str]:
    """The names under which something was counted; messages that a template leaves out are no part of a turn."""
    for name, value in asdict(answer).items():
        if isinstance(value, dict):
            yield from (key for key, count in value.items() if isinstance(count, int) and count)
        elif isinstance(value, int) and value and name != "unrendered_messages":
            yield name


def _foreign(messages: list[Message], t: int) -> list[str]:
    """Words that only other messages wrote; names of functions are everybody's."""
    own = words_of(messages[t])
    words = [word for i, message in enumerate(messages) if i != t for word in words_of(message)]
    return [word for word in words if word not in own and word not in ("zlookq", "zlistq")]


def _forms(messages: list[Message]) -> list[_Form]:
    """
    The forms that templates take, the most common first: of reasoning, tool-call arguments, no text, and text.

    Reasoning in the text is looked at only if the data has it there: as text it is printed by any template.
    """
    inline = any("<think>" in str(message.get("content")) for message in messages)
    reasons = inline or any(reasoning_of(message) for message in messages)
    calls = any("tool_calls" in message for message in messages)
    parts = any(isinstance(message.get("content"), list) for message in messages)
    thoughts = (("reasoning_content", "thinking"), ("reasoning_content",), ("thinking",), ("reasoning",))
    return [
        _Form(thought, arguments, empty, text)
        for text in (("text", "parts", "one part") if parts else ("text", "one part"))
        for arguments in (("object", "string", "as given") if calls else ("object",))
        for thought in ((*thoughts, ("content",)) if inline else thoughts if reasons else thoughts[:1])
        for empty in (("", None) if calls else ("",))
    ]


def _written(message: Message, form: _Form) -> Message:
    """The message in this form."""
    message = dict(message)
    content = message.get("content")
    if isinstance(content, list) and form.text != "parts":
        content = "".join(part["text"] for part in content)
    reasoning = message.pop("reasoning_content", None)
    if isinstance(content, str) and content.startswith("<think>") and form.thought != ("content",):
        reasoning, content = content.removeprefix("<think>\n").split("\n</think>\n\n")
    if form.text == "one part":
        content = [{"type": "text", "text": content or ""}]
    message["content"] = content or form.empty
    message |= {key: reasoning for key in form.thought if reasoning is not None}
    if "tool_calls" in message:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"]["arguments"], form)}}
            for call in message["tool_calls"]
        ]
    return message


def _arguments(given: Any, form: _Form) -> Any:
    if form.arguments == "as given" and isinstance(given, str) and given:
        return given
    value = (json.loads(given or "{}") if isinstance(given, str) else given) or {}
    return value if form.arguments == "object" else json.dumps(value)


def _expected(renderers: list[_Renderer], messages: list[Message], t: int) -> list[_Turn | str]:
    """What the turn may be, in the forms that the template renders as its own; the reasons where there is no telling."""
    known = renderers[0].expected
    if t in known:
        return known[t]
    turns: list[_Turn] = []
    reasons: list[_Turn | str] = []
    switches: list[dict[str, Any]] = [{}]
    if "enable_thinking" in str(renderers[0].tokenizer.chat_template):
        switches.append({"enable_thinking": bool(reasoning_of(messages[t]))})
    for renderer in renderers:
        if renderer.form.text == "one part" and turns:
            break  # only for templates that read nothing but parts
        for switch in switches:
            if switch.get("enable_thinking") and turns:
                continue  # only where the prompt closes the think block as it is
            try:
                turns += _turns_of(renderer, messages, t, switch)
            except _Impossible as why:
                reasons.append(str(why))
    # Arguments that are escaped or printed as Python, no reasoning, and a `<think>` in the text, are what a template
    # writes for data that it was not made for: only if there is nothing better. The same goes for arguments as a
    # string that the template takes apart where it gets an object.
    for better in (
        lambda turn: not _is_ugly(turn.emitted),
        lambda turn: turn.reasons,
        lambda turn: turn.form.thought != ("content",),
    ):
        turns = [turn for turn in turns if better(turn)] or turns
    objects = {"".join(turn.emitted.split()) for turn in turns if turn.form.arguments == "object"}
    if objects:
        turns = [turn for turn in turns if "".join(turn.emitted.split()) in objects]
    known[t] = [*turns, *reasons]
    return known[t]


def _is_ugly(text: str) -> bool:
    return any(sign in text for sign in ('\\"', "{'", "': ", '{{"', '"type": "text"', "None"))


def _turns_of(renderer: _Renderer, messages: list[Message], t: int, switch: dict[str, Any]) -> Iterator[_Turn]:
    """What the turn may be in one form."""
    written = renderer.messages
    history, through = written[:t], written[: t + 1]
    before = renderer.text(history, False, {}) if history else ""
    prompt = renderer.text(history, True, switch)
    if switch:
        # Only if the switch leaves everything before the header as it is.
        quiet, loud = renderer.text(history, False, switch), renderer.text(history, True, {})
        if quiet != before or _common(prompt, loud) < _common(before, loud):
            return
    header = prompt[len(before) :] if prompt.startswith(before) else ""
    reasons: list[str] = []
    for variables in [switch, {}] if switch else [{}]:
        rendering = renderer.text(through, False, variables)
        reasoning = reasoning_of(messages[t])
        required = [word for word in words_of(messages[t]) if word != reasoning]
        missing = [word for word in required if word not in rendering]
        if missing:
            reasons.append(f"{LEAVES_OUT} {_kinds(missing)}")
            continue
        words = [word for word in words_of(messages[t]) if word in rendering]
        try:
            starts = _starts(prompt, header, rendering, messages, t)
            for start in starts:
                emitted, renderings = _until_stop(renderer, rendering, start, written, t, words, variables)
                emitted = _without_headers(renderer, emitted, words)
                wrote = reasoning is None or reasoning in rendering
                yield _Turn(prompt, emitted, renderings, wrote, renderer.form)
            return
        except _Impossible as why:
            reasons.append(str(why))
    raise _Impossible(reasons[0])


def _starts(prompt: str, header: str, rendering: str, messages: list[Message], t: int) -> list[int]:
    """Where the model's part may begin in the rendering that ends with it; more than one place if only white space
    lies between them."""
    first = min(rendering.rfind(word) for word in words_of(messages[t]) if word in rendering)
    if rendering.startswith(prompt):
        return [len(prompt)]
    # What follows the last word that the messages before it wrote.
    earlier = [word for message in messages[:t] for word in words_of(message)]
    tail = prompt[_end_of_last(earlier, prompt) :]
    begin = _end_of_last(earlier, rendering[:first])
    own = rendering[begin:]
    if own.startswith(tail):
        return [begin + len(tail)]
    told = [part for part in (header, tail) if "<" in part or "[" in part]
    for part in told:
        at = own.find(part, 0, first - begin)
        if at >= 0:
            return [begin + at + len(part)]
    plain = _without_empty_blocks(own)
    if re.search(CLOSE_BLOCK, tail) and re.search(OPEN_BLOCK, plain):
        raise _Impossible(f"{LEAVES_OUT} the think block that its prompt closes, {tail[-40:]!r}: it reasons there")
    for part in told:
        for cut in range(first - begin, -1, -1):
            if plain.endswith(_without_empty_blocks(part + own[cut:])):
                blank = len(own[:cut]) - len(own[:cut].rstrip())
                return [begin + cut - back for back in range(blank + 1)]
    raise _Impossible(f"{LEAVES_OUT} what its prompt ends with, {tail[-40:]!r}, where it renders the turn: {own[:40]!r}")


def _until_stop(
    renderer: _Renderer,
    rendering: str,
    start: int,
    written: list[Message],
    t: int,
    words: list[str],
    variables: dict[str, Any],
) -> tuple[str, tuple[str, ...]]:
    """The model's part up to the stop token, which may stand only where a message follows."""
    stops = stops_of(str(renderer.tokenizer.chat_template))
    end = _end_of_last(words, rendering)
    own = _first_of(stops, rendering, end)
    if own is not None:
        return rendering[start:own], (rendering,)
    follower: Message = {"role": "user", "content": "zafterq"}
    if written[t].get("tool_calls"):
        follower = next(m for m in written if m["role"] == "tool")
    longer = renderer.text([*written[: t + 1], follower], False, variables)
    again = _end_of_last(words, longer)
    stop = _first_of(stops, longer, again)
    if stop is None:
        raise _Impossible(f"{LEAVES_OUT} a stop token: {rendering[end:]!r}")
    return rendering[start:end] + longer[again:stop], (rendering, longer)


def _without_headers(renderer: _Renderer, emitted: str, words: list[str]) -> str:
    """
    The model's part without the turn's header, where the prompt lacks it.

    Raises where another header follows a stop token. Between reasoning and text there may be both, as of channels.
    """
    said = [word for word in words if not word.startswith("zthought")] or words
    asked = renderer.messages[: 1 + [message["role"] for message in renderer.messages].index("user")]
    header = renderer.text(asked, True, {}).removeprefix(renderer.text(asked, False, {}))
    opening = header.split("\n")[0]
    body = emitted[min(map(emitted.find, said)) : _end_of_last(said, emitted)]
    stop = _first_of(stops_of(str(renderer.tokenizer.chat_template)), body, 0)
    if opening and stop is not None and opening in body[stop:]:
        raise _Impossible(f"{LEAVES_OUT} one turn for what was said, it writes two: {emitted!r}")
    lead = emitted[: min(map(emitted.find, words))]
    if not opening or opening not in lead:
        return emitted
    if header not in lead or _first_of(stops_of(str(renderer.tokenizer.chat_template)), lead, 0) is not None:
        raise _Impossible(f"{LEAVES_OUT} what comes before the turn from its prompt: {lead!r}")
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
    return next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


def _kinds(words: list[str]) -> str:
    text = any(word.startswith("zreply") for word in words)
    return "text and calls" if text and len(words) > 1 else "text" if text else "calls"


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
