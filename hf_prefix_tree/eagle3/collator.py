# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`DataCollatorForEagle3`]: batches for EAGLE-3 draft training, of packed sequences or of one padded document each.

[`eagle3_row`] lays documents one after another, then padding that counts to the last document. One position is one
token; nothing is shifted. Cost: linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_prefix_tree.data.supervision import check_features, located, read_sample
from hf_prefix_tree.eagle3.vocabulary import read_tensors
from hf_prefix_tree.training.sampling import rounded_up
from hf_prefix_tree.tree.folding import INT32_MAX, check_integer, integer_array
from hf_prefix_tree.tree.packing import next_fit, pack_rows

PACKED_COLUMNS = ("input_ids", "loss_mask", "attention_mask", "position_ids", "doc_remaining", "seq_lens")
DOCUMENT_KEYS = ("input_ids", "loss_mask")
HIDDEN_STATES = "hidden_states"  # column with the file of the precomputed hidden states

Document = tuple[list[int], list[int]]  # token ids; loss mask, 0 or 1


def read_document(row: Mapping[str, Any], where: str = "") -> Document:
    """The token ids and the loss mask of a dataset row, see [`read_sample`]."""
    sample = read_sample(row, where)
    return sample.input_ids.tolist(), (sample.weights > 0).astype(int).tolist()


def eagle3_row(documents: Sequence[Document], length: int, pad_token_id: int) -> dict[str, list[int]]:
    """
    Lay documents one after another in a packed sequence.

    Args:
        documents (sequence of pairs): Token ids and loss mask (0 or 1) of each document, at least one token each.
        length (`int`): Positions of the sequence, at least the documents' tokens.
        pad_token_id (`int`): Token id of the padding.

    Returns:
        `dict[str, list[int]]`: `input_ids`, `loss_mask`, `attention_mask` (1 = real token), `position_ids` (from 0 in
        every document; padding continues the last), `doc_remaining` (real tokens after the position in its document),
        all of `length`, and `seq_lens` (tokens per document, the padding with the last one: their sum is `length`).

    Example:

    ```python
    >>> row = eagle3_row([([5, 6, 7], [0, 1, 1]), ([8], [1])], length=6, pad_token_id=0)
    >>> row["position_ids"], row["doc_remaining"], row["seq_lens"]
    ([0, 1, 2, 0, 1, 2], [2, 1, 0, 0, 0, 0], [3, 3])

    ```
    """
    lengths = [len(ids) for ids, _ in documents]
    padding = length - sum(lengths)
    seq_lens = [*lengths[:-1], lengths[-1] + padding] if lengths else [length]
    return {
        "input_ids": [i for ids, _ in documents for i in ids] + [pad_token_id] * padding,
        "loss_mask": [m for _, mask in documents for m in mask] + [0] * padding,
        "attention_mask": [1] * (length - padding) + [0] * padding,
        "position_ids": [i for count in seq_lens for i in range(count)],
        "doc_remaining": [i for count in lengths for i in range(count - 1, -1, -1)] + [0] * padding,
        "seq_lens": seq_lens,
    }


# How documents are put into packed sequences, by their lengths: see `pack_eagle3_dataset`.
STRATEGIES = {"next_fit": next_fit, "best_fit": pack_rows}


