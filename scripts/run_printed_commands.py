# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Runs the commands and snippets of `README.md` and `docs/` as printed, without GPU and Hub.

They run in a copy of the repository, which gets an environment of its own on top of the packages of this Python, and
the files that the pages name (`python -m examples.demo.files`). Blocks of a page run in their order:

- `shell`: every command, in the root of the copy, once if several pages print it. One that ends in a comment
  `# needs ...` is counted, not run; the reader sees the same comment.
- `python` without `>>>`: a script of its own. With `>>>`: not run here; `tests/test_guides.py` runs the sessions.
- `diff`: a script of the lines before the change, and one of those after it.

Usage: python scripts/run_printed_commands.py [PAGE ...]    (all pages: some minutes, and a package index for pip)
"""

import os
import re
import shutil
import site
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

REPO_ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(REPO_ROOT)) for path in (REPO_ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^ *```(shell|python|diff)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
NEEDS = re.compile(r"#.*?(needs [^:]+)")
COMMENT = re.compile(r"\s+# .*")
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", "site", "build", "dist", "outputs", "*.egg-info", "__pycache__")
LIMIT = 300  # seconds of a command


class Step(NamedTuple):
    """A command of a page: `text` as printed, `code` to run (`None`: it needs something that is not there)."""

    page: str
    text: str
    code: list[str] | None
    needs: str = ""


def blocks(text: str, language: str) -> list[str]:
    """The code blocks of a page in a language."""
    return [code for name, code in BLOCK.findall(text) if name == language]


def steps_of(page: str, text: str) -> list[Step]:
    """What a page prints, in order, without its session with `>>>`."""
    steps = []
    for language, code in BLOCK.findall(text):
        if language == "shell":
            steps += [_command(page, line) for line in re.sub(r"\\\n\s*", "", code).splitlines()]
        elif language == "diff":
            for dropped, sign in (("+", "-"), ("-", "+")):
                kept = [line[2:] for line in code.splitlines() if not line.startswith(dropped)]
                steps.append(Step(page, f"the {sign} side of the diff", ["python", "-c", "\n".join(kept)]))
        elif ">>>" not in code:
            steps.append(Step(page, code.splitlines()[0] + " ...", ["python", "-c", code], _needs(code)))
    return [step._replace(code=None) if step.needs else step for step in steps if step.text]


def _command(page: str, line: str) -> Step:
    command = line.strip()
    return Step(page, "" if command.startswith("#") else command, ["bash", "-c", command], _needs(command))


def _needs(code: str) -> str:
    match = NEEDS.search(code.splitlines()[0]) if code else None
    return match.group(1) if match else ""


def make_copy(folder: Path) -> dict[str, str]:
    """Copies the repository, makes its environment and files; returns the environment variables of its commands."""
    shutil.copytree(REPO_ROOT, folder, ignore=NOT_COPIED, dirs_exist_ok=True, symlinks=True)
    environment = folder.parent / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    (packages,) = (environment / "lib").glob("python*/site-packages")
    # pip takes these packages as installed, so that it downloads none of them.
    (packages / "packages_of_this_python.pth").write_text("\n".join(site.getsitepackages()))
    variables = {
        **os.environ,
        "PATH": os.pathsep.join([str(environment / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(["python", "-m", "examples.demo.files"], cwd=folder, env=variables, check=True)
    return variables


def run(steps: list[Step]) -> list[str]:
    """Runs the steps in a copy of the repository and prints a line for each; returns the output of those that fail."""
    failures, commands = [], set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "hf_prefix_tree")
        variables = make_copy(folder)
        for step in steps:
            if step.code is None:
                print(f"{step.needs:<24} {step.page}: {step.text}", flush=True)
                continue
            command = COMMENT.sub("", step.code[-1])
            if command in commands:
                print(f"{'as above':<24} {step.page}: {step.text}", flush=True)
                continue
            commands.add(command)
            start = time.monotonic()
            try:
                done = subprocess.run(
                    step.code, cwd=folder, env=variables, capture_output=True, text=True, timeout=LIMIT
                )
                code, output = done.returncode, done.stdout[-1500:] + done.stderr[-2500:]
            except subprocess.TimeoutExpired:
                code, output = 1, f"stopped after {LIMIT} seconds"
            result = f"{'FAILED' if code else 'ran'}, {time.monotonic() - start:.0f} s"
            print(f"{result:<24} {step.page}: {step.text}", flush=True)
            if code:
                failures.append(f"{step.page}: {step.text}\n{output}")
    return failures


def main(pages: list[str]) -> int:
    """Runs the pages, prints the counts, and returns the number of failures."""
    steps = [step for page in pages or PAGES for step in steps_of(page, (REPO_ROOT / page).read_text("utf-8"))]
    failures = run(steps)
    skipped = sum(step.code is None for step in steps)
    for failure in failures:
        print(f"\n{failure}")
    print(f"{len(steps) - skipped - len(failures)} ran as printed, {len(failures)} failed, {skipped} need more.")
    return len(failures)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
