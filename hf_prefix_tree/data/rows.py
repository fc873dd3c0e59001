# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One dataset row to branches: the kinds of rows that there are (`ROW_KINDS`), and how each is read.

A new kind is one entry of `ROW_KINDS`. For chat data in another format it names a function that returns the row's
conversations; diffusion and EAGLE-3 training then read it too.

Cost: that of rendering and tokenizing the row, see `hf_prefix_tree.data.turns`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.data import formats
from hf_prefix_tree.data.counts import code_state
from hf_prefix_tree.data.messages import normalize_messages, normalize_tools, plain_data
from hf_prefix_tree.data.nodes import as_branch, rollout_branches, search_tree_branches, text_tree_branches
from hf_prefix_tree.data.supervision import read_sample
from hf_prefix_tree.data.template import chat_template_of, encode_alone, encode_first
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.tree import folding
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree

TREE_COLUMNS = tuple(field.name for field in dataclasses.fields(PrefixTree))
PACKED_COLUMNS = ("trees", "tree_ids", "num_parts")
_FOLDED_KINDS = {"tree": TREE_COLUMNS, "packed": PACKED_COLUMNS}


@dataclass(frozen=True)
class RowOptions:
    """
    How rows become branches, see `prepare_trees`. The `TEXT_KINDS` need the `tokenizer`. `features` is the dataset's
    schema, if it has one, `code` the state of the code that reads the rows: a cached result is known by all of this.
    Without `supervise_reasoning`, turns are supervised from where `reasoning_end` ends in them.
    """

    kind: str
    tokenizer: Any = None
    features: Mapping[str, Any] = field(default_factory=dict)
    reasoning: str = "per_turn"
    tools: Any = None
    group_column: str = "group"
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    empty_thinking_in_prompt: bool = True
    stop_token_ids: Sequence[int] | None = None
    max_length: int | None = None
    overlong: str = "truncate"
    supervise_reasoning: bool = True
    reasoning_end: str = "</think>"
    code: str = field(default_factory=code_state)


class RowKind(NamedTuple):
    """How to recognize and read one kind of rows."""

    columns: tuple[str, ...]  # a row that has all of them is of this kind; `read` may use further ones
    read: Callable[[Mapping[str, Any], RowOptions, Counter[str]], list[Branch]]
    # Chat data: the conversations of a row, each with how many of its messages are the prompt.
    conversations: Callable[[Mapping[str, Any]], list[tuple[Any, int]]] | None = None
    needs_tokenizer: bool = True


def columns_of(dataset: Any) -> list[str]:
    """The columns of a dataset, of a stream, which may have to be read for it, or of a list of rows."""
    if isinstance(dataset, Sequence):
        return list(dataset[0]) if len(dataset) and isinstance(dataset[0], Mapping) else []
    return list(dataset.column_names or next(iter(dataset), {}))


