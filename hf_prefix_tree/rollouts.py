# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One prompt and its completions: as branches, and in the form that NeMo Automodel trains on.

Cost: linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.folding import as_list, integer_array
from hf_prefix_tree.tree import Branch, PrefixTree

CROSS_ENTROPY_IGNORE_IDX = -100


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
    return [
        Branch(np.concatenate([prompt, own]), np.concatenate([np.zeros(len(prompt)), np.ones(len(own))]))
        for own in ids
    ]


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
    found = type(branch).__name__
    if isinstance(branch, Mapping):
        given = {name: value for name, value in branch.items() if value is not None}  # Arrow fills what is missing
        if given.keys() >= {"input_ids", "weights"}:
            return Branch(given["input_ids"], given["weights"])
        found = f"the keys {sorted(given)}"
    raise ValueError(f"`branches[{index}]` must be a `Branch` or have `input_ids` and `weights`, got {found}.")


@dataclass(frozen=True)
class FoldedRollouts:
    """
    A prompt and its completions, one after another, nothing merged, labels shifted beforehand.

    `labels[i]` is the token after position i in the same completion. So a completion's first token is predicted
    nowhere, and neither is the prompt; [`rollout_branches`] supervises those first tokens too.

    Args:
        input_ids (`list[int]`):
            The prompt, then every completion.
        labels (`list[int]`):
            The next token of the completion, `ignore_idx` on the prompt and on each completion's last token.
        position_ids (`list[int]`):
            Every completion continues from the prompt.
        node_lengths (`list[int]`):
            Tokens of the prompt and of each completion.
        sample_paths (`list[list[int]]`):
            Nodes of each sample. An empty prompt is on none.
    """

    input_ids: list[int]
    labels: list[int]
    position_ids: list[int]
    node_lengths: list[int]
    sample_paths: list[list[int]]

    def to_tree(self, weighting: str = "tree") -> PrefixTree:
        """Fold into a [`PrefixTree`] that supervises the same tokens: completions without their first token."""
        weights = np.ones(len(self.input_ids))
        weights[: self.node_lengths[0]] = 0.0
        weights[np.cumsum(self.node_lengths)[:-1]] = 0.0
        return PrefixTree.from_node_paths(self.input_ids, self.node_lengths, self.sample_paths, weights, weighting)


def fold_shared_prefix_rollouts(
    prompt_ids: npt.ArrayLike, completions: Sequence[npt.ArrayLike], ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX
) -> FoldedRollouts:
    """
    Lay out a prompt and its completions in the form of NeMo Automodel.

    Args:
        prompt_ids (array-like of `int`, shape `[P]`):
            Token ids of the prompt. May be empty.
        completions (sequence of array-likes of `int`):
            Token ids of each completion, at least one completion, none empty. Their order is kept.
        ignore_idx (`int`, *optional*, defaults to `CROSS_ENTROPY_IGNORE_IDX`):
            Label of positions that predict nothing.

    Returns:
        [`FoldedRollouts`]

    Raises:
        `ValueError`: If `completions` or one of them is empty, or an id is invalid.

    Example:

    ```python
    >>> folded = fold_shared_prefix_rollouts([1, 2], [[10, 11], [20, 21, 22]])
    >>> folded.input_ids
    [1, 2, 10, 11, 20, 21, 22]
    >>> folded.labels
    [-100, -100, 11, -100, 21, 22, -100]
    >>> folded.position_ids
    [0, 1, 2, 3, 2, 3, 4]

    ```
    """
    prompt, ids = _prompt_and_completions(prompt_ids, completions)
    nodes = [prompt, *ids]
    labels = [ignore_idx] * len(prompt)
    positions = list(range(len(prompt)))
    for completion in ids:
        labels += [*completion[1:].tolist(), ignore_idx]
        positions += range(len(prompt), len(prompt) + len(completion))
    return FoldedRollouts(
        input_ids=np.concatenate(nodes).tolist(),
        labels=labels,
        position_ids=positions,
        node_lengths=list(map(len, nodes)),
        sample_paths=[[0, i] if len(prompt) else [i] for i in range(1, len(nodes))],
    )


def _prompt_and_completions(
    prompt_ids: npt.ArrayLike, completions: Sequence[npt.ArrayLike]
) -> tuple[npt.NDArray[np.int64], list[npt.NDArray[np.int64]]]:
    prompt = integer_array(prompt_ids, "prompt_ids")
    ids = [integer_array(item, f"completions[{i}]") for i, item in enumerate(as_list(completions, "completions"))]
    if not ids:
        raise ValueError("`completions` is empty; pass at least one completion.")
    for i, completion in enumerate(ids):
        if not len(completion):
            raise ValueError(f"`completions[{i}]` is empty; drop it or give it at least one token.")
    return prompt, ids
