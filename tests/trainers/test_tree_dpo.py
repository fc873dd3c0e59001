"""`TreeDPOTrainer` against TRL's `DPOTrainer`: same pairs, same steps, same numbers, fewer tokens."""

import logging
from types import SimpleNamespace

import pytest
import torch
from trl import DPOConfig, DPOTrainer

from hf_prefix_tree import TreeDPOTrainer
from hf_prefix_tree.rl import folded_forward as folded
from tests.support.preference_runs import Run, assert_equal_runs, check, pairs

TRAININGS = {
    # with Adam's default epsilon, rounding decides where weights go whose gradient is 0
    "sigmoid": {"optim": "adamw_torch", "adam_epsilon": 1e-4, "learning_rate": 1e-3, "eval_rows": pairs(4, seed=1)},
    "ipo": {"loss_type": "ipo", "gradient_accumulation_steps": 2, "learning_rate": 1e-3},
    "weighted": {"use_weighting": True, "ld_alpha": 0.5, "loss_type": ["sigmoid", "bco_pair"], "padding_free": True},
    "precomputed": {"precompute_ref_log_probs": True, "loss_type": "hinge"},
    "lora": {"lora": True, "gradient_accumulation_steps": 2, "learning_rate": 0.5, "gradient_checkpointing": True},
}


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """TRL's run with `DPOConfig` as it is."""
    return Run(tmp_path_factory.mktemp("stock"), DPOTrainer, DPOConfig, pairs())


@pytest.mark.parametrize("name", list(TRAININGS))
def test_five_steps_are_those_of_trl(name, tmp_path, monkeypatch):
    share = check(tmp_path, monkeypatch, TreeDPOTrainer, DPOTrainer, DPOConfig, pairs(), **TRAININGS[name])
    assert 0.3 < share < 0.6


def test_a_lost_gradient_would_show(stock, tmp_path, monkeypatch):
    """Negative control: shared tokens that keep the gradient of one of their rows."""
    unfold = folded._Call.unfold

    def lossy(call, output, config):
        first = torch.zeros(len(call.rows.where), dtype=torch.bool)
        for index, place in enumerate(call.rows.where.tolist()):
            first[index] = place not in call.rows.where[:index]
        whole = output.log_probs
        found = unfold(call, output, config)
        kept = found.log_probs.detach().clone()
        kept[call.label_mask] += torch.where(
            first, whole[0][call.rows.where] - whole[0][call.rows.where].detach(), 0.0
        )
        found.log_probs = kept
        return found

    monkeypatch.setattr(folded._Call, "unfold", lossy)
    tree = Run(tmp_path / "tree", TreeDPOTrainer, DPOConfig, pairs())
    assert abs(tree.logs[0]["loss"] - stock.logs[0]["loss"]) < 1e-6  # the first loss can't tell
    with pytest.raises(AssertionError):
        assert_equal_runs(tree, stock)


def test_a_dropped_tree_mask_would_show(stock, tmp_path, monkeypatch):
    """Negative control: a causal mask over the tree row."""
    fold_rows = folded.fold_rows

    def causal(*args):
        rows = fold_rows(*args)
        rows.batch["prefix_tree"][:, 0] = rows.batch["input_ids"].shape[1]
        return rows

    monkeypatch.setattr(folded, "fold_rows", causal)
    tree = Run(tmp_path / "tree", TreeDPOTrainer, DPOConfig, pairs())
    with pytest.raises(AssertionError):
        assert_equal_runs(tree, stock)


def test_pairs_that_share_too_little_run_as_in_trl(stock, tmp_path, caplog):
    class Strict(TreeDPOTrainer):
        min_reuse = 10.0

    with caplog.at_level(logging.WARNING, logger=folded.__name__):
        tree = Run(tmp_path / "tree", Strict, DPOConfig, pairs())
    assert_equal_runs(tree, stock)
    assert tree.computed == stock.computed
    warnings = [record.getMessage() for record in caplog.records if "unfolded forward" in record.getMessage()]
    assert len(warnings) == 2 and "`min_reuse=10.0`" in warnings[0]  # the policy's calls, and the reference's


def test_refuses_context_parallelism(tmp_path, monkeypatch):
    def split(trainer, *args, **kwargs):
        trainer.accelerator = SimpleNamespace(
            distributed_type="NO", parallelism_config=SimpleNamespace(cp_enabled=True, sp_enabled=False)
        )

    monkeypatch.setattr(DPOTrainer, "__init__", split)
    with pytest.raises(ValueError, match=r"`cp_size=1`.*`sp_size=1`"):
        TreeDPOTrainer()
