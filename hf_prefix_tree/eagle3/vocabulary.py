# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The draft vocabulary: which target tokens a draft head can propose.

In order: the choice from the data, the tensors that engines read, the file that keeps the choice, the fingerprint of
the data that the file was built from, and files of tensors with a checksum.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import tqdm

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.data.trees import write_files
from hf_prefix_tree.training.sampling import PaddedDataset
from hf_prefix_tree.tree.folding import check_integer

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
    mapping. Ranks read disjoint parts of the data; dataset rows that a [`~torch.utils.data.DistributedSampler`]
    repeats, to fill an uneven last batch, are not counted twice. The random state of the process is the same
    afterwards.

    Args:
        dataloader (iterable of `Mapping`):
            Batches with `input_ids` and `loss_mask` of the same shape (unshifted; not 0 where supervised, and of trees
            the number of branches that supervise the token), or with `labels` (-100 where not supervised). Ids outside
            of the target vocabulary are not counted.
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
        `ValueError`: If a size is no positive integer, a batch lacks a key or its shapes differ, or several trees are
            in a sequence of a loader that repeats some.

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
    special = [int(i) for i in special_token_ids or () if i is not None and 0 <= i < target_vocab_size]
    # Unused ids have count 0 and are already in ascending order: a stable sort puts them last and keeps that order.
    by_count = torch.argsort(counts, descending=True, stable=True).tolist()
    ids = torch.tensor(sorted(list(dict.fromkeys([*special, *by_count]))[:size]))
    total = int(counts.sum())
    if total == 0:
        logger.warning("The data supervises no token of the target vocabulary: the draft vocabulary is arbitrary.")
    elif rank_and_size()[0] == 0:
        message = "Draft vocabulary: %d of %d tokens cover %.2f%% of %d supervised tokens."
        logger.info(message, size, target_vocab_size, 100 * int(counts[ids].sum()) / total, total)
    return ids, t2d_from_ids(ids, target_vocab_size)


def draft_size(target_vocab_size: int, draft_vocab_size: int | None) -> int:
    """Number of ids in the draft vocabulary: `draft_vocab_size`, or the target's size where that is `None` or less."""
    target_vocab_size = check_integer(target_vocab_size, "target_vocab_size", 1)
    if draft_vocab_size is None:
        return target_vocab_size
    return min(check_integer(draft_vocab_size, "draft_vocab_size", 1), target_vocab_size)


def count_supervised(dataloader: Iterable[Mapping[str, Any]], target_vocab_size: int) -> torch.Tensor:
    """How often the batches of this rank supervise each token, int64 of shape `(target_vocab_size,)`."""
    counts = torch.zeros(target_vocab_size, dtype=torch.int64)
    sampler, left = getattr(dataloader, "sampler", None), None  # dataset rows that are left, if not all are read
    if isinstance(sampler, torch.utils.data.DistributedSampler) and sampler.total_size > len(sampler.dataset):  # type: ignore[arg-type]
        # without those that the sampler repeats to fill a batch
        left = len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]
    with undisturbed_randomness(dataloader):
        for batch in tqdm(dataloader, desc="Counting tokens", disable=rank_and_size()[0] != 0):
            if left is not None and "prefix_tree" in batch and getattr(dataloader, "batch_size", None) != 1:
                raise ValueError(
                    "`dataloader` repeats dataset rows to fill an uneven batch, and a sequence of several trees does "
                    "not tell which; pass `batch_size=1`."
                )
            ids, times = (values[:left].cpu() for values in _ids_and_times(batch))
            left = None if left is None else left - len(ids)
            is_known = (ids >= 0) & (ids < target_vocab_size)
            counts.index_add_(0, ids[is_known], times[is_known])
    return counts


