"""The demo's own proof: its comparison finds differences where there are some, its report names what went wrong."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from examples.demo import compare
from examples.demo.__main__ import GRADIENT_BOUND, LOSS_BOUND, report
from examples.demo.compare import Comparison, compare_step
from hf_prefix_tree import fold
from hf_prefix_tree.modeling.prepare import prepare_model
from hf_prefix_tree.tree.prefix_tree import Branch
from tests.support.models import make_model

# The last two sides of the forks come after other sides in the layout, and hidden states inside them predict tokens.
SHARED = [
    Branch([5, 6, 7, 8, 11], [0, 0, 1, 1, 1]),
    Branch([5, 6, 7, 9, 10, 12], [0, 0, 1, 1, 1, 1]),
    Branch([5, 6, 3, 4], [0, 0, 1, 1]),
]
STEP = Comparison(2.0, 2.0, 0.0, 0.0, tree_seconds=1.0, branch_seconds=3.0)


@pytest.mark.parametrize("weighting", ["tree", "branch"])
def test_folded_step_and_branches_agree(weighting):
    model = prepare_model(make_model("qwen3"))
    trees = [fold(SHARED, weighting), fold([Branch([4, 5, 6], [0, 1, 1])], weighting)]
    result = compare_step(model, trees)
    assert result.loss_difference < LOSS_BOUND and result.gradient_difference < GRADIENT_BOUND
    assert result.tree_loss > 0 and result.tree_seconds > 0 and result.branch_seconds > 0
    assert all(p.grad is None for p in model.parameters())


def test_a_wrong_folded_step_is_found(monkeypatch):
    model = prepare_model(make_model("qwen3"))
    right = compare.concatenate_trees

    def plain_causal(trees, pad_token_id):
        batch = copy.deepcopy(right(trees, pad_token_id))
        batch["prefix_tree"][:, 0] = batch["input_ids"].shape[1]  # subtree_end: every earlier token is visible
        return batch

    assert compare_step(model, [fold(SHARED)]).loss_difference < LOSS_BOUND
    monkeypatch.setattr(compare, "concatenate_trees", plain_causal)
    result = compare_step(model, [fold(SHARED)])
    assert result.loss_difference > LOSS_BOUND and result.gradient_difference > GRADIENT_BOUND


@pytest.mark.parametrize(
    ("branches", "changes", "losses", "wrong"),
    [
        (SHARED, {}, [3.0, 1.0], []),
        (SHARED[1:], {}, [3.0, 1.0], ["no token is supervised by several branches"]),
        (SHARED, {}, [3.0, 3.0], ["the training loss did not fall"]),
        (SHARED, {}, [3.0, float("nan")], ["the training loss did not fall"]),
        (SHARED, {"loss_difference": 2e-6}, [3.0, 1.0], ["the losses differ by 2.0e-06"]),
        (SHARED, {"gradient_difference": float("nan")}, [3.0, 1.0], ["the gradients differ by nan"]),
        (
            SHARED[1:],
            {"loss_difference": 1.0, "gradient_difference": 1.0},
            [1.0, 2.0],
            [
                "no token is supervised by several branches",
                "the training loss did not fall",
                "the losses differ by 1.0e+00",
                "the gradients differ by 1.0e+00",
            ],
        ),
    ],
)
def test_report_names_what_went_wrong(capsys, branches, changes, losses, wrong):
    steps = [dataclasses.replace(STEP, **changes), STEP]
    assert report([fold(branches)], steps, losses) == wrong
    printed = capsys.readouterr().out
    assert "3.0x" in printed  # seconds per step
