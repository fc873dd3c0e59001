# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One row of a dataset to branches: which kinds of rows there are, and what each becomes.

Cost: that of rendering and tokenizing the row, see `hf_prefix_tree.conversations`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_prefix_tree.data.nodes import as_branch, rollout_branches, search_tree_branches, text_tree_branches
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.data.tokenization import common_prefix
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.tree.folding import integer_array, weight_array
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TREE_COLUMNS = tuple(field.name for field in dataclasses.fields(PrefixTree))
# What makes a row one of a kind. Other columns are ignored, except for those that a kind reads besides.
ROW_KINDS = {
    "branches": ("branches",),
    "rollouts": ("prompt_ids", "completions"),
    "nodes": ("parents", "nodes"),
    "texts": ("parents", "texts"),
    "search": ("input", "nodes"),
    "conversation": ("messages",),
    "completions": ("prompt", "completions"),
    "completion": ("prompt", "completion"),
    "tokens": ("input_ids",),
}
PACKED_COLUMNS = ("trees", "tree_ids", "num_parts")
MESSAGE_KINDS = ("conversation", "completions", "completion")
TEXT_KINDS = (*MESSAGE_KINDS, "texts", "search")
_MASKS = ("completion_mask", "assistant_masks")


@dataclass(frozen=True)
class RowOptions:
    """
    How rows become branches, see `prepare_trees`. `features` is the dataset's schema, if it has one, `code` the state
    of the code that reads the rows: a cached result is known by all of this.
    """

    kind: str
    tokenizer: PreTrainedTokenizerBase | None
    features: Mapping[str, Any]
    reasoning: str
    tools: Any
    group_column: str
    chat_template_kwargs: Mapping[str, Any]
    empty_thinking_in_prompt: bool
    max_length: int | None
    overlong: str
    code: str


def row_kind(columns: Iterable[str]) -> str:
    """
    The kind of rows with these columns: a key of `ROW_KINDS`, `"tree"` or `"packed"`.

    Raises:
        `ValueError`: If they fit no kind, or several.
    """
    present = set(columns)
    if present.issuperset(_TREE_COLUMNS):
        return "tree"
    if present.issuperset(PACKED_COLUMNS):
        return "packed"
    kinds = [kind for kind, needed in ROW_KINDS.items() if present.issuperset(needed)]
    if len(kinds) == 1:
        return kinds[0]
    known = "; ".join(" + ".join(f"`{name}`" for name in needed) for needed in ROW_KINDS.values())
    found = f"`dataset` has the columns {', '.join(sorted(present)) or 'none at all'}"
    if not kinds:
        raise ValueError(f"{found}, which are no known kind of rows; rename them to one of: {known}; or pass trees.")
    raise ValueError(f"{found}, which fit {' and '.join(kinds)} rows; remove those that are not to be read ({known}).")


