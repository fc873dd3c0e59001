# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The noise of diffusion language models: which supervised tokens are masked or replaced, with which probability.

Random numbers have no state: each is a hash of a seed, of the purpose of the draw, and of a counter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DEFAULT_EPS = 1e-3
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


def corrupt_uniform(
    input_ids: torch.Tensor,
    supervised: torch.Tensor,
    *,
    mask_token_id: int,
    seeds: torch.Tensor,
    eps: float = DEFAULT_EPS,
    block_size: int | None = None,
    block_start: torch.Tensor | None = None,
) -> Corrupted:
    """
    Mask each supervised token with probability `p = (1 - eps) t + eps`, `t ~ U[0, 1)` per sequence or block.

    Args:
        input_ids (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, padded at the end.
        supervised (`torch.Tensor` of shape `(B, L)`): Not 0 where a token may be masked: the collator's `loss_mask`.
        mask_token_id (`int`): Id of the mask token.
        seeds (`torch.Tensor` of shape `(B,)`, int64): One per sample, see [`noise_seeds`].
        eps (`float`, *optional*, defaults to `1e-3`): Lowest probability, above 0 and at most 1.
        block_size (`int`, *optional*): Draw t per block of this many tokens instead of per sequence.
        block_start (`torch.Tensor` of shape `(B,)`, int64, *optional*): Where each sample's first block starts, by
            default 0. The tokens before it form one block. Pass the response's start for response windows.

    Returns:
        [`Corrupted`].

    Raises:
        `ValueError`: If shapes don't fit or a number is out of range.

    Example:

    ```python
    >>> import torch
    >>> ids, supervised = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 1, 1, 1]])
    >>> corrupt_uniform(ids, supervised, mask_token_id=9, seeds=torch.tensor([0]), eps=1.0).input_ids
    tensor([[5, 9, 9, 9]])

    ```
    """
    supervised, positions, _, p = _prepared(input_ids, supervised, seeds, eps, block_size, block_start)
    is_masked = supervised & (uniforms(seeds, _CHOICE, positions) < p)
    return Corrupted(input_ids.masked_fill(is_masked, mask_token_id), is_masked, p)


def corrupt_blockwise(
    input_ids: torch.Tensor,
    supervised: torch.Tensor,
    *,
    mask_token_id: int,
    seeds: torch.Tensor,
    eps: float = DEFAULT_EPS,
    half_life: float = 0.25,
    block_size: int | None = None,
    block_start: torch.Tensor | None = None,
) -> Corrupted:
    """
    Mask exactly `round(m * n)` of the n supervised tokens of each sequence or block, the later ones more often.

    `m ~ U(eps, 1)` per sequence or block, and is the p of all its tokens. The i-th supervised token is drawn without
    replacement with weight `exp(lambda (1 - m) i)`, `lambda = ln 2 / (half_life * n)`: the weight of a token doubles
    every `half_life * n` tokens as m goes to 0, and all weigh the same as m goes to 1. Halves round to even. A
    sequence masks at least one supervised token if it has any; a block may mask none.

    Args:
        input_ids (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, padded at the end.
        supervised (`torch.Tensor` of shape `(B, L)`): Not 0 where a token may be masked: the collator's `loss_mask`.
        mask_token_id (`int`): Id of the mask token.
        seeds (`torch.Tensor` of shape `(B,)`, int64): One per sample, see [`noise_seeds`].
        eps (`float`, *optional*, defaults to `1e-3`): Lowest m, above 0 and at most 1.
        half_life (`float`, *optional*, defaults to `0.25`): Share of the tokens after which the weight doubles.
        block_size (`int`, *optional*): Draw m and count per block of this many tokens instead of per sequence.
        block_start (`torch.Tensor` of shape `(B,)`, int64, *optional*): See [`corrupt_uniform`].

    Returns:
        [`Corrupted`].

    Raises:
        `ValueError`: If shapes don't fit or a number is out of range.

    Example:

    ```python
    >>> import torch
    >>> ids, supervised = torch.arange(10)[None], torch.ones(1, 10)
    >>> corrupted = corrupt_blockwise(ids, supervised, mask_token_id=99, seeds=torch.tensor([0]))
    >>> corrupted.is_masked.sum().item() == round(corrupted.p[0, 0].item() * 10)
    True

    ```
    """
    if not half_life > 0:
        raise ValueError(f"`half_life` must be above 0, got {half_life}.")
    supervised, positions, blocks, m = _prepared(input_ids, supervised, seeds, eps, block_size, block_start)
    block_starts = torch.searchsorted(blocks, blocks)
    supervised_before = torch.nn.functional.pad(supervised.long().cumsum(1), (1, 0))
    block_ends = torch.searchsorted(blocks, blocks, right=True)
    counts = supervised_before.gather(1, block_ends) - supervised_before.gather(1, block_starts)
    num_masked = torch.round(m.double() * counts).long()
    if block_size is None:
        num_masked = torch.maximum(num_masked, counts.clamp(max=1))

    # The `num_masked` largest of log weight + Gumbel noise are a draw without replacement.
    i = supervised_before[:, 1:]  # counts from the start of the sequence: inside a block only differences matter
    slope = math.log(2) / (half_life * counts.clamp(min=1).double()) * (1 - m.double())
    gumbel = -torch.log(-torch.log(uniforms(seeds, _CHOICE, positions)))
    scores = (slope * i + gumbel).masked_fill(~supervised, -torch.inf)
    order = scores.argsort(dim=1, descending=True, stable=True)
    if block_size is not None:  # a stable sort by block keeps the order inside each
        order = order.gather(1, blocks.gather(1, order).argsort(dim=1, stable=True))
    ranks = torch.empty_like(order).scatter_(1, order, positions.expand_as(order)) - block_starts
    is_masked = supervised & (ranks < num_masked)
    return Corrupted(input_ids.masked_fill(is_masked, mask_token_id), is_masked, m)


