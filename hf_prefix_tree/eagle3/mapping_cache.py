# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The draft vocabulary on disk: written atomically, fingerprinted, validated in full before it is used.

One file, read by rank 0 alone. Its verdict goes to all ranks before the ids do, so that loading or building is one
decision: whatever is wrong with the file, no rank waits in a collective that another one skips.

Cost: a hit reads the file, and the data's ids once where nothing cheaper tells one data set from another.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from hf_prefix_tree.eagle3.token_mapping import (
    build_token_mapping,
    collective_device,
    draft_size,
    is_distributed,
    t2d_from_ids,
    undisturbed_randomness,
)
from hf_prefix_tree.trainers.padding import PaddedDataset

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


def save_token_mapping(
    path: str | os.PathLike[str], ids: torch.Tensor, target_vocab_size: int, fingerprint: str | None = None
) -> None:
    """
    Write a draft vocabulary. A reader sees the whole file or the one before it, never a part.

    Args:
        path (`str` or `os.PathLike`): The file. Missing folders are created.
        ids (`torch.Tensor` of shape `(draft_vocab_size,)`, int64): The draft vocabulary, ascending.
        target_vocab_size (`int`): Size of the target's vocabulary.
        fingerprint (`str`, *optional*): What the mapping was built from, see [`mapping_fingerprint`].

    Raises:
        `ValueError`: If the ids are no draft vocabulary of that target.
    """
    problem = _problem_of_ids(ids, target_vocab_size, len(ids) if ids.dim() else 0)
    if problem is not None:
        raise ValueError(f"`ids` can't be saved: {problem}. Pass what `build_token_mapping` returned.")
    path = os.path.abspath(path)
    folder = os.path.dirname(path)
    os.makedirs(folder, exist_ok=True)
    ids = ids.detach().cpu().clone()
    data = {
        "selected_token_ids": ids,
        "target_vocab_size": int(target_vocab_size),
        "fingerprint": fingerprint,
        "checksum": _checksum(ids),
    }
    # In the same folder, because `os.replace` is atomic only within one file system.
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".token_mapping-", delete=False) as file:
        try:
            torch.save(data, file)
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


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
        fingerprint (`str`, *optional*): What it must have been built from. `None` takes any.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`, *optional*: ids and mask as [`build_token_mapping`] returns them. `None`
        where the file is missing, unreadable or incompatible; a warning says why, except where it is missing.
    """
    ids, problem = _read(path, target_vocab_size, draft_size(target_vocab_size, draft_vocab_size), fingerprint)
    if ids is None:
        if problem is not None:
            logger.warning("The token mapping %s is not used: %s.", os.fspath(path), problem)
        return None
    return ids, t2d_from_ids(ids, target_vocab_size)


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

    A hit draws no random number and leaves the loader unread, so that it does not change later shuffles. A file that
    is broken, or that was built from other data, another tokenizer or other special tokens, is rebuilt with a warning
    on every rank; so is any file where the data can't be told from other data (a stream without a `fingerprint`).
    Every rank must call it.

    Args:
        dataloader, target_vocab_size, draft_vocab_size, special_token_ids:
            See [`build_token_mapping`].
        cache_path (`str` or `os.PathLike`, *optional*):
            The file. `None` only builds.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer of the data: its vocabulary and chat template go into the fingerprint.
        fingerprint (`str`, *optional*):
            Name of the data, where reading it to compute one is too slow or not possible (streams).

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: see [`build_token_mapping`].
    """
    special = None if special_token_ids is None else list(special_token_ids)
    size = draft_size(target_vocab_size, draft_vocab_size)
    if cache_path is None or size == target_vocab_size:
        return build_token_mapping(
            dataloader,
            target_vocab_size=target_vocab_size,
            draft_vocab_size=draft_vocab_size,
            special_token_ids=special,
        )
    key = mapping_fingerprint(dataloader, tokenizer=tokenizer, special_token_ids=special, data=fingerprint)
    is_main = not is_distributed() or dist.get_rank() == 0
    ids, problem = _read(cache_path, target_vocab_size, size, key) if is_main else (None, None)
    if key is None and ids is not None:
        ids, problem = None, "the data can't be told from other data (pass `fingerprint`, a name for it)"
    ids, problem = _broadcast_verdict(ids, problem, size)
    if ids is not None:
        if is_main:
            logger.info("Draft vocabulary: %d tokens, from %s.", len(ids), os.fspath(cache_path))
        return ids, t2d_from_ids(ids, target_vocab_size)
    if problem is not None:
        logger.warning("The token mapping %s is built again: %s.", os.fspath(cache_path), problem)
    ids, mask = build_token_mapping(
        dataloader, target_vocab_size=target_vocab_size, draft_vocab_size=draft_vocab_size, special_token_ids=special
    )
    if is_main:
        try:
            save_token_mapping(cache_path, ids, target_vocab_size, key)
        except (OSError, RuntimeError) as error:  # the mapping is right; only the next start has to build it again
            logger.warning("The token mapping could not be written to %s: %s.", os.fspath(cache_path), error)
    return ids, mask


def mapping_fingerprint(
    dataloader: object,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    special_token_ids: Iterable[int | None] | None = None,
    data: str | None = None,
) -> str | None:
    """
    What a mapping is built from, as a hash: data, tokenizer, special tokens. Equal on all ranks; each must call it.
    `None` where the data of some rank can't be told from other data.

    Args:
        dataloader: The loader. Its `dataset` is known by the fingerprint that `datasets` gives it, or by its rows.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): The tokenizer of the data.
        special_token_ids (iterable of `int`, *optional*): See [`build_token_mapping`].
        data (`str`, *optional*): Stands for the data instead.
    """
    if data is None:
        data = data_fingerprint(getattr(dataloader, "dataset", dataloader))
        if is_distributed():
            # Ranks that hold different parts of the data have different ones.
            gathered: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, data)
            data = None if None in gathered else "+".join(str(own) for own in dict.fromkeys(gathered))
    if data is None:
        return None
    digest = hashlib.sha256()
    parts = [data, repr([None if i is None else int(i) for i in special_token_ids or ()])]
    if tokenizer is not None:
        parts += [repr(sorted(tokenizer.get_vocab().items())), repr(tokenizer.chat_template)]
    for part in parts:
        digest.update(f"{len(part)}:{part}".encode(errors="surrogatepass"))
    return digest.hexdigest()


def data_fingerprint(source: object) -> str | None:
    """
    A hash that tells one data set from another: the one that `datasets` keeps, or that of the rows themselves.

    Args:
        source: A dataset or a sequence of rows or batches. Anything else gives `None`: it would have to be read.
    """
    if isinstance(source, PaddedDataset):  # how many rows fill it up depends on the number of ranks
        return data_fingerprint(source.dataset)
    known = getattr(source, "_fingerprint", None)
    if isinstance(known, str):
        return known
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        return None
    digest = hashlib.sha256()
    with undisturbed_randomness():
        for index in range(len(source)):
            row = source[index]
            for name, value in sorted(row.items()) if isinstance(row, Mapping) else [("row", row)]:
                own = _bytes_of(value)
                digest.update(f"{name}:{len(own)}:".encode() + own)
    return digest.hexdigest()


def _bytes_of(value: Any) -> bytes:
    """The content of a row's entry, whether its numbers are in a list, an array or a tensor."""
    try:
        numbers = np.asarray(value)
    except (TypeError, ValueError):  # lists of different lengths
        return repr(value).encode(errors="surrogatepass")
    if numbers.dtype.kind not in "biuf":
        return repr(value).encode(errors="surrogatepass")
    whole = numbers.astype(np.float64 if numbers.dtype.kind == "f" else np.int64)
    return f"{whole.dtype}{whole.shape}".encode() + whole.tobytes()


def _read(
    path: str | os.PathLike[str], target_vocab_size: int, size: int, fingerprint: str | None
) -> tuple[torch.Tensor | None, str | None]:
    """The ids of a file, or what is wrong with it; neither where there is none."""
    if not os.path.lexists(path):
        return None, None
    if not os.path.isfile(path):  # opening a pipe would wait for somebody to write
        return None, "it is no regular file"
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        return _checked(data, target_vocab_size, size, fingerprint)
    except Exception as error:  # whatever is found in a broken or foreign file: other ranks wait for the verdict
        return None, f"it can't be read ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"


def _checked(
    data: Any, target_vocab_size: int, size: int, fingerprint: str | None
) -> tuple[torch.Tensor | None, str | None]:
    if not isinstance(data, dict) or not isinstance(data.get("selected_token_ids"), torch.Tensor):
        return None, "it holds no `selected_token_ids`"
    if data.get("target_vocab_size") != target_vocab_size:
        return None, f"`target_vocab_size` is {data.get('target_vocab_size')!r} there and {target_vocab_size} here"
    ids = data["selected_token_ids"]
    problem = _problem_of_ids(ids, target_vocab_size, size)
    if problem is None and data.get("checksum") != _checksum(ids):
        problem = "the ids don't match their checksum"
    if problem is None and fingerprint is not None and data.get("fingerprint") != fingerprint:
        problem = "it was built from other data, another tokenizer or other special tokens"
    return (None, problem) if problem is not None else (ids, None)


def _checksum(ids: torch.Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()


def _problem_of_ids(ids: torch.Tensor, target_vocab_size: int, size: int) -> str | None:
    if ids.dtype != torch.int64 or ids.layout != torch.strided or ids.is_quantized:
        return f"the ids are {ids.dtype} ({ids.layout}), not int64"
    if ids.dim() != 1 or len(ids) != size:
        return f"the ids have the shape {tuple(ids.shape)}, not ({size},)"
    if size and not (int(ids.min()) >= 0 and int(ids.max()) < target_vocab_size):
        return f"the ids range from {int(ids.min())} to {int(ids.max())}, outside of 0 to {target_vocab_size - 1}"
    if not bool((ids.diff() > 0).all()):
        return "the ids are not ascending without repetition"
    return None


def _broadcast_verdict(
    ids: torch.Tensor | None, problem: str | None, size: int
) -> tuple[torch.Tensor | None, str | None]:
    """Rank 0's verdict, then its ids, on every rank."""
    if not is_distributed():
        return ids, problem
    device = collective_device()
    verdict: list[Any] = [(ids is not None, problem)]
    dist.broadcast_object_list(verdict, src=0, device=device)
    found, problem = verdict[0]
    if not found:
        return None, problem
    payload = torch.empty(size, dtype=torch.int64, device=device) if ids is None else ids.to(device)
    dist.broadcast(payload, src=0)
    return payload.cpu(), None
