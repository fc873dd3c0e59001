"""The benchmarks of EAGLE-3 run on a CPU; conversations have the lengths of the file, and differences are noticed."""

import math
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from benchmarks import eagle3_contexts, eagle3_trees
from benchmarks.common import read_csv
from hf_prefix_tree import fold
from hf_prefix_tree.eagle3.loss import StepSums


@pytest.mark.parametrize("template", eagle3_trees.TEMPLATES)
def test_random_conversations_have_the_shipped_lengths(template):
    lengths = [row for row in read_csv(eagle3_trees.LENGTHS) if row["template"] == template]
    conversations = eagle3_trees.random_conversations(lengths, eagle3_trees.SHIPPED, 1000, 1)
    again = eagle3_trees.lengths_of(template, conversations)
    assert [{name: str(value) for name, value in row.items()} for row in again] == lengths
    stats = [fold(branches).stats() for branches in conversations]
    # where nothing is stripped, a tree is little more than its longest branch
    assert all((of_tree.tree_tokens == of_tree.longest_path) == (template == "keeps") for of_tree in stats)


@pytest.mark.slow
def test_trees_are_measured_against_documents():
    rows = eagle3_trees.main(["--quick"])
    methods = [(row["template"], row["method"]) for row in rows]
    assert methods == [*product(eagle3_trees.TEMPLATES, ("flat", "tree"))]
    for flat, tree in zip(rows[::2], rows[1::2], strict=True):
        assert tree["loss"] == pytest.approx(flat["loss"], rel=1e-5)
        assert tree["token_ratio"] == pytest.approx(flat["tokens"] / tree["tokens"]) and tree["token_ratio"] > 8
        assert tree["tokens"] < tree["slots"] < 1.1 * tree["tokens"] and flat["slots"] == flat["tokens"]


def test_rounding_does_not_decide_what_the_target_chooses():
    torch.manual_seed(0)
    config = eagle3_trees.quick_config(hidden_size=512)
    model = eagle3_trees.random_target(config, torch.bfloat16)
    ids = torch.randint(config.vocab_size, (1, 200))
    with torch.no_grad():
        logits = model(ids).logits.float()
    best = logits.topk(2).values
    assert torch.equal(logits.argmax(dim=-1), ids)
    assert (best[..., 0] - best[..., 1]).min() > 0.05 * best.max()  # rounding: less than 1%


@pytest.mark.parametrize("name", ["supervised", "loss", "valid"])
def test_other_sums_are_noticed(name):
    sums = StepSums(torch.ones(2).double(), *(torch.tensor([9, 8]) for _ in range(4)))
    wrong = sums._replace(**{name: getattr(sums, name) + 1})
    eagle3_trees.check(SimpleNamespace(sums=sums), SimpleNamespace(sums=sums), exact=True)
    with pytest.raises(RuntimeError, match="on trees, but"):
        eagle3_trees.check(SimpleNamespace(sums=sums), SimpleNamespace(sums=wrong), exact=True)


@pytest.mark.slow
def test_drafts_of_both_contexts_are_served():
    rows = eagle3_contexts.main(["--quick"])
    assert [(row["seed"], row["arm"]) for row in rows] == [*product((0, 1), eagle3_contexts.ARMS)]
    assert all(row["rounds"] > 0 and 1 <= row["accepted"] <= 3 for row in rows)


def test_the_interval_of_the_difference():
    values = {"served": (2.0, 2.2, 2.4), "restored": (1.5, 1.6, 1.7)}
    rows = [{"data": "a", "arm": arm, "accepted": value} for arm in values for value in values[arm]]
    (line,) = eagle3_contexts.summary(rows)
    assert line["difference"] == pytest.approx(0.6)
    assert line["plus_minus"] == pytest.approx(4.303 * 0.1 / math.sqrt(3))
