# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""`overflow="stream"` takes the steps of whole trees: under every engine, checkpointing and adapters, and resumed.

Whole trees in one process are the reference, see `test_engines.py`.
"""

from __future__ import annotations

import json
import signal

import pytest
import torch

from hf_prefix_tree.modeling import streaming
from tests.support.engine_runs import (
    FSDP2,
    check,
    make_trainer,
    needs_transformers,
    read,
    train_and_die,
    train_compiled,
    train_engine,
    train_saving,
)
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import distance, make_model, weights

STREAM = {"overflow": "stream", "max_packed_tokens": 16}
FSDP2_CHECKPOINTED = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "activation_checkpointing": True}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights and logs of whole trees in one process."""
    made = {}

    def run(**options):
        key = json.dumps(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("whole")
            train_engine(str(folder), dict(options))
            made[key] = read(folder)
        return made[key]

    return run


@pytest.mark.parametrize("accumulated", [4, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["plain", "checkpoint", "reentrant"],
)
def test_one_process(tmp_path, whole, options, accumulated):
    trainer = make_trainer(tmp_path, {**STREAM, **options, "step_rows": accumulated})
    trainer.train()
    expected, log = whole(step_rows=accumulated)
    start = weights(make_model())
    assert distance(expected, start) > 1e-2 and distance(weights(trainer.model), expected, start) < 1e-5
    for ours, theirs in zip(trainer.state.log_history, log, strict=True):
        for key in {"loss", "loss/sum", "loss/token_count", "grad_norm", "eval_loss", "num_tokens"} & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key


@pytest.mark.parametrize(
    ("engine", "name"),
    [({}, "MULTI_CPU"), (FSDP2, "FSDP"), pytest.param(FSDP2_CHECKPOINTED, "FSDP", marks=pytest.mark.slow)],
    ids=["ddp", "fsdp2", "fsdp2_checkpointed"],
)
def test_two_ranks(tmp_path, whole, engine, name):
    """Ranks with rows of other sizes, and so other sections, some without weight or empty."""
    run_ranks(train_engine, tmp_path, {**engine, **STREAM}, 2, ranks=2)
    check(tmp_path, whole(), name)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpoint"])
def test_lora(tmp_path, whole, options):
    trainer = make_trainer(tmp_path, {**STREAM, **options, "lora": True})
    trainer.train()
    expected, _ = whole(lora=True)
    got = {name: value for name, value in weights(trainer.model).items() if "lora_" in name}
    expected = {name: value for name, value in expected.items() if "lora_" in name}
    start = {name: value * ("lora_A" in name) for name, value in got.items()}
    assert min(value.norm() for name, value in expected.items() if "lora_B" in name) > 1e-3
    of_b = [{name: value for name, value in run.items() if "lora_B" in name} for run in (got, expected, start)]
    assert distance(*of_b) < 1e-5


@pytest.mark.slow
def test_compiled_layers(tmp_path, whole):
    train_compiled(tmp_path, {"max_steps": 2, **STREAM}, 1)
    check(tmp_path, whole(max_steps=2), "NO", num_steps=2)


def test_lost_gradients_are_noticed(tmp_path, whole, monkeypatch):
    """Negative control: without what later sections hand over, other weights are trained."""
    handed_over = streaming._Layer.handed_over

    def forget(layer, index, grad, section):
        layer.filled[index] = min(layer.filled[index], section.start)
        return handed_over(layer, index, grad, section)

    monkeypatch.setattr(streaming._Layer, "handed_over", forget)
    trainer = make_trainer(tmp_path, dict(STREAM))
    trainer.train()
    assert distance(weights(trainer.model), whole()[0], weights(make_model())) > 1e-2


@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=needs_transformers("5.24", "older ones load no optimizer state of a CPU rank"))]
)
def test_killed_and_resumed(tmp_path, ranks):
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    if ranks == 1:
        train_saving(unbroken, dict(STREAM), 1, False)
        train_saving(broken, {**STREAM, "num_train_epochs": 1}, 1, False)  # its last checkpoint is removed below
        expected = torch.load(unbroken / "weights.pt")
        for name in ("checkpoint-6", "checkpoint-4"):
            for file in (broken / name).glob("*"):
                file.unlink()
            (broken / name).rmdir()
        train_saving(broken, dict(STREAM), 1, True)
    else:
        codes = run_ranks(train_and_die, broken, STREAM, 2, ranks=2, may_die=True)
        assert codes[1] == -signal.SIGKILL and codes[0] != 0
        run_ranks(train_saving, broken, STREAM, 2, True, ranks=2)
        run_ranks(train_saving, unbroken, STREAM, 2, False, ranks=2)
        expected = torch.load(unbroken / "weights.pt")
    got = torch.load(broken / "weights.pt")
    for name, value in expected.items():
        assert torch.equal(got[name], value), name
