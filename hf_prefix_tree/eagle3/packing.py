# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Dataset rows to documents (token ids and loss mask), and documents to packed sequences of one length."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value

from hf_prefix_tree.data.rows import MESSAGE_KINDS, RowOptions, columns_of, row_branches, row_kind, rows_of_batch
from hf_prefix_tree.data.supervision import read_sample
from hf_prefix_tree.eagle3.collator import ROW_KEYS, Document, as_document, eagle3_row
from hf_prefix_tree.tree.packing import pack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class SampleOptions:
    """
    How rows become documents.

    Args:
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Renders and tokenizes; not needed for token columns.
        supervise_reasoning (`bool`, *optional*, defaults to `True`):
            With `False`, what a turn says up to `reasoning_end` is context.
        reasoning_end (`str`, *optional*, defaults to `"</think>"`):
            Text that ends the reasoning of a turn.
        features (`Mapping[str, Any]`, *optional*):
            Schema of the dataset, if the rows come from one: keys that Arrow filled in with `None` are left out.
    """

    tokenizer: PreTrainedTokenizerBase | None = None
    supervise_reasoning: bool = True
    reasoning_end: str = "</think>"
    features: Mapping[str, Any] = field(default_factory=dict)


def documents_of(row: Mapping[str, Any], options: SampleOptions, where: str) -> list[Document]:
    """
    The documents of one row: one, several where a prompt has several completions, or none where a text has no
    supervised token.

    Args:
        row (`Mapping[str, Any]`): Columns as [`pack_eagle3_dataset`] lists them.
        options ([`SampleOptions`]): How conversations are rendered.
        where (`str`): Which row it is; errors begin with it.

    Raises:
        `ValueError`: If the row has none of these forms, is malformed, or needs a tokenizer that is not there.
    """
    try:
        if row.get("input_ids") is not None:
            return [as_document(read_sample(row))]
        kind = row_kind(name for name, value in row.items() if value is not None)
        if kind not in MESSAGE_KINDS:
            raise ValueError(f"{kind} rows are for trees; pass conversations, or `input_ids` with a `loss_mask`.")
        return _texts(row, kind, options)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _texts(row: Mapping[str, Any], kind: str, options: SampleOptions) -> list[Document]:
    if options.tokenizer is None:
        raise ValueError("it is text, and there is no `tokenizer`; pass the model's.")
    documents = []
    for branch in row_branches(row, RowOptions(kind, options.tokenizer, options.features, "keep"), Counter()):
        mask = branch.weights > 0
        if not mask.any():  # an empty document trains nothing
            continue
        if not options.supervise_reasoning:
            end = options.tokenizer(options.reasoning_end, add_special_tokens=False)["input_ids"]
            found = _unsupervise_reasoning(branch.input_ids, mask, end)
            if not found and _has_reasoning(row):
                raise ValueError(
                    f"`supervise_reasoning=False`, but {options.reasoning_end!r} stands in no turn of a conversation "
                    "with reasoning: set `reasoning_end` to the text that ends the reasoning in this chat template."
                )
        documents.append((branch.input_ids.tolist(), mask.astype(int).tolist()))
    return documents


