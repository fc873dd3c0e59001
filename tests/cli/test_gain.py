# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Sources of rows, the search for a group column, and agreement with what the trainers, ours and TRL's, prepare."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from datasets import Dataset, load_dataset
from transformers import AutoModelForCausalLM, Qwen3Config
from trl import SFTConfig, SFTTrainer

from examples.demo.dialogues import dialogue_texts, generate_dialogues
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
from hf_prefix_tree.cli import _set_chat_template
from hf_prefix_tree.data.baselines import STOCK_MAX_LENGTH
from hf_prefix_tree.data.selection import find_group_column
from hf_prefix_tree.report.gain import fold_rows, load_rows
from hf_prefix_tree.tree.prefix_tree import Branch

DIALOGUES = generate_dialogues(num_groups=3, trials=2)
TEXTS = [{"prompt": f"What is {n} + 1?", "completion": text, "task": n} for n in (1, 2) for text in ("a", "b c", "d")]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(dialogue_texts(DIALOGUES))


@pytest.fixture(scope="module")
def dialogues(tmp_path_factory):
    """A file; its values are JSON strings, as Arrow keeps no order of keys."""
    file = tmp_path_factory.mktemp("dialogues") / "rows.jsonl"
    rows = [{**row, "messages": json.dumps(row["messages"]), "tools": json.dumps(row["tools"])} for row in DIALOGUES]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def write_as(kind, folder):
    rows, path = Dataset.from_list(TEXTS), folder / f"rows.{kind}"
    if kind.startswith("jsonl"):
        rows.to_json(path, compression="gzip" if kind.endswith("gz") else None)
    elif kind == "json":
        path.write_text(json.dumps(TEXTS, indent=1))
    elif kind == "parquet":
        rows.to_parquet(path)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.data.schema) as stream:
            stream.write_table(rows.data.table)
    elif kind == "folder":
        path.mkdir()
        rows.to_parquet(path / "train.parquet")
    else:
        rows.to_csv(path, sep="\t" if "tsv" in kind else ",", index=False, compression=None)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "json", "csv", "tsv", "parquet", "arrow", "folder"])
def test_every_kind_of_file_has_the_same_rows(kind, tmp_path):
    assert load_rows(write_as(kind, tmp_path)).to_list() == TEXTS


def test_a_file_without_rows_of_its_split_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"rows.jsonl could not be read: .*\['train'\]"):
        load_rows(write_as("jsonl", tmp_path), split="test")


@pytest.mark.parametrize("prompt", ["explicit", "implicit"])
def test_preference_pairs_share_their_prompt(prompt, tmp_path, tokenizer):
    pair = {"prompt": "What is 1 + 1?", "chosen": "It is 2.", "rejected": "It is 3."}
    if prompt == "implicit":
        pair = {name: pair["prompt"] + pair[name] for name in ("chosen", "rejected")}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(pair) + "\n")
    folded = fold_rows(load_rows(tmp_path / "pairs.jsonl"), "pairs", tokenizer)
    ids = [tokenizer(f"What is 1 + 1?{answer}<|im_end|>")["input_ids"] for answer in ("It is 2.", "It is 3.")]
    shared = next(i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)
    assert folded.ways["tree"].tokens == sum(map(len, ids)) - shared
    assert folded.ways["flat_steps"].tokens == folded.ways["stock_best"].tokens == sum(map(len, ids))
    assert folded.contexts == 2


def test_rollouts_are_counted_by_hand():
    rows = Dataset.from_list([{"prompt_ids": [5, 6], "completions": [[7], [8, 9], [8, 9]]}])
    ways = fold_rows(rows, "rollouts").ways
    assert (ways["tree"].tokens, ways["tree"].supervised, ways["tree"].pairs) == (5, 3, 1 + 2 + 3 + 3 + 4)
    assert (ways["flat_steps"].tokens, ways["flat_steps"].supervised, ways["flat_steps"].pairs) == (11, 5, 26)
    assert (ways["flat_steps"].sequences, ways["flat_steps"].longest) == (3, 4)


# --- The column of groups.


def rows_with(columns):
    """24 rows of one system prompt, whose question depends on `task`, and their branches."""
    branches = {}
    for index, task in enumerate(columns["task"]):
        ids = [*range(100), *[1000 + task] * 40, 5000 + index]
        branches[index] = [Branch(ids, [0] * 140 + [1])]
    return Dataset.from_dict(columns), branches


