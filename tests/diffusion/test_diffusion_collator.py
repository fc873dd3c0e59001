# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The diffusion collator: recorded values, a slot-by-slot transcription of the rules, and what it refuses."""

from __future__ import annotations

import copy
import json
import pickle
import random
from math import ceil, lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import BatchEncoding, PreTrainedTokenizerFast

from hf_prefix_tree import DataCollatorForDiffusionLM, DLLMCollator

CASES = json.loads((Path(__file__).parent / "data" / "dllm_collator.json").read_text())
KEYS = ["input_ids", "loss_mask", "attention_mask", "input_lengths"]


def test_the_recorded_values_are_the_shared_ones(shared_data):
    assert json.loads(shared_data("goldens/dllm_collator.json").read_text()) == CASES


def test_the_recorded_values_cover_refusals():
    assert len(CASES) == 42 and sum("raises" in case for case in CASES) == 2


@pytest.mark.parametrize("collator_class", [DLLMCollator, DataCollatorForDiffusionLM])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_recorded_values(case: dict[str, Any], collator_class: type):
    collator = collator_class(**case["args"])
    if "raises" in case:
        with pytest.raises(ValueError, match=case["raises"]):
            collator(case["batch"])
        return
    batch = collator(case["batch"])
    if collator_class is DLLMCollator:
        assert list(batch) == KEYS
    for name in KEYS:
        assert batch[name].tolist() == case["expect"][name]
        assert str(batch[name].dtype) == f"torch.{case['dtypes'][name]}"


def transcribed(
    batch: list[dict[str, list[int]]],
    pad_token_id: int,
    eos_token_id: int | None,
    block_size: int | None,
    pad_seq_len_divisible: int | None,
    max_seq_len: int | None,
    supervise_padding: bool,
    response_window: bool,
) -> dict[str, list]:
    """The rules, one slot at a time."""
    fill_ends = []
    for sample in batch:
        raw = len(sample["input_ids"])
        content = raw if max_seq_len is None else min(raw, max_seq_len)
        prefix = 0
        if response_window:
            if "01" in "".join(map(str, sample["loss_mask"])).lstrip("0"):
                raise ValueError("multi-turn")
            prefix = min(sample["loss_mask"].index(1) if 1 in sample["loss_mask"] else raw, content)
        end = content
        if block_size is not None and block_size > 1:
            end = prefix + ceil((content - prefix) / block_size) * block_size
        fill_ends.append(end)
    length = max(fill_ends)
    if pad_seq_len_divisible is not None and pad_seq_len_divisible > 1:
        step = lcm(block_size or 1, pad_seq_len_divisible)
        while length % step:
            length += 1
    if max_seq_len is not None and length > max_seq_len:
        length = max_seq_len
    if length == 0:
        length = 1
    out: dict[str, list] = {name: [] for name in KEYS}
    for sample, end in zip(batch, fill_ends, strict=True):
        raw = len(sample["input_ids"])
        slots = []
        for slot in range(length):
            if slot < raw:
                slots.append((sample["input_ids"][slot], sample["loss_mask"][slot], sample["attention_mask"][slot]))
            elif slot < end:
                slots.append((pad_token_id if eos_token_id is None else eos_token_id, 1, 1 if response_window else 0))
            else:
                slots.append((pad_token_id, 1 if supervise_padding else 0, 0))
        for name, values in zip(KEYS, zip(*slots, strict=True), strict=False):
            out[name].append(list(values))
        out["input_lengths"].append(raw)
    return out


def random_sample(rng: random.Random, single_run: bool) -> dict[str, list[int]]:
    raw = rng.choice([0, 1, 2, 3, 5, 8, 13, 21])
    mask = [rng.randint(0, 1) for _ in range(raw)]
    if single_run:
        start = rng.randint(0, raw)
        end = rng.randint(start, raw)
        mask = [int(start <= i < end) for i in range(raw)]
    visible = rng.randint(0, raw) if rng.random() < 0.2 else raw
    return {
        "input_ids": [rng.randint(3, 99) for _ in range(raw)],
        "loss_mask": mask,
        "attention_mask": [int(i < visible) for i in range(raw)],
    }


def without_padding(sample: dict[str, list[int]]) -> dict[str, list[int]]:
    count = len("".join(map(str, sample["attention_mask"])).rstrip("0"))
    return {name: column[:count] for name, column in sample.items()}


