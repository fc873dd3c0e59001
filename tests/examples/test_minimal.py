"""The minimal example trains, and its tree has the loss of its branches at every step."""

import minimal
import pytest


def test_the_tree_has_the_loss_of_its_branches_and_learns_are_equal_and_fall():
    losses = minimal.main()
    for tree, branches in losses:
        assert tree == pytest.approx(branches, rel=2e-6)
    assert losses[-1][0] < losses[0][0] - 0.5
