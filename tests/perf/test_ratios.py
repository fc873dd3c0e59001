"""What folding must gain on a GPU, as ratios of two runs on the same card."""

import pytest

from benchmarks import attention, mask, step

pytestmark = [pytest.mark.gpu, pytest.mark.perf]
SHAPES = ("caterpillar-8k", "4k+16x512")


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_folded_step_beats_its_branches(mode):
    rows = step.main(["--only", *SHAPES, "--modes", mode, "--seconds", "0.5"])
    folded = [row for row in rows if row["method"] == "folded"]
    assert len(folded) == 2
    for row in folded:
        assert row["speedup"] > 0.8 * row["flop_ratio"], row
        assert row["memory_ratio"] < 1, row
        if mode == "compiled" and row["shape"] == "caterpillar-8k":
            assert row["roof_share"] > 0.4, row


def test_the_block_mask_beats_the_dense_one():
    rows = attention.main(["--only", *SHAPES, "--methods", "flex", "flash", "sdpa"])
    times = {(row["shape"], row["method"]): row["ms"] for row in rows}
    for shape in SHAPES:
        assert times[shape, "flex"] < 0.5 * times[shape, "sdpa"], times
        if (shape, "flash") in times:  # what `auto` takes must be what is faster
            chosen = next(row["auto"] for row in rows if row["shape"] == shape)
            assert times[shape, chosen] <= 1.05 * min(times[shape, "flex"], times[shape, "flash"]), times


def test_heaviest_first_is_not_slower_than_leaf_first():
    rows = attention.main(["--only", "caterpillar-8k", "--methods", "flex", "flex, leaf first"])
    times = {row["method"]: row["ms"] for row in rows}
    assert times["flex"] < 0.95 * times["flex, leaf first"], times


def test_a_million_tokens_take_no_more_than_a_dense_mask_of_32_thousand():
    rows = mask.main(["--only", "tree_block_mask", "dense_mask"])
    found = {(row["method"], row["trees"]): row for row in rows}
    assert found["tree_block_mask", 128]["tokens"] > 1_000_000
    assert found["tree_block_mask", 128]["peak_gib"] < 1
    assert found["tree_block_mask", 128]["ms"] < 50
    assert found["tree_block_mask", 4]["ms"] < found["dense_mask", 4]["ms"]
    assert found["tree_block_mask", 4]["peak_gib"] < 0.1 * found["dense_mask", 4]["peak_gib"]