@dataclass
class DataCollatorForEagle3:
    """
    Data collator for EAGLE-3: stacks packed sequences, pads and stacks single documents.

    A feature is a packed sequence of [`pack_eagle3_dataset`], or one document: `input_ids` and `loss_mask`, with an
    optional `attention_mask` whose zeros are padding at the end. Documents are padded to the longest of the batch. A
    feature without tokens gives a sequence that supervises nothing. `hidden_states` names the file of its precomputed
    hidden states, which are added to the batch; files of other tokens or documents are refused.

    Args:
        pad_token_id (`int`):
            Token id of the padding.
        length (`int`, *optional*):
            Pad documents to this length instead, and refuse longer ones. FlexAttention needs a multiple of 128.
        pad_to_multiple_of (`int`, *optional*, defaults to `1`):
            Round the length of padded documents up to a multiple of it.
        target_fingerprint (`str`, *optional*):
            Refuse precomputed hidden states of another target, see [`Eagle3Target`]. The trainer sets it.
        states_folder (`Path`, *optional*):
            Where the files of hidden states lie, if not where they were written. The trainer sets it.

    Returns (`__call__`):
        `dict[str, torch.Tensor]`: `input_ids`, `loss_mask`, `attention_mask`, `position_ids`, `doc_remaining`, int64
        of shape `(B, N)`; `seq_lens`, int64 of shape `(B, most documents)`, filled up with zeros.

    Raises:
        `ValueError`: If packed sequences differ in length, or a feature is malformed.

    Example:

    ```python
    >>> from hf_prefix_tree.eagle3.collator import DataCollatorForEagle3

    >>> collator = DataCollatorForEagle3(pad_token_id=0)
    >>> features = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, {"input_ids": [8], "loss_mask": [1]}]
    >>> batch = collator(features)
    >>> batch["input_ids"], batch["doc_remaining"]
    (tensor([[5, 6, 7],
            [8, 0, 0]]), tensor([[2, 1, 0],
            [0, 0, 0]]))
    >>> batch["seq_lens"]
    tensor([[3],
            [3]])

    ```
    """

    pad_token_id: int
    length: int | None = None
    pad_to_multiple_of: int = 1
    target_fingerprint: str | None = None
    states_folder: Path | None = None

    def __post_init__(self) -> None:
        for name, least in (("pad_token_id", 0), ("length", 1), ("pad_to_multiple_of", 1)):
            if name != "length" or self.length is not None:
                check_integer(getattr(self, name), name, least)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        check_features(features)
        read: list[Any] = []  # packed sequences, and documents
        for index, feature in enumerate(features):
            with located(f"`features[{index}]`"):
                is_packed = feature.get("doc_remaining") is not None
                read.append(_checked_row(feature) if is_packed else read_document(feature))
        lengths = {len(item["input_ids"]) for item in read if isinstance(item, dict)}
        if len(lengths) > 1:
            raise ValueError(
                f"`features` has packed sequences of {sorted(lengths)} tokens: pack them with one "
                "`packed_sequence_size`."
            )
        longest = max((len(item[0]) for item in read if isinstance(item, tuple)), default=0)
        length = lengths.pop() if lengths else self.length or rounded_up(max(longest, 1), self.pad_to_multiple_of)
        if longest > length:
            raise ValueError(
                f"`features` has a document of {longest} tokens for sequences of {length}: shorten it, as "
                "`build_eagle3_dataloader` does, or pass a larger `length`."
            )
        rows = [
            item if isinstance(item, dict) else eagle3_row([item] if item[0] else [], length, self.pad_token_id)
            for item in read
        ]
        count = max(len(row["seq_lens"]) for row in rows)
        for row in rows:
            row["seq_lens"] += [0] * (count - len(row["seq_lens"]))
        batch = {name: torch.tensor([row[name] for row in rows]) for name in PACKED_COLUMNS}
        if any(feature.get(HIDDEN_STATES) is not None for feature in features):
            batch |= _hidden_states(features, batch, self)
        return batch


def _checked_row(row: Mapping[str, Any]) -> dict[str, list[int]]:
    """A packed sequence, if it is what [`eagle3_row`] makes of its documents."""
    columns = {name: integer_array(row.get(name), name, maximum=INT32_MAX) for name in PACKED_COLUMNS}
    ids, mask, count = columns["input_ids"], columns["loss_mask"] != 0, np.count_nonzero(columns["attention_mask"])
    starts = np.cumsum(columns["seq_lens"])[:-1]
    parts = zip(np.split(ids[:count], starts), np.split(mask[:count].astype(int), starts), strict=True)
    documents = [(part.tolist(), of_part.tolist()) for part, of_part in parts if len(part)]
    expected = eagle3_row(documents, len(ids), 0) | {"input_ids": ids.tolist()}
    for name, values in columns.items():
        if not np.array_equal(values, expected[name]):
            raise ValueError(
                f"`{name}` is not that of a packed sequence with {count} tokens and `seq_lens` "
                f"{columns['seq_lens'][:20]}; pack it again."
            )
    return expected


def _hidden_states(
    features: Sequence[Mapping[str, Any]], batch: Mapping[str, torch.Tensor], collator: DataCollatorForEagle3
) -> dict[str, torch.Tensor]:
    """The precomputed states of a batch, zeros where there are no tokens; checked against the batch and the target."""
    stacked: dict[str, torch.Tensor] = {}
    for index, feature in enumerate(features):
        file, ids, seq_lens = feature.get(HIDDEN_STATES), batch["input_ids"][index], batch["seq_lens"][index]
        if file is None:
            if len(feature["input_ids"]):
                raise ValueError(f"Some dataset rows have `{HIDDEN_STATES}` and others don't: precompute all of them.")
            continue
        states = _states_of(file, collator)
        tokens = states.pop("input_ids")
        starts = [lens[lens > 0].cumsum(0)[:-1] for lens in (states.pop("seq_lens"), seq_lens)]
        if not torch.equal(tokens, ids[: len(tokens)]) or not torch.equal(*starts):
            raise ValueError(
                f"{file} was computed for other tokens or documents than this dataset row has, whose "
                f"documents start at {[0, *starts[1].tolist()]}: precompute it again."
            )
        for name, value in states.items():
            if name not in stacked:
                stacked[name] = value.new_zeros((*batch["input_ids"].shape, *value.shape[1:]))
            stacked[name][index, : len(tokens)] = value
    return stacked


def _states_of(file: str, collator: DataCollatorForEagle3) -> dict[str, torch.Tensor]:
    if collator.states_folder is not None and not Path(file).exists():  # the folder was moved
        file = str(collator.states_folder / Path(file).name)
    try:
        metadata, tensors = read_tensors(file)
    except ValueError as error:
        raise ValueError(
            f"{error}: run `precompute_hidden_states` again, which computes only what is missing, or pass the folder "
            "of the files as `target_model`."
        ) from error
    if collator.target_fingerprint not in (None, metadata.get("target_fingerprint")):
        raise ValueError(
            f"{file} was computed by another target, or from other layers of it, than the one that is trained for: "
            "precompute it again, or pass the folder that it lies in as `target_model`."
        )
    return tensors
