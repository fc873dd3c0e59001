"""The GRPO benchmark runs end to end on a CPU: both sides take the same step, the tree one from fewer tokens."""

from __future__ import annotations

import csv

import pytest

from benchmarks import grpo


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    output = tmp_path_factory.mktemp("grpo") / "grpo.csv"
    rows = grpo.main(["--quick", "--seconds", "0", "--only", "4k+16x512", "reuse-1.1", "--output", str(output)])
    with output.open() as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(rows) == 4 and written[0].keys() >= {*grpo.COLUMNS} - {"failure", "memory_ratio"}
    return {(row["shape"], row["method"]): row for row in rows}


@pytest.mark.parametrize(
    ("shape", "tree", "stock", "reuse"),
    [("4k+16x512", 64 + 4 * 8, 4 * 72, 3.0), ("reuse-1.1", 4 * 19, 4 * 19, 76 / 67)],  # too little to be folded
)
def test_tokens_and_gradients(rows, shape, tree, stock, reuse):
    assert (rows[shape, "tree"]["tokens"], rows[shape, "stock"]["tokens"]) == (tree, stock)
    assert rows[shape, "tree"]["reuse"] == rows[shape, "stock"]["reuse"] == pytest.approx(reuse)
    assert rows[shape, "tree"]["grad_norm"] == pytest.approx(rows[shape, "stock"]["grad_norm"], rel=1e-5)
    assert rows[shape, "tree"]["grad_norm"] > 0.1
    assert rows[shape, "tree"]["loss"] == pytest.approx(rows[shape, "stock"]["loss"], rel=1e-4)
    assert rows[shape, "tree"]["speedup"] == rows[shape, "stock"]["ms"] / rows[shape, "tree"]["ms"]


def test_micro_batches_of_the_stock_side(rows):
    assert [rows["4k+16x512", method]["forwards"] for method in ("tree", "stock")] == [1, 2]


def test_split_and_streamed_groups_take_the_same_step():
    rows = grpo.main([*["--quick", "--seconds", "0", "--only", "16k+8x4k", "--methods"], *grpo.METHODS])
    counts = {row["method"]: (row["forwards"], row["tokens"]) for row in rows}
    assert counts["tree"] == (1, 64 + 4 * 16) and counts["stock"] == (4, 4 * 80)
    assert counts["split"] == (2, 2 * (64 + 2 * 16))  # the prompt twice
    assert counts["stream"][0] > 2 and 2 * 128 <= counts["stream"][1] < 2 * 128 + 8  # scored and trained in passes
    stock = next(row for row in rows if row["method"] == "stock")
    for row in rows:
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(stock[name], rel=1e-5)


def test_shapes():
    assert grpo.SHAPES["4k+16x512"].reuse == 16 * 4608 / (4096 + 16 * 512)
    assert grpo.SHAPES["reuse-1.1"].reuse == pytest.approx(1.1, abs=0.005)
    for group in (*grpo.SHAPES.values(), *grpo.QUICK.values()):
        assert group.completions % group.batch_size == 0
