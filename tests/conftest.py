# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What all tests share: where the real inputs are, the tokenizers, and when a test is skipped."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

# Both are read when torch and huggingface_hub are first imported, so they come before everything else.
os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # workers (and the processes that they start) don't fight for the cores

import pytest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

REPO_ROOT = Path(__file__).resolve().parent.parent
DATA_VARIABLE = "HF_PREFIX_TREE_DATA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The longest test, of all printed commands, begins first: the other workers have something to do meanwhile.
    items.sort(key=lambda item: item.name != "test_printed_commands_run")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items:
        import torch

        if not torch.cuda.is_available():
            for item in gpu_items:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True, scope="module")
def imports_are_no_garbage() -> None:
    """Accelerate collects garbage before and after each training, which would mostly walk through what is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with the real inputs: `$HF_PREFIX_TREE_DATA`, by default `shared` beside the repository."""
    folder = Path(os.environ.get(DATA_VARIABLE) or REPO_ROOT.parent / "shared")
    if not folder.is_dir():
        pytest.skip(f"no folder {folder} with the real inputs: set {DATA_VARIABLE} to where it is")
    return folder


@pytest.fixture(scope="session")
def shared_data(shared_dir: Path) -> Callable[[str], Path]:
    """`shared_data("data/gsm8k_4policies.jsonl")` is that file's path; skips the test where the file is missing."""

    def find(name: str) -> Path:
        path = shared_dir / name
        if not path.exists():
            pytest.skip(f"no {name} in {shared_dir}, the folder of the real inputs ({DATA_VARIABLE})")
        return path

    return find


@pytest.fixture(scope="session")
def qwen3_tokenizer(shared_data: Callable[[str], Path]) -> PreTrainedTokenizerBase:
    """The real Qwen3 tokenizer with its chat template."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data("tokenizers/qwen3"))


@pytest.fixture(scope="session")
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's tokenizer: 1,024 tokens, trained on its dialogues, with a template that drops earlier reasoning."""
    from examples.demo.dialogues import dialogue_texts, generate_dialogues
    from examples.demo.tokenizer import train_tokenizer

    return train_tokenizer(dialogue_texts(generate_dialogues(num_groups=6, trials=3, seed=0)))