def group_key(group: Any, group_by: str) -> Hashable:
    """
    The value of a row's `group_by` column, if it can name a group.

    Raises:
        `ValueError`: If it is a null, a NaN, a list or a dict.
    """
    if group is None or group != group:  # rows without a group have nothing in common
        raise ValueError(f"`group_by` is {group_by!r}, whose value is {group} here; give every row a group.")
    if not isinstance(group, Hashable):
        raise ValueError(
            f"`group_by` is {group_by!r}, whose value is a {type(group).__name__} here; pass a column of strings or "
            "numbers."
        )
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
            Is added what was truncated (`truncated`), dropped as too long (`overlong`) or has no supervised token
            (`unsupervised`), the counts of [`ConversationBranches`], and whether Arrow filled in keys of tool schemas
            or arguments (`filled`).

    Raises:
        `ValueError`: If the row is malformed, or a branch is too long under `overlong="raise"`.
    """
    found: Counter[str] = Counter()
    branches = []
    for branch in _BRANCHES_OF[options.kind](_without_fill(row, options.features, found), options, found):
        if options.max_length is not None and len(branch) > options.max_length:
            if options.overlong == "raise":
                raise ValueError(
                    f"a branch has {len(branch)} tokens, `max_length` is {options.max_length}; raise it, or pass "
                    "`overlong='truncate'` or 'drop'."
                )
            if options.overlong == "drop":
                found["overlong"] += 1
                continue
            found["truncated"] += 1
            branch = Branch(branch.input_ids[: options.max_length], branch.weights[: options.max_length])
        if not branch.weights.any():
            found["unsupervised"] += 1
            branch = Branch(branch.input_ids[:1], [0.0])
        branches.append(branch)
    counts.update(found)  # only now: a row that raises counts as skipped and as nothing else
    return branches


def _of_branches(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    return [as_branch(branch, index) for index, branch in enumerate(_list(row, "branches", Mapping))]


def _of_rollouts(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    return rollout_branches(row["prompt_ids"], _list(row, "completions"))


def _of_nodes(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    nodes = [node if isinstance(node, Mapping) else {"input_ids": node} for node in _list(row, "nodes")]
    ids = [integer_array(node.get("input_ids"), f"nodes[{i}].input_ids") for i, node in enumerate(nodes)]
    given = [node.get("weights") for node in nodes]
    weights = [np.ones(len(x)) if own is None else own for x, own in zip(ids, given, strict=True)]
    return PrefixTree.from_nodes(_list(row, "parents"), ids, weights).branches()


def _of_texts(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    assert options.tokenizer is not None
    return text_tree_branches(_list(row, "parents"), _list(row, "texts"), row.get("weights"), options.tokenizer)


def _of_search(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    assert options.tokenizer is not None
    return search_tree_branches(row["input"], _list(row, "nodes"), options.tokenizer)


def _of_tokens(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    ids = integer_array(row["input_ids"], "input_ids")
    _check_one_sequence(row, len(ids))
    weights = np.ones(len(ids))
    if row.get("labels") is not None:
        labels = integer_array(row["labels"], "labels", minimum=IGNORE_INDEX)
        if len(labels) != len(ids):
            raise ValueError(f"`labels` has {len(labels)} entries for {len(ids)} `input_ids`; pass one per token.")
        if (wrong := (labels != IGNORE_INDEX) & (labels != ids)).any():
            at = int(wrong.argmax())
            raise ValueError(
                f"`labels` is {labels[at]} at index {at} where `input_ids` is {ids[at]}; pass them unshifted, and "
                "-100 where a token is not supervised."
            )
        weights *= labels != IGNORE_INDEX
    for name in ("weights", *_MASKS):
        if row.get(name) is not None:
            own = weight_array(row[name], name)
            if len(own) != len(ids):
                raise ValueError(f"`{name}` has {len(own)} entries for {len(ids)} `input_ids`; pass one per token.")
            weights *= own
    return [Branch(ids, weights)]


def _check_one_sequence(row: Mapping[str, Any], length: int) -> None:
    """Refuse what others have packed or padded: read as one branch, its sequences would see each other."""
    one = {"seq_lengths": np.array([length]), "position_ids": np.arange(length), "attention_mask": np.ones(length)}
    for name, expected in one.items():
        if row.get(name) is not None and not np.array_equal(np.asarray(row[name]), expected):
            raise ValueError(
                f"`{name}` is {str(row[name])[:40]} for {length} `input_ids`, so the row is packed or padded and not "
                "one sequence; pass the rows as they were before."
            )


def _of_conversations(row: Mapping[str, Any], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    if options.kind != "conversation":
        prompt, completions = _prompt_and_completions(row, options.kind)
        if isinstance(prompt, str):
            return _texts(prompt, completions, options, counts)
    return [
        branch
        for messages, num_prompt_messages in row_conversations(row, options)
        for branch in _conversation(messages, num_prompt_messages, row, options, counts)
    ]


def row_conversations(row: Mapping[str, Any], options: RowOptions) -> list[tuple[Any, int]]:
    """
    The conversations of a row of one of the `MESSAGE_KINDS`, each with how many of its messages are the prompt. A
    prompt and a completion that are strings are two messages.

    Raises:
        `ValueError`: If there is no completion, or strings and messages are mixed.
    """
    if options.kind == "conversation":
        return [(row["messages"], 0)]
    prompt, completions = _prompt_and_completions(row, options.kind)
    if isinstance(prompt, str):
        user = {"role": "user", "content": prompt}
        return [([user, {"role": "assistant", "content": text}], 1) for text in completions]
    return [([*prompt, *completion], len(prompt)) for completion in completions]


def _prompt_and_completions(row: Mapping[str, Any], kind: str) -> tuple[Any, list[Any]]:
    """The prompt and its completions: all strings, or all lists of messages."""
    completions = [row["completion"]] if kind == "completion" else _list(row, "completions")
    if not completions:
        raise ValueError("`completions` is empty; drop the row or give it a completion.")
    if len({isinstance(text, str) for text in (row["prompt"], *completions)}) > 1:
        raise ValueError("`prompt` and its completions mix strings and messages; make them all one or the other.")
    for text in (row["prompt"], *completions):
        if not isinstance(text, (str, list)):
            raise ValueError(
                f"`prompt` or a completion is a {type(text).__name__}; pass a string or a list of messages."
            )
    return row["prompt"], completions


_BRANCHES_OF = {
    "branches": _of_branches,
    "rollouts": _of_rollouts,
    "nodes": _of_nodes,
    "texts": _of_texts,
    "search": _of_search,
    "conversation": _of_conversations,
    "completions": _of_conversations,
    "completion": _of_conversations,
    "tokens": _of_tokens,
}


def _conversation(
    messages: Any, num_prompt_messages: int, row: Mapping[str, Any], options: RowOptions, counts: Counter[str]
) -> list[Branch]:
    assert options.tokenizer is not None
    tools = row.get("tools")
    if not tools and options.tools is not None:
        tools = options.tools
        if isinstance(tools, Mapping):
            group = row.get(options.group_column)
            if group not in tools:
                raise ValueError(f"`tools` has no entry for {options.group_column}={group!r}; add it, or pass a list.")
            tools = tools[group]
    result = conversation_branches(
        messages,
        options.tokenizer,
        tools=tools,
        reasoning=options.reasoning,
        chat_template_kwargs={**options.chat_template_kwargs, **(row.get("chat_template_kwargs") or {})},
        empty_thinking_in_prompt=options.empty_thinking_in_prompt,
        num_prompt_messages=num_prompt_messages,
    )
    counts["prefix_mismatches"] += result.prefix_mismatches
    counts["unrendered_reasoning"] += result.unrendered_reasoning
    counts["unclosed_reasoning"] += result.unclosed_reasoning
    counts["unrendered_messages"] += result.unrendered_messages
    return result.branches


def _texts(prompt: str, completions: Sequence[str], options: RowOptions, counts: Counter[str]) -> list[Branch]:
    """Prompt and completion as one text, as TRL tokenizes it: with special tokens, and an end token after each."""
    assert options.tokenizer is not None
    end = options.tokenizer.eos_token or ""
    texts = [prompt + (text if text.endswith(end) else text + end) for text in completions]
    encoded = options.tokenizer([prompt, *texts], return_attention_mask=False, verbose=False)["input_ids"]
    prompt_ids, *ids = (np.array(x, dtype=np.int64) for x in encoded)
    branches = []
    for own in ids:
        start = common_prefix(prompt_ids, own)
        counts["prefix_mismatches"] += start < len(prompt_ids)
        branches.append(Branch(own, np.arange(len(own)) >= start))
    return branches


def _list(row: Mapping[str, Any], name: str, of: type = object) -> list[Any]:
    if not isinstance(row[name], list):
        raise ValueError(f"`{name}` is a {type(row[name]).__name__}; pass a list.")
    for i, item in enumerate(row[name]):
        if not isinstance(item, of):
            raise ValueError(f"`{name}[{i}]` is a {type(item).__name__}; pass a dict with `input_ids` and `weights`.")
    return row[name]


def _without_fill(value: Any, feature: Any, counts: Counter[str], open_keys: bool = False) -> Any:
    """
    Drop what Arrow filled in: a key that any struct of a column has is `None` in all structs without it. Counts the
    row if this concerns keys that are data.
    """
    if isinstance(feature, Mapping) and isinstance(value, Mapping):
        if open_keys and None in value.values():
            counts["filled"] = 1
        return {
            key: _without_fill(item, feature.get(key), counts, open_keys or key in ("arguments", "properties"))
            for key, item in value.items()
            if item is not None
        }
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    if isinstance(value, list) and (isinstance(inner, (Mapping, list)) or hasattr(inner, "feature")):
        return [_without_fill(item, inner, counts, open_keys) for item in value]
    return value
