# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The sliding window of a tree: a token sees the last tokens of its path, by depth and never by index."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor


def sees(query_depth: Tensor, key_depth: Tensor, window: int | Tensor) -> Tensor:
    """Which keys of its path a query sees; for the dense mask and the `mask_mod`."""
    return query_depth - key_depth < window


def block_bounds(
    query_low: Tensor, query_high: Tensor, key_low: Tensor, key_high: Tensor, window: int
) -> tuple[Tensor, Tensor]:
    """
    Pairs of blocks, by the smallest and the largest depth of each, of which some pair may be visible (the closest
    depths are near enough), and those of which all are (the farthest are).
    """
    return query_low - key_high < window, query_high - key_low < window


def keys_seen(depth: npt.NDArray[np.int64], window: int) -> npt.NDArray[np.int64]:
    """How many keys a query at this depth sees; for the FLOP count."""
    return np.minimum(depth + 1, window)


def asked_by(config: Any, local_size: int | None, is_overlaid: bool) -> int | None:
    """The window of a call of the mask function: every size that no other kind takes."""
    return None if is_overlaid else local_size


def size_in(config: Any) -> int | None:
    """The window of a model's sliding layers, if it has any."""
    types = getattr(config, "layer_types", None) or ["sliding_attention"]
    used = getattr(config, "use_sliding_window", True) and "sliding_attention" in types
    return getattr(config, "sliding_window", None) if used else None


def layers_in(config: Any) -> int:
    """How many layers of a model that has such layers these are."""
    types = getattr(config, "layer_types", None)
    return list(types).count("sliding_attention") if types else config.num_hidden_layers
