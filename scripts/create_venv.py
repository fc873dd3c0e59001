# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Create (or update) a virtual environment with pinned packages and this project in editable mode.

The environment variable PROJECT names a wheel to install instead of the working tree.

Usage: python scripts/create_venv.py VENV REQUIREMENTS [REQUIREMENTS ...]

A pin in a later file replaces the pin of the same package in an earlier one. torch goes first and is then held, so
that no other package can replace it: on Linux without an NVIDIA GPU it is the CPU build, elsewhere the pin as it
stands. The environment variable TORCH overrides the pin with another requirement; TORCH=system uses the torch of this
Python.
Standard library only: nothing is installed yet when this runs.
"""

import os
import subprocess
import sys
from pathlib import Path

# Where PyTorch publishes its CPU builds: PyPI has only the CUDA build for x86-64 Linux.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def read_pins(files: list[str]) -> dict[str, str]:
    """Package name -> the requirement line, for every `name==version` line of the files."""
    pins: dict[str, str] = {}
    for file in files:
        for line in Path(file).read_text().splitlines():
            requirement = line.partition("#")[0].strip()
            if requirement:
                pins[requirement.partition("==")[0]] = requirement
    return pins


def has_nvidia_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def torch_candidates(pin: str, override: str) -> list[list[str]]:
    """The pip arguments to try in order until one installs torch; none where torch is there already."""
    if override == "system":
        return []
    if override:
        return [[override]]
    if sys.platform == "linux" and not has_nvidia_gpu():
        return [[f"{pin}+cpu"], [pin, "--index-url", TORCH_CPU_INDEX]]
    return [[pin]]


def main(venv: Path, files: list[str]) -> None:
    pins = read_pins(files)
    override = os.environ.get("TORCH", "")
    candidates = torch_candidates(pins.pop("torch"), override)
    python = str(venv / "bin" / "python")
    pip_install = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]

    if not Path(python).exists():
        print(f"creating {venv} with Python {sys.version.split()[0]}", flush=True)
        system = ["--system-site-packages"] if override == "system" else []
        subprocess.run([sys.executable, "-m", "venv", *system, str(venv)], check=True)

    for number, candidate in enumerate(candidates, start=1):
        print(f"installing {' '.join(candidate)}", flush=True)
        last = number == len(candidates)
        # Only the last candidate's failure is the user's: an earlier one just was not on the configured indexes.
        if subprocess.run([*pip_install, *candidate], capture_output=not last, check=last).returncode == 0:
            break

    code = "from importlib.metadata import version; print(version('torch'))"
    result = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"TORCH={override}: {venv} sees no torch; remove {venv} and run make with a Python that has torch")
    torch_version = result.stdout.strip()
    constraint = venv / "torch-constraint.txt"
    constraint.write_text(f"torch=={torch_version}\n")
    print(f"installing {len(pins)} pinned packages beside torch {torch_version}", flush=True)
    subprocess.run([*pip_install, "-c", str(constraint), *pins.values()], check=True)
    project = os.environ.get("PROJECT", "")
    subprocess.run([*pip_install, "--no-deps", *([project] if project else ["-e", "."])], check=True)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except subprocess.CalledProcessError as error:
        sys.exit(f"set-up failed: {' '.join(error.cmd)}")
