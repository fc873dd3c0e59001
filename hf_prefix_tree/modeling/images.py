# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Positions of images on trees, for vision-language models with multimodal rotary positions.

[`place_images`] gives each token of a packed sequence the position that the model's own `get_rope_index` gives it in
its branch. It runs on the host, for packed sequences with images only. Cost: linear in the tokens of the branches.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling.batch import DEPTH, PREDECESSOR, SUBTREE_END

# What a call may hold beside the batch contract, where the model takes images. The token types are computed anew.
IMAGE_INPUTS = ("pixel_values", "image_grid_thw", "mm_token_type_ids")


def image_model(model: PreTrainedModel) -> Any | None:
    """
    The part of a causal LM that computes positions of images, or `None` where it takes none that a tree can place.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.
    """
    if getattr(model.config, "image_token_id", None) is None:
        return None
    needed = {"mm_token_type_ids", "image_grid_thw"}
    for part in model.modules():
        method = getattr(part, "get_rope_index", None)
        if method is not None and needed <= set(inspect.signature(method).parameters):
            return part
    return None


def place_images(
    model: PreTrainedModel, prefix_tree: torch.Tensor, input_ids: torch.Tensor, image_grid_thw: torch.Tensor
) -> dict[str, torch.Tensor]:
    """
    The positions and token types of rows with images, each token's as in its branch.

    Args:
        model (`PreTrainedModel`): A causal LM for which [`image_model`] finds a part.
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): The tree rows of the batch contract.
        input_ids (`torch.Tensor` of shape `(B, N)`, int64): Tokens in layout order.
        image_grid_thw (`torch.Tensor` of shape `(images, 3)`, int64): Patches of each image along time, height and
            width; the images in the order of their tokens, row by row.

    Returns:
        `dict[str, torch.Tensor]`: `position_ids` of shape `(D, B, N)` with the model's D axes, and
        `mm_token_type_ids` of shape `(B, N)`, 1 at images, both int64.

    Raises:
        `ValueError`: If the images don't fit the image tokens, or a position depends on more than what comes before.
    """
    part, grids = image_model(model), image_grid_thw.cpu()
    assert part is not None  # the caller checked
    tree, ids = prefix_tree.cpu().numpy(), input_ids.cpu().numpy()
    is_image = ids == model.config.image_token_id
    starts = is_image.copy()  # first tokens of images
    for row in range(len(ids)):
        predecessor = tree[row, PREDECESSOR]
        starts[row] &= (predecessor < 0) | ~is_image[row, predecessor]
    _check_images(model, tree, is_image, starts, grids)
    number = (np.cumsum(starts) - 1).reshape(starts.shape)  # of the image that starts here
    positions: npt.NDArray[np.int64] | None = None
    leaves = tree[:, SUBTREE_END] == np.arange(tree.shape[-1]) + 1
    for row, leaf in zip(*np.nonzero(leaves), strict=True):
        path = np.flatnonzero(tree[row, SUBTREE_END, : leaf + 1] > leaf)
        if not is_image[row, path].any():
            continue
        found, _ = part.get_rope_index(
            input_ids=torch.from_numpy(ids[row, path])[None],
            mm_token_type_ids=torch.from_numpy(is_image[row, path].astype(np.int64))[None],
            image_grid_thw=grids[number[row, path][starts[row, path]]],
        )
        found = found[:, 0].cpu().numpy()
        if positions is None:
            positions = np.repeat(tree[None, :, DEPTH].astype(np.int64), len(found), axis=0)
            placed = np.zeros(ids.shape, dtype=bool)
        again = placed[row, path]
        if (positions[:, row, path] != found)[:, again].any():
            raise ValueError(
                f"{type(part).__name__}.get_rope_index gives a token of a shared prefix other positions in other "
                "branches: this model's images cannot be shared. Train it on unfolded branches with a stock trainer."
            )
        positions[:, row, path] = found
        placed[row, path] = True
    assert positions is not None  # there is an image, so a branch has one
    device = input_ids.device
    return {
        "position_ids": torch.from_numpy(positions).to(device),
        "mm_token_type_ids": torch.from_numpy(is_image.astype(np.int64)).to(device),
    }


def _check_images(
    model: PreTrainedModel,
    tree: npt.NDArray[np.int32],
    is_image: npt.NDArray[np.bool_],
    starts: npt.NDArray[np.bool_],
    grids: torch.Tensor,
) -> None:
    """Every image has as many tokens as it needs, one after another on one path."""
    merge = getattr(model.config.vision_config, "spatial_merge_size", 1)
    tokens = (grids.prod(dim=1) // merge**2).tolist()
    runs = list(zip(*np.nonzero(starts), strict=True))
    if len(runs) != len(tokens) or is_image.sum() != sum(tokens):
        raise ValueError(
            f"`image_grid_thw` describes {len(tokens)} images of {sum(tokens)} tokens, but `input_ids` has "
            f"{len(runs)} images of {is_image.sum()} tokens: give every image of the row once, in the order of its "
            "tokens, as `hf_prefix_tree.fold_images` does."
        )
    for i, ((row, start), count) in enumerate(zip(runs, tokens, strict=True)):
        run = slice(start, start + count)
        follows = tree[row, PREDECESSOR, start + 1 : start + count] == np.arange(start, start + count - 1)
        unforked = tree[row, SUBTREE_END, run] == tree[row, SUBTREE_END, start]  # of a chain all are the same
        if not (len(follows) == count - 1 and follows.all() and unforked.all() and is_image[row, run].all()):
            raise ValueError(
                f"image {i} of `image_grid_thw` needs {count} tokens, but branches fork or end inside it: fold the "
                "branches with `hf_prefix_tree.fold_images`, and don't truncate inside an image."
            )
