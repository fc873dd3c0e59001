# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Datasets of every kind of rows to datasets of trees."""

from __future__ import annotations

import ast
import copy
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value, load_dataset, load_from_disk
from tokenizers.processors import TemplateProcessing

from examples.demo.dialogues import generate_dialogues
from hf_prefix_tree.data import counts as pipeline
from hf_prefix_tree.data.nodes import rollout_branches
from hf_prefix_tree.data.prepare import prepare_trees
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}
CIAO = {"role": "assistant", "content": "Ciao"}
BRANCH = {"input_ids": [1, 2, 3], "weights": [0.0, 1.0, 1.0]}


@pytest.fixture(scope="module")
def dialogues() -> list[dict]:
    """Rows whose tools and tool-call arguments are JSON strings, so that Arrow changes nothing."""
    rows = generate_dialogues(num_groups=3, trials=2, seed=0)
    for row in rows:
        row["tools"] = json.dumps(row["tools"])
        for message in row["messages"]:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return rows


def trees(dataset) -> list[PrefixTree]:
    return [PrefixTree.from_dict(row) for row in dataset]


def branches_of(row: dict, tokenizer) -> list[Branch]:
    return conversation_branches(row["messages"], tokenizer, tools=row["tools"]).branches


def prepare_rows(rows: list[dict], tokenizer=None, **options) -> list[PrefixTree]:
    return trees(prepare_trees(Dataset.from_list(rows), tokenizer, **options))


def stream_of(rows: list[dict]) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


# --- rows of token ids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"branches": [BRANCH, {**BRANCH, "weights": [0.0, 0.5, 0.0]}]}, [BRANCH, ([1, 2, 3], [0, 0.5, 0])]),
        ({"prompt_ids": [1, 2], "completions": [[3], [4, 5]]}, [([1, 2, 3], [0, 0, 1]), ([1, 2, 4, 5], [0, 0, 1, 1])]),
        ({"parents": [None, 0, 0], "nodes": [[1, 2], [3], [4]]}, [([1, 2, 3], [1, 1, 1]), ([1, 2, 4], [1, 1, 1])]),
        (
            {
                "parents": [-1, 0],
                "nodes": [{"input_ids": [1], "weights": [0.0]}, {"input_ids": [2, 3], "weights": None}],
            },
            [([1, 2, 3], [0, 1, 1])],
        ),
        ({"input_ids": [1, 2, 3]}, [([1, 2, 3], [1, 1, 1])]),
        ({"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}, [([1, 2, 3], [0, 0, 1])]),
        ({"input_ids": [1, 2, 3], "weights": [0.0, 0.0, 2.5]}, [([1, 2, 3], [0, 0, 2.5])]),
        ({"input_ids": [1, 2, 3], "labels": [-100, 2, -100], "completion_mask": [0, 1, 0]}, [([1, 2, 3], [0, 1, 0])]),
        ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1], "attention_mask": [1, 1, 1]}, [([1, 2, 3], [0, 0, 1])]),
        ({"input_ids": [1, 2, 3], "labels": [-100, -100, 3], "weights": [1, 1, 2]}, [([1, 2, 3], [0, 0, 2])]),
        ({"input_ids": [1, 2, 3], "assistant_masks": [0, 1, 1], "other": "x"}, [([1, 2, 3], [0, 1, 1])]),
    ],
)
def test_kinds_of_token_rows(row, expected):
    branches = [Branch(**item) if isinstance(item, dict) else Branch(*item) for item in expected]
    for weighting in ("tree", "branch_mean"):
        assert prepare_rows([row], weighting=weighting) == [fold(branches, weighting)]
        streamed = prepare_trees(stream_of([row, row]), weighting=weighting)
        assert trees(streamed) == [fold(branches, weighting)] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("seq_lengths", [1, 2]), ("position_ids", [0, 0, 1]), ("position_ids", [1, 2, 3]), ("attention_mask", [0, 1, 1])],
)
def test_rows_that_others_packed_or_padded_left_are_refused(name, value):
    one = {"seq_lengths": [3], "position_ids": [0, 1, 2], "attention_mask": [1, 1, 1]}
    row = {"input_ids": [1, 2, 3], **one}
    assert prepare_rows([row]) == [fold([Branch([1, 2, 3], [1, 1, 1])])]
    with pytest.raises(ValueError, match=rf"row 0.*`{name}`"):
        prepare_rows([{"input_ids": [1, 2, 3], name: value}])


