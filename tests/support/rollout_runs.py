"""Random rollouts of several rows, a trainer that takes optimizer steps on them, and the same steps by definition."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import TrainerCallback

from conformance.double import keep_double
from hf_prefix_tree import TreeGRPOTrainer
from tests.support.models import VOCAB
from tests.support.policy_runs import build
from tests.support.rollout_loss import DoubleHead, GivenRollout, GivenRow, rollout_log_probs, step_loss
from tests.support.trainer_runs import make_model

LOSS_TYPES = ("grpo", "dapo", "bnpo", "dr_grpo", "luspo", "sapo", "cispo", "vespo")
FEW = 2  # generations of a prompt
# Numbers that float32 holds: TRL keeps temperatures and returned log-probs so.
OPTIONS = {"epsilon": 0.05, "epsilon_high": 0.1, "sapo_temperature_neg": 1.25, "num_generations": FEW}
OPTIONS |= {"optim": "sgd", "max_grad_norm": 0.0, "max_completion_length": 16}
RATE = 0.02


def draw_rollout(rng: np.random.Generator, prompt: list[int], stem: list[int]) -> GivenRollout:
    """
    A rollout of 1 to 6 rows: a row starts from a part of what was said, from a summary, or repeats the row before it.
    """
    history, rows = list(prompt), []
    for _ in range(rng.integers(1, 7)):
        if rows and rng.random() < 0.15:
            rows.append(copy.deepcopy(rows[-1]))
            continue
        completion = (stem if rng.random() < 0.4 else []) + rng.integers(3, VOCAB, size=rng.integers(0, 5)).tolist()
        completion *= rng.random() > 0.1
        mask = (rng.random(len(completion)) > 0.3 * (rng.random() < 0.5)).astype(int).tolist()
        sampled = (-rng.integers(1, 400, size=len(completion)) / 64).tolist()
        rows.append(GivenRow(list(history), completion, mask, sampled))
        if rng.random() < 0.2:  # compaction
            history = prompt + rng.integers(3, VOCAB, size=2).tolist()
        else:  # what the next context keeps of the turn, and what the environment answers
            history = history + completion[rng.integers(0, 3) :] + rng.integers(3, VOCAB, size=2).tolist()
    if rng.random() < 0.1:
        rows = [GivenRow(row.prompt, [], [], []) for row in rows]
    score = float(rng.integers(-8, 9)) / 4
    return GivenRollout(rows, score)


def draw_rollouts(seed: int, number: int) -> list[GivenRollout]:
    """`number` rollouts, `FEW` in a row of the same prompt."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for _ in range(number // FEW):
        prompt = rng.integers(3, VOCAB, size=rng.integers(1, 12)).tolist()
        stem = rng.integers(3, VOCAB, size=2).tolist()
        rollouts += [draw_rollout(rng, prompt, stem) for _ in range(FEW)]
    return rollouts


def rollout_function(rollouts: list[GivenRollout], seed: int = 0) -> Any:
    """Returns this rank's rollouts, and seeds the order in which TRL shuffles them."""

    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        start = trainer.accelerator.process_index * len(prompts)
        here = rollouts[start : start + len(prompts)]
        torch.manual_seed(seed)
        return {
            "prompt_ids": [[row.prompt for row in rollout.rows] for rollout in here],
            "completion_ids": [[row.completion for row in rollout.rows] for rollout in here],
            "logprobs": [[row.sampled for row in rollout.rows] for rollout in here],
            "env_mask": [[row.mask for row in rollout.rows] for rollout in here],
            "score": [rollout.score if rollout.row_scores is None else rollout.row_scores for rollout in here],
        }

    return generate


def score_reward(score: list[Any], **kwargs: Any) -> list[Any]:
    return score


