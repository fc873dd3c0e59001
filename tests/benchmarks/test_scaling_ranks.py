# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The published comparison on two ranks that `torchrun` starts: what is written, and that no launch hangs."""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each launch imports everything in three processes

REPO_ROOT = Path(__file__).resolve().parents[2]
# What `accelerate launch --config_file examples/accelerate/fsdp2.yaml` sets, which starts one process on a CPU.
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
}


def launch(event, folder, *options, **variables):
    """The exit code, the output and the rows of the CSV file; fails where the launch takes more than 100 s."""
    output = folder / "scaling.csv"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "tests.support.scaling_rank", event, str(folder)]
    launcher = subprocess.Popen(
        [*command, "--quick", "--steps", "3", "--output", str(output), *options],
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join([str(REPO_ROOT), *filter(None, sys.path)]),
            "ACCELERATE_MIXED_PRECISION": "bf16",  # as in all configs of examples/accelerate
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        printed, _ = launcher.communicate(timeout=100)
    finally:
        launcher.terminate()  # it ends its ranks
        launcher.wait()
    with output.open() as file:
        return launcher.returncode, printed, list(csv.DictReader(file))


@pytest.fixture(scope="module")
def late(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaling")
    code, printed, rows = launch("late", folder, "--only", "tree", "per_branch", "--coverage", "equal")
    assert code == 0, printed
    return folder, rows


def test_two_ranks(late):
    folder, rows = late
    assert [(row["mode"], row["gpus"], row["engine"]) for row in rows] == [
        ("tree", "2", "MULTI_CPU"), ("per_branch", "2", "MULTI_CPU"),
    ]  # fmt: skip
    tree, per_branch = rows
    assert (tree["rows_per_step"], per_branch["rows_per_step"]) == ("4", "16")
    assert all(float(row["high"]) > 1000 > float(row["low"]) for row in rows)  # rank 1 was late in one step of two
    log = [entry["tree/imbalance"] for entry in json.loads((folder / "late_tree.json").read_text())[:3]]
    assert float(tree["imbalance"]) == pytest.approx(statistics.mean(log[1:]), rel=1e-6) and log[1] != log[2]
    assert not json.loads((folder / "late_tree_accumulation.json").read_text()).get("sync_each_batch")


def test_a_rank_that_runs_out_of_memory_ends_the_launch(late):
    folder, before = late
    options = ["--append", "--only", "grouped", "per_branch", "flat_steps"]
    code, printed, rows = launch("out_of_memory", folder, *options)
    assert code != 0 and "rank 1: out of memory in per_branch, published" in printed
    assert rows[:2] == [{**row, "failure": ""} for row in before]
    got = [(row["mode"], row["failure"], row["ms"] != "") for row in rows[2:]]
    assert got == [("grouped", "", True), ("per_branch", "out of memory", False)]
    assert float(rows[2]["loss"]) == pytest.approx(float(before[0]["loss"]), rel=1e-5)
    assert rows[3]["rows_per_step"] == "16"


def test_fsdp2_trains_as_ddp(late, tmp_path):
    code, printed, (row,) = launch("fsdp2", tmp_path, "--only", "tree", **FSDP2)
    assert code == 0, printed
    assert (row["engine"], row["mixed_precision"], row["weights"]) == ("FSDP", "no", "float32")
    assert float(row["loss"]) == pytest.approx(float(late[1][0]["loss"]), rel=1e-5)
    assert json.loads((tmp_path / "fsdp2_tree_accumulation.json").read_text())["sync_each_batch"] is True
