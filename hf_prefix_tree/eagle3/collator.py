# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`DataCollatorForEagle3`]: batches for EAGLE-3 draft training, of trees, of packed documents or of padded ones.

[`eagle3_row`] lays documents one after another, then padding that counts to the last document. One position is one
token; nothing is shifted. [`unrolled`] makes the draft's tree of a tree. Cost: linear in the tokens of the documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_prefix_tree.data.supervision import check_features, located, read_sample
from hf_prefix_tree.data.trees import TREE_FEATURES
from hf_prefix_tree.eagle3.attention import DRAFT_KEYS
from hf_prefix_tree.eagle3.vocabulary import read_tensors
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.training.sampling import rounded_up
from hf_prefix_tree.tree.folding import INT32_MAX, check_integer, integer_array
from hf_prefix_tree.tree.packing import next_fit, pack_rows
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

PACKED_COLUMNS = ("input_ids", "loss_mask", "attention_mask", "position_ids", "doc_remaining", "seq_lens")
DOCUMENT_KEYS = ("input_ids", "loss_mask")
ROW_COLUMNS = (*PACKED_COLUMNS, *(name for name in TREE_FEATURES if name != "input_ids"))
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


def unrolled(tree: PrefixTree, steps: int) -> tuple[PrefixTree | None, Any, Any]:
    """
    The tree of a draft that is unrolled for some steps: the target's, with its forks moved back by as many tokens.

    A slot reads its token and the K after it, one more in each step. So branches share a slot as far as they share
    these K + 1 tokens, and the last K tokens before a fork are slots of every child. A branch has slots up to its last
    supervised token, which no slot is after.

    Args:
        tree ([`PrefixTree`]): The target's tree of N tokens.
        steps (`int`): K.

    Returns:
        `tuple`: the tree of M slots, `None` if nothing is supervised; the `draft_sources`, int64 `[K + 1, M]`; and the
        `draft_weights`, int64 `[K, M]`, see [`~hf_prefix_tree.eagle3.attention.draft_slots`].

    Example:

    ```python
    >>> from hf_prefix_tree import Branch, fold
    >>> tree = fold([Branch([5, 6, 7, 8, 9], [0, 0, 0, 1, 1]), Branch([5, 6, 7, 4], [0, 0, 0, 1])])
    >>> slots, sources, weights = unrolled(tree, steps=1)
    >>> tree.input_ids[sources]  # the fork after 7 is a fork after 6
    array([[5, 6, 7, 8, 7],
           [6, 7, 8, 9, 4]])
    >>> weights, slots.predecessor
    (array([[0, 0, 1, 1, 1]]), array([-1,  0,  1,  2,  1], dtype=int32))

    ```
    """
    members, supervised = [], []
    for branch, path in zip(tree.branches(), tree.paths(), strict=True):
        (at,) = branch.weights.nonzero()
        if len(at):
            read = np.arange(at[-1]) + steps  # the last token that each slot reads, if the branch has it
            ends, beyond = path[np.minimum(read, at[-1])], np.maximum(read - at[-1], 0)
            members.append(Branch(ends * steps + beyond, np.zeros(len(read))))  # equal ids: the same tokens so far
            supervised.append(at)
    if not members:
        return None, np.zeros((steps + 1, 0)), np.zeros((steps, 0))
    slots = fold(members, weighting="branch")
    weights = np.zeros((steps, len(slots)), dtype=np.int64)
    for path, at in zip(slots.paths(), supervised, strict=True):
        for step in range(steps):
            weights[step, path[at[at > step] - 1 - step]] += 1
    source, beyond = np.divmod(slots.input_ids, steps)
    sources = []
    for ahead in range(steps, -1, -1):
        sources.append(source)
        source = np.where(ahead + beyond > steps, source, tree.predecessor[source])
    return slots, np.stack(sources[::-1]), weights


