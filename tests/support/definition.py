"""
The definition, for training: `loss = sum_t w_t * nll_t / sum_t w_t` over the branches of an optimizer step, each run
by itself through the model as Transformers has it, and plain SGD. No code of the package.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

Path = tuple[int, ...]


@dataclass(frozen=True)
class GivenBranch:
    """A branch as a user gives it; its first token has no predecessor, so it is never supervised."""

    ids: Path
    weights: tuple[float, ...]

    def __post_init__(self):
        assert len(self.ids) == len(self.weights) and self.weights[0] == 0


class GivenTree:
    """
    The branches of a tree with what each of their tokens weighs.

    Args:
        branches (`list[GivenBranch]`): All that were given: those without a supervised token count in K as well.
        weighting (`str`): As in `hf_prefix_tree.fold`.
    """

    def __init__(self, branches: list[GivenBranch], weighting: str) -> None:
        self.branches = branches
        supervising = Counter(branch.ids[: t + 1] for branch in branches for t, w in enumerate(branch.weights) if w)
        self.weights = []
        for branch in branches:
            weights = np.array(branch.weights)
            if weighting == "tree":
                weights = weights / len(branches)
            elif weighting == "branch_mean":
                weights = weights / max(np.count_nonzero(weights), 1)
            elif weighting == "once":
                weights = weights / [max(supervising[branch.ids[: t + 1]], 1) for t in range(len(weights))]
            else:
                assert weighting == "branch"
            self.weights.append(weights)
        self.weight = sum(weights.sum() for weights in self.weights)
        self.num_tokens = _unique_tokens(branches)
        self.supervised_tokens = _unique_tokens([branch for branch in branches if any(branch.weights)])
        self.longest = max(len(branch.ids) for branch in branches)

    def by_path(self) -> Counter[Path]:
        """The weight of every supervised token, by the tokens from its root up to it."""
        found: Counter[Path] = Counter()
        for branch, weights in zip(self.branches, self.weights, strict=True):
            for t in np.flatnonzero(weights):
                found[branch.ids[: t + 1]] += weights[t]
        return found

    def loss_sum(self, model: torch.nn.Module) -> torch.Tensor:
        """`sum_t w_t * nll_t`, differentiable."""
        total = torch.zeros((), dtype=torch.float64)
        for branch, weights in zip(self.branches, self.weights, strict=True):
            if weights.any():
                ids = torch.tensor(branch.ids)[None]
                logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, :-1]
                nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
                total = total + (nll.double() * torch.from_numpy(weights[1:])).sum()
        return total


def _unique_tokens(branches: list[GivenBranch]) -> int:
    return len({branch.ids[: t + 1] for branch in branches for t in range(len(branch.ids))})


def capped(branches: list[GivenBranch], max_length: int | None, overlong: str) -> list[GivenBranch]:
    """The branches that a cap leaves; those that it drops leave K."""
    if max_length is None:
        return branches
    if overlong == "drop":
        return [branch for branch in branches if len(branch.ids) <= max_length]
    return [GivenBranch(branch.ids[:max_length], branch.weights[:max_length]) for branch in branches]


def weighted_mean(model: torch.nn.Module, trees: list[GivenTree]) -> torch.Tensor:
    """The loss of some trees; 0 where they supervise nothing."""
    weight = sum(tree.weight for tree in trees)
    return sum((tree.loss_sum(model) for tree in trees), torch.zeros(())) / (weight or 1.0)


def mean_of_means(model: torch.nn.Module, micro_batches: list[list[GivenTree]]) -> torch.Tensor:
    """The loss of a plain `Trainer`: the mean of the micro-batches' weighted means."""
    return sum(weighted_mean(model, trees) for trees in micro_batches) / len(micro_batches)


def sgd_step(model: torch.nn.Module, loss: torch.Tensor, learning_rate: float) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if loss.requires_grad else ()
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=False):
            if gradient is not None:
                parameter.sub_(learning_rate * gradient)


def decoded(batch: dict[str, torch.Tensor]) -> Counter[Path]:
    """The weight of every supervised token of a batch, by the tokens from its root up to it; from the raw tensors."""
    found: Counter[Path] = Counter()
    lengths = batch.get("branch_lengths")  # of `mode="grouped"`: branches side by side, each with indices of its own
    for row, ids in enumerate(batch["input_ids"].tolist()):
        ends = [len(ids)] if lengths is None else lengths[row].cumsum(0).tolist()
        above = batch["prefix_tree"][row, 2].tolist()
        labels = batch["labels"][row].tolist()
        weights = batch["loss_weights"][row].view(torch.float64).tolist()
        start = 0
        for end in ends:
            for token in range(start, end):
                if labels[token] == -100 or above[token] < 0 or not weights[token]:
                    continue
                assert labels[token] == ids[token]
                path, at = [], token - start
                while at >= 0:
                    path.append(ids[start + at])
                    at = above[start + at]
                found[tuple(reversed(path))] += weights[token]
            start = end
    return found
