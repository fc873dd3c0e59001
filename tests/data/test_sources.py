# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trees of texts, search trees, other column names; every real file in every mode of its type; malformed rows."""

from __future__ import annotations

import copy
import json
import random
import sys
from collections import Counter
from itertools import islice

import datasets
import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from datasets.fingerprint import generate_random_fingerprint
from transformers import LlamaTokenizer

from hf_prefix_tree.data import nodes
from hf_prefix_tree.data.prepare import prepare_trees
from hf_prefix_tree.data.rows import RowOptions, row_branches
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold
from tests.support.branch_parts import parts
from tests.support.mooncake import mooncake_branches

HI = {"role": "user", "content": "Hi"}
HELLO = {"role": "assistant", "content": "Hello"}


@pytest.fixture(autouse=True)
def _no_fingerprints(monkeypatch):
    """`datasets` pickles a large tokenizer to name each result, which takes seconds; nothing here is cached."""
    monkeypatch.setattr(datasets.arrow_dataset, "update_fingerprint", lambda *_: generate_random_fingerprint())


def trees(dataset) -> list[PrefixTree]:
    return [PrefixTree.from_dict(row) for row in dataset]


# --- trees of texts -------------------------------------------------------------------------------------------------


def test_a_tree_of_texts(tiny_tokenizer):
    row = {"parents": [None, 0, 0, 2], "texts": ["a b", " c", " d", " e f"], "weights": [0.0, 1.0, 0.5, 1.0]}
    (tree,) = trees(prepare_trees(Dataset.from_list([row]), tiny_tokenizer))
    ids = [tiny_tokenizer(text)["input_ids"] for text in row["texts"]]
    w = [[weight] * len(x) for weight, x in zip(row["weights"], ids, strict=True)]
    assert tree == fold([Branch(ids[0] + ids[1], w[0] + w[1]), Branch(ids[0] + ids[2] + ids[3], w[0] + w[2] + w[3])])
    del row["weights"]
    (tree,) = trees(prepare_trees(Dataset.from_list([row]), tiny_tokenizer))
    assert {weight for branch in tree.branches() for weight in branch.weights[1:].tolist()} == {1.0}


def llama_tokenizer(**options):
    """Puts a space in front of every text, as those of Llama 2 do; "bc" is one token."""
    letters = {letter: index for index, letter in enumerate("\u2581abcdef", 3)}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **letters, "bc": 10, "<0x0A>": 11}
    return LlamaTokenizer(vocab=vocab, merges=[("b", "c")], add_bos_token=True, **options)


@pytest.mark.parametrize("add_eos", [False, True])
def test_no_space_and_no_end_token_comes_between_two_texts(add_eos):
    tokenizer = llama_tokenizer(add_eos_token=add_eos)
    assert tokenizer("ab")["input_ids"] == [1, 3, 4, 5, *[2] * add_eos]
    options = RowOptions("completion", tokenizer)
    (branch,) = row_branches(
        {"prompt": "ab", "completion": "cd"}, options, Counter()
    )  # a token would reach over the seam
    assert tokenizer.convert_ids_to_tokens(branch.input_ids) == ["<s>", "\u2581", "a", "b", "c", "d", "</s>"]
    assert branch.weights.tolist() == [0, 0, 0, 0, 1, 1, 1]
    (branch,) = row_branches({"prompt": "ab", "completion": " cd"}, options, Counter())
    assert tokenizer.convert_ids_to_tokens(branch.input_ids) == ["<s>", "\u2581", "a", "b", "\u2581", "c", "d", "</s>"]
    for empty in ("[]", "null", None, []):  # no tools
        row = {"prompt": "ab", "completion": " cd", "tools": empty, "system": None}
        assert row_branches(row, options, Counter()) == [branch]
    (branch,) = row_branches({"text": "de</s>"}, RowOptions("text", tokenizer), Counter())
    assert tokenizer.convert_ids_to_tokens(branch.input_ids) == ["<s>", "\u2581", "d", "e", "</s>"]
    row = {"parents": [-1, 0, 0], "texts": ["ab", "cd", " ef"]}
    first, second = row_branches(row, RowOptions("texts", tokenizer), Counter())
    assert tokenizer.convert_ids_to_tokens(first.input_ids) == ["<s>", "\u2581", "a", "b", "c", "d"]
    assert tokenizer.convert_ids_to_tokens(second.input_ids) == ["<s>", "\u2581", "a", "b", "\u2581", "e", "f"]


