# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""From a row of a dataset to documents: token ids and which of them are supervised.

Token columns are taken as they are; conversations are rendered with the tokenizer's chat template, one document per
conversation, every assistant turn supervised. Cost: that of rendering, see `hf_prefix_tree.conversations`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hf_prefix_tree.batch import IGNORE_INDEX
from hf_prefix_tree.collators.eagle3 import Document, real_tokens
from hf_prefix_tree.datasets.rows import RowOptions, row_branches

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