def test_random_parameters_equal_the_transcription():
    """Also where a cap cuts prompts, blocks don't divide the cap, PAD is EOS, and samples are empty."""
    rng = random.Random(0)
    refused = 0
    for _ in range(2000):
        args = {
            "pad_token_id": rng.choice([0, 2]),
            "eos_token_id": rng.choice([None, 0, 2]),
            "block_size": rng.choice([None, 0, 1, 2, 3, 4, 8]),
            "pad_seq_len_divisible": rng.choice([None, 0, 1, 2, 6, 16]),
            "max_seq_len": rng.choice([None, 1, 4, 7, 10, 16, 30]),
            "supervise_padding": rng.random() < 0.5,
            "response_window": rng.random() < 0.5,
        }
        batch = [random_sample(rng, rng.random() < 0.9) for _ in range(rng.randint(1, 4))]
        for collator_class in (DLLMCollator, DataCollatorForDiffusionLM):
            is_drop_in = collator_class is DLLMCollator
            try:
                expected = transcribed(batch if is_drop_in else [without_padding(own) for own in batch], **args)
            except ValueError:
                refused += is_drop_in
                with pytest.raises(ValueError, match="supervised run"):
                    collator_class(**args)(batch)
                continue
            got = collator_class(**args)(batch)
            labels = None if is_drop_in else got.pop("labels")
            assert {name: value.tolist() for name, value in got.items()} == expected, args
            if labels is not None:
                assert torch.equal(labels == -100, got["loss_mask"] == 0)
                assert torch.equal(labels[labels != -100], got["input_ids"][labels != -100])
                assert labels.dtype == torch.int64
    assert 50 < refused < 500


SAMPLES = [
    {"input_ids": [11, 12, 13, 14, 15], "loss_mask": [0, 0, 1, 1, 1], "attention_mask": [1, 1, 1, 1, 1]},
    {"input_ids": [21, 22, 23], "loss_mask": [0, 1, 1], "attention_mask": [1, 1, 1]},
]


def values(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items()}


@pytest.mark.parametrize(
    "convert",
    [
        np.array,
        torch.tensor,
        lambda x: np.array(x, dtype=np.int32),
        lambda x: torch.tensor(x, dtype=torch.int32),
        tuple,
    ],
)
def test_forms_of_features(convert):
    expected = values(DataCollatorForDiffusionLM(0, 2, 4)(SAMPLES))
    features = [{name: convert(column) for name, column in sample.items()} for sample in SAMPLES]
    for feature in features:
        feature["loss_mask"] = feature["loss_mask"] if convert is tuple else feature["loss_mask"] == 1
    assert values(DataCollatorForDiffusionLM(0, 2, 4)(features)) == expected
    floats = [{**sample, "loss_mask": torch.tensor(sample["loss_mask"], dtype=torch.bfloat16)} for sample in SAMPLES]
    assert values(DataCollatorForDiffusionLM(0, 2, 4)(floats)) == expected
    assert values(DataCollatorForDiffusionLM(0, 2, 4)([BatchEncoding(sample) for sample in SAMPLES])) == expected


def test_attention_mask_is_optional_and_other_columns_are_ignored():
    features = [{"input_ids": s["input_ids"], "loss_mask": s["loss_mask"], "text": "a"} for s in SAMPLES]
    assert values(DataCollatorForDiffusionLM(0, 2, 4)(features)) == values(
        DataCollatorForDiffusionLM(0, 2, 4)(SAMPLES)
    )
    with pytest.raises(ValueError, match="`attention_mask`"):
        DLLMCollator(0, 2, 4)(features)


@pytest.mark.parametrize("response_window", [False, True])
def test_the_fill_comes_before_the_padding_of_a_sample(response_window):
    collator = DataCollatorForDiffusionLM(0, 2, 4, response_window=response_window)
    padded = [
        {name: column + [0] * count for name, column in sample.items()}
        for sample, count in zip(SAMPLES, (0, 6), strict=True)
    ]
    assert values(collator(padded)) == values(collator(SAMPLES))


def test_the_drop_in_reads_three_columns_and_no_more():
    """Its features may hold labels for a causal model, which are shifted."""
    features = [{**sample, "labels": [*sample["input_ids"][1:], -100], "seq_lengths": [1, 2]} for sample in SAMPLES]
    assert values(DLLMCollator(0, 2, 4)(features)) == values(DLLMCollator(0, 2, 4)(SAMPLES))
    with pytest.raises(ValueError, match="unshifted"):
        DataCollatorForDiffusionLM(0, 2, 4)([{**features[0], "seq_lengths": None}])


