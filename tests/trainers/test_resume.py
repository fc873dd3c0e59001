# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A run that was killed resumes to the weights of an unbroken one, whatever the kill did to its checkpoints."""

from __future__ import annotations

import json
import shutil
import signal
from unittest import mock

import pytest
import torch
from transformers.trainer_jit_checkpoint import CheckpointManager

from hf_prefix_tree.training import step
from tests.support.engine_runs import (
    FSDP2,
    make_trainer,
    needs_deepspeed,
    needs_transformers,
    train_and_die,
    train_saving,
    zero,
)
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with the checkpoints of the steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("run") / "whole"
    train_saving(folder, {}, 1, False)
    return folder


def flipped(content):
    return bytes([*content[:300], content[300] ^ 1, *content[301:]])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("checksums.json", None),  # as a kill inside of the save leaves it
        ("trainer_state.json", None),
        ("trainer_state.json", flipped),
        ("model.safetensors", flipped),
        ("optimizer.pt", lambda content: content[:3000]),
        ("rng_state.pth", flipped),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog, whole, name, damage):
    broken = shutil.copytree(whole, tmp_path / "broken")
    (broken / "checkpoint-new").mkdir()  # no step's
    expected, last = torch.load(broken / "weights.pt"), broken / "checkpoint-6"
    content = (last / name).read_bytes()
    (last / name).unlink()
    if damage is not None:
        (last / name).write_bytes(damage(content))
    if name != "checksums.json":  # else another trainer may have saved it
        with pytest.raises(ValueError, match=f"`resume_from_checkpoint` is damaged: .*{name}"):
            train_saving(broken, {}, 1, str(last))
    train_saving(broken, {}, 1, "True" if damage is None else True)  # a string from a command line
    assert [str(last) in message and name in message for message in caplog.messages].count(True) == 1
    got = torch.load(broken / "weights.pt")
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert len(json.loads((broken / "log.json").read_text())) == len(json.loads((whole / "log.json").read_text()))
    for path in broken.glob("checkpoint-*"):
        (path / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match="`resume_from_checkpoint`"):
        train_saving(broken, {}, 1, True)


@pytest.mark.parametrize("is_changed", [False, True])
def test_the_checkpoint_of_another_trainer_is_taken_by_its_path(tmp_path, whole, is_changed):
    broken = shutil.copytree(whole, tmp_path / "broken")
    if is_changed:  # on purpose, as by a callback
        with (broken / "checkpoint-4" / "config.json").open("a") as file:
            file.write("\n")
        with pytest.raises(ValueError, match=f"delete its '{step.CHECKSUMS}' if you changed"):
            train_saving(broken, {}, 1, str(broken / "checkpoint-4"))
    (broken / "checkpoint-4" / step.CHECKSUMS).unlink()
    train_saving(broken, {}, 1, str(broken / "checkpoint-4"))
    expected, got = (torch.load(folder / "weights.pt") for folder in (whole, broken))
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_a_checkpoint_that_is_no_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"`resume_from_checkpoint` .*nowhere"):
        train_saving(tmp_path, {}, 1, "nowhere")


def test_false_from_a_command_line_starts_anew(tmp_path, whole):
    fresh = tmp_path / "fresh"
    train_saving(fresh, {}, 1, "false")
    expected, got = (torch.load(folder / "weights.pt") for folder in (whole, fresh))
    assert all(torch.equal(got[name], value) for name, value in expected.items())


def test_an_older_checkpoint_is_deleted_only_when_the_new_one_is_whole(tmp_path):
    trainer = make_trainer(tmp_path, {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1})
    with (
        mock.patch.object(step, "write_files", side_effect=[None, KeyboardInterrupt]),
        pytest.raises(KeyboardInterrupt),  # of a kill while step 4 is saved
    ):
        trainer.train()
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-10"]
    assert trainer.args.save_total_limit == 1
    saved = torch.load(tmp_path / "checkpoint-10" / "training_args.bin", weights_only=False)
    assert saved.save_total_limit == 1  # as in a stock checkpoint


def test_a_save_on_sigterm_is_whole(tmp_path):
    """Transformers marks the checkpoint with a file meanwhile."""
    trainer = make_trainer(tmp_path, {"max_steps": 1})
    trainer.train()
    CheckpointManager(trainer).execute_jit_checkpoint()
    trainer.train(resume_from_checkpoint=True)
