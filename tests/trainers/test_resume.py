# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A run that is killed in the middle of a step resumes to the weights of an unbroken one."""

from __future__ import annotations

import json
import signal

import pytest
import torch

from tests.support.engine_runs import FSDP2, needs_deepspeed, needs_transformers, train_and_die, train_saving, zero
from tests.support.ranks import run_ranks


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param({}, marks=needs_transformers("5.24", "older ones load no optimizer state of a CPU rank")),
        pytest.param(FSDP2, marks=pytest.mark.slow),
        pytest.param(zero(3), marks=[needs_deepspeed, pytest.mark.slow]),
    ],
    ids=["ddp", "fsdp2", "zero3"],
)
def test_killed_in_a_step(tmp_path, engine):
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    codes = run_ranks(train_and_die, broken, engine, 2, ranks=2, may_die=True)
    assert codes[1] == -signal.SIGKILL and codes[0] != 0, (broken / "error0.txt").read_text()
    assert [path.name for path in broken.glob("checkpoint-*")] == ["checkpoint-2"]
    assert not (broken / "weights.pt").exists()
    run_ranks(train_saving, broken, engine, 2, True, ranks=2)
    run_ranks(train_saving, whole, engine, 2, False, ranks=2)
    expected, got = (torch.load(folder / "weights.pt") for folder in (whole, broken))
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
    logs = [json.loads((folder / "log.json").read_text()) for folder in (whole, broken)]
    counts = [[entry["loss/token_count"] for entry in log if "loss" in entry] for log in logs]
    assert counts[0] == counts[1] and len(set(counts[0])) > 3
