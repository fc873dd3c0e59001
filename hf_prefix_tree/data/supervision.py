# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which tokens of a sample are supervised: reads `loss_mask`, `completion_mask`, `assistant_masks` and `labels`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    pass

IGNORE_INDEX = -100  # label of a token that is not supervised

# The columns that say which tokens are supervised.
SUPERVISION = ("loss_mask", "completion_mask", "assistant_masks", "labels")


class Sample(NamedTuple):
    """A feature as arrays, in the order of the batch's columns."""

    input_ids: np.ndarray  # [raw] int64
    supervised: np.ndarray  # [raw] bool
    attended: np.ndarray  # [raw] int64

    def without_padding(self) -> Sample:
        """Up to its last attended token: the fill, which is supervised, would stand after padding."""
        count = int(np.flatnonzero(self.attended)[-1]) + 1 if self.attended.any() else 0
        return Sample(*(values[:count] for values in self))


def read_sample(feature: Mapping[str, Any], index: int) -> Sample:
    """A feature, checked; errors name its index."""
    if feature.get("input_ids") is None:
        raise ValueError(f"`features[{index}]` has the keys {sorted(feature)} and no `input_ids`.")
    ids = _array(feature["input_ids"], "input_ids", index)
    seq_lengths = feature.get("seq_lengths")
    if seq_lengths is not None and len(seq_lengths) > 1:
        raise ValueError(
            f"`features[{index}]` packs {len(seq_lengths)} samples (`seq_lengths`): a diffusion model "
            "would see across them; pass `packing=False`."
        )
    attended = _mask(feature, "attention_mask", len(ids), index)
    return Sample(
        ids,
        _supervised(feature, ids, index),
        np.ones(len(ids), dtype=np.int64) if attended is None else attended.astype(np.int64),
    )


def _supervised(feature: Mapping[str, Any], ids: np.ndarray, index: int) -> np.ndarray:
    """What all supervision columns of a feature say; they must say the same."""
    said: dict[str, np.ndarray] = {}
    if (mask := _mask(feature, "loss_mask", len(ids), index)) is not None:
        said["loss_mask"] = mask
    trl = {name: _mask(feature, name, len(ids), index) for name in ("completion_mask", "assistant_masks")}
    given = {name: mask for name, mask in trl.items() if mask is not None}
    if given:
        said[" and ".join(given)] = np.logical_and.reduce(list(given.values()))
    if feature.get("labels") is not None:
        labels = _array(feature["labels"], "labels", index)
        _check_length(labels, "labels", len(ids), index)
        said["labels"] = labels != IGNORE_INDEX
        wrong = np.flatnonzero(said["labels"] & (labels != ids))
        if len(wrong):
            raise ValueError(
                f"`features[{index}]` has the label {labels[wrong[0]]} for the token {ids[wrong[0]]} at {wrong[0]}: "
                "pass unshifted labels, each the token itself or -100."
            )
    if not said:
        raise ValueError(
            f"`features[{index}]` has the keys {sorted(feature)} and none of {', '.join(SUPERVISION)}: add a "
            "`loss_mask` (ones to supervise everything). If a `Trainer` removed it, set `remove_unused_columns=False`."
        )
    (first, supervised), *others = said.items()
    for name, mask in others:
        differ = np.flatnonzero(mask != supervised)
        if len(differ):
            raise ValueError(
                f"`features[{index}]` has `{first}` and `{name}` that disagree on {len(differ)} tokens, first at "
                f"{differ[0]}: keep one of them."
            )
    return supervised


def _mask(feature: Mapping[str, Any], name: str, length: int, index: int) -> np.ndarray | None:
    """A mask as bool, or `None` where the feature has none."""
    if feature.get(name) is None:
        return None
    mask = _array(feature[name], name, index)
    _check_length(mask, name, length, index)
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"`features[{index}]` has a `{name}` with other values than 0 and 1.")
    return mask != 0


def _check_length(values: np.ndarray, name: str, length: int, index: int) -> None:
    if len(values) != length:
        raise ValueError(
            f"`features[{index}]` has {len(values)} entries in `{name}` and {length} in `input_ids`: one per token."
        )


def _array(values: Any, name: str, index: int) -> np.ndarray:
    """A list, array or tensor as an int64 array of one dimension."""
    if isinstance(values, torch.Tensor):
        values = (values.double() if values.is_floating_point() else values).detach().cpu().numpy()
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"`features[{index}]` has `{name}` of shape {array.shape}: pass one dimension, one sample.")
    as_int = array.astype(np.int64)
    if not np.array_equal(as_int, array):
        raise ValueError(f"`features[{index}]` has a `{name}` with values that are no integers.")
    return as_int


Document = tuple[Sequence[int], Sequence[int]]  # token ids, loss mask


def real_tokens(input_ids: Any, loss_mask: Any, attention_mask: Any = None) -> Document:
    """
    A document without its padding.

    Args:
        input_ids, loss_mask, attention_mask (sequences of `int`): Of equal length; the last one may be `None`.

    Returns:
        `tuple[list[int], list[int]]`: token ids, and a mask of zeros and ones.

    Raises:
        `ValueError`: If the lengths differ, or a real token follows padding.
    """
    ids, mask = np.asarray(input_ids, dtype=np.int64), np.asarray(loss_mask)
    real = np.ones(len(ids), dtype=bool) if attention_mask is None else np.asarray(attention_mask) != 0
    if not ids.shape == mask.shape == real.shape or ids.ndim != 1:
        raise ValueError(
            f"`input_ids`, `loss_mask` and `attention_mask` have the shapes {ids.shape}, {mask.shape} and "
            f"{real.shape}: pass one entry per token."
        )
    count = int(real.sum())
    if not real[:count].all():
        raise ValueError("`attention_mask` has a zero before a one: pad documents at the end only.")
    return ids[:count].tolist(), (mask[:count] != 0).astype(int).tolist()
