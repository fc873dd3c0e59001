# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Names and forms of NeMo Automodel: [`FoldedRollouts`], [`prefix_tree_collate_fn`], [`DLLMCollator`]."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from hf_prefix_tree.data.nodes import _prompt_and_completions
from hf_prefix_tree.data.supervision import IGNORE_INDEX, check_features, located
from hf_prefix_tree.diffusion.collator import DataCollatorForDiffusionLM
from hf_prefix_tree.modeling.batch import BLOCK_SIZE
from hf_prefix_tree.sft.collator import DataCollatorForPrefixTree
from hf_prefix_tree.tree.folding import INT32_MAX, check_integer, check_mapping, integer_array
from hf_prefix_tree.tree.prefix_tree import PrefixTree

CROSS_ENTROPY_IGNORE_IDX = IGNORE_INDEX


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
    check_integer(ignore_idx, "ignore_idx", least=-INT32_MAX)
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


def prefix_tree_collate_fn(
    features: Sequence[FoldedRollouts | Mapping[str, Any]],
    pad_token_id: int = 0,
    *,
    weighting: str = "tree",
    pad_to_multiple_of: int = BLOCK_SIZE,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
) -> dict[str, torch.Tensor]:
    """
    Collate one group of rollouts that share a prompt.

    The shifted labels of NeMo's form become unshifted ones. They supervise neither the prompt nor the first token of a
    completion; [`DataCollatorForPrefixTree`] supervises those first tokens too, from `prompt_ids` and `completions`.
    Completions that start alike are folded further.

    Args:
        features (sequence of [`FoldedRollouts`] or of `Mapping`):
            Exactly one group: `prompt_ids` and `completions`, what [`fold_shared_prefix_rollouts`] makes of them, or a
            dataset row of its fields `input_ids`, `labels`, `node_lengths` and `sample_paths`.
        pad_token_id (`int`, *optional*, defaults to 0):
            Token id of the padding.
        weighting (`str`, *optional*, defaults to `"tree"`):
            See [`fold`].
        pad_to_multiple_of (`int`, *optional*, defaults to 128):
            The packed sequence is padded to a multiple of it.
        ignore_idx (`int`, *optional*, defaults to `CROSS_ENTROPY_IGNORE_IDX`):
            Label of positions that predict nothing.

    Returns:
        `dict[str, torch.Tensor]`: the batch contract, see `hf_prefix_tree.modeling.batch`.

    Raises:
        `ValueError`: If `features` is not one group, a field is missing, or the fields contradict each other.

    Example:

    ```python
    >>> from hf_prefix_tree.nemo import prefix_tree_collate_fn

    >>> group = {"prompt_ids": [1, 2], "completions": [[10, 11], [20, 21, 22]]}
    >>> batch = prefix_tree_collate_fn([group], pad_to_multiple_of=1)
    >>> batch["input_ids"], batch["labels"]
    (tensor([[ 1,  2, 20, 21, 22, 10, 11]]), tensor([[-100, -100, -100,   21,   22, -100,   11]]))

    ```
    """
    if not isinstance(features, Sequence) or len(features) != 1:
        got = len(features) if isinstance(features, Sequence) else type(features).__name__
        raise ValueError(
            f"`features` must be a list of one group, got {got}. Use a batch size of 1, or "
            "`DataCollatorForPrefixTree` for several groups."
        )
    check_integer(ignore_idx, "ignore_idx", least=-INT32_MAX)
    group = features[0]
    with located("`features[0]`"):
        if isinstance(group, Mapping) and group.get("prompt_ids") is not None:
            check_mapping(group, "group", ["completions"])
            group = fold_shared_prefix_rollouts(group["prompt_ids"], group["completions"], ignore_idx)
        fields = dataclasses.asdict(group) if isinstance(group, FoldedRollouts) else group
        check_mapping(fields, "group", ("input_ids", "labels", "node_lengths", "sample_paths"))
        input_ids = integer_array(fields["input_ids"], "input_ids")
        labels = integer_array(fields["labels"], "labels", minimum=min(ignore_idx, 0))
        lengths = integer_array(fields["node_lengths"], "node_lengths", maximum=INT32_MAX)
        weights = _unshifted_weights(input_ids, labels, lengths, ignore_idx)
        tree = PrefixTree.from_node_paths(input_ids, lengths, fields["sample_paths"], weights, weighting)
    return DataCollatorForPrefixTree(pad_token_id, weighting, pad_to_multiple_of)([tree])


def _unshifted_weights(
    input_ids: np.ndarray, shifted_labels: np.ndarray, node_lengths: np.ndarray, ignore_idx: int
) -> np.ndarray:
    """1 at every token that the label before it names, 0 elsewhere."""
    if len(shifted_labels) != len(input_ids) or node_lengths.sum() != len(input_ids):
        raise ValueError(
            f"it has {len(input_ids)} `input_ids`, {len(shifted_labels)} `labels` and `node_lengths` that "
            f"sum to {node_lengths.sum()}; the three must agree."
        )
    following = np.append(input_ids[1:], ignore_idx)
    following[np.cumsum(node_lengths[node_lengths > 0]) - 1] = ignore_idx  # what follows a node is not after it
    wrong = (shifted_labels != ignore_idx) & (shifted_labels != following)
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(
            f"`labels` is {shifted_labels[at]} at position {at}, which is not the next token of its node; pass "
            "shifted labels, as `fold_shared_prefix_rollouts` makes them."
        )
    return np.concatenate([[0.0], (shifted_labels[:-1] != ignore_idx).astype(np.float64)])


@dataclass
class DLLMCollator(DataCollatorForDiffusionLM):
    """
    [`DataCollatorForDiffusionLM`] under the name, with the defaults and exactly the keys of NeMo Automodel's collator.

    `loss_mask` and `attention_mask` must be there, other columns are ignored, `labels` too. Padding of a feature stays
    where it is. The batch has `input_ids`, `loss_mask`, `attention_mask` and `input_lengths`.

    Args:
        pad_token_id (`int`, *optional*, defaults to `0`):
            Token id of the padding.

    The other arguments are those of [`DataCollatorForDiffusionLM`].
    """

    pad_token_id: int | None = 0
    keeps_sample_index: ClassVar[bool] = False
    keeps_padding: ClassVar[bool] = True

    def __call__(self, features: Sequence[Mapping[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        names = ("input_ids", "loss_mask", "attention_mask")
        check_features(features)
        for index, feature in enumerate(features):
            with located(f"`features[{index}]`"):
                check_mapping(feature, "feature", names)
        batch = super().__call__([{name: feature[name] for name in names} for feature in features], return_tensors)
        return {name: batch[name] for name in (*names, "input_lengths")}
