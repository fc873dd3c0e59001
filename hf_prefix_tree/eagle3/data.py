# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`build_eagle3_dataloader`]: from conversations or token columns to batches of EAGLE-3 documents."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from datasets import Dataset, Features, List, Value, load_dataset
from datasets import IterableDataset as StreamedDataset
from torch.utils.data import DataLoader, IterableDataset

from hf_prefix_tree.data.counts import CUT, cut_of, kept_of, without_unsupervised
from hf_prefix_tree.data.rows import columns_of, rows_of_batch
from hf_prefix_tree.eagle3.collator import DOCUMENT_KEYS, HIDDEN_STATES, DataCollatorForEagle3
from hf_prefix_tree.eagle3.packing import PACKED_COLUMNS, SampleOptions, documents_of, pack_eagle3_dataset
from hf_prefix_tree.training.sampling import PaddedStream, rank_loader

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedTokenizerBase


def build_eagle3_dataloader(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    batch_size: int = 1,
    seq_length: int = 2048,
    packed_sequence_size: int = 0,
    strategy: str = "next_fit",
    shuffle: bool = True,
    seed: int = 42,
    num_workers: int = 0,
    supervise_reasoning: bool = True,
    reasoning_end: str = "</think>",
    pad_token_id: int | None = None,
    num_proc: int | None = None,
    dp_mesh: DeviceMesh | None = None,
) -> DataLoader:
    """
    A loader of EAGLE-3 rows, packed or padded.

    Every data-parallel rank gets its own rows, and as many as the others: an uneven rest is filled with rows that
    supervise nothing. Shuffling is seeded, by `seed` and the epoch, and uses no global generator: call
    `loader.sampler.set_epoch(epoch)` before each epoch. A stream is read in full by every rank, which keeps its own
    rows, and shuffled in a buffer; there it is `loader.dataset.set_epoch(epoch)`.

    Args:
        dataset (`Dataset`, `IterableDataset`, list of `dict`, or `str`):
            Rows as [`pack_eagle3_dataset`] takes them, already packed rows, or the path of a JSON Lines file of rows.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Renders conversations, and names the padding token.
        batch_size (`int`, *optional*, defaults to `1`):
            Rows of a batch, on each rank.
        seq_length (`int`, *optional*, defaults to `2048`):
            Slots of a padded row; a longer document keeps its head, or is left out if that supervises nothing, and
            both are logged.
        packed_sequence_size (`int`, *optional*, defaults to `0`):
            Slots of a packed row, in place of `seq_length`. `0` pads instead, one document a row.
        strategy (`str`, *optional*, defaults to `"next_fit"`):
            See [`pack_eagle3_dataset`].
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether the rows are shuffled.
        seed (`int`, *optional*, defaults to `42`):
            Seed of the order.
        num_workers (`int`, *optional*, defaults to `0`):
            Worker processes that collate.
        supervise_reasoning (`bool`, *optional*, defaults to `True`):
            Whether reasoning is supervised, in conversations.
        reasoning_end (`str`, *optional*, defaults to `"</think>"`):
            Text that ends the reasoning of a turn.
        pad_token_id (`int`, *optional*):
            Defaults to the tokenizer's padding token, or its end token.
        num_proc (`int`, *optional*):
            Processes that render and pack.
        dp_mesh (`DeviceMesh`, *optional*):
            One-dimensional mesh of the data-parallel ranks: ranks with the same place in it (those of a context-
            parallel group) get the same rows. Without one, the whole world is data-parallel.

    Returns:
        [`~torch.utils.data.DataLoader`]: batches of [`DataCollatorForEagle3`].

    Raises:
        `ValueError`: If an argument is out of range, a row is malformed, or none is left.
    """
    if batch_size < 1 or seq_length < 1 or packed_sequence_size < 0:
        raise ValueError(
            f"`batch_size={batch_size}` and `seq_length={seq_length}` must be at least 1, and "
            f"`packed_sequence_size={packed_sequence_size}` at least 0 (0 pads)."
        )
    if isinstance(dataset, (str, os.PathLike)):
        dataset = load_dataset("json", data_files=os.fspath(dataset), split="train")
    pad = padding_token(tokenizer, pad_token_id)
    rows = prepare_eagle3_rows(
        dataset,
        SampleOptions(tokenizer, supervise_reasoning, reasoning_end),
        seq_length=seq_length,
        packed_sequence_size=packed_sequence_size,
        strategy=strategy,
        pad_token_id=pad,
        num_proc=num_proc,
    )
    rank, ranks = _place(dp_mesh)
    length = packed_sequence_size or seq_length
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": DataCollatorForEagle3(pad, length=length),
        "num_workers": num_workers,
        "pin_memory": torch.cuda.is_available(),
        "generator": torch.Generator().manual_seed(seed),  # seeds of workers: not from the global generator
    }
    if num_workers > 0:
        settings["persistent_workers"] = True
        if torch.cuda.is_initialized():
            settings["multiprocessing_context"] = "forkserver"  # a forked CUDA context aborts the worker
    if isinstance(rows, StreamedDataset):
        rows = rows.shuffle(seed=seed) if shuffle else rows
        return DataLoader(OwnRows(rows, rank, ranks, batch_size) if ranks > 1 else rows, **settings)
    return rank_loader(rows, rank, ranks, shuffle=shuffle, seed=seed, **settings)


