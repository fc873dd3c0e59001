# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A run that is killed in the middle of a step resumes to the weights of an unbroken one."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
import torch

from hf_prefix_tree.training.step import last_checkpoint
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


@pytest.mark.parametrize(
    ("name", "size"),
    [("trainer_state.json", None), ("trainer_state.json", 100), ("model.safetensors", 3000), ("optimizer.pt", 3000)],
)
def test_a_checkpoint_that_was_not_saved_whole_is_passed_over(tmp_path, caplog, name, size):
    train_saving(tmp_path / "whole", {}, 1, False)
    expected = torch.load(tmp_path / "whole" / "weights.pt")
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "whole", broken)
    *earlier, last = sorted(broken.glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert last_checkpoint(str(broken)) == str(last)
    (broken / "checkpoint-new").mkdir()  # no step's
    file = last / name
    file.write_bytes(file.read_bytes()[:size]) if size else file.unlink()
    assert last_checkpoint(str(broken)) == str(earlier[-1])
    assert str(last) in caplog.text and len(caplog.messages) == 1
    if size is None:  # as a kill inside of the save leaves it
        for resume in (True, "True"):  # the second one from a command line
            shutil.rmtree(last, ignore_errors=True)
            last.mkdir()
            train_saving(broken, {}, 1, resume)
            got = torch.load(broken / "weights.pt")
            assert all(torch.equal(got[name], value) for name, value in expected.items())
            assert json.loads((broken / "log.json").read_text())  # of the whole run
        for path in broken.glob("checkpoint-*"):
            (path / name).unlink(missing_ok=True)
        with pytest.raises(ValueError, match="`resume_from_checkpoint`"):
            train_saving(broken, {}, 1, True)
