"""Rollouts of several rows: the loss and all gradients equal the definition; one row per rollout equals stock TRL."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch

from hf_prefix_tree.rl.rollouts import Row, join_rows
from hf_prefix_tree.training.step import replaced
from tests.support.policy_runs import assert_same_training, build, rollouts, run
from tests.support.ranks import run_ranks
from tests.support.rollout_loss import GivenRow
from tests.support.rollout_runs import (
    LOSS_TYPES,
    Recorded,
    Unfolded,
    compare,
    compare_in_rank,
    differences,
    draw_rollouts,
    drawn,
    give_row_advantages,
    give_row_scores,
    near_twins,
    rollout_function,
    swap_advantages,
    train,
)


@pytest.mark.parametrize("seed", range(8))
def test_steps_equal_the_definition(tmp_path, seed):
    """A seed per loss type."""
    assert max(compare(tmp_path, seed)) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 200, 8))
def test_more_steps_equal_the_definition(tmp_path, start):
    for seed in range(start, start + 8):
        assert max(compare(tmp_path / str(seed), seed)) < 1e-10, seed


@pytest.mark.slow
def test_twenty_steps_are_the_same_without_folding(tmp_path):
    losses = []
    for trainer_class in (Recorded, Unfolded):
        options = {"loss_type": "grpo", "beta": 0.125, "gradient_accumulation_steps": 2, "max_steps": 20}
        trainer = train(tmp_path, draw_rollouts(3, 8), 4, trainer_class=trainer_class, num_iterations=20, **options)
        losses.append(trainer.losses[:20])
    assert losses[1] == pytest.approx(losses[0], abs=1e-10) and np.ptp(losses[0]) > 1e-3


EOS = 2
QUICK = ("grpo", "dapo", "vespo")
QUICK_FIRST = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LOSS_TYPES]


def check_two_ranks(folder, seeds, controls):
    """One launch, since the ranks take longer to start than a tiny model to train."""
    run_ranks(compare_in_rank, folder, seeds, controls, timeout=3600)
    ranks = [torch.load(folder / f"results{rank}.pt") for rank in range(2)]
    errors, swapped = ({**ranks[0][name], **ranks[1][name]} for name in ("errors", "controls"))
    assert errors.keys() == {*seeds, *controls} and swapped.keys() == {*controls}
    wrong = {name: found for name, found in errors.items() if max(found) >= 1e-10}
    assert not wrong
    assert ranks[0]["apart"] == [0.0] * len(errors)  # one rank has compared, for both
    assert max(max(rank["rows"][1::2]) for rank in ranks) < 1e-5  # TRL's advantages are in float32
    # the negative control: the advantages of two rollouts that share 90 % of their tokens, swapped on one rank
    assert min(min(found[1::2]) for found in swapped.values()) > 0.1


def test_two_ranks_equal_the_definition(tmp_path):
    check_two_ranks(tmp_path, [1, 2], ["grpo"])


SETS = range(1000, 1200)


@pytest.mark.slow
def test_200_random_sets_on_two_ranks_equal_the_definition(tmp_path):
    check_two_ranks(tmp_path, list(SETS), list(LOSS_TYPES))


def test_the_random_sets_hold_every_case():
    """What the comparisons above are worth."""
    sets = [drawn(seed, ranks=2) for seed in SETS]
    setups = Counter((options["loss_type"], options["gradient_accumulation_steps"]) for options, _ in sets)
    assert len(setups) == len(LOSS_TYPES) * 4
    rollouts = [rollout for _, several in sets for rollout in several]
    assert set(Counter(len(rollout.rows) for rollout in rollouts)) == {1, 2, 3, 4, 5, 6}
    cases = Counter()
    for rollout in rollouts:
        ids = [(*row.prompt, *row.completion) for row in rollout.rows]
        cases["identical rows"] += len(set(ids)) < len(ids)
        cases["compaction"] += any(len(row.prompt) < len(before.prompt) for before, row in pairwise(rollout.rows))
        cases["an empty completion"] += any(not row.completion for row in rollout.rows)
        cases["no completion"] += not any(row.completion for row in rollout.rows)
        cases["masks"] += any(0 in row.mask for row in rollout.rows)
        cases["no token that counts"] += any(row.completion and not any(row.mask) for row in rollout.rows)
    assert len(cases) == 6 and min(cases.values()) > 100, cases
    num_rows = [[sum(len(r.rows) for r in half) for half in np.split(np.array(s, object), 2)] for _, s in sets]
    assert sum(first != second for first, second in num_rows) > 150  # the ranks have different numbers of rows


@pytest.mark.parametrize("loss_type", QUICK_FIRST)
def test_advantages_that_are_swapped_are_noticed(tmp_path, loss_type):
    """The negative control: the same comparison, with the advantages of two rollouts swapped."""
    twins = near_twins()
    options = {"loss_type": loss_type, "gradient_accumulation_steps": 1, "max_completion_length": 128}
    trainer = train(tmp_path, twins, 2, **options)
    assert max(differences(trainer, twins, 2)) < 1e-10
    swap_advantages(twins)
    assert min(differences(trainer, twins, 2)[1::2]) > 0.1


@pytest.mark.parametrize("loss_type", QUICK_FIRST)
def test_truncated_rollouts_are_left_out(tmp_path, loss_type):
    """A rollout whose completions end without an end token counts as one without tokens that count."""
    several = draw_rollouts(7, 8)
    for rollout in several[::2]:
        rollout.rows.append(GivenRow(rollout.rows[0].prompt, [5, EOS], [1, 1], [-1.0, -2.0]))
    options = {"loss_type": loss_type, "gradient_accumulation_steps": 2, "mask_truncated_completions": True}
    trainer = train(tmp_path, several, 4, beta=0.125, **options)
    assert trainer.processing_class.eos_token_id == EOS
    plain = differences(trainer, several, 4)
    ids = [[token for row in rollout.rows for token in row.completion] for rollout in several]
    truncated = [bool(tokens) and tokens[-1] != EOS for tokens in ids]
    assert sum(truncated) == 4
    for rollout in (rollout for rollout, is_truncated in zip(several, truncated, strict=True) if is_truncated):
        for row in rollout.rows:
            row.mask = [0] * len(row.mask)
    assert max(differences(trainer, several, 4)) < 1e-10
    assert min(plain[1::2]) > 1e-2
    assert trainer.state.log_history[0]["tree/token_ratio"] > 1.2


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_one_reward_per_row(tmp_path, scale_rewards):
    several = draw_rollouts(5, 8)
    assert any(not row.completion for rollout in several for row in rollout.rows)
    give_row_scores(several)
    options = {"loss_type": "grpo", "gradient_accumulation_steps": 2, "scale_rewards": scale_rewards}
    trainer = train(tmp_path, several, 4, **options)
    plain = differences(trainer, several, 4)[1::2]
    give_row_advantages(several, scale_rewards)
    assert max(differences(trainer, several, 4)[1::2]) < 1e-5  # TRL's advantages are in float32
    assert min(plain) > 1e-2


@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "reward_funcs.*rows"), ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective")],
)
def test_rewards_per_row_that_do_not_fit(tmp_path, options, name):
    twins = near_twins()
    twins[0].row_scores = [1.0, 2.0] if options else [1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match=name):
        train(tmp_path, twins, 2, loss_type="grpo", gradient_accumulation_steps=1, **options)


def in_rows(generate):
    """The rollout function's completions as rollouts of one row."""

    def generate_rows(*args):
        names = ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        return {name: [[ids] for ids in x] if name in names else x for name, x in generate(*args).items()}

    return generate_rows


