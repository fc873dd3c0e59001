# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Empty rows that fill an uneven last step: Accelerate fills it with repeated rows, which would count twice.

Cost: none for a dataset. Of a stream every process reads all rows and keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Sampler

from hf_prefix_tree.collators.prefix_tree import PADDING_FEATURE

if TYPE_CHECKING:
    from transformers import Trainer


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
        if index >= self.length:  # what ends an iteration
            raise IndexError(f"row {index} of {self.length}")
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


def padded(trainer: Trainer, dataset: Any, multiple: int, description: str) -> PaddedDataset:
    """
    `dataset` without the columns that Trainer would remove, as a [`PaddedDataset`].

    Args:
        trainer (`Trainer`): The trainer.
        dataset (`Dataset`): Of `datasets`, or of torch, which has no columns to remove.
        multiple (`int`): The length is a multiple of it.
        description (`str`): As `_get_dataloader` gets it.
    """
    if hasattr(dataset, "column_names"):
        dataset = trainer._remove_unused_columns(dataset, description=description)
    return PaddedDataset(dataset, multiple)


def fill_uneven_steps(
    trainer: Trainer,
    dataset: Any,
    rows: int,
    *,
    is_training: bool,
    description: str,
    sampler: Sampler | None = None,
) -> Any:
    """
    What a trainer's `_get_dataloader` reads instead of `dataset`, so that no row is counted twice or in another epoch.

    Args:
        trainer (`Trainer`): The trainer.
        dataset (`Dataset` or `IterableDataset`): Its training or evaluation dataset.
        rows (`int`): Rows that all ranks take in a round.
        is_training (`bool`), description (`str`): As `_get_dataloader` gets them.
        sampler ([`StepSampler`], *optional*): What lays out the steps, if not Trainer's sampler.
    """
    if sampler is not None:  # it fills every step; the dataset is as long, or Accelerate would cut the last metrics
        return padded(trainer, dataset, len(sampler), description)  # type: ignore[arg-type]
    args, is_distributed = trainer.args, trainer.accelerator.num_processes > 1
    if isinstance(dataset, torch.utils.data.IterableDataset):
        # Trainer doesn't know where a stream ends, and would carry the gradients of an uneven last step over into the
        # next epoch's first one. (It ignores `dataloader_drop_last` here.)
        multiple = rows * (args.gradient_accumulation_steps if is_training else 1)
        if is_distributed:
            trainer.accelerator.dataloader_config.dispatch_batches = False  # not set means `True` for streams
        return PaddedStream(dataset, multiple) if is_distributed or multiple > rows else dataset
    # an evaluation is of all rows, and what is dropped in training has no last step to fill
    drops = args.dataloader_drop_last
    is_filled = is_distributed and not drops if is_training else is_distributed or drops
    return padded(trainer, dataset, rows, description) if is_filled and len(dataset) % rows else dataset
