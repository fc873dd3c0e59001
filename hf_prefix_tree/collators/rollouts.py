# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`prefix_tree_collate_fn`]: one group of rollouts in the form of NeMo Automodel, to our batch contract."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_prefix_tree.batch import BLOCK_SIZE, concatenate_trees
from hf_prefix_tree.rollouts import CROSS_ENTROPY_IGNORE_IDX, FoldedRollouts
from hf_prefix_tree.tree import PrefixTree


def prefix_tree_collate_fn(
    features: Sequence[FoldedRollouts | Mapping[str, Any]],
    pad_token_id: int = 0,
    *,
    weighting: str = "tree",
    pad_to_multiple_of: int = BLOCK_SIZE,
    ignore_idx: int = CROSS_ENTROPY_IGNORE_IDX,
) -> dict[str, torch.Tensor]:
    """
    Collate one group of rollouts that share a prompt, as [`fold_shared_prefix_rollouts`] lays it out.

    The shifted labels of that form become unshifted ones. They supervise neither the prompt nor the first token of a
    completion; [`DataCollatorForPrefixTree`] supervises those first tokens too, from `prompt_ids` and `completions`.
    Completions that start alike are folded further.

    Args:
        features (sequence of [`FoldedRollouts`] or of `Mapping`):
            Exactly one: the group, or a dataset row of its fields `input_ids`, `labels`, `node_lengths` and
            `sample_paths`.
        pad_token_id (`int`, *optional*, defaults to 0):
            Token id of the padding.
        weighting (`str`, *optional*, defaults to `"tree"`):
            See [`fold`].
        pad_to_multiple_of (`int`, *optional*, defaults to 128):
            The row is padded to a multiple of it.
        ignore_idx (`int`, *optional*, defaults to `CROSS_ENTROPY_IGNORE_IDX`):
            Label of positions that predict nothing.

    Returns:
        `dict[str, torch.Tensor]`: the batch contract, see `hf_prefix_tree.batch`.

    Raises:
        `ValueError`: If `features` is not one group, a field is missing, or the fields contradict each other.

    Example:

    ```python
    >>> from hf_prefix_tree import fold_shared_prefix_rollouts
    >>> from hf_prefix_tree.collators.rollouts import prefix_tree_collate_fn

    >>> group = fold_shared_prefix_rollouts([1, 2], [[10, 11], [20, 21, 22]])
    >>> batch = prefix_tree_collate_fn([group], pad_to_multiple_of=1)
    >>> batch["input_ids"], batch["labels"]
    (tensor([[ 1,  2, 20, 21, 22, 10, 11]]), tensor([[-100, -100, -100,   21,   22, -100,   11]]))

    ```
    """
    found: object
    if isinstance(features, Mapping | FoldedRollouts) or len(features) != 1:
        found = type(features).__name__ if isinstance(features, Mapping | FoldedRollouts) else len(features)
        raise ValueError(
            f"`features` must be a list of one group, got {found}. Use a batch size of 1, or "
            "`DataCollatorForPrefixTree` for several groups."
        )
    group = features[0]
    fields = dataclasses.asdict(group) if isinstance(group, FoldedRollouts) else group
    names = ("input_ids", "labels", "node_lengths", "sample_paths")
    if not isinstance(fields, Mapping) or any(name not in fields for name in names):
        found = sorted(fields) if isinstance(fields, Mapping) else type(fields).__name__
        raise ValueError(
            f"`features[0]` must be a `FoldedRollouts` or have its fields {', '.join(names)}, got {found}. Make it "
            "with `fold_shared_prefix_rollouts`."
        )
    input_ids, labels, node_lengths = (np.asarray(fields[name], dtype=np.int64) for name in names[:3])
    weights = _unshifted_weights(input_ids, labels, node_lengths, ignore_idx)
    tree = PrefixTree.from_node_paths(
        fields["input_ids"], fields["node_lengths"], fields["sample_paths"], weights, weighting
    )
    return concatenate_trees([tree], pad_token_id, pad_to_multiple_of)


def _unshifted_weights(
    input_ids: np.ndarray, shifted_labels: np.ndarray, node_lengths: np.ndarray, ignore_idx: int
) -> np.ndarray:
    """1 at every token that the label before it names, 0 elsewhere."""
    if len(shifted_labels) != len(input_ids) or node_lengths.sum() != len(input_ids):
        raise ValueError(
            f"`features[0]` has {len(input_ids)} `input_ids`, {len(shifted_labels)} `labels` and `node_lengths` that "
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
