# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Samplers that need lengths: evaluation does not depend on them, and training reads every row once."""

from __future__ import annotations

import json
from itertools import islice

import numpy as np
import pytest

from hf_prefix_tree.training.sampling import PADDING_FEATURE, PaddedDataset
from tests.support.ranks import run_ranks
from tests.support.strategy_runs import CASES, groups_of, run_cases, sums_of


def test_a_padded_dataset_ends():
    padded = PaddedDataset(["a", "b", "c"], 2)
    assert list(islice(padded, 9)) == ["a", "b", "c", PADDING_FEATURE] and len(padded) == 4
    with pytest.raises(IndexError):
        padded[4]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_every_row_counts_once(tmp_path, ranks):
    """A learning rate of 0: all evaluations and all steps of an epoch are of one model."""
    if ranks == 1:
        run_cases(tmp_path)
    else:
        run_ranks(run_cases, tmp_path, ranks=ranks)
    found = json.loads((tmp_path / "log.json").read_text())
    sums = [sums_of(groups_of(*each)) for each in ((5, 1), (3, 2), (7, 0))]
    five, three, seven = [(loss_sum.item(), weight_sum) for loss_sum, weight_sum in sums]
    losses = [five[0] / five[1], three[0] / three[1]]
    assert found.keys() == CASES.keys()
    for name, case in found.items():
        assert case["before"] == pytest.approx(losses, rel=2e-6), name
        assert case["after"] == pytest.approx(losses, rel=2e-6), name
        assert case["predicted"] in (None, pytest.approx(losses[0], rel=2e-6)), name
        sums = np.array(case["sums"]).sum(axis=0)
        if name == "dropped":  # some rows, none of them twice
            assert 0 < sums[1] <= seven[1]
        else:
            assert sums == pytest.approx(seven, rel=2e-6), name
            assert len(case["sums"]) == 2 or name == "packed"
    assert found["by length"]["predicted"]
