# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trees, diffusion and EAGLE-3 read the same tokens as supervised from the same columns, and refuse the same rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_prefix_tree import DataCollatorForDiffusionLM, DataCollatorForEagle3, pack_eagle3_dataset, prepare_trees
from hf_prefix_tree.data.rows import RowOptions
from hf_prefix_tree.data.supervision import read_sample
from hf_prefix_tree.data.trees import tree_of_rows
from hf_prefix_tree.diffusion.data import prepare_diffusion_rows
from hf_prefix_tree.eagle3.data import prepare_eagle3_rows

Result = tuple[list[int], list[int]]  # token ids; 1 where supervised


def read_by_trees(row: dict[str, Any]) -> Result:
    tree = tree_of_rows([(0, row)], options=RowOptions("tokens"), weighting="tree", on_error="raise")
    return list(tree["input_ids"]), [int(weight) for weight in tree["weights"]]


def read_by_diffusion(row: dict[str, Any]) -> Result:
    batch = DataCollatorForDiffusionLM(0)([row])
    assert ((batch["labels"] != -100) == (batch["loss_mask"] > 0)).all()
    return batch["input_ids"][0].tolist(), batch["loss_mask"][0].int().tolist()


def read_by_eagle3(row: dict[str, Any]) -> Result:
    batch = DataCollatorForEagle3(0)([row])
    return batch["input_ids"][0].tolist(), batch["loss_mask"][0].tolist()


def read_by_packing(row: dict[str, Any]) -> Result:
    (packed,) = pack_eagle3_dataset([row], 16, 0)
    count = sum(packed["attention_mask"])
    return packed["input_ids"][:count], packed["loss_mask"][:count]


READERS = [read_by_trees, read_by_diffusion, read_by_eagle3, read_by_packing]
IDS = [5, 6, 7, 8]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("convert", [list, np.array, torch.tensor])
@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ({"loss_mask": [0, 0, 1, 1]}, [0, 0, 1, 1]),
        ({"loss_mask": [False, False, True, True]}, [0, 0, 1, 1]),
        ({"loss_mask": [0.0, 0.0, 1.0, 1.0]}, [0, 0, 1, 1]),
        ({"completion_mask": [0, 1, 0, 1]}, [0, 1, 0, 1]),
        ({"assistant_masks": [0, 1, 1, 0]}, [0, 1, 1, 0]),
        ({"assistant_masks": [0, 1, 1, 0], "completion_mask": [0, 0, 1, 1]}, [0, 0, 1, 0]),
        ({"labels": [-100, 6, -100, 8]}, [0, 1, 0, 1]),
        ({"labels": [-100, 6, -100, 8], "loss_mask": [0, 1, 0, 1], "completion_mask": [0, 1, 0, 1]}, [0, 1, 0, 1]),
        ({"loss_mask": [0, 1, 1, 0], "attention_mask": [1, 1, 1, 0]}, [0, 1, 1]),
        ({"loss_mask": [0, 1, 1, 1], "attention_mask": [1, 1, 1, 0]}, [0, 1, 1]),
        ({"loss_mask": [0, 0, 1, 1], "position_ids": [0, 1, 2, 3], "seq_lengths": [4]}, [0, 0, 1, 1]),
        ({"loss_mask": [0, 0, 1, 1], "group": [7]}, [0, 0, 1, 1]),
    ],
)
def test_all_methods_supervise_the_same_tokens(read, convert, columns, expected):
    row = {name: convert(values) for name, values in {"input_ids": IDS, **columns}.items()}
    assert read(row) == (IDS[: len(expected)], expected)
    assert read({**row, "assistant_masks": row.get("assistant_masks"), "weights": None}) == (
        IDS[: len(expected)],
        expected,
    )


