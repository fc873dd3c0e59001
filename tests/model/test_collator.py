"""The collator and the batch contract: values, equality with folding beforehand, pickling, errors."""

import pickle

import numpy as np
import pytest
import torch
from datasets import Dataset

from hf_prefix_tree import DataCollatorForPrefixTree, fold_shared_prefix_rollouts
from hf_prefix_tree.modeling.batch import (
    concatenate_trees,
    decode_weights,
    encode_weights,
    gather_supervised,
    summed_weights,
)
from hf_prefix_tree.modeling.loss import weighted_token_loss
from hf_prefix_tree.nemo import prefix_tree_collate_fn
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import random_forest


def equal(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


def test_a_row_by_hand():
    tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 0.5, 1]), Branch([5, 6], [0, 1])])
    other = fold([Branch([4, 3], [1, 1])], weighting="branch")
    row = DataCollatorForPrefixTree(pad_token_id=1, pad_to_multiple_of=9)([tree, other])
    assert row["input_ids"].tolist() == [[5, 6, 8, 9, 7, 4, 3, 1, 1]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 2, 0, 1, 0, 0]]
    assert row["labels"].tolist() == [[-100, 6, 8, 9, 7, -100, 3, -100, -100]]
    assert row["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 1, 1, 0, 0]]
    assert row["prefix_tree"].tolist() == [
        [[5, 5, 4, 4, 5, 7, 7, 8, 9], [0, 1, 2, 3, 2, 0, 1, 0, 0], [-1, 0, 1, 2, 1, -1, 5, -1, -1]]
    ]
    assert decode_weights(row["loss_weights"]).tolist() == [[0, 1, 0.5 / 3, 1 / 3, 1 / 3, 0, 1, 0, 0]]
    # trees, branches, branch tokens, tree tokens, branch pairs, tree pairs
    assert row["tree_stats"].tolist() == [[2, 4, 11, 7, 22, 16]]
    assert next(iter(row)) == "input_ids"
    assert {key: value.dtype for key, value in row.items() if value.dtype != torch.int64} == {
        "prefix_tree": torch.int32
    }


def test_raw_features_equal_folding_beforehand():
    trees = random_forest(0, 3)
    collator = DataCollatorForPrefixTree(pad_token_id=0)
    expected = concatenate_trees(trees, pad_token_id=0)
    rows = Dataset.from_list([tree.to_dict() for tree in trees])
    as_branches = [{"branches": tree.branches()} for tree in trees]
    as_dicts = [
        {"branches": [{"input_ids": b.input_ids.tolist(), "weights": b.weights.tolist()} for b in tree.branches()]}
        for tree in trees
    ]
    packed = list(Dataset.from_list([{"trees": [tree.to_dict() for tree in trees], "tree_ids": [4, 7, 7]}]))
    for features in (trees, list(rows), as_branches, as_dicts, packed, [{"trees": trees[:2]}, {"trees": trees[2:]}]):
        assert equal(collator(features), expected)
        assert equal(pickle.loads(pickle.dumps(collator))(features), expected)


def test_prompt_and_completions_and_weighting():
    feature = {"prompt_ids": [5, 6], "completions": [[7, 8], [7, 9]]}
    by_tree, by_branch = (DataCollatorForPrefixTree(0, weighting=w)([feature]) for w in ("tree", "branch"))
    assert by_tree["input_ids"][0, :5].tolist() == [5, 6, 7, 8, 9]
    assert decode_weights(by_tree["loss_weights"])[0, :5].tolist() == [0, 0, 1, 0.5, 0.5]
    assert decode_weights(by_branch["loss_weights"])[0, :5].tolist() == [0, 0, 2, 1, 1]


def test_rows_are_padded_to_a_multiple_of_128():
    assert DataCollatorForPrefixTree(0)([fold([Branch(range(128), [1] * 128)])])["input_ids"].shape == (1, 128)
    assert DataCollatorForPrefixTree(0)([fold([Branch(range(129), [1] * 129)])])["input_ids"].shape == (1, 256)


def test_empty_features_are_padding():
    tree = random_forest(0, 1)[0]
    collator = DataCollatorForPrefixTree(pad_token_id=0)
    assert equal(collator([tree, {"input_ids": []}]), collator([tree]))
    empty = collator([{"input_ids": []}])
    assert empty["input_ids"].shape == (1, 128) and summed_weights(empty) == 0 and empty["tree_stats"].sum() == 0


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"text": "hello"}, r"got the keys \['text'\].*prepare_trees"),
        ({"input_ids": np.arange(3)}, r"got the keys \['input_ids'\].*prepare_trees"),
        ({"node_lengths": [1], "sample_paths": [[0]]}, r"PrefixTree.from_node_paths"),
        ([1, 2], "list"),
        ({"branches": [{"input_ids": [1, 2]}]}, r"`branches\[0\]`.*\['input_ids'\]"),
        ({"branches": [Branch([1, 2], [0, 1]), [1, 2]]}, r"`branches\[1\]`.*`Branch`.*list"),
        ({"branches": 5}, "`branches`.*5"),
        ({"branches": []}, "`branches`"),
        ({"trees": 5}, "`trees`.*5"),
        ({"trees": [[1]]}, "`mapping`.*list"),
        (
            {"branches": [], "prompt_ids": [3], "completions": [[4]]},
            "`branches`.*`prompt_ids`",
        ),
        ({**fold([Branch([1, 2], [0, 1])]).to_dict(), "trees": []}, "`trees`.*`node_parents`"),
    ],
)
def test_other_features_are_refused(feature, message):
    with pytest.raises(ValueError, match=message):
        DataCollatorForPrefixTree(pad_token_id=0)([feature])


