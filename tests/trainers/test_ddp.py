"""Two gloo processes against one: the same gradients, metrics and evaluation, also where the data does not divide."""

import json

import numpy as np
import pytest
import torch

from tests.support.ddp_runs import predict, train_and_evaluate
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import distance, make_model, weights


def run(folder, processes, *args):
    if processes == 1:
        folder.mkdir()
        train_and_evaluate(folder, *args)
    else:
        run_ranks(train_and_evaluate, folder, *args, ranks=processes)
    return torch.load(folder / "weights.pt"), json.loads((folder / "log.json").read_text())


@pytest.mark.parametrize(("num_trees", "stream"), [(8, False), (7, False), (7, True)])
def test_two_processes_equal_one(tmp_path, num_trees, stream):
    steps = 2
    # 7 trees: the second step holds 3 trees; the two processes fill it up with an empty row, not with a repeated one
    one, log_one = run(tmp_path / "one", 1, num_trees, 4, 1, steps, False)
    two, log_two = run(tmp_path / "two", 2, num_trees, 2, 1, steps, stream)
    start = weights(make_model())
    assert distance(one, start) > 1e-3
    assert distance(two, one, start) < 1e-5
    keys = (
        "loss",
        "loss/sum",
        "loss/token_count",
        "tree/branches",
        "tree/tokens",
        "tree/token_ratio",
        "tree/pair_ratio",
    )
    for entry_one, entry_two in zip(log_one[:steps], log_two[:steps], strict=True):
        for key in keys:
            assert entry_two[key] == pytest.approx(entry_one[key], rel=2e-6), key
    evaluations = [[e["eval_loss"] for e in log if "eval_loss" in e] for log in (log_one, log_two)]
    assert evaluations[1] == pytest.approx(evaluations[0], rel=2e-6) and len(evaluations[0]) == 1


def test_two_processes_predict_all_branches_in_order(tmp_path):
    (tmp_path / "one").mkdir()
    predict(tmp_path / "one", 3)
    run_ranks(predict, tmp_path / "two", 3)
    one, two = (torch.load(tmp_path / name / "predictions.pt", weights_only=False) for name in ("one", "two"))
    assert len(one[1]) == 6  # 1, 2 and 3 branches
    np.testing.assert_array_equal(two[1], one[1])
    np.testing.assert_allclose(two[0], one[0], rtol=1e-5, atol=1e-5)