TASKS = [n // 4 for n in range(24)]


@pytest.mark.parametrize(
    ("column", "values", "found"),
    [
        ("question", [f"task {n}" for n in TASKS], "question"),  # as `task`, and before it in no order but by name
        ("trial", [n % 4 for n in range(24)], "task"),  # shares the system prompt alone
        ("family", [n // 8 for n in range(24)], "task"),  # coarser, and saves hardly more
        ("source", ["all"] * 24, "task"),
        ("id", list(range(24)), "task"),
        ("score", [n / 4 for n in TASKS], "task"),  # no name
        ("group", [n // 12 for n in range(24)], "group"),
        ("group", ["one"] * 24, "group"),
    ],
)
def test_the_column_of_groups_is_found(column, values, found):
    columns = {"task": TASKS, column: values}
    dataset, branches = rows_with({column: values, "task": TASKS} if column == "question" else columns)
    assert find_group_column(dataset, branches) == found


def test_a_shared_system_prompt_marks_no_groups():
    dataset, branches = rows_with({"task": list(range(24))})
    others = {"trial": [n % 4 for n in range(24)], "random": [(n * 7) % 5 for n in range(24)]}
    assert find_group_column(Dataset.from_dict(dataset.to_dict() | others), branches) is None
    assert find_group_column(Dataset.from_dict({"task": [None, *TASKS[1:]]}), rows_with({"task": TASKS})[1]) is None


# --- Agreement with the trainers.


def tiny_model(tokenizer):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 16}
    config = Qwen3Config(vocab_size=len(tokenizer), num_attention_heads=1, num_key_value_heads=1, **sizes)
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    "options",
    [
        {"group_by": None},
        {"group_by": "group"},
        {"group_by": "group", "reasoning": "side_leaf"},
        {"group_by": None, "max_length": 600},
        {"group_by": "group", "max_packed_tokens": 1500},
    ],
)
def test_gain_counts_what_the_trainer_prepares(options, dialogues, tokenizer, tmp_path):
    dataset = load_dataset("json", data_files=str(dialogues), split="train")
    args = TreeSFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
    trainer = TreeSFTTrainer(model=tiny_model(tokenizer), args=args, train_dataset=dataset, processing_class=tokenizer)
    trained = [len(tree["input_ids"]) for row in trainer.train_dataset for tree in row.get("trees", [row])]
    tree = fold_rows(load_rows(dialogues), "dialogues", tokenizer, **options).ways["tree"]
    assert (tree.tokens, tree.sequences, tree.longest) == (sum(trained), len(trained), max(trained))
    assert (tree.truncated > 0) == ("max_length" in options)
    assert (len(trained) > 3) == (options["group_by"] is None or "max_packed_tokens" in options)  # 3 groups


@pytest.mark.parametrize("template", ["qwen3", "qwen3_instruct_2507"])
def test_stock_columns_are_what_trl_prepares(template, dialogues, tokenizer, tmp_path):
    _set_chat_template(tokenizer, template)
    rows = [{**row, "messages": [*row["messages"], *row["messages"][1:]]} for row in DIALOGUES]  # over the limit
    dataset = Dataset.from_list(rows, on_mixed_types="use_json")
    ways = fold_rows(dataset, "dialogues", tokenizer, group_by=None).ways
    for name, options in (
        ("stock_defaults", {}),
        ("stock_best", {"assistant_only_loss": True, "max_length": None}),
    ):
        args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", **options)
        trainer = SFTTrainer(model=tiny_model(tokenizer), args=args, train_dataset=dataset, processing_class=tokenizer)
        lengths = [len(row["input_ids"]) for row in trainer.train_dataset]
        assert (ways[name].tokens, ways[name].longest) == (sum(lengths), max(lengths))
    assert ways["stock_defaults"].truncated > 0 and ways["stock_defaults"].longest == STOCK_MAX_LENGTH
    assert (ways["stock_best"].missing == 0) == (template == "qwen3_instruct_2507")


def test_contexts_that_a_row_misses_by_hand(tokenizer):
    turn = {"role": "assistant", "content": "b", "reasoning_content": "because"}
    messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "c"}, turn]
    _set_chat_template(tokenizer, "qwen3")
    plain = fold_rows(Dataset.from_list([{"messages": messages}]), "plain", tokenizer)
    # Stock at its best keeps the first turn's reasoning before the second turn, which was sampled without it.
    assert (plain.contexts, plain.ways["stock_best"].missing, plain.ways["stock_defaults"].missing) == (2, 1, 0)
    assert plain.ways["flat_steps"].sequences == 2 and plain.has_training_template
