# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The examples of the docstrings run and print what they say."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import hf_prefix_tree

MODULES = [
    module.name
    for module in pkgutil.walk_packages(hf_prefix_tree.__path__, "hf_prefix_tree.")
    if not module.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    examples = sum(
        len(test.examples) for name in MODULES for test in finder.find(importlib.import_module(name)) if test.examples
    )
    assert examples > 30
