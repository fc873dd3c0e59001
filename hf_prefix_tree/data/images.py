# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`fold_images`]: branches with images to one tree, every image of a shared prefix kept once.

Cost: linear in the tokens and pixels of the branches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold


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
    first_free = 1 + max((int(ids.max(initial=0)) for ids in sequences), default=0)
    numbers: dict[bytes, int] = {}
    patches: list[torch.Tensor] = []
    grids: list[torch.Tensor] = []
    for index, (branch, ids) in enumerate(zip(branches, sequences, strict=True)):
        is_image = ids == image_token_id
        starts = np.flatnonzero(is_image & ~np.concatenate([[False], is_image[:-1]]))
        branch_grids = torch.as_tensor(branch.get("image_grid_thw", torch.empty(0, 3)), dtype=torch.int64).view(-1, 3)
        if len(branch_grids) != len(starts):
            raise ValueError(
                f"`branches[{index}]` has {len(branch_grids)} images in `image_grid_thw`, but {len(starts)} runs of "
                f"the image token {image_token_id}: give every image of the branch, in order, other tokens between."
            )
        if len(starts) == 0:
            continue
        branch_patches = torch.as_tensor(branch["pixel_values"]).split(branch_grids.prod(dim=1).tolist())
        run = np.cumsum(np.isin(np.arange(len(ids)), starts)) - 1
        for i, (image, grid) in enumerate(zip(branch_patches, branch_grids, strict=True)):
            content = blake2b(image.contiguous().view(torch.uint8).numpy(), key=grid.numpy().tobytes()).digest()
            number = numbers.setdefault(content, len(numbers))
            if number == len(patches):
                patches.append(image)
                grids.append(grid)
            ids[is_image & (run == i)] = first_free + number
    tree = fold([Branch(ids, branch["weights"]) for ids, branch in zip(sequences, branches, strict=True)], weighting)
    ids, before = tree.input_ids, tree.input_ids[tree.predecessor]
    is_image = ids >= first_free
    order = ids[is_image & ((tree.predecessor < 0) | (before != ids))] - first_free
    tree = dataclasses.replace(tree, input_ids=np.where(is_image, image_token_id, ids))
    if len(order) == 0:
        return tree, {}
    return tree, {
        "pixel_values": torch.cat([patches[number] for number in order]),
        "image_grid_thw": torch.stack([grids[number] for number in order]),
    }