def _unsupervise_reasoning(ids: np.ndarray, mask: np.ndarray, end: Sequence[int]) -> bool:
    """Clears the mask of each supervised run up to the last place in it where the tokens `end` stand."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    found = False
    for start, stop in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        for at in range(stop - len(end), start - 1, -1):
            if ids[at : at + len(end)].tolist() == list(end):
                mask[start : at + len(end)] = False
                found = True
                break
    return found


def _has_reasoning(row: Mapping[str, Any]) -> bool:
    messages = row.get("messages") or row.get("completion") or ()
    return any(isinstance(m, Mapping) and any(m.get(key) for key in _REASONING_KEYS) for m in messages)


STRATEGIES = ("next_fit", "best_fit")
PACKED_COLUMNS = (*ROW_KEYS, "seq_lens")
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
    num_proc: int | None = None,
) -> Any:
    """
    Pack documents into rows of `packed_sequence_size` slots.

    A document that is longer keeps its head; one without tokens is skipped. Of a `Dataset`, up to 10,000 documents are
    packed together, of a stream 1,000: a row holds documents of one such part. As a step of a pipeline,
    `dataset.map(pack_eagle3_dataset, batched=True, remove_columns=..., fn_kwargs=...)` packs each batch of rows by
    itself, in several processes or on a stream; `best_fit` gets tighter with a larger `batch_size`.

    Args:
        samples (iterable of `Mapping`, `Mapping` of lists, `Dataset` or `IterableDataset`):
            Token columns (`input_ids` with `loss_mask`, `labels`, `completion_mask` or `assistant_masks`, and maybe
            `attention_mask`), or with a `tokenizer` conversations (`messages`, or `prompt` and `completion`). A
            mapping of lists is a batch of rows, as `datasets.map` hands over.
        packed_sequence_size (`int`):
            Slots of a row.
        pad_token_id (`int`):
            Token id of the padding.
        strategy (`str`, *optional*, defaults to `"next_fit"`):
            `"next_fit"` fills a row in the order of the source until a document does not fit; `"best_fit"` puts the
            longest documents first, each into the fullest row that still takes it.
        tokenizer (`PreTrainedTokenizerBase`, *optional*):
            Renders conversations.
        supervise_reasoning (`bool`, *optional*, defaults to `True`):
            Whether reasoning is supervised, in conversations.
        reasoning_end (`str`, *optional*, defaults to `"</think>"`):
            Text that ends the reasoning of a turn.
        num_proc (`int`, *optional*):
            Processes, for a `Dataset`.

    Returns:
        Rows as [`~hf_prefix_tree.eagle3.collator.eagle3_row`] describes them, in the form of `samples`: a list, a
        dictionary of lists, or a dataset.

    Raises:
        `ValueError`: If no row could be produced, an argument is out of range, or a sample is malformed.

    Example:

    ```python
    >>> samples = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8], "loss_mask": [1]}]
    >>> rows = pack_eagle3_dataset(samples, packed_sequence_size=4, pad_token_id=0)
    >>> rows[0]["input_ids"], rows[0]["seq_lens"]
    ([5, 6, 7, 8], [3, 1])

    ```
    """
    if not isinstance(packed_sequence_size, int) or packed_sequence_size < 1:
        raise ValueError(f"`packed_sequence_size` must be a positive integer, got {packed_sequence_size!r}.")
    if strategy not in STRATEGIES:
        raise ValueError(f"`strategy` must be one of {STRATEGIES}, got {strategy!r}.")
    settings: dict[str, Any] = {
        "length": packed_sequence_size,
        "pad_token_id": pad_token_id,
        "strategy": strategy,
        "options": SampleOptions(tokenizer, supervise_reasoning, reasoning_end),
    }
    if isinstance(samples, Mapping):
        return _pack_batch(samples, itertools.count(), **settings)  # one batch of many: it may be empty
    if isinstance(samples, IterableDataset):
        return _map(samples, settings)
    if isinstance(samples, Dataset):
        # Documents of different batches don't share a row, so large ones pack tighter; a batch is in memory as lists.
        size = min(-(-len(samples) // (num_proc or 1)), _MAX_BATCH)
        rows = _map(samples, settings, batch_size=max(1, size), num_proc=num_proc, desc="Packing documents")
    else:
        rows = _packed(enumerate(samples), **settings)
    if not len(rows):
        raise ValueError("`samples`: no row could be produced, because no sample has a token. Check the data.")
    return rows


def _packed(
    samples: Iterable[tuple[int, Mapping[str, Any]]],
    length: int,
    pad_token_id: int,
    strategy: str,
    options: SampleOptions,
) -> list[dict[str, list[int]]]:
    documents = [
        (ids[:length], mask[:length])
        for index, sample in samples
        for ids, mask in documents_of(sample, options, f"row {index}")
        if len(ids)
    ]
    rows = _next_fit(documents, length) if strategy == "next_fit" else _best_fit(documents, length)
    return [eagle3_row(row, length, pad_token_id) for row in rows]


def _next_fit(documents: list[Document], length: int) -> list[list[Document]]:
    rows: list[list[Document]] = []
    room = 0
    for document in documents:
        size = len(document[0])
        if size > room or not rows:
            rows.append([])
            room = length
        rows[-1].append(document)
        room -= size
    return rows


def _best_fit(documents: list[Document], length: int) -> list[list[Document]]:
    return [[documents[i] for i in row] for row in pack_rows([len(ids) for ids, _ in documents], length)]


def _pack_batch(batch: Mapping[str, Any], indices: Iterable[int], **settings: Any) -> dict[str, list[list[int]]]:
    rows = _packed(zip(indices, rows_of_batch(batch), strict=False), **settings)
    return {name: [row[name] for row in rows] for name in PACKED_COLUMNS}


def _map(dataset: Any, settings: dict[str, Any], **kwargs: Any) -> Any:
    options = dataclasses.replace(settings["options"], features=dict(dataset.features or {}))
    return dataset.map(
        _pack_batch,
        batched=True,
        with_indices=True,
        remove_columns=columns_of(dataset),
        features=Features({name: List(Value("int64")) for name in PACKED_COLUMNS}),
        fn_kwargs={**settings, "options": options},
        **kwargs,
    )