def rows_of_batch(batch: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a batch that `datasets.map` hands over as a dictionary of columns."""
    lengths = {name: len(column) for name, column in batch.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns have different lengths, {lengths}; pass one entry per row.")
    for values in zip(*batch.values(), strict=True):
        yield dict(zip(batch, values, strict=True))


def row_kind(columns: Iterable[str], allowed: Sequence[str] = ()) -> str:
    """
    The kind of rows with these columns: a key of `ROW_KINDS`, `"tree"` or `"packed"`.

    Raises:
        `ValueError`: If they fit no kind, or several, or none of those that are `allowed`, if any are given.
    """
    present = set(columns)
    folded = [name for name, needed in _FOLDED_KINDS.items() if present.issuperset(needed)]
    kinds = folded[:1] or [name for name, kind in ROW_KINDS.items() if present.issuperset(kind.columns)]
    if len(kinds) > 1 and "text" in kinds:  # often a rendering of the other columns
        kinds.remove("text")
    if len(kinds) == 1 and (not allowed or kinds[0] in allowed):
        return kinds[0]
    known = "; ".join(" + ".join(f"`{name}`" for name in ROW_KINDS[kind].columns) for kind in allowed or ROW_KINDS)
    given = f"`dataset` has the columns {', '.join(sorted(present)) or 'none at all'}"
    if not kinds:
        raise ValueError(f"{given}, which are no known kind of rows; rename them to one of: {known}; or pass trees.")
    if len(kinds) == 1:
        raise ValueError(f"{given}, {kinds[0]} rows, which are not read here; pass one of: {known}.")
    raise ValueError(f"{given}, which fit {' and '.join(kinds)} rows; remove those that are not to be read ({known}).")


def group_key(group: Any, group_by: str) -> Hashable:
    """
    The value of a row's `group_by` column, if it can name a group.

    Raises:
        `ValueError`: If it is a null, a NaN, a list or a dict.
    """
    try:
        hash(group)
        is_group = group is not None and bool(group == group)
    except (TypeError, ValueError, RuntimeError):  # a list, a dict, an array or a tensor, maybe inside of a tuple
        raise ValueError(
            f"`group_by` is {group_by!r}, whose value is a {type(group).__name__} here; pass a column of strings or "
            "numbers."
        ) from None
    if not is_group:  # rows without a group have nothing in common
        raise ValueError(f"`group_by` is {group_by!r}, whose value is {group} here; give every row a group.")
    return group


def row_branches(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    """
    The branches of one row, capped at `max_length`.

    One that supervises nothing counts in K, and nothing else depends on it: only its first token is kept, which costs
    next to nothing to compute.

    Args:
        row (`Mapping[str, Any]`):
            One row.
        options ([`RowOptions`]):
            How to read it.
        counts (`Counter[str]`):
            Gets the branches that were truncated (`truncated`), dropped (`overlong`) or have no supervised token
            (`unsupervised`), the counts of [`ConversationBranches`], the `FORMATS` that it was converted from, and
            whether Arrow filled in keys of tool schemas or arguments (`filled`).

    Raises:
        `ValueError`: If the row is malformed, or a branch is too long under `overlong="raise"`.
    """
    lost, branches = Counter[str](), []
    if options.kind in formats.FORMATS:
        lost[options.kind] = 1
    for branch in ROW_KINDS[options.kind].read(checked_row(row, options, lost), options, lost):
        if options.max_length is not None and len(branch) > options.max_length:
            if options.overlong == "raise":
                raise ValueError(
                    f"a branch has {len(branch)} tokens, `max_length` is {options.max_length}; raise it, or pass "
                    "`overlong='truncate'` or 'drop'."
                )
            if options.overlong == "drop":
                lost["overlong"] += 1
                continue
            lost["truncated"] += 1
            branch = Branch(branch.input_ids[: options.max_length], branch.weights[: options.max_length])
        if not branch.weights.any():
            lost["unsupervised"] += 1
            branch = Branch(branch.input_ids[:1], [0.0])
        branches.append(branch)
    counts.update(lost)  # only now: a row that raises counts as skipped and as nothing else
    return branches


def checked_row(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> Mapping[str, Any]:
    """The row without what Arrow filled in, if it has all columns of its kind, and those of chats are plain data."""
    folding.check_mapping(row, "row", ROW_KINDS[options.kind].columns)
    row = _without_fill(row, options.features, counts)
    if options.kind not in (*MESSAGE_KINDS, "text"):
        return row
    row = {**row, **{name: plain_data(row[name], name) for name in _CHAT_COLUMNS if name in row}}
    variables = row.get("chat_template_kwargs") or {}
    if not isinstance(variables, Mapping) or "chat_template" in variables:
        raise ValueError(f"`chat_template_kwargs` is {variables!r}; pass a dict, and a 'chat_template' for all rows.")
    return row


def _of_branches(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    return [as_branch(branch, index) for index, branch in enumerate(_list(row, "branches"))]


def _of_rollouts(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    return rollout_branches(row["prompt_ids"], _list(row, "completions"))


def _of_nodes(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    nodes = [node if isinstance(node, Mapping) else {"input_ids": node} for node in _list(row, "nodes")]
    ids = [folding.integer_array(node.get("input_ids"), f"nodes[{i}].input_ids") for i, node in enumerate(nodes)]
    given = [node.get("weights") for node in nodes]
    weights = [np.ones(len(x)) if w is None else w for x, w in zip(ids, given, strict=True)]
    return folding.branches_of_nodes(_list(row, "parents"), ids, weights)


def _of_texts(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    return text_tree_branches(_list(row, "parents"), _list(row, "texts"), row.get("weights"), options.tokenizer)


def _of_search(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    return search_tree_branches(row["input"], _list(row, "nodes"), options.tokenizer)


def _of_tokens(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    sample = read_sample(row, weighted=True)
    return [Branch(sample.input_ids, sample.weights)]


def _of_conversations(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    branches: list[Branch] = []
    for messages, num_prompt_messages in row_conversations(row, options.kind, counts):
        branches += _conversation(messages, num_prompt_messages, row, options, counts)
    return branches


def _of_completions(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    prompt, completions = _prompt_and_completions(row)
    if isinstance(prompt, str):
        tools = next((row[name] for name in formats.TOOL_COLUMNS if row.get(name)), None)
        if row.get("system") or normalize_tools(formats.openai_tools(tools, Counter())):
            raise ValueError("`system` and tools have no place beside a `prompt` that is plain text; pass messages.")
        return _texts(prompt, completions, options, counts)
    return _of_conversations(row, options, counts)


def _of_text(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    if options.reasoning not in ("per_turn", "keep"):  # the default, and the mode that keeps all
        raise ValueError(
            f"`reasoning` is {options.reasoning!r}, but a plain `text` has no turns; leave it out, which supervises "
            "all of the text, or pass conversations."
        )
    if not isinstance(row["text"], str) or not row["text"]:
        raise ValueError(f"`text` is {row['text']!r}; pass a text.")
    return _texts("", [row["text"]], options, Counter())


def row_conversations(row: Mapping[str, Any], kind: str, counts: Counter[str]) -> list[tuple[Any, int]]:
    """
    The conversations of a row of one of the `MESSAGE_KINDS` as OpenAI messages, each with how many of its messages
    are the prompt. `counts` gets a 1 for each of the `FORMATS` that the messages were converted from.

    Raises:
        `ValueError`: If there is no completion, strings and messages are mixed, or something can't be converted.
    """
    conversations = ROW_KINDS[kind].conversations
    assert conversations is not None
    return [formats.openai_conversation(*conversation, row, counts) for conversation in conversations(row)]


def _completed_prompts(row: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """A prompt and a completion that are strings are two messages."""
    prompt, completions = _prompt_and_completions(row)
    if isinstance(prompt, str):
        user = {"role": "user", "content": prompt}
        return [([user, {"role": "assistant", "content": text}], 1) for text in completions]
    return [([*prompt, *completion], len(prompt)) for completion in completions]


def _prompt_and_completions(row: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The prompt and its completions: all strings, or all lists of messages."""
    if row.get("chosen") is not None:
        prompt, completions = formats.preference_completions(row)
    else:
        prompt = row["prompt"]
        completions = _list(row, "completions") if row.get("completions") is not None else [row["completion"]]
    folding.check_not_empty(completions, "completions")
    if len({isinstance(text, str) for text in (prompt, *completions)}) > 1:
        raise ValueError("`prompt` and its completions mix strings and messages; make them all one or the other.")
    for text in (prompt, *completions):
        if not isinstance(text, (str, list)):
            raise ValueError(f"`prompt` or a completion is a {type(text).__name__}; pass a string or messages.")
    return prompt, completions


def _conversation(
    messages: Any, num_prompt_messages: int, row: Mapping[str, Any], options: RowOptions, counts: Counter[str]
) -> list[Branch]:
    tools, variables = _template_inputs(row, options, counts)
    result = conversation_branches(
        messages,
        options.tokenizer,
        tools=tools,
        reasoning=options.reasoning,
        chat_template_kwargs=variables,
        empty_thinking_in_prompt=options.empty_thinking_in_prompt,
        stop_token_ids=options.stop_token_ids,
        num_prompt_messages=num_prompt_messages,
    )
    counts.update(result.counts)
    turns = [m for m in messages[num_prompt_messages:] if isinstance(m, Mapping) and m.get("role") == "assistant"]
    switches = [formats.training_switches(turn, row) for turn in turns]
    counts["switched"] += not (counts["switched"] or all(map(all, switches)))
    if not options.supervise_reasoning:
        switches = [(False, trains_response) for _, trains_response in switches]
    if all(map(all, switches)):
        return result.branches
    return formats.switched_off(result.branches, turns, switches, options)


def _template_inputs(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> tuple[Any, dict[str, Any]]:
    """The tools of a row, and the further variables of its chat template."""
    tools = next((row[name] for name in formats.TOOL_COLUMNS if row.get(name)), None)
    if not tools and options.tools is not None:
        tools = options.tools
        if isinstance(tools, Mapping):
            group = row.get(options.group_column)
            if not isinstance(group, Hashable) or group not in tools:
                raise ValueError(f"`tools` has no entry for {options.group_column}={group!r}; add it, or pass a list.")
            tools = tools[group]
    variables = {**options.chat_template_kwargs, **(row.get("chat_template_kwargs") or {})}
    return formats.openai_tools(tools, counts), variables


def whole_conversations(row: Mapping[str, Any], options: RowOptions) -> list[npt.NDArray[np.int64]]:
    """
    Each conversation of a row in one rendering, up to its last assistant message: what is tokenized without turns.

    Args:
        row (`Mapping[str, Any]`): One row of one of the `MESSAGE_KINDS`; its prompt is no string.
        options ([`RowOptions`]): How to read it.

    Raises:
        `ValueError`: If the row is malformed, or the chat template can't render it.
    """
    counts = Counter[str]()
    row = checked_row(row, options, counts)
    tools, variables = _template_inputs(row, options, counts)
    schemas = normalize_tools(tools)
    template = chat_template_of(options.tokenizer, schemas, variables)
    template.forget()
    dialect, texts = template.dialect(variables), []
    for conversation, _ in row_conversations(row, options.kind, counts):
        messages = normalize_messages(conversation)
        end = max((index for index, message in enumerate(messages, 1) if message["role"] == "assistant"), default=0)
        texts.append(template.render(list(map(dialect.adapt, messages[:end])), schemas, variables))
    return template.segments.encode(texts)


def _texts(prompt: str, completions: Sequence[str], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    """
    Prompt and completion as one text, as TRL tokenizes it: with special tokens, and an end token after each.

    Where a token would reach over their seam, the completion is tokenized by itself: the prompt is the context as it
    is. A prompt that begins with the text of the start token gets no second one.
    """
    end = options.tokenizer.eos_token or ""
    texts = [prompt + (text if text.endswith(end) else text + end) for text in completions]
    prompt_ids, *ids = (np.array(x, dtype=np.int64) for x in encode_first(options.tokenizer, [prompt, *texts]))
    branches = []
    for text, completed in zip(texts, ids, strict=True):
        if folding.common_prefix(prompt_ids, completed) < len(prompt_ids):
            (alone,) = encode_alone(options.tokenizer, [text.removeprefix(prompt)])
            completed = np.concatenate([prompt_ids, np.array(alone, dtype=np.int64)])
        branches.append(Branch(completed, np.arange(len(completed)) >= len(prompt_ids)))
    return branches


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    return folding.check_type(row[name], name, list, "a list")


_OPEN_KEYS = ("arguments", "properties", "input")  # the keys below them are data


def _without_fill(value: Any, feature: Any, counts: Counter[str], open_keys: bool = False) -> Any:
    """
    Drop what Arrow filled in: a key that any struct of a column has is `None` in all structs without it. Counts the
    row if this concerns keys that are data.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        if open_keys and None in value.values():
            counts["filled"] = 1
        return {
            key: _without_fill(item, feature.get(key), counts, open_keys or key in _OPEN_KEYS)
            for key, item in value.items()
            if item is not None
        }
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and (isinstance(inner, (Mapping, list)) or hasattr(inner, "feature")):
        return [_without_fill(item, inner, counts, open_keys) for item in value]
    return value


ROW_KINDS = {
    "branches": RowKind(("branches",), _of_branches, needs_tokenizer=False),
    "rollouts": RowKind(("prompt_ids", "completions"), _of_rollouts, needs_tokenizer=False),
    "nodes": RowKind(("parents", "nodes"), _of_nodes, needs_tokenizer=False),
    "texts": RowKind(("parents", "texts"), _of_texts),
    "search": RowKind(("input", "nodes"), _of_search),
    "conversation": RowKind(("messages",), _of_conversations, lambda row: [(row["messages"], 0)]),
    "conversations": RowKind(("conversations",), _of_conversations, lambda row: [(row["conversations"], 0)]),
    "alpaca": RowKind(("instruction", "output"), _of_conversations, formats.alpaca_conversations),
    "completions": RowKind(("prompt", "completions"), _of_completions, _completed_prompts),
    "completion": RowKind(("prompt", "completion"), _of_completions, _completed_prompts),
    "preference": RowKind(("chosen", "rejected"), _of_completions, _completed_prompts),
    "text": RowKind(("text",), _of_text),
    "tokens": RowKind(("input_ids",), _of_tokens, needs_tokenizer=False),
}
_CHAT_COLUMNS = {
    *(name for kind in ROW_KINDS.values() if kind.needs_tokenizer for name in kind.columns),
    *("history", "system", "chat_template_kwargs", "train_reasoning", "train_response", *formats.TOOL_COLUMNS),
}
MESSAGE_KINDS = tuple(name for name, kind in ROW_KINDS.items() if kind.conversations is not None)
# Rows of text to train on as it is: a preference is one to choose from, a tree of texts has weights.
SAMPLE_KINDS = (*(name for name in MESSAGE_KINDS if name != "preference"), "text")
TEXT_KINDS = tuple(name for name, kind in ROW_KINDS.items() if kind.needs_tokenizer)
