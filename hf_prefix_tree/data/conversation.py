# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One conversation under one chat template: renders parts of it and finds its turns in the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_prefix_tree.data.messages import Message, split_reasoning
from hf_prefix_tree.data.template import ChatTemplate
from hf_prefix_tree.data.tokenization import common_prefix
from hf_prefix_tree.tree.prefix_tree import Branch

if TYPE_CHECKING:
    from hf_prefix_tree.data.tokenization import Ids


@dataclass
class Conversation:
    """
    A conversation, and what was found missing in it.

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
        texts += [
            conversation.prompt(messages[:turn], **switch),
            conversation.text(messages[: turn + 1], **switch),
        ]
        conversation.reasoning_is_in(texts[-1], turn)
    conversation.count_left_out(texts[-1], messages[: turn + 1], **switch)
    encoded = template.segments.encode(texts)
    branches = []
    for prompt, ids in zip(encoded[::2], encoded[1::2], strict=True):
        start = conversation.turn_start(prompt, ids)
        branches.append(branch_of(ids, [(start, template.turn_end(ids, start))]))
    return branches
