# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""From dataset rows to samples of a diffusion language model: token ids and which of them are supervised, unshifted.

Conversations become one sample per assistant turn: text after a turn would tell a model that looks both ways how long
the turn is. Cost: that of rendering, see `hf_prefix_tree.data.turns`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from datasets import IterableDataset

from hf_prefix_tree.data.counts import TRUNCATION, log_losses, truncation_of, without_unsupervised
from hf_prefix_tree.data.rows import MESSAGE_KINDS, RowOptions, columns_of, row_branches, row_kind, rows_of_batch
from hf_prefix_tree.data.supervision import SUPERVISION, read_sample
from hf_prefix_tree.data.trees import cached_map
from hf_prefix_tree.diffusion.collator import SAMPLE_INDEX, DataCollatorForDiffusionLM
from hf_prefix_tree.training.sampling import PADDING_FEATURE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("input_ids", "attention_mask", *SUPERVISION, SAMPLE_INDEX)
# Fills an uneven last step of distributed training: no token, so it counts nowhere.
EMPTY_FEATURE: dict[str, Any] = {"input_ids": [], "loss_mask": [], SAMPLE_INDEX: -1}


def prepare_diffusion_rows(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    cap: tuple[str, int | None] = ("max_length", None),
) -> Any:
    """
    Rows for [`DataCollatorForDiffusionLM`], each with its `sample_index`, on which its noise depends.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            Rows with `messages` (and `tools`), `prompt` and `completion` (strings or messages), or `input_ids` with a
            column that says what is supervised.
        tokenizer (`PreTrainedTokenizerBase`):
            Renders and tokenizes.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Further variables for the chat template.
        num_proc (`int`, *optional*):
            Processes that render.
        cap (`tuple[str, int]`, *optional*):
            The argument to which the collator truncates samples, and its value. Those of which it would leave nothing
            supervised are left out here.

    Returns:
        A dataset of the same type. Of texts it has `input_ids`, which end with the response, and `loss_mask`; what is
        lost on the way is logged as a warning.

    Raises:
        `ValueError`: If the rows are of no known kind, or malformed, or none is left.
    """
    columns = columns_of(dataset)
    if "input_ids" not in columns:
        kind = row_kind(columns)
        if kind not in MESSAGE_KINDS:
            raise ValueError(
                f"`dataset` has the columns {sorted(columns)}: pass `messages`, `prompt` and `completion`, or "
                f"`input_ids` with one of {', '.join(SUPERVISION)}."
            )
        options = RowOptions(
            kind, tokenizer, dict(dataset.features or {}), chat_template_kwargs=dict(chat_template_kwargs or {})
        )
        dataset = _mapped(
            dataset, _samples, num_proc, batched=True, remove_columns=columns, fn_kwargs={"options": options}
        )
    elif not set(columns) & set(SUPERVISION):
        raise ValueError(
            f"`dataset` has `input_ids` and none of {', '.join(SUPERVISION)}: add a `loss_mask` (all ones to "
            "supervise every token)."
        )
    if "input_ids" not in columns or SAMPLE_INDEX not in columns:
        if isinstance(dataset, IterableDataset):
            dataset = dataset.map(lambda row, index: {SAMPLE_INDEX: index}, with_indices=True)
        else:
            dataset = dataset.add_column(SAMPLE_INDEX, np.arange(len(dataset)))
    name, length = cap
    if length is None:
        return dataset
    dataset = _mapped(dataset, _with_truncation, num_proc, with_indices=True, fn_kwargs={"length": length})
    return without_unsupervised(dataset, (name, length))


class WithEmptyRows:
    """
    A collator that also takes the rows which fill an uneven step.

    Args:
        collator ([`DataCollatorForDiffusionLM`]): The collator.
    """

    def __init__(self, collator: DataCollatorForDiffusionLM) -> None:
        self.collator = collator

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return self.collator([EMPTY_FEATURE if dict(f) == PADDING_FEATURE else f for f in features])


def _mapped(dataset: Any, function: Any, num_proc: int | None, **kwargs: Any) -> Any:
    if isinstance(dataset, IterableDataset):
        return dataset.map(function, **kwargs)
    return cached_map(dataset, function, num_proc=num_proc, desc="Rendering samples", **kwargs)


def _with_truncation(row: Mapping[str, Any], index: int, length: int) -> dict[str, int]:
    return {TRUNCATION: truncation_of(read_sample(row, f"row {index}").weights, length)}


def _samples(batch: Mapping[str, list[Any]], options: RowOptions) -> dict[str, list[list[int]]]:
    rows = list(rows_of_batch(batch))
    samples: dict[str, list[list[int]]] = {"input_ids": [], "loss_mask": []}
    counts: Counter[str] = Counter()
    for row in rows:
        for branch in row_branches(row, options, counts):
            if not branch.weights.any():  # no sample; counted
                continue
            # Text of the template after the turn would mark, clean, where the response ends.
            end = int(np.flatnonzero(branch.weights)[-1]) + 1
            samples["input_ids"].append(branch.input_ids[:end].tolist())
            samples["loss_mask"].append((branch.weights[:end] > 0).astype(int).tolist())
    log_losses(len(rows), counts)
    return samples
