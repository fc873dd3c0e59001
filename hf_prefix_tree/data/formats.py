# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Conversations in the formats that datasets have, as OpenAI messages and tools; each format is known by its keys.

`hf_prefix_tree.data.messages` goes on from there. Each row counts once for each format of `FORMATS` that it was
converted from. Text and its order stay: what OpenAI messages can't express is refused.

Cost: linear in the messages. A message in OpenAI's form is passed on as it is.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, groupby, takewhile
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
from datasets import Dataset

from hf_prefix_tree.data.messages import Message, normalize_messages, parsed_json, split_reasoning, split_thought
from hf_prefix_tree.tree.prefix_tree import Branch

if TYPE_CHECKING:
    from hf_prefix_tree.data.rows import RowOptions

# Rows are counted under these names; "switched" are those with turns that are not to be trained on.
FORMATS = ("sharegpt", "call_roles", "anthropic", "hermes", "bare_tools", "alpaca", "preference", "text", "switched")
TOOL_COLUMNS = ("tools", "tool_defs", "functions")

_SPEAKERS = dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "bot"), "assistant") | {"human": "user"}
_CALL_ROLES = ("function_call", "tool_call")
_RESULT_ROLES = ("observation", "tool_response", "function_response")
_OPENAI_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_BLOCKS = ("thinking", "text", "tool_use")  # of an assistant message, in this order
_ANTHROPIC = ("thinking", "redacted_thinking", "tool_use", "tool_result")  # not in OpenAI's lists of parts
_HERMES_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def openai_conversation(
    messages: Any, num_prompt_messages: int, row: Mapping[str, Any], counts: Counter[str]
) -> tuple[Any, int]:
    """
    A conversation as OpenAI messages, and how many of these are the prompt.

    Args:
        messages (`list` of mappings, or a JSON string of one):
            The conversation. Anything else is returned as it is, for `normalize_messages` to refuse.
        num_prompt_messages (`int`):
            How many of them are the prompt.
        row (`Mapping[str, Any]`):
            Its row. The column `system` comes before a conversation without a system message.
        counts (`Counter[str]`):
            Gets a 1 for each of the `FORMATS` that was converted.

    Raises:
        `ValueError`: If something can't be converted; names the format and the field.

    Example:

    ```python
    >>> talk = [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]
    >>> openai_conversation(talk, 0, {}, Counter())
    ([{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant', 'content': '4'}], 0)

    ```
    """
    messages = parsed_json(messages, "messages")
    if not isinstance(messages, Sequence) or not all(isinstance(message, Mapping) for message in messages):
        return messages, num_prompt_messages
    prompt = _converted(messages[:num_prompt_messages], 0, counts)
    answer = _converted(messages[num_prompt_messages:], num_prompt_messages, counts)
    first = (prompt or answer or [{}])[0]
    if system := row.get("system"):
        if first.get("role") not in ("system", "developer"):
            prompt = [{"role": "system", "content": system}, *prompt]
        elif first.get("content") != system:
            raise ValueError("the conversation has a system message and the row another `system`; keep one of them.")
    return [*prompt, *answer], len(prompt)


def openai_tools(tools: Any, counts: Counter[str]) -> Any:
    """
    Tools with function schemas that stand alone, as in Anthropic's and many other formats, put into OpenAI's form.

    Raises:
        `ValueError`: If a string is no JSON.
    """
    tools = parsed_json(tools, "tools") if not isinstance(tools, str) or tools.strip() else None
    return [_openai_tool(tool, f"tools[{i}]", counts) for i, tool in enumerate(tools)] if _is_list(tools) else tools


def with_tools(rows: Dataset, tools: Any, columns: Mapping[str, str], group_by: str) -> Dataset:
    """
    The rows with a column of the tools of a file, which is called `tools_file` in errors.

    Args:
        rows ([`~datasets.Dataset`]): Rows without tools.
        tools (`list` or `dict[str, list]`): Those of every row, or those of each value of the column `group_by`.
        columns (`Mapping[str, str]`), group_by (`str`): Columns of other names; the column of the groups.

    Raises:
        `ValueError`: If the rows have tools or no such column, or a group has no tools.
    """
    if "tools" in rows.column_names or "tools" in columns:
        raise ValueError("`tools_file` is given, but the rows have tools of their own; leave it out.")
    if isinstance(tools, list):
        return rows.add_column("tools", [json.dumps(tools)] * len(rows))
    column = columns.get(group_by, group_by)
    if column not in rows.column_names:
        raise ValueError(f"`tools_file` has tools by group, but the rows have no column {column!r}; pass `group_by`.")
    if missing := {str(group) for group in rows.unique(column)} - tools.keys():
        raise ValueError(f"`tools_file` has no tools for {column}={min(missing)!r}; add them, if only an empty list.")
    return rows.add_column("tools", [json.dumps(tools[str(group)]) for group in rows[column]])