def prepare_eagle3_rows(
    dataset: Any,
    options: SampleOptions,
    *,
    seq_length: int,
    packed_sequence_size: int,
    strategy: str,
    pad_token_id: int,
    num_proc: int | None = None,
) -> Any:
    """
    Rows for [`DataCollatorForEagle3`]: packed ones, or documents of at most `seq_length` tokens. How many were cut is
    logged, and those left with no supervised token are left out. Rows that are packed already, or that name their
    precomputed hidden states, stay as they are.

    Args:
        dataset: See [`build_eagle3_dataloader`].
        options ([`SampleOptions`]): How rows become documents.
        seq_length, packed_sequence_size, strategy, pad_token_id, num_proc: See [`build_eagle3_dataloader`].

    Returns:
        A dataset where `dataset` is one, otherwise a list.
    """
    columns = columns_of(dataset)
    if set(columns).issuperset(PACKED_COLUMNS) or HIDDEN_STATES in columns:
        return dataset
    cap = ("packed_sequence_size", packed_sequence_size) if packed_sequence_size else ("seq_length", seq_length)
    if isinstance(dataset, Dataset | StreamedDataset):
        rows = without_unsupervised(_mapped(dataset, options, cap[1], columns, num_proc), cap)
    else:
        documents = _truncated_documents(enumerate(dataset), options, cap[1])
        kept = kept_of([document[CUT] for document in documents], cap)
        rows = [{name: documents[index][name] for name in DOCUMENT_KEYS} for index in kept]
    if not isinstance(rows, StreamedDataset) and not len(rows):
        raise ValueError("`dataset`: no row could be produced, because no sample has a token. Check the data.")
    if packed_sequence_size:
        return pack_eagle3_dataset(rows, packed_sequence_size, pad_token_id, strategy, num_proc=num_proc)
    return rows


def padding_token(tokenizer: PreTrainedTokenizerBase | None, pad_token_id: int | None = None) -> int:
    """The id that pads: `pad_token_id`, the tokenizer's padding token, or its end token."""
    for token_id in (pad_token_id, *((tokenizer.pad_token_id, tokenizer.eos_token_id) if tokenizer else ())):
        if token_id is not None:
            return token_id
    raise ValueError("No padding token: pass `pad_token_id`, or a tokenizer with a `pad_token`.")


class OwnRows(IterableDataset):
    """
    A rank's rows of a stream; every rank gets as many whole batches as the others.

    Args:
        stream: The rows.
        rank, ranks, batch_size (`int`): Of the loader.
    """

    def __init__(self, stream: Any, rank: int, ranks: int, batch_size: int) -> None:
        self.stream, self.rank, self.ranks = PaddedStream(stream, ranks * batch_size), rank, ranks

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return itertools.islice(self.stream, self.rank, None, self.ranks)

    def set_epoch(self, epoch: int) -> None:
        self.stream.set_epoch(epoch)


def _truncated_documents(
    rows: Iterable[tuple[int, Mapping[str, Any]]], options: SampleOptions, length: int
) -> list[dict[str, Any]]:
    return [  # `first=1`: no step of the draft predicts a document's first token
        {"input_ids": ids[:length], "loss_mask": mask[:length], CUT: cut_of(mask, length, first=1)}
        for index, row in rows
        for ids, mask in documents_of(row, options, f"row {index}")
        if len(ids)
    ]


def _mapped(dataset: Any, options: SampleOptions, length: int, columns: list[str], num_proc: int | None) -> Any:
    options = dataclasses.replace(options, features=dict(dataset.features or {}))
    processes = {} if isinstance(dataset, StreamedDataset) else {"num_proc": num_proc, "desc": "Rendering documents"}
    return dataset.map(
        _columns_of_documents,
        batched=True,
        with_indices=True,
        remove_columns=columns,
        fn_kwargs={"options": options, "length": length},
        features=Features({**{name: List(Value("int64")) for name in DOCUMENT_KEYS}, CUT: Value("int64")}),
        **processes,
    )


def _columns_of_documents(
    batch: Mapping[str, Any], indices: list[int], options: SampleOptions, length: int
) -> dict[str, list[Any]]:
    rows = _truncated_documents(zip(indices, rows_of_batch(batch), strict=True), options, length)
    return {name: [row[name] for row in rows] for name in (*DOCUMENT_KEYS, CUT)}


def _place(dp_mesh: DeviceMesh | None) -> tuple[int, int]:
    """Rank and number of ranks along the data-parallel dimension."""
    if dp_mesh is not None:
        if dp_mesh.ndim != 1:
            raise ValueError(
                f"`dp_mesh` has the dimensions {dp_mesh.mesh_dim_names}; pass the data-parallel one alone, for "
                "example `mesh['dp']`."
            )
        return dp_mesh.get_local_rank(), dp_mesh.size()
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
