# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One conversation under one chat template: renders parts of it, finds its turns in the tokens, and makes branches.

`per_turn` renders every turn with its own context. `side_leaf` and `keep` make branches around one trunk, the
conversation without reasoning: reasoning as side leaves, or put back where it was. The template renders the trunk
itself, so it decides how an earlier turn looks. The i-th assistant turn begins at the i-th header, which is what a
generation prompt adds, and ends with its turn-end token. Its reasoning is what its own rendering has between header
and visible output. An empty think block that the template writes on the trunk is context.

Cost: two renderings per turn; on a trunk, one per turn that does not reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.data.messages import Message, split_reasoning
from hf_prefix_tree.data.template import ChatTemplate
from hf_prefix_tree.data.tokenization import common_prefix
from hf_prefix_tree.tree.prefix_tree import Branch

if TYPE_CHECKING:
    from hf_prefix_tree.data.tokenization import Ids


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
    """

    template: ChatTemplate
    messages: list[Message]
    tools: list[Any] | None
    variables: dict[str, Any]
    turns: list[int]
    prefix_mismatches: int = field(default=0, init=False)
    unrendered_reasoning: int = field(default=0, init=False)
    unrendered_messages: int = field(default=0, init=False)

    @cached_property
    def visible(self) -> list[Message]:
        """The messages without reasoning."""
        return [split_reasoning(message)[1] for message in self.messages]

    def has_reasoning(self, turn: int) -> bool:
        return bool(split_reasoning(self.messages[turn])[0])

    def text(self, messages: Sequence[Message], **variables: Any) -> str:
        """The messages, rendered."""
        return self.template.render(messages, self.tools, self.variables | variables)

    def prompt(self, messages: Sequence[Message], **variables: Any) -> str:
        """The messages and the header of an assistant turn, rendered."""
        return self.template.render(messages, self.tools, self.variables | variables, add_generation_prompt=True)

    def reasoning_is_in(self, text: str, turn: int) -> bool:
        """Whether the turn's rendering has its reasoning, if it has any; counts it if not."""
        missing = split_reasoning(self.messages[turn])[0] not in text
        self.unrendered_reasoning += missing
        return not missing

    def count_left_out(self, text: str, messages: Sequence[Message], **variables: Any) -> None:
        """Counts the messages that are not in their rendering."""
        self.unrendered_messages = self.template.count_left_out(text, messages, self.tools, self.variables | variables)

    def turn_start(self, prompt: Ids, ids: Ids) -> int:
        """Where the turn starts in a rendering that contains it; counts a prompt that is no prefix."""
        start = common_prefix(prompt, ids)
        self.prefix_mismatches += start < len(prompt)
        return start


def branch_of(ids: Ids, spans: Iterable[tuple[int, int]]) -> Branch:
    """The branch that supervises the tokens of the spans."""
    weights = np.zeros(len(ids))
    for start, end in spans:
        weights[start:end] = 1.0
    return Branch(ids, weights)


def per_turn(conversation: Conversation, empty_thinking_in_prompt: bool) -> list[Branch]:
    """The branches of `reasoning="per_turn"`. See `conversation_branches`."""
    template, messages = conversation.template, conversation.messages
    may_switch = (
        empty_thinking_in_prompt and template.takes_enable_thinking and "enable_thinking" not in conversation.variables
    )
    texts = []
    for turn in conversation.turns:
        switch = {"enable_thinking": False} if may_switch and not conversation.has_reasoning(turn) else {}
        texts += [conversation.prompt(messages[:turn], **switch), conversation.text(messages[: turn + 1], **switch)]
        conversation.reasoning_is_in(texts[-1], turn)
    conversation.count_left_out(texts[-1], messages[: turn + 1], **switch)
    encoded = template.segments.encode(texts)
    branches = []
    for prompt, ids in zip(encoded[::2], encoded[1::2], strict=True):
        start = conversation.turn_start(prompt, ids)
        branches.append(branch_of(ids, [(start, template.turn_end(ids, start))]))
    return branches