def alpaca_conversations(row: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """The one conversation of a row with `instruction` and `output`, and maybe `input` and `history`; no prompt."""
    fields = {name: row.get(name) or "" for name in ("instruction", "input", "output")}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise ValueError(f"`{name}` is a {type(value).__name__} in the Alpaca format; pass a string.")
    turns = row.get("history") or []
    if not _is_list(turns) or not all(_is_list(turn) and len(turn) == 2 for turn in turns):
        raise ValueError("`history` is no list of pairs in the Alpaca format; pass `[[question, answer], ...]`.")
    question = "\n".join(filter(None, (fields["instruction"], fields["input"])))
    pairs = [zip(("user", "assistant"), turn, strict=True) for turn in (*turns, (question, fields["output"]))]
    return [([{"role": role, "content": text} for pair in pairs for role, text in pair], 0)]


def preference_completions(row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """
    The prompt of a row of `chosen` and `rejected`, and these two. As in TRL, they begin with the prompt where there is
    none, or none of their type.
    """
    columns: list[Any] = [row.get(name) for name in ("prompt", "chosen", "rejected")]
    prompt, chosen, rejected = columns
    is_implicit = prompt is None or isinstance(prompt, str) != isinstance(chosen, str)
    if is_implicit and isinstance(chosen, (str, list)) and type(chosen) is type(rejected):
        equal = (first == second for first, second in zip(chosen, rejected, strict=False))
        shared = min(sum(takewhile(bool, equal)), len(chosen) - 1, len(rejected) - 1)
        shared -= isinstance(chosen, str) and chosen[shared - 1 : shared] == " "  # the space belongs to a completion
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    return prompt, [chosen, rejected]


def training_switches(message: Mapping[str, Any], row: Mapping[str, Any]) -> tuple[bool, bool]:
    """
    Whether the reasoning of an assistant message is trained on, and whether the rest of it is.

    `train_reasoning` and `train_response` stand in the message, or in the row for all of its messages. A `weight` of 0
    in the message, as in OpenAI's format, turns both off.

    Raises:
        `ValueError`: If a weight is neither 0 nor 1, or a switch neither true nor false.
    """
    given = {key: value for source in (row, message) for key, value in source.items() if value is not None}
    weight = message.get("weight")
    if weight not in (None, 0, 1):
        raise ValueError(f"`weight` of a message is {weight!r}; pass 0 or 1.")
    reasoning, response = (given.get(name, True) for name in ("train_reasoning", "train_response"))
    if reasoning not in (True, False) or response not in (True, False):
        raise ValueError(f"`train_reasoning` is {reasoning!r}, `train_response` {response!r}; pass true or false.")
    return (bool(reasoning), bool(response)) if weight != 0 else (False, False)


def switched_off(
    branches: list[Branch], turns: list[Mapping[str, Any]], switches: list[tuple[bool, bool]], options: RowOptions
) -> list[Branch]:
    """
    The branches of a conversation, without the supervision of the reasoning or the response of some turns.

    Args:
        branches (`list[Branch]`): Those of `conversation_branches`.
        turns (`list[Mapping[str, Any]]`): Its assistant messages to train on.
        switches (`list[tuple[bool, bool]]`): What of each turn is trained on, see [`training_switches`].
        options ([`RowOptions`]): How it was read.

    Raises:
        `ValueError`: If the turns or where their reasoning ends can't be found.
    """
    runs = [np.flatnonzero(np.diff(branch.weights > 0, prepend=0, append=0)).reshape(-1, 2) for branch in branches]
    # Each run of supervised tokens is a turn; side leaves end with one of reasoning, and all others are responses.
    is_split, numbers, changed = options.reasoning in ("side_leaf", "think_split"), count(), []
    if len(switches) != (len(runs[-1]) if is_split else sum(map(len, runs))):
        raise ValueError("`train_response` is off for a turn, but not every turn is supervised; drop the row.")
    for branch, edges in zip(branches, runs, strict=True):
        weights = branch.weights.copy()
        for position, (start, stop) in enumerate(edges.tolist()):
            number = position if is_split else next(numbers)
            if not is_split:
                end = start + _reasoning_length(branch.input_ids[start:stop], turns[number], switches[number], options)
            else:
                end = stop if branch is not branches[-1] and stop == edges[-1, 1] else start
            weights[start:end] *= switches[number][0]
            weights[end:stop] *= switches[number][1]
        changed.append(Branch(branch.input_ids, weights))
    return changed


def _reasoning_length(ids: Any, turn: Mapping[str, Any], switches: tuple[bool, bool], options: RowOptions) -> int:
    """Tokens of a turn up to the `reasoning_end` of its reasoning; 0 if there is none."""
    decode, mark = options.tokenizer.decode, options.reasoning_end
    reasoning, visible = split_reasoning(normalize_messages([turn])[0])
    if ends := decode(ids).count(mark):  # those of the answer are not of an end of reasoning
        said = str(visible["content"]) + str(visible.get("tool_calls", ""))
        ends = min(ends, reasoning.count(mark) + 1) if reasoning else max(ends - said.count(mark), 0)
        return bisect_left(range(len(ids)), ends, key=lambda length: decode(ids[:length]).count(mark))
    if any(switches) and reasoning:
        raise ValueError(
            f"`reasoning_end` is {mark!r}, which the rendering of a turn with reasoning lacks, so its response can't "
            "be found; set it to the text that ends reasoning in this chat template."
        )
    return 0


def _converted(messages: Sequence[Mapping[str, Any]], first: int, counts: Counter[str]) -> list[Any]:
    is_sharegpt = any(message.get("from") is not None for message in messages)
    if is_sharegpt:
        counts["sharegpt"] = 1
        names = {"from": "role", "value": "content"}
        messages = [{names.get(key, key): value for key, value in message.items()} for message in messages]
    converted: list[Any] = []
    for index, message in enumerate(messages, start=first):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if is_sharegpt:
            role = _sharegpt_role(role, content, where)
            message = {**message, "role": role}
        kind = role.replace("-", "_") if isinstance(role, str) else ""
        if kind in _CALL_ROLES:
            counts["call_roles"] = 1
            thought, calls = _calls_of_role(content, where)
            if not thought and converted and converted[-1].get("role") == "assistant":
                message = converted.pop()  # said before the call, or called beside it
                calls = [*(message.get("tool_calls") or ()), *calls]
            else:
                message = {**message, "role": "assistant", "content": thought}
            converted.append({**message, "tool_calls": calls})
        elif kind in _RESULT_ROLES:
            counts["call_roles"] = 1
            converted += _without_response_tags({**message, "role": "tool"}, counts)
        elif _is_list(content) and any(_type(block) in _ANTHROPIC for block in content):
            counts["anthropic"] = 1
            converted += _of_blocks(message, where)
        elif role == "assistant" and isinstance(content, str) and "<tool_call>" in content:
            converted.append(_of_hermes(message, where, counts))
        elif role in ("tool", "user") and isinstance(content, str) and "<tool_response>" in content:
            converted += _without_response_tags(message, counts)
        else:
            converted.append(message)
    return converted


def _sharegpt_role(role: Any, content: Any, where: str) -> str:
    role = _SPEAKERS.get(role, role) if isinstance(role, str) else role
    if role not in _OPENAI_ROLES and str(role).replace("-", "_") not in (*_CALL_ROLES, *_RESULT_ROLES):
        raise ValueError(
            f"`{where}.from` is {role!r}, which is no role of the ShareGPT format; rename it to `human`, `gpt`, ..."
        )
    if content is None:
        raise ValueError(f"`{where}.value` is missing in the ShareGPT format; pass what was said.")
    return role


def _calls_of_role(content: Any, where: str) -> tuple[str, list[Message]]:
    """The reasoning before a call that is a message of its own, and the calls."""
    thought = ""
    if isinstance(content, str):
        thought, content = ("", content) if content.lstrip().startswith(("{", "[")) else split_thought(content)
        content = parsed_json(content, f"{where}.content", " in the format with calls as roles")
    calls = content if _is_list(content) else [content]
    return thought, [_call(call, where, "the format with calls as roles") for call in calls]


def _call(call: Any, where: str, name_of_format: str) -> Message:
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        raise ValueError(f"`{where}` has the call {str(call)[:80]!r} in {name_of_format}; give it a `name`.")
    identity = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", **identity, "function": {"name": call["name"], "arguments": call.get("arguments")}}


def _of_hermes(message: Mapping[str, Any], where: str, counts: Counter[str]) -> Mapping[str, Any]:
    """An assistant message with its `<tool_call>` text, after the reasoning, as calls."""
    thought, said = split_thought(message["content"])
    text, *parts = _HERMES_CALL.split(said)  # text, call, text, call, text
    if re.search(r"<tool_call>\s*\{", text) or any(part.strip() for part in parts[1::2]):
        raise ValueError(
            f"`{where}.content` has text after a call, or a call that is not closed, in the Hermes format; OpenAI "
            "messages say first and call then."
        )
    if not parts:  # says the words, or has calls in another notation
        return message
    counts["hermes"] = 1
    calls = [_call(_hermes_object(part, where), where, "the Hermes format") for part in parts[::2]]
    return {**message, "content": thought + text.rstrip(), "tool_calls": calls}


def _hermes_object(text: str, where: str) -> Any:
    """JSON, or Python's notation of the same, which the data of Hermes has too."""
    try:
        return parsed_json(text, f"{where}.content", " in the Hermes format")
    except ValueError as error:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise error from None


def _without_response_tags(message: Mapping[str, Any], counts: Counter[str]) -> list[Mapping[str, Any]]:
    """A tool message for each result of a message that is nothing but results in Hermes's tags."""
    content = message.get("content")
    *results, rest = content.split("</tool_response>") if isinstance(content, str) else ["no text"]
    texts = [result.strip().removeprefix("<tool_response>") for result in results]
    if rest.strip() or not texts or any(text == result.strip() for text, result in zip(texts, results, strict=True)):
        return [message]
    counts["hermes"] = 1
    return [{**message, "role": "tool", "content": text.strip()} for text in texts]


def _of_blocks(message: Mapping[str, Any], where: str) -> Iterator[Message]:
    """A message of Anthropic's blocks: an assistant message, or the tool messages and user messages of its results."""
    blocks, role = message["content"], message.get("role")
    known = _BLOCKS if role == "assistant" else ("text", "tool_result")
    rank = 0
    for index, block in enumerate(blocks):
        which = f"`{where}.content[{index}]` is a {_type(block)!r} block of a {role} message in the Anthropic format"
        if _type(block) not in known:
            raise ValueError(f"{which}, which OpenAI messages can't express; remove it.")
        if role == "assistant" and known.index(_type(block)) < rank:
            raise ValueError(
                f"{which}, after a {known[rank]!r} block; OpenAI messages think, say and call in this order."
            )
        rank = known.index(_type(block))
    if role == "assistant":
        thoughts, answers, uses = ([block for block in blocks if _type(block) == kind] for kind in known)
        calls = [{**block, "arguments": block.get("input") or {}} for block in uses]
        yield {
            **message,
            "content": _text_of(answers),
            "reasoning_content": "\n\n".join(str(x) for block in thoughts if (x := block.get("thinking"))) or None,
            "tool_calls": [_call(call, where, "the Anthropic format") for call in calls],
        }
        return
    for is_text, group in groupby(blocks, key=lambda block: _type(block) == "text"):
        if is_text:
            yield {**message, "content": _text_of(list(group))}
            continue
        for block in group:
            content = block.get("content") or ""
            if _is_list(content):
                if kinds := [_type(part) for part in content if _type(part) != "text"]:
                    raise ValueError(
                        f"`{where}` has a tool_result with {kinds[0]!r} in the Anthropic format; pass text."
                    )
                content = _text_of(content)
            result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
            yield {**result, "is_error": True} if block.get("is_error") else result


def _text_of(blocks: Sequence[Mapping[str, Any]]) -> Any:
    """One text as a string; several as they are, for `normalize_messages` to join as it does OpenAI's parts."""
    parts = [{"type": "text", "text": block.get("text") or ""} for block in blocks]
    return parts if len(parts) > 1 else "".join(part["text"] for part in parts)


def _openai_tool(tool: Any, name: str, counts: Counter[str]) -> Any:
    tool = parsed_json(tool, name)
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str) or tool.get("function"):
        return tool
    counts["bare_tools"] = 1
    schema = {key: tool[key] for key in ("name", "description", "parameters", "strict") if tool.get(key) is not None}
    if tool.get("input_schema") is not None:
        schema["parameters"] = tool["input_schema"]
    return {"type": "function", "function": schema}


def _type(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else type(block).__name__


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)