def test_a_root_gets_the_begin_token_and_nothing_gets_an_end_token(tiny_tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer = copy.deepcopy(tiny_tokenizer)
    begin, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", begin), ("<|im_end|>", end)]
    )
    assert tokenizer("a")["input_ids"][0] == begin and tokenizer("a")["input_ids"][-1] == end
    (tree,) = trees(prepare_trees(Dataset.from_list([{"parents": [-1, 0], "texts": ["a", "b"]}]), tokenizer))
    assert tokenizer.decode(tree.input_ids) == "<|im_start|>ab"
    tokenizer.eos_token = "<|endoftext|>"  # not the token that is put behind
    (tree,) = trees(prepare_trees(Dataset.from_list([{"parents": [-1, 0], "texts": ["a", "b"]}]), tokenizer))
    assert tokenizer.decode(tree.input_ids) == "<|im_start|>ab"


def step(number: int, text: str, kept: bool) -> dict:
    return {"step": number, "text": text, "value": 1.0, "kept": kept}


SEARCH = [
    step(0, "a\n", True),
    step(0, "b\n", False),  # context: a kept step extends it
    step(0, "c\n", False),  # left out
    step(1, "a\nd\n", True),
    step(1, "a\ne\n", False),  # left out
    step(1, "b\nf\n", True),
    step(1, "b\nf\n", False),  # the same step again
    step(2, "a\nd\ng\n", True),
    step(1, "a\nh\n", True),
]


@pytest.mark.parametrize("seed", range(40))
def test_a_step_extends_the_kept_text_before_it_or_the_longest(seed):
    """Of the texts of the step before that it begins with, by the definition."""
    rng = random.Random(seed)
    before = {"".join(rng.choices("ab", k=rng.randint(0, 4))): rng.random() < 0.5 for _ in range(8)}
    texts = {rng.choice([*before]) + "".join(rng.choices("ab", k=rng.randint(0, 3))): True for _ in range(8)}
    expected = {
        text: (2, max(filter(text.startswith, before), key=lambda start: (before[start], len(start))))
        for text in texts
    }
    assert nodes._extended(3, texts, before) == expected
    with pytest.raises(ValueError, match="extends no text of step 2"):
        nodes._extended(3, {"c": True, "b": True}, {"b": True, "ca": True})


def test_a_search_tree_supervises_its_kept_steps(tiny_tokenizer):
    (tree,) = trees(prepare_trees(Dataset.from_list([{"input": "1 2", "nodes": SEARCH}]), tiny_tokenizer))
    assert [parts(branch, tiny_tokenizer) for branch in tree.branches()] == [
        ["1 2\nb\n", "f\n"],
        ["1 2\n", "a\nh\n"],
        ["1 2\n", "a\nd\ng\n"],
    ]
    assert tree.num_branches == 3
    # "a" is on two of the three branches, "d" on one, the prompt and "b" on none that supervise them.
    by_text = {tiny_tokenizer.decode([i]): w for i, w in zip(tree.input_ids.tolist(), tree.weights, strict=True)}
    assert [by_text[x] for x in "abdfgh"] == pytest.approx([2 / 3, 0, 1 / 3, 1 / 3, 1 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"parents": [None, 0], "texts": ["a"]}, "`parents`.*2.*1.*`texts`"),
        ({"parents": [None], "texts": ["a"], "weights": [1.0, 1.0]}, "`weights`.*2.*1.*`texts`"),
        ({"parents": [None], "texts": [1]}, r"`texts\[0\]`.*int"),
        ({"parents": [0], "texts": ["a"]}, r"`parents\[0\]`.*0"),
        ({"input": "1", "nodes": [step(0, "a", False)]}, "`nodes`"),
        ({"input": "1", "nodes": [step(0, "a", True), step(1, "b", True)]}, "'b'.*step 1"),
        ({"input": "1", "nodes": [step(1, "a", True)]}, "'a'.*step 1.*step 0"),
        ({"input": "1", "nodes": [step(-1, "a", True)]}, r"`nodes\[0\].step`.*-1"),
        ({"input": "1", "nodes": [{"step": 0, "text": "a"}]}, r"`nodes\[0\].kept`.*None"),
        ({"input": 1, "nodes": [step(0, "a", True)]}, "`input`.*int"),
        ({"input": "1", "nodes": ["a"]}, r"`nodes\[0\]`.*str"),
    ],
)
def test_malformed_trees_of_texts(tiny_tokenizer, row, expected):
    with pytest.raises(ValueError, match=f"row 0: .*{expected}"):
        prepare_trees(Dataset.from_list([row]), tiny_tokenizer)
    with pytest.raises(ValueError, match=r"`tokenizer`.*None"):
        prepare_trees(Dataset.from_list([row]))


