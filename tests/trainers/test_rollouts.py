"""Rollouts of several rows: the loss and all gradients equal the definition; one row per rollout equals stock TRL."""

from __future__ import annotations

import pytest

from tests.support.rollout_runs import compare


@pytest.mark.parametrize("seed", range(8))
def test_steps_equal_the_definition(tmp_path, seed):
    """A seed per loss type."""
    assert max(compare(tmp_path, seed)) < 1e-10
