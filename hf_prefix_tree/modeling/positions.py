# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Positions that are not rotary embeddings of `position_ids`.

Tables that count from another number, tables that the model indexes by itself, and ALiBi are made to follow the depth
in the tree, by hooks that act in a tree call only. [`place_images`] gives each token of a packed sequence with images
the position that the model's `get_rope_index` gives it in its branch: on the host, linear in the tokens of the
branches.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hf_prefix_tree.data.images import first_equal
from hf_prefix_tree.modeling.batch import DEPTH, PREDECESSOR, SUBTREE_END
from hf_prefix_tree.modeling.context import active_tree

_ALIBI_METHODS = ("build_alibi_tensor", "build_mpt_alibi_tensor")


def place_by_depth(model: PreTrainedModel) -> list[Any]:
    """
    Hooks the parts of a model that turn positions into something else than a rotary embedding.

    Args:
        model (`PreTrainedModel`): A causal LM, not wrapped.

    Returns:
        `list`: the hooks, which `remove()` undoes; models with rotary embeddings have none.
    """
    handles: list[Any] = []
    for module in model.modules():
        forward = inspect.signature(type(module).forward).parameters
        if hasattr(module, "create_position_ids_from_input_ids") and "position_ids" in forward:
            handles.append(module.register_forward_pre_hook(_count_from_padding, with_kwargs=True))
        elif isinstance(module, torch.nn.Embedding) and "position_ids" in forward:
            handles.append(module.register_forward_pre_hook(_index_by_depth, with_kwargs=True))
            handles.append(module.register_forward_hook(_unflatten))
        handles += [_replaced(module, name, _pick_by_depth) for name in _ALIBI_METHODS if hasattr(module, name)]
    part = image_model(model)
    return handles if part is None else [*handles, _replaced(part, "get_image_features", _see_once)]


def _replaced(module: torch.nn.Module, name: str, function: Callable) -> Override:
    """A method of a module that a function replaces, which gets the method as its first argument."""
    return Override(module, name, functools.partial(function, getattr(module, name)))


class Override:
    """
    Another value of an attribute, until `remove()` gives the object back what it had.

    Args:
        owner (`torch.nn.Module`, config or module of Python): The object.
        name (`str`): The attribute.
        value (`Any`): Its value from now on.
    """

    def __init__(self, owner: Any, name: str, value: Any) -> None:
        self.owner, self.name, self.value = owner, name, value
        self.previous = {name: vars(owner)[name]} if name in vars(owner) else {}  # else it is of the class
        setattr(owner, name, value)

    def remove(self) -> None:
        """Undoes it, unless something else has replaced the value since."""
        if vars(self.owner).get(self.name) is self.value:
            delattr(self.owner, self.name)
            vars(self.owner).update(self.previous)