def corrupt_uniform_random(
    input_ids: torch.Tensor,
    supervised: torch.Tensor,
    *,
    vocab_size: int,
    seeds: torch.Tensor,
    eps: float = DEFAULT_EPS,
    block_size: int | None = None,
    block_start: torch.Tensor | None = None,
) -> Corrupted:
    """
    Replace each supervised token with probability `t ~ U(eps, 1)` by a token drawn from the whole vocabulary.

    The replacement may be the token itself; `is_masked` counts it. p is 1: this noise has no weighted loss.

    Args:
        input_ids (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, padded at the end.
        supervised (`torch.Tensor` of shape `(B, L)`): Not 0 where a token may change: the collator's `loss_mask`.
        vocab_size (`int`): Replacements are drawn from `[0, vocab_size)`.
        seeds (`torch.Tensor` of shape `(B,)`, int64): One per sample, see [`noise_seeds`].
        eps (`float`, *optional*, defaults to `1e-3`): Lowest t, above 0 and at most 1.
        block_size (`int`, *optional*): Draw t per block of this many tokens instead of per sequence.
        block_start (`torch.Tensor` of shape `(B,)`, int64, *optional*): See [`corrupt_uniform`].

    Returns:
        [`Corrupted`].

    Raises:
        `ValueError`: If shapes don't fit or a number is out of range.

    Example:

    ```python
    >>> import torch
    >>> ids, supervised = torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 1]])
    >>> corrupt_uniform_random(ids, supervised, vocab_size=1, seeds=torch.tensor([0]), eps=1.0).input_ids
    tensor([[5, 6, 0]])

    ```
    """
    if vocab_size < 1:
        raise ValueError(f"`vocab_size` must be at least 1, got {vocab_size}.")
    supervised, positions, _, t = _prepared(input_ids, supervised, seeds, eps, block_size, block_start)
    is_masked = supervised & (uniforms(seeds, _CHOICE, positions) < t)
    tokens = (uniforms(seeds, _TOKEN, positions) * vocab_size).long()
    return Corrupted(torch.where(is_masked, tokens, input_ids), is_masked, torch.ones_like(t))


def corrupt_all_masked(input_ids: torch.Tensor, supervised: torch.Tensor, *, mask_token_id: int) -> Corrupted:
    """
    Mask every supervised token; p is 1.

    Args:
        input_ids (`torch.Tensor` of shape `(B, L)`, int64): Clean ids.
        supervised (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is masked: the collator's `loss_mask`.
        mask_token_id (`int`): Id of the mask token.

    Returns:
        [`Corrupted`].

    Example:

    ```python
    >>> import torch
    >>> corrupt_all_masked(torch.tensor([[5, 6, 7]]), torch.tensor([[0, 1, 1]]), mask_token_id=9).input_ids
    tensor([[5, 9, 9]])

    ```
    """
    supervised = _checked_mask(input_ids, supervised)
    p = torch.ones(input_ids.shape, dtype=torch.float32, device=input_ids.device)
    return Corrupted(input_ids.masked_fill(supervised, mask_token_id), supervised, p)


def _prepared(
    input_ids: torch.Tensor,
    supervised: torch.Tensor,
    seeds: torch.Tensor,
    eps: float,
    block_size: int | None,
    block_start: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Checks the arguments of a kind of noise, and draws its level `(1 - eps) u + eps` per sequence or block.

    Returns:
        `tuple`: the supervised mask `(B, L)`, bool; the positions `(1, L)`; the block of each position `(B, L)`, in
        ascending order, 0 before the first block or without blocks; the level of each position `(B, L)`, float32.
    """
    supervised = _checked_mask(input_ids, supervised)
    if not 0 < eps <= 1:
        raise ValueError(f"`eps` must be above 0 and at most 1, got {eps}: the loss divides by probabilities >= eps.")
    if seeds.shape != input_ids.shape[:1] or seeds.dtype != torch.int64:
        raise ValueError(
            f"`seeds` must be int64 of shape ({len(input_ids)},), got {seeds.dtype} of shape {tuple(seeds.shape)}: "
            "pass one seed per sample, as `noise_seeds` makes them."
        )
    if block_size is not None and block_size < 1:
        raise ValueError(f"`block_size` must be at least 1, got {block_size}: pass None for whole sequences.")
    if block_start is not None and block_size is None:
        raise ValueError("`block_start` is given without `block_size`: pass both or neither.")
    if block_start is not None and block_start.shape != input_ids.shape[:1]:
        raise ValueError(f"`block_start` must have the shape ({len(input_ids)},), got {tuple(block_start.shape)}.")
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    blocks = torch.zeros_like(input_ids)
    if block_size is not None:
        start = blocks[:, :1] if block_start is None else block_start.to(input_ids.device)[:, None]
        blocks = torch.div(positions - start, block_size, rounding_mode="floor").clamp(min=-1) + 1
    levels = (1 - eps) * uniforms(seeds, _LEVEL, blocks) + eps
    return supervised, positions, blocks, levels.float()


def _checked_mask(input_ids: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    if input_ids.ndim != 2 or input_ids.dtype != torch.int64:
        raise ValueError(
            f"`input_ids` must be int64 of shape (B, L), got {input_ids.dtype} of shape {tuple(input_ids.shape)}."
        )
    if supervised.shape != input_ids.shape:
        raise ValueError(
            f"`supervised` must have the shape {tuple(input_ids.shape)} of `input_ids`, got {tuple(supervised.shape)}."
        )
    return supervised.to(input_ids.device) != 0
