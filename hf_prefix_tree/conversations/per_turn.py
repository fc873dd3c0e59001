# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One branch per assistant turn: the messages up to it, rendered, as an agent loop samples them.

Cost: two renderings per turn, and one of the whole conversation.
"""

from __future__ import annotations

from hf_prefix_tree.conversations.conversation import Conversation, branch_of
from hf_prefix_tree.tree import Branch


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