def with_names(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of a module, all by name."""
    if not args:
        return kwargs
    return {**dict(zip(list(inspect.signature(type(module).forward).parameters)[1:], args, strict=False)), **kwargs}


def _count_from_padding(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    # RoBERTa and its kin count positions from `padding_idx + 1`, and skip tokens that are padding.
    context = active_tree()
    if context is None:
        return None
    kwargs = with_names(module, args, kwargs)
    input_ids, depth = kwargs.get("input_ids"), context.prefix_tree[:, DEPTH].long()
    if input_ids is not None and bool(((input_ids == module.padding_idx) & (depth > 0)).any()):
        raise ValueError(
            f"`input_ids` hold the padding token {module.padding_idx} inside a branch; {type(module).__name__} counts "
            "positions by what is not padding. Take that token out of the branches."
        )
    return (), {**kwargs, "position_ids": depth + module.padding_idx + 1}


def _index_by_depth(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    # Tables of learned or sinusoidal positions take one flat list of positions: that of all packed sequences.
    context = active_tree()
    if context is None:
        return None
    return (), {**with_names(module, args, kwargs), "position_ids": context.prefix_tree[:, DEPTH].reshape(-1).long()}


def _unflatten(module: torch.nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor | None:
    context = active_tree()
    if context is None or context.prefix_tree.shape[0] == 1:  # the shape is the model's
        return None
    return output.reshape(context.prefix_tree.shape[0], -1, output.shape[-1])


def tempered_by_depth(attention: torch.nn.Module, query: torch.Tensor, prefix_tree: torch.Tensor) -> torch.Tensor:
    """
    The queries that an attention without rotary embedding would have made of depths in the tree. Llama 4 multiplies
    them by a factor of their index: multiply by what is missing to the factor of their depth.

    Args:
        attention (`torch.nn.Module`): The attention layer, of any architecture.
        query (`torch.Tensor` of shape `(B, heads, N, head_dim)`): Its queries.
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): As in the batch contract.
    """
    options: Any = attention.__dict__  # `getattr` takes longer where a module has no such attribute
    if not options.get("attn_temperature_tuning") or options.get("use_rope", True):
        return query
    depth = prefix_tree[:, DEPTH]
    index = torch.arange(depth.shape[1], device=depth.device)
    by_depth, by_index = (
        torch.log1p(torch.floor((x.float() + 1.0) / options["floor_scale"])) * options["attn_scale"] + 1.0
        for x in (depth, index)
    )
    return query * (by_depth.double() / by_index.double())[:, None, :, None].to(query.dtype)


def _pick_by_depth(build: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    # Makes a method that builds ALiBi's biases give each key that of its depth. A softmax does not change when all its
    # scores move by the same number, so a bias that grows with the depth of the key is the bias that falls with the
    # distance. The method itself makes the biases of a straight line, from which the depths pick theirs.
    line = build(*args, **kwargs)
    context = active_tree()
    if context is None:
        return line
    depth = context.prefix_tree[:, DEPTH].long()
    batch_size = depth.shape[0]
    if isinstance(args[0], torch.Tensor):  # the padding mask of each sequence: Bloom
        line = build(torch.ones_like(args[0]), *args[1:], **kwargs)
    elif batch_size > 1:
        raise ValueError(
            f"This model has one ALiBi bias for a whole batch: use a batch of 1 packed sequence, not {batch_size}."
        )
    return line.gather(2, depth.repeat_interleave(line.shape[0] // batch_size, dim=0)[:, None])


# Inputs beside the batch contract of a model that takes images. The token types are computed anew.
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


def image_tokens(model: PreTrainedModel, image_grid_thw: torch.Tensor) -> list[int]:
    """The number of tokens of each image of a model of [`image_model`]."""
    return (image_grid_thw.prod(dim=1) // getattr(model.config.vision_config, "spatial_merge_size", 1) ** 2).tolist()


def _see_once(see: Callable, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **kwargs: Any) -> Any:
    # The vision tower runs once for images of a packed sequence that are equal, wherever they stand.
    if active_tree() is None:
        return see(pixel_values, image_grid_thw, **kwargs)
    images = pixel_values.split(image_grid_thw.prod(dim=1).tolist())
    kept, where = np.unique(first_equal(images, image_grid_thw), return_inverse=True)
    output = see(torch.cat([images[i] for i in kept]), image_grid_thw[kept], **kwargs)
    sizes = [len(image) for image in output.pooler_output]

    def at_every_image(features: Any) -> Any:
        if isinstance(features, torch.Tensor):  # Qwen3-VL joins those of all images of a layer in Transformers 5.17
            return torch.cat([features.split(sizes)[i] for i in where])
        return [features[i] for i in where]

    output.pooler_output = at_every_image(output.pooler_output)
    if getattr(output, "deepstack_features", None) is not None:
        output.deepstack_features = [at_every_image(layer) for layer in output.deepstack_features]
    return output


def place_images(
    model: PreTrainedModel, prefix_tree: torch.Tensor, input_ids: torch.Tensor, image_grid_thw: torch.Tensor
) -> dict[str, torch.Tensor]:
    """
    The positions and token types of packed sequences with images, each token's as in its branch.

    Args:
        model (`PreTrainedModel`): A causal LM for which [`image_model`] finds a part.
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): As in the batch contract.
        input_ids (`torch.Tensor` of shape `(B, N)`, int64): Tokens in layout order.
        image_grid_thw (`torch.Tensor` of shape `(images, 3)`, int64): Patches of each image along time, height and
            width; the images in the order of their tokens, sequence by sequence.

    Returns:
        `dict[str, torch.Tensor]`: `position_ids` of shape `(D, B, N)` with the model's D axes, and
        `mm_token_type_ids` of shape `(B, N)`, 1 at images, both int64.

    Raises:
        `ValueError`: If the images don't fit the image tokens, or a position depends on more than what comes before.
    """
    part, grids = image_model(model), image_grid_thw.cpu()
    assert part is not None  # the caller checked
    tree, ids = prefix_tree.cpu().numpy(), input_ids.cpu().numpy()
    is_image, predecessor = ids == model.config.image_token_id, tree[:, PREDECESSOR]
    # first tokens of images
    starts = is_image & ((predecessor < 0) | ~np.take_along_axis(is_image, predecessor, axis=1))
    _check_images(tree, is_image, starts, image_tokens(model, grids))
    number = (np.cumsum(starts) - 1).reshape(starts.shape)  # of the image that starts here
    positions: npt.NDArray[np.int64] | None = None
    leaves = tree[:, SUBTREE_END] == np.arange(tree.shape[-1]) + 1
    for index, leaf in zip(*np.nonzero(leaves), strict=True):
        path = np.flatnonzero(tree[index, SUBTREE_END, : leaf + 1] > leaf)
        if not is_image[index, path].any():
            continue
        branch_positions, _ = part.get_rope_index(
            input_ids=torch.from_numpy(ids[index, path])[None],
            mm_token_type_ids=torch.from_numpy(is_image[index, path].astype(np.int64))[None],
            image_grid_thw=grids[number[index, path][starts[index, path]]],
        )
        branch_positions = branch_positions[:, 0].cpu().numpy()
        if positions is None:
            positions = np.repeat(tree[None, :, DEPTH].astype(np.int64), len(branch_positions), axis=0)
            placed = np.zeros(ids.shape, dtype=bool)
        again = placed[index, path]
        if (positions[:, index, path] != branch_positions)[:, again].any():
            raise ValueError(
                f"{type(part).__name__}.get_rope_index gives a token of a shared prefix other positions in other "
                "branches: this model's images cannot be shared. Train it on unfolded branches with a stock trainer."
            )
        positions[:, index, path] = branch_positions
        placed[index, path] = True
    assert positions is not None  # there is an image, so a branch has one
    arrays = {"position_ids": positions, "mm_token_type_ids": is_image.astype(np.int64)}
    return {name: torch.from_numpy(array).to(input_ids.device) for name, array in arrays.items()}


def _check_images(
    tree: npt.NDArray[np.int32], is_image: npt.NDArray[np.bool_], starts: npt.NDArray[np.bool_], tokens: list[int]
) -> None:
    """Every image has as many tokens as it needs, one after another on one path."""
    runs = list(zip(*np.nonzero(starts), strict=True))
    if len(runs) != len(tokens) or is_image.sum() != sum(tokens):
        raise ValueError(
            f"`image_grid_thw` describes {len(tokens)} images of {sum(tokens)} tokens, but `input_ids` has "
            f"{len(runs)} images of {is_image.sum()} tokens: give every image once, in the order of its "
            "tokens, as `hf_prefix_tree.fold_images` does."
        )
    for i, ((index, start), count) in enumerate(zip(runs, tokens, strict=True)):
        run = slice(start, start + count)
        follows = tree[index, PREDECESSOR, start + 1 : start + count] == np.arange(start, start + count - 1)
        unforked = tree[index, SUBTREE_END, run] == tree[index, SUBTREE_END, start]  # of a chain all are the same
        if not (len(follows) == count - 1 and follows.all() and unforked.all() and is_image[index, run].all()):
            raise ValueError(
                f"image {i} of `image_grid_thw` needs {count} tokens, but branches fork or end inside it: fold the "
                "branches with `hf_prefix_tree.fold_images`, and don't truncate inside an image."
            )