def side_leaf(conversation: Conversation) -> list[Branch]:
    """The branches of `reasoning="side_leaf"`: a leaf per turn that reasons, in order, then the trunk."""
    # A user message after it makes the last turn look like an earlier one.
    trunk = _Trunk(conversation, [{"role": "user", "content": "."}])
    branches: list[Branch] = []
    spans: list[tuple[int, int]] = []
    for turn in trunk.turns:
        if turn.full is not None:
            leaf = turn.full[: trunk.reasoning_end(turn, turn.full)]
            ids = np.concatenate([trunk.ids[: turn.begin], leaf])
            branches.append(branch_of(ids, [*spans, (turn.begin + turn.prompt_length, len(ids))]))
        spans.append((turn.start, turn.end))
    return [*branches, branch_of(trunk.ids[: spans[-1][1]], spans)]


def keep(conversation: Conversation) -> list[Branch]:
    """The branch of `reasoning="keep"`: the visible conversation, with every turn that reasons put back in full."""
    trunk = _Trunk(conversation, [])
    pieces: list[Ids] = []
    spans: list[tuple[int, int]] = []
    read, shift = 0, 0  # how much of the trunk was used, and how far the branch is ahead of it
    for turn in trunk.turns:
        if turn.full is None:
            spans.append((turn.start + shift, turn.end + shift))
            continue
        full_end = trunk.turn_end(turn.full, turn.prompt_length)
        pieces += [trunk.ids[read : turn.begin], turn.full[:full_end]]
        begin = turn.begin + shift
        spans.append((begin + turn.prompt_length, begin + full_end))
        read, shift = turn.end, begin + full_end - turn.end
    return [branch_of(np.concatenate([*pieces, trunk.ids[read:]]), spans)]


@dataclass
class _Turn:
    """Where a turn is on the trunk, and, if it reasons, how the template renders it."""

    index: int
    begin: int  # of its header
    start: int  # of its visible output, after the header and an empty think block
    end: int
    full: Ids | None  # header, reasoning, visible output
    prompt_length: int  # how much of `full` is the generation prompt


