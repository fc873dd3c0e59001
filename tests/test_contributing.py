# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The patches of `docs/contributing/` show what a change costs: each applies, touches at most two source files, and
passes the tests that it brings."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
PATCHES = sorted((REPO_ROOT / "docs" / "contributing").glob("*.patch"))


def run(command: list[str], **kwargs) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def touched(patch: Path) -> list[str]:
    """The files that a patch changes or adds."""
    return [line.split("\t")[2] for line in run(["git", "apply", "--numstat", str(patch)]).splitlines()]


def test_there_is_a_patch():
    assert "add_a_mask_kind" in [patch.stem for patch in PATCHES]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_patch_applies_and_is_small(patch: Path):
    run(["git", "apply", "--check", str(patch)], cwd=REPO_ROOT)
    assert 1 <= len([name for name in touched(patch) if name.startswith("hf_prefix_tree/")]) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_the_tests_of_a_patch_pass_with_it_only(patch: Path, tmp_path: Path):
    tests = [name for name in touched(patch) if Path(name).name.startswith("test_")]
    assert tests
    for name in run(["git", "ls-files"], cwd=REPO_ROOT).splitlines():
        if not name.endswith((".ipynb", ".png")) and (REPO_ROOT / name).exists():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO_ROOT / name, tmp_path / name)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    run(["git", "apply", str(patch)], cwd=tmp_path)
    run(command, cwd=tmp_path, env=environment)
    run(["git", "apply", "--reverse", "--exclude=tests/*", str(patch)], cwd=tmp_path)
    without = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
    assert without.returncode in (1, 2), "the tests pass without the change"  # failed, or not collected
