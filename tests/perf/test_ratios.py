"""What folding must gain on a GPU, as ratios of two runs on the same card."""

import pytest

from benchmarks import attention, mask, step

pytestmark = [pytest.mark.gpu, pytest.mark.perf]


def test_a_folded_step_beats_its_branches():
    rows = step.main(["--only", "caterpillar-8k", "4k+16x512", "--modes", "eager", "--seconds", "0.5"])
    folded = [row for row in rows if row["method"] == "folded"]
    assert len(folded) == 2
    for row in folded:
        assert row["speedup"] > 0.8 * row["flop_ratio"], row
        assert row["memory_ratio"] < 1, row


def test_the_block_mask_beats_the_dense_one():
    rows = attention.main(["--only", "caterpillar-8k", "4k+16x512", "--methods", "flex", "sdpa"])
    times = {(row["shape"], row["method"]): row["ms"] for row in rows}
    for shape in ("caterpillar-8k", "4k+16x512"):
        assert times[shape, "flex"] < 0.5 * times[shape, "sdpa"], times


def test_a_million_tokens_take_no_more_than_a_dense_mask_of_32_thousand():
    rows = mask.main(["--only", "tree_block_mask", "dense_mask"])
    found = {(row["method"], row["trees"]): row for row in rows}
    assert found["tree_block_mask", 128]["tokens"] > 1_000_000
    assert found["tree_block_mask", 128]["peak_gib"] < 1
    assert found["tree_block_mask", 128]["ms"] < 50
    assert found["tree_block_mask", 4]["ms"] < found["dense_mask", 4]["ms"]
    assert found["tree_block_mask", 4]["peak_gib"] < 0.1 * found["dense_mask", 4]["peak_gib"]
