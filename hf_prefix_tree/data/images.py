# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`fold_images`]: branches with images to one tree, every image of a shared prefix kept once.

While branches are folded, an image's tokens hold its number, which equal images share. Images are equal by their
pixels and their grid.

Cost: linear in the tokens and pixels of the branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

_FIRST_IMAGE = 2**31  # the number of the first image: more than any vocabulary has


class Images(NamedTuple):
    """
    The images of sequences, in the order of their tokens.

    Args:
        token (`int`): The token that stands for a piece of an image.
        patches (sequence of `torch.Tensor` of shape `(patches, ...)`): The pixels of each image.
        grids (`torch.Tensor` of shape `(images, 3)`, int64): Patches along time, height and width, on the CPU.
    """

    token: int
    patches: Sequence[torch.Tensor]
    grids: torch.Tensor


NO_IMAGES = Images(-1, (), torch.empty(0, 3, dtype=torch.int64))


def first_equal(patches: Sequence[torch.Tensor], grids: torch.Tensor) -> list[int]:
    """
    For each image, the index of the first one with its pixels and its grid.

    Args:
        patches, grids: As in [`Images`]; on a GPU, the host waits for it once, and once for each image that is found.
    """
    seen: dict[tuple[int, ...], list[int]] = {}
    first = []
    sums = torch.stack([image.contiguous().view(torch.uint8).sum() for image in patches])  # exact in any order
    for index, key in enumerate(zip(sums.tolist(), *grids.T.tolist(), strict=True)):
        alike = seen.setdefault(key, [])
        alike.append(index)
        first.append(next(i for i in alike if i == index or torch.equal(patches[i], patches[index])))
    return first


def image_starts(is_image: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Which tokens of sequences `(..., L)` begin a run of image tokens."""
    return is_image & np.diff(is_image, axis=-1, prepend=False)


def mark_images(sequences: Sequence[npt.NDArray[np.int64]], images: Images) -> list[npt.NDArray[np.int64]]:
    """The sequences with numbers of images for the image tokens, so that ids are equal where the images are, too."""
    if not images.patches:
        return list(sequences)
    ids = np.concatenate(sequences)
    is_image = ids == images.token
    run = np.cumsum(np.concatenate([image_starts(ids == images.token) for ids in sequences])) - 1
    ids[is_image] = _FIRST_IMAGE + np.array(first_equal(images.patches, images.grids))[run[is_image]]
    return np.split(ids, np.cumsum([len(ids) for ids in sequences])[:-1])


def unmark_images(tree: PrefixTree, images: Images) -> tuple[PrefixTree, dict[str, torch.Tensor]]:
    """The tree of marked branches with image tokens again, and the inputs of its images in the order of its tokens."""
    if not images.patches:
        return tree, {}
    ids, before = tree.input_ids, tree.input_ids[tree.predecessor]
    is_image = ids >= _FIRST_IMAGE
    order = ids[is_image & ((tree.predecessor < 0) | (before != ids))] - _FIRST_IMAGE
    pixel_values = torch.cat([images.patches[number] for number in order])
    tree = dataclasses.replace(tree, input_ids=np.where(is_image, images.token, ids))
    return tree, {"pixel_values": pixel_values, "image_grid_thw": images.grids[order]}


def fold_images(
    branches: Sequence[Mapping[str, Any]], *, image_token_id: int, weighting: str = "tree"
) -> tuple[PrefixTree, dict[str, torch.Tensor]]:
    """
    Folds branches with images. Image tokens merge only where the images are equal, too.

    Train with `{**collator([tree]), **images}`; for a row of several trees, concatenate their images in order.

    Args:
        branches (sequence of mappings):
            The processor's output for each branch, one-dimensional, with weights: `input_ids` and `weights` (see
            [`Branch`]), and where it has images `pixel_values` (`torch.Tensor` of shape `(patches, ...)`) and
            `image_grid_thw` (`torch.Tensor` of shape `(images, 3)`, int64).
        image_token_id (`int`):
            The token that stands for a piece of an image, `model.config.image_token_id`.
        weighting (`str`, *optional*, defaults to `"tree"`):
            See [`fold`].

    Returns:
        `tuple`: the [`PrefixTree`], and the `pixel_values` and `image_grid_thw` of its images in the order of the
        tree's tokens; empty where there are none. Don't split or fold the tree again: image tokens look the same.

    Raises:
        `ValueError`: If a branch has another number of images than of runs of image tokens.

    Example:

    ```python
    >>> import torch
    >>> def branch(answer, brightness):  # an image of four patches, in one token
    ...     image = {"pixel_values": torch.full((4, 3), brightness), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    ...     return {"input_ids": [5, 90, 6, answer], "weights": [0, 0, 0, 1], **image}
    >>> tree, images = fold_images([branch(7, 0.0), branch(8, 0.0), branch(7, 1.0)], image_token_id=90)
    >>> tree.input_ids
    array([ 5, 90,  6,  7,  8, 90,  6,  7])
    >>> images["pixel_values"][:, 0]
    tensor([0., 0., 0., 0., 1., 1., 1., 1.])

    ```
    """
    sequences = [np.array(branch["input_ids"], dtype=np.int64) for branch in branches]
    patches: list[torch.Tensor] = []
    grids = [NO_IMAGES.grids]
    for index, (branch, ids) in enumerate(zip(branches, sequences, strict=True)):
        branch_grids = torch.as_tensor(branch.get("image_grid_thw", grids[0]), dtype=torch.int64).view(-1, 3)
        count = image_starts(ids == image_token_id).sum()
        if len(branch_grids) != count:
            raise ValueError(
                f"`branches[{index}]` has {len(branch_grids)} images in `image_grid_thw`, but {count} runs of "
                f"the image token {image_token_id}: give every image of the branch, in order, other tokens between."
            )
        if count:
            patches += torch.as_tensor(branch["pixel_values"]).split(branch_grids.prod(dim=1).tolist())
            grids.append(branch_grids)
    images = Images(image_token_id, patches, torch.cat(grids))
    marked = mark_images(sequences, images)
    tree = fold([Branch(ids, branch["weights"]) for ids, branch in zip(marked, branches, strict=True)], weighting)
    return unmark_images(tree, images)
