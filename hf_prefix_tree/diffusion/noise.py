# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The noise of diffusion language models: which supervised tokens are masked or replaced, with which probability.

Random numbers have no state: each is a hash of a seed, of the purpose of the draw, and of a counter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

CORRUPTIONS = ("uniform", "blockwise", "random", "all_masked")
# Purposes of a draw. Draws for different purposes are independent.
_LEVEL, _CHOICE, _TOKEN = range(3)
# Constants of the splitmix64 generator, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def noise_seeds(sample_index: torch.Tensor, *salts: int) -> torch.Tensor:
    """
    One seed per sample, from its index and everything else that the noise should depend on.

    Args:
        sample_index (`torch.Tensor` of shape `(B,)`, int64): Index of each sample in its dataset.
        salts (`int`): For example the training's seed and the epoch: each value and each order gives other noise.

    Returns:
        `torch.Tensor` of shape `(B,)`, int64.

    Example:

    ```python
    >>> import torch
    >>> noise_seeds(torch.tensor([0, 1]), 42, 3).tolist() == noise_seeds(torch.tensor([1, 0]), 42, 3).flip(0).tolist()
    True

    ```
    """
    seeds = _mix(sample_index.to(torch.int64))
    for salt in salts:
        # Mixed once more than the salt, so that index 3 in epoch 5 differs from index 5 in epoch 3.
        seeds = _mix(_mix(seeds) + _GOLDEN + _mix(torch.full_like(seeds, salt)))
    return seeds


def uniforms(seeds: torch.Tensor, purpose: int, counters: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1), float64, one per sample and counter: the splitmix64 sequences that the seeds start."""
    starts = _mix(_mix(seeds.to(counters.device)) + purpose)[:, None]
    bits = _mix(starts + (counters + 1) * _GOLDEN)
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 64-bit integers in which every bit of the input moves about half of the output's."""
    x = (x ^ _shift_right(x, 30)) * _FIRST
    x = (x ^ _shift_right(x, 27)) * _SECOND
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, by: int) -> torch.Tensor:
    """`x >> by` that fills with zeros, as for unsigned integers."""
    return (x >> by) & (2 ** (64 - by) - 1)


@dataclass
class Corrupted:
    """A corrupted batch; all of shape `(B, L)`, on the device of the clean ids."""

    input_ids: torch.Tensor  # int64: the ids that the model reads
    is_masked: torch.Tensor  # bool: masked or replaced; only supervised positions
    p: torch.Tensor  # float32: the probability of `is_masked`, by which the MDLM loss divides


def window_starts(supervised: torch.Tensor) -> torch.Tensor:
    """
    Where the response of each sample begins: its first supervised token, or the end of a sequence without one.

    Args:
        supervised (`torch.Tensor` of shape `(B, L)`, bool): Which tokens are supervised.

    Returns:
        `torch.Tensor` of shape `(B,)`, int64.
    """
    return torch.where(supervised.any(dim=1), supervised.int().argmax(dim=1), supervised.shape[1])


