"""Features of every collator, right and wrong: the reference's batch, or an error that names the feature."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_prefix_tree import (
    Branch,
    DataCollatorForDiffusionLM,
    DataCollatorForEagle3,
    DataCollatorForPrefixTree,
    fold,
    fold_shared_prefix_rollouts,
    pack_eagle3_dataset,
    split_tree,
)
from hf_prefix_tree.nemo import DLLMCollator, prefix_tree_collate_fn
from hf_prefix_tree.sft.collator import BranchCollator, branch_batches
from tests.fuzz import reference
from tests.fuzz.inputs import IDS, ODD, ROLLOUTS, Refused, agree, branches, inputs, mutated, outcome, supervised
from tests.fuzz.reference import as_folded, check, folded, tokens_of_batch, tokens_of_trees

IN_FEATURE = r"`features\[\d\]`: .*`|`features(\[\d\])?` (is|has|must)"
WEIGHTINGS = st.sampled_from(["tree", "branch", "branch_mean", "once"])


def several(feature: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """One to three features, some of them odd; now and then no list of features."""
    one = st.one_of(*[mutated(feature)] * 5, ODD)
    return st.one_of(*[st.lists(one, min_size=1, max_size=3)] * 9, ODD)


def listed(features: Any) -> list[Any]:
    check(isinstance(features, (list, tuple)) and all(isinstance(feature, dict) for feature in features))
    return [{name: value for name, value in feature.items() if value is not None} for feature in features]


def lists(batch: Any) -> Any:
    return {name: value.tolist() for name, value in batch.items()}


# --- Trees


@inputs(150)
@given(several(st.one_of(branches(), ROLLOUTS)), WEIGHTINGS)
def test_raw_features_of_trees(features, weighting):
    def expected():
        found = []
        for feature in listed(features):
            row = {name: list(value) if isinstance(value, tuple) else value for name, value in feature.items()}
            forms = ["branches" in row, "prompt_ids" in row and "completions" in row]
            check(sum(forms) == 1)
            found.append(reference.branches_of("branches" if forms[0] else "rollouts", row, None))
            check(found[-1])
        return [folded(of_feature, weighting) for of_feature in found]

    def collated():
        found = [as_folded(tree.to_dict()) for tree in collator.trees(features)]
        assert tokens_of_batch(collator(features)) == tokens_of_trees(found)
        return found

    collator = DataCollatorForPrefixTree(0, weighting, 4)
    agree(collated, expected, IN_FEATURE)


@inputs(60)
@given(st.lists(st.one_of(branches(), ROLLOUTS), min_size=1, max_size=2), WEIGHTINGS)
def test_branches_of_trees(features, weighting):
    """The branches of grouped training, each by itself: a token of the tree weighs what its copies add up to."""
    collator = DataCollatorForPrefixTree(0, weighting, 4)
    of_branches: dict[Any, float] = {}
    batch = BranchCollator(collator)(features)
    for part in branch_batches(batch, batch["branch_lengths"].numel()):
        for path, weight, _ in tokens_of_batch(part):
            of_branches[path] = of_branches.get(path, 0.0) + weight
    of_trees: dict[Any, float] = {}
    for path, weight, _ in tokens_of_batch(collator(features)):
        of_trees[path] = of_trees.get(path, 0.0) + weight
    assert of_branches == pytest.approx(of_trees, abs=1e-7)


@st.composite
def stored(draw: Any) -> dict[str, Any]:
    """What a dataset holds of a tree, or of a part of one."""
    given = [Branch(branch["input_ids"], branch["weights"]) for branch in draw(branches())["branches"]]
    tree = fold(given, draw(WEIGHTINGS))
    if draw(st.booleans()):
        longest = max(map(len, given))
        tree = draw(st.sampled_from(split_tree(tree, draw(st.integers(longest, longest + 2)))))
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in tree.to_dict().items()}


@inputs(150)
@given(mutated(stored()))
def test_stored_trees(row):
    """A stored tree that is accepted holds the weights of the branches that it unfolds into."""
    try:
        (tree,) = outcome(lambda: DataCollatorForPrefixTree(0).trees([row]), IN_FEATURE)
    except Refused:
        return
    if tree.num_branches == len(tree.branch_nodes):  # a part keeps the weights of the whole tree
        plain = [(branch.input_ids.tolist(), branch.weights.tolist()) for branch in tree.branches()]
        assert as_folded(tree.to_dict()) == folded(plain, tree.weighting)


@inputs(100)
@given(stored())
def test_a_stored_tree_is_read(row):
    (tree,) = DataCollatorForPrefixTree(0).trees([{"trees": [row]}])
    assert as_folded(tree.to_dict()) == as_folded(row)


# --- NeMo's rollouts


GROUPS = ROLLOUTS.map(lambda row: dataclasses.asdict(fold_shared_prefix_rollouts(**row)))


@inputs(150)
@given(st.one_of(*[st.lists(mutated(GROUPS), min_size=1, max_size=1)] * 9, several(GROUPS)))
def test_rollouts_of_nemo(features):
    def collated():
        return tokens_of_batch(prefix_tree_collate_fn(features, pad_to_multiple_of=1))

    def expected():
        (row,) = listed(features) if isinstance(features, list) and len(features) == 1 else [None]
        check(row and all(name in row for name in ("input_ids", "labels", "node_lengths", "sample_paths")))
        return tokens_of_trees([folded(paths_of(row))])

    agree(collated, expected, IN_FEATURE)


@inputs(100)
@given(mutated(ROLLOUTS))
def test_rollouts_in_the_form_of_nemo(row):
    def expected():
        check({"prompt_ids", "completions"} == row.keys())
        check(isinstance(row["completions"], (list, tuple)) and row["completions"])
        prompt, completions = reference.ints(row["prompt_ids"]), [reference.ints(ids) for ids in row["completions"]]
        check(all(completions))
        return reference.positions_of(prompt, completions)

    if {"prompt_ids", "completions"} == row.keys():
        agree(lambda: dataclasses.asdict(fold_shared_prefix_rollouts(**row)), expected)


def paths_of(row: Any) -> list[reference.Plain]:
    """The branches of a group in NeMo's terms, whose labels are shifted."""
    ids, labels = reference.ints(row["input_ids"]), reference.ints(row["labels"], -100)
    lengths = reference.ints(row["node_lengths"], most=2**31 - 1)
    check(lengths and len(labels) == len(ids) == sum(lengths))
    starts = [sum(lengths[:node]) for node in range(len(lengths))]
    ends = {start + length - 1 for start, length in zip(starts, lengths, strict=True) if length}
    for at, label in enumerate(labels):
        check(label == -100 or (at not in ends and label == ids[at + 1]))
    weights = [0.0, *(float(label != -100) for label in labels[:-1])]
    check(isinstance(row["sample_paths"], (list, tuple)) and row["sample_paths"])
    parents: dict[int, int] = {}
    found = []
    for of_sample in row["sample_paths"]:
        path = reference.ints(of_sample, most=len(lengths) - 1)
        for parent, node in zip([-1, *path], path, strict=False):
            check(parent < node and parents.setdefault(node, parent) == parent)
        at = [starts[node] + i for node in path for i in range(lengths[node])]
        found.append(reference.as_branch([ids[i] for i in at], [weights[i] for i in at]))
    check(all(node in parents for node, length in enumerate(lengths) if length))
    return found


