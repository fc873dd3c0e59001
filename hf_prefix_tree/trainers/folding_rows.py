# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Padded rows to one row of trees, and the indices that lead back.

Cost: the fold, and a few passes over the tokens of the rows, all in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hf_prefix_tree.batch import BLOCK_SIZE, concatenate_trees
from hf_prefix_tree.tree import Branch, fold


@dataclass(frozen=True)
class FoldedRows:
    """
    Padded rows as one row of trees.

    Args:
        batch (`dict[str, torch.Tensor]`): What the model is called with: `input_ids`, `attention_mask`, `labels`
            (`[1, N]`) and `prefix_tree` (`[1, 3, N]`). A token is labelled where any row wants its log-prob, so that
            the head projects it once.
        where (`torch.Tensor` of shape `(T,)`, int64): For each of the T wanted tokens of the rows, in row-major
            order, its place among the M labelled tokens of the tree, which is the order of the model's results.
        tokens (`torch.Tensor` of shape `(R,)`, int64): For each of the R tokens of the rows without padding, in
            row-major order, its place in the tree row.
        tree_tokens (`int`): Tokens of the tree row without its padding.
    """

    batch: dict[str, torch.Tensor]
    where: torch.Tensor
    tokens: torch.Tensor
    tree_tokens: int

    @property
    def reuse(self) -> float:
        """Tokens of the rows, without padding, per position of the tree row, with padding."""
        return len(self.tokens) / self.batch["input_ids"].shape[1]


def row_multiple(device: torch.device) -> int:
    """What the length of a tree row is rounded up to: FlexAttention's blocks; on CPU there is no padding."""
    return BLOCK_SIZE if device.type == "cuda" else 1


def fold_rows(
    input_ids: npt.NDArray[np.int64],
    is_token: npt.NDArray[np.bool_],
    is_wanted: npt.NDArray[np.bool_],
    pad_to_multiple_of: int,
) -> FoldedRows:
    """
    Folds the rows of a batch.

    Args:
        input_ids (`np.ndarray` of shape `(B, L)`, int64): Padded rows.
        is_token (`np.ndarray` of shape `(B, L)`, bool): What is no padding: one run of tokens in each row, or none.
        is_wanted (`np.ndarray` of shape `(B, L)`, bool): The tokens whose log-prob is wanted. Never padding, never
            the first token of a row, which nothing predicts.
        pad_to_multiple_of (`int`): The tree row's length is rounded up to a multiple of it.

    Returns:
        [`FoldedRows`]

    Example:

    ```python
    >>> import numpy as np
    >>> ids = np.array([[0, 5, 6, 7], [5, 6, 8, 9]])
    >>> wanted = np.array([[0, 0, 0, 1], [0, 0, 1, 1]], dtype=bool)
    >>> rows = fold_rows(ids, ids > 0, wanted, pad_to_multiple_of=1)
    >>> rows.batch["input_ids"], rows.where, rows.reuse
    (tensor([[5, 6, 8, 9, 7]]), tensor([2, 0, 1]), 1.4)

    ```
    """
    filled = np.flatnonzero(is_token.any(axis=1)).tolist()
    tree = fold(
        [Branch(input_ids[row, is_token[row]], is_wanted[row, is_token[row]]) for row in filled], weighting="branch"
    )
    batch = concatenate_trees([tree], pad_token_id=0, pad_to_multiple_of=pad_to_multiple_of)
    rank = np.cumsum(tree.weights > 0) - 1  # place among the labelled tokens
    tokens = np.concatenate(tree.paths())
    return FoldedRows(
        {name: batch[name] for name in ("input_ids", "attention_mask", "labels", "prefix_tree")},
        torch.from_numpy(rank[tokens[is_wanted[is_token]]]),
        torch.from_numpy(tokens),
        len(tree),
    )
