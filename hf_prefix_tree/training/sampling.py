# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which dataset rows an optimizer step holds, and which rank reads them.

Parts of one split tree stay in one step, the rows of a step are assigned to ranks so that they wait little for each
other, and an uneven last step is filled with empty rows.

A row costs its tokens (linear layers), its supervised tokens (the head) and its visible pairs (attention), in the
proportion of the model's sizes. Ranks meet at every micro-batch, so a step takes as long as the slowest batch of each
round; this sum is kept low.

Cost: one pass over the dataset before the first step, O(n log n) an epoch for n rows. Of a stream every process reads
all rows and keeps its share.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import ConcatDataset, DataLoader, DistributedSampler, IterableDataset, Sampler
from transformers import TrainerCallback

from hf_prefix_tree.data.trees import cached_map
from hf_prefix_tree.modeling.flops import cost_per_count
from hf_prefix_tree.tree.packing import next_fit, pack_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig, Trainer


def rounded_up(length: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `length`."""
    return -(-length // multiple) * multiple


class PaddedDataset(ConcatDataset):
    """
    `dataset` followed by empty rows.

    Args:
        dataset (`Dataset`): Has `__len__` and `__getitem__`.
        multiple (`int`): The length is a multiple of it.
    """

    def __init__(self, dataset: Any, multiple: int) -> None:
        self.dataset = dataset
        padding: Any = [PADDING_FEATURE] * (-len(dataset) % multiple)
        super().__init__([dataset, padding])


class PaddedStream(IterableDataset):
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
        yield from itertools.repeat(PADDING_FEATURE, -count % self.multiple)

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch to the stream, as Accelerate would: to its `set_epoch`, or as seed to its `generator`."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        elif isinstance(getattr(self.dataset, "generator", None), torch.Generator):
            self.dataset.generator.manual_seed(epoch)


def fill_uneven_steps(
    trainer: Trainer, dataset: Any, rows: int, is_training: bool, description: str, sampler: Sampler | None
) -> Any:
    """
    The dataset for a trainer's `_get_dataloader`, of which no row is counted twice or in another epoch.

    Args:
        trainer (`Trainer`): The trainer.
        dataset (`Dataset` or `IterableDataset`): Its training or evaluation dataset.
        rows (`int`): Rows that all ranks take in a round.
        is_training (`bool`), description (`str`): As `_get_dataloader` gets them.
        sampler ([`StepSampler`], *optional*): Lays out the steps, if not Trainer's sampler.
    """
    args, is_distributed = trainer.args, trainer.accelerator.num_processes > 1
    if isinstance(dataset, IterableDataset):
        # Trainer doesn't know where a stream ends, and would carry the gradients of an uneven last step over into the
        # next epoch's first one. (It ignores `dataloader_drop_last` here.)
        multiple = rows * (args.gradient_accumulation_steps if is_training else 1)
        if is_distributed:
            trainer.accelerator.dataloader_config.dispatch_batches = False  # not set means `True` for streams
        return PaddedStream(dataset, multiple) if is_distributed or multiple > rows else dataset
    if sampler is not None:  # it fills every step; the dataset is as long, or Accelerate would cut the last metrics
        rows, is_filled = len(sampler), True  # type: ignore[arg-type]
    elif is_training:  # what is dropped has no last step to fill
        is_filled = is_distributed and not args.dataloader_drop_last
    else:  # an evaluation is of all rows
        is_filled = is_distributed or args.dataloader_drop_last
    if not is_filled or len(dataset) % rows == 0:
        return dataset
    if hasattr(dataset, "column_names"):  # Trainer removes none from a dataset of torch
        dataset = trainer._remove_unused_columns(dataset, description=description)
    return PaddedDataset(dataset, rows)


def row_costs(
    dataset: Any, counts: Any, config: PretrainedConfig, num_proc: int | None = None
) -> npt.NDArray[np.float64]:
    """
    FLOPs of every row.

    Args:
        dataset (`Dataset`): Of `datasets`, which keeps the counts in its cache, or of torch.
        counts ([`RowCounts`]): Counts a row.
        config (`PretrainedConfig`): The model's.
        num_proc (`int`, *optional*): Processes that count the rows of a `datasets.Dataset`.

    Returns:
        float64 `[number of rows]`.
    """
    if hasattr(dataset, "map"):
        options = {"batched": True, "batch_size": 64, "num_proc": num_proc, "desc": "Counting tokens and pairs"}
        dataset = dataset.with_format(None)
        values = cached_map(dataset, counts, remove_columns=dataset.column_names, **options)["counts"][:]
    else:
        values = [counts.of(dataset[index]) for index in range(len(dataset))]
    return np.array(values, dtype=np.float64) @ cost_per_count(config)


def assign_rows(costs: npt.NDArray[np.float64], ranks: int, batch_size: int) -> npt.NDArray[np.int64]:
    """
    The order in which the rows of a step are read: batch after batch, where batch i goes to rank i % ranks.

    Each row, the heaviest first, goes to the batch with the least work that has room. Batches that cost alike make a
    round, in which rows are exchanged with the heaviest batch as long as that helps; and a round's heaviest batch goes
    to the rank with the least work so far. Batches of one row are assigned optimally.

    Args:
        costs (float64 `[n]`): Cost of each row; n is a multiple of `ranks * batch_size`.
        ranks (`int`): Ranks that read different rows.
        batch_size (`int`): Rows of a batch.

    Returns:
        int64 `[n]`: the rows in their new order.

    Example:

    ```python
    >>> assign_rows(np.array([1.0, 9.0, 4.0, 5.0]), ranks=2, batch_size=1)  # rank 0: 9 and 1, rank 1: 5 and 4
    array([1, 3, 0, 2])

    ```
    """
    batches: list[list[int]] = [[] for _ in range(len(costs) // batch_size)]
    lightest = [(0.0, batch) for batch in range(len(batches))]  # a heap of those that have room
    for row in np.argsort(-costs, kind="stable").tolist():
        work, batch = heapq.heappop(lightest)
        batches[batch].append(row)
        if len(batches[batch]) < batch_size:
            heapq.heappush(lightest, (work + costs[row], batch))
    batches.sort(key=lambda batch: -costs[batch].sum())
    order: list[int] = []
    of_ranks = np.zeros(ranks)
    for start in range(0, len(batches), ranks):
        in_round = batches[start : start + ranks]
        of_batches = _even_out(costs, in_round)
        places = np.empty(ranks, dtype=np.int64)
        places[np.argsort(of_ranks, kind="stable")] = np.argsort(-of_batches, kind="stable")
        of_ranks += of_batches[places]
        order += [row for place in places for row in in_round[place]]
    return np.array(order, dtype=np.int64)


def _even_out(costs: npt.NDArray[np.float64], batches: list[list[int]]) -> npt.NDArray[np.float64]:
    """Exchanges rows of the heaviest batch with lighter ones as long as that helps; returns the work of each batch."""
    work = np.array([costs[rows].sum() for rows in batches])
    while True:
        heavy = int(work.argmax())
        lowest, swap = work[heavy] * (1 - 1e-6), None
        for light, rows in enumerate(batches):
            if light == heavy:
                continue
            changes = costs[batches[heavy]][:, None] - costs[rows][None]
            heavier = np.maximum(work[heavy] - changes, work[light] + changes)
            i, j = np.unravel_index(heavier.argmin(), heavier.shape)
            if heavier[i, j] < lowest:
                lowest, swap = heavier[i, j], (int(i), light, int(j), changes[i, j])
        if swap is None:
            return work
        i, light, j, change = swap
        batches[heavy][i], batches[light][j] = batches[light][j], batches[heavy][i]
        work[heavy] -= change
        work[light] += change


# Values of `train_sampling_strategy` for which Trainer needs the length of every row.
BY_LENGTH = ("group_by_length", "batch_rebalance")
STRATEGIES = ("random", "sequential", *BY_LENGTH)  # those laid out here
_WINDOW = 50  # steps whose rows are sorted by cost together, at most; as in Transformers' `group_by_length`


def linked_rows(tree_ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """
    Rows that must share a step: those with a tree in common, directly or through other rows.

    Args:
        tree_ids (sequence of sequences of `int`): The ids of each row's trees.

    Returns:
        `list` of `list` of `int`: the rows of each unit, ascending; units ordered by their first row.

    Example:

    ```python
    >>> linked_rows([[0], [1, 2], [3], [2], [0, 3]])
    [[0, 2, 4], [1, 3]]

    ```
    """
    units = [[row] for row in range(len(tree_ids))]  # of each row: one list for all rows of a unit
    first: dict[int, int] = {}
    for row, ids in enumerate(tree_ids):
        for tree_id in ids:
            smaller, larger = sorted((units[first.setdefault(tree_id, row)], units[row]), key=len)
            if smaller is not larger:
                larger += smaller
                for moved in smaller:
                    units[moved] = larger
    return [sorted(unit) for unit in {id(unit): unit for unit in units}.values()]


@dataclass(eq=False, kw_only=True)
class StepSampler(Sampler[int]):
    """
    Yields blocks of indices, one block per optimizer step, and never cuts a unit in two.

    Room that no unit fills is filled with the index one past the rows, which stands for an empty row. Best fit decides
    once which sizes go together, so every epoch has as many steps; the units and the order of the blocks are drawn
    anew each epoch. Steps do not depend on the number of ranks, given their rows.

    Args:
        units (`list` of `list` of `int`):
            Rows that belong together, see [`linked_rows`].
        block_size (`int`):
            Rows of one optimizer step: `gradient_accumulation_steps` x processes x `per_device_train_batch_size`.
        strategy (`str`):
            `"sequential"` lays units out in order, each where its first row is; `"random"` and `"batch_rebalance"`
            shuffle them; `"group_by_length"` also shuffles, and gives a step units that cost alike.
        seed (`int`):
            Seed of the shuffling, equal on all ranks.
        global_step (`Callable`):
            Returns the optimizer steps done so far, which tell the epoch, after a resumption too: Accelerate's
            `set_epoch` doesn't reach a sampler behind skipped batches on several processes.
        costs (float64 `[number of rows]`, *optional*):
            Cost of each row. With them, the rows of a step are assigned to ranks by [`assign_rows`].
        ranks, batch_size (`int`, *optional*, defaults to 1):
            Ranks that read different rows, and rows of a batch.

    Raises:
        `ValueError`: If a unit is larger than a block.
    """

    units: list[list[int]] = field(kw_only=False)
    block_size: int = field(kw_only=False)
    strategy: str
    seed: int
    global_step: Callable[[], int]
    costs: npt.NDArray[np.float64] | None = None
    ranks: int = 1
    batch_size: int = 1

    def __post_init__(self) -> None:
        self.unit_sizes = np.array([len(unit) for unit in self.units])
        if self.unit_sizes.max() > self.block_size:
            raise ValueError(
                f"{self.unit_sizes.max()} rows hold parts of the same split trees and must be in one optimizer step, "
                f"which has {self.block_size} (`gradient_accumulation_steps` x processes x "
                "`per_device_train_batch_size`). Raise `gradient_accumulation_steps`, or raise `max_packed_tokens`, "
                "so that trees have fewer parts."
            )
        self.padding_index = int(self.unit_sizes.sum())
        if self.costs is not None:
            self.unit_costs = np.array([self.costs[unit].mean() for unit in self.units])
            self.costs = np.append(self.costs, 0.0)  # an empty row costs nothing
        pack = next_fit if self.strategy == "sequential" else pack_rows
        self.blocks = pack(self.unit_sizes, self.block_size)

    def __len__(self) -> int:
        return len(self.blocks) * self.block_size

    def __iter__(self) -> Iterator[int]:
        for block in self.blocks if self.strategy == "sequential" else self._drawn_blocks():
            rows = [row for unit in block for row in self.units[unit]]
            rows += [self.padding_index] * (self.block_size - len(rows))
            if self.costs is not None:
                rows = np.array(rows)[assign_rows(self.costs[rows], self.ranks, self.batch_size)].tolist()
            yield from rows

    def _drawn_blocks(self) -> Iterator[list[int]]:
        epoch = self.global_step() // len(self.blocks)
        rng = np.random.default_rng([self.seed, epoch])
        drawn = np.empty(len(self.units), dtype=np.int64)  # the unit that takes the place of each
        places = np.concatenate([np.array(block) for block in self.blocks])
        for size in np.unique(self.unit_sizes):
            same = places[self.unit_sizes[places] == size]
            drawn[same] = self._alike(rng.permutation(np.sort(same)))
        for block in rng.permutation(len(self.blocks)):
            yield rng.permutation(drawn[self.blocks[block]]).tolist()

    def _alike(self, units: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """
        Shuffled units so that those one after another cost alike, within a window: of a quarter of the steps, as in
        Transformers, or epochs would consist of the same steps, and at least of two, or nothing would be sorted.
        """
        if self.strategy != "group_by_length" or self.costs is None:
            return units
        window = min(_WINDOW, max(2, len(self.blocks) // 4)) * self.block_size
        windows = [units[start : start + window] for start in range(0, len(units), window)]
        return np.concatenate([part[np.argsort(-self.unit_costs[part], kind="stable")] for part in windows])


def rank_loader(
    rows: Any, rank: int, ranks: int, batch_size: int, *, shuffle: bool = False, seed: int = 0, **settings: Any
) -> DataLoader:
    """A loader of one rank's part of the rows, in as many batches as the other ranks have: empty rows fill it up."""
    padded = PaddedDataset(rows, ranks * batch_size if ranks > 1 else 1)
    sampler: Sampler = DistributedSampler(padded, num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed)
    return DataLoader(padded, batch_size=batch_size, sampler=sampler, **settings)


def is_stream(dataset: Any) -> bool:
    """Whether a dataset has no rows to choose from."""
    return not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset)


