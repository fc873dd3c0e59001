# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Dataset rows to trees, or to documents (token ids and loss mask), packed; and a loader of documents."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset, Features, List, Value, load_dataset
from datasets import IterableDataset as StreamedDataset
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from hf_prefix_tree.data.baselines import read_branches, read_samples
from hf_prefix_tree.data.counts import TRUNCATION, kept_of, truncation_of, without_unsupervised
from hf_prefix_tree.data.rows import ROW_KINDS, columns_of, rows_of_batch
from hf_prefix_tree.data.trees import TREE_FEATURES, cached_map
from hf_prefix_tree.eagle3.collator import (
    DOCUMENT_KEYS,
    HIDDEN_STATES,
    PACKED_COLUMNS,
    STRATEGIES,
    DataCollatorForEagle3,
    Document,
    eagle3_row,
    read_document,
)
from hf_prefix_tree.eagle3.config import Eagle3Config
from hf_prefix_tree.eagle3.vocabulary import rank_and_size
from hf_prefix_tree.training.checks import padding_token_of
from hf_prefix_tree.training.sampling import PaddedStream, rank_loader
from hf_prefix_tree.tree.folding import check_choice, check_integer
from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import PrefixTree, fold

_PACKED = Features(dict.fromkeys(PACKED_COLUMNS, List(Value("int64"))))
_DOCUMENTS = Features({**dict.fromkeys(DOCUMENT_KEYS, List(Value("int64"))), TRUNCATION: Value("int64")})
_MAX_BATCH = 10_000  # documents of a dataset that are packed together