@dataclass
class DataCollatorForEagle3:
    """
    Data collator for EAGLE-3: lays trees one after another, stacks packed sequences, pads and stacks single documents.

    A feature is a tree ([`PrefixTree.to_dict`]), a packed sequence of [`pack_eagle3_dataset`], or one document:
    `input_ids` and `loss_mask`, with an optional `attention_mask` whose zeros are padding at the end. Documents are
    padded to the longest of the batch. A feature without tokens supervises nothing. `hidden_states` names the file of
    its precomputed hidden states, which are added to the batch; files of other tokens or documents are refused.

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
        ttt_steps (`int`, *optional*, defaults to `7`):
            Steps that the draft is unrolled for on trees. The trainer sets it.

    Returns (`__call__`):
        `dict[str, torch.Tensor]`: `input_ids`, `loss_mask`, `attention_mask`, `position_ids`, `doc_remaining`, int64
        of shape `(B, N)`; `seq_lens`, int64 of shape `(B, most documents)`, filled up with zeros. Of trees, in one
        sequence of a multiple of 128 tokens, `input_ids`, `attention_mask`, `loss_mask` (how many branches supervise
        each token), `prefix_tree` and the entries of [`~hf_prefix_tree.eagle3.attention.draft_slots`].

    Raises:
        `ValueError`: If packed sequences differ in length, trees come with others, or a feature is malformed.

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
    ttt_steps: int = 7

    def __post_init__(self) -> None:
        for name, least in (("pad_token_id", 0), ("length", 1), ("pad_to_multiple_of", 1), ("ttt_steps", 1)):
            if name != "length" or self.length is not None:
                check_integer(getattr(self, name), name, least)

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        check_features(features)
        read: list[Any] = []  # trees, packed sequences, and documents
        for index, feature in enumerate(features):
            with located(f"`features[{index}]`"):
                if is_tree(feature):
                    read.append(PrefixTree.from_dict(feature))
                else:
                    is_packed = feature.get("doc_remaining") is not None
                    read.append(_checked_row(feature) if is_packed else read_document(feature))
        trees = [item for item in read if isinstance(item, PrefixTree)]
        if trees and any(len(feature["input_ids"]) and not is_tree(feature) for feature in features):
            raise ValueError("`features` mixes trees with documents: prepare all of them alike.")
        batch = self._of_trees(trees) if trees else self._of_documents(read)
        if any(feature.get(HIDDEN_STATES) is not None for feature in features):
            batch |= _hidden_states(features, batch, self)
        return batch

    def _of_trees(self, trees: list[PrefixTree]) -> dict[str, torch.Tensor]:
        batch = concatenate_trees(trees, self.pad_token_id)
        unrolls = [unrolled(tree, self.ttt_steps) for tree in trees]
        starts = np.cumsum([0, *map(len, trees)])
        tree = concatenate_trees([slots for slots, *_ in unrolls if slots is not None], 0)["prefix_tree"]
        sources = [sources + start for start, (_, sources, _) in zip(starts, unrolls, strict=False)]
        slots = (tree, _joined(sources, tree.shape[2]), _joined([weights for *_, weights in unrolls], tree.shape[2]))
        counts = _joined([tree.branch_count for tree in trees], batch["input_ids"].shape[1])
        kept = {name: batch[name] for name in ("input_ids", "attention_mask", "prefix_tree")}
        return {**kept, "loss_mask": counts, **dict(zip(DRAFT_KEYS, slots, strict=True))}

    def _of_documents(self, read: list[Any]) -> dict[str, torch.Tensor]:
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
        return {name: pad_sequence([torch.tensor(row[name]) for row in rows], True) for name in PACKED_COLUMNS}


def is_tree(row: Mapping[str, Any]) -> bool:
    """Whether a dataset row is a [`PrefixTree`]."""
    return row.get("node_parents") is not None


def _joined(parts: Sequence[Any], length: int) -> torch.Tensor:
    """Parts side by side, filled up with zeros, int64 `(1, ..., length)`."""
    joined = torch.from_numpy(np.concatenate(parts, axis=-1).astype(np.int64))
    return torch.nn.functional.pad(joined, (0, length - joined.shape[-1]))[None]


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


def sequence_of(row: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """
    What the hidden states of a dataset row depend on: `input_ids` and `prefix_tree` of a tree, or `seq_lens`.

    Args:
        row (`Mapping[str, Any]`): A feature of [`DataCollatorForEagle3`].
    """
    if is_tree(row):
        batch = concatenate_trees([PrefixTree.from_dict(row)], 0, pad_to_multiple_of=1)
        return {name: batch[name][0] for name in ("input_ids", "prefix_tree")}
    batch = DataCollatorForEagle3(pad_token_id=0)([{**row, HIDDEN_STATES: None}])
    return {name: batch[name][0] for name in ("input_ids", "seq_lens")}


def _hidden_states(
    features: Sequence[Mapping[str, Any]], batch: Mapping[str, torch.Tensor], collator: DataCollatorForEagle3
) -> dict[str, torch.Tensor]:
    """The precomputed states of a batch, zeros where there are no tokens; checked against the batch and the target."""
    stacked: dict[str, torch.Tensor] = {}
    start = 0  # of a tree in the packed sequence
    for index, feature in enumerate(features):
        file = feature.get(HIDDEN_STATES)
        if file is None:
            if len(feature["input_ids"]):
                raise ValueError(f"Some dataset rows have `{HIDDEN_STATES}` and others don't: precompute all of them.")
            continue
        if collator.states_folder is not None and not Path(file).exists():  # the folder was moved
            file = str(collator.states_folder / Path(file).name)
        states = read_states(file, sequence_of(feature), collator.target_fingerprint)
        row, length = 0 if is_tree(feature) else index, len(states["target_ids"])
        for name, value in states.items():
            if name not in stacked:
                stacked[name] = value.new_zeros((*batch["input_ids"].shape, *value.shape[1:]))
            stacked[name][row, start : start + length] = value
        start += length if is_tree(feature) else 0
    return stacked


def read_states(file: str, sequence: Mapping[str, torch.Tensor], fingerprint: str | None) -> dict[str, torch.Tensor]:
    """
    The precomputed hidden states of a dataset row.

    Args:
        file (`str`): Their file.
        sequence (`Mapping[str, torch.Tensor]`): What they depend on, see [`sequence_of`].
        fingerprint (`str`, *optional*): That of the target that computed them; `None` takes any.

    Raises:
        `ValueError`: If the file can't be read, or was computed by another target or for another sequence.
    """
    try:
        metadata, states = read_tensors(file)
    except ValueError as error:
        raise ValueError(
            f"{error}: run `precompute_hidden_states` again, which computes only what is missing, or pass the folder "
            "of the files as `target_model`."
        ) from error
    if fingerprint not in (None, metadata.get("target_fingerprint")):
        raise ValueError(
            f"{file} was computed by another target, or from other layers of it, than the one that is trained for: "
            "precompute it again, or pass the folder that it lies in as `target_model`."
        )
    for name, expected in sequence.items():
        if name not in states or not torch.equal(states.pop(name), expected):
            raise ValueError(
                f"{file} was computed for other tokens or documents than this dataset row has: its `{name}` differs; "
                "precompute it again."
            )
    return states
