"""
Set-ups drawn at random, trained for an epoch or two and compared with the definition: what every optimizer step holds,
its loss, evaluations in between, and the weights at the end. A failure names its draw; to run it again:
`python -m pytest "tests/trainers/test_setups.py::test_setup[17]"`, and for ranks with `SEEDS` cut down to it.
"""

import json
from collections import Counter
from dataclasses import asdict

import pytest

from tests.support.ranks import run_ranks
from tests.support.setup_draws import draw_setup
from tests.support.setup_ranks import check_setups
from tests.support.setup_runs import check_setup

SEEDS = {"one": range(276), "ddp": range(16), "fsdp2": range(8)}
QUICK = (5, 16, 33, 34, 37, 39, 43)  # every trainer, adapters, resumption, split trees, caps


@pytest.mark.parametrize("seed", QUICK)
def test_quick(tmp_path, seed):
    check_setup(draw_setup(seed), str(tmp_path))


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS["one"])
def test_setup(tmp_path, seed):
    check_setup(draw_setup(seed), str(tmp_path))


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_ranks(tmp_path, engine):
    run_ranks(check_setups, tmp_path, engine, list(SEEDS[engine]), ranks=2, timeout=900)
    for rank in range(2):
        failed = json.loads((tmp_path / f"failed{rank}.json").read_text())
        assert not failed, "\n\n".join([f"rank {rank}: draws {', '.join(failed)} failed", *failed.values()])


def test_draws_reach_every_choice():
    setups = [draw_setup(seed, engine) for engine, seeds in SEEDS.items() for seed in seeds]
    assert len(setups) == 300
    for name in asdict(setups[0]).keys() - {"seed"}:
        found = Counter(getattr(setup, name) for setup in setups)
        assert len(found) > 1 and min(found.values()) >= 8, f"{name}: {found}"
    assert draw_setup(5) == draw_setup(5)
