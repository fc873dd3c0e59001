# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Padded rows to packed sequences: which rows share a forward, their trees, and the indices that lead back.

A padded row is a row of TRL's tensors: one sequence, with padding on either side.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hf_prefix_tree.data.images import NO_IMAGES, Images, image_starts, mark_images, unmark_images
from hf_prefix_tree.modeling.batch import BLOCK_SIZE, concatenate_trees
from hf_prefix_tree.modeling.call import state_of
from hf_prefix_tree.modeling.positions import IMAGE_INPUTS, image_model, image_tokens
from hf_prefix_tree.tree.folding import common_prefixes, sorted_order
from hf_prefix_tree.tree.prefix_tree import Branch, fold

TREE_INPUTS = ("input_ids", "attention_mask", "labels", "prefix_tree", "token_branches")
TOO_MANY = 2**40  # tokens of parts that exceed the budget; the sum over many ranks still fits int64


@dataclass(frozen=True)
class FoldedRows:
    """
    Padded rows as one packed sequence.

    Args:
        batch (`dict[str, torch.Tensor]`): The inputs of the model: `input_ids`, `attention_mask`, `labels`,
            `token_branches` (`[1, N]`) and `prefix_tree` (`[1, 3, N]`), and its images, if any. A token is labelled
            where any row wants its log-prob, so that the head projects it once.
        where (`torch.Tensor` of shape `(T,)`, int64): For each of the T wanted tokens of the rows, in row-major
            order, its index among the M labelled tokens of the tree, which is the order of the model's results.
        tokens (`torch.Tensor` of shape `(R,)`, int64): For each of the R tokens of the rows without padding, in
            row-major order, its index in the packed sequence.
    """

    batch: dict[str, torch.Tensor]
    where: torch.Tensor
    tokens: torch.Tensor

    @property
    def reuse(self) -> float:
        """Tokens of the rows, without padding, per position of the packed sequence, with padding."""
        return len(self.tokens) / self.batch["input_ids"].shape[1]


def row_multiple(device: torch.device) -> int:
    """The multiple to which packed sequences are padded: FlexAttention's block size; on CPU there is no padding."""
    return BLOCK_SIZE if device.type == "cuda" else 1


def empty_row(device: torch.device) -> dict[str, torch.Tensor]:
    """A folded call without tokens."""
    batch = concatenate_trees([], pad_token_id=0, pad_to_multiple_of=row_multiple(device))
    return {name: batch[name].to(device) for name in TREE_INPUTS}