def pack_eagle3_dataset(
    samples: Any,
    packed_sequence_size: int,
    pad_token_id: int,
    strategy: str = "next_fit",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    supervise_reasoning: bool = True,
    reasoning_end: str = "</think>",
    on_error: str = "raise",
    num_proc: int | None = None,
) -> Any:
    """
    Pack documents into sequences of `packed_sequence_size` positions.

    A document that is longer keeps its head; one without tokens is skipped. Of a `Dataset`, up to 10,000 documents are
    packed together, of a stream 1,000: a packed sequence holds documents of one such part. As a step of a pipeline,
    `dataset.map(pack_eagle3_dataset, batched=True, remove_columns=..., fn_kwargs=...)` packs each batch by itself,
    in several processes or on a stream; `best_fit` gets tighter with a larger `batch_size`.

    Args:
        samples (iterable of `Mapping`, `Mapping` of lists, `Dataset` or `IterableDataset`):
            Token columns (`input_ids` with `loss_mask`, `labels`, `completion_mask` or `assistant_masks`, and maybe
            `attention_mask`), or with a `tokenizer` conversations or texts in any format that [`prepare_trees`] reads:
            each assistant turn is a document, with the context that it was sampled from. A mapping of lists is a
            batch of dataset rows, as `datasets.map` hands over.
        packed_sequence_size (`int`):
            Positions of a packed sequence.
        pad_token_id (`int`):
            Token id of the padding.
        strategy (`str`, *optional*, defaults to `"next_fit"`):
            `"next_fit"` fills a sequence in the order of the source until a document does not fit; `"best_fit"` puts
            the longest documents first, each into the fullest sequence that still takes it.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Renders conversations.
        supervise_reasoning (`bool`, *optional*, defaults to `True`):
            Whether reasoning is supervised, in conversations.
        reasoning_end (`str`, *optional*, defaults to `"</think>"`):
            Text that ends the reasoning of a turn.
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a dataset row that can't be read is an error or is skipped (`"skip"`).
        num_proc (`int`, *optional*):
            Processes, for a `Dataset`.

    Returns:
        Packed sequences of [`~hf_prefix_tree.eagle3.collator.eagle3_row`], in the form of `samples`: a list, a
        dictionary of lists, or a dataset.

    Raises:
        `ValueError`: If no sequence could be produced, an argument is out of range, or a sample is malformed.

    Example:

    ```python
    >>> samples = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8], "loss_mask": [1]}]
    >>> rows = pack_eagle3_dataset(samples, packed_sequence_size=4, pad_token_id=0)
    >>> rows[0]["input_ids"], rows[0]["seq_lens"]
    ([5, 6, 7, 8], [3, 1])

    ```
    """
    check_integer(packed_sequence_size, "packed_sequence_size", 1)
    check_integer(pad_token_id, "pad_token_id")
    check_choice(strategy, "strategy", STRATEGIES)
    settings: dict[str, Any] = {"length": packed_sequence_size, "pad_token_id": pad_token_id, "strategy": strategy}
    options: Any = {"supervise_reasoning": supervise_reasoning, "reasoning_end": reasoning_end, "on_error": on_error}
    if isinstance(samples, Mapping):  # one batch of many: it may be empty
        rows = _packed(enumerate(read_samples(list(rows_of_batch(samples)), tokenizer, **options)), **settings)
        return {name: [row[name] for row in rows] for name in PACKED_COLUMNS}
    samples = samples if isinstance(samples, (Dataset, StreamedDataset, Sequence)) else list(samples)
    samples = read_samples(samples, tokenizer, num_proc=num_proc, **options)
    processes: dict[str, Any] = {}
    if isinstance(samples, Dataset):
        # Documents of different batches share no sequence, so large ones pack tighter; a batch is held as lists.
        size = min(-(-len(samples) // (num_proc or 1)), _MAX_BATCH)
        processes = {"batch_size": max(1, size), "num_proc": num_proc, "desc": "Packing documents"}
    return _not_empty(_mapped(samples, _packed, _PACKED, settings, **processes), "samples")


def _documents(rows: Iterable[tuple[int, Mapping[str, Any]]]) -> list[Document]:
    """The documents of dataset rows of tokens, given with their indices, without empty ones."""
    documents = [read_document(row, f"row {index}") for index, row in rows]
    return [document for document in documents if document[0]]


def _packed(
    samples: Iterable[tuple[int, Mapping[str, Any]]], length: int, pad_token_id: int, strategy: str
) -> list[dict[str, list[int]]]:
    documents = [(ids[:length], mask[:length]) for ids, mask in _documents(samples)]
    rows = STRATEGIES[strategy]([len(ids) for ids, _ in documents], length)
    return [eagle3_row([documents[index] for index in row], length, pad_token_id) for row in rows]


def _truncated(samples: Iterable[tuple[int, Mapping[str, Any]]], length: int) -> list[dict[str, Any]]:
    return [  # `first=1`: no step of the draft predicts a document's first token
        {"input_ids": ids[:length], "loss_mask": mask[:length], TRUNCATION: truncation_of(mask, length, first=1)}
        for ids, mask in _documents(samples)
    ]


def _map_batch(
    batch: Mapping[str, Any], indices: Iterable[int], function: Any, columns: Sequence[str], **settings: Any
) -> dict[str, list[Any]]:
    rows = function(zip(indices, rows_of_batch(batch), strict=True), **settings)
    return {name: [row[name] for row in rows] for name in columns}


def _mapped(dataset: Any, function: Any, columns: Features, settings: dict[str, Any], **kwargs: Any) -> Any:
    """The rows that a function makes of samples: a dataset or a stream where they are one, otherwise a list."""
    if not isinstance(dataset, Dataset | StreamedDataset):
        return function(enumerate(dataset), **settings)
    return cached_map(
        dataset,
        _map_batch,
        batched=True,
        with_indices=True,
        remove_columns=columns_of(dataset),
        features=columns,
        fn_kwargs={"function": function, "columns": list(columns), **settings},
        **kwargs,
    )


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
    on_error: str = "raise",
    num_proc: int | None = None,
    split: str = "train",
    dp_mesh: DeviceMesh | None = None,
) -> DataLoader:
    """
    A loader of packed or padded sequences for EAGLE-3.

    Every data-parallel rank gets other sequences, and as many: an uneven rest is filled with sequences that
    supervise nothing. Shuffling is seeded, by `seed` and the epoch, and uses no global generator: call
    `loader.sampler.set_epoch(epoch)` before each epoch. A stream is read in full by every rank, which keeps its
    part of it, and shuffled in a buffer; there it is `loader.dataset.set_epoch(epoch)`.

    Args:
        dataset (`Dataset`, `IterableDataset`, list of `dict`, or `str`):
            Dataset rows as [`pack_eagle3_dataset`] takes them or makes them, the path of a JSON Lines file of them, or
            the name of a dataset on the Hub.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Renders conversations, and names the padding token.
        batch_size (`int`, *optional*, defaults to `1`):
            Sequences of a batch, on each rank.
        seq_length (`int`, *optional*, defaults to `2048`):
            Positions of a padded sequence; a longer document keeps its head, or is left out if that supervises
            nothing, and both are logged.
        packed_sequence_size (`int`, *optional*, defaults to `0`):
            Positions of a packed sequence, in place of `seq_length`. `0` pads instead, one document per tensor row.
        strategy (`str`, *optional*, defaults to `"next_fit"`):
            See [`pack_eagle3_dataset`].
        shuffle (`bool`, *optional*, defaults to `True`):
            Whether the sequences are shuffled.
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
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a dataset row that can't be read is an error, or skipped (`"skip"`) and counted.
        num_proc (`int`, *optional*):
            Processes that render and pack.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a dataset on the Hub.
        dp_mesh (`DeviceMesh`, *optional*):
            One-dimensional mesh of the data-parallel ranks: ranks with the same place in it (those of a context-
            parallel group) get the same sequences. Without one, the whole world is data-parallel.

    Returns:
        [`~torch.utils.data.DataLoader`]: batches of [`DataCollatorForEagle3`].

    Raises:
        `ValueError`: If an argument is out of range, a dataset row is malformed, or none is left.
    """
    for name, value in (("batch_size", batch_size), ("seq_length", seq_length)):
        check_integer(value, name, 1)
    for name, value in (("packed_sequence_size", packed_sequence_size), ("seed", seed), ("num_workers", num_workers)):
        check_integer(value, name)
    if isinstance(dataset, (str, os.PathLike)):
        name, is_file = os.fspath(dataset), os.path.isfile(dataset)
        dataset = load_dataset("json", data_files=name, split="train") if is_file else load_dataset(name, split=split)
    pad = padding_token_of(tokenizer, pad_token_id)
    options = {"supervise_reasoning": supervise_reasoning, "reasoning_end": reasoning_end, "on_error": on_error}
    rows = prepare_eagle3_rows(
        dataset,
        {"tokenizer": tokenizer, **options},
        seq_length=seq_length,
        packed_sequence_size=packed_sequence_size,
        strategy=strategy,
        pad_token_id=pad,
        num_proc=num_proc,
    )
    rank, ranks = _place(dp_mesh)
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "collate_fn": DataCollatorForEagle3(pad, length=packed_sequence_size or seq_length),
        "num_workers": num_workers,
        "pin_memory": torch.cuda.is_available(),
        "persistent_workers": num_workers > 0,
        "generator": torch.Generator().manual_seed(seed),  # seeds of workers: not from the global generator
    }
    if num_workers > 0 and torch.cuda.is_initialized():
        settings["multiprocessing_context"] = "forkserver"  # a forked CUDA context aborts the worker
    if isinstance(rows, StreamedDataset):
        rows = rows.shuffle(seed=seed) if shuffle else rows
        return DataLoader(RankRows(rows, rank, ranks, batch_size) if ranks > 1 else rows, **settings)
    return rank_loader(rows, rank, ranks, shuffle=shuffle, seed=seed, **settings)


