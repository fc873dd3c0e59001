# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Breaks the package on purpose, one line at a time, and checks that a test notices each time.

`mutations.toml` lists the mutations. Each is applied in a temporary copy of the repository, where the tests that it
names must then fail. A mutation that survives, whose text is not found exactly once, or whose tests don't run or don't
pass without it, is a failure (exit code 1).

    python scripts/mutations.py                    # all
    python scripts/mutations.py --only mask_bound window_bound
    python scripts/mutations.py --list

Takes about two minutes of one core.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}

import argparse
import importlib
import multiprocessing
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = "hf_prefix_tree"
LIST = Path(__file__).with_name("mutations.toml")
# Folders and files of the repository that no test reads.
NOT_COPIED = (".git", ".venv*", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
LIBRARIES = ("torch", "transformers", "datasets", "peft", "trl.trainer.sft_trainer", "hypothesis")
ALL_PASSED, SOME_FAILED = 0, 1  # exit codes of pytest; others say that the tests did not run


@dataclass(frozen=True)
class Mutation:
    """One entry of the list: `old` becomes `new` in `file`, and one of `tests` must fail."""

    name: str
    file: str  # relative to the package
    old: str  # is in the file exactly once
    new: str
    tests: list[str]  # files or node ids, below `tests/`


def read(path: Path) -> list[Mutation]:
    mutations = [Mutation(**entry) for entry in tomllib.loads(path.read_text())["mutation"]]
    names = [mutation.name for mutation in mutations]
    if len(set(names)) < len(names):
        raise SystemExit(f"{path.name}: names must be different: {sorted(n for n in names if names.count(n) > 1)}")
    return mutations


def run(copy: Path, tests: list[str], timeout: float) -> tuple[int | None, str]:
    """
    The exit code of pytest in the copy, `None` where time is up, and what it printed.

    In a fork of this process, which has imported the libraries (but nothing of the package) once for all mutations.
    """
    with tempfile.NamedTemporaryFile("r") as output:
        process = multiprocessing.get_context("fork").Process(target=_pytest, args=(copy, tests, output.name))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)  # with what the tests have started
            process.join()
            return None, ""
        return process.exitcode, output.read()


def _pytest(copy: Path, tests: list[str], output: str) -> None:
    os.setsid()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(copy)
    sys.path.insert(0, str(copy))
    os.environ["PYTHONPATH"] = str(copy)  # for the processes that tests start
    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{test}" for test in tests)]))


def check(copy: Path, mutation: Mutation, timeout: float) -> tuple[str, str]:
    """What became of a mutation, and the test that failed or why there is none."""
    file = copy / PACKAGE / mutation.file
    text = file.read_text() if file.is_file() else ""
    if text.count(mutation.old) != 1:
        return "text not found", f"{text.count(mutation.old)} times in {mutation.file}"
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        code, output = run(copy, mutation.tests, timeout)
    finally:
        file.write_text(text)
    if code == SOME_FAILED:
        return "killed", ", ".join(re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", output, flags=re.MULTILINE))
    if code == ALL_PASSED:
        return "survived", ", ".join(mutation.tests)
    return "did not run", "time is up" if code is None else output.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="mutations to apply")
    parser.add_argument("--list", action="store_true", help="print the names and apply nothing")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds that the tests of one may take")
    args = parser.parse_args()
    mutations = read(LIST)
    if args.only:
        unknown = set(args.only) - {mutation.name for mutation in mutations}
        if unknown:
            raise SystemExit(f"no such mutation: {', '.join(sorted(unknown))}; --list prints all names")
        mutations = [mutation for mutation in mutations if mutation.name in args.only]
    if args.list:
        for mutation in mutations:
            print(f"{mutation.name:28} {mutation.file:32} {' '.join(mutation.tests)}")
        return 0
    for library in LIBRARIES:
        importlib.import_module(library)
    start, failures = time.perf_counter(), 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, REPOSITORY.name)
        shutil.copytree(REPOSITORY, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        tests = sorted({test for mutation in mutations for test in mutation.tests})
        code, output = run(copy, tests, args.timeout * 2)
        if code != ALL_PASSED:
            print(output[-4000:], "The tests must pass before anything is broken.", sep="\n")
            return 1
        for mutation in mutations:
            begun = time.perf_counter()
            result, detail = check(copy, mutation, args.timeout)
            failures += result != "killed"
            print(f"{result:14} {mutation.name:28} {time.perf_counter() - begun:5.1f} s  {detail}", flush=True)
    print(f"{len(mutations) - failures} of {len(mutations)} killed, {time.perf_counter() - start:.0f} s.")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
