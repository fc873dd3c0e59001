"""The benchmark of small adapter updates runs on a CPU, and its measures are what they say."""

import pytest
import torch

from benchmarks import adapter_updates
from benchmarks.adapter_updates import Run


def test_settings_against_float32():
    settings = ["float32", "bf16, float32 adapters"]
    rows = adapter_updates.main(["--quick", "--steps", "3", "--only", *settings])
    sums = {(row["setting"], row["delta"]): row["follows"] for row in rows if row["model"] == "sum"}
    assert sums["residual bf16, linear bf16", 1e-5] < 0.01  # below half a unit of the layer's output
    assert sums["residual bf16, linear bf16", 1e-2] == pytest.approx(1, abs=1e-2)
    assert sums["residual float32, linear bf16", 1e-5] < 0.01
    assert sums["residual float32, linear float32", 1e-5] == pytest.approx(1, abs=1e-4)
    runs = [row for row in rows if row["model"] == "quick"]
    assert [(row["side"], row["setting"]) for row in runs] == [(x, y) for x in ("stock", "tree") for y in settings]
    assert all(row["follows"] == pytest.approx(1) and row["gap"] == 0 for row in runs[::2])
    assert runs[0]["loss"] == pytest.approx(runs[2]["loss"], rel=1e-5)  # the same branches
    assert runs[0]["moved"] == pytest.approx(runs[2]["moved"], rel=0.02) and runs[0]["moved"] < 0
    assert runs[1]["lost"] > 0.8 and runs[0]["lost"] < 0.01
    assert all(row["judged"] < row["judged_before"] for row in runs)


def test_a_change_is_compared_with_that_of_float32():
    start = torch.zeros(3, dtype=torch.float64)
    exact = Run([2.0, 1.5], [start + 1, start + torch.tensor([3.0, 1.0, 1.0])], None, [])
    twice = Run([2.0, 1.0], [start + 1, start + torch.tensor([5.0, 4.0, 1.0])], 0.5, [])
    row = adapter_updates.compare(twice, exact)
    assert row["moved"] == -1 and row["follows"] == pytest.approx(2) and row["cosine"] == pytest.approx(0.8)
    assert row["gap"] == 0.25 and row["largest_gap"] == 0.5 and row["lost"] == 0.5
