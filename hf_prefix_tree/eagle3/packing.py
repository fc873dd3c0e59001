# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Dataset rows to documents (token ids and loss mask), and documents to packed sequences of one length."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_prefix_tree.data.rows import RowOptions, row_branches
from hf_prefix_tree.data.supervision import IGNORE_INDEX, Document, real_tokens
from hf_prefix_tree.eagle3.collator import ROW_KEYS, eagle3_row
from hf_prefix_tree.tree.packing import pack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MASKS = ("loss_mask", "completion_mask", "assistant_masks")
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


def documents_of(row: Mapping[str, Any], options: SampleOptions) -> list[Document]:
    """
    The documents of one row: one, or none where a text has no supervised token.

    Args:
        row (`Mapping[str, Any]`): Columns as [`pack_eagle3_dataset`] lists them.
        options ([`SampleOptions`]): How conversations are rendered.

    Raises:
        `ValueError`: If the row has none of these forms, is malformed, or needs a tokenizer that is not there.
    """
    if row.get("input_ids") is not None:
        return [_token_columns(row)]
    if row.get("messages") is not None:
        return _texts(row, "conversation", options)
    if row.get("prompt") is not None and row.get("completion") is not None:
        return _texts(row, "completion", options)
    raise ValueError(
        f"A sample has the columns {sorted(row)}, which are no known form: pass `input_ids` with `loss_mask`, "
        "`labels`, `completion_mask` or `assistant_masks`, or `messages`, or `prompt` and `completion`."
    )


def rows_of_batch(batch: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """The rows of a batch that `datasets.map` hands over as a dictionary of columns."""
    sizes = {name: len(column) for name, column in batch.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"`samples` has columns of different length: {sizes}. Pass one entry per row.")
    for index in range(next(iter(sizes.values()), 0)):
        yield {name: column[index] for name, column in batch.items()}


def _token_columns(row: Mapping[str, Any]) -> Document:
    ids = np.asarray(row["input_ids"], dtype=np.int64)
    mask = np.ones(len(ids), dtype=bool)
    if not any(row.get(name) is not None for name in (*_MASKS, "labels")):
        raise ValueError(
            "A sample has `input_ids` and nothing that says which of them are supervised: add `loss_mask` (all ones "
            "to supervise every token), or TRL's `labels`, `completion_mask` or `assistant_masks`."
        )
    for name in (*_MASKS, "labels"):
        if row.get(name) is None:
            continue
        own = np.asarray(row[name])
        if own.shape != ids.shape:
            raise ValueError(f"`{name}` has {len(own)} entries for {len(ids)} `input_ids`: pass one per token.")
        if name == "labels" and bool(((own != IGNORE_INDEX) & (own != ids)).any()):
            raise ValueError("`labels` differs from `input_ids` where it is not -100: pass it unshifted.")
        mask &= own != (IGNORE_INDEX if name == "labels" else 0)
    return real_tokens(ids, mask, row.get("attention_mask"))


def _texts(row: Mapping[str, Any], kind: str, options: SampleOptions) -> list[Document]:
    if options.tokenizer is None:
        raise ValueError("The samples are texts: pass the `tokenizer` that makes tokens of them.")
    settings = RowOptions(
        kind=kind,
        tokenizer=options.tokenizer,
        features=options.features,
        reasoning="keep",
        tools=None,
        group_column="group",
        chat_template_kwargs={},
        empty_thinking_in_prompt=True,
        max_length=None,
        overlong="raise",
        code="",
    )
    documents = []
    for branch in row_branches(row, settings, Counter()):
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