# --- names of columns -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True])
def test_columns_of_other_names(tiny_tokenizer, streams):
    rows = [
        {"conversation": [HI, HELLO], "task": "a", "messages": "raw"},
        {"conversation": [HI, HI, HELLO], "task": "a", "messages": ""},
    ]
    names = {"messages": "conversation", "group": "task"}
    source = IterableDataset.from_generator(lambda: iter(rows)) if streams else Dataset.from_list(rows)
    plain = [{"messages": row["conversation"], "group": row["task"]} for row in rows]
    expected = trees(prepare_trees(Dataset.from_list(plain), tiny_tokenizer, group_by="group"))
    assert expected[0].num_branches == 2
    assert trees(prepare_trees(source, tiny_tokenizer, column_names=names, group_by="group")) == expected
    assert len(trees(prepare_trees(source, tiny_tokenizer, column_names=names))) == 2


def test_errors_of_column_names(tiny_tokenizer):
    dataset = Dataset.from_list([{"conversation": [HI, HELLO], "task": "a"}])
    for names, expected in (
        (
            {"messages": "talk"},
            r"`column_names\['messages'\]`.*'talk'",
        ),
        ({"messages": "task", "group": "task"}, "name each column once"),
        ({"message": "conversation"}, "message, task"),
    ):
        with pytest.raises(ValueError, match=expected):
            prepare_trees(dataset, tiny_tokenizer, column_names=names)


# --- every real file in every mode of its type ----------------------------------------------------------------------

MODES = ("per_turn", "side_leaf", "keep")
CASES = [
    *(("tau_bench_airline", 1, mode) for mode in MODES),
    *(("reasoning_tools_multitrial", 3, mode) for mode in MODES),
    *(("conversational_reasoning", 3, mode) for mode in MODES),
    *(("long_reasoning_singleturn", 3, mode) for mode in (*MODES, "think_split")),
    *(("gsm8k_4policies", 8, mode) for mode in (*MODES, "think_split")),
    ("game24_search_tree", 3, "per_turn"),
]


def rows_of_file(shared_data, name: str, count: int) -> tuple[list[dict], object]:
    with shared_data(f"data/{name}.jsonl").open() as lines:
        rows = [json.loads(line) for line in islice(lines, count)]
    schemas = shared_data("data") / f"{name}.tools.json"
    tools = json.loads(schemas.read_text()) if schemas.exists() else None
    for row in rows:
        if "messages" in row:
            row["messages"] = json.dumps(row["messages"])
    return rows, tools


def supervised(items: list[PrefixTree]) -> Counter:
    """Every supervised token by its path, with the sum of its weights over the trees."""
    total: Counter = Counter()
    for tree in items:
        paths = [0] * len(tree)  # what stands for each token's path
        for at, (token, before) in enumerate(zip(tree.input_ids.tolist(), tree.predecessor.tolist(), strict=True)):
            paths[at] = hash((paths[before] if before >= 0 else None, token))
            if tree.weights[at]:
                total[paths[at]] += tree.weights[at]
    return total


@pytest.mark.parametrize(("name", "count", "mode"), CASES)
def test_every_file_in_every_mode(shared_data, qwen3_tokenizer, name, count, mode):
    grouped = name in ("gsm8k_4policies", "reasoning_tools_multitrial")
    rows, tools = rows_of_file(shared_data, name, count)
    options = {"tools": tools, "reasoning": mode, "group_by": "group" if grouped else None}
    counts: dict = {}
    folded = prepare_trees(Dataset.from_list(rows), qwen3_tokenizer, counts=counts, **options)
    whole = trees(folded)
    assert len(whole) == (len({row["group"] for row in rows}) if grouped else len(rows))
    assert counts["errors"] == [] and counts["skipped"] == counts["empty"] == 0
    longest = counts["longest_path"]
    packed = prepare_trees(folded, max_packed_tokens=longest)
    pieces = [PrefixTree.from_dict(tree) for row in packed for tree in row["trees"]]
    assert all(sum(len(tree["input_ids"]) for tree in row["trees"]) <= longest for row in packed)
    assert (len(pieces) > len(whole)) == any(len(tree) > longest for tree in whole)
    found, expected = supervised(pieces), supervised(whole)
    assert found.keys() == expected.keys()  # `==` alone would print all of them
    assert max(abs(found[key] - expected[key]) for key in found) < 1e-12


def test_real_search_trees(shared_data, qwen3_tokenizer):
    rows, _ = rows_of_file(shared_data, "game24_search_tree", 5)
    for row, tree in zip(rows, trees(prepare_trees(Dataset.from_list(rows), qwen3_tokenizer)), strict=True):
        kept = {node["text"] for node in row["nodes"] if node["kept"]}
        ends = {text for text in kept if not any(other != text and other.startswith(text) for other in kept)}
        texts = {qwen3_tokenizer.decode(branch.input_ids) for branch in tree.branches()}
        assert texts == {f"{row['input']}\n{text}" for text in ends}
        # Every kept step of this search extends kept steps, so all but the prompt is supervised.
        for branch in tree.branches():
            assert (
                parts(branch, qwen3_tokenizer)[0] == f"{row['input']}\n" and len(parts(branch, qwen3_tokenizer)) == 2
            )
        assert len(ends) < len(row["nodes"]) / 2