def test_trees_of_another_weighting_are_weighted_anew():
    branches = [Branch([1, 2, 3], [0, 1, 1]), Branch([1, 2, 4, 5], [0, 0.5, 1, 1])]
    stored = [fold(branches, "branch"), fold(branches[:1], "tree")]
    dataset = Dataset.from_list([tree.to_dict() for tree in stored])
    for weighting in ("tree", "branch_mean"):
        expected = [fold(branches, weighting), fold(branches[:1], weighting)]
        assert trees(prepare_trees(dataset, weighting=weighting)) == expected
        assert trees(prepare_trees(dataset.to_iterable_dataset(), weighting=weighting)) == expected
        packed = prepare_trees(dataset, weighting=weighting, max_packed_tokens=16)
        assert sorted(map(len, trees(packed[0]["trees"]))) == [3, 5]
        assert {tree["weighting"] for tree in packed[0]["trees"]} == {weighting}
    part = split_tree(stored[0], 4)[0]
    parts = Dataset.from_list([part.to_dict()])
    assert trees(prepare_trees(parts, weighting="branch")) == [part]
    with pytest.raises(ValueError, match=r"row 0.*`weighting`.*'tree'"):
        prepare_trees(parts)


GROUPED = [{"group": group, "branches": [BRANCH]} for group in ("a", None, "b", None, "a")]


def test_rows_without_a_group_are_no_group(caplog):
    for dataset, skipped in ((Dataset.from_list(GROUPED), "2 rows"), (stream_of(GROUPED), "1 rows")):
        with pytest.raises(ValueError, match=r"row 1.*`group_by`.*'group'.*None"):
            list(prepare_trees(dataset, group_by="group"))
        caplog.clear()
        found = trees(prepare_trees(dataset, group_by="group", on_error="skip"))
        # consecutive rows of a stream
        assert [tree.num_branches for tree in found] == ([2, 1] if isinstance(dataset, Dataset) else [1, 1, 1])
        assert f"{skipped} skipped" in caplog.text and "row 3: `group_by` is 'group'" in caplog.text
    with pytest.raises(ValueError, match=r"0 branches.*2 rows.*row 0.*`group_by`"):
        prepare_rows([{**row, "group": None} for row in GROUPED[:2]], group_by="group", on_error="skip")


def test_a_list_names_no_group():
    rows = [{"group": [1], "branches": [BRANCH]}]
    with pytest.raises(ValueError, match=r"row 0.*`group_by`.*'group'.*list"):
        prepare_rows(rows, group_by="group")


def test_trees_are_returned_as_they_are():
    dataset = prepare_trees(Dataset.from_list([{"branches": [BRANCH]}]))
    assert prepare_trees(dataset) is dataset
    for options in ({"group_by": "weighting"}, {"max_length": 5}, {"reasoning": "keep"}, {"overlong": "drop"}):
        with pytest.raises(ValueError, match="`dataset`"):
            prepare_trees(dataset, **options)


def test_the_rows_survive_arrow_with_an_explicit_schema(tmp_path):
    weights = [0.0, 0.1, 1 / 3]
    rows = [{"branches": [{"input_ids": [1, 2**40, 3], "weights": weights}, BRANCH]}, {"branches": [BRANCH]}]
    prepare_trees(Dataset.from_list(rows)).save_to_disk(tmp_path / "trees")
    loaded = load_from_disk(tmp_path / "trees")
    assert trees(loaded) == [fold([Branch(**branch) for branch in row["branches"]]) for row in rows]
    tree = fold([Branch(**BRANCH)]).to_dict()
    assert loaded.column_names == list(tree)
    for name, value in tree.items():
        if isinstance(value, np.ndarray):
            assert loaded.features[name] == List(Value(str(value.dtype))), name


# --- rows of text ---------------------------------------------------------------------------------------------------


def test_conversations(tiny_tokenizer, dialogues):
    expected = [fold(branches_of(row, tiny_tokenizer)) for row in dialogues]
    assert prepare_rows(dialogues, tiny_tokenizer) == expected
    strings = [{**row, "messages": json.dumps(row["messages"])} for row in dialogues]
    assert prepare_rows(strings, tiny_tokenizer) == expected
    leaves = conversation_branches(
        dialogues[0]["messages"], tiny_tokenizer, tools=dialogues[0]["tools"], reasoning="side_leaf"
    )
    assert prepare_rows(dialogues[:1], tiny_tokenizer, reasoning="side_leaf") == [fold(leaves.branches)]