MASK = {"loss_mask": [0, 0, 1, 1]}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        # columns that contradict each other
        ({"labels": [-100, 6, 7, 8], "completion_mask": [0, 0, 1, 1]}, "`completion_mask`.*`labels`.*1 tokens.*1"),
        ({"labels": IDS, **MASK}, "`loss_mask`.*`labels`.*2 tokens.*0"),
        ({"completion_mask": [0, 1, 1, 1], **MASK}, "`loss_mask`.*`completion_mask`"),
        ({"assistant_masks": [1, 1, 0, 1], "completion_mask": [0, 1, 1, 1], **MASK}, "`completion_mask and assis"),
        ({"labels": [6, 7, 8, -100]}, "`labels` is 6 at index 0 where `input_ids` is 5"),
        ({"labels": [-100, -1, 7, 8]}, "`labels` is -1 at index 1"),
        # values
        ({"loss_mask": [0, 2, 1, 1]}, "`loss_mask` is 2.* at index 1"),
        ({"completion_mask": [0, 0.5, 1, 1]}, "`completion_mask` is 0.5 at index 1"),
        ({"loss_mask": [0, -1, 1, 1]}, "`loss_mask`.*-1.* at index 1"),
        ({"loss_mask": [0, float("nan"), 1, 1]}, "`loss_mask`.*nan at index 1"),
        ({"loss_mask": [0, None, 1, 1]}, "`loss_mask`"),
        ({"loss_mask": ["0", "0", "1", "1"]}, "`loss_mask`"),
        ({"loss_mask": "0011"}, "`loss_mask`"),
        ({**MASK, "attention_mask": [1, 1, 1, 2]}, "`attention_mask` is 2.* at index 3"),
        ({**MASK, "attention_mask": [0, 1, 1, 1]}, "`attention_mask`.*at the end"),
        ({"labels": [-100, 6, None, 8]}, "`labels`"),
        ({"labels": [-100.0, 6.5, 7, 8]}, "`labels`"),
        ({"labels": ["-100", "6", "7", "8"]}, "`labels`"),
        ({"input_ids": [5, -6, 7, 8], **MASK}, "`input_ids`.*-6 at index 1"),
        ({"input_ids": [5, 6.5, 7, 8], **MASK}, "`input_ids`.*6.5 at index 1"),
        ({"input_ids": [5, float("nan"), 7, 8], **MASK}, "`input_ids`.*nan"),
        ({"input_ids": [5, None, 7, 8], **MASK}, "`input_ids`.*None"),
        ({"input_ids": ["5", "6", "7", "8"], **MASK}, "`input_ids`"),
        # shapes
        ({"input_ids": [IDS], **MASK}, "`input_ids`.*2 dimensions"),
        ({"loss_mask": [[0, 0, 1, 1]]}, "`loss_mask`.*2 dimensions"),
        ({"loss_mask": [0, 1, 1]}, "`loss_mask` has 3 entries for 4"),
        ({"labels": [-100, 6, 7, 8, 9]}, "`labels` has 5 entries for 4"),
        ({**MASK, "attention_mask": [1, 1]}, "`attention_mask` has 2 entries for 4"),
        # several sequences in one row
        ({**MASK, "seq_lengths": [2, 2]}, r"`seq_lengths` is \[2, 2\]"),
        ({**MASK, "position_ids": [0, 1, 0, 1]}, r"`position_ids` is \[0, 1, 0, 1\]"),
    ],
)
def test_all_methods_refuse_the_same_rows(read, columns, message):
    with pytest.raises(ValueError, match=rf"(row 0|`features\[0\]`): .*{message}"):
        read({"input_ids": IDS, **columns})


@pytest.mark.parametrize("read", READERS)
def test_arrays_are_checked_like_lists(read):
    for name, values in (("loss_mask", [0.0, np.nan, 1.0, 1.0]), ("input_ids", [5.0, 6.5, 7.0, 8.0])):
        for array in (np.array(values), torch.tensor(values)):
            with pytest.raises(ValueError, match=f"`{name}`"):
                read({"input_ids": IDS, **MASK, name: array})


def test_a_row_that_says_nothing_about_supervision():
    """Of a tree's row every token is supervised; other methods want to be told."""
    assert read_by_trees({"input_ids": IDS}) == (IDS, [0, 1, 1, 1])
    for read in READERS[1:]:
        with pytest.raises(ValueError, match=r"(row 0|`features\[0\]`): .*`input_ids`.*`loss_mask`".replace("`", ".")):
            read({"input_ids": IDS})


def test_weights_are_for_trees():
    """They multiply what is supervised."""
    tree = prepare_trees(Dataset.from_list([{"input_ids": IDS, **MASK, "weights": [1, 1, 2.5, 0.5]}]))[0]
    assert tree["weights"] == [0, 0, 2.5, 0.5]
    for read in READERS[1:]:
        with pytest.raises(ValueError, match=r"`weights`.*`loss_mask`"):
            read({"input_ids": IDS, **MASK, "weights": [1, 1, 2.5, 0.5]})


def test_padding_can_be_kept():
    sample = read_sample({"input_ids": IDS, **MASK, "attention_mask": [1, 1, 1, 0]}, padded=True)
    assert [values.tolist() for values in sample] == [IDS, [0, 0, 1, 1], [1, 1, 1, 0]]


def prepared(method: str, rows: list[dict[str, Any]], streams: bool) -> list[Result]:
    """What the preparation of a method makes of a dataset, or of a stream of the same rows."""
    dataset = Dataset.from_list(rows)
    dataset = dataset.to_iterable_dataset() if streams else dataset
    if method == "trees":
        return [(list(row["input_ids"]), [int(w) for w in row["weights"]]) for row in prepare_trees(dataset)]
    if method == "diffusion":
        collator = DataCollatorForDiffusionLM(0)
        found = prepare_diffusion_rows(dataset, None, cap=("max_seq_len", 8))
        return [
            (b["input_ids"][0].tolist(), b["loss_mask"][0].int().tolist()) for b in ([collator([r]) for r in found])
        ]
    options = {"seq_length": 8, "packed_sequence_size": 0, "strategy": "next_fit", "pad_token_id": 0}
    found = prepare_eagle3_rows(dataset, {"tokenizer": None}, **options)
    return [(list(row["input_ids"]), list(row["loss_mask"])) for row in found]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("method", ["trees", "diffusion", "eagle3"])
def test_datasets_and_streams(method, streams):
    """From the dataset on, where Arrow fills what a row does not have with nulls."""
    empty = dict.fromkeys(("loss_mask", "labels", "completion_mask"))
    rows = [{**empty, "input_ids": IDS, **MASK}, {**empty, "input_ids": [1, 2, 3], "labels": [-100, 2, -100]}]
    assert prepared(method, rows, streams) == [(IDS, [0, 0, 1, 1]), ([1, 2, 3], [0, 1, 0])]
    rows[1]["completion_mask"] = [0, 1, 1]
    with pytest.raises(ValueError, match="row 1: `completion_mask` and `labels` disagree on 1 tokens"):
        prepared(method, rows, streams)
