"""A router's auxiliary loss on trees is that of a padded batch of their branches: a shared token counts for each."""

import logging
from pathlib import Path

import pytest
import torch
import transformers
from datasets import Dataset
from transformers.models.auto.configuration_auto import model_type_to_module_name
from transformers.utils.logging import warning_once

from conformance import build
from conformance.double import keep_double
from hf_prefix_tree import TreeSFTTrainer, prepare_model
from hf_prefix_tree.modeling.batch import WEIGHTED_BY_CALLER, concatenate_trees
from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import random_forest
from tests.support.trainer_runs import config, make_model, make_trees, tokenizer, train

FAST = ("qwen3_moe", "mixtral", "gpt_oss", "qwen3_next")
REFUSED = ("deepseek_v4", "doge", "jamba", "minimax", "minimax_m3_vl_text")  # by `prepare_model`, for their layers
OPTIONS = {"flint": {"mlp_only_layers": []}}  # its small config has no experts


def computes_router_loss(model_type):
    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    return any("= load_balancing_loss_func(" in path.read_text() for path in folder.glob("modeling_*.py"))


FAMILIES = [name for name in build.VARIANTS["text"] if name not in REFUSED and computes_router_loss(name)]


def padded(trees):
    branches = [torch.from_numpy(branch.input_ids.copy()) for tree in trees for branch in tree.branches()]
    masks = [torch.ones_like(branch) for branch in branches]
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(branches, batch_first=True), "attention_mask": pad(masks, batch_first=True)}


def router_loss(model, batch):
    """The auxiliary loss, and the gradients that it gives the router of the first layer that has one."""
    model.zero_grad()
    loss = model(**batch, output_router_logits=True, use_cache=False).aux_loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), next(grad for name, grad in grads.items() if "router" in name or "gate" in name)


def test_branches_that_repeat_or_end_inside_another_count_as_often_as_they_pass():
    paths = [[5, 6, 7], [5, 6, 8, 8], [5, 6], [5, 6, 8, 8], [9]]
    batch = concatenate_trees([fold([Branch(path, [1] * len(path)) for path in paths])], 0, pad_to_multiple_of=8)
    by_token = dict(zip(batch["input_ids"][0].tolist(), batch["token_branches"][0].tolist(), strict=True))
    assert by_token == {5: 4, 6: 4, 7: 1, 8: 2, 9: 1, 0: 0}


@pytest.mark.parametrize("name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in FAMILIES])
def test_a_shared_token_counts_once_for_each_branch(name, monkeypatch):
    tiny = build.tiny_config(name)
    for option, value in OPTIONS.get(name, {}).items():
        setattr(tiny, option, value)
    monkeypatch.setattr(build, "tiny_config", lambda name: tiny)
    trees = random_forest(0)
    batch = concatenate_trees(trees, pad_token_id=0)
    with keep_double():
        model = build.build_model(name).double().eval()  # some routers sample in training
        expected, expected_grad = router_loss(model, padded(trees))
        prepare_model(model)
        loss, grad = router_loss(model, batch)
        logits_only = {key: x for key, x in batch.items() if key not in ("labels", "loss_weights")}
        assert loss == pytest.approx(expected, rel=1e-6)
        assert router_loss(model, logits_only)[0] == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-9)
        once, _ = router_loss(model, {**batch, "token_branches": batch["attention_mask"]})
    assert abs(once / expected - 1) > 1e-5
    assert abs(once / expected - 1) > 100 * abs(loss / expected - 1)


def test_a_router_loss_needs_the_branches_through_each_token():
    model = prepare_model(build.build_model("qwen3_moe"))
    batch = concatenate_trees(random_forest(0), pad_token_id=0)
    expected = model(**batch, output_router_logits=True).loss.item()
    token_branches = batch.pop("token_branches")
    with pytest.raises(ValueError, match=r"`output_router_logits`.*without `token_branches`"):
        model(**batch, output_router_logits=True)
    assert model(**batch).loss > 0  # without that loss they are not needed, nor for logits
    model.eval()(**{**batch, WEIGHTED_BY_CALLER: True}, output_router_logits=True)  # as a target of EAGLE-3
    logits = {name: batch[name] for name in ("input_ids", "prefix_tree")}
    assert model(**logits, output_router_logits=True).logits.shape[1] == len(batch["input_ids"][0])
    counted = token_branches + 7 * (batch["attention_mask"] == 0)  # filled up by another collator
    loss = model(**batch, token_branches=counted, output_router_logits=True).loss.item()
    assert loss == pytest.approx(expected, rel=1e-7)


def test_the_router_loss_of_a_step_is_that_of_its_branches(tmp_path):
    trees = make_trees(2)
    model = make_model("qwen3_moe", attn_implementation=None)
    expected, _ = router_loss(model, padded(trees))
    run = train(
        tmp_path, trees, model, per_device_train_batch_size=2, gradient_accumulation_steps=1, router_aux_loss_coef=0.5
    )
    log = run.state.log_history[0]
    assert log["aux_loss"] == pytest.approx(expected, rel=1e-6)
    assert log["loss"] - log["loss/sum"] / log["loss/token_count"] == pytest.approx(0.5 * expected, rel=1e-4)


@pytest.mark.parametrize("is_split", [True, False])
def test_split_trees_are_said_to_be_inexact_once(is_split, tmp_path, caplog):
    warning_once.cache_clear()
    trees = make_trees(2, seed=5, num_branches=8)
    parts = [
        {"trees": [part.to_dict()], "tree_ids": [index]}
        for index, tree in enumerate(trees)
        for part in (split_tree(tree, tree.stats().longest_path) if is_split else [tree])
    ]
    assert (len(parts) > len(trees)) == is_split
    trainer = TreeSFTTrainer(
        model=make_model("qwen3_moe", attn_implementation=None),
        args=config(
            tmp_path,
            gradient_accumulation_steps=8,
            router_aux_loss_coef=0.5,
            dataset_kwargs={"skip_prepare_dataset": True},
        ),
        train_dataset=Dataset.from_list(parts),
        processing_class=tokenizer(),
    )
    with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
        for _ in range(2):
            trainer.get_train_dataloader()
    assert caplog.text.count("router's auxiliary loss") == is_split
