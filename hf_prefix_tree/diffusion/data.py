# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""From dataset rows to samples of a diffusion language model: token ids and which of them are supervised, unshifted.

Conversations become one sample per assistant turn: text after a turn would tell a model that looks both ways how long
the turn is. Cost: that of rendering, see `hf_prefix_tree.data.turns`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Any

import numpy as np
from datasets import IterableDataset
from transformers import PreTrainedTokenizerBase

from hf_prefix_tree.data.baselines import read_samples
from hf_prefix_tree.data.counts import TRUNCATION, truncation_of, without_unsupervised
from hf_prefix_tree.data.rows import columns_of
from hf_prefix_tree.data.supervision import read_sample
from hf_prefix_tree.data.trees import cached_map
from hf_prefix_tree.diffusion.collator import SAMPLE_INDEX
from hf_prefix_tree.tree.folding import check_not_empty


def prepare_diffusion_rows(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    on_error: str = "raise",
    num_proc: int | None = None,
    group_by: str | None = None,
    cap: tuple[str, int | None] = ("max_length", None),
) -> Any:
    """
    Dataset rows for [`DataCollatorForDiffusionLM`], each with its `sample_index`, on which its noise depends.

    Args:
        dataset (`Dataset` or `IterableDataset`):
            Conversations, prompts and completions, or texts, in a format that [`prepare_trees`] reads, or `input_ids`
            with a column that says what is supervised.
        tokenizer (`PreTrainedTokenizerBase`):
            Renders and tokenizes.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Further variables for the chat template.
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a dataset row that can't be read is an error, or skipped (`"skip"`).
        num_proc (`int`, *optional*):
            Processes that render.
        group_by (`str`, *optional*):
            Column whose equal values make one dataset row of all their samples, of a stream those of consecutive rows:
            `input_ids` and `loss_mask` are then lists of lists. Tokens after the last supervised one are left out.
        cap (`tuple[str, int]`, *optional*):
            The argument to which the collator truncates samples, and its value. Those of which it would leave nothing
            supervised are left out here.

    Returns:
        A dataset of the same type. Of texts it has `input_ids`, which end with the response, and `loss_mask`.

    Raises:
        `ValueError`: If the dataset rows are of no known kind, or malformed, or none is left.
    """
    columns = columns_of(dataset)
    options: dict[str, Any] = {"on_error": on_error, "num_proc": num_proc}
    options["chat_template_kwargs"] = dict(chat_template_kwargs or {})
    if "input_ids" in columns or group_by is None:
        dataset = read_samples(dataset, tokenizer, **options)
    check_not_empty(dataset, "dataset")
    if "input_ids" in columns:  # early, before the model is trained
        for row in islice(dataset, 1):  # a stream may have none left
            read_sample(row, "row 0")
    if group_by is not None:
        dataset = read_samples(dataset, tokenizer, group_by=group_by, max_length=cap[1], **options)
        return cached_map(dataset, _with_indices, with_indices=True, num_proc=num_proc, desc="Numbering samples")
    if "input_ids" not in columns or SAMPLE_INDEX not in columns:
        if isinstance(dataset, IterableDataset):
            dataset = dataset.map(lambda row, index: {SAMPLE_INDEX: index}, with_indices=True)
        else:
            dataset = dataset.add_column(SAMPLE_INDEX, np.arange(len(dataset)))
    name, length = cap
    if length is None:
        return dataset
    options = {"with_indices": True, "num_proc": num_proc, "desc": "Truncating samples"}
    dataset = cached_map(dataset, _with_truncation, fn_kwargs={"length": length}, **options)
    return without_unsupervised(dataset, (name, length))


def _with_indices(row: Mapping[str, Any], index: int) -> dict[str, list[int]]:
    return {SAMPLE_INDEX: [(index << 20) + sample for sample in range(len(row["input_ids"]))]}


def _with_truncation(row: Mapping[str, Any], index: int, length: int) -> dict[str, int]:
    return {TRUNCATION: truncation_of(read_sample(row, f"row {index}").weights, length)}