@pytest.mark.parametrize("loss_type", QUICK_FIRST)
def test_one_row_per_rollout_equals_stock(tmp_path, loss_type):
    options = {"loss_type": loss_type, "max_steps": 3, "num_iterations": 2, "epsilon": 0.001, "beta": 0.1}
    options |= {"epsilon_high": 2.0} if loss_type == "cispo" else {}  # its bound on the ratio itself
    options |= {
        "optim": "sgd",
        "learning_rate": 0.1,
        "off_policy_mask_threshold": 0.0,
        "mask_truncated_completions": True,
    }
    options |= {"reward_funcs": lambda completion_ids, **kwargs: [np.sum(ids) % 11 / 10 for ids in completion_ids]}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 8, "eval_rows": 1}
    stock, tree = (
        run(tmp_path, "grpo", kind, rollout_func=wrap(rollouts(deep=True, environment=True, eos=True)), **options)
        for kind, wrap in (("stock", lambda generate: generate), ("tree", in_rows))
    )
    assert_same_training(tree, stock, steps=3, moved=1e-3)
    evaluations = [[e for e in one.trainer.state.log_history if "eval_loss" in e] for one in (stock, tree)]
    assert len(evaluations[0]) == 3
    for expected, got in zip(*evaluations, strict=True):
        for name in ("eval_loss", "eval_kl", "eval_entropy", "eval_reward", "eval_completions/mean_length"):
            assert got[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-6), name


