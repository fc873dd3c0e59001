# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What may import what: `import hf_prefix_tree` stays light, and modules import only from rooms before their own."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "hf_prefix_tree"

# In order: a module imports from its own room and from rooms before it. "__init__" stands for the package's top level,
# whose own imports are free (what it must not load is measured below). All may read its `__version__`.
ROOMS = (
    "__version__",
    "tree",
    "data",
    "modeling",
    "training",
    "sft",
    "rl",
    "diffusion",
    "eagle3",
    "report",
    "__init__",
    "nemo",
    "cli",
)
WITHOUT_TORCH = ("__version__", "tree")
WITH_TRL = ("training", "sft", "rl", "diffusion", "eagle3", "report", "nemo", "cli")
NOT_LOADED = ("datasets", "trl", "torch")  # torch, as `import transformers` does not load it either


def loaded_modules(statement: str, **variables: str) -> list[str]:
    """Which of `NOT_LOADED` a fresh interpreter has loaded after the statement, under these environment variables."""
    code = f"{statement}\nimport sys\nprint(*[name for name in {NOT_LOADED} if name in sys.modules])"
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_import_loads_no_trl_no_datasets_and_no_torch():
    assert loaded_modules(f"import {PACKAGE}") == []


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "import transformers.modeling_utils\n"], ids=["before", "after"])
def test_import_registers_with_transformers(before: str):
    """Whichever is loaded first; our functions are loaded at their first call."""
    code = f"""{before}import {PACKAGE}, sys
from transformers import AutoModelForCausalLM, LlamaConfig
import torch
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
model = AutoModelForCausalLM.from_config(config, attn_implementation="prefix_tree")
assert "{PACKAGE}.modeling.attention.interface" not in sys.modules
logits = model(torch.tensor([[1, 2, 3]])).logits
assert "{PACKAGE}.modeling.attention.interface" in sys.modules
model.set_attn_implementation("sdpa")
assert torch.equal(model(torch.tensor([[1, 2, 3]])).logits, logits)"""
    loaded_modules(code)


@pytest.mark.parametrize("name", NOT_LOADED)
def test_the_check_above_can_fail(name: str, tmp_path: Path):
    (tmp_path / f"{name}.py").touch()  # stands in for the package, which takes seconds to import
    assert loaded_modules(f"import {name}", PYTHONPATH=str(tmp_path)) == [name]


def imported_names(module: str, is_package: bool, source: str) -> Iterator[tuple[int, str]]:
    """Line number and full dotted name of everything that the source imports, at any level of nesting."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            # One dot is the module's own package, each further dot one package up.
            up = node.level - is_package
            base = module.split(".")[: -up or None] if node.level else []
            prefix = [*base, *([node.module] if node.module else [])]
            for alias in node.names:
                yield node.lineno, ".".join([*prefix, alias.name])


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """One line for every import of the module that breaks the order of the rooms or the bans on torch and TRL."""
    parts = module.split(".")
    if parts == [PACKAGE]:
        return []
    room = parts[1]
    if room not in ROOMS:
        return [f"{module}: no room is named {room!r}; add it to ROOMS"]
    found = []
    for line, name in imported_names(module, is_package, source):
        head, *rest = name.split(".")
        if head == "torch" and room in WITHOUT_TORCH:
            found.append(f"{module}:{line}: {room} imports torch")
        if head == "trl" and room not in WITH_TRL:
            found.append(f"{module}:{line}: {room} imports trl")
        if head == PACKAGE:
            target = rest[0] if rest and rest[0] in ROOMS else "__init__"
            if ROOMS.index(target) > ROOMS.index(room):
                found.append(f"{module}:{line}: {room} imports from {target}, a later room")
    return found


def test_modules_import_only_from_earlier_rooms():
    found = []
    folder = Path(importlib.util.find_spec(PACKAGE).origin).parent  # the working tree, or an installed wheel
    files = sorted(folder.rglob("*.py"))
    for file in files:
        parts = file.relative_to(folder.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        module = ".".join(parts[:-1] if is_package else parts)
        found += violations(module, file.read_text(), is_package)
    assert len(files) > 5
    assert found == []


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("tree.layout", "import torch", "tree imports torch"),
        ("tree.folding", "def f():\n    from torch.nn import Linear", "tree imports torch"),
        ("modeling.batch", "import trl", "modeling imports trl"),
        ("modeling.prepare", "from trl.trainer import SFTTrainer", "modeling imports trl"),
        ("tree.layout", "from ..data import rows", "tree imports from data"),
        ("tree.layout", "from .. import data", "tree imports from data"),
        ("data.rows", "import hf_prefix_tree.modeling.prepare", "data imports from modeling"),
        ("training.sampling", "def f():\n    from hf_prefix_tree.sft.collator import X", "training imports from sft"),
        ("rl.policy", "from ..eagle3.trainer import X", "rl imports from eagle3"),
        ("modeling.batch", "from hf_prefix_tree import fold_all", "modeling imports from __init__"),
        ("nowhere", "", "no room is named 'nowhere'"),
    ],
)
def test_a_wrong_import_is_reported(module: str, source: str, expected: str):
    found = violations(f"{PACKAGE}.{module}", source)
    assert len(found) == 1 and expected in found[0]


def test_right_imports_are_not_reported():
    source = "import datasets, torch, trl\nfrom ..tree import folding\nfrom . import config\nfrom .config import X"
    assert violations(f"{PACKAGE}.sft", source, is_package=True) == []
    assert violations(f"{PACKAGE}.rl.policy", source) == []
    assert violations(f"{PACKAGE}.cli", f"from {PACKAGE} import TreeSFTTrainer") == []
    assert violations(PACKAGE, "from .modeling.prepare import prepare_model", is_package=True) == []
