"""The self-check at the first training step runs under autocast, whose rounding is not the model's fault."""

from contextlib import nullcontext

import pytest
import torch

import hf_prefix_tree.modeling.context as context_module
import hf_prefix_tree.modeling.verify as verify_module
from hf_prefix_tree import TreeSFTTrainer
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask
from tests.support.trainer_runs import config, make_model, make_trees, tokenizer, tree_dataset


def unchecked_trainer(folder):
    trainer = TreeSFTTrainer(
        model=make_model(),
        args=config(folder, bf16=True),
        train_dataset=tree_dataset(make_trees(2)),
        processing_class=tokenizer(),
    )
    trainer.model._hf_prefix_tree_state.verified_on.clear()  # as where weights are sharded, or not on their device yet
    return trainer


def test_under_autocast(tmp_path):
    trainer = unchecked_trainer(tmp_path)
    trainer.train()
    assert trainer.model._hf_prefix_tree_state.verified_on == {"cpu"}


def round_as_bf16(monkeypatch):
    """Some CPUs give a row the same numbers in every batch: half of what bf16 may differ by, as others do."""
    original, half = verify_module.tree_logits, verify_module.ROUNDING[torch.bfloat16] / 2
    monkeypatch.setattr(verify_module, "tree_logits", lambda *args: original(*args) * (1 + half))


def test_rounding_of_autocast_is_allowed(tmp_path, monkeypatch):
    trainer = unchecked_trainer(tmp_path)
    round_as_bf16(monkeypatch)
    trainer.train()


def test_float32_logits_alone_would_be_judged_too_strictly(tmp_path, monkeypatch):
    trainer = unchecked_trainer(tmp_path)
    round_as_bf16(monkeypatch)
    monkeypatch.setattr(verify_module, "coarsest_dtype", lambda model: nullcontext(set()))
    with pytest.raises(ValueError, match=r"gives a branch other logits|does not give the same logits"):
        trainer.train()


def test_a_wrong_mask_is_still_found(tmp_path, monkeypatch):
    trainer = unchecked_trainer(tmp_path)
    # depth and predecessor stay, but every earlier token is visible
    monkeypatch.setattr(context_module, "dense_mask", lambda tree, **kwargs: dense_mask(tree * 0 + tree.shape[-1]))
    with pytest.raises(ValueError, match="logits"):
        trainer.train()
