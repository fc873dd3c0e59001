# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`StepSampler`]: what an optimizer step holds, and which rank reads it. Parts of one split tree stay in one step.

The parts add up to the whole tree's gradient only where one divisor holds for all of them, and that is a step's.

Cost: O(n log n) once, O(n) an epoch, for n rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset, Sampler

from hf_prefix_tree.packing import pack_rows
from hf_prefix_tree.trainers.balance import deal

if TYPE_CHECKING:
    from transformers import Trainer

# Values of `train_sampling_strategy` for which Trainer needs the length of every row.
BY_LENGTH = ("group_by_length", "batch_rebalance")
STRATEGIES = ("random", "sequential", *BY_LENGTH)  # those laid out here
_WINDOW = 50  # most steps whose rows are sorted by cost together, as many as Transformers takes for `group_by_length`


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
    parents = list(range(len(tree_ids)))

    def root(row: int) -> int:
        while parents[row] != row:
            parents[row] = parents[parents[row]]
            row = parents[row]
        return row

    first: dict[int, int] = {}
    for row, ids in enumerate(tree_ids):
        for tree_id in ids:
            one, other = sorted((root(first.setdefault(tree_id, row)), root(row)))
            parents[other] = one
    units: dict[int, list[int]] = {}
    for row in range(len(tree_ids)):
        units.setdefault(root(row), []).append(row)
    return list(units.values())


def split_tree_ids(tree_ids: Sequence[Sequence[int]], num_parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """
    The ids of split trees alone, checked: all parts of each are there.

    Args:
        tree_ids (sequence of sequences of `int`): The ids of each row's trees.
        num_parts (sequence of sequences of `int`): For each of them, the parts that its tree has in all rows.

    Returns:
        `list` of `list` of `int`: for each row, the ids of those with several parts.

    Raises:
        `ValueError`: If a tree's parts are not all there. (A dataset may hold a tree several times.)

    Example:

    ```python
    >>> split_tree_ids([[7, 8], [9], [8]], [[1, 2], [1], [2]])
    [[8], [], [8]]

    ```
    """
    split = [
        [(tree_id, parts) for tree_id, parts in zip(ids, numbers, strict=True) if parts > 1]
        for ids, numbers in zip(tree_ids, num_parts, strict=True)
    ]
    found = Counter(key for row in split for key in row)
    torn = [(tree_id, parts, count) for (tree_id, parts), count in found.items() if count % parts]
    if torn:
        tree_id, parts, count = torn[0]
        raise ValueError(
            f"`train_dataset`: rows with parts of a split tree are missing: tree {tree_id} has {parts} parts, of "
            f"which {count} are there; {len(torn)} trees are like that. Select before the trees are packed "
            "(`max_examples`), or keep all rows that have a `tree_ids` entry in common."
        )
    return [[tree_id for tree_id, _ in row] for row in split]


class StepSampler(Sampler[int]):
    """
    Yields blocks of indices, one block per optimizer step, and never cuts a unit in two.

    What a block has room for and no unit fills are indices one past the rows, which stand for empty rows. Which sizes
    go together is settled once, by best fit, so every epoch has the same number of steps; which units those are and
    where the blocks come is drawn anew each epoch. Steps do not depend on the number of ranks, given their rows.

    Args:
        units (`list` of `list` of `int`):
            What [`linked_rows`] returned.
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
            Cost of each row. With them, the rows of a step are dealt to the ranks by [`deal`].
        ranks, batch_size (`int`, *optional*, defaults to 1):
            Ranks that read different rows, and rows of a batch.

    Raises:
        `ValueError`: If a unit is larger than a block.
    """

    def __init__(
        self,
        units: list[list[int]],
        block_size: int,
        *,
        strategy: str,
        seed: int,
        global_step: Callable[[], int],
        costs: npt.NDArray[np.float64] | None = None,
        ranks: int = 1,
        batch_size: int = 1,
    ) -> None:
        sizes = np.array([len(unit) for unit in units])
        if sizes.max() > block_size:
            raise ValueError(
                f"{sizes.max()} rows hold parts of the same split trees and must be in one optimizer step, which has "
                f"{block_size} (`gradient_accumulation_steps` x processes x `per_device_train_batch_size`). Raise "
                "`gradient_accumulation_steps`, or raise `max_packed_tokens`, so that trees have fewer parts."
            )
        self.units, self.block_size, self.strategy, self.seed = units, block_size, strategy, seed
        self.global_step, self.ranks, self.batch_size = global_step, ranks, batch_size
        self.padding_index = int(sizes.sum())
        self.unit_sizes = sizes
        self.costs = None if costs is None else np.append(costs, 0.0)  # an empty row costs nothing
        self.unit_costs = None if costs is None else np.array([costs[unit].mean() for unit in units])
        in_order = strategy == "sequential"
        self.blocks = _in_order(sizes.tolist(), block_size) if in_order else pack_rows(sizes, block_size)

    def __len__(self) -> int:
        return len(self.blocks) * self.block_size

    def __iter__(self) -> Iterator[int]:
        for block in self.blocks if self.strategy == "sequential" else self._drawn_blocks():
            rows = [row for unit in block for row in self.units[unit]]
            rows += [self.padding_index] * (self.block_size - len(rows))
            if self.costs is not None:
                rows = np.array(rows)[deal(self.costs[rows], self.ranks, self.batch_size)].tolist()
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
        if self.strategy != "group_by_length" or self.unit_costs is None:
            return units
        window = min(_WINDOW, max(2, len(self.blocks) // 4)) * self.block_size
        cuts = [units[start : start + window] for start in range(0, len(units), window)]
        return np.concatenate([cut[np.argsort(-self.unit_costs[cut], kind="stable")] for cut in cuts])


def length_sampler(trainer: Trainer, dataset: Any, batch_size: int, ranks: int) -> StepSampler | None:
    """
    The sampler of a training on rows with `input_ids` whose lengths matter; `None` where Trainer's own serves.

    Trainer's samplers for `BY_LENGTH` repeat rows in an uneven last step, or draw from a generator that each rank has
    for itself, so that ranks could read different orders.

    Args:
        trainer (`Trainer`): The trainer.
        dataset (`Dataset` or list of `dict`): Its training dataset.
        batch_size (`int`): Rows of a batch.
        ranks (`int`): Ranks that read different rows.
    """
    args = trainer.args
    is_stream = not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset)
    if is_stream or args.train_sampling_strategy not in BY_LENGTH or args.dataloader_drop_last:
        return None
    rows = dataset["input_ids"] if hasattr(dataset, "column_names") else (row["input_ids"] for row in dataset)
    lengths = np.array([len(ids) for ids in rows], dtype=np.float64)
    return StepSampler(
        [[row] for row in range(len(lengths))],
        args.gradient_accumulation_steps * ranks * batch_size,
        strategy=args.train_sampling_strategy,
        seed=args.seed if args.data_seed is None else args.data_seed,
        global_step=lambda: trainer.state.global_step,
        costs=lengths,
        ranks=ranks,
        batch_size=batch_size,
    )


def _in_order(sizes: list[int], block_size: int) -> list[list[int]]:
    blocks: list[list[int]] = []
    room = 0
    for unit, size in enumerate(sizes):
        if size > room:
            blocks.append([])
            room = block_size
        blocks[-1].append(unit)
        room -= size
    return blocks
