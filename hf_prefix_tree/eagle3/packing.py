# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Packing documents into rows of one length for EAGLE-3 training.

`next_fit` keeps the order of the source and looks at the last row only: what streams can do. `best_fit` sorts by
length and looks at all rows: fewer rows, less padding. Cost: linear in the tokens, and O(n log n) for `best_fit`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hf_prefix_tree.collators.eagle3 import ROW_KEYS, Document, eagle3_row
from hf_prefix_tree.eagle3.samples import SampleOptions, documents_of, rows_of_batch
from hf_prefix_tree.packing import pack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        Rows as [`~hf_prefix_tree.collators.eagle3.eagle3_row`] describes them, in the form of `samples`: a list, a
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
    options = SampleOptions(
        tokenizer, supervise_reasoning, reasoning_end, dict(getattr(samples, "features", None) or {})
    )
    settings: dict[str, Any] = {
        "length": packed_sequence_size,
        "pad_token_id": pad_token_id,
        "strategy": strategy,
        "options": options,
    }
    if hasattr(samples, "map") and hasattr(samples, "column_names"):
        rows = _map(samples, num_proc, settings)
    elif isinstance(samples, Mapping):
        return _pack_batch(samples, **settings)  # one batch of many: it may be empty
    else:
        rows = _packed(samples, **settings)
    if hasattr(rows, "__len__") and not len(rows):
        raise ValueError("`samples`: no row could be produced, because no sample has a token. Check the data.")
    return rows


def _packed(
    samples: Iterable[Mapping[str, Any]], length: int, pad_token_id: int, strategy: str, options: SampleOptions
) -> list[dict[str, list[int]]]:
    documents = [
        (ids[:length], mask[:length]) for sample in samples for ids, mask in documents_of(sample, options) if len(ids)
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


def _pack_batch(batch: Mapping[str, Any], **settings: Any) -> dict[str, list[list[int]]]:
    rows = _packed(rows_of_batch(batch), **settings)
    return {name: [row[name] for row in rows] for name in PACKED_COLUMNS}


def _map(dataset: Any, num_proc: int | None, settings: dict[str, Any]) -> Any:
    from datasets import Features, IterableDataset, List, Value

    columns = dataset.column_names or list(next(iter(dataset), {}))
    features = Features({name: List(Value("int64")) for name in PACKED_COLUMNS})
    if isinstance(dataset, IterableDataset):
        return dataset.map(_pack_batch, batched=True, remove_columns=columns, fn_kwargs=settings, features=features)
    # Documents of different batches don't share a row, so large ones pack tighter; a batch is in memory as lists.
    size = min(-(-len(dataset) // (num_proc or 1)), _MAX_BATCH)
    return dataset.map(
        _pack_batch,
        batched=True,
        batch_size=max(1, size),
        remove_columns=columns,
        features=features,
        num_proc=num_proc,
        fn_kwargs=settings,
        desc="Packing documents",
    )
