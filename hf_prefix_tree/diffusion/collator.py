# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`DataCollatorForDiffusionLM`]: samples to padded batches of a diffusion language model.

    [ content ][ block fill: EOS, supervised ][ padding: PAD ]
    0         raw                         fill end          L

Nothing is shifted: one position is one token. Cost: linear in the positions of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from hf_prefix_tree.data.supervision import IGNORE_INDEX, SUPERVISION, Sample, check_features, located, read_sample
from hf_prefix_tree.training.sampling import PADDING_FEATURE, rounded_up
from hf_prefix_tree.tree.folding import INT64_MAX, check_choice, check_integer, check_length, integer_array

SAMPLE_INDEX = "sample_index"
COLUMNS = ("input_ids", "attention_mask", *SUPERVISION, SAMPLE_INDEX)
_FORMATS = ("pt", "np")


@dataclass
class DataCollatorForDiffusionLM:
    """
    Data collator for diffusion language models: fills blocks with EOS, pads, and says what is supervised.

    A feature has `input_ids` and at least one of `loss_mask` (1 where supervised), TRL's `completion_mask` and
    `assistant_masks` (both: supervised where both are 1, as in TRL), and `labels` (unshifted, -100 where not
    supervised). Several of them must agree. `attention_mask` is optional, all ones by default; tokens at the end that
    it has zeros for are padding, and taken off. Lists, arrays and tensors are accepted, other columns are ignored,
    features are never changed. A feature whose columns are lists of such values is a group of samples, each of which
    becomes a sequence of the batch. With a `Trainer` of your own set `remove_unused_columns=False`, or the masks don't
    arrive here.

    A sample of `raw` tokens is cut to `max_seq_len`, then filled up to whole blocks with EOS that is supervised. The
    batch is padded to its longest filled sample, with PAD that is not attended, and supervised with
    `supervise_padding` only. Where the length cap cuts a sample, there is no fill.

    Args:
        pad_token_id (`int`, *optional*):
            Token id of the padding. Defaults to that of the `processing_class`.
        eos_token_id (`int`, *optional*):
            Token id of the block fill. Defaults to that of the `processing_class`; without either PAD fills.
        block_size (`int`, *optional*):
            Tokens of a block; `None`, 0 or 1: no fill.
        pad_seq_len_divisible (`int`, *optional*):
            Round the length of the batch up to a multiple of it that is also one of `block_size`; `None`, 0 or 1: no
            rounding.
        max_seq_len (`int`, *optional*):
            Most positions of a sequence, also after rounding.
        supervise_padding (`bool`, *optional*, defaults to `False`):
            Whether PAD is supervised. Clean PAD that the model attends to gives the length of the response away.
        response_window (`bool`, *optional*, defaults to `False`):
            Count blocks from the first supervised token, and attend to the fill, instead of counting from the start
            of the sequence and not attending to it. Refuses samples with more than one supervised run.
        processing_class (tokenizer or processor, *optional*):
            Where ids that are not given come from.
        return_tensors (`str`, *optional*, defaults to `"pt"`):
            `"pt"` or `"np"`.

    Returns (`__call__`):
        `dict`: `input_ids`, `attention_mask` and `labels` (-100 where not supervised), int64, and `loss_mask`,
        float32, of shape `(B, L)`; `input_lengths`, int64 of shape `(B,)`: tokens of each sample before any cut,
        without padding. Where features have a `sample_index`, that too, int64 of shape `(B,)`, for seeds of the noise.

    Raises:
        `ValueError`: For ids that can't be found or numbers out of range. When called: for missing or contradicting
            columns, masks of another length or with other values than 0 and 1, packed samples, and more than one
            supervised run under `response_window`.

    Example:

    ```python
    >>> from hf_prefix_tree import DataCollatorForDiffusionLM

    >>> collator = DataCollatorForDiffusionLM(pad_token_id=0, eos_token_id=2, block_size=4)
    >>> short, long = {"input_ids": [7, 8, 9], "loss_mask": [0, 1, 1]}, {"input_ids": [5] * 5, "loss_mask": [1] * 5}
    >>> batch = collator([short, long])
    >>> batch["input_ids"]
    tensor([[7, 8, 9, 2, 0, 0, 0, 0],
            [5, 5, 5, 5, 5, 2, 2, 2]])
    >>> batch["labels"][0], batch["attention_mask"][0], batch["input_lengths"]
    (tensor([-100,    8,    9,    2, -100, -100, -100, -100]), tensor([1, 1, 1, 0, 0, 0, 0, 0]), tensor([3, 5]))

    ```
    """

    pad_token_id: int | None = None
    eos_token_id: int | None = None
    block_size: int | None = None
    pad_seq_len_divisible: int | None = None
    max_seq_len: int | None = None
    supervise_padding: bool = False
    response_window: bool = False
    processing_class: Any = None
    return_tensors: str = "pt"
    keeps_sample_index: ClassVar[bool] = True  # the noise of a training depends on it
    keeps_padding: ClassVar[bool] = False  # of features

    def __post_init__(self) -> None:
        check_choice(self.return_tensors, "return_tensors", _FORMATS)
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)  # of a processor
        for name in ("pad_token_id", "eos_token_id"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(tokenizer, name, None))
        lowest = {"pad_token_id": 0, "eos_token_id": 0, "block_size": 0, "pad_seq_len_divisible": 0, "max_seq_len": 1}
        for name, least in lowest.items():
            if name == "pad_token_id" or getattr(self, name) is not None:
                check_integer(getattr(self, name), name, least)

    @property
    def block_pad_token_id(self) -> int:
        """The id that fills blocks: EOS, or PAD where there is no EOS."""
        return self.pad_token_id if self.eos_token_id is None else self.eos_token_id  # type: ignore[return-value]

    def __call__(self, features: Sequence[Mapping[str, Any]], return_tensors: str | None = None) -> dict[str, Any]:
        return_tensors = return_tensors or self.return_tensors
        check_choice(return_tensors, "return_tensors", _FORMATS)
        check_features(features)
        features = [sample for feature in features for sample in _samples(feature)]
        samples, ends = [], []  # an end is where the last block ends, also where that is beyond the cap
        block = self.block_size or 1
        for index, feature in enumerate(features):
            with located(f"`features[{index}]`"):
                sample = read_sample(feature, padded=self.keeps_padding)
                prefix = self._prefix(sample)
            samples.append(sample)
            ends.append(prefix + rounded_up(len(sample.input_ids) - prefix, block))
        multiple = math.lcm(block, self.pad_seq_len_divisible or 1) if (self.pad_seq_len_divisible or 1) > 1 else 1
        length = max(1, min(rounded_up(max(ends), multiple), self.max_seq_len or INT64_MAX))
        batch: dict[str, Any] = {
            "input_ids": np.full((len(samples), length), self.pad_token_id, dtype=np.int64),
            "loss_mask": np.full((len(samples), length), self.supervise_padding, dtype=np.float32),
            "attention_mask": np.zeros((len(samples), length), dtype=np.int64),
        }
        for row, (sample, end) in enumerate(zip(samples, ends, strict=True)):
            raw = len(sample.input_ids)
            filled = (self.block_pad_token_id, 1, int(self.response_window))
            for values, content, fill in zip(batch.values(), sample, filled, strict=True):
                values[row, raw:end] = fill
                values[row, :raw] = content[:length]
        batch["labels"] = np.where(batch["loss_mask"] != 0, batch["input_ids"], IGNORE_INDEX)
        batch["input_lengths"] = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
        # dataset rows that fill an uneven step have no index
        indices = [-1 if f.keys() == PADDING_FEATURE.keys() else f.get(SAMPLE_INDEX) for f in features]
        if any(index is not None for index in indices):
            if None in indices:
                raise ValueError(f"Some features have a `{SAMPLE_INDEX}` and others don't: give every one its own.")
            batch[SAMPLE_INDEX] = integer_array(indices, SAMPLE_INDEX, minimum=-1)
        if return_tensors == "np":
            return batch
        return {name: torch.from_numpy(value) for name, value in batch.items()}

    def _prefix(self, sample: Sample) -> int:
        """Where blocks start: 0, or the first supervised token, or the end of a sample without one."""
        if not self.response_window:
            return 0
        starts = np.flatnonzero(np.diff((sample.weights > 0).astype(np.int8), prepend=0) == 1)
        if len(starts) > 1:
            raise ValueError(
                f"more than one supervised run under response_window=True: {len(starts)}, at {starts.tolist()}. Make "
                "one sample per turn, or pass `response_window=False`."
            )
        return int(starts[0]) if len(starts) else len(sample.input_ids)


def _samples(feature: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A feature, or the samples of one that is a group of them."""
    columns = {name: feature[name] for name in COLUMNS if feature.get(name) is not None}
    told = [columns.get("input_ids"), *(columns[name] for name in SUPERVISION if name in columns)]
    if not all(isinstance(values, list) and values and np.ndim(values[0]) for values in told):
        return [feature]
    for name, values in columns.items():
        check_length(values, name, len(columns["input_ids"]), "samples")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def supervised_tokens(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """
    Which tokens of a collated batch are supervised: its `loss_mask`, without dataset rows that fill an uneven step.

    Args:
        batch (`Mapping[str, torch.Tensor]`): Of [`DataCollatorForDiffusionLM`].

    Returns:
        `torch.Tensor` of shape `(B, L)`, bool.
    """
    return (batch["loss_mask"] != 0) & (batch["input_lengths"] > 0)[:, None]
