# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The engines over NCCL against one GPU, as tests/trainers/test_engines.py compares them over gloo."""

from __future__ import annotations

import importlib.util
import signal

import pytest
import torch

from tests.support.engine_runs import (
    FSDP2,
    check,
    check_log_probs,
    needs_transformers,
    read,
    train_and_die,
    train_engine,
    train_saving,
    train_watched,
    zero,
)
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import make_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs at least 2 CUDA GPUs"),
]
# The tiny models' heads are too small for FlexAttention.
ON_GPU = {"use_cpu": False, "attn_backend": "sdpa"}
CHECKPOINTING = {"fsdp_config": {**FSDP2["fsdp_config"], "activation_checkpointing": True}}
ENGINES = {
    "ddp": ({}, "MULTI_GPU"),
    "ddp-offloading": ({"activation_offloading": True, "gradient_checkpointing": True}, "MULTI_GPU"),
    "fsdp2": (FSDP2, "FSDP"),
    "fsdp2-checkpointing": ({**FSDP2, **CHECKPOINTING}, "FSDP"),
    "zero2": (zero(2), "DEEPSPEED"),
    "zero3": (zero(3), "DEEPSPEED"),
}


def run(folder, options, ranks, function=train_engine):
    run_ranks(function, folder, {**options, **ON_GPU}, ranks, ranks=ranks, gpus=True, timeout=180)


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory):
    folders = {}

    def get(bf16=False):
        if bf16 not in folders:
            folders[bf16] = tmp_path_factory.mktemp("one")
            run(folders[bf16], {"bf16": bf16}, 1)
        return read(folders[bf16])

    return get


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_engines_equal_one_gpu(tmp_path, one_gpu, engine, ranks):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA GPUs")
    if engine.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    options, name = ENGINES[engine]
    run(tmp_path, options, ranks)
    check(tmp_path, one_gpu(), name, rel=2e-5, apart=5e-5)


def test_fsdp2_in_bf16_casts_no_weight(tmp_path, one_gpu):
    run(tmp_path, {**FSDP2, "bf16": True}, 2, train_watched)
    check(tmp_path, one_gpu(bf16=True), "FSDP", rel=2e-2, apart=0.1)
    check_log_probs(tmp_path)


@needs_transformers("5.24", "older ones split no head whose vocabulary the ranks do not divide")
def test_tensor_parallelism(tmp_path, one_gpu):
    make_model().save_pretrained(tmp_path / "model")
    run(tmp_path, {"tp": str(tmp_path / "model")}, 2)
    check(tmp_path, one_gpu(), "MULTI_GPU", rel=2e-5, apart=5e-5)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_killed_in_a_step(tmp_path, engine):
    options = {**ENGINES[engine][0], **ON_GPU}
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    codes = run_ranks(train_and_die, broken, options, 2, ranks=2, may_die=True, gpus=True, timeout=120)
    assert codes[1] == -signal.SIGKILL, (broken / "error0.txt").read_text()
    assert [path.name for path in broken.glob("checkpoint-*")] == ["checkpoint-2"]
    run_ranks(train_saving, broken, options, 2, True, ranks=2, gpus=True)
    run_ranks(train_saving, whole, options, 2, False, ranks=2, gpus=True)
    expected, got = (torch.load(folder / "weights.pt", map_location="cpu") for folder in (whole, broken))
    for name, value in expected.items():
        assert torch.allclose(got[name], value, rtol=1e-5, atol=1e-6), name
