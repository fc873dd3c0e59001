"""Rows of every kind, right and wrong, for trees, diffusion and EAGLE-3: the reference's value, or a named error."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given

from hf_prefix_tree import fold
from hf_prefix_tree.data.rows import RowOptions, row_branches
from tests.fuzz.inputs import ROWS, agree, inputs, mutated
from tests.fuzz.reference import as_folded, branches_of, prepared
from tests.support.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()


def options_of(kind, row, **options):
    return RowOptions("completion" if kind == "completions" and "completion" in row else kind, TOKENIZER, **options)


def read_tree(kind, row):
    branches = row_branches(row, options_of(kind, row), Counter())
    return as_folded(fold(branches).to_dict()) if any(branch.weights.any() for branch in branches) else None


@pytest.mark.parametrize("kind", ROWS)
def test_trees(kind):
    @inputs(150)
    @given(mutated(ROWS[kind]))
    def run(row):
        agree(lambda: read_tree(kind, row), lambda: prepared(branches_of(kind, row, TOKENIZER)))

    run()
