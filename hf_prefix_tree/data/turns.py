# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Messages to branches: the context that each assistant turn was sampled from, and the turn.

Cost: in `"per_turn"`, two renderings per assistant turn, each a pass of the template over the messages so far;
otherwise a few of the whole conversation, and one or two of each turn alone. Tokenization of what they don't share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        counts (`dict[str, int]`):
            What the branches don't have, by the names of `hf_prefix_tree.data.counts.LOSSES`:

            - `unrendered_reasoning`: turns whose reasoning the template has no place for, so that it is trained on
              nowhere;
            - `unclosed_reasoning`: turns whose content begins with a `<think>` that is never closed, as in rollouts of
              capped length. All of it is reasoning. The template closes it, so that the turn is trained on as if it
              had ended there;
            - `unrendered_messages`: messages up to the last turn whose content the template leaves out, e.g. of a role
              that it doesn't know. Assistant messages are not looked at: those to be trained on are refused if
              anything of them is left out;
            - `calls_without_tools`: turns with tool calls in a conversation without tool schemas.
    """

    branches: list[Branch]
    counts: dict[str, int]


def conversation_branches(
    messages: Sequence[Mapping[str, Any]] | str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools | None = None,
    reasoning: str = "per_turn",
    chat_template_kwargs: Mapping[str, Any] | None = None,
    empty_thinking_in_prompt: bool = True,
    num_prompt_messages: int = 0,
    stop_token_ids: Iterable[int] | None = None,
) -> ConversationBranches:
    """
    Turn a conversation into branches, with the tokenizer's own chat template.

    The context of a turn is the tokens of `apply_chat_template(history, tools, add_generation_prompt=True)`, which an
    agent loop samples from. Supervised is what the model must emit from there, and nothing else: its reasoning, if the
    template writes any, all its text, every call with name and arguments, and the stop token. A turn that cannot be
    had so is refused. Text that the template adds after the stop token is context.

    Args:
        messages (sequence of mappings, or a JSON string of one):
            OpenAI chat messages: `role`, `content`, and for assistant turns `tool_calls` and `reasoning_content` (or
            `<think>...</think>` in `content`). `content` may be `None`, missing, or a list of parts. Tool-call
            arguments may be objects or JSON strings; each template gets the form that it prints as its own, and a
            string as it is where both are printed alike. Messages after the last assistant turn are left out.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with a chat template.
        tools (sequence or `str`, *optional*):
            Tool schemas, or a JSON string of them.
        reasoning (`str`, *optional*, defaults to `"per_turn"`):
            How to treat reasoning that the template drops from earlier turns:

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
        stop_token_ids (iterable of `int`, *optional*):
            The tokens at which generation ends. Defaults to those of the `generation_config.json` in the tokenizer's
            folder that the template writes, or else to what the template ends a turn with, be it the first token of
            the next message.

    Returns:
        [`ConversationBranches`]

    Raises:
        `ValueError`: If the messages or tools are malformed, no assistant turn is to be trained, the template can't
            render them, or `reasoning` is unknown or doesn't fit; a [`TurnError`] with the name of its count if a turn
            cannot be supervised exactly.

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
    plain = normalize_messages(messages)
    turns = [t for t, message in enumerate(plain) if message["role"] == "assistant" and t >= num_prompt_messages]
    if not turns:
        after = f" after the {num_prompt_messages} of the prompt" if num_prompt_messages else ""
        raise ValueError(f"`messages` has no assistant message{after}, so nothing to train on; drop the row.")
    if reasoning == "think_split" and [t for t, m in enumerate(plain) if m["role"] == "assistant"] != turns[-1:]:
        raise ValueError("`reasoning='think_split'` takes one assistant message; pass 'side_leaf' for several.")
    template.forget()
    stop_ids = frozenset(map(int, stop_token_ids or ()))
    conversation = Conversation(template, plain, schemas, variables, turns, stop_ids)
    if reasoning == "per_turn":
        branches = per_turn(conversation, empty_thinking_in_prompt)
    else:
        branches = keep(conversation) if reasoning == "keep" else side_leaf(conversation)
    counts = conversation.counts
    counts["unclosed_reasoning"] = sum(unclosed_reasoning(plain[t]) is not None for t in turns)
    counts["calls_without_tools"] = 0 if schemas else sum("tool_calls" in plain[t] for t in turns)
    return ConversationBranches(branches, {name: count for name, count in counts.items() if count})
