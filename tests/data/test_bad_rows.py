"""Bad rows, features and options, one of each kind that the fuzz tests found: an error that names what is wrong."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset

from hf_prefix_tree import (
    Branch,
    DataCollatorForDiffusionLM,
    DataCollatorForEagle3,
    DataCollatorForPrefixTree,
    DiffusionSFTConfig,
    DLLMCollator,
    Eagle3Config,
    PrefixTree,
    build_eagle3_dataloader,
    conversation_branches,
    fold,
    fold_shared_prefix_rollouts,
    pack_eagle3_dataset,
    prefix_tree_collate_fn,
    prepare_trees,
)
from hf_prefix_tree.diffusion.data import prepare_diffusion_rows
from hf_prefix_tree.report.gain import load_rows, read_tools
from hf_prefix_tree.report.text import console, table
from tests.support.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ROWS = {
    "input_ids": {"input_ids": [5, 6]},
    "messages": {"messages": TALK},
    "prompt_ids": {"prompt_ids": [5], "completions": [[6]]},
    "completions": {"prompt_ids": [5], "completions": [[6]]},
    "branches": {"branches": [{"input_ids": [5, 6], "weights": [0.0, 1.0]}]},
    "parents": {"parents": [-1], "texts": ["ab"]},
    "texts": {"parents": [-1], "texts": ["ab"]},
    "input": {"input": "a", "nodes": [{"step": 0, "text": "b", "kept": True}]},
    "nodes": {"input": "a", "nodes": [{"step": 0, "text": "b", "kept": True}]},
    "prompt": {"prompt": "a", "completion": "b"},
    "completion": {"prompt": "a", "completion": "b"},
}
DEEP = "[" * 5000 + "]" * 5000


def stream_of(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


@pytest.mark.parametrize("make", [Dataset.from_list, stream_of])
@pytest.mark.parametrize("group_by", [None, "g"])
@pytest.mark.parametrize("name", ROWS)
def test_a_missing_column_is_named_or_its_row_skipped(name, group_by, make):
    good = {**ROWS[name], "g": 1}
    rows = [good, {**good, name: None}]
    with pytest.raises(ValueError, match=f"^row 1: `{name}` is missing"):
        list(prepare_trees(make(rows), TOKENIZER, group_by=group_by))
    (tree,) = prepare_trees(make(rows), TOKENIZER, group_by=group_by, on_error="skip")
    (expected,) = prepare_trees(make([good]), TOKENIZER)
    assert PrefixTree.from_dict(tree) == PrefixTree.from_dict(expected)


@pytest.mark.parametrize("group", [None, float("nan"), [1], ([1],), np.array([1, 2]), torch.ones(2)])
def test_groups_that_can_name_none(group):
    good = {"branches": [{"input_ids": [5, 6], "weights": [0.0, 1.0]}], "g": 1}
    with pytest.raises(ValueError, match=r"^row 1: `group_by` is 'g'"):
        list(prepare_trees(stream_of([good, {**good, "g": group}]), group_by="g"))
    assert len(list(prepare_trees(stream_of([good, {**good, "g": group}]), group_by="g", on_error="skip"))) == 1


def by_diffusion(rows, on_error):
    prepared = prepare_diffusion_rows(stream_of(rows), TOKENIZER, on_error=on_error, cap=("max_length", 99))
    return [row["input_ids"] for row in prepared]


def by_diffusion_from_a_dataset(rows, on_error):
    prepared = prepare_diffusion_rows(Dataset.from_list(rows), TOKENIZER, on_error=on_error, cap=("max_length", 99))
    return prepared["input_ids"][:]


def by_packing(rows, on_error):
    packed = pack_eagle3_dataset(rows, 99, 0, tokenizer=TOKENIZER, on_error=on_error)
    return [row["input_ids"][: sum(row["attention_mask"])] for row in packed]


def by_loading(rows, on_error):
    loader = build_eagle3_dataloader(
        Dataset.from_list(rows), TOKENIZER, seq_length=99, shuffle=False, on_error=on_error, pad_token_id=0
    )
    return [batch["input_ids"][0, : batch["attention_mask"].sum()].tolist() for batch in loader]


@pytest.mark.parametrize("prepare", [by_diffusion, by_diffusion_from_a_dataset, by_packing, by_loading])
@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("messages", {"messages": TALK}, {"messages": None}),
        ("messages", {"messages": TALK}, {"messages": [{"role": "user", "content": "a"}]}),
        ("input_ids", {"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": None, "loss_mask": [0, 1]}),
        ("input_ids", {"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [5, -1], "loss_mask": [0, 1]}),
        ("loss_mask", {"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [5, 6], "loss_mask": [0, None]}),
    ],
)
def test_unreadable_rows_are_named_or_skipped(prepare, name, good, bad):
    with pytest.raises(ValueError, match=f"^row 1: .*`{name}`"):
        prepare([good, bad, good], "raise")
    (first, *_) = alone = prepare([good, good], "raise")
    assert prepare([good, bad, good], "skip") == alone and first
    with pytest.raises(ValueError, match="`on_error`"):
        prepare([good], "ignore")


@pytest.mark.parametrize("config", [DiffusionSFTConfig, Eagle3Config])
def test_the_option_of_the_trainers(config):
    with pytest.raises(ValueError, match="`on_error`"):
        config("unused", on_error="ignore", use_cpu=True, bf16=False)


@pytest.mark.parametrize(
    ("where", "row"),
    [
        (r"messages.*\.content", {"messages": [{"role": "user", "content": "\ud83d"}, TALK[1]]}),
        (r"messages.*\.content", {"messages": json.dumps([{"role": "user", "content": "\ud83d"}, TALK[1]])}),
        ("prompt", {"prompt": "\ud83d", "completion": "b"}),
        ("completion", {"prompt": "a", "completion": "\ud83d"}),
        (r"texts\[0\]", {"parents": [-1], "texts": ["\ud83d"]}),
        ("input", {"input": "\ud83d", "nodes": [{"step": 0, "text": "b", "kept": True}]}),
        (r"nodes\[0\]\.text", {"input": "a", "nodes": [{"step": 0, "text": "\ud83d", "kept": True}]}),
        ("messages", {"messages": DEEP}),
        (
            "messages",
            {"messages": [{"role": "user", "content": "a", "x": json.loads("[" * 150 + "]" * 150)}, TALK[1]]},
        ),
        ("chat_template_kwargs", {"messages": TALK, "chat_template_kwargs": "{}"}),
        ("chat_template_kwargs", {"messages": TALK, "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}),
        ("tools", {"messages": TALK, "tools": DEEP}),
        ("parents", {"parents": [np.array([1, 0])], "texts": ["a"]}),
        (r"nodes\[0\]\.step", {"input": "a", "nodes": [{"step": True, "text": "b", "kept": True}]}),
    ],
)
def test_text_that_cannot_be_read(where, row):
    with pytest.raises(ValueError, match=f"^row 0: `{where}"):
        list(prepare_trees(stream_of([row]), TOKENIZER))


def test_a_tool_of_a_group_that_is_a_list():
    with pytest.raises(ValueError, match=r"^row 0: `tools` has no entry for group="):
        list(prepare_trees(stream_of([{"messages": TALK, "group": [1]}]), TOKENIZER, tools={"a": []}))


def test_a_call_without_a_name_is_scored():
    call = {"role": "assistant", "tool_calls": [{"function": "f"}]}
    rows = [{"messages": [TALK[0], call, *TALK]}, {"messages": TALK}]
    options = {"selection_metric": "branching_score", "max_examples": 2, "on_error": "skip"}
    assert len(prepare_trees(Dataset.from_list(rows), TOKENIZER, **options)) >= 1


TREE = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1])]).to_dict()
PACKED = pack_eagle3_dataset([{"input_ids": [5, 6], "loss_mask": [0, 1]}] * 2, 6, 0)[0]
GROUP = {
    "input_ids": [1, 2, 3, 4],
    "labels": [-100, -100, 4, -100],
    "node_lengths": [2, 2],
    "sample_paths": [[0, 1]],
}
DOCUMENT = {"input_ids": [5, 6], "loss_mask": [0, 1]}
COLLATORS = {
    "trees": DataCollatorForPrefixTree(0),
    "diffusion": DataCollatorForDiffusionLM(0),
    "eagle3": DataCollatorForEagle3(0),
    "nemo": prefix_tree_collate_fn,
    "dllm": DLLMCollator(0),
}


@pytest.mark.parametrize(
    ("collator", "name", "feature"),
    [
        *((collator, "(is|must|it)", 5) for collator in COLLATORS),
        ("trees", "weights", {**TREE, "weights": np.array([0.0, 1, 0.5, 0.5, 0.25])}),
        ("trees", "branch_count", {**TREE, "branch_count": np.array([0, 2, 1, 0, 2])}),
        ("trees", "num_branches", {**TREE, "num_branches": 2**64}),
        ("eagle3", "position_ids", {**PACKED, "position_ids": [0, 1, 2, 3, 4, 5]}),
        ("eagle3", "doc_remaining", {**PACKED, "doc_remaining": [3, 2, 1, 0, 0, 0]}),
        ("eagle3", "attention_mask", {**PACKED, "attention_mask": [1, 1, 1, 0, 1, 0]}),
        ("eagle3", "loss_mask", {**PACKED, "loss_mask": [0, 1, 0, 1, 0, 1]}),
        ("eagle3", "loss_mask", {**PACKED, "loss_mask": [0, 1, 0, 3, 0, 0]}),
        ("eagle3", "seq_lens", {**PACKED, "seq_lens": [2, 3]}),
        ("eagle3", "seq_lens", {**PACKED, "seq_lens": [5, 1]}),
        ("eagle3", "seq_lens", {**PACKED, "seq_lens": [2**62] * 4 + [6]}),
        ("eagle3", "input_ids", {**PACKED, "input_ids": [3.9, 6, 5, 6, 0, 0]}),
        ("eagle3", "seq_lens", {**PACKED, "seq_lens": None}),
        *((collator, "input_ids", {**DOCUMENT, "input_ids": [[1], [2, 3]]}) for collator in ("diffusion", "eagle3")),
        *((collator, "input_ids", {**DOCUMENT, "input_ids": ["a", "b"]}) for collator in ("diffusion", "eagle3")),
        *(
            (collator, "position_ids", {**DOCUMENT, "position_ids": [[0], [1, 2]]})
            for collator in ("diffusion", "eagle3")
        ),
        ("dllm", "input_ids", {**DOCUMENT, "attention_mask": [1, 1], "input_ids": [[1], [2, 3]]}),
        ("nemo", "node_lengths", {**GROUP, "node_lengths": [5, -2]}),
        ("nemo", "input_ids", {**GROUP, "input_ids": [1, 2, 3.9, 4]}),
        ("nemo", "input_ids", {**GROUP, "input_ids": [1, 2, 3, 2**63]}),
        ("nemo", "labels", {**GROUP, "labels": None}),
        ("nemo", "sample_paths", {**GROUP, "sample_paths": [[0, "1"]]}),
    ],
)
def test_features_that_cannot_be_read(collator, name, feature):
    with pytest.raises(ValueError, match=rf"`features\[0\].*{name}"):
        COLLATORS[collator]([feature])


def test_the_good_ones_are_read():
    assert COLLATORS["trees"].trees([TREE])[0].num_branches == 2
    assert COLLATORS["eagle3"]([PACKED])["seq_lens"].tolist() == [[2, 4]]
    assert COLLATORS["nemo"]([GROUP], pad_to_multiple_of=1)["labels"].tolist() == [[-100, -100, -100, 4]]


def test_a_sample_index_is_not_rounded():
    with pytest.raises(ValueError, match="`sample_index`"):
        DataCollatorForDiffusionLM(0)([{**DOCUMENT, "sample_index": 3.9}])


@pytest.mark.parametrize("weighting", ["tree", "branch", "branch_mean", "once"])
def test_weights_of_a_stored_tree_are_those_of_its_branches(weighting):
    row = fold([Branch([5, 6, 7], [0, 1, 0.25]), Branch([5, 6], [0, 0]), Branch([5, 6, 7], [0, 3, 1])], weighting)
    assert PrefixTree.from_dict(row.to_dict()) == row
    with pytest.raises(ValueError, match="`weights` contradicts"):
        PrefixTree.from_dict({**row.to_dict(), "weights": row.weights * 1.001})


@pytest.mark.parametrize("value", [True, 3.0, 3.9, "3", None, 2**64])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("pad_token_id", lambda value: DataCollatorForPrefixTree(value)),
        ("pad_to_multiple_of", lambda value: DataCollatorForPrefixTree(0, pad_to_multiple_of=value)),
        ("pad_token_id", lambda value: DataCollatorForEagle3(value)),
        ("pad_to_multiple_of", lambda value: DataCollatorForEagle3(0, pad_to_multiple_of=value)),
        ("block_size", lambda value: DataCollatorForDiffusionLM(0, block_size=value or 0.5)),
        ("max_seq_len", lambda value: DataCollatorForDiffusionLM(0, max_seq_len=value or 0.5)),
        ("pad_token_id", lambda value: prefix_tree_collate_fn([GROUP], value)),
        ("ignore_idx", lambda value: fold_shared_prefix_rollouts([1], [[2]], value)),
        ("packed_sequence_size", lambda value: pack_eagle3_dataset([DOCUMENT], value, 0)),
        ("pad_token_id", lambda value: pack_eagle3_dataset([DOCUMENT], 8, value)),
        ("batch_size", lambda value: build_eagle3_dataloader([DOCUMENT], pad_token_id=0, batch_size=value)),
        ("seq_length", lambda value: build_eagle3_dataloader([DOCUMENT], pad_token_id=0, seq_length=value)),
        ("block_size", lambda value: DiffusionSFTConfig("unused", block_size=value, use_cpu=True, bf16=False)),
        ("ttt_steps", lambda value: Eagle3Config("unused", ttt_steps=value, use_cpu=True, bf16=False)),
    ],
)
def test_options_that_are_no_integers(name, call, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        call(value)


def test_names_do_not_reach_the_terminal(capsys):
    console().print(table("a\x1b[2Jb\u202e", [["group"], ["\x1b[31mred\n\x07"]]))
    printed = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in printed)
    assert "[31mred" in printed and "a [2Jb" in printed


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"texts": ["\\ud83d"]}\n{"texts": ["a"]}\n', "line 1: broken JSON"),
        ('{"a": 1}\n{"a": ' + DEEP + "}\n", "(line 2: broken JSON|depth limit)"),  # of Python, or since 3.12 of Arrow
    ],
)
def test_lines_that_cannot_be_read(tmp_path, content, problem):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=f"{path.name}.*{problem}"):
        load_rows(path)


def test_tools_nested_too_deep(tmp_path):
    path = tmp_path / "tools.json"
    path.write_text(DEEP)
    with pytest.raises(ValueError, match="`--tools`"):
        read_tools(path, "--tools")
    with pytest.raises(ValueError, match="`tools"):
        conversation_branches(TALK, TOKENIZER, tools=DEEP)
