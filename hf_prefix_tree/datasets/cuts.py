# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Samples that a cap on their length cuts: counted and logged once; those with nothing supervised left are left out.

A column says how each sample fared, so that a result from the cache is counted as well. Cost: one pass over it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

CUT = "_cut"  # the column: one of the values below
WHOLE, SHORTENED, UNSUPERVISED = range(3)


def cut_of(supervised: Sequence[Any] | np.ndarray, length: int, first: int = 0) -> int:
    """
    What a cap does to a sample.

    Args:
        supervised (sequence or `np.ndarray`): What each token counts: 0 or `False` where it is not supervised.
        length (`int`): The cap.
        first (`int`, *optional*, defaults to 0): Index of the first token that can be supervised.

    Example:

    ```python
    >>> cut_of([0, 0, 1], 3) == WHOLE, cut_of([0, 0, 1, 1], 3) == SHORTENED, cut_of([0, 0, 1], 2) == UNSUPERVISED
    (True, True, True)

    ```
    """
    if len(supervised) <= length:
        return WHOLE
    return SHORTENED if any(supervised[first:length]) else UNSUPERVISED


def kept_of(cuts: Sequence[int], cap: tuple[str, int]) -> list[int]:
    """
    The indices of the samples that stay; logs a warning if any was cut.

    Args:
        cuts (sequence of `int`): What [`cut_of`] says of each sample.
        cap (`tuple[str, int]`): The argument that cuts, and its value.

    Raises:
        `ValueError`: If no sample stays, though there were some.
    """
    name, value = cap
    kept = [index for index, cut in enumerate(cuts) if cut != UNSUPERVISED]
    cut, left_out = sum(cut != WHOLE for cut in cuts), len(cuts) - len(kept)
    losses = (
        f"{cut} samples truncated to `{name}={value}`, {left_out} of them left out because no supervised token "
        "remained"
    )
    if left_out and not kept:
        raise ValueError(f"no sample is left of {len(cuts)} ({losses}); raise `{name}`, or shorten the samples.")
    if cut:
        logger.warning(
            "Prepared %d samples. Not all is trained on as it was: %s; raise `%s`, or shorten the samples.",
            len(cuts),
            losses,
            name,
        )
    return kept


def without_unsupervised(dataset: Dataset | IterableDataset, cap: tuple[str, int]) -> Dataset | IterableDataset:
    """
    The samples that stay, without the column `CUT`. A stream, which nobody has counted, warns once, while it is read.

    Args:
        dataset (`Dataset` or `IterableDataset`): Has the column `CUT`.
        cap (`tuple[str, int]`): As for [`kept_of`].
    """
    if isinstance(dataset, IterableDataset):
        return dataset.filter(_Keeps(cap), input_columns=CUT).remove_columns(CUT)
    kept = kept_of(dataset[CUT], cap)
    dataset = dataset.remove_columns(CUT)
    return dataset.select(kept) if len(kept) < len(dataset) else dataset


class _Keeps:
    """Whether a sample of a stream stays; warns of the first one that is cut."""

    def __init__(self, cap: tuple[str, int]) -> None:
        self.cap = cap
        self.has_warned = False

    def __call__(self, cut: int) -> bool:
        if cut != WHOLE and not self.has_warned:
            self.has_warned = True
            name, value = self.cap
            logger.warning(
                "A sample of a stream is truncated to `%s=%d`, and so are all longer ones, uncounted; those left with "
                "no supervised token are left out. Raise `%s`, or shorten the samples.",
                name,
                value,
                name,
            )
        return cut != UNSUPERVISED