class Recorded(TreeGRPOTrainer):
    """Keeps the loss over all ranks, the weights and the gradients of each optimizer step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = [0.0]
        self.models: list[Any] = []
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.add_callback(_Recorder(self))

    def compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().compute_loss(*args, **kwargs)
        self.losses[-1] += loss.item()
        return loss


class _Recorder(TrainerCallback):
    def __init__(self, trainer: Recorded) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        config = copy.deepcopy(model.config)
        config._attn_implementation = "eager"
        plain = type(model)(config).double()
        plain.load_state_dict(model.state_dict())
        self.trainer.models.append(plain)
        self.trainer.gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        self.trainer.losses.append(0.0)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        losses = torch.tensor(self.trainer.losses, dtype=torch.float64)
        self.trainer.losses = self.trainer.accelerator.reduce(losses, "mean").tolist()


class Unfolded(Recorded):
    """As many forwards as TRL."""

    min_reuse = math.inf


@contextmanager
def double_by_default() -> Iterator[None]:
    """What TRL gathers from a rank without a token that counts is a new tensor; other ranks gather float64 there."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def train(
    folder: Path,
    rollouts: list[GivenRollout],
    per_device: int,
    vllm: bool = False,
    trainer_class: type[Recorded] = Recorded,
    **options: Any,
) -> Recorded:
    """Two optimizer steps on the same rollouts in float64. The second one's ratios and KL are not those of a start."""
    with mock.patch("trl.trainer.utils._ChunkedLogProbFunction", DoubleHead), double_by_default(), keep_double():
        trainer = build(
            folder,
            "grpo",
            "tree",
            # rotary frequencies, too: in float32, padding on the left would change the rounding of rotations
            model=make_model(dtype=torch.float64).double(),
            rollout_func=rollout_function(rollouts),
            reward_funcs=score_reward,
            trainer_class=trainer_class,
            per_device_train_batch_size=per_device,
            **{"learning_rate": RATE, "num_iterations": 2, "max_steps": 2, **OPTIONS, **options},
        )
        if trainer.ref_model is not None:
            trainer.ref_model.double().load_state_dict(trainer.model.state_dict())  # TRL loads it in float32
        if vllm:
            trainer.use_vllm, trainer._last_loaded_step = True, 0
            trainer.vllm_generation = SimpleNamespace(sync_weights=lambda: None)
        trainer.train()
    for rollout, advantage in zip(rollouts, trainer._logs["advantages"], strict=True):
        rollout.advantages = [advantage] * len(rollout.rows)
    return trainer


def micro_batches(rollouts: list[GivenRollout], per_device: int, ranks: int) -> list[list[GivenRollout]]:
    """TRL shuffles the rollouts of each rank, here all of them with the same seed, and cuts them."""
    size = len(rollouts) // ranks
    batches = []
    for start in range(0, len(rollouts), size):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(0)).tolist()
        order = [rollouts[start + index] for index in order]
        batches += [order[index : index + per_device] for index in range(0, size, per_device)]
    return batches


def differences(
    trainer: Any, rollouts: list[GivenRollout], per_device: int, ranks: int = 1, vllm: bool = False
) -> list[float]:
    """
    Of each step: the difference of the loss, and the relative one of the gradients, from the definition. Of `trainer`
    it reads the options and what [`Recorded`] keeps.
    """
    batches = micro_batches(rollouts, per_device, ranks)
    with torch.no_grad():  # the policy that scored the rollouts first is the reference, too
        at_start = {id(rollout): rollout_log_probs(trainer.models[0], rollout) for rollout in rollouts}
    errors = []
    for step, model in enumerate(trainer.models):
        model.zero_grad()
        fixed = [lambda rollout: at_start[id(rollout)]] * 2
        loss = step_loss(model, *fixed, trainer.args, batches, vllm)
        loss.backward()
        expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        errors.append(abs(trainer.losses[step] - loss.item()))
        # relative to the largest entry; where advantages are zero, gradients are zero up to rounding
        errors.append(
            max(
                ((gradient - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-5)).item()
                for name, gradient in trainer.gradients[step].items()
            )
        )
    return errors


def random_options(seed: int) -> dict[str, Any]:
    """Options of a run: every eight seeds have every loss type."""
    rng = np.random.default_rng([seed, 1])
    options: dict[str, Any] = {"loss_type": LOSS_TYPES[seed % 8], "beta": [0.0, 0.125][rng.integers(2)]}
    options["importance_sampling_level"] = ["token", "sequence"][rng.integers(2)]
    options["gradient_accumulation_steps"] = int(rng.integers(1, 5))
    options["per_device"] = int(rng.choice([2, 4]))
    options["trainer_class"] = [Recorded, Unfolded][rng.integers(2)]
    options["off_policy_mask_threshold"] = [None, 0.5][rng.integers(2)]
    options["use_bias_correction_kl"] = bool(rng.integers(2))
    options["delta"] = [None, 1.25][rng.integers(2)]
    if rng.random() < 0.5:
        modes = ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
        options["vllm"] = True
        options["vllm_importance_sampling_mode"] = modes[rng.integers(2 if options["loss_type"] == "vespo" else 4)]
    return options