def prepare_eagle3_rows(
    dataset: Any,
    options: Mapping[str, Any],
    *,
    seq_length: int,
    packed_sequence_size: int,
    strategy: str,
    pad_token_id: int,
    num_proc: int | None = None,
) -> Any:
    """
    Packed sequences for [`DataCollatorForEagle3`], or documents of at most `seq_length` tokens. Truncation is logged,
    and documents left with no supervised token are dropped. Packed sequences, and dataset rows that name their
    precomputed hidden states, stay as they are.

    Args:
        dataset: See [`build_eagle3_dataloader`].
        options (`Mapping[str, Any]`): `tokenizer`, and maybe others of `read_samples`: how text becomes documents.
        seq_length, packed_sequence_size, strategy, pad_token_id, num_proc: See [`build_eagle3_dataloader`].

    Returns:
        A dataset where `dataset` is one, otherwise a list.
    """
    columns = columns_of(dataset)
    if set(columns).issuperset(PACKED_COLUMNS) or HIDDEN_STATES in columns:
        return dataset
    cap = ("packed_sequence_size", packed_sequence_size) if packed_sequence_size else ("seq_length", seq_length)
    dataset = read_samples(dataset, **options, num_proc=num_proc)
    processes = {"num_proc": num_proc, "desc": "Truncating documents"}  # which a stream ignores
    rows = _mapped(dataset, _truncated, _DOCUMENTS, {"length": cap[1]}, **processes)
    if isinstance(rows, list):
        kept = kept_of([document[TRUNCATION] for document in rows], cap)
        rows = [{name: rows[index][name] for name in DOCUMENT_KEYS} for index in kept]
    else:
        rows = without_unsupervised(rows, cap)
    if packed_sequence_size:
        return pack_eagle3_dataset(rows, packed_sequence_size, pad_token_id, strategy, num_proc=num_proc)
    return _not_empty(rows, "dataset")


