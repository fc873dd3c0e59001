# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The micro-batches of one optimizer step: trees packed into sequences, or the same branches packed into sequences.

A loss takes the model and returns the contribution of one micro-batch to the loss of the step, which is equal for
both. It begins with copying its batch to the GPU, which waits for running kernels, as in Trainer.

Recurrent layers get the starts of branches through `cu_seq_lens_q`, as in Transformers, and restart their scan there.
The convolution before the scan reads across the boundary, unless `causal-conv1d` is installed. Every branch is
therefore followed by as many masked tokens as the convolution reads, 3 for Qwen3.5. Without a scan that takes
boundaries, every branch is a separate sequence.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks import packed
from benchmarks.common import measure, relative_error
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.attention.backend import AttentionCall, choose_backend
from hf_prefix_tree.modeling.attention.masks.causal import tree_block_mask
from hf_prefix_tree.modeling.batch import BLOCK_SIZE, DEPTH, WEIGHTED_BY_CALLER, concatenate_trees, gather_supervised
from hf_prefix_tree.tree.prefix_tree import PrefixTree

Loss = Callable[[torch.nn.Module], torch.Tensor]


def pack(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """First-fit decreasing: the indices in each bin, largest first. An item above the budget gets a separate bin."""
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


def convolution_gap(config: PreTrainedConfig) -> int:
    """The number of previous tokens that the convolution of the recurrent layers reads, 0 without such layers."""
    hybrid = "linear_attention" in (getattr(config, "layer_types", None) or ())
    return config.linear_conv_kernel_dim - 1 if hybrid else 0


def scan_starts_anew(config: PreTrainedConfig, device: torch.device) -> bool:
    """Whether the gated delta rule that Transformers runs here follows `cu_seqlens`: its fast kernels do."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads, dims = config.linear_num_value_heads, (config.linear_key_head_dim, config.linear_value_head_dim)
    query, key, value = (torch.randn(1, 256, heads, dim, device=device, dtype=dtype) for dim in (dims[0], *dims))
    decay = torch.full((1, 256, heads), -0.01, device=device)
    beta = torch.full((1, 256, heads), 0.5, device=device, dtype=dtype)
    starts = torch.tensor([0, 100, 256], device=device)
    changed = value.clone()
    changed[:, :100] = 0.0
    outputs = []
    for values in (value, changed):
        scan = functools.partial(modeling_qwen3_5.torch_chunk_gated_delta_rule, query, key, values, g=decay, beta=beta)
        try:
            with torch.no_grad():
                outputs.append(scan(cu_seqlens=starts, use_qk_l2norm_in_kernel=True)[0][:, 100:])
        except ValueError:  # Transformers 5.24 raises without those kernels; earlier versions silently scan on
            return False
    return relative_error(*outputs) < 1e-3  # a state carried across the boundary gives 0.3


def _arriving(batch: dict[str, torch.Tensor], device: torch.device) -> Callable[[], dict[str, torch.Tensor]]:
    """Returns a function that copies a batch from the host's memory, pinned as by Trainer's data loader."""
    if device.type == "cuda":
        batch = {name: value.pin_memory() for name, value in batch.items()}
    return lambda: {name: value.to(device) for name, value in batch.items()}


def _divisor(trees: list[PrefixTree]) -> float:
    return sum(tree.weights.sum() for tree in trees)


def _weighted_sum(log_probs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return -(log_probs.double() * weights).sum()


class FoldedStep:
    """The micro-batches of a step on trees, with the kernel that the project chooses."""

    def __init__(self, trees: list[PrefixTree], budget: int, device: torch.device) -> None:
        divisor = _divisor(trees)
        self.losses: list[Loss] = []
        self.row_tokens = 0
        for indices in pack([len(tree) for tree in trees], budget):
            row = concatenate_trees([trees[i] for i in indices], pad_token_id=0)
            self.row_tokens = max(self.row_tokens, row["input_ids"].shape[1])
            self.losses.append(self._loss(row, divisor, device))
            if row["input_ids"].shape[1] == self.row_tokens:
                self.longest = row["prefix_tree"].to(device)

    def kernel(self, backend: str, config: PreTrainedConfig, dtype: torch.dtype) -> str:
        """The kernel of the longest packed sequence under this `attn_backend`."""
        call = AttentionCall.of(config, self.longest.device, dtype, self.row_tokens)
        return choose_backend(backend, call, functools.partial(tree_block_mask, self.longest))

    @staticmethod
    def _loss(row: dict[str, torch.Tensor], divisor: float, device: torch.device) -> Loss:
        weights = gather_supervised(row["prefix_tree"], row["labels"], row["loss_weights"]).weights.to(device)
        arrive = _arriving(row, device)

        def loss(model: torch.nn.Module) -> torch.Tensor:
            outputs = model(**arrive(), fused_lm_head=True, **{WEIGHTED_BY_CALLER: True})
            return _weighted_sum(outputs.log_probs, weights) / divisor

        return loss


class BranchStep:
    """The micro-batches of a step on branches; with a `gap` of masked tokens after each for recurrent layers."""

    def __init__(self, trees: list[PrefixTree], budget: int, device: torch.device, gap: int = 0) -> None:
        branches = [(branch, tree.num_branches) for tree in trees for branch in tree.branches()]
        divisor = _divisor(trees)
        self.rows: list[packed.Packed] = []
        self.losses: list[Loss] = []
        self.row_tokens = 0
        for indices in pack([len(branch) + gap for branch, _ in branches], budget):
            lengths = [len(branches[i][0]) + gap for i in indices]
            padding = -sum(lengths) % BLOCK_SIZE
            row = packed.Packed.of(lengths + [padding] * (padding > 0), device)
            ids = torch.zeros(1, sum(row.lengths), dtype=torch.int64)
            weights = torch.zeros(1, sum(row.lengths), dtype=torch.float64)
            is_real = torch.zeros(1, sum(row.lengths), dtype=torch.bool)
            start = 0
            for length, (branch, num_branches) in zip(lengths, (branches[i] for i in indices), strict=True):
                here = (0, slice(start, start + len(branch)))
                ids[here] = torch.tensor(branch.input_ids)
                weights[here] = torch.tensor(branch.weights / num_branches)
                is_real[here] = True
                start += length
            recurrent: dict[str, Any] = {}
            if gap:
                masks = {"full_attention": None, "linear_attention": is_real.to(device)}
                recurrent = {"attention_mask": masks, "cu_seq_lens_q": row.starts.long()}
            self.rows.append(row)
            self.row_tokens = max(self.row_tokens, sum(row.lengths))
            self.losses.append(self._loss(ids, weights, row, divisor, recurrent, device))

    @staticmethod
    def _loss(
        ids: torch.Tensor,
        weights: torch.Tensor,
        row: packed.Packed,
        divisor: float,
        recurrent: dict[str, Any],
        device: torch.device,
    ) -> Loss:
        batch = {
            "input_ids": ids,
            "labels": torch.where(weights > 0, ids, IGNORE_INDEX),
            "position_ids": row.context.prefix_tree[:, DEPTH].long().cpu(),
        }
        arrive, weights = _arriving(batch, device), weights[:, 1:].to(device)

        def loss(model: torch.nn.Module) -> torch.Tensor:
            output = model(**arrive(), **recurrent, packed=row, fused_lm_head=True)
            return _weighted_sum(output.log_probs, weights) / divisor

        return loss

    def time_kernels(
        self,
        config: PreTrainedConfig,
        device: torch.device,
        dtype: torch.dtype,
        only: Sequence[str] | None = None,
    ) -> dict[str, float]:
        """
        Milliseconds of one layer's attention over all packed sequences, forward and backward, with every installed
        kernel (or those of `only`); infinite for a kernel that does not run.
        """
        kernels = [kernel for kernel in packed.installed_kernels(device) if only is None or kernel in only]
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        make = functools.partial(torch.randn, device=device, dtype=dtype, requires_grad=True)
        leaves = [[make(1, n, sum(row.lengths), config.head_dim) for n in heads] for row in self.rows]

        def attend() -> list[torch.Tensor]:
            tensors = []
            for row, inputs in zip(self.rows, leaves, strict=True):
                output, _ = packed.packed_attention(torch.nn.Module(), *inputs, None, packed=row)
                tensors = [output, *torch.autograd.grad(output, inputs, output)]
            return tensors

        times: dict[str, float] = {}
        reference: list[torch.Tensor] = []
        for kernel in kernels:
            try:
                self.use(kernel)
                tensors = attend()
                times[kernel] = measure(attend, device, warmup=0, seconds=0.1).ms
            except Exception as error:  # any error: kernels refuse a head dimension in different ways
                times[kernel] = math.inf
                reason = (str(error).splitlines() or [""])[0]
                print(f"kernel {kernel} does not run here: {type(error).__name__}: {reason}", file=sys.stderr)
                continue
            reference = reference or tensors
            error = max(relative_error(x, y) for x, y in zip(tensors, reference, strict=True))
            if not error < 2e-2:
                raise RuntimeError(f"kernel {kernel} differs from the first by {error:.1e}")
        if all(map(math.isinf, times.values())):
            raise RuntimeError(f"none of the kernels {', '.join(only or kernels)} runs here")
        return times

    def use(self, kernel: str) -> None:
        for row in self.rows:
            row.kernel = kernel