def drawn(seed: int, ranks: int = 1) -> tuple[dict[str, Any], list[GivenRollout]]:
    """The options of a seed, and the rollouts of all ranks for an optimizer step."""
    options = random_options(seed)
    return options, draw_rollouts(seed, ranks * options["per_device"] * options["gradient_accumulation_steps"])


def compare(folder: Path, seed: int) -> list[float]:
    """Trains on the rollouts of a seed, and compares with the definition."""
    options, rollouts = drawn(seed)
    trainer = train(folder, rollouts, **options)
    return differences(trainer, rollouts, options["per_device"], vllm=options.get("vllm", False))


def near_twins(start: int = 3) -> list[GivenRollout]:
    """Two rollouts of two rows that share 90 % of their tokens, and have opposite rewards."""
    shared = list(range(start, start + 36))
    twins = []
    for last, score in ((40, 1.0), (50, -1.0)):
        ends = [[last, last + 1], [last + 2, last + 3]]
        rows = [GivenRow(shared[:4], shared[4:] + end, [1] * 34, [-1.0] * 34) for end in ends]
        twins.append(GivenRollout(rows, score))
    return twins


def swap_advantages(twins: list[GivenRollout]) -> None:
    twins[0].advantages, twins[1].advantages = twins[1].advantages, twins[0].advantages


def give_row_scores(rollouts: list[GivenRollout]) -> None:
    """A reward per row, and for one rollout a single reward for all its rows."""
    rng = np.random.default_rng(0)
    for rollout in rollouts:
        rollout.row_scores = rng.normal(size=len(rollout.rows)).tolist()
    rollouts[3].row_scores = None


def give_row_advantages(rollouts: list[GivenRollout], scale_rewards: str) -> None:
    """A row's advantage: its reward, less the mean of its group, on the scale of the group."""
    rewards = np.array([np.mean(r.score if r.row_scores is None else r.row_scores) for r in rollouts])
    groups = rewards.reshape(-1, FEW)
    scale = {"none": np.ones(len(rewards)), "batch": np.full(len(rewards), rewards.std(ddof=1) + 1e-4)}
    scale["group"] = np.repeat(groups.std(axis=1, ddof=1), FEW) + 1e-4
    for rollout, mean, std in zip(rollouts, np.repeat(groups.mean(axis=1), FEW), scale[scale_rewards], strict=True):
        scores = rollout.row_scores or [rollout.score] * len(rollout.rows)
        rollout.advantages = [(score - mean) / std for score in scores]


def compare_in_rank(folder: str, seeds: list[int], controls: list[str]) -> None:
    """
    Trains on the rollouts of each seed, and for each loss type of `controls` on near twins per rank. Then this rank
    compares every second training with the definition, and the near twins also after a swap of advantages on one rank.
    At last, a training with a reward per row.
    """
    rank = int(os.environ["RANK"])
    taken: list[Any] = []
    results: dict[str, Any] = {"apart": [], "errors": {}, "controls": {}}
    twins = {"per_device": 2, "gradient_accumulation_steps": 1, "max_completion_length": 128}
    jobs = [(seed, *drawn(seed, ranks=2)) for seed in seeds]
    jobs += [(name, {**twins, "loss_type": name}, near_twins() + near_twins(start=4)) for name in controls]
    for name, options, rollouts in jobs:
        # a folder of this rank: once the ranks are connected, only the first one saves models
        trainer = train(Path(folder, str(rank)), rollouts, **options)
        flat = torch.cat([gradient.ravel() for step in trainer.gradients for gradient in step.values()])
        of_ranks = trainer.accelerator.gather(flat[None])
        results["apart"].append((of_ranks[0] - of_ranks[1]).abs().max().item())
        kept = {key: getattr(trainer, key) for key in ("args", "models", "gradients", "losses")}
        taken.append((name, options, rollouts, SimpleNamespace(**kept)))
    for name, options, rollouts, steps in taken[rank::2]:
        setting = options["per_device"], 2, options.get("vllm", False)
        results["errors"][name] = differences(steps, rollouts, *setting)
        if name in controls:
            swap_advantages(rollouts[2:])
            results["controls"][name] = differences(steps, rollouts, *setting)
    rollouts = draw_rollouts(5, 8)
    give_row_scores(rollouts)
    trainer = train(Path(folder, str(rank)), rollouts, 2, loss_type="grpo", gradient_accumulation_steps=2)
    give_row_advantages(rollouts, "group")
    results["rows"] = differences(trainer, rollouts, 2, ranks=2)
    torch.save(results, Path(folder, f"results{rank}.pt"))
