# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Judges the branches of a dialogue by plain `apply_chat_template`, without the package's way of finding turns.

For every turn, the prompt is the rendering of the messages before it with `add_generation_prompt=True`. What the model
must emit from there is cut out of the rendering that ends with the turn, as text: after the prompt, or after the same
header as the prompt's, up to the first stop token after the turn's last word. An empty think block that only one of
the two writes belongs to the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from conformance.dialogues import Dialogue, Message, reasoning_of, words_of
from conformance.expected_turns import LEAVES_OUT, RAISES, Renderer, Turn, expected_turns
from conformance.message_forms import forms_of, written_as

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedTokenizerBase

EXACT, NO_REASONING, COUNTED, REFUSED = "exact", "exact, reasoning counted", "counted", "refused"
LOSS, PROMPT, NO_STOP, OTHER = "SILENT LOSS", "PROMPT SUPERVISED", "NO STOP", "OTHER TURN"
WRONG = (LOSS, PROMPT, NO_STOP, OTHER)
# From best to worst: a cell has the worst result of its dialogues.
ORDER = (EXACT, NO_REASONING, RAISES, LEAVES_OUT, COUNTED, REFUSED, NO_STOP, OTHER, LOSS, PROMPT)


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
    renderers = [Renderer(tokenizer, dialogue, form) for form in forms_of(dialogue.messages)]
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
        judged = _judge_turn(dialogue.messages, renderers, branch, t, counts)
        worst.turns += judged.turns
        if ORDER.index(judged.status) > ORDER.index(worst.status):
            worst.status, worst.reason = judged.status, judged.reason
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
    messages: list[Message], renderers: list[Renderer], branch: _Branch | None, t: int, counts: list[str]
) -> Result:
    """The judgement on the branch of the turn at message `t`, `None` if there is none."""
    names = ", ".join(counts)
    if branch is None:
        return Result(COUNTED, names) if counts else Result(LOSS, "the turn is gone, without a count")
    expected = expected_turns(renderers, messages, t)
    turns = [turn for turn in expected if isinstance(turn, Turn)]
    tokenizer = renderers[0].tokenizer
    in_context = [turn for turn in turns if branch.context_ids == _ids(tokenizer, turn.prompt)]
    for turn in in_context:
        if branch.supervised == turn.emitted and branch.in_one_piece:
            rest = branch.after_context[len(turn.emitted) :]
            if rest and not any(turn.emitted[-8:] + rest in rendering for rendering in turn.renderings):
                return Result(OTHER, f"no rendering has {branch.after_context[-60:]!r}")
            through = [written_as(message, turn.form) for message in messages[: t + 1]]
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
    too_early = branch.supervised not in [turn.emitted for turn in turns] and any(
        branch.supervised.endswith(turn.emitted) for turn in turns
    )
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
    branches: list[_Branch], renderers: list[Renderer], messages: list[Message], positions: list[int]
) -> list[_Branch | None]:
    """The branch of every turn: in order; where some are missing, the one with the context of a turn."""
    if len(branches) == len(positions):
        return list(branches)
    matched: list[_Branch | None] = []
    for t in positions:
        prompts = [turn.prompt for turn in expected_turns(renderers, messages, t) if isinstance(turn, Turn)]
        contexts = [_ids(renderers[0].tokenizer, prompt) for prompt in prompts]
        matched.append(next((branch for branch in branches if branch.context_ids in contexts), None))
    return matched


def _why_not(renderers: list[Renderer], messages: list[Message], positions: list[int]) -> str:
    """Why the template can't render the turns so that they could be exact; empty if it can."""
    for t in positions:
        expected = expected_turns(renderers, messages, t)
        if not any(isinstance(turn, Turn) for turn in expected):
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
    words_here = words_of(messages[t])
    words = [word for i, message in enumerate(messages) if i != t for word in words_of(message)]
    return [word for word in words if word not in words_here and word not in ("zlookq", "zlistq")]


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]
