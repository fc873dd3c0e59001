"""The command in this process: its exit code and what it printed."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import cli


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*arguments)`: `hf-prefix-tree` with them; has `code`, `out`, `err`."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hf-prefix-tree", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return SimpleNamespace(code=exit_info.value.code or 0, out=captured.out, err=captured.err)

    return call


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """A small tokenizer with a chat template that strips reasoning."""
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["What is 2 + 3? It is 5."], vocab_size=300).save_pretrained(folder)
    return folder