def test_two_processes_and_streaming_give_the_same(tiny_tokenizer, dialogues):
    expected = prepare_rows(dialogues, tiny_tokenizer)
    assert prepare_rows(dialogues, tiny_tokenizer, num_proc=2) == expected
    assert trees(prepare_trees(stream_of(dialogues), tiny_tokenizer)) == expected
    grouped = prepare_rows(dialogues, tiny_tokenizer, group_by="group")
    assert prepare_rows(dialogues, tiny_tokenizer, group_by="group", num_proc=2) == grouped
    streamed = prepare_trees(stream_of(dialogues), tiny_tokenizer, group_by="group")
    assert trees(streamed) == grouped
    assert trees(streamed) == grouped  # a second epoch


def test_rows_of_a_group_become_one_tree_wherever_they_are(tiny_tokenizer, dialogues):
    shuffled = [dialogues[i] for i in (4, 0, 2, 1, 5, 3)]
    expected = [
        fold([branch for row in shuffled if row["group"] == group for branch in branches_of(row, tiny_tokenizer)])
        for group in ("desk-2", "desk-0", "desk-1")
    ]
    assert prepare_rows(shuffled, tiny_tokenizer, group_by="group") == expected
    assert len(trees(prepare_trees(stream_of(shuffled), tiny_tokenizer, group_by="group"))) == 6  # none are neighbours


def test_prompts_and_completions_as_text(tiny_tokenizer):
    def ids(text: str) -> list[int]:
        return tiny_tokenizer(text)["input_ids"]

    both = [("a b", "c"), ("a b", "d<|im_end|>")]
    expected = [
        Branch(ids(text), np.arange(len(ids(text))) >= len(ids("a b")))
        for text in ("a bc<|im_end|>", "a bd<|im_end|>")
    ]
    row = {"prompt": "a b", "completions": [completion for _, completion in both]}
    assert prepare_rows([row], tiny_tokenizer) == [fold(expected)]
    single = [{"prompt": prompt, "completion": completion} for prompt, completion in both]
    assert prepare_rows(single, tiny_tokenizer) == [fold([branch]) for branch in expected]


def test_no_token_reaches_over_the_boundary_of_prompt_and_completion(tiny_tokenizer):
    (tree,) = prepare_rows([{"prompt": "Thank yo", "completion": "u"}], tiny_tokenizer)
    (branch,) = tree.branches()
    context, supervised = (branch.input_ids[branch.weights == on] for on in (0, 1))
    assert context.tolist() == tiny_tokenizer("Thank yo")["input_ids"]
    assert tiny_tokenizer.decode(supervised) == "u<|im_end|>"


def test_a_prompt_with_the_start_token_gets_no_second_one(tiny_tokenizer):
    starting = copy.deepcopy(tiny_tokenizer)
    starting.add_special_tokens({"bos_token": "<s>"})
    start = ("<s>", starting.bos_token_id)
    starting._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[start])
    rows = [{"prompt": prompt, "completion": "yes"} for prompt in ("Ok?", "<s>Ok?")]
    with_text, without = (prepare_rows([row], starting) for row in rows)
    assert with_text == without and with_text[0].input_ids[:2].tolist().count(start[1]) == 1


