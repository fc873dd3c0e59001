"""`examples/agent_grpo.py`: an agent that has to look into a box, with turns trained as they were sampled."""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest

REPO_ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("agent_grpo", REPO_ROOT / "examples" / "agent_grpo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


agent_grpo = load_script()
OPTIONS = "--use_cpu --bf16 False --gradient_checkpointing False --report_to none --logging_steps 1"
OPTIONS += " --num_generations 4 --max_completion_length 48"


def test_the_script_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(agent_grpo, "tiny_model", functools.partial(agent_grpo.tiny_model, steps=2))
    monkeypatch.setattr(agent_grpo, "NUM_HELD_OUT", 2)
    sizes = "--per_device_train_batch_size 4 --per_device_eval_batch_size 8 --max_steps 1"
    trainer = agent_grpo.main([*OPTIONS.split(), *sizes.split(), "--output_dir", str(tmp_path)])
    assert trainer.rollout_rows == "as_sampled"
    entry = trainer.state.log_history[0]
    assert entry["rollouts/rows"] >= 1 and "tools/call_frequency" in entry
    assert re.search(r"Reward: 0\.125 by guessing, .* of held-out tasks", capsys.readouterr().out)


@pytest.mark.slow
def test_the_agent_learns_to_look(tmp_path):
    """Held-out tasks against the first steps: more than three standard errors over three seeds."""
    sizes = "--num_generations 8 --per_device_train_batch_size 32 --per_device_eval_batch_size 64 --max_steps 20"
    gains = []
    for seed in range(3):
        rest = ["--learning_rate", "1e-3", "--seed", str(seed), "--output_dir", str(tmp_path / str(seed))]
        trainer = agent_grpo.main([*OPTIONS.split(), *sizes.split(), *rest])
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        held_out = trainer.state.log_history[-1]["eval_reward"]
        assert held_out > 0.75 > 0.7 > np.mean(rewards[:2])
        gains.append(held_out - np.mean(rewards[:2]))
    assert np.mean(gains) > 3 * np.std(gains, ddof=1) / 3**0.5
