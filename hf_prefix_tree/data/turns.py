# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Messages to branches: the context that each assistant turn was sampled from, and the turn.

`side_leaf` and `keep` make branches around one trunk, the conversation without reasoning: reasoning as side leaves, or
put back where it was. The template renders the trunk itself, so it decides how an earlier turn looks. The i-th
assistant turn begins at the i-th header, which is what a generation prompt adds, and ends with its turn-end token. Its
reasoning is what its own rendering, after a question, has between header and visible output. An empty think block that
the template writes on the trunk is context.

Cost: in `"per_turn"`, two renderings per assistant turn, each a pass of the template over the messages so far;
otherwise a few of the whole conversation, and one or two of each turn alone. Tokenization of what they don't share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_prefix_tree.data.conversation import Conversation
from hf_prefix_tree.data.dialect import ASK, USER, Ids
from hf_prefix_tree.data.messages import (
    Message,
    Tools,
    TurnError,
    normalize_messages,
    normalize_tools,
    split_reasoning,
    unclosed_reasoning,
)
from hf_prefix_tree.data.template import chat_template_of
from hf_prefix_tree.tree.folding import check_choice, check_integer, common_prefix
from hf_prefix_tree.tree.prefix_tree import Branch

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
    check_choice(reasoning, "reasoning", REASONING_MODES)
    check_integer(num_prompt_messages, "num_prompt_messages")
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
    conversation = Conversation(template, plain, schemas, variables, turns, frozenset(map(int, stop_token_ids or ())))
    if reasoning == "per_turn":
        branches = _per_turn(conversation, empty_thinking_in_prompt)
    else:
        branches = _keep(conversation) if reasoning == "keep" else _side_leaf(conversation)
    counts = conversation.counts
    counts["unclosed_reasoning"] = sum(unclosed_reasoning(plain[t]) is not None for t in turns)
    counts["calls_without_tools"] = 0 if schemas else sum("tool_calls" in plain[t] for t in turns)
    return ConversationBranches(branches, {name: count for name, count in counts.items() if count})


def _branch_of(ids: Ids, spans: Iterable[tuple[int, int]]) -> Branch:
    """The branch that supervises the tokens of the spans."""
    weights = np.zeros(len(ids))
    for start, end in spans:
        weights[start:end] = 1.0
    return Branch(ids, weights)


def _per_turn(conversation: Conversation, empty_thinking_in_prompt: bool) -> list[Branch]:
    """The branches of `reasoning="per_turn"`. See `conversation_branches`."""
    segments = conversation.template.segments
    outputs = [conversation.output(turn, empty_thinking_in_prompt) for turn in conversation.turns]
    encoded = segments.encode([text for prompt, output in outputs for text in (prompt, prompt + output)])
    branches = []
    for turn, (_, output), prompt, ids in zip(conversation.turns, outputs, encoded[::2], encoded[1::2], strict=True):
        start = len(prompt)
        if not np.array_equal(ids[:start], prompt):  # a token reaches over the seam: the model has not sampled it
            ids = np.concatenate([prompt, segments.encode_alone(output)])
        ids, end = conversation.ended(ids, start, turn)
        branches.append(_branch_of(ids, [(start, end)]))
    return branches


def _side_leaf(conversation: Conversation) -> list[Branch]:
    """The branches of `reasoning="side_leaf"`: a leaf per turn that reasons, in order, then the trunk."""
    # A user message after it makes the last turn look like an earlier one.
    trunk = _Trunk(conversation, [{"role": "user", "content": "."}])
    branches: list[Branch] = []
    spans: list[tuple[int, int]] = []
    for turn in trunk.turns:
        if turn.full is not None:
            leaf = turn.full[: trunk.reasoning_end(turn, turn.full)]
            ids = np.concatenate([trunk.ids[: turn.begin], leaf])
            branches.append(_branch_of(ids, [*spans, (turn.begin + turn.prompt_length, len(ids))]))
        spans.append((turn.start, turn.end))
    return [*branches, _branch_of(trunk.ids[: spans[-1][1]], spans)]