@pytest.mark.parametrize("convert", [list, torch.tensor])
def test_features_stay_what_they_were(convert):
    features = [{name: convert(column) for name, column in sample.items()} for sample in SAMPLES]
    before = copy.deepcopy(features)
    batch = DataCollatorForDiffusionLM(0, 2, 8, max_seq_len=4, supervise_padding=True)(features)
    for value in batch.values():
        value.fill_(77)
    for feature, old in zip(features, before, strict=True):
        assert list(feature) == list(old)
        assert all(list(feature[name]) == list(old[name]) for name in old)


def test_trl_columns_say_the_same_as_loss_mask():
    expected = values(DataCollatorForDiffusionLM(0, 2, 4)(SAMPLES))

    def with_columns(columns) -> list[dict[str, Any]]:
        return [{"input_ids": s["input_ids"], **columns(s)} for s in SAMPLES]

    def labels(sample) -> list[int]:
        return [i if m else -100 for i, m in zip(sample["input_ids"], sample["loss_mask"], strict=True)]

    for columns in (
        lambda s: {"completion_mask": s["loss_mask"]},
        lambda s: {"assistant_masks": s["loss_mask"], "labels": None},
        lambda s: {"labels": labels(s)},
        lambda s: {"labels": labels(s), "completion_mask": s["loss_mask"], "loss_mask": s["loss_mask"]},
        # As in TRL: supervised where both are 1. `assistant_masks` may mark turns of the prompt.
        lambda s: {"completion_mask": s["loss_mask"], "assistant_masks": [1] * len(s["input_ids"])},
    ):
        assert values(DataCollatorForDiffusionLM(0, 2, 4)(with_columns(columns))) == expected


def test_response_window_counts_from_any_supervision_column():
    collator = DataCollatorForDiffusionLM(0, 2, 4, response_window=True)
    assert collator([{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}])["input_ids"].tolist() == [[5, 6, 7, 2, 2]]


def test_return_tensors():
    expected = DataCollatorForDiffusionLM(0, 2, 4)(SAMPLES)
    collator = DataCollatorForDiffusionLM(0, 2, 4, return_tensors="np")
    for batch in (collator(SAMPLES), DataCollatorForDiffusionLM(0, 2, 4)(SAMPLES, return_tensors="np")):
        assert all(isinstance(value, np.ndarray) for value in batch.values())
        assert {name: (value.tolist(), str(value.dtype)) for name, value in batch.items()} == {
            name: (value.tolist(), str(value.dtype).removeprefix("torch.")) for name, value in expected.items()
        }
    assert torch.is_tensor(collator(SAMPLES, return_tensors="pt")["labels"])
    for collator_class in (DataCollatorForDiffusionLM, DLLMCollator):
        with pytest.raises(ValueError, match=r"`return_tensors`.*'tf'"):
            collator_class(0)(SAMPLES, return_tensors="tf")


def test_sample_index_is_passed_through():
    features = [{**sample, "sample_index": index} for sample, index in zip(SAMPLES, (7, 2**40), strict=True)]
    batch = DataCollatorForDiffusionLM(0)(features)
    assert batch["sample_index"].dtype == torch.int64 and batch["sample_index"].tolist() == [7, 2**40]
    assert "sample_index" not in DataCollatorForDiffusionLM(0)(SAMPLES)
    assert list(DLLMCollator(0)(features)) == KEYS
    with pytest.raises(ValueError, match="`sample_index`"):
        DataCollatorForDiffusionLM(0)([features[0], SAMPLES[1]])


def test_pickle():
    collator = DLLMCollator(0, 2, 4, response_window=True)
    assert values(pickle.loads(pickle.dumps(collator))(SAMPLES)) == values(collator(SAMPLES))


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    vocabulary = {"[UNK]": 0, "[PAD]": 1, "[EOS]": 2}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, "[UNK]")), **special)


