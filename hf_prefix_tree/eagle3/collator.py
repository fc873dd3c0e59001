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
import numpy.typing as npt
import torch

from hf_prefix_tree.data.supervision import Sample, check_features, located, read_sample
from hf_prefix_tree.eagle3.vocabulary import read_tensors
from hf_prefix_tree.tree.folding import INT32_MAX, check_integer, integer_array
from hf_prefix_tree.tree.packing import pack_rows

ROW_KEYS = ("input_ids", "loss_mask", "attention_mask", "position_ids", "doc_remaining")
PACKED_COLUMNS = (*ROW_KEYS, "seq_lens")
DOCUMENT_KEYS = ("input_ids", "loss_mask")
HIDDEN_STATES = "hidden_states"  # column with the file of the precomputed hidden states

Document = tuple[list[int], list[int]]  # token ids; loss mask, 0 or 1


def as_document(sample: Sample) -> Document:
    """The token ids and the loss mask of a sequence."""
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
        "input_ids": [int(i) for ids, _ in documents for i in ids] + [pad_token_id] * padding,
        "loss_mask": [int(m) for _, mask in documents for m in mask] + [0] * padding,
        "attention_mask": [1] * (length - padding) + [0] * padding,
        "position_ids": [i for count in seq_lens for i in range(count)],
        "doc_remaining": [i for count in lengths for i in range(count - 1, -1, -1)] + [0] * padding,
        "seq_lens": seq_lens,
    }


def _next_fit(documents: list[Document], length: int) -> list[list[Document]]:
    packed: list[list[Document]] = []
    room = 0
    for document in documents:
        size = len(document[0])
        if size > room or not packed:
            packed.append([])
            room = length
        packed[-1].append(document)
        room -= size
    return packed


def _best_fit(documents: list[Document], length: int) -> list[list[Document]]:
    return [[documents[i] for i in indices] for indices in pack_rows([len(ids) for ids, _ in documents], length)]


# How documents are put into packed sequences, see `pack_eagle3_dataset`.
STRATEGIES = {"next_fit": _next_fit, "best_fit": _best_fit}


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
        read: list[Any] = []  # packed rows, and documents
        for index, feature in enumerate(features):
            with located(f"`features[{index}]`"):
                is_packed = feature.get("doc_remaining") is not None
                read.append(_checked_row(feature) if is_packed else as_document(read_sample(feature)))
        lengths = {len(row["input_ids"]) for row in read if isinstance(row, dict)}
        if len(lengths) > 1:
            raise ValueError(
                f"`features` has packed sequences of {sorted(lengths)} tokens: pack them with one "
                "`packed_sequence_size`."
            )
        length = lengths.pop() if lengths else self._padded_length(read)
        rows = [row if isinstance(row, dict) else self._padded(row, length) for row in read]
        batch = {name: torch.tensor(np.array([row[name] for row in rows], dtype=np.int64)) for name in ROW_KEYS}
        count = max(len(row["seq_lens"]) for row in rows)
        seq_lens = [[*row["seq_lens"], *[0] * (count - len(row["seq_lens"]))] for row in rows]
        batch["seq_lens"] = torch.tensor(seq_lens, dtype=torch.int64)
        if any(feature.get(HIDDEN_STATES) is not None for feature in features):
            batch |= _hidden_states(features, batch, self)
        return batch

    def _padded_length(self, documents: Sequence[Document]) -> int:
        if self.length is not None:
            return self.length
        longest = max(1, *(len(ids) for ids, _ in documents))
        return -(-longest // self.pad_to_multiple_of) * self.pad_to_multiple_of

    def _padded(self, document: Document, length: int) -> dict[str, list[int]]:
        if len(document[0]) > length:
            raise ValueError(
                f"`features` has a document of {len(document[0])} tokens for sequences of {length}: shorten it, as "
                "`build_eagle3_dataloader` does, or pass a larger `length`."
            )
        return eagle3_row([document] if len(document[0]) else [], length, self.pad_token_id)


def _checked_row(row: Mapping[str, Any]) -> dict[str, npt.NDArray[np.int64]]:
    """The columns of a packed row as arrays, if they are what [`eagle3_row`] makes of its documents."""
    columns = {name: integer_array(row.get(name), name, maximum=INT32_MAX) for name in PACKED_COLUMNS}
    length, lengths, real = len(columns["input_ids"]), columns["seq_lens"], columns["seq_lens"].copy()
    attended = np.arange(length) < columns["attention_mask"].sum()
    real[-1:] -= length - attended.sum()  # padding counts to the last document, and is shorter
    if lengths.sum() != length or lengths.min(initial=1) < 1 or real.min(initial=1) < (len(real) > 1):
        raise ValueError(f"`seq_lens` is {lengths[:20]} for {attended.sum()} of {length} tokens; pack the row again.")
    positions = np.arange(length) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    expected = {
        "attention_mask": attended,
        "position_ids": positions,
        "doc_remaining": np.where(attended, np.repeat(real, lengths) - 1 - positions, 0),
        "loss_mask": attended & (columns["loss_mask"] != 0) if len(columns["loss_mask"]) == length else attended,
    }
    for name, values in expected.items():
        if not np.array_equal(columns[name], values):
            raise ValueError(f"`{name}` is not that of a packed row with `seq_lens` {lengths[:20]}; pack it again.")
    return columns


def _hidden_states(
    features: Sequence[Mapping[str, Any]], batch: Mapping[str, torch.Tensor], collator: DataCollatorForEagle3
) -> dict[str, torch.Tensor]:
    """The precomputed states of a batch, zeros where there are no tokens; checked against the batch and the target."""
    loaded = [None if f.get(HIDDEN_STATES) is None else _states_of(f[HIDDEN_STATES], collator) for f in features]
    first = next(states for states in loaded if states is not None)
    batch_size, length = batch["input_ids"].shape
    stacked = {
        name: value.new_zeros((batch_size, length, *value.shape[1:]))
        for name, value in first.items()
        if name not in ("input_ids", "seq_lens")
    }
    for index, (states, feature) in enumerate(zip(loaded, features, strict=True)):
        if states is None:
            if len(feature["input_ids"]):
                raise ValueError(f"Some rows have `{HIDDEN_STATES}` and others don't: precompute all of them.")
            continue
        count = len(states["input_ids"])
        seq_lens = batch["seq_lens"][index]
        starts = [lens[lens > 0].cumsum(0)[:-1].tolist() for lens in (states["seq_lens"], seq_lens)]
        if count > length or not torch.equal(states["input_ids"], batch["input_ids"][index, :count]):
            raise ValueError(
                f"{feature[HIDDEN_STATES]} was computed for other tokens than this row has: precompute it again."
            )
        if starts[0] != starts[1]:
            raise ValueError(
                f"{feature[HIDDEN_STATES]} was computed for documents that start at {[0, *starts[0]]}, those of this "
                f"row start at {[0, *starts[1]]}: precompute it again."
            )
        for name, value in stacked.items():
            value[index, :count] = states[name]
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