def test_a_row_may_not_replace_the_chat_template(tiny_tokenizer):
    row = {"messages": [HI, HELLO], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    with pytest.raises(ValueError, match=r"`chat_template_kwargs`.*'chat_template'"):
        prepare_rows([row], tiny_tokenizer)


def test_a_turn_that_cannot_be_exact_is_counted_and_takes_its_row(tiny_tokenizer):
    silent = copy.deepcopy(tiny_tokenizer)
    silent.chat_template = silent.chat_template.replace("message.tool_calls", "message.nothing")
    call = {"function": {"name": "look", "arguments": "{}"}}
    rows = [{"messages": [HI, HELLO, HI, {"role": "assistant", "tool_calls": [call]}]}, {"messages": [HI, HELLO]}]
    counts = {}
    assert len(prepare_trees(Dataset.from_list(rows), silent, on_error="skip", counts=counts)) == 1
    assert (counts["skipped"], counts["refused_calls"], counts["calls_without_tools"]) == (1, 1, 0)
    with pytest.raises(ValueError, match=r"row 0: `messages\[3\]`.*calls"):
        prepare_rows(rows, silent)


def test_prompts_and_completions_as_messages(tiny_tokenizer):
    completions = [[HELLO], [CIAO, HI, HELLO]]
    expected = [
        branch
        for completion in completions
        for branch in conversation_branches([HI, *completion], tiny_tokenizer, num_prompt_messages=1).branches
    ]
    assert len(expected) == 3
    assert prepare_rows([{"prompt": [HI], "completions": completions}], tiny_tokenizer) == [fold(expected)]
    assert prepare_rows([{"prompt": [HI], "completion": completions[1]}], tiny_tokenizer) == [fold(expected[1:])]


def test_tools_come_from_the_row_or_from_the_group(tiny_tokenizer, dialogues):
    bare = [{"group": row["group"], "desk": row["group"], "messages": row["messages"]} for row in dialogues]
    expected = prepare_rows(dialogues, tiny_tokenizer)
    by_group = {row["group"]: row["tools"] for row in dialogues}
    assert prepare_rows(bare, tiny_tokenizer, tools=by_group) == expected
    parsed = {group: json.loads(tools) for group, tools in by_group.items()}
    grouped = prepare_rows(dialogues, tiny_tokenizer, group_by="group")
    assert prepare_rows(bare, tiny_tokenizer, tools=parsed, group_by="desk") == grouped
    assert prepare_rows(bare[:2], tiny_tokenizer, tools=by_group["desk-0"]) == expected[:2]
    assert prepare_rows(dialogues, tiny_tokenizer, tools="[]") == expected  # the row's own come first
    assert prepare_rows(bare, tiny_tokenizer) != expected
    del by_group["desk-1"]
    with pytest.raises(ValueError, match=r"row 2.*`tools`.*'desk-1'"):
        prepare_rows(bare, tiny_tokenizer, tools=by_group)


def test_chat_template_kwargs_come_from_the_row_or_from_the_call(tiny_tokenizer):
    rows = [{"messages": [HI, HELLO], "chat_template_kwargs": {"enable_thinking": False, "other": None}}]
    rows += [{"messages": [HI, HELLO], "chat_template_kwargs": None}]
    without, on, off = (
        fold(conversation_branches([HI, HELLO], tiny_tokenizer, chat_template_kwargs=kwargs).branches)
        for kwargs in ({}, {"enable_thinking": True}, {"enable_thinking": False})
    )
    assert without == off != on
    assert prepare_rows(rows, tiny_tokenizer, chat_template_kwargs={"enable_thinking": True}) == [off, on]
    assert prepare_rows(rows, tiny_tokenizer, empty_thinking_in_prompt=False) == [off, on]


def test_arrow_structs_lose_what_they_filled_in_and_warn(tiny_tokenizer, caplog):
    raw = [row for row in generate_dialogues(num_groups=3, trials=1, seed=0) if row["group"] != "desk-2"]
    calls = [call for row in raw for m in row["messages"] for call in m.get("tool_calls", ())]
    for call in calls:  # Arrow sorts the keys by their first appearance
        call["function"]["arguments"] = dict(list(call["function"]["arguments"].items())[:1])
    for row in raw:
        row["tools"] = json.dumps(row["tools"])
    assert len({tuple(call["function"]["arguments"]) for call in calls}) > 1  # so each has keys of the others
    dataset = Dataset.from_list(raw)
    assert (
        None
        in next(call for m in dataset[0]["messages"] for call in m["tool_calls"] or ())["function"][
            "arguments"
        ].values()
    )
    assert trees(prepare_trees(dataset, tiny_tokenizer)) == [fold(branches_of(row, tiny_tokenizer)) for row in raw]
    assert "2 rows whose tool schemas or arguments are Arrow structs" in caplog.text
    caplog.clear()
    json_columns = Dataset.from_list(generate_dialogues(num_groups=2, trials=1), on_mixed_types="use_json")
    expected = [fold(branches_of(row, tiny_tokenizer)) for row in generate_dialogues(num_groups=2, trials=1)]
    assert trees(prepare_trees(json_columns, tiny_tokenizer)) == expected
    assert not caplog.messages


def test_a_null_argument_survives_in_json_columns(tiny_tokenizer):
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None}}}
    rows = [{"messages": [HI, {"role": "assistant", "tool_calls": [call]}]}, {"messages": [HI, HELLO]}]
    dataset = Dataset.from_list(rows, on_mixed_types="use_json")
    (branch,) = trees(prepare_trees(dataset, tiny_tokenizer))[0].branches()
    assert '"arguments": {"x": null}' in tiny_tokenizer.decode(branch.input_ids)