def corrupt(
    kind: str,
    input_ids: torch.Tensor,
    supervised: torch.Tensor,
    *,
    seeds: torch.Tensor,
    mask_token_id: int | None = None,
    vocab_size: int | None = None,
    eps: float = 1e-3,
    half_life: float = 0.25,
    block_size: int | None = None,
    block_start: torch.Tensor | None = None,
) -> Corrupted:
    """
    Mask or replace supervised tokens.

    - `"uniform"`: each is masked with probability `p = (1 - eps) t + eps`, `t ~ U[0, 1)` per sequence or block.
    - `"blockwise"`: exactly `round(m * n)` of the n supervised tokens of each sequence or block are masked, the later
      ones more often. `m ~ U(eps, 1)` per sequence or block, and is the p of all its tokens. The i-th supervised token
      is drawn without replacement with weight `exp(lambda (1 - m) i)`, `lambda = ln 2 / (half_life * n)`: the weight
      of a token doubles every `half_life * n` tokens as m goes to 0, and all weigh the same as m goes to 1. Halves
      round to even. A sequence masks at least one supervised token if it has any; a block may mask none.
    - `"random"`: each is replaced with probability `t ~ U(eps, 1)` by a token drawn from the whole vocabulary, which
      may be the token itself. p is 1: this noise has no weighted loss.
    - `"all_masked"`: every one is masked; p is 1.

    Args:
        kind (`str`): One of the above.
        input_ids (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, padded at the end.
        supervised (`torch.Tensor` of shape `(B, L)`): Not 0 where a token may change: the collator's `loss_mask`.
        seeds (`torch.Tensor` of shape `(B,)`, int64): One per sample, see [`noise_seeds`].
        mask_token_id (`int`, *optional*): Id of the mask token; needed for all kinds but `"random"`.
        vocab_size (`int`, *optional*): For `"random"`: replacements are drawn from `[0, vocab_size)`.
        eps (`float`, *optional*, defaults to `1e-3`): Lowest level of noise, above 0 and at most 1.
        half_life (`float`, *optional*, defaults to `0.25`): For `"blockwise"`: share of the tokens after which the
            weight doubles.
        block_size (`int`, *optional*): Draw the level per block of this many tokens instead of per sequence.
        block_start (`torch.Tensor` of shape `(B,)`, int64, *optional*): Where each sample's first block starts, by
            default 0. The tokens before it form one block. Pass the response's start for response windows.

    Returns:
        [`Corrupted`].

    Example:

    ```python
    >>> import torch
    >>> ids, supervised = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 1]])
    >>> corrupt("uniform", ids, supervised, mask_token_id=9, seeds=torch.tensor([0]), eps=1.0).input_ids
    tensor([[5, 9, 9, 9]])

    ```
    """
    assert kind in CORRUPTIONS and seeds.shape == input_ids.shape[:1]
    supervised = supervised.to(input_ids.device) != 0
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    # The block of each position, ascending: 0 before the first block, or without blocks.
    blocks = torch.zeros_like(input_ids)
    if block_size is not None:
        start = blocks[:, :1] if block_start is None else block_start.to(input_ids.device)[:, None]
        blocks = torch.div(positions - start, block_size, rounding_mode="floor").clamp(min=-1) + 1
    level = ((1 - eps) * uniforms(seeds, _LEVEL, blocks) + eps).float()
    if kind == "all_masked":
        is_masked = supervised
    elif kind == "blockwise":
        ranks, counts = _blockwise_ranks(supervised, blocks, level, uniforms(seeds, _CHOICE, positions), half_life)
        num_masked = torch.round(level.double() * counts).long()
        if block_size is None:
            num_masked = torch.maximum(num_masked, counts.clamp(max=1))
        is_masked = supervised & (ranks < num_masked)
    else:
        is_masked = supervised & (uniforms(seeds, _CHOICE, positions) < level)
    noise: Any = mask_token_id
    if kind == "random":
        assert vocab_size is not None
        noise = (uniforms(seeds, _TOKEN, positions) * vocab_size).long()
    p = level if kind in ("uniform", "blockwise") else torch.ones_like(level)
    return Corrupted(torch.where(is_masked, noise, input_ids), is_masked, p)


def _blockwise_ranks(
    supervised: torch.Tensor, blocks: torch.Tensor, m: torch.Tensor, draws: torch.Tensor, half_life: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    The order in which `"blockwise"` noise masks the tokens of each block, and the supervised tokens of the block.

    The largest scores of log weight + Gumbel noise are a draw without replacement.
    """
    block_starts = torch.searchsorted(blocks, blocks)
    supervised_before = torch.nn.functional.pad(supervised.long().cumsum(1), (1, 0))
    block_ends = torch.searchsorted(blocks, blocks, right=True)
    counts = supervised_before.gather(1, block_ends) - supervised_before.gather(1, block_starts)
    i = supervised_before[:, 1:]  # counts from the start of the sequence: inside a block only differences matter
    slope = math.log(2) / (half_life * counts.clamp(min=1).double()) * (1 - m.double())
    scores = (slope * i - torch.log(-torch.log(draws))).masked_fill(~supervised, -torch.inf)
    order = scores.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, blocks.gather(1, order).argsort(dim=1, stable=True))  # by block, in this order inside each
    places = torch.arange(blocks.shape[1], device=blocks.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places) - block_starts, counts
