# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Messages to branches: what each assistant turn saw when it was sampled, and what it then said.

Cost: two renderings per assistant turn (three where its reasoning leaves the trunk), each a pass of the template over
the messages so far, and one of the whole conversation; tokenization of what the renderings don't share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_prefix_tree.data.conversation import Conversation, keep, per_turn, side_leaf
from hf_prefix_tree.data.messages import Tools, normalize_messages, normalize_tools, unclosed_reasoning
from hf_prefix_tree.data.template import chat_template_of
from hf_prefix_tree.tree.prefix_tree import Branch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONING_MODES = ("per_turn", "side_leaf", "think_split", "keep")


@dataclass(frozen=True)
class ConversationBranches:
    """
    The branches of one conversation.

    Args:
        branches (`list[Branch]`):
            Weights are 0 and 1.
        prefix_mismatches (`int`):
            Turns whose generation prompt is not a token prefix of the rendering that contains the turn. Such a turn is
            supervised from where the two differ, which is in the prompt, on a context that differs from inference.
        unrendered_reasoning (`int`):
            Turns whose reasoning the template left out of its own turn, so that it is trained on nowhere.
        unclosed_reasoning (`int`):
            Turns whose content begins with a `<think>` that is never closed, as in rollouts of capped length. All of
            it is reasoning. The template closes it, so that the turn is trained on as if it had ended there.
        unrendered_messages (`int`):
            Messages up to the last turn whose content the template leaves out, e.g. of a role that it doesn't know, or
            whose `function_call`. The content of assistant messages and `tool_calls` are not looked at.
    """

    branches: list[Branch]
    prefix_mismatches: int
    unrendered_reasoning: int
    unclosed_reasoning: int = 0
    unrendered_messages: int = 0


def conversation_branches(
    messages: Sequence[Mapping[str, Any]] | str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    reasoning: str = "per_turn",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    empty_thinking_in_prompt: bool = True,
    num_prompt_messages: int = 0,
) -> ConversationBranches:
    """
    Turn a conversation into branches, with the tokenizer's own chat template.

    A turn is supervised from the common token prefix of its generation prompt and its rendering, to the turn-end token
    inclusive. What the template adds after that token is context.

    Args:
        messages (sequence of mappings, or a JSON string of one):
            OpenAI chat messages: `role`, `content`, and for assistant turns `tool_calls` and `reasoning_content` (or
            `<think>...</think>` in `content`). `content` may be `None` or missing. Tool-call arguments may be objects
            or JSON strings; a string is printed as it is, parsed only where the template would print it as JSON of a
            string. Messages after the last assistant turn are left out.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with a chat template.
        tools (sequence or `str`, *optional*):
            Tool schemas, or a JSON string of them.
        reasoning (`str`, *optional*, defaults to `"per_turn"`):
            What becomes of reasoning that the template drops from earlier turns:

            - `"per_turn"`: one branch per assistant turn: the messages up to it, rendered. This is what an agent loop
              samples. Earlier reasoning is gone where the template drops it.
            - `"side_leaf"`: one trunk of visible content. Each turn's reasoning is a leaf that hangs off the trunk
              after the turn's header. Visible output is supervised on the trunk, by every branch through it.
            - `"think_split"`: the same for a conversation with a single assistant turn: prompt, reasoning, answer.
            - `"keep"`: one branch, with the reasoning of every turn.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Further variables for the template, or another `chat_template`.
        empty_thinking_in_prompt (`bool`, *optional*, defaults to `True`):
            Render turns without reasoning with `enable_thinking=False` in `"per_turn"`, where the template knows that
            variable and `chat_template_kwargs` doesn't set it. An empty think block is then part of the prompt and not
            supervised.
        num_prompt_messages (`int`, *optional*, defaults to 0):
            Assistant turns among the first so many messages are context.

    Returns:
        [`ConversationBranches`]

    Raises:
        `ValueError`: If the messages or tools are malformed, no assistant turn is to be trained, the template can't
            render them, or `reasoning` is unknown or doesn't fit.

    Example:

    ```python
    >>> messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    >>> (branch,) = conversation_branches(messages, tokenizer).branches  # doctest: +SKIP
    >>> tokenizer.decode(branch.input_ids[branch.weights > 0])  # doctest: +SKIP
    '4<|im_end|>'

    ```
    """
    if reasoning not in REASONING_MODES:
        raise ValueError(f"`reasoning` is {reasoning!r}; pass one of {', '.join(map(repr, REASONING_MODES))}.")
    schemas = normalize_tools(tools)
    variables = dict(chat_template_kwargs or {})
    template = chat_template_of(tokenizer, schemas, variables)
    plain = normalize_messages(messages, parse_arguments=not template.writes_argument_strings)
    turns = [t for t, message in enumerate(plain) if message["role"] == "assistant" and t >= num_prompt_messages]
    if not turns:
        after = f" after the {num_prompt_messages} of the prompt" if num_prompt_messages else ""
        raise ValueError(f"`messages` has no assistant message{after}, so nothing to train on; drop the row.")
    if reasoning == "think_split" and [t for t, m in enumerate(plain) if m["role"] == "assistant"] != turns[-1:]:
        raise ValueError("`reasoning='think_split'` takes one assistant message; pass 'side_leaf' for several.")
    cut_off = list(map(unclosed_reasoning, plain))
    if template.writes_reasoning:  # otherwise it is content like any other to the template
        plain = [
            message
            if thought is None
            else {**message, "content": "", "thinking": thought, "reasoning_content": thought}
            for message, thought in zip(plain, cut_off, strict=True)
        ]
    template.forget()
    conversation = Conversation(template, plain, schemas, variables, turns)
    if reasoning == "per_turn":
        branches = per_turn(conversation, empty_thinking_in_prompt)
    else:
        branches = keep(conversation) if reasoning == "keep" else side_leaf(conversation)
    return ConversationBranches(
        branches,
        conversation.prefix_mismatches,
        conversation.unrendered_reasoning,
        sum(cut_off[t] is not None for t in turns),
        conversation.unrendered_messages,
    )
