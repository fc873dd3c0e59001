# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Branches that a row gives in parts: a prompt with completions, a tree of texts, or the steps of a search.

Cost: linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from hf_prefix_tree.data.messages import check_text
from hf_prefix_tree.data.template import encode_alone, encode_first
from hf_prefix_tree.tree import folding
from hf_prefix_tree.tree.prefix_tree import Branch


def rollout_branches(prompt_ids: npt.ArrayLike, completions: Sequence[npt.ArrayLike]) -> list[Branch]:
    """
    One branch per completion: the prompt, which is context, and the completion, whose every token is supervised.

    Args:
        prompt_ids (array-like of `int`, shape `[P]`):
            Token ids of the prompt. May be empty; a completion's first token then has no predecessor and weighs 0.
        completions (sequence of array-likes of `int`):
            Token ids of each completion, at least one completion, none empty.

    Raises:
        `ValueError`: If `completions` or one of them is empty, or an id is invalid.

    Example:

    ```python
    >>> [branch.input_ids.tolist() for branch in rollout_branches([5, 6], [[7], [8, 9]])]
    [[5, 6, 7], [5, 6, 8, 9]]

    ```
    """
    prompt, ids = _prompt_and_completions(prompt_ids, completions)
    whole = [np.concatenate([prompt, completion]) for completion in ids]
    return [Branch(tokens, np.arange(len(tokens)) >= len(prompt)) for tokens in whole]


def as_branch(branch: object, index: int) -> Branch:
    """
    An entry of `branches`, in a row of a dataset or a feature of a collator, as a branch.

    Args:
        branch ([`Branch`] or `Mapping` with `input_ids` and `weights`): The entry.
        index (`int`): Which one it is, for the error.

    Raises:
        `ValueError`: If it is neither.
    """
    if isinstance(branch, Branch):
        return branch
    got = type(branch).__name__
    if isinstance(branch, Mapping):
        given = {name: value for name, value in branch.items() if value is not None}  # Arrow fills what is missing
        if given.keys() >= {"input_ids", "weights"}:
            return Branch(given["input_ids"], given["weights"])
        got = f"the keys {list(given)}"
    raise ValueError(f"`branches[{index}]` must be a `Branch` or have `input_ids` and `weights`, got {got}.")


def _prompt_and_completions(
    prompt_ids: npt.ArrayLike, completions: Sequence[npt.ArrayLike]
) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
    prompt = folding.integer_array(prompt_ids, "prompt_ids")
    items = folding.as_list(completions, "completions")
    ids = [folding.integer_array(item, f"completions[{i}]") for i, item in enumerate(items)]
    folding.check_not_empty(ids, "completions")
    for i, completion in enumerate(ids):
        folding.check_not_empty(completion, f"completions[{i}]")
    return prompt, ids


def text_tree_branches(
    parents: Sequence[int | None],
    texts: Sequence[str],
    weights: Sequence[float] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> list[Branch]:
    """
    The branches of a tree given by its texts, one per node without children.

    Args:
        parents (sequence of `int` or `None`):
            Parent of each node, -1 or `None` for a root. A parent comes before its children.
        texts (sequence of `str`):
            Text of each node, not that of its ancestors.
        weights (sequence of `float`, *optional*):
            One weight per node, for all its tokens. 1 if not given.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.

    Raises:
        `ValueError`: If a text is no string, the lengths differ, or the parents are no tree.
    """
    parents = folding.parent_array(parents).tolist()
    for index, text in enumerate(texts):
        check_text(text, f"texts[{index}]")
    of_node = np.ones(len(texts)) if weights is None else folding.weight_array(weights, "weights")
    folding.check_length(parents, "parents", len(texts), "`texts`")
    folding.check_length(of_node, "weights", len(texts), "`texts`")
    folding.check_not_empty(parents, "parents")
    after = encode_alone(tokenizer, texts)
    ids = [x if y != -1 else encode_first(tokenizer, [z])[0] for x, y, z in zip(after, parents, texts, strict=True)]
    per_token = [np.full(len(x), weight) for x, weight in zip(ids, of_node, strict=True)]
    return folding.branches_of_nodes(parents, ids, per_token)


def search_tree_branches(prompt: Any, steps: Sequence[Any], tokenizer: PreTrainedTokenizerBase) -> list[Branch]:
    """
    The branches of a search: one per kept text that no other kept text extends.

    Kept steps are supervised. The prompt and a step that was not kept are context. A step that was not kept and that
    no kept step extends is in no branch: nothing could be trained on it.

    Args:
        prompt (`str`):
            The text before all others. A line break sets it apart, unless it ends with white space.
        steps (sequence of `{"step": int, "text": str, "kept": bool}`):
            The texts: one of step 0 is a first step, one of step k > 0 a text of step k - 1 and the step that follows
            it. Equal texts of a step are one, kept if any of them is.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.

    Raises:
        `ValueError`: If a step is malformed, extends no text of the step before, or none is kept.
    """
    check_text(prompt, "input")
    kept_of: dict[int, dict[str, bool]] = {}
    for index, step in enumerate(steps):
        _check_step(step, index)
        level = kept_of.setdefault(step["step"], {})
        level[step["text"]] = level.get(step["text"], False) or step["kept"]
    nodes: dict[tuple[int, str], tuple[int, str] | None] = {}  # the text before each, in the order of the steps
    for number in sorted(kept_of):
        before = _extended(number, kept_of[number], kept_of.get(number - 1, {})) if number else {}
        nodes |= {(number, text): before.get(text) for text in kept_of[number]}
    wanted: dict[tuple[int, str], int] = {}
    for key in nodes:
        if kept_of[key[0]][key[1]]:
            node: tuple[int, str] | None = key
            while node is not None and node not in wanted:
                wanted[node] = 0
                node = nodes[node]
    if not wanted:
        raise ValueError("`nodes` has no kept step, so nothing to train on; drop the row.")
    parents, texts, weights = [-1], [prompt if prompt[-1:].isspace() else f"{prompt}\n"], [0.0]
    for number, text in sorted(wanted, key=lambda key: key[0]):
        parent = nodes[number, text]
        wanted[number, text] = len(texts)
        parents.append(wanted[parent] if parent is not None else 0)
        texts.append(text[len(parent[1]) :] if parent is not None else text)
        weights.append(float(kept_of[number][text]))
    return text_tree_branches(parents, texts, weights, tokenizer)


def _check_step(step: Any, index: int) -> None:
    folding.check_mapping(step, f"nodes[{index}]")
    for name, of in (("step", int), ("text", str), ("kept", bool)):
        if type(step.get(name)) is not of:
            raise ValueError(f"`nodes[{index}].{name}` is {step.get(name)!r}; pass a {of.__name__}.")
    check_text(step["text"], f"nodes[{index}].text")
    if step["step"] < 0:
        raise ValueError(f"`nodes[{index}].step` is {step['step']}; number the steps from 0.")


def _extended(number: int, texts: Mapping[str, bool], before: Mapping[str, bool]) -> dict[str, tuple[int, str]]:
    """The text of the step before that each one extends: a kept one if there is, of those the longest."""
    extended: dict[str, tuple[int, str]] = {}
    lengths = sorted({len(text) for text in before}, reverse=True)
    for text in texts:
        starts = [text[:length] for length in lengths if text[:length] in before]  # the longest first
        if not starts:
            raise ValueError(
                f"`nodes` has the text {text[-60:]!r} of step {number}, which extends no text of step {number - 1}; "
                "add that step, or number the steps from 0."
            )
        extended[text] = number - 1, max(starts, key=before.__getitem__)
    return extended
