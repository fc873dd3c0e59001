"""`examples/agent_grpo.py`: an agent that has to look into a box, with turns trained as they were sampled."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
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
    at_random = f"{agent_grpo.random_reward(agent_grpo.tasks(2, 10_000), 4):.3f}"
    printed = (
        rf"Reward of held-out tasks: {at_random} of a random policy \(0\.125 expected\), \d\.\d{{3}} after training"
    )
    assert re.search(printed, capsys.readouterr().out)


def test_a_random_policy_is_measured_and_looking_is_rewarded():
    rows = agent_grpo.tasks(64, 10_000)
    measured = [agent_grpo.random_reward(rows, 8, seed) for seed in range(3)]
    error = (0.125 * 0.875 / (64 * 8)) ** 0.5
    assert len(set(measured)) > 1 and all(abs(reward - 0.125) < 3 * error for reward in measured)
    for index, row in enumerate(rows):
        world = agent_grpo.World()
        world.reset(**row)
        colour = world.look(row["box"])
        others = [name for name in agent_grpo.COLOURS if name != colour]
        answers = [f"It is {colour}.", f"It is {others[index % 7]}.", f"It is {colour} or {others[0]}.", ""]
        completions = [[{"role": "assistant", "content": text}] for text in answers]
        assert agent_grpo.names_the_colour(completions, [world] * 4) == [1.0, 0.0, 0.0, 0.0]
        assert world.look(row["box"] + 1) == "empty"


def gains(folder, **options):
    """Of three seeds: the reward of held-out tasks less that of the first two steps, and the former."""
    sizes = "--num_generations 8 --per_device_train_batch_size 32 --per_device_eval_batch_size 64"
    found = []
    for seed in range(3):
        rest = {"seed": seed, "output_dir": folder / str(seed), "max_steps": 20, "learning_rate": 1e-3, **options}
        named = [text for name, value in rest.items() for text in (f"--{name}", str(value))]
        trainer = agent_grpo.main([*OPTIONS.split(), *sizes.split(), *named])
        rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
        held_out = trainer.state.log_history[-1]["eval_reward"]
        found.append((held_out - np.mean(rewards[:2]), held_out))
    return np.array(found).T


def is_learning(gain):
    """More than three standard errors over the seeds."""
    return np.mean(gain) > 3 * np.std(gain, ddof=1) / len(gain) ** 0.5


@pytest.fixture
def trained_once(tmp_path, monkeypatch):
    """Both sets of runs start from the same models, a third of the time of each."""
    tiny_model, tokenizers = agent_grpo.tiny_model, {}

    def copied(folder, seed):
        kept = tmp_path / "models" / str(seed)
        if seed not in tokenizers:
            tokenizers[seed] = tiny_model(str(kept), seed)
        shutil.copytree(kept, folder, dirs_exist_ok=True)
        return tokenizers[seed]

    monkeypatch.setattr(agent_grpo, "tiny_model", copied)


@pytest.mark.slow
def test_the_agent_learns_to_look(tmp_path, trained_once):
    """
    Held-out tasks against the first steps: more than three standard errors over three seeds. The control are the same
    runs without steps that change the weights.
    """
    gain, held_out = gains(tmp_path / "learning")
    assert is_learning(gain), gain
    assert min(held_out) > 0.75 and np.mean(gain) > 0.2
    gain, held_out = gains(tmp_path / "control", learning_rate=0.0, max_steps=2)
    assert not is_learning(gain), gain
    assert max(held_out) < 0.75
