# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Compares one step folded with the same step branch by branch: loss, gradients and time.

The unfolded step runs every branch by itself, without padding, and sums `w * nll` over the branches before dividing by
the summed weights, like a stock trainer on the unfolded data. It costs one forward and backward per branch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.tree.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Comparison:
    """
    The result of [`compare_step`].

    Args:
        tree_loss (`float`), branch_loss (`float`): The two losses.
        loss_difference (`float`): Their difference, relative.
        gradient_difference (`float`): The largest difference of any gradient entry, relative to the largest entry of
            its tensor.
        tree_seconds (`float`), branch_seconds (`float`): Wall-clock seconds of each forward and backward.
    """

    tree_loss: float
    branch_loss: float
    loss_difference: float
    gradient_difference: float
    tree_seconds: float
    branch_seconds: float


def compare_step(model: PreTrainedModel, trees: Sequence[PrefixTree]) -> Comparison:
    """
    Runs one step both ways on the same weights, without updating them.

    Args:
        model (`PreTrainedModel`): A prepared model, see [`prepare_model`].
        trees (`Sequence[PrefixTree]`): The trees of the step, folded with weighting `"tree"` or `"branch"`.
    """
    batch = {name: value.to(model.device) for name, value in concatenate_trees(trees, pad_token_id=0).items()}
    tree_loss, tree_gradients, tree_seconds = _timed(model, lambda: _tree_step(model, batch))
    branch_loss, branch_gradients, branch_seconds = _timed(model, lambda: _branch_step(model, trees))
    return Comparison(
        tree_loss,
        branch_loss,
        abs(tree_loss - branch_loss) / abs(branch_loss),
        float(np.max([_relative(a, b) for a, b in zip(tree_gradients, branch_gradients, strict=True)])),
        tree_seconds,
        branch_seconds,
    )


def _tree_step(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> float:
    loss = model(**batch).loss
    loss.backward()
    return loss.item()


def _branch_step(model: PreTrainedModel, trees: Sequence[PrefixTree]) -> float:
    divisor, total = sum(tree.weights.sum() for tree in trees), 0.0
    for tree in trees:
        scale = divisor * (tree.num_branches if tree.weighting == "tree" else 1)
        for branch in tree.branches():
            ids = torch.from_numpy(branch.input_ids.copy())[None].to(model.device)
            weights = torch.from_numpy(branch.weights[1:] / scale).to(model.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            loss = (nll.double() * weights).sum()
            loss.backward()
            total += loss.item()
    return total


def _timed(model: PreTrainedModel, step: Callable[[], float]) -> tuple[float, list[torch.Tensor], float]:
    model.zero_grad()
    start = time.perf_counter()
    loss = step()
    seconds = time.perf_counter() - start
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return loss, gradients, seconds


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()