def _ids_and_times(batch: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    name = "loss_mask" if "loss_mask" in batch else "labels"
    values = [torch.as_tensor(batch[key]) for key in ("input_ids", name) if key in batch]
    if len(values) < 2 or values[0].shape != values[1].shape:
        raise ValueError(
            f"`dataloader` yields batches with the keys {sorted(batch)}, but `input_ids` and `loss_mask` of one shape "
            f"are needed, got the shapes {[tuple(value.shape) for value in values]}: collate them with "
            "`DataCollatorForEagle3`."
        )
    ids, mask = values
    if "prefix_tree" in batch:
        return ids.long(), mask.long()
    return ids.long(), (mask != (IGNORE_INDEX if name == "labels" else 0)).long()


def _summed_over_ranks(counts: torch.Tensor) -> torch.Tensor:
    if rank_and_size()[1] > 1:
        counts = counts.to(collective_device())
        dist.all_reduce(counts)
    return counts.cpu()


def rank_and_size() -> tuple[int, int]:
    """Rank of this process in the default group, and the processes of the group: 0 and 1 without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def collective_device() -> torch.device:
    """The device of tensors in collectives of the default group: NCCL takes only tensors of the GPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


@contextlib.contextmanager
def undisturbed_randomness(dataloader: object = None) -> Iterator[None]:
    """Restores the global random states and those of a loader, which draws seeds from either when it is read."""
    loaders = (dataloader, getattr(dataloader, "sampler", None))
    generators = [g for g in (getattr(x, "generator", None) for x in loaders) if isinstance(g, torch.Generator)]
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


def d2t_from_ids(ids: torch.Tensor) -> torch.Tensor:
    """
    Engines' `d2t`: the difference between each target id and its draft id.

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


def save_token_mapping(
    path: str | os.PathLike[str], ids: torch.Tensor, target_vocab_size: int, fingerprint: str | None = None
) -> None:
    """
    Write a draft vocabulary. A reader sees the whole file or the one before it, never a part.

    Args:
        path (`str` or `os.PathLike`): The file. Missing folders are created.
        ids (`torch.Tensor` of shape `(draft_vocab_size,)`, int64): The draft vocabulary, ascending.
        target_vocab_size (`int`): Size of the target's vocabulary.
        fingerprint (`str`, *optional*): A hash of the inputs of the mapping.

    Raises:
        `ValueError`: If the ids are no draft vocabulary of that target.
    """
    if problem := problem_of_ids(ids, target_vocab_size, len(ids) if ids.dim() else 0):
        raise ValueError(f"`ids` can't be saved: {problem}. Pass the ids that `build_token_mapping` returned.")
    metadata = {"target_vocab_size": str(target_vocab_size)}
    metadata |= {} if fingerprint is None else {"fingerprint": fingerprint}
    write_tensors(path, {"selected_token_ids": ids}, metadata)


def load_token_mapping(
    path: str | os.PathLike[str],
    *,
    target_vocab_size: int,
    draft_vocab_size: int | None,
    fingerprint: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """
    Read a draft vocabulary, if the file holds the one that is asked for.

    Args:
        path (`str` or `os.PathLike`): The file.
        target_vocab_size (`int`): Size of the target's vocabulary.
        draft_vocab_size (`int`, *optional*): See [`build_token_mapping`].
        fingerprint (`str`, *optional*): The hash that the file must have. `None` takes any.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`, *optional*: ids and mask as [`build_token_mapping`] returns them. `None`
        where the file is missing, unreadable or incompatible; a warning says why, except where it is missing.
    """
    ids, problem = _read(path, target_vocab_size, draft_size(target_vocab_size, draft_vocab_size), fingerprint)
    if problem is not None:
        logger.warning("The token mapping %s is not used: %s.", os.fspath(path), problem)
    return None if ids is None else (ids, t2d_from_ids(ids, target_vocab_size))


def load_or_build_token_mapping(
    dataloader: Iterable[Mapping[str, Any]],
    *,
    target_vocab_size: int,
    draft_vocab_size: int | None,
    special_token_ids: Iterable[int | None] | None = None,
    cache_path: str | os.PathLike[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    fingerprint: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The draft vocabulary from a file, or from the data and then into the file.

    Where the file serves, no random number is drawn and the loader stays unread, so later shuffles do not change. A
    file that is broken, or that was built from other data, another tokenizer or other special tokens, is rebuilt with
    a warning on every rank; so is any file where the data can't be told from other data (a stream without a
    `fingerprint`). Every rank must call it.

    Args:
        dataloader, target_vocab_size, draft_vocab_size, special_token_ids: See [`build_token_mapping`].
        cache_path (`str` or `os.PathLike`, *optional*): The file. `None` only builds.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Its vocabulary and chat template go into the fingerprint.
        fingerprint (`str`, *optional*): Name of the data, where reading the data is slow or impossible (streams).

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: see [`build_token_mapping`].
    """
    special = list(special_token_ids or ())
    size = draft_size(target_vocab_size, draft_vocab_size)
    sizes = {"target_vocab_size": target_vocab_size, "draft_vocab_size": size}
    if cache_path is None or size == target_vocab_size:
        return build_token_mapping(dataloader, **sizes, special_token_ids=special)
    key = mapping_fingerprint(dataloader, tokenizer, special, fingerprint)
    rank, num_ranks = rank_and_size()
    verdict = [_read(cache_path, target_vocab_size, size, key) if rank == 0 else (None, None)]
    if num_ranks > 1:
        dist.broadcast_object_list(verdict, src=0, device=collective_device())
    ids, problem = verdict[0]
    if ids is not None and key is not None:
        if rank == 0:
            logger.info("Draft vocabulary: %d tokens, from %s.", len(ids), os.fspath(cache_path))
        return ids, t2d_from_ids(ids, target_vocab_size)
    if ids is not None:
        problem = "the data can't be told from other data (pass `fingerprint`, a name for it)"
    if problem is not None:
        logger.warning("The token mapping %s is built again: %s.", os.fspath(cache_path), problem)
    ids, mask = build_token_mapping(dataloader, **sizes, special_token_ids=special)
    if rank == 0:
        try:
            save_token_mapping(cache_path, ids, target_vocab_size, key)
        except OSError as error:  # the mapping is right; only the next start has to build it again
            logger.warning("The token mapping could not be written to %s: %s.", os.fspath(cache_path), error)
    return ids, mask


def mapping_fingerprint(
    dataloader: object,
    tokenizer: PreTrainedTokenizerBase | None,
    special_token_ids: list[int | None],
    data: str | None,
) -> str | None:
    """
    A hash of the inputs of a mapping: the data (or `data`, its name), the tokenizer and the special tokens. Equal on
    all ranks; each must call it. `None` where the data of some rank can't be told from other data.
    """
    parts = [data]
    if data is None:
        parts = [data_fingerprint(getattr(dataloader, "dataset", dataloader))]
        if (num_ranks := rank_and_size()[1]) > 1:  # which may hold different parts of the data
            parts = parts * num_ranks
            dist.all_gather_object(parts, parts[0])
    if None in parts:
        return None
    text = None if tokenizer is None else [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return Hasher.hash([list(dict.fromkeys(parts)), special_token_ids, text])


def data_fingerprint(source: object) -> str | None:
    """
    A hash that tells one data set from another: the fingerprint that `datasets` keeps, or a hash of its rows. `None`
    for a stream, which would have to be read.
    """
    if isinstance(source, PaddedDataset):  # the number of its empty rows depends on the number of ranks
        return data_fingerprint(source.dataset)
    known = getattr(source, "_fingerprint", None)
    if isinstance(known, str):
        return known
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        return None
    hasher = Hasher()
    with undisturbed_randomness():
        for index in range(len(source)):
            row = source[index]
            columns = sorted(row.items()) if isinstance(row, Mapping) else [("row", row)]
            hasher.update([(name, _as_array(value)) for name, value in columns])
    return hasher.hexdigest()


def _as_array(value: Any) -> Any:
    """One form for lists, arrays and tensors of the same numbers; lists of different lengths stay as they are."""
    with contextlib.suppress(TypeError, ValueError):
        return np.asarray(value)
    return value


def _read(
    path: str | os.PathLike[str], target_vocab_size: int, size: int, fingerprint: str | None
) -> tuple[torch.Tensor | None, str | None]:
    """The ids of a file, or the problem with it; neither where there is no file."""
    if not os.path.lexists(path):
        return None, None
    try:
        metadata, tensors = read_tensors(path)
        ids = tensors["selected_token_ids"]
    except (ValueError, KeyError) as error:
        return None, str(error)
    if metadata.get("target_vocab_size") != str(target_vocab_size):
        return None, f"`target_vocab_size` is {metadata.get('target_vocab_size')} there and {target_vocab_size} here"
    problem = problem_of_ids(ids, target_vocab_size, size)
    if problem is None and fingerprint is not None and metadata.get("fingerprint") != fingerprint:
        problem = "it was built from other data, another tokenizer or other special tokens"
    return (ids, None) if problem is None else (None, problem)


def problem_of_ids(ids: torch.Tensor, target_vocab_size: int, size: int) -> str | None:
    """Why the ids are no draft vocabulary of this size; `None` if they are one."""
    if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) != size:
        return f"the ids are {ids.dtype} of shape {tuple(ids.shape)}, not int64 of shape ({size},)"
    if size and not (int(ids.min()) >= 0 and int(ids.max()) < target_vocab_size):
        return f"the ids range from {int(ids.min())} to {int(ids.max())}, outside of 0 to {target_vocab_size - 1}"
    if not bool((ids.diff() > 0).all()):
        return "the ids are not ascending without repetition"
    return None


# ---- files of tensors with a checksum ----


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file that [`read_tensors`] can check. A reader sees it whole, or the one before it."""
    write_files({Path(path): serialized(tensors, metadata)})


def serialized(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of a safetensors file, whose metadata also hold a checksum."""
    held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return safetensors.torch.save(held, {**metadata, "checksum": checksum_of(held, metadata)})


def read_tensors(path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """
    The metadata and the tensors of a file of [`write_tensors`].

    Args:
        path (`str` or `os.PathLike`): The file.

    Raises:
        `ValueError`: If it is missing, can't be read, or differs from what was written.
    """
    if not os.path.isfile(path):  # opening a pipe would wait for a writer
        raise ValueError(f"{os.fspath(path)} is no regular file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
            metadata = file.metadata() or {}
    except Exception as error:  # of any kind, from a broken or foreign file
        raise ValueError(f"{os.fspath(path)} can't be read ({type(error).__name__}: {error})") from error
    if metadata.pop("checksum", None) != checksum_of(tensors, metadata):
        raise ValueError(f"{os.fspath(path)} is damaged: its content doesn't match its checksum")
    return metadata, tensors


def checksum_of(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> str:
    """A hash of tensors, their names, and metadata."""
    described = [sorted(metadata.items()), [(name, str(t.dtype), [*t.shape]) for name, t in sorted(tensors.items())]]
    values = [t.contiguous().flatten().view(torch.uint8).numpy() for _, t in sorted(tensors.items())]
    return Hasher.hash_bytes([str(described).encode(), *values])