def test_ids_of_the_processing_class():
    own = tokenizer(pad_token="[PAD]", eos_token="[EOS]")
    collator = DataCollatorForDiffusionLM(processing_class=own, block_size=4)
    assert (collator.pad_token_id, collator.eos_token_id, collator.block_pad_token_id) == (1, 2, 2)
    assert collator(SAMPLES)["input_ids"][1].tolist() == [21, 22, 23, 2, 1, 1, 1, 1]
    processor = SimpleNamespace(tokenizer=own)
    assert DataCollatorForDiffusionLM(processing_class=processor).eos_token_id == 2
    given = DataCollatorForDiffusionLM(0, 9, processing_class=own)
    assert (given.pad_token_id, given.block_pad_token_id) == (0, 9)
    assert DataCollatorForDiffusionLM(processing_class=tokenizer(pad_token="[PAD]")).block_pad_token_id == 1
    with pytest.raises(ValueError, match="`pad_token_id`"):
        DataCollatorForDiffusionLM(processing_class=tokenizer(eos_token="[EOS]"))
    with pytest.raises(ValueError, match="`pad_token_id`"):
        DataCollatorForDiffusionLM()
    assert DLLMCollator().pad_token_id == DLLMCollator().block_pad_token_id == 0
    assert DLLMCollator(eos_token_id=0, pad_token_id=5).block_pad_token_id == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"return_tensors": "tf"}, "`return_tensors`.*'tf'"),
        ({"eos_token_id": [1, 2]}, r"`eos_token_id`.*\[1, 2\]"),
        ({"pad_token_id": -1}, "`pad_token_id`.*-1"),
        ({"block_size": -4}, "`block_size`.*-4"),
        ({"pad_seq_len_divisible": -1}, "`pad_seq_len_divisible`.*-1"),
        ({"max_seq_len": 0}, "`max_seq_len`.*0"),
    ],
)
def test_refused_arguments(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DataCollatorForDiffusionLM(**{"pad_token_id": 0, **arguments})


GOOD = {"input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": None}, r"`features\[1\]`.*`input_ids`"),
        ({"loss_mask": None}, "`remove_unused_columns=False`"),
        ({"loss_mask": [1, 1]}, "`loss_mask`.*3.*`input_ids`"),
        ({"attention_mask": [1] * 4}, "`attention_mask`.*3.*`input_ids`"),
        ({"loss_mask": None, "labels": [4]}, "`labels`.*3"),
        ({"completion_mask": [1]}, "`completion_mask`.*3"),
        ({"loss_mask": [0, 2, 1]}, "`loss_mask`.*0.*1"),
        ({"loss_mask": [0, 0.5, 1]}, "`loss_mask`"),
        ({"input_ids": [[4, 5, 6]]}, "`input_ids`.*2 dimensions"),  # a group of samples
        ({"input_ids": [[[4, 5, 6]]], "loss_mask": [[1]]}, "`input_ids`.*2 dimensions"),
        ({"completion_mask": [0, 0, 1]}, "`loss_mask`.*`completion_mask`.*1"),
        (
            {"completion_mask": [1, 1, 1], "assistant_masks": [1, 1, 1]},
            "`loss_mask`.*`completion_mask and assistant_masks`.*1.*0",
        ),
        ({"labels": [-100, -100, 6]}, "`loss_mask`.*`labels`.*1"),
        ({"loss_mask": None, "labels": [5, 6, -100]}, "5.*4.*0"),
        ({"seq_lengths": [2, 1]}, "`seq_lengths`.*2.*1"),
        ({"seq_lengths": np.array([2, 1])}, "`seq_lengths`.*2.*1"),
        ({"seq_lengths": torch.tensor([1, 1, 1])}, "`seq_lengths`.*1.*1.*1"),
    ],
)
def test_refused_features(change: dict[str, Any], message: str):
    DataCollatorForDiffusionLM(0)([GOOD, {**GOOD, "seq_lengths": [3], "completion_mask": [0, 1, 1]}])
    with pytest.raises(ValueError, match=message):
        DataCollatorForDiffusionLM(0)([GOOD, {**GOOD, **change}])


def test_refused_batches():
    cut = {"input_ids": [1, 2, 3, 4], "loss_mask": [1, 0, 0, 1]}
    with pytest.raises(ValueError, match=r"supervised run.*response_window"):
        DataCollatorForDiffusionLM(0, max_seq_len=2, response_window=True)([cut])
    assert DataCollatorForDiffusionLM(0, max_seq_len=2)([cut])["labels"].tolist() == [[1, -100]]
    for name in ("input_ids", "loss_mask", "attention_mask"):
        with pytest.raises(ValueError, match=f"`features\\[1\\]`.*`{name}`"):
            DLLMCollator()([SAMPLES[0], {key: value for key, value in SAMPLES[1].items() if key != name}])
