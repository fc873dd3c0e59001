# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Compares supervised text with the mask of TRL's training variant of a template, which marks what the model writes.

Variants mark more than the model writes: text after the stop token, and the end of the prompt (a think block, or the
start of one; a header). One marks less: not the token at which a call stops. Nothing else may differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conformance.dialogues import DIALOGUES, Message, words_of
from conformance.expected_turns import CLOSE_BLOCK, OPEN_BLOCK
from conformance.message_forms import Form, written_as
from conformance.template_sources import stops_of
from conformance.turn_oracle import Emitted, Result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BLOCK = re.compile(rf"{OPEN_BLOCK}?\s*{CLOSE_BLOCK}?\s*")
_OBJECTS = Form(("reasoning_content",), "object", "", "text")
EQUAL, AFTER_STOP, THINK, HEADER, NO_STOP = "equal", "after stop", "think block", "header", "no stop"
NO_BLOCK, DIFFERENT, NOT_MARKED = "no block", "different", "not marked"


@dataclass
class Comparison:
    """
    Turns by how they compare.

    Args:
        counts (`dict[str, int]`): Number of turns by how they differ: not at all; the variant also marks text after
            the stop token, a think block of the prompt, or a header; it does not mark the stop token, or leaves out
            the think block that the prompt opens; otherwise; it does not render or mark the turn.
        examples (`list[str]`): Of those that are different.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)


def compare_with_twin(twin: str, tokenizer: PreTrainedTokenizerBase, results: list[Result]) -> Comparison:
    """
    Compare the exact turns of all dialogues under a template with the mask of its training variant.

    Args:
        twin (`str`): The variant's source.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): A tokenizer with the original template.
        results (`list[Result]`): The judgement on each of `DIALOGUES`.
    """
    comparison = Comparison()
    for dialogue, result in zip(DIALOGUES, results, strict=True):
        for turn in result.turns:
            marked = _marked(twin, tokenizer, turn.messages, dialogue.tools)
            if marked is not None and (
                '\\"' in marked or '"{}"' in marked
            ):  # it reads arguments as objects, unlike the original
                objects = [written_as(message, _OBJECTS) for message in turn.messages]
                marked = _marked(twin, tokenizer, objects, dialogue.tools)
            kind = _kind(marked, turn, stops_of(str(tokenizer.chat_template)))
            comparison.counts[kind] = comparison.counts.get(kind, 0) + 1
            if kind == DIFFERENT:
                comparison.examples.append(f"{dialogue.cell}: {turn.text!r}, marked {marked!r}")
    return comparison


def _marked(twin: str, tokenizer: Any, messages: list[Message], tools: list[Any] | None) -> str | None:
    """What the variant marks of the last message; `None` if it renders or marks nothing of it."""
    try:
        encoded = tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=twin, return_assistant_tokens_mask=True, return_dict=True
        )
    except Exception:  # whatever a template raises
        return None
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    whole = tokenizer.decode(ids)
    earlier = [word for message in messages[:-1] for word in words_of(message)]
    first = min((whole.rfind(word) for word in words_of(messages[-1]) if word in whole), default=0)
    begin = max((whole.rfind(word, 0, first) + len(word) for word in earlier if word in whole[:first]), default=0)
    marked, position, since, before = "", 0, 0, 0
    for token, on in zip(ids, mask, strict=True):
        text = tokenizer.decode([token])
        since = since if on and before else position  # where the marked run began
        marked += text if on and since >= begin else ""
        position, before = position + len(text), on
    return marked or None


def _kind(marked: str | None, turn: Emitted, stops: tuple[str, ...]) -> str:
    if marked is None:
        return NOT_MARKED
    if marked == turn.text:
        return EQUAL
    last = max(marked.rfind(word) for word in words_of(turn.messages[-1]))
    ends = [(at, at + len(stop)) for stop in stops if (at := marked.find(stop, last)) >= 0]
    cut = marked[: min(ends)[1]] if ends else marked
    if cut == turn.text:
        return AFTER_STOP
    if any(cut + stop == turn.text for stop in stops):
        return NO_STOP
    block = cut.removesuffix(turn.text)
    if cut.endswith(turn.text) and turn.prompt.rstrip().endswith(block.rstrip()):
        return THINK if _BLOCK.fullmatch(block) and block.strip() else HEADER
    closed = re.search(rf"{CLOSE_BLOCK}\s*", turn.text)
    if closed and re.search(rf"{OPEN_BLOCK}\s*$", turn.prompt):
        rest = "".join(turn.text[closed.end() :].split())
        return NO_BLOCK if "".join(cut.split()).endswith(rest) else DIFFERENT
    return DIFFERENT