def test_counts_and_rewards_are_those_of_all_rows(tmp_path):
    twins = near_twins()
    twins[1].rows.append(GivenRow([5], [6, 7, 8], [1, 0, 1], [0.0] * 3))
    seen = []

    def reward(completion_ids, completions, score, **kwargs):
        seen.append((completion_ids, [len(text.split()) for text in completions]))
        return score

    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2}
    options |= {"max_steps": 1, "reward_funcs": reward, "loss_type": "grpo"}
    trainer = build(tmp_path, "grpo", "tree", rollout_func=rollout_function(twins), **options)
    trainer.train()
    assert seen == [([[row.completion for row in twin.rows] for twin in twins], [68, 71])]
    entry = trainer.state.log_history[0]
    assert entry["completions/mean_length"] == (68 + 70) / 2
    assert entry["num_tokens"] == 4 * 4 + 1 + 68 + 70
    # the stem of 36 tokens, four ends of two, and the third row
    assert entry["tree/tokens"] == 36 + 4 * 2 + 4


def test_empty_completions_of_plain_rollouts(tmp_path):
    def generate(prompts, trainer):
        output = plain(prompts, trainer)
        output["completion_ids"][0], output["logprobs"][0] = [], []
        return output

    plain = rollouts()
    trained = run(tmp_path, "grpo", "tree", rollout_func=generate, max_steps=2, mask_truncated_completions=True)
    assert [entry["completions/min_length"] for entry in trained.logs] == [0, 0]
    with pytest.raises(IndexError):  # as it was, and is in TRL
        run(tmp_path, "grpo", "stock", rollout_func=generate, max_steps=2)


ROWS = {"prompt_ids": [[[5], [5, 8]]], "completion_ids": [[[6, 7], [9]]], "logprobs": [[[0.0, 0.0], [0.0]]]}


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"prompt_ids": [[[5]]]}, "prompt_ids"),
        ({"prompt_ids": [[[5], []]]}, "prompt_ids"),
        ({"logprobs": [[[0.0], [0.0]]]}, "logprobs"),
        ({"env_mask": [[[1, 1]]]}, "env_mask"),
    ],
)
def test_rows_that_contradict_each_other_are_refused(change, name):
    (rows,) = join_rows(ROWS, 0)[1]
    assert [(row.prompt_ids.tolist(), row.length) for row in rows] == [([5], 2), ([5, 8], 1)]
    with pytest.raises(ValueError, match=f"rollout_func.*{name}"):
        join_rows({**ROWS, **change}, 0)


def test_tools_do_not_extend_rollouts_of_several_rows(tmp_path):
    twins = near_twins()
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "num_generations": 2}
    trainer = build(tmp_path, "grpo", "tree", rollout_func=rollout_function(twins), max_steps=1, **options)
    trainer.tools = [len]
    with pytest.raises(ValueError, match="tools"):
        trainer.train()


def test_images_with_rollouts_of_several_rows_are_refused(tmp_path):
    trainer = build(tmp_path, "grpo", "tree")
    ids = torch.ones(1, 4, dtype=torch.int64)
    with replaced(trainer, _rollouts=[[Row(torch.tensor([5]), 2)]]), pytest.raises(ValueError, match="pixel_values"):
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 2, pixel_values=ids)
