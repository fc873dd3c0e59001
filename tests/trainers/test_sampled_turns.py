"""`rollout_rows="as_sampled"`: every turn is sampled as a serving loop samples it, and trained on what was sampled."""

from __future__ import annotations

import math
from unittest import mock

import numpy as np
import pytest
import torch
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

from hf_prefix_tree import TreeGRPOConfig, TreeGRPOTrainer
from tests.support.policy_runs import build, rollouts
from tests.support.ranks import run_ranks
from tests.support.rollout_runs import differences
from tests.support.sampled_runs import (
    STRIPPING,
    World,
    compare_in_rank,
    largest_gradient,
    lost_share,
    reply,
    served_rollouts,
    train_on_replies,
    trainer_of,
)

TEMPLATES = pytest.mark.parametrize("template", [qwen3_chat_template, STRIPPING], ids=["qwen3", "stripping"])


@TEMPLATES
def test_turns_are_trained_as_a_serving_loop_samples_them(tmp_path, template):
    trainer = train_on_replies(tmp_path, template)
    served = served_rollouts(trainer)
    expected = sorted(turn.prompt for rollout in served for turn in rollout.rows)
    assert sorted(trainer.contexts) == expected and len(expected) == 2 * 3 + 2 * 4
    assert len({advantage for rollout in served for advantage in rollout.advantages}) > 1
    assert max(differences(trainer, served, 4)) < 1e-10 and largest_gradient(trainer) > 1e-3
    served[0].rows[1].mask[-1] = 0
    assert min(differences(trainer, served, 4)[1::2]) > 1e-4

    entry = trainer.state.log_history[0]
    assert entry["rollouts/drift"] == pytest.approx(lost_share(served))
    if template is STRIPPING:
        assert entry["rollouts/rows"] == 3.5 and entry["rollouts/drift"] == 1
    else:  # reasoning stays until the next user message; only the odd calls are rendered in another way
        assert entry["rollouts/rows"] == 1.5 and 0 < entry["rollouts/drift"] < 0.5
    assert entry["tools/call_frequency"] == 2.5
    sampled = sum(len(turn.prompt + turn.completion) for rollout in served for turn in rollout.rows)
    assert max(trainer.tokens.trained) < 0.5 * sampled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "num_rows"),
    [pytest.param(qwen3_chat_template, 1.5, id="qwen3"), pytest.param(STRIPPING, 3.5, id="stripping")],
)
def test_two_ranks_with_different_numbers_of_rows(tmp_path, template, num_rows):
    run_ranks(compare_in_rank, tmp_path, template, timeout=600)
    ranks = [torch.load(tmp_path / f"results{rank}.pt") for rank in range(2)]
    for rank in ranks:
        assert max(rank["errors"]) < 1e-10 and rank["gradient"] > 1e-3 and min(rank["broken"][1::2]) > 1e-4
    assert sorted(rank["turns"] for rank in ranks) == [2 * 3, 2 * 4]
    logged = ranks[0]["logged"]
    assert logged["rollouts/rows"] == num_rows and logged["rollouts/drift"] == pytest.approx(ranks[0]["lost"])


@pytest.mark.slow
@TEMPLATES
def test_twenty_steps_of_an_environment_are_the_same_without_folding(tmp_path, template):
    """Ten generations, replayed: the replies do not depend on the weights."""
    options = {"world": World, "max_steps": 20, "learning_rate": 0.5, "loss_type": "cispo", "epsilon_high": 2.0}
    runs = [train_on_replies(tmp_path, template, min_reuse=reuse, **options) for reuse in (0.0, math.inf)]
    folded, unfolded = (run.losses[:20] for run in runs)
    assert len(runs[0].gradients) == 20 and largest_gradient(runs[0]) > 1e-3
    assert runs[1].contexts == runs[0].contexts
    assert unfolded == pytest.approx(folded, abs=1e-10) and np.ptp(folded) > 1e-3
    assert max(runs[0].tokens.trained) < 0.6 * min(runs[1].tokens.trained)
    name = "tools/failure_frequency"
    assert [[e[name] for e in run.state.log_history if name in e] for run in runs] == [[0] * 10] * 2


def test_the_policy_samples_and_turns_that_are_cut(tmp_path):
    """A random policy that calls no tool; and a completion budget that cuts or leaves out turns."""
    trainer = trainer_of(tmp_path, qwen3_chat_template, max_completion_length=4, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rollouts/rows"] == 1 and trainer.state.log_history[0]["rollouts/drift"] == 0

    def sample(self, prompt_ids, *args, **kwargs):
        texts = [reply(self.processing_class.decode(ids)) for ids in prompt_ids]
        return self.processing_class(texts)["input_ids"], None

    for budget in (60, 90, 120):
        with mock.patch.object(GRPOTrainer, "_generate_single_turn", sample):
            trainer = trainer_of(tmp_path, STRIPPING, max_completion_length=budget, max_steps=1)
            trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["completions/max_length"] <= budget and entry["loss"] == entry["loss"]


def test_as_sampled_needs_tools(tmp_path):
    with pytest.raises(ValueError, match="rollout_rows"):
        TreeGRPOConfig(str(tmp_path), rollout_rows="sampled", bf16=False, use_cpu=True)
    args = TreeGRPOConfig(str(tmp_path), rollout_rows="as_sampled", bf16=False, use_cpu=True)
    trainer = build(tmp_path, "grpo", "tree")
    for extra in ({}, {"rollout_func": rollouts(), "tools": None}):
        with pytest.raises(ValueError, match=r"rollout_rows='as_sampled'.*tools"):
            TreeGRPOTrainer(
                model=trainer.model,
                reward_funcs=lambda **kwargs: [],
                args=args,
                train_dataset=trainer.train_dataset,
                processing_class=trainer.processing_class,
                **extra,
            )
