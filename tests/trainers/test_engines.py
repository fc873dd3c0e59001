# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Every engine against one process: the same loss, gradient norms, evaluation and weights after 10 steps.

The rows have one to three trees of different sizes and weights, some supervise nothing, and the last step of an epoch
is not full.
"""

from __future__ import annotations

import json
import types

import pytest
import torch
from engine_worker import FSDP2, make_trainer, needs_deepspeed, needs_transformers, train_engine, zero
from peft import PeftModel
from processes import run_ranks
from runs import config, distance, make_model, make_trees, tokenizer, tree_dataset, weights

from hf_prefix_tree import TreeSFTTrainer

SAME = ("loss", "loss/sum", "loss/token_count", "grad_norm", "tree/branches", "tree/tokens", "tree/pair_ratio")


def read(folder):
    return torch.load(folder / "weights.pt", map_location="cpu"), json.loads((folder / "log.json").read_text())


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    made = {}

    def run(**options):
        key = json.dumps(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("one")
            train_engine(str(folder), options)
            made[key] = read(folder)
        return made[key]

    return run


def check(folder, expected, engine, rel=1e-5, apart=1e-5, start=None):
    got, log = read(folder)
    assert (folder / "engine.txt").read_text() == engine
    start = weights(make_model()) if start is None else start
    assert distance(expected[0], start) > 1e-2
    assert distance(got, expected[0], start) < apart
    steps = 0
    for own, other in zip(log, expected[1], strict=True):
        for key in (name for name in SAME if name in own):
            exact = key not in ("loss", "loss/sum", "grad_norm")
            assert own[key] == pytest.approx(other[key], rel=1e-12 if exact else rel), key
            steps += key == "loss"
        if "eval_loss" in own:
            assert own["eval_loss"] == pytest.approx(other["eval_loss"], rel=rel)
    assert steps == 10


@pytest.mark.parametrize("ranks", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_ddp(tmp_path, one_process, ranks):
    options = {"step_rows": 8} if ranks == 8 else {}
    run_ranks(train_engine, tmp_path, options, ranks, ranks=ranks)
    check(tmp_path, one_process(**options), "MULTI_CPU")


def test_fsdp2(tmp_path, one_process):
    run_ranks(train_engine, tmp_path, FSDP2, 2, ranks=2)
    check(tmp_path, one_process(), "FSDP")


def test_fsdp2_with_checkpointing(tmp_path, one_process):
    options = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "activation_checkpointing": True}}
    run_ranks(train_engine, tmp_path, options, 2, ranks=2)
    check(tmp_path, one_process(), "FSDP")


def test_fsdp2_in_bf16_casts_no_weight(tmp_path, one_process):
    """Its parameters are bfloat16, so losses are close only; sums of weights are the same to the last digits."""
    run_ranks(train_engine, tmp_path, {**FSDP2, "bf16": True}, 2, ranks=2)
    check(tmp_path, one_process(bf16=True), "FSDP", rel=2e-2, apart=0.1)


@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
def test_zero(tmp_path, one_process, stage):
    run_ranks(train_engine, tmp_path, zero(stage), 2, ranks=2)
    check(tmp_path, one_process(), "DEEPSPEED")


@needs_transformers("5.24", "older ones split no head whose vocabulary the ranks do not divide")
def test_tensor_parallelism(tmp_path, one_process):
    make_model().save_pretrained(tmp_path / "model")
    run_ranks(train_engine, tmp_path, {"tp": str(tmp_path / "model")}, 2, ranks=2)
    check(tmp_path, one_process(), "MULTI_CPU")


@pytest.mark.parametrize(
    "engine", [{}, FSDP2, pytest.param(zero(3), marks=needs_deepspeed)], ids=["ddp", "fsdp2", "zero3"]
)
def test_adapters_are_saved_ready_to_merge(tmp_path, one_process, engine):
    run_ranks(train_engine, tmp_path, {**engine, "lora": True}, 2, ranks=2)
    expected, _ = one_process(lora=True)
    adapter = PeftModel.from_pretrained(make_model(), tmp_path / "saved")
    loaded = {name: value for name, value in weights(adapter).items() if "lora_" in name}
    assert len(loaded) == 2 * 3 * 2
    trained = {name: value for name, value in expected.items() if "lora_" in name}
    zeros = {name: torch.zeros_like(value) for name, value in trained.items() if "lora_B" in name}
    assert min(value.norm() for name, value in trained.items() if "lora_B" in name) > 1e-3
    assert distance({name: loaded[name] for name in zeros}, {name: trained[name] for name in zeros}, zeros) < 1e-4
    merged = adapter.merge_and_unload()
    assert distance(weights(merged), weights(make_model())) > 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(tmp_path, one_process, reentrant):
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    trainer = make_trainer(tmp_path, options)
    trainer.train()
    expected, _ = one_process()
    for name, value in weights(trainer.model).items():
        assert torch.equal(value, expected[name]), name


# ---- refused ----


def refused(folder, **accelerator):
    trainer = TreeSFTTrainer(
        model=make_model(),
        args=config(folder),
        train_dataset=tree_dataset(make_trees(2)),
        processing_class=tokenizer(),
    )
    trainer.accelerator = types.SimpleNamespace(
        **{"parallelism_config": None, "distributed_type": trainer.accelerator.distributed_type, **accelerator}
    )
    trainer._refuse_engines()


@pytest.mark.parametrize(
    ("name", "accelerator"),
    [
        ("drops the mask. Set `cp_size=1`", {"parallelism_config": (True, False)}),
        ("drops the mask. Set `cp_size=1`", {"parallelism_config": (False, True)}),
        ("Megatron-LM", {"distributed_type": "MEGATRON_LM"}),
    ],
)
def test_engines_that_drop_the_mask_are_refused(tmp_path, name, accelerator):
    if "parallelism_config" in accelerator:
        cp, sp = accelerator["parallelism_config"]
        accelerator = {"parallelism_config": types.SimpleNamespace(cp_enabled=cp, sp_enabled=sp)}
    refused(tmp_path)
    with pytest.raises(ValueError, match=name):
        refused(tmp_path, **accelerator)


def test_data_parallel_is_refused(tmp_path):
    args = config(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ValueError, match=r"DataParallel"):
        TreeSFTTrainer(
            model=make_model(),
            args=args,
            train_dataset=tree_dataset(make_trees(2)),
            processing_class=tokenizer(),
        )