# --- Diffusion


@st.composite
def diffusion_options(draw: Any) -> dict[str, Any]:
    return {
        "block_size": draw(st.sampled_from([None, 0, 1, 2, 3])),
        "pad_seq_len_divisible": draw(st.sampled_from([None, 0, 2, 4])),
        "max_seq_len": draw(st.sampled_from([None, 1, 3, 100])),
        "supervise_padding": draw(st.booleans()),
        "response_window": draw(st.booleans()),
    }


def diffusion_batch(samples: list[reference.Plain], options: dict[str, Any]) -> dict[str, Any]:
    """Cut, fill, pad: position by position."""
    block, multiple = options["block_size"] or 1, options["pad_seq_len_divisible"] or 1
    ends = []
    for ids, mask in samples:
        runs = [at for at, m in enumerate(mask) if m and not (at and mask[at - 1])]
        check(not options["response_window"] or len(runs) <= 1)
        end, prefix = len(ids), (runs[0] if runs else len(ids)) if options["response_window"] else 0
        while (end - prefix) % block:
            end += 1
        ends.append(end)
    length = max(ends)
    while multiple > 1 and (length % multiple or length % block):
        length += 1
    length = max(1, min(length, options["max_seq_len"] or length))
    rows: dict[str, list[Any]] = {"input_ids": [], "loss_mask": [], "attention_mask": []}
    for (ids, mask), end in zip(samples, ends, strict=True):
        fill, padding = end - len(ids), length
        values = {
            "input_ids": ids + [8] * fill + [9] * padding,
            "loss_mask": [float(m > 0) for m in mask] + [1.0] * fill + [float(options["supervise_padding"])] * padding,
            "attention_mask": [1] * len(ids) + [int(options["response_window"])] * fill + [0] * padding,
        }
        for name, value in values.items():
            rows[name].append(value[:length])
    return rows | {"input_lengths": [len(ids) for ids, _ in samples]}


@inputs(150)
@given(several(supervised()), diffusion_options())
def test_diffusion(features, options):
    def collated():
        batch = lists(DataCollatorForDiffusionLM(9, 8, **options)(features))
        labels = batch.pop("labels")
        for ids, mask, of_row in zip(batch["input_ids"], batch["loss_mask"], labels, strict=True):
            assert of_row == [token if m else -100 for token, m in zip(ids, mask, strict=True)]
        return batch

    def expected():
        check(listed(features))
        return diffusion_batch([reference.sample(row) for row in listed(features)], options)

    agree(collated, expected, IN_FEATURE)


