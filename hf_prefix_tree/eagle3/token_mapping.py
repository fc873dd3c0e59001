# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The draft vocabulary: which target tokens an EAGLE-3 head can propose, and the tensors that serving engines read.

The special tokens come first, then the tokens that the data supervises most often (ties to the smaller id), then
unused ids from 0 up, until the size is reached. The ids are returned ascending: `d2t` and `t2d` then describe the same
order, and engines that slice by `t2d` agree with those that add `d2t`.

Cost: one pass over the data, a bincount of the target vocabulary per batch, one all-reduce.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hf_prefix_tree.batch import IGNORE_INDEX

logger = logging.getLogger(__name__)


def build_token_mapping(
    dataloader: Iterable[Mapping[str, Any]],
    *,
    target_vocab_size: int,
    draft_vocab_size: int | None,
    special_token_ids: Iterable[int | None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Choose the draft vocabulary from the supervised tokens of the data.

    Counts are summed over the ranks of the default process group (gloo or NCCL), so every rank returns the same
    mapping. Ranks read disjoint parts of the data; what a [`~torch.utils.data.DistributedSampler`] repeats to fill an
    uneven last batch is not counted twice. The random state of the process is the same afterwards.

    Args:
        dataloader (iterable of `Mapping`):
            Batches with `input_ids` and `loss_mask` of the same shape (unshifted; not 0 where supervised), or with
            `labels` (-100 where not supervised). Ids outside of the target vocabulary are not counted.
        target_vocab_size (`int`):
            Size of the target's vocabulary, Vt.
        draft_vocab_size (`int`, *optional*):
            Size of the draft's vocabulary. `None`, or at least Vt, gives the identity, and nothing is read.
        special_token_ids (iterable of `int`, *optional*):
            Tokens that are in the draft vocabulary in any case, the first ones first where they don't all fit. `None`
            among them, repeated ones and those out of range are skipped.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the chosen ids, ascending (int64 of shape `(draft_vocab_size,)`), and
        which target tokens they are (bool of shape `(target_vocab_size,)`).

    Raises:
        `ValueError`: If a size is no positive integer, or a batch lacks a key or its shapes differ.

    Example:

    ```python
    >>> batch = {"input_ids": [[1, 5, 9, 9, 3, 0]], "loss_mask": [[0, 1, 1, 1, 1, 0]]}
    >>> ids, mask = build_token_mapping([batch], target_vocab_size=12, draft_vocab_size=4, special_token_ids=[0])
    >>> ids
    tensor([0, 3, 5, 9])

    ```
    """
    size = draft_size(target_vocab_size, draft_vocab_size)
    if size == target_vocab_size:
        return torch.arange(target_vocab_size), torch.ones(target_vocab_size, dtype=torch.bool)
    counts = _summed_over_ranks(count_supervised(dataloader, target_vocab_size))
    ids = select_ids(counts, size, special_token_ids)
    total = int(counts.sum())
    if total == 0:
        logger.warning("The data supervises no token of the target vocabulary: the draft vocabulary is arbitrary.")
    elif _rank() == 0:
        what, share = (size, len(counts)), 100 * int(counts[ids].sum()) / total
        logger.info("Draft vocabulary: %d of %d tokens cover %.2f%% of %d supervised tokens.", *what, share, total)
    return ids, t2d_from_ids(ids, target_vocab_size)


def draft_size(target_vocab_size: int, draft_vocab_size: int | None) -> int:
    """Number of ids in the draft vocabulary: `draft_vocab_size`, or the target's size where that is `None` or less."""
    sizes = {"target_vocab_size": target_vocab_size, "draft_vocab_size": draft_vocab_size}
    for name, value in sizes.items():
        if value is None and name == "draft_vocab_size":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"`{name}` must be a positive integer, got {value!r}.")
    return target_vocab_size if draft_vocab_size is None else min(draft_vocab_size, target_vocab_size)


def select_ids(
    counts: torch.Tensor, draft_vocab_size: int, special_token_ids: Iterable[int | None] | None
) -> torch.Tensor:
    """The ids of a draft vocabulary, ascending, for how often each token of the target is supervised (int64)."""
    special = [int(i) for i in special_token_ids or () if i is not None and 0 <= i < len(counts)]
    # Unused ids have count 0 and are already in ascending order: a stable sort puts them last and keeps that order.
    by_count = torch.argsort(counts, descending=True, stable=True).tolist()
    chosen = list(dict.fromkeys([*special, *by_count]))[:draft_vocab_size]
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def count_supervised(dataloader: Iterable[Mapping[str, Any]], target_vocab_size: int) -> torch.Tensor:
    """How often the batches of this rank supervise each token, int64 of shape `(target_vocab_size,)`."""
    from transformers.utils import logging as transformers_logging

    counts = torch.zeros(target_vocab_size, dtype=torch.int64)
    rows_left = _own_rows(dataloader)
    with undisturbed_randomness(dataloader):
        for batch in transformers_logging.tqdm(dataloader, desc="Counting tokens", disable=_rank() != 0):
            ids, supervised = _ids_and_mask(batch)
            if rows_left is not None:
                ids, supervised = ids[:rows_left], supervised[:rows_left]
                rows_left -= len(ids)
            ids = ids[supervised & (ids >= 0) & (ids < target_vocab_size)]
            counts += torch.bincount(ids.cpu(), minlength=target_vocab_size)
    return counts


def d2t_from_ids(ids: torch.Tensor) -> torch.Tensor:
    """
    Engines' `d2t`: what to add to a draft id to get its target id.

    Args:
        ids (`torch.Tensor` of shape `(draft_vocab_size,)`, int64): The draft vocabulary, ascending.

    Example:

    ```python
    >>> import torch
    >>> d2t_from_ids(torch.tensor([0, 3, 5, 9]))
    tensor([0, 2, 3, 6])

    ```
    """
    return ids - torch.arange(len(ids), dtype=ids.dtype, device=ids.device)


def ids_from_d2t(d2t: torch.Tensor) -> torch.Tensor:
    """The target ids of the draft vocabulary, the inverse of [`d2t_from_ids`]."""
    return d2t + torch.arange(len(d2t), dtype=d2t.dtype, device=d2t.device)


def t2d_from_ids(ids: torch.Tensor, target_vocab_size: int) -> torch.Tensor:
    """Engines' `t2d`: which target tokens are in the draft vocabulary, bool of shape `(target_vocab_size,)`."""
    mask = torch.zeros(target_vocab_size, dtype=torch.bool, device=ids.device)
    mask[ids] = True
    return mask


def collective_device() -> torch.device:
    """Where tensors of the default group's collectives must be: NCCL takes only those on the GPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_distributed() -> bool:
    """Whether several processes take part."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextlib.contextmanager
def undisturbed_randomness(dataloader: object = None) -> Iterator[None]:
    """Reading a loader draws seeds from the global generator, or from its own: both are put back afterwards."""
    own = [getattr(dataloader, "generator", None), getattr(getattr(dataloader, "sampler", None), "generator", None)]
    generators = [g for g in own if isinstance(g, torch.Generator)]
    states = [g.get_state() for g in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _ids_and_mask(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    name = "loss_mask" if "loss_mask" in batch else "labels"
    if "input_ids" not in batch or name not in batch:
        raise ValueError(
            f"`dataloader` gives batches with the keys {sorted(batch)}, but `input_ids` and `loss_mask` are needed: "
            "collate them with `DataCollatorForEagle3`."
        )
    ids, mask = torch.as_tensor(batch["input_ids"]), torch.as_tensor(batch[name])
    if ids.shape != mask.shape:
        raise ValueError(
            f"`dataloader` gives `input_ids` of shape {tuple(ids.shape)} and `{name}` of shape {tuple(mask.shape)}: "
            "they must be equal."
        )
    return ids.long(), (mask != IGNORE_INDEX) if name == "labels" else (mask != 0)


def _own_rows(dataloader: object) -> int | None:
    """How many rows of this rank are not repeats that a `DistributedSampler` fills up with; `None` for all."""
    sampler = getattr(dataloader, "sampler", None)
    if not isinstance(sampler, torch.utils.data.DistributedSampler) or sampler.drop_last:
        return None
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _summed_over_ranks(counts: torch.Tensor) -> torch.Tensor:
    if is_distributed():
        counts = counts.to(collective_device())
        dist.all_reduce(counts)
    return counts.cpu()