# --- what is lost is counted ----------------------------------------------------------------------------------------

LONG = {"branches": [{"input_ids": [1, 2, 3, 4, 5], "weights": [0.0, 0, 0, 1, 1]}, BRANCH]}
HOPELESS = {"branches": [{"input_ids": [7, 8, 9, 6], "weights": [0.0, 0, 0, 1]}]}


@pytest.mark.parametrize(
    ("max_length", "overlong", "expected", "losses"),
    [
        (None, "truncate", [LONG["branches"], HOPELESS["branches"]], ""),
        (
            4,
            "truncate",
            [[{"input_ids": [1, 2, 3, 4], "weights": [0, 0, 0, 1]}, BRANCH], HOPELESS["branches"]],
            "1 branches truncated to `max_length`.",
        ),
        (
            3,
            "truncate",
            [[{"input_ids": [1], "weights": [0]}, BRANCH]],
            "2 branches truncated to `max_length`; 2 branches without a supervised token; 1 trees left out because "
            "nothing in them is supervised.",
        ),
        (4, "drop", [[BRANCH], HOPELESS["branches"]], "1 branches dropped as longer than `max_length`."),
    ],
)
def test_long_branches(caplog, max_length, overlong, expected, losses):
    caplog.set_level(logging.INFO, "hf_prefix_tree")
    options = {"max_length": max_length, "overlong": overlong}
    want = [fold([Branch(**branch) for branch in branches]) for branches in expected]
    assert prepare_rows([LONG, HOPELESS], **options) == want
    total = sum(map(len, expected))
    note = f"Prepared 2 rows: {total} branches."
    assert caplog.messages == [note + (f" Some data was dropped or modified: {losses}" if losses else "")]
    caplog.clear()
    assert trees(prepare_trees(stream_of([LONG, HOPELESS]), **options)) == want
    assert caplog.messages == ([f"{note} Some data was dropped or modified: {losses}"] if losses else [])


def test_counts_of_a_group_add_up(caplog):
    rows = [{**LONG, "group": "a"}, {**HOPELESS, "group": "a"}, {**HOPELESS, "group": "b"}]
    (tree,) = prepare_rows(rows, group_by="group", max_length=3)
    assert tree == fold([Branch([1], [0]), Branch(**BRANCH), Branch([7], [0])])
    assert "Prepared 3 rows: 3 branches." in caplog.text
    assert "3 branches truncated to `max_length`; 3 branches without a supervised token" in caplog.text
    assert "; 1 trees left out" in caplog.text


def test_long_branches_can_stop_the_preparation():
    with pytest.raises(ValueError, match=r"row 1.*`max_length`.*3"):
        prepare_rows([{"branches": [BRANCH]}, HOPELESS], max_length=3, overlong="raise")


def test_no_tree_left():
    with pytest.raises(ValueError, match=r"0 branches.*1 branches"):
        prepare_rows([HOPELESS], max_length=3, overlong="drop")


BAD_ROWS = [{"messages": json.dumps(messages)} for messages in ([HI, HELLO], [HI], [HI, CIAO], [])]


@pytest.mark.parametrize("options", [{}, {"num_proc": 2}, {"group_by": "group"}])
def test_a_bad_row_stops_or_is_skipped(tiny_tokenizer, caplog, options):
    rows = [{**row, "group": i} for i, row in enumerate(BAD_ROWS)]
    with pytest.raises(ValueError, match=r"row 1.*`messages`"):
        prepare_rows(rows, tiny_tokenizer, **options)
    good = prepare_rows(rows[::2], tiny_tokenizer)
    caplog.clear()
    assert prepare_rows(rows, tiny_tokenizer, on_error="skip", **options) == good
    assert "2 rows skipped" in caplog.text
    assert "; row 1: `messages` has no assistant" in caplog.text and "; row 3: `messages` is empty" in caplog.text


