# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`read_sample`]: token ids, and which of them are supervised. Trees, diffusion and EAGLE-3 read their rows with it.

Cost: linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hf_prefix_tree.tree import folding

IGNORE_INDEX = -100  # label of a token that is not supervised

# The columns that say which tokens are supervised.
SUPERVISION = ("loss_mask", "completion_mask", "assistant_masks", "labels")


class Sample(NamedTuple):
    """One sequence as arrays. Padding of the row, if it has any, is still there."""

    input_ids: npt.NDArray[np.int64]  # [L]
    weights: npt.NDArray[np.float64]  # [L], 0 where not supervised; otherwise 1, but for trees
    attended: npt.NDArray[np.int64]  # [L], 0 where the row is padded

    def without_padding(self) -> Sample:
        """
        The tokens before the padding.

        Raises:
            `ValueError`: If a token follows padding.
        """
        count = int(self.attended.sum())
        if not self.attended[:count].all():
            raise ValueError("`attention_mask` has a zero before a one; pad at the end only.")
        return Sample(self.input_ids[:count], self.weights[:count], self.attended[:count])


def read_sample(row: Mapping[str, Any], where: str = "", *, weighted: bool = False, padded: bool = False) -> Sample:
    """
    Read one sequence from the columns of a dataset row or of a collator's feature.

    - `input_ids`: the tokens; `attention_mask`, *optional*: 0 where the row is padded, at its end.
    - `loss_mask`: 1 where a token is supervised.
    - `completion_mask` and `assistant_masks`: a token is supervised where all that are given are 1, as in TRL.
    - `labels`: unshifted, the token itself, or -100 where it is not supervised.
    - `position_ids`, `seq_lengths`: only checked, they must be those of a single sequence.

    If several columns tell the supervised tokens, they must agree. Columns of other names are ignored.

    Args:
        row (`Mapping[str, Any]`):
            Lists, arrays or tensors by column.
        where (`str`, *optional*, defaults to `""`):
            Which row it is; errors begin with it.
        weighted (`bool`, *optional*, defaults to `False`):
            Read `weights` too, which multiply, and supervise every token of a row without any of these columns.
        padded (`bool`, *optional*, defaults to `False`):
            Keep padding.

    Raises:
        `ValueError`: If a column is malformed, columns contradict each other, or nothing says what is supervised.

    Example:

    ```python
    >>> read_sample({"input_ids": [5, 6, 7, 0], "loss_mask": [0, 1, 1, 0], "attention_mask": [1, 1, 1, 0]})
    Sample(input_ids=array([5, 6, 7]), weights=array([0., 1., 1.]), attended=array([1, 1, 1]))

    ```
    """
    with located(where):
        folding.check_mapping(row, "row", ["input_ids"])
        columns = {name: _array(value) for name, value in row.items() if name in _COLUMNS and value is not None}
        ids = folding.integer_array(columns["input_ids"], "input_ids")
        weights = _supervised(columns, ids)
        if weights is None:
            if len(ids) and not weighted:
                raise ValueError(
                    f"it has the keys {list(row)} and none of {', '.join(SUPERVISION)}; add a `loss_mask` (ones to "
                    "supervise everything). If a `Trainer` removed it, set `remove_unused_columns=False`."
                )
            weights = np.ones(len(ids))
        if "weights" in columns:
            if not weighted:
                raise ValueError("`weights` are for trees; pass a `loss_mask`.")
            weights = weights * _per_token(folding.weight_array(columns["weights"], "weights"), "weights", ids)
        attended = _mask(columns, "attention_mask", ids) if "attention_mask" in columns else np.ones(len(ids))
        sample = Sample(ids, weights, attended.astype(np.int64))
        _check_one_sequence(columns, sample)
        return sample if padded else sample.without_padding()


@contextmanager
def located(where: str) -> Iterator[None]:
    """A `ValueError` of the block begins with where it is, if that is known."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from error


def check_features(features: Any) -> None:
    """Raises `ValueError` unless the features of a collator are a sequence of mappings, at least one."""
    features = folding.as_list(features, "features")
    folding.check_not_empty(features, "features")
    for index, feature in enumerate(features):
        folding.check_mapping(feature, f"features[{index}]")


_COLUMNS = ("input_ids", *SUPERVISION, "weights", "attention_mask", "position_ids", "seq_lengths")


def _array(value: Any) -> Any:
    """A tensor as an array that NumPy can hold; other values as they are."""
    if isinstance(value, torch.Tensor):
        return (value.double() if value.is_floating_point() else value).detach().cpu().numpy()
    return value


def _supervised(columns: Mapping[str, Any], ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64] | None:
    """1 where all supervision columns supervise, 0 where none does; `None` if there are none."""
    masks = {"loss_mask": _mask(columns, "loss_mask", ids)} if "loss_mask" in columns else {}
    trl = {name: _mask(columns, name, ids) for name in ("completion_mask", "assistant_masks") if name in columns}
    if trl:
        masks[" and ".join(trl)] = np.logical_and.reduce(list(trl.values()))
    if "labels" in columns:
        labels = _per_token(folding.integer_array(columns["labels"], "labels", minimum=IGNORE_INDEX), "labels", ids)
        masks["labels"] = labels != IGNORE_INDEX
        wrong = np.flatnonzero(masks["labels"] & (labels != ids))
        if len(wrong):
            at = wrong[0]
            raise ValueError(
                f"`labels` is {labels[at]} at index {at} where `input_ids` is {ids[at]}; pass them unshifted, and "
                "-100 where a token is not supervised."
            )
    if not masks:
        return None
    (first, supervised), *further = masks.items()
    for name, mask in further:
        differ = np.flatnonzero(mask != supervised)
        if len(differ):
            raise ValueError(
                f"`{first}` and `{name}` disagree on {len(differ)} tokens, first at index {differ[0]}; keep one of "
                "them."
            )
    return supervised.astype(np.float64)


def _mask(columns: Mapping[str, Any], name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    mask = _per_token(folding.weight_array(columns[name], name), name, ids)
    wrong = np.flatnonzero((mask != 0) & (mask != 1))
    if len(wrong):
        raise ValueError(f"`{name}` is {mask[wrong[0]]} at index {wrong[0]}; pass 0 or 1 for every token.")
    return mask != 0


def _per_token(values: npt.NDArray[Any], name: str, ids: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    folding.check_length(values, name, len(ids), "`input_ids`")
    return values


def _check_one_sequence(columns: Mapping[str, Any], sample: Sample) -> None:
    """Refuse several packed sequences: read as one, they would see each other."""
    is_one = {
        "seq_lengths": lambda lengths: np.array_equal(lengths, [len(sample.input_ids)]),
        "position_ids": lambda positions: (
            positions.shape == sample.attended.shape
            and np.array_equal(positions[sample.attended > 0], np.arange(sample.attended.sum()))
        ),
    }
    for name, check in is_one.items():
        if name in columns and not check(folding.weight_array(columns[name], name)):
            raise ValueError(
                f"`{name}` is {str(columns[name])[:40]} for {len(sample.input_ids)} `input_ids`, so several sequences "
                "are packed here, which would see each other; pass the rows as they were before (`packing=False`)."
            )