class _Trunk:
    """
    The visible conversation up to its last turn, rendered with `following` after it, and where its turns are.

    Raises:
        `ValueError`: If a turn can't be found.
    """

    def __init__(self, conversation: Conversation, following: list[Message]) -> None:
        self._segments = conversation.template.segments
        self.turn_end = conversation.template.turn_end
        visible, last = conversation.visible, conversation.turns[-1]
        quiet = {"enable_thinking": False} if conversation.template.takes_enable_thinking else {}
        whole = [*visible[: last + 1], *following]
        texts = [conversation.text(whole)]
        conversation.count_left_out(texts[0], whole)
        for variables in ({}, quiet):
            texts += [conversation.text(visible[:last], **variables), conversation.prompt(visible[:last], **variables)]
        reasons = []
        for t in conversation.turns:
            text = conversation.text([*visible[:t], conversation.messages[t]]) if conversation.has_reasoning(t) else ""
            reasons.append(bool(text) and conversation.reasoning_is_in(text, t))
            texts += [conversation.text(visible[: t + 1]), *([text] if reasons[-1] else [])]
        self.ids, before, prompt, quiet_before, quiet_prompt, *encoded = self._segments.encode(texts)
        # The tokens that a generation prompt adds, as it is and with thinking turned off.
        self._header = prompt[common_prefix(before, prompt) :]
        self._quiet_header = quiet_prompt[common_prefix(quiet_before, quiet_prompt) :]

        assistants = [t for t in range(last + 1) if visible[t]["role"] == "assistant"]
        self._mark = self._find_mark(len(assistants))
        self.turns: list[_Turn] = []
        for t, reason in zip(conversation.turns, reasons, strict=True):
            order = assistants.index(t)
            alone = self._from_header(encoded.pop(0), order)
            full = self._from_header(encoded.pop(0), order) if reason else None
            on_trunk = self._from_header(self.ids, order)
            begin = len(self.ids) - len(on_trunk)
            start = begin + self._skip(on_trunk)
            if t == last and not following:
                end = self.turn_end(self.ids, start)
            else:
                end = start + self._output_length(t, alone, self.ids[start:], conversation.template.past_turn_end_id)
            prompt_length = self._skip(alone) if full is None else common_prefix(full, self._header)
            expected = [len(self._header)] if reason else [len(self._header), len(self._quiet_header)]
            conversation.prefix_mismatches += prompt_length not in expected
            self.turns.append(_Turn(t, begin, start, end, full, prompt_length))

    def reasoning_end(self, turn: _Turn, full: Ids) -> int:
        """Where the reasoning ends in `full`: before the visible output and the white space in front of that."""
        special_ids, is_blank = self._segments.special_ids, self._segments.is_blank
        output, shown = (
            ids[:-1] if len(ids) and int(ids[-1]) in special_ids else ids
            for ids in (full[: self.turn_end(full, turn.prompt_length)], self.ids[turn.start : turn.end])
        )
        shared = common_prefix(output[::-1], shown[::-1])
        if not all(is_blank(int(i)) for i in shown[: len(shown) - shared]):
            raise _no_trunk(f"the visible output of `messages[{turn.index}]` is another one after its reasoning")
        end = len(output) - shared
        while end > turn.prompt_length and is_blank(int(full[end - 1])):
            end -= 1
        return end

    def _find_mark(self, count: int) -> Ids:
        """The shortest start of the header that the trunk has once for every assistant message."""
        for length in range(1, len(self._header) + 1):
            if len(_positions(self._header[:length], self.ids)) == count:
                return self._header[:length]
        raise _no_trunk("some of its assistant turns don't begin as a generation prompt ends")

    def _from_header(self, ids: Ids, order: int) -> Ids:
        """The tokens from the header of the assistant turn with this number on, 0 for the first."""
        positions = _positions(self._mark, ids)
        if len(positions) <= order:
            raise _no_trunk("some of its assistant turns have no header when they come last")
        return ids[positions[order] :]

    def _skip(self, ids: Ids) -> int:
        """Length of the header, and of an empty think block after it, at the start of `ids`."""
        quiet = len(self._quiet_header)
        return quiet if common_prefix(ids, self._quiet_header) == quiet else common_prefix(ids, self._header)

    def _output_length(self, index: int, alone: Ids, output: Ids, past_end: int | None) -> int:
        """Length of a turn's visible output at the start of `output`, found by its rendering `alone`."""
        skipped = self._skip(alone)
        shown = alone[skipped : self.turn_end(alone, skipped)]
        if len(shown) and int(shown[-1]) in self._segments.special_ids:
            # It has as many of these tokens as its own rendering: one, unless its content has some.
            ends = [i for i in (int(shown[-1]), past_end) if i is not None]
            (at,) = np.isin(output, ends).nonzero()
            count = int(np.isin(shown, ends).sum())
            if len(at) >= count:
                return int(at[count - 1]) + 1
        elif np.array_equal(output[: len(shown)], shown):
            return len(shown)
        raise _no_trunk(f"the visible output of `messages[{index}]` is another one when messages follow it")


def _positions(pattern: Ids, ids: Ids) -> npt.NDArray[np.intp]:
    """Where the pattern occurs."""
    windows = len(ids) - len(pattern) + 1
    if windows <= 0:
        return np.empty(0, dtype=np.intp)
    return np.logical_and.reduce([ids[i : i + windows] == token for i, token in enumerate(pattern)]).nonzero()[0]


def _no_trunk(reason: str) -> ValueError:
    return ValueError(
        f"`messages` don't fit on a trunk of visible content with this chat template: {reason}; pass "
        "`reasoning='per_turn'`."
    )
