# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Wrong inputs end with exit code 2 and one sentence on standard error, which names what is wrong."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "wrong_inputs"
CALLS = tomllib.loads((FOLDER / "cases.toml").read_text())["calls"]


def test_there_are_enough_and_every_file_is_used():
    assert len(CALLS) >= 45
    words = {word for _, *arguments in CALLS.values() for word in arguments}
    assert {path.name for path in FOLDER.iterdir()} - words == {"cases.toml"}


@pytest.mark.parametrize("name", CALLS)
def test_wrong_inputs_are_one_sentence(name, run, tokenizer_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(FOLDER)
    message, *arguments = CALLS[name]
    result = run(*(word.format(tokenizer=tokenizer_folder, out=tmp_path) for word in arguments))
    assert result.code == 2 and result.out == ""
    assert message in result.err
    assert result.err.startswith("hf-prefix-tree: ") and result.err.count("\n") == 1 and result.err.endswith("\n")