def test_what_arrow_filled_in_is_absent():
    raw = [{"branches": [{"input_ids": [5, 6], "weights": [0.0, 1.0]}]}, {"prompt_ids": [5, 6], "completions": [[7]]}]
    columns = ("branches", "prompt_ids", "completions", "trees")
    filled = Dataset.from_list([{name: row.get(name) for name in columns} for row in raw])
    collator = DataCollatorForPrefixTree(pad_token_id=0)
    assert equal(collator(list(filled)), collator(raw))


def test_numbers_of_numpy_are_integers():
    collator = DataCollatorForPrefixTree(np.int64(1), pad_to_multiple_of=np.int32(8))
    assert equal(
        collator(random_forest(0, 1)), DataCollatorForPrefixTree(1, pad_to_multiple_of=8)(random_forest(0, 1))
    )


def test_other_arguments_are_refused():
    for wrong in (None, 0.7, "0", True):
        with pytest.raises(ValueError, match=f"`pad_token_id`.*{wrong!r}"):
            DataCollatorForPrefixTree(wrong)
    with pytest.raises(ValueError, match=r"`pad_token_id`.*-1"):
        DataCollatorForPrefixTree(-1)(random_forest(0, 1))
    with pytest.raises(ValueError, match=r"`weighting`.*'trees'"):
        DataCollatorForPrefixTree(0, weighting="trees")
    for wrong in ("64", 64.0, None, 0):
        with pytest.raises(ValueError, match=f"`pad_to_multiple_of`.*{wrong!r}"):
            DataCollatorForPrefixTree(0, pad_to_multiple_of=wrong)
    with pytest.raises(ValueError, match=r"`weights`.*torch.float32"):
        encode_weights(torch.ones(1, 2))


def test_a_group_in_the_form_of_nemo():
    """Labels come back unshifted; the completions 10 11 and 10 12 share their first token."""
    group = fold_shared_prefix_rollouts([5, 6], [[10, 11], [20, 21, 22], [10, 12]])
    fields = {name: getattr(group, name) for name in ("input_ids", "labels", "node_lengths", "sample_paths")}
    row = prefix_tree_collate_fn([group], pad_token_id=1, pad_to_multiple_of=9)
    assert row["input_ids"].tolist() == [[5, 6, 10, 11, 12, 20, 21, 22, 1]]
    assert row["labels"].tolist() == [[-100, -100, -100, 11, 12, -100, 21, 22, -100]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 3, 3, 2, 3, 4, 0]]
    assert decode_weights(row["loss_weights"]).tolist() == [[0, 0, 0, 1 / 3, 1 / 3, 0, 1 / 3, 1 / 3, 0]]
    assert equal(prefix_tree_collate_fn([fields], 1, pad_to_multiple_of=9), row)
    rollouts = {"prompt_ids": [5, 6], "completions": [[10, 11], [20, 21, 22], [10, 12]]}
    assert equal(prefix_tree_collate_fn([rollouts], 1, pad_to_multiple_of=9), row)
    assert equal(prefix_tree_collate_fn([group]), DataCollatorForPrefixTree(0)([group.to_tree()]))
    by_branch = prefix_tree_collate_fn([group], weighting="branch")
    assert decode_weights(by_branch["loss_weights"]).sum() == 4
    # a label that was taken out stays out; another id may stand for it
    masked = {**fields, "labels": [-1 if label in (-100, 21) else label for label in fields["labels"]]}
    found = prefix_tree_collate_fn([masked], 1, pad_to_multiple_of=9, ignore_idx=-1)
    assert found["labels"].tolist() == [[-100, -100, -100, 11, 12, -100, -100, 22, -100]]


