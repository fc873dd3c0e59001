"""Padded rows whose prefixes repeat, and what it takes to compute them."""

import numpy as np
import torch

from tests.support.models import random_branches

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def padded_rows(seed=0, side="right", num_branches=6):
    """Rows that fork at several depths, end inside one another and repeat; labels differ from row to row."""
    rng = np.random.default_rng(seed)
    branches = random_branches(rng, num_branches=num_branches)
    width = max(len(branch) for branch in branches) + 3
    ids = np.full((len(branches), width), 0)
    mask, labels = np.zeros_like(ids), np.full_like(ids, -100)
    for row, branch in enumerate(branches):
        free = width - len(branch)
        start = {"right": 0, "left": free, "both": rng.integers(free + 1)}[side]
        at = slice(start, start + len(branch))
        ids[row, at], mask[row, at] = branch.input_ids, 1
        labels[row, at] = np.where(branch.weights > 0, branch.input_ids, -100)
    assert 0 < (labels != -100).sum() < mask.sum()
    return {
        name: torch.from_numpy(x) for name, x in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))
    }


class Tokens:
    """Counts the positions that a backbone computes."""

    def __init__(self, model):
        self.total = 0
        model.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        self.total += kwargs["input_ids"].numel()


def distinct_prefixes(rows):
    """Different prefixes of the rows: the tokens of a perfect fold."""
    return len(
        {
            tuple(row[:end])
            for ids, mask in zip(rows["input_ids"], rows["attention_mask"], strict=True)
            for row in [ids[mask.bool()].tolist()]
            for end in range(1, len(row) + 1)
        }
    )