def test_the_shape_of_a_production_forest(shared_data):
    branches = mooncake_branches(shared_data("data/mooncake_prefix_trace.jsonl"), 40)
    assert 2**16 < max(map(len, branches)) < 2**17
    rows = [{"group": 0, "input_ids": branch.input_ids, "weights": branch.weights} for branch in branches]
    counts: dict = {}
    packed = prepare_trees(Dataset.from_list(rows), group_by="group", max_packed_tokens=2**17, counts=counts)
    unique = len(set(np.concatenate([branch.input_ids for branch in branches]).tolist()))
    assert counts["branches"] == 40 and counts["split_trees"] == 1
    assert counts["tree_tokens"] == unique < counts["branch_tokens"] == sum(map(len, branches))
    outputs = sum(int((branch.weights > 0).sum()) for branch in branches)
    pieces = [PrefixTree.from_dict(tree) for row in packed for tree in row["trees"]]
    assert sum(int((tree.weights > 0).sum()) for tree in pieces) == outputs
    assert {len(row["trees"]) for row in packed} == {1} and counts["fill"] > 0.6


# --- ten malformed variants of a real row ---------------------------------------------------------------------------


def _set(path: list, value: object):
    def change(row: dict) -> None:
        for key in path[:-1]:
            row = row[key]
        row[path[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_set(["messages"], []), "`messages`"),
        (_set(["messages"], {"role": "user"}), "`messages`.*dict"),
        (_set(["messages", 1], "hello"), r"`messages\[1\]`.*str"),
        (_set(["messages", 1], {"content": "hello"}), r"`messages\[1\]`.*\['content'\].*`role`"),
        (_set(["messages", 1, "content"], 7), r"`messages\[1\].content`.*int"),
        (_set(["messages", 2, "tool_calls"], "f(x)"), r"`messages\[2\].tool_calls`.*'f\(x\)'"),
        (_set(["messages", 2, "tool_calls"], [{"function": None}]), r"`messages\[2\].tool_calls\[0\]`"),
        (lambda row: row["messages"].__delitem__(slice(2, None)), "`messages`"),
        (_set(["tools"], "{broken"), "`tools`.*JSON"),
        (_set(["tools"], '{"name": "f"}'), "`tools`.*dict"),
    ],
)
def test_malformed_variants_of_a_real_row(shared_data, qwen3_tokenizer, change, expected):
    with shared_data("data/tau_bench_airline.jsonl").open() as lines:
        good = json.loads(next(lines))
    tools = shared_data("data/tau_bench_airline.tools.json").read_text()
    good = {"messages": good["messages"][:6], "tools": tools}
    assert [message["role"] for message in good["messages"][:3]] == ["system", "user", "assistant"]
    bad = copy.deepcopy(good)
    change(bad)
    rows = [{**row, "messages": json.dumps(row["messages"])} for row in (good, bad)]
    with pytest.raises(ValueError, match=f"row 1: .*{expected}"):
        prepare_trees(Dataset.from_list(rows), qwen3_tokenizer)
    counts: dict = {}
    assert len(prepare_trees(Dataset.from_list(rows), qwen3_tokenizer, on_error="skip", counts=counts)) == 1
    assert counts["skipped"] == 1 and len(counts["errors"]) == 1


def _calls(kind, row, tokenizer, **options):
    """Calls of functions while a row is read."""
    count = 0

    def hook(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(hook)
    try:
        row_branches(row, RowOptions(kind, tokenizer, **options), Counter())
    finally:
        sys.setprofile(None)
    return count


def _reasoning(turns):
    reply = {"role": "assistant", "content": "It is.", "reasoning_content": "I add them."}
    return {"messages": [message for i in range(turns) for message in ({"role": "user", "content": f"{i}?"}, reply)]}


GROWING = {
    "nodes": lambda n: {"parents": [*range(-1, n - 1)], "nodes": [[1, node] for node in range(n)]},
    "texts": lambda n: {"parents": [*range(-1, n - 1)], "texts": [f"{node}." for node in range(n)]},
    "search": lambda n: {"input": "?", "nodes": [{"step": i, "text": "a" * (i + 1), "kept": True} for i in range(n)]},
    "conversation": lambda n: _reasoning(n // 4),
}


@pytest.mark.parametrize("kind", GROWING)
def test_the_work_on_a_long_row_grows_with_it(kind, tiny_tokenizer):
    """Chains of nodes, texts and steps of a search, and a conversation that keeps its reasoning."""
    few, many = (_calls(kind, GROWING[kind](n), tiny_tokenizer, reasoning="keep") for n in (200, 800))
    assert few > 200 and many < 4.5 * few