def _keep(conversation: Conversation) -> list[Branch]:
    """The branch of `reasoning="keep"`: the visible conversation, with every turn that reasons put back in full."""
    trunk = _Trunk(conversation, [])
    pieces: list[Ids] = []
    spans: list[tuple[int, int]] = []
    read, shift = 0, 0  # how much of the trunk was used, and how far the branch is ahead of it
    for turn in trunk.turns:
        if turn.full is None:
            spans.append((turn.start + shift, turn.end + shift))
            continue
        full, full_end = conversation.ended(turn.full, turn.prompt_length, turn.index)
        pieces += [trunk.ids[read : turn.begin], full[:full_end]]
        begin = turn.begin + shift
        spans.append((begin + turn.prompt_length, begin + full_end))
        read, shift = turn.end, begin + full_end - turn.end
    return [_branch_of(np.concatenate([*pieces, trunk.ids[read:]]), spans)]


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
        self._segments, self._conversation = conversation.template.segments, conversation
        visible, last = conversation.visible, conversation.turns[-1]
        quiet = {"enable_thinking": False} if conversation.template.takes_enable_thinking else {}
        ask, following = conversation.dialect.adapt(ASK), list(map(conversation.dialect.adapt, following))
        whole = [*visible[: last + 1], *following]
        texts = [conversation.text(whole)]
        conversation.count_left_out(texts[0], conversation.text, whole)
        for variables in ({}, quiet):
            texts += [conversation.text(visible[:last], **variables), conversation.prompt(visible[:last], **variables)]
        reasons = []
        for t in conversation.turns:
            message, full = conversation.messages[t], ""
            shown = conversation.text([ask, visible[t]])
            conversation.check_whole(shown.rpartition(USER)[2], t, split_reasoning(message)[1])
            if conversation.reasoning(t):
                full = conversation.text([ask, conversation.shown[t]])
                if not conversation.check_whole(full.rpartition(USER)[2], t, message):
                    conversation.counts["unrendered_reasoning"] += 1
                    full = ""
            reasons.append(bool(full))
            texts += [shown, full] if full else [shown]
        self.ids, before, prompt, quiet_before, quiet_prompt, *encoded = self._segments.encode(texts)
        # The tokens that a generation prompt adds, as it is and with thinking turned off.
        self._header = prompt[common_prefix(before, prompt) :]
        self._quiet_header = quiet_prompt[common_prefix(quiet_before, quiet_prompt) :]

        assistants = [t for t in range(last + 1) if visible[t]["role"] == "assistant"]
        self._mark, begins = self._find_mark(len(assistants))
        begins = [*begins, len(self.ids)]
        self.turns: list[_Turn] = []
        for t, reason in zip(conversation.turns, reasons, strict=True):
            order = assistants.index(t)
            alone = self._from_header(encoded.pop(0))
            full_ids = self._from_header(encoded.pop(0)) if reason else None
            begin = begins[order]
            start = begin + self._skip(self.ids[begin : begins[order + 1]])
            if t == last and not following:
                self.ids, end = conversation.ended(self.ids, start, t)
            else:
                end = start + self._output_length(t, alone, self.ids[start : begins[order + 1]])
            prompt_length = self._skip(alone) if full_ids is None else common_prefix(full_ids, self._header)
            if prompt_length not in ([len(self._header)] if reason else [len(self._header), len(self._quiet_header)]):
                raise _no_trunk(f"`messages[{t}]` doesn't continue its generation prompt")
            self.turns.append(_Turn(t, begin, start, end, full_ids, prompt_length))

    def reasoning_end(self, turn: _Turn, full: Ids) -> int:
        """Where the reasoning ends in `full`: before the visible output and the white space in front of that."""
        special_ids, is_blank = self._segments.special_ids, self._segments.is_blank
        output, shown = (
            ids[:-1] if len(ids) and int(ids[-1]) in special_ids else ids
            for ids in (self._ended(full, turn.prompt_length, turn.index), self.ids[turn.start : turn.end])
        )
        shared = common_prefix(output[::-1], shown[::-1])
        if not all(is_blank(int(i)) for i in shown[: len(shown) - shared]):
            raise _no_trunk(f"the visible output of `messages[{turn.index}]` is another one after its reasoning")
        end = len(output) - shared
        while end > turn.prompt_length and is_blank(int(full[end - 1])):
            end -= 1
        return end

    def _find_mark(self, count: int) -> tuple[Ids, list[int]]:
        """The shortest start of the header that the trunk has once for every assistant message, and where."""
        for length in range(1, len(self._header) + 1):
            positions = _positions(self._header[:length], self.ids)
            if len(positions) == count:
                return self._header[:length], positions.tolist()
        raise _no_trunk("some of its assistant turns don't begin as a generation prompt ends")

    def _from_header(self, ids: Ids) -> Ids:
        """The rendering of a question and a turn, from the turn's header on."""
        positions = _positions(self._mark, ids)
        if not len(positions):
            raise _no_trunk("some of its assistant turns have no header when they come last")
        return ids[positions[0] :]

    def _ended(self, ids: Ids, start: int, turn: int) -> Ids:
        ids, end = self._conversation.ended(ids, start, turn)
        return ids[:end]

    def _skip(self, ids: Ids) -> int:
        """Length of the header, and of an empty think block after it, at the start of `ids`."""
        quiet = len(self._quiet_header)
        return quiet if common_prefix(ids, self._quiet_header) == quiet else common_prefix(ids, self._header)

    def _output_length(self, turn: int, alone: Ids, output: Ids) -> int:
        """Length of a turn's visible output at the start of `output`, found by its rendering `alone`."""
        skipped = self._skip(alone)
        shown = self._ended(alone, skipped, turn)[skipped:]
        if len(shown) and int(shown[-1]) in self._segments.special_ids:
            # It has as many special tokens as its own rendering; the last may be the next header, of any role.
            special, past = list(self._segments.special_ids), self._conversation.dialect.past_turn_end_id
            (at,) = np.isin(output, special).nonzero()
            count = int(np.isin(shown, special).sum())
            if len(at) >= count and int(output[at[count - 1]]) in (int(shown[-1]), past):
                return int(at[count - 1]) + 1
        elif np.array_equal(output[: len(shown)], shown):
            return len(shown)
        raise _no_trunk(f"the visible output of `messages[{turn}]` is another one when messages follow it")


def _positions(pattern: Ids, ids: Ids) -> Ids:
    """Where the pattern occurs."""
    windows = len(ids) - len(pattern) + 1
    if windows <= 0:
        return np.empty(0, dtype=np.int64)
    return np.logical_and.reduce([ids[i : i + windows] == token for i, token in enumerate(pattern)]).nonzero()[0]


def _no_trunk(reason: str) -> TurnError:
    return TurnError(
        "refused_trunks",
        f"`messages` don't fit on a trunk of visible content with this chat template: {reason}; pass "
        "`reasoning='per_turn'`.",
    )