PLAIN = dict.fromkeys(("block_size", "pad_seq_len_divisible", "max_seq_len"))
PLAIN |= {"supervise_padding": False, "response_window": False}


def masked(row: dict[str, Any]) -> dict[str, Any]:
    return {name: [1] * len(row["input_ids"]) for name in ("loss_mask", "attention_mask")} | row


@inputs(150)
@given(several(supervised().map(masked)))
def test_diffusion_of_nemo(features):
    def expected():
        names = ("input_ids", "loss_mask", "attention_mask")
        rows = listed(features)
        check(rows and all(name in row for row in rows for name in names))
        samples = [reference.sample({name: row[name] for name in names}, padded=True) for row in rows]
        batch = diffusion_batch(samples, PLAIN)
        for row, mask in zip(rows, batch["attention_mask"], strict=True):
            given = reference.zeros_and_ones(row["attention_mask"], len(reference.ints(row["input_ids"])))
            mask[: len(given)] = given
        return batch

    agree(lambda: lists(DLLMCollator(9)(features)), expected, IN_FEATURE)


# --- EAGLE-3


def eagle3_rows(rows: list[list[reference.Plain]], length: int) -> dict[str, Any]:
    """Documents one after another, then padding that counts to the last of them: position by position."""
    batch: dict[str, list[Any]] = {n: [] for n in ("input_ids", "loss_mask", "attention_mask", "position_ids")}
    batch |= {"doc_remaining": [], "seq_lens": []}
    for documents in rows:
        columns: dict[str, list[int]] = {name: [] for name in batch}
        for ids, mask in documents:
            for at, token in enumerate(ids):
                columns["input_ids"].append(token)
                columns["loss_mask"].append(int(mask[at] > 0))
                columns["attention_mask"].append(1)
                columns["position_ids"].append(at)
                columns["doc_remaining"].append(len(ids) - at - 1)
            columns["seq_lens"].append(len(ids))
        columns["seq_lens"] = columns["seq_lens"] or [0]
        while len(columns["input_ids"]) < length:
            columns["position_ids"].append(columns["seq_lens"][-1])
            columns["seq_lens"][-1] += 1
            columns["input_ids"].append(9)
            for name in ("loss_mask", "attention_mask", "doc_remaining"):
                columns[name].append(0)
        for name, values in columns.items():
            batch[name].append(values)
    most = max(map(len, batch["seq_lens"]))
    batch["seq_lens"] = [lens + [0] * (most - len(lens)) for lens in batch["seq_lens"]]
    return batch


@inputs(150)
@given(several(supervised()), st.sampled_from([1, 4]))
def test_documents_of_eagle3(features, multiple):
    def expected():
        samples = [reference.sample(row) for row in listed(features)]
        check(samples)
        length = max(1, *(len(ids) for ids, _ in samples))
        while length % multiple:
            length += 1
        return eagle3_rows([[sample] if sample[0] else [] for sample in samples], length)

    agree(lambda: lists(DataCollatorForEagle3(9, pad_to_multiple_of=multiple)(features)), expected, IN_FEATURE)


@st.composite
def packed(draw: Any) -> dict[str, Any]:
    samples = [
        {"input_ids": draw(st.lists(IDS, min_size=count, max_size=count)), "loss_mask": [1] * count}
        for count in draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
    ]
    return pack_eagle3_dataset(samples, 6, 9)[0]


@inputs(150)
@given(st.lists(mutated(packed()), min_size=1, max_size=2))
def test_packed_rows_of_eagle3(features):
    def expected():
        rows = [unpacked(row) for row in listed(features)]
        most = max(len(row["seq_lens"]) for row in rows)
        filled = [{**row, "seq_lens": row["seq_lens"] + [0] * (most - len(row["seq_lens"]))} for row in rows]
        return {name: [row[name] for row in filled] for name in (*ROW, "seq_lens")}

    # What another column than `doc_remaining` says of a single document is tested above.
    if all("doc_remaining" in row and row["doc_remaining"] is not None for row in features):
        agree(lambda: lists(DataCollatorForEagle3(9)(features)), expected, IN_FEATURE)


def unpacked(row: Any) -> dict[str, list[int]]:
    """The columns of a packed row, if they are those that packing its documents gives."""
    columns = {name: reference.ints(row.get(name)) for name in (*ROW, "seq_lens")}
    check(all(len(columns[name]) == 6 for name in ROW) and sum(columns["seq_lens"]) == 6)
    check(all(columns["seq_lens"]))
    documents, start = [], 0
    for length in columns["seq_lens"]:
        real = sum(columns["attention_mask"][start : start + length])
        documents.append(tuple(columns[name][start : start + real] for name in ("input_ids", "loss_mask")))
        start += length
    again = eagle3_rows([documents], 6)
    again["input_ids"][0][start - length + real :] = columns["input_ids"][start - length + real :]  # any padding
    check(all(again[name][0] == columns[name] for name in columns))
    return columns


ROW = ("input_ids", "loss_mask", "attention_mask", "position_ids", "doc_remaining")