def fold_rows(
    input_ids: npt.NDArray[np.int64],
    is_token: npt.NDArray[np.bool_],
    is_wanted: npt.NDArray[np.bool_],
    pad_to_multiple_of: int,
    images: Images = NO_IMAGES,
) -> FoldedRows:
    """
    Folds the rows of a batch.

    Args:
        input_ids (`np.ndarray` of shape `(B, L)`, int64): Padded rows.
        is_token (`np.ndarray` of shape `(B, L)`, bool): False for padding: one run of tokens in each row, or none.
        is_wanted (`np.ndarray` of shape `(B, L)`, bool): The tokens whose log-prob is wanted. Never padding, never
            the first token of a row, which nothing predicts.
        pad_to_multiple_of (`int`): The packed sequence is padded to a multiple of it.
        images ([`~hf_prefix_tree.data.images.Images`], *optional*): Those of the rows. Their tokens merge only where
            the images are equal, too.

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
    marked = mark_images([input_ids[row, is_token[row]] for row in filled], images)
    wanted = [is_wanted[row, is_token[row]] for row in filled]
    tree = fold([Branch(*branch) for branch in zip(marked, wanted, strict=True)], weighting="branch")
    tree, inputs = unmark_images(tree, images)
    batch = concatenate_trees([tree], pad_token_id=0, pad_to_multiple_of=pad_to_multiple_of)
    rank = np.cumsum(tree.weights > 0) - 1  # index among the labelled tokens
    tokens = np.concatenate(tree.paths())
    return FoldedRows(
        inputs | {name: batch[name] for name in TREE_INPUTS},
        torch.from_numpy(rank[tokens[is_wanted[is_token]]]),
        torch.from_numpy(tokens),
    )


def images_of_rows(
    model: PreTrainedModel,
    input_ids: npt.NDArray[np.int64],
    is_token: npt.NDArray[np.bool_],
    inputs: Mapping[str, torch.Tensor | None],
) -> Images | str:
    """
    The images of padded rows, or why they cannot be folded.

    Args:
        model (`PreTrainedModel`): A prepared causal LM.
        input_ids, is_token (`np.ndarray` of shape `(B, L)`): As for [`fold_rows`].
        inputs (mapping): `pixel_values` and `image_grid_thw` of all rows, one after another, and `mm_token_type_ids`
            of shape `(B, L)`; keys may be missing.
    """
    pixels, grids, types = (inputs.get(name) for name in IMAGE_INPUTS)
    if (pixels is None or not len(pixels)) and (types is None or not types.any()):
        return NO_IMAGES
    if pixels is None or grids is None or types is None:
        return f"images come without one of {list(IMAGE_INPUTS)}"
    refusal = "no multimodal rotary positions" if image_model(model) is None else state_of(model).image_refusal
    if refusal is not None:
        return f"the model's images cannot be placed in a tree: {refusal}"
    grids, is_image = grids.cpu(), (input_ids == model.config.image_token_id) & is_token
    run = np.cumsum(image_starts(is_image)).reshape(is_image.shape)
    expected = image_tokens(model, grids)
    if np.bincount(run[is_image]).tolist()[1:] != expected or (is_image != (types.cpu().numpy() * is_token)).any():
        return f"image tokens are not those of the images: {is_image.sum()} for images of {expected} tokens"
    return Images(model.config.image_token_id, pixels.split(grids.prod(dim=1).tolist()), grids)


@dataclass(frozen=True)
class SortedRows:
    """
    The rows of a padded batch in an order that puts rows with a common prefix side by side.

    Args:
        order (int64 `[G]`):
            The index of each group of rows that stay together, by the first of its rows.
        group (int64 `[B]`):
            The group of each row. Without groups, it is the row's index in the batch.
        lengths (int64 `[B]`):
            Tokens of each row, without padding.
        shared (int64 `[B]`):
            Tokens that each row shares with the row before it.
        width (`int`):
            Tokens of a padded row.

    Example:

    ```python
    >>> import torch
    >>> from hf_prefix_tree.rl.folded_rows import SortedRows

    >>> ids = torch.tensor([[5, 6, 7], [8, 9, 0], [5, 6, 9], [8, 9, 9]])
    >>> rows = SortedRows.of(ids, torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 1, 1]]))
    >>> rows.parts(2)
    [[0, 2], [1, 3]]
    >>> rows.tokens(2).tolist()
    [4, 3]

    ```
    """

    order: npt.NDArray[np.int64]
    group: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    shared: npt.NDArray[np.int64]
    width: int

    @classmethod
    def of(
        cls, input_ids: torch.Tensor, attention_mask: torch.Tensor, group_sizes: Sequence[int] | None = None
    ) -> SortedRows:
        """
        Args:
            input_ids (int64 `[B, L]`): Padded rows.
            attention_mask (int64 `[B, L]`): 1 = real token.
            group_sizes (sequence of `int`, *optional*): Rows that stay together; by default each is by itself.
        """
        is_token = attention_mask.bool().cpu().numpy()
        ids = [row[mask] for row, mask in zip(input_ids.cpu().numpy(), is_token, strict=True)]
        order = sorted_order(ids)
        ids = [ids[row] for row in order]
        lengths = np.array([len(row) for row in ids])
        sizes = [1] * len(ids) if group_sizes is None else group_sizes
        group = np.repeat(np.arange(len(sizes)), sizes)[order]
        return cls(np.array(list(dict.fromkeys(group))), group, lengths, common_prefixes(ids), input_ids.shape[1])

    def parts(self, number: int) -> list[list[int]]:
        """The groups of each of `number` parts, in the order of the batch; parts differ by at most one group."""
        return [sorted(part.tolist()) for part in np.array_split(self.order, number)]

    def tokens(self, number: int, min_reuse: float = 1.0, multiple: int = 1) -> npt.NDArray[np.int64]:
        """
        Tokens that a forward over each of `number` parts computes.

        Args:
            number (`int`):
                Parts.
            min_reuse (`float`, *optional*, defaults to 1.0):
                A part with fewer tokens per folded token is not folded, and computes its padded tokens.
            multiple (`int`, *optional*, defaults to 1):
                Folded tokens of a part are rounded up to a multiple of it.
        """
        part_of_group = np.empty_like(self.order)
        for index, groups in enumerate(np.array_split(self.order, number)):
            part_of_group[groups] = index
        rows = np.argsort(part_of_group[self.group], kind="stable")
        part = part_of_group[self.group[rows]]
        # A row shares with the last one of its part what all rows in between share, the first row of a part nothing.
        last, row = rows[:-1][part[1:] == part[:-1]], rows[1:][part[1:] == part[:-1]]
        shared = np.zeros_like(self.shared)
        if len(row):
            bounds = np.stack([last + 1, row + 1], axis=1).ravel()
            shared[row] = np.minimum.reduceat(np.append(self.shared, 0), bounds)[::2]
        starts = np.searchsorted(part, np.arange(number))
        lengths = np.add.reduceat(self.lengths[rows], starts)
        folded = np.add.reduceat((self.lengths - shared)[rows], starts)
        folded = -(-folded // multiple) * multiple
        padded = np.diff(starts, append=len(rows)) * self.width
        return np.where(lengths >= min_reuse * folded, folded, padded)

    def totals(
        self, max_parts: int, budget: int, min_reuse: float = 1.0, multiple: int = 1, streams: bool = False
    ) -> npt.NDArray[np.int64]:
        """
        Tokens of all parts, for 1, 2, ... `max_parts` parts; `TOO_MANY` where a part exceeds the budget.

        Args:
            max_parts (`int`):
                The largest number of parts. It is always allowed.
            budget (`int`):
                Tokens that a forward may compute.
            min_reuse (`float`, *optional*, defaults to 1.0), multiple (`int`, *optional*, defaults to 1):
                As for [`tokens`].
            streams (`bool`, *optional*, defaults to `False`):
                Whether a part may exceed the budget: a forward more, a third of the work, is counted instead.
        """
        parts = [self.tokens(number, min_reuse, multiple) for number in range(1, max_parts + 1)]
        if streams:
            return np.array([(tokens + tokens // 3 * (tokens > budget)).sum() for tokens in parts])
        fits = [tokens.max() <= budget for tokens in parts[:-1]] + [True]
        return np.array([tokens.sum() if fit else TOO_MANY for tokens, fit in zip(parts, fits, strict=True)])


def select_rows(batches: Sequence[dict[str, Any]], rows: Sequence[int]) -> dict[str, Any]:
    """
    The given rows of consecutive micro-batches, as one micro-batch.

    Args:
        batches (sequence of `dict`):
            Micro-batches with the same keys: tensors and lists with an entry per row, scalar tensors that are equal
            in all of them, or `None`.
        rows (sequence of `int`):
            Indices of the rows, counted through the micro-batches.

    Example:

    ```python
    >>> select_rows([{"x": torch.tensor([1, 2])}, {"x": torch.tensor([3, 4])}], [0, 3])
    {'x': tensor([1, 4])}

    ```
    """
    selected: dict[str, Any] = {}
    for name, value in batches[0].items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            values = torch.cat([batch[name] for batch in batches])
            selected[name] = values[torch.tensor(rows, device=values.device)]
        elif isinstance(value, list):
            entries = [entry for batch in batches for entry in batch[name]]
            selected[name] = [entries[row] for row in rows]
        else:
            selected[name] = value
    return selected