def test_a_bad_row_of_a_stream_or_of_a_group_is_skipped_alone(tiny_tokenizer, caplog):
    assert len(trees(prepare_trees(stream_of(BAD_ROWS), tiny_tokenizer, on_error="skip"))) == 2
    assert "row 3: `messages` is empty" in caplog.text
    caplog.clear()
    (tree,) = prepare_rows(
        [{**row, "group": 0} for row in BAD_ROWS], tiny_tokenizer, on_error="skip", group_by="group"
    )
    assert tree.num_branches == 2 and "2 rows skipped" in caplog.text
    with pytest.raises(ValueError, match=r"row 1.*`messages`"):
        list(prepare_trees(stream_of(BAD_ROWS), tiny_tokenizer))


def test_a_row_that_is_skipped_counts_as_nothing_else(tiny_tokenizer, caplog):
    rows = [{"branches": [HOPELESS["branches"][0], {"input_ids": [1], "weights": [1.0, 1.0]}]}, LONG]
    prepare_rows(rows, on_error="skip", max_length=4)
    assert "1 branches truncated" in caplog.text and "without a supervised" not in caplog.text


def test_a_cached_result_is_reported_again(tmp_path, tiny_tokenizer, caplog):
    rows = [{"messages": [HI, HELLO], "group": 1}, {"messages": [HI], "group": 2}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def prepare(**options):
        dataset = load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), split="train", cache_dir=str(tmp_path))
        return prepare_trees(dataset, tiny_tokenizer, on_error="skip", **options)

    for options in ({}, {"group_by": "group"}):
        first = prepare(**options)
        files = {file["filename"]: (tmp_path / file["filename"]).stat().st_mtime_ns for file in first.cache_files}
        assert len(files) == 1
        caplog.clear()
        second = prepare(**options)
        assert {file["filename"] for file in second.cache_files} == set(files)
        assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in files.items())
        assert "1 rows skipped; 1 trees left out" in caplog.text
        assert trees(first) == trees(second)
        assert prepare(weighting="once", **options).cache_files != second.cache_files


def test_a_warm_start_reads_columns_and_folds_once_for_every_way_to_pack(tmp_path, monkeypatch):
    """Reading the counts row by row takes 0.2 ms a row, on every rank."""
    rows = [{"prompt_ids": [1, 2, group], "completions": [[3], [4, 5]], "group": group % 20} for group in range(30)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path))
    packings = ({}, {"max_packed_tokens": 12}, {"max_packed_tokens": 7}, {"max_packed_tokens": 9, "overflow": "drop"})

    def prepare(**options):
        return prepare_trees(load_from_disk(str(tmp_path)), group_by="group", **options)

    cold = []
    for number, options in enumerate(packings):
        cold.append(prepare(**options)[:])
        # the fold, then one packing each, once with split trees, of which the dataset is made, too
        assert len(list(tmp_path.glob("cache-*.arrow"))) == (1, 2, 4, 5)[number]
    monkeypatch.setattr(Dataset, "__iter__", lambda self: pytest.fail("reads row by row"))
    monkeypatch.setattr("hf_prefix_tree.data.trees.fold", lambda *_: pytest.fail("folds again"))
    assert [prepare(**options)[:] for options in packings] == cold


def test_the_cache_depends_on_the_code_that_preparation_runs_and_on_no_other(tmp_path):
    package = tmp_path / "hf_prefix_tree"
    shutil.copytree(Path(pipeline.__file__).parents[1], package, ignore=shutil.ignore_patterns("__pycache__"))
    before = pipeline.code_state(package)
    assert before == pipeline.code_state()
    for file in sorted(package.rglob("*.py")):
        text = file.read_text()
        file.write_text(text + "# edited")
        runs = file.relative_to(package).parts[0].removesuffix(".py") in pipeline.CODE
        assert (pipeline.code_state(package) != before) == runs, file
        file.write_text(text)


