# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Random numbers without a state: each is a hash of a seed, what the draw is for, and a counter.

The same everywhere: in any batch, order and process, on any device, with any version of torch. Torch's own CPU
generators read only 32 bits of a seed, and draw on the state that earlier draws left. Cost: ten integer operations per
number.
"""

from __future__ import annotations

import torch

# Constants of the splitmix64 generator, as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


def noise_seeds(sample_index: torch.Tensor, *salts: int) -> torch.Tensor:
    """
    One seed per sample, from its index and whatever else the noise should depend on.

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
        # Mixed once more than the salt: index 3 in epoch 5 is not index 5 in epoch 3.
        seeds = _mix(_mix(seeds) + _GOLDEN + _mix(torch.full_like(seeds, salt)))
    return seeds


def uniforms(seeds: torch.Tensor, kind: int, counters: torch.Tensor) -> torch.Tensor:
    """Numbers in (0, 1), float64, one per sample and counter: the splitmix64 sequences that the seeds start."""
    starts = _mix(_mix(seeds.to(counters.device)) + kind)[:, None]
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