def test_groups_that_are_refused():
    group = fold_shared_prefix_rollouts([5], [[7, 8]])
    fields = {name: getattr(group, name) for name in ("input_ids", "labels", "node_lengths", "sample_paths")}
    for features, message in (
        ([group, group], "got 2"),
        ([], "got 0"),
        (group, "FoldedRollouts"),
        ([[5, 7, 8]], r"`features\[0\]`.*list"),
        ([{"input_ids": [1]}], "`labels`"),
        ([{**fields, "labels": [-100, 8]}], "`input_ids`.*2.*`labels`"),
        ([{"prompt_ids": [5], "completions": []}], "`completions`"),
        ([{"prompt_ids": [5]}], "`completions`"),
        ([{**fields, "labels": [-100, 7, 8]}], "`labels`.*7.*1"),
        ([{**fields, "labels": [7, 8, -100]}], "`labels`.*7.*0"),  # a node's last token predicts nothing
        ([{**fields, "sample_paths": [[0, 2]]}], "`sample_paths"),
    ):
        with pytest.raises(ValueError, match=message):
            prefix_tree_collate_fn(features)


def test_weights_survive_bit_for_bit():
    weights = torch.tensor([[1 / 3, 1e-300, 7.0]], dtype=torch.float64)
    assert torch.equal(decode_weights(encode_weights(weights)), weights)


def test_supervised_tokens_are_compacted():
    row = concatenate_trees([fold([Branch([5, 6, 7], [1, 1, 1]), Branch([5, 8], [1, 1])])], 0, pad_to_multiple_of=4)
    two = {key: torch.cat([value, value]) for key, value in row.items()}
    two["labels"][:, 0] = 5  # a root's first token has no predecessor: it is in no sum
    found = gather_supervised(two["prefix_tree"], two["labels"], two["loss_weights"])
    assert found.where.tolist() == [0, 1, 0, 4, 5, 4]
    assert found.labels.tolist() == [[6, 7, 8, 6, 7, 8]]
    assert found.weights.tolist() == [[0.5] * 6]
    assert summed_weights(two) == 3
    del two["loss_weights"]
    assert summed_weights(two) == 6


def test_loss_by_hand():
    logits = torch.tensor([[[0.0, 0.0], [2.0, 0.0]]], requires_grad=True)
    nll = [torch.log(torch.tensor(2.0)), torch.log(1 + torch.exp(torch.tensor(2.0)))]
    weights = torch.tensor([[0.25, 0.5]], dtype=torch.float64)
    loss = weighted_token_loss(logits, torch.tensor([[0, 1]]), weights)
    assert loss.item() == pytest.approx((0.25 * nll[0] + 0.5 * nll[1]).item() / 0.75)
    assert weighted_token_loss(logits, torch.tensor([[0, 1]]), weights, 0.1).item() == pytest.approx(
        (0.25 * nll[0] + 0.5 * nll[1]).item() / 0.1
    )
    nothing = weighted_token_loss(logits, torch.tensor([[-100, -100]]), torch.zeros(1, 2).double())
    nothing.backward()
    assert nothing.item() == 0 and logits.grad.abs().max() == 0


def test_features_and_padding_of_other_kinds_are_refused():
    with pytest.raises(ValueError, match="`features` is None"):
        DataCollatorForPrefixTree(pad_token_id=0)(None)
    with pytest.raises(ValueError, match="`pad_token_id` is 1180591620717411303424"):
        DataCollatorForPrefixTree(pad_token_id=2**70)([{"prompt_ids": [5], "completions": [[6]]}])