def test_preparation_imports_no_code_that_the_cache_does_not_depend_on():
    package = Path(pipeline.__file__).parents[1]
    files = [file for room in pipeline.CODE for file in (*package.glob(f"{room}/*.py"), *package.glob(f"{room}.py"))]
    found = set()
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            assert not isinstance(node, ast.ImportFrom) or not node.level, file  # a relative import is not seen here
            if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == package.name:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found |= {name.split(".")[1] for name in names}
    assert found == set(pipeline.CODE)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "options", "expected"),
    [
        (
            {"speech": "x"},
            {},
            "`dataset`",
        ),
        ({"messages": [HI], "prompt": "x", "completion": "y"}, {}, "conversation.*completion"),
        ({"messages": [HI, HELLO]}, {}, "`tokenizer`.*None"),
        ({"branches": [BRANCH]}, {"reasoning": "none"}, "`reasoning`.*'none'"),
        ({"branches": [BRANCH]}, {"overlong": "cut"}, "`overlong`.*'cut'"),
        ({"branches": [BRANCH]}, {"on_error": "ignore"}, "`on_error`.*'ignore'"),
        ({"branches": [BRANCH]}, {"weighting": "mean"}, "`weighting`.*'mean'"),
        ({"branches": [BRANCH]}, {"max_length": 1}, "`max_length`.*1"),
        (
            {"branches": [BRANCH]},
            {"group_by": "group"},
            "`group_by`.*'group'",
        ),
        ({"branches": []}, {}, "0 branches"),
        ({"branches": [{**BRANCH, "weights": [1.0]}]}, {}, "row 0.*`weights`.*1.*3.*`input_ids`"),
        (
            {"branches": [{"input_ids": [1, 2]}]},
            {},
            r"row 0.*`branches\[0\]`.*`input_ids`.*\['input_ids'\]",
        ),
        ({"branches": [[1, 2]]}, {}, r"row 0.*`branches\[0\]`.*list"),
        ({"branches": "x"}, {}, "row 0.*`branches`.*str"),
        ({"prompt_ids": [1], "completions": []}, {}, "row 0.*`completions`"),
        ({"parents": [0], "nodes": [[1, 2]]}, {}, "row 0.*`parents"),
        ({"input_ids": [1, 2], "labels": [2, -100]}, {}, "row 0.*`labels`.*2.*index 0.*`input_ids`"),
        ({"input_ids": [1, 2], "labels": [2]}, {}, "row 0.*`labels`.*1.*2.*`input_ids`"),
        ({"input_ids": [1, 2], "completion_mask": [1]}, {}, "row 0.*`completion_mask`.*1.*2"),
    ],
)
def test_errors(row, options, expected):
    with pytest.raises(ValueError, match=expected):
        prepare_rows([row], **options)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "x", "completions": []}, "`completions`"),
        ({"prompt": "x", "completion": [HELLO]}, "strings.*messages"),
        ({"prompt": [HI], "completion": "x"}, "strings.*messages"),
        ({"messages": "[1"}, "`messages`.*JSON"),
        ({"messages": [{"from": "human", "value": "x"}]}, "no assistant message"),
    ],
)
def test_errors_of_text_rows(tiny_tokenizer, row, expected):
    with pytest.raises(ValueError, match=f"row 0: .*{expected}"):
        prepare_rows([row], tiny_tokenizer)


def test_what_is_no_split():
    dataset = Dataset.from_list([{"branches": [BRANCH]}])
    for wrong, expected in (
        (DatasetDict(train=dataset), "`dataset`.*DatasetDict"),
        ([{"branches": [BRANCH]}], "`dataset`.*list"),
        (
            dataset.with_format("numpy"),
            r"'numpy'.*`dataset.with_format\(None\)`",
        ),
        (dataset.select([]), "`dataset`"),
    ):
        with pytest.raises(ValueError, match=expected):
            prepare_trees(wrong)
    with pytest.raises(ValueError, match=r"`num_proc`.*2"):
        prepare_trees(stream_of([{"branches": [BRANCH]}]), num_proc=2)
    for wrong in ("2", 0, 1.5):
        with pytest.raises(ValueError, match=f"`num_proc`.*{wrong}"):
            prepare_trees(dataset, num_proc=wrong)


def test_rollouts_of_an_explicit_schema():
    features = Features({"prompt_ids": List(Value("int32")), "completions": List(List(Value("int32")))})
    rows = {"prompt_ids": [[1, 2], []], "completions": [[[3], [4]], [[5, 6]]]}
    expected = [fold(rollout_branches(*row)) for row in zip(*rows.values(), strict=True)]
    assert trees(prepare_trees(Dataset.from_dict(rows, features=features))) == expected
