"""Two gloo processes with groups of other sizes: tree training equals stock training there, too."""

from __future__ import annotations

import pytest
import torch

from tests.support.policy_ranks import JOBS, train_all
from tests.support.policy_runs import CountedTokens, Run, assert_same_training
from tests.support.ranks import run_ranks


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ddp")
    run_ranks(train_all, folder)
    return folder


def read(folder, name, kind, rank):
    state = torch.load(folder / f"{name}-{kind}-{rank}.pt")
    tokens = CountedTokens()
    tokens.trained, tokens.forward = state["trained"], state["forward"]
    return Run(state["logs"], state["start"], state["weights"], tokens, None)


@pytest.mark.parametrize("name", JOBS)
def test_two_processes(results, name):
    stock, tree = ([read(results, name, kind, rank) for rank in range(2)] for kind in ("stock", "tree"))
    # logs are the main process's; the ranks end with the same weights
    assert_same_training(tree[0], stock[0], steps=3)
    assert all(torch.equal(value, tree[1].weights[key]) for key, value in tree[0].weights.items())
    calls = [len(run.tokens.trained) for run in tree]
    assert calls[0] == calls[1] < len(stock[0].tokens.trained) == 3 * 4
    assert sum(tree[0].tokens.trained) != sum(tree[1].tokens.trained)
    for rank in range(2):
        assert sum(tree[rank].tokens.trained) < 0.8 * sum(stock[rank].tokens.trained)
        assert sum(tree[rank].tokens.forward) < 0.8 * sum(stock[rank].tokens.forward) or name == "dapo"
