# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The micro-batches of one optimizer step: trees packed into rows, or the same branches packed into rows.

A loss takes the model and returns what one micro-batch adds to the loss of the step, which is the same for both.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence

import torch
from transformers import Qwen3Config

from benchmarks import packed
from benchmarks.common import measure, relative_error
from hf_prefix_tree.attention.backend import AttentionCall, choose_backend
from hf_prefix_tree.attention.mask import tree_block_mask
from hf_prefix_tree.batch import BLOCK_SIZE, DEPTH, IGNORE_INDEX, concatenate_trees, gather_supervised
from hf_prefix_tree.tree import PrefixTree

Loss = Callable[[torch.nn.Module], torch.Tensor]


def pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: the indices in each bin, largest first. What exceeds the budget gets a bin of its own."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        at = next((i for i, left in enumerate(room) if sizes[index] <= left), None)
        if at is None:
            at = len(bins)
            bins.append([])
            room.append(budget)
        bins[at].append(index)
        room[at] -= sizes[index]
    return bins


def _divisor(trees: list[PrefixTree]) -> float:
    return sum(tree.weights.sum() for tree in trees)


def _weighted_sum(log_probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return -(log_probs.double() * weights).sum()


class FoldedStep:
    """The micro-batches of a step on trees. The kernel is the project's choice."""

    def __init__(self, trees: list[PrefixTree], budget: int, device: torch.device) -> None:
        divisor = _divisor(trees)
        self.losses: list[Loss] = []
        self.row_tokens = 0
        for own in pack([len(tree) for tree in trees], budget):
            row = concatenate_trees([trees[i] for i in own], pad_token_id=0)
            self.row_tokens = max(self.row_tokens, row["input_ids"].shape[1])
            self.losses.append(self._loss({name: value.to(device) for name, value in row.items()}, divisor))
            if row["input_ids"].shape[1] == self.row_tokens:
                self.longest = row["prefix_tree"].to(device)

    def kernel(self, backend: str, config: Qwen3Config, dtype: torch.dtype) -> str:
        """What the longest row runs under this `attn_backend`."""
        call = AttentionCall.of(config, self.longest.device, dtype, self.row_tokens)
        return choose_backend(backend, call, functools.partial(tree_block_mask, self.longest))

    @staticmethod
    def _loss(row: dict[str, torch.Tensor], divisor: float) -> Loss:
        def loss(model: torch.nn.Module) -> torch.Tensor:
            weights = gather_supervised(row["prefix_tree"], row["labels"], row["loss_weights"]).weights
            return _weighted_sum(model(**row, fused_lm_head=True).log_probs, weights) / divisor

        return loss


class BranchStep:
    """The micro-batches of a step on branches."""

    def __init__(self, trees: list[PrefixTree], budget: int, device: torch.device) -> None:
        branches = [(branch, tree.num_branches) for tree in trees for branch in tree.branches()]
        divisor = _divisor(trees)
        self.rows: list[packed.Packed] = []
        self.losses: list[Loss] = []
        self.row_tokens = 0
        for own in pack([len(branch) for branch, _ in branches], budget):
            lengths = [len(branches[i][0]) for i in own]
            padding = -sum(lengths) % BLOCK_SIZE
            row = packed.Packed.of(lengths + [padding] * (padding > 0), device)
            fill = torch.zeros(padding)
            ids = torch.cat([*(torch.tensor(branches[i][0].input_ids) for i in own), fill.long()])
            weights = torch.cat([*(torch.tensor(branches[i][0].weights / branches[i][1]) for i in own), fill.double()])
            self.rows.append(row)
            self.row_tokens = max(self.row_tokens, sum(row.lengths))
            self.losses.append(self._loss(ids[None].to(device), weights[None].to(device), row, divisor))

    @staticmethod
    def _loss(ids: torch.Tensor, weights: torch.Tensor, row: packed.Packed, divisor: float) -> Loss:
        batch = {
            "input_ids": ids,
            "labels": torch.where(weights > 0, ids, IGNORE_INDEX),
            "position_ids": row.context.prefix_tree[:, DEPTH].long(),
        }

        def loss(model: torch.nn.Module) -> torch.Tensor:
            output = model(**batch, packed=row, fused_lm_head=True)
            return _weighted_sum(output.log_probs, weights[:, 1:]) / divisor

        return loss

    def time_kernels(self, config: Qwen3Config, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
        """Milliseconds of one layer's attention over all rows, forward and backward, with every kernel installed."""
        kernels = packed.installed_kernels(device)
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        make = functools.partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
        leaves = [[make(1, n, sum(row.lengths), config.head_dim) for n in heads] for row in self.rows]

        def attend() -> list[torch.Tensor]:
            found = []
            for row, own in zip(self.rows, leaves, strict=True):
                output, _ = packed.packed_attention(torch.nn.Module(), *own, None, packed=row)
                found = [output, *torch.autograd.grad(output, own, output)]
            return found

        times: dict[str, float] = {}
        reference: list[torch.Tensor] = []
        for kernel in kernels:
            self.use(kernel)
            try:
                found = attend()
                times[kernel] = measure(attend, device, warmup=0, seconds=0.1).ms
            except (RuntimeError, ImportError) as error:
                print(f"kernel {kernel} does not run here: {str(error).splitlines()[0]}", file=sys.stderr)
                continue
            reference = reference or found
            error = max(relative_error(x, y) for x, y in zip(found, reference, strict=True))
            if not error < 2e-2:
                raise RuntimeError(f"kernel {kernel} differs from {min(times)} by {error:.1e}")
        return times

    def use(self, kernel: str) -> None:
        packed.select_flash(kernel)
        for row in self.rows:
            row.kernel = kernel