def step_sampler(
    trainer: Trainer, units: list[list[int]], costs: npt.NDArray[np.float64] | None, batch_size: int, ranks: int
) -> StepSampler:
    """A [`StepSampler`] with the options of the trainer."""
    args = trainer.args
    return StepSampler(
        units,
        args.gradient_accumulation_steps * ranks * batch_size,
        strategy=args.train_sampling_strategy,
        seed=args.seed if args.data_seed is None else args.data_seed,
        global_step=lambda: trainer.state.global_step,
        costs=costs,
        ranks=ranks,
        batch_size=batch_size,
    )


def length_sampler(trainer: Trainer, dataset: Any, batch_size: int, ranks: int) -> StepSampler | None:
    """
    The sampler of a training on rows with `input_ids` whose lengths matter; `None` leaves the order to Trainer.

    Trainer's samplers for `BY_LENGTH` repeat rows in an uneven last step, or draw from a generator that each rank has
    for itself, so that ranks could read different orders.
    """
    args = trainer.args
    if is_stream(dataset) or args.train_sampling_strategy not in BY_LENGTH or args.dataloader_drop_last:
        return None
    rows = dataset["input_ids"] if hasattr(dataset, "column_names") else (row["input_ids"] for row in dataset)
    # of a group of samples, those of all of them
    lengths = np.array([sum(map(len, ids)) if np.ndim(ids[:1]) > 1 else len(ids) for ids in rows], dtype=np.float64)
    return step_sampler(trainer, [[row] for row in range(len(lengths))], lengths, batch_size, ranks)


class PassCounter(TrainerCallback):
    """
    Counts the passes over the dataset. `state.epoch` would do, but for a stream without a length it still names the
    last pass when the next one begins, and a resumed training begins in the middle of one.
    """

    epoch = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.epoch = -1

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epoch = max(int(state.epoch or 0), self.epoch + 1)


# Fills an uneven last step: a row without tokens weighs nothing.
PADDING_FEATURE: dict[str, list[int]] = {"input_ids": []}