_READING = ("supervise_reasoning", "reasoning_end", "on_error")  # options of how text becomes branches


def prepare_eagle3_trees(dataset: Any, args: Eagle3Config, tokenizer: Any, pad_token_id: int) -> Any:
    """
    The dataset rows that [`Eagle3Trainer`] trains on: trees, see [`PrefixTree.to_dict`], or documents.

    The branches have at most `packed_sequence_size` or `seq_length` tokens; longer ones are truncated, and counted.
    With `packed_sequence_size`, a row is the tree of so many trees as fit, so that these share tokens, too, and larger
    ones are split: each branch is in one row. Documents of token ids become the rows of [`prepare_eagle3_rows`]. Rows
    that are trees stay as they are.

    Args:
        dataset (`Dataset`, `IterableDataset` or list of `dict`): Rows of any kind that [`prepare_trees`] reads.
        args ([`Eagle3Config`]): Configuration.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Renders conversations.
        pad_token_id (`int`): Token id of the padding of documents.

    Returns:
        A dataset where `dataset` is one, otherwise a list.

    Raises:
        `ValueError`: If a row can't be read, unless `on_error` is `"skip"`, or none is left.
    """
    columns, size, num_proc = columns_of(dataset), args.packed_sequence_size, args.dataset_num_proc
    if "node_parents" in columns:
        return dataset
    options = {"tokenizer": tokenizer, **{name: getattr(args, name) for name in _READING}}
    if "input_ids" in columns or not columns:
        return prepare_eagle3_rows(
            dataset,
            options,
            seq_length=args.seq_length,
            packed_sequence_size=size,
            strategy=args.packing_strategy,
            pad_token_id=pad_token_id,
            num_proc=num_proc,
        )
    kinds = [name for name in ROW_KINDS if name != "preference"]
    trees = read_branches(dataset, kinds=kinds, max_length=size or args.seq_length, num_proc=num_proc, **options)
    if not size:
        return _not_empty(trees, "dataset")
    settings: dict[str, Any] = {"length": size, "strategy": args.packing_strategy}
    processes = {"num_proc": num_proc, "desc": "Packing trees"}  # which a stream ignores
    return _not_empty(_mapped(trees, _folded, TREE_FEATURES, settings, **processes), "dataset")


def _folded(rows: Iterable[tuple[int, Mapping[str, Any]]], length: int, strategy: str) -> list[dict[str, Any]]:
    trees = [part for _, row in rows for part in split_tree(PrefixTree.from_dict(row), length)]
    packed = STRATEGIES[strategy]([len(tree) for tree in trees], length)
    members = ([branch for index in row for branch in trees[index].branches()] for row in packed)
    return [dict(fold(branches, weighting="branch").to_dict()) for branches in members]


def _not_empty(rows: Any, name: str) -> Any:
    if not isinstance(rows, StreamedDataset) and not len(rows):
        raise ValueError(f"`{name}`: no row could be produced, because no sample has a token; pass at least one.")
    return rows


class RankRows(PaddedStream):
    """
    A rank's part of a stream of dataset rows; every rank gets as many whole batches as the others.

    Args:
        stream: The dataset rows.
        rank, ranks, batch_size (`int`): Of the loader.
    """

    def __init__(self, stream: Any, rank: int, ranks: int, batch_size: int) -> None:
        super().__init__(stream, ranks * batch_size)
        self.rank, self.ranks = rank, ranks

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return itertools.islice(super().__iter__(), self.rank, None, self.ranks)


def _place(dp_mesh: DeviceMesh | None) -> tuple[int, int]:
    """Rank and number of ranks along the data-parallel dimension."""
    if dp_mesh is not None:
        if dp_mesh.ndim != 1:
            raise ValueError(
                f"`dp_mesh` has the dimensions {dp_mesh.mesh_dim_names}; pass the data-parallel one alone, for "
                "example `mesh['dp']`."
            )
        return dp_mesh.get_local_rank(), dp_mesh.size()
    return rank_and_size()
