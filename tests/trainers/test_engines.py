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
from peft import PeftModel

from hf_prefix_tree import TreeSFTTrainer
from hf_prefix_tree.training.checks import check_trainer, earlier_gradients_aside, refuse_engines
from tests.support.engine_runs import (
    FSDP2,
    check,
    check_log_probs,
    make_trainer,
    needs_deepspeed,
    needs_transformers,
    read,
    train_compiled,
    train_engine,
    train_grouped,
    train_plain,
    train_watched,
    try_refused,
    zero,
)
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import config, distance, make_model, make_trees, tokenizer, tree_dataset, weights

EIGHT = pytest.param(8, marks=pytest.mark.slow)


def rows_of_a_step(ranks):
    """At least one for each rank. With 8 of 11 rows, five ranks have nothing to do in every second step."""
    return {"step_rows": 8} if ranks == 8 else {}


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


@pytest.mark.parametrize("ranks", [2, 4, EIGHT])
def test_ddp(tmp_path, one_process, ranks):
    options = rows_of_a_step(ranks)
    run_ranks(train_engine, tmp_path, options, ranks, ranks=ranks)
    check(tmp_path, one_process(**options), "MULTI_CPU")


@pytest.mark.parametrize("ranks", [2, EIGHT])
def test_fsdp2(tmp_path, one_process, ranks):
    options = rows_of_a_step(ranks)
    run_ranks(train_engine, tmp_path, {**FSDP2, **options}, ranks, ranks=ranks)
    check(tmp_path, one_process(**options), "FSDP")


def test_fsdp2_with_checkpointing(tmp_path, one_process):
    options = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "activation_checkpointing": True}}
    run_ranks(train_engine, tmp_path, options, 2, ranks=2)
    check(tmp_path, one_process(), "FSDP")


def test_fsdp2_in_bf16_casts_no_weight(tmp_path, one_process):
    """Its parameters are bfloat16, so losses are close only. Log-probs and their gradients, the weights, are exact."""
    run_ranks(train_watched, tmp_path, {**FSDP2, "bf16": True}, 2, ranks=2)
    check(tmp_path, one_process(bf16=True), "FSDP", rel=2e-2, apart=0.1)
    check_log_probs(tmp_path)


def test_fsdp2_in_bf16_casts_no_loss_of_a_plain_trainer(tmp_path):
    run_ranks(train_plain, tmp_path, {**FSDP2, "bf16": True}, ranks=2)
    dtypes = json.loads((tmp_path / "dtypes.json").read_text())
    assert len(dtypes) == 2 and set(dtypes) <= {"torch.float32", "torch.float64"}


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), [({}, "MULTI_CPU"), (FSDP2, "FSDP")], ids=["ddp", "fsdp2"])
def test_compiled_layers(tmp_path, one_process, engine, name):
    run_ranks(train_compiled, tmp_path, {**engine, "max_steps": 2}, 2, ranks=2)
    check(tmp_path, one_process(max_steps=2), name, num_steps=2)
    assert 1 <= int((tmp_path / "graphs.txt").read_text()) <= 4


@pytest.mark.slow
def test_grouped_under_fsdp2(tmp_path, one_process):
    """Branch by branch the same; and where the trainer holds gradients back, no branch shards them."""
    run_ranks(train_grouped, tmp_path, FSDP2, 2, ranks=2)
    check(tmp_path, one_process(), "FSDP", metrics=())  # they count branches
    seen = json.loads((tmp_path / "sharded0.json").read_text())
    assert len(seen) == 2 * 10
    for is_last, gradients in seen:
        assert (gradients > 0) == is_last


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


def test_engines_are_refused(tmp_path):
    """With the engines themselves, on two ranks."""
    cases = {
        "none": {},
        "context parallelism": {**FSDP2, "parallelism_config": {"cp_size": 2}},
        "FSDP1": {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "version": 1, "sync_module_states": False}},
        "dispatch": {"accelerator_config": {"dispatch_batches": True}},
    }
    run_ranks(try_refused, tmp_path, cases, ranks=2)
    raised = json.loads((tmp_path / "refusals.json").read_text())
    assert raised.keys() == cases.keys() - {"none"}
    assert "drops the mask. Set `cp_size=1`" in raised["context parallelism"]
    assert raised["FSDP1"].startswith("`fsdp_config` asks for FSDP1, which is not tested on trees. Set `version: 2`")
    assert "`dispatch_batches=True`, which concatenates the batches of all ranks" in raised["dispatch"]


@pytest.mark.parametrize(
    ("name", "parallelism", "engine"),
    [("`cp_size=1`.*`sp_size=1`", True, "NO"), ("Megatron-LM", False, "MEGATRON_LM")],
)
def test_engines_that_are_not_installed_are_refused(name, parallelism, engine):
    """Sequence parallelism needs DeepSpeed, Megatron-LM is a package of its own."""
    sequence = types.SimpleNamespace(cp_enabled=False, sp_enabled=parallelism)
    with pytest.raises(ValueError, match=name):
        refuse_engines(types.SimpleNamespace(parallelism_config=sequence, distributed_type=engine))


def small_trainer(folder, model=None, **options):
    return TreeSFTTrainer(
        model=make_model() if model is None else model,
        args=config(folder, **options),
        train_dataset=tree_dataset(make_trees(2)),
        processing_class=tokenizer(),
    )


def test_a_model_on_several_devices_is_refused(tmp_path):
    model = make_model()
    model.hf_device_map = {"": "cpu"}
    small_trainer(tmp_path, model)
    model = make_model()
    model.hf_device_map = {"model": "cpu", "lm_head": "meta"}
    with pytest.raises(ValueError, match="`device_map`"):
        small_trainer(tmp_path, model)


@needs_deepspeed
def test_compiled_layers_are_refused_with_deepspeed(tmp_path):
    run_ranks(try_refused, tmp_path, {"compiled": {**zero(2), "compile_layers": True}, "not": zero(2)}, ranks=2)
    raised = json.loads((tmp_path / "refusals.json").read_text())
    assert (
        raised.keys() == {"compiled"}
        and "`compile_layers=True` cannot be used together with DeepSpeed" in raised["compiled"]
    )


def test_compiled_layers_are_refused_where_deepspeed_is_not_installed(tmp_path):
    trainer = small_trainer(tmp_path)
    trainer.args.compile_layers = True  # from here on: nothing needs to be compiled to be refused
    check_trainer(trainer)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ValueError, match="`compile_layers=True`"):
        check_trainer(trainer)


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


def test_gradients_come_back_after_an_error():
    model = make_model()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(KeyError), earlier_gradients_aside(model):
        assert all(parameter.grad is None for parameter in model.parameters())
        raise KeyError
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
