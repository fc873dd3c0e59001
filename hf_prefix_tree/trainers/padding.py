# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Empty rows that fill an uneven last step: Accelerate fills it with repeated rows, which would count twice.

Cost: none for a dataset. Of a stream every process reads all rows and keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hf_prefix_tree.collators.prefix_tree import PADDING_FEATURE


def rounded_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


class PaddedDataset(torch.utils.data.Dataset):
    """
    `dataset` followed by empty rows.

    Args:
        dataset (`Dataset`): Has `__len__` and `__getitem__`.
        multiple (`int`): The length is a multiple of it.
    """

    def __init__(self, dataset: Any, multiple: int) -> None:
        self.dataset = dataset
        self.length = rounded_up(len(dataset), multiple)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index] if index < len(self.dataset) else PADDING_FEATURE


class PaddedStream(torch.utils.data.IterableDataset):
    """
    The rows of `dataset` followed by empty ones. In a worker process, those of the worker.

    Args:
        dataset (`IterableDataset`): Of `datasets` or of torch.
        multiple (`int`): The number of rows is a multiple of it.
    """

    def __init__(self, dataset: Any, multiple: int) -> None:
        self.dataset, self.multiple = dataset, multiple

    def __len__(self) -> int:
        return rounded_up(len(self.dataset), self.multiple)  # a TypeError where the stream has no length

    def __iter__(self) -> Iterator[Any]:
        count = 0
        for row in self.dataset:
            count += 1
            yield row
        for _ in range(count, rounded_up(count, self.multiple)):
            yield PADDING_FEATURE

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch to the stream, as Accelerate would: to its `set_epoch`, or as seed to its `generator`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        elif isinstance(getattr(self.dataset, "generator", None), torch.Generator):
            self.dataset.generator.manual_seed(epoch)
