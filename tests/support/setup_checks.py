"""What a drawn set-up left, compared with the definition step by step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch

from tests.support.definition import GivenTree, Path, mean_of_means, sgd_step, weighted_mean
from tests.support.setup_draws import DrawnData, Setup

LEARNING_RATE = 0.1


@dataclass
class Run:
    """
    What a training left, also where another trainer went on after a stop.

    Attributes:
        start, end (`dict[str, torch.Tensor]`): The weights before and after it.
        log (`list[dict]`): The trainer's.
        recorded (`list[tuple[int, Counter[Path]]]`): Of every micro-batch of every rank, the steps done before it, and
            the weights of its tokens.
    """

    start: dict[str, torch.Tensor]
    end: dict[str, torch.Tensor]
    log: list[dict[str, float]]
    recorded: list[tuple[int, Counter[Path]]]


def compare(setup: Setup, run: Run, model: torch.nn.Module, train: DrawnData, evaluation: list[DrawnData]) -> None:
    """
    Trains again by the definition, on what the steps of a run held.

    Args:
        setup (`Setup`): The draw.
        run (`Run`): What it left.
        model (`torch.nn.Module`): As Transformers has it, with the adapter of the run; its weights are replaced.
        train (`DrawnData`), evaluation (`list[DrawnData]`): The data that was given.
    """
    names = model.load_state_dict(run.start, strict=False)
    assert not names.unexpected_keys and not {*names.missing_keys} & {name for name, _ in model.named_parameters()}
    model.eval()
    is_plain = setup.trainer == "plain"
    steps = [_held_in_step(train, micro_batches, is_plain) for micro_batches in _by_step(run)]
    _check_epochs(setup, train, [sum(step, Counter()) for step in steps])

    losses, totals = [], []
    evaluations = [_evaluations(setup, model, evaluation)]
    for step in steps:
        trees = [[train.trees[index] for index in held.elements()] for held in step]
        loss = mean_of_means(model, trees) if is_plain else weighted_mean(model, trees[0])
        weight = sum(tree.weight for own in trees for tree in own)
        losses.append(loss.item())
        totals.append((loss.item() * weight, weight))
        sgd_step(model, loss, LEARNING_RATE)
        evaluations.append(_evaluations(setup, model, evaluation))

    rel, apart_most = 1e-9, 1e-9
    if not setup.is_double:
        rel, apart_most = 2e-5, 1e-4
    elif not is_plain and setup.trainer != "mixin":  # TRL's fused head computes log-probs in float32
        rel, apart_most = 1e-6, 1e-5
    _check_losses(setup, run.log, losses, totals, rel)
    _check_evaluations(setup, run.log, evaluations, rel)
    end = dict(model.named_parameters())
    moved = _norm({name: end[name].detach() - run.start[name] for name in end})
    apart = _norm({name: end[name].detach() - run.end[name] for name in end})
    assert moved > 1e-3, "nothing was trained"
    assert apart < apart_most * moved, f"weights are {apart} apart and moved by {moved}"


def _by_step(run: Run) -> list[list[Counter[Path]]]:
    """The micro-batches of each optimizer step, of all ranks."""
    steps: dict[int, list[Counter[Path]]] = {}
    for step, weights in run.recorded:
        steps.setdefault(step, []).append(weights)
    assert sorted(steps) == list(range(len(steps)))
    return [steps[step] for step in range(len(steps))]


def _held_in_step(data: DrawnData, micro_batches: list[Counter[Path]], is_plain: bool) -> list[Counter[int]]:
    """How often each tree is in each micro-batch of a plain trainer, else in the step: one may hold parts of it."""
    return [_held(data, own) for own in (micro_batches if is_plain else [sum(micro_batches, Counter())])]


def _held(data: DrawnData, weights: Counter[Path]) -> Counter[int]:
    """How often each tree is in these tokens, which weigh what the definition says."""
    by_tree: dict[int, Counter] = {}
    for path, weight in weights.items():
        by_tree.setdefault(data.tree_of(path), Counter())[path] = weight
    held: Counter[int] = Counter()
    for index, got in by_tree.items():
        expected = data.trees[index].by_path()
        times = round(got.total() / expected.total())
        assert times and got.keys() == expected.keys(), f"tree {index} is not whole"
        for path, weight in expected.items():
            assert abs(got[path] - times * weight) < 1e-12 * times * weight, (
                f"a token of tree {index} weighs otherwise"
            )
        held[index] = times
    return held


def _check_epochs(setup: Setup, data: DrawnData, steps: list[Counter[int]]) -> None:
    """In every epoch each tree comes as often as it was given; `dataloader_drop_last` drops less than a round."""
    given = Counter(index for index in data.order if index in data.trees and data.trees[index].weight)
    assert steps and len(steps) % setup.epochs == 0
    length = len(steps) // setup.epochs
    for start in range(0, len(steps), length):
        epoch = sum(steps[start : start + length], Counter())
        if not setup.drop_last:
            assert epoch == given, f"the epoch holds {epoch} of {given}"
            continue
        lost = given - epoch
        assert not epoch - given, f"the epoch holds {epoch} of {given}"
        if not (setup.overflow and setup.pack_trees):  # rows of one tree
            assert lost.total() < setup.batch_size * setup.ranks, f"the epoch lacks {lost}"


def _check_losses(setup: Setup, log: list[dict], losses: list[float], totals: list[tuple], rel: float) -> None:
    done = 0
    for entry in log:
        if "loss" not in entry:
            continue
        if setup.resumed_at is not None and done < setup.resumed_at < entry["step"]:
            done = setup.resumed_at  # where Trainer resumes, a window starts
        window, done = slice(done, entry["step"]), entry["step"]
        expected = losses[window]
        # Trainer adds losses up in float32
        _close(entry["loss"], sum(expected) / len(expected), max(rel, 1e-6), f"loss of step {done}")
        if setup.trainer != "plain":
            loss_sum, weight = (sum(values) for values in zip(*totals[window], strict=True))
            _close(entry["loss/sum"], loss_sum, rel, f"loss/sum of step {done}")
            _close(entry["loss/token_count"], weight, 1e-12, f"loss/token_count of step {done}")
    assert done == len(losses) // setup.logging_steps * setup.logging_steps


def _evaluations(setup: Setup, model: torch.nn.Module, evaluation: list[DrawnData]) -> dict[str, float]:
    names = ["eval_loss"] if len(evaluation) == 1 else ["eval_a_loss", "eval_b_loss"]
    with torch.no_grad():
        return {
            name: _evaluation(setup, model, data.given()).item()
            for name, data in zip(names[: len(evaluation)], evaluation, strict=True)
        }


def _evaluation(setup: Setup, model: torch.nn.Module, trees: list[GivenTree]) -> torch.Tensor:
    if setup.trainer != "plain":
        return weighted_mean(model, trees)
    size = setup.eval_batch_size  # a plain trainer's evaluation is the mean of its batches' means, over the rows
    batches = [trees[start : start + size] for start in range(0, len(trees), size)]
    return sum(weighted_mean(model, batch) * len(batch) for batch in batches) / len(trees)


def _check_evaluations(setup: Setup, log: list[dict], expected: list[dict[str, float]], rel: float) -> None:
    done = Counter()
    for entry in log:
        for name in expected[0]:
            if name in entry:
                _close(entry[name], expected[entry["step"]][name], rel, f"{name} after step {entry['step']}")
                done[name, entry["step"]] += 1
    for name in expected[0]:
        first = 0 if setup.eval_on_start else setup.eval_steps
        assert all(done[name, step] for step in range(first, len(expected), setup.eval_steps))


def _close(got: float, expected: float, rel: float, name: str) -> None:
    assert abs(got - expected) <= rel * abs(expected), f"{name}: {got} instead of {expected}"


def _norm(tensors: dict[str, torch.Tensor]) -> float:
    return sum(tensor.double().square().sum() for tensor in tensors.values()).sqrt().item()
