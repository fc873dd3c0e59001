# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Chunked attention on a tree: a token sees the tokens of its path in its chunk of depths."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor


def sees(query_depth: Tensor, key_depth: Tensor, chunk: int | Tensor) -> Tensor:
    """Which keys of its path a query sees; for the dense mask and the `mask_mod`."""
    return query_depth // chunk == key_depth // chunk


def block_bounds(
    query_low: Tensor, query_high: Tensor, key_low: Tensor, key_high: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """
    Pairs of blocks, by the smallest and the largest depth of each, of which some pair may be visible (their ranges of
    chunks meet), and those of which all are (all depths are of one chunk).
    """
    query_low, query_high, key_low, key_high = (x // chunk for x in (query_low, query_high, key_low, key_high))
    some = (query_low <= key_high) & (key_low <= query_high)
    return some, (query_low == query_high) & (key_low == key_high) & (query_low == key_low)


def keys_seen(depth: npt.NDArray[np.int64], chunk: int) -> npt.NDArray[np.int64]:
    """How many keys a query at this depth sees; for the FLOP count."""
    return depth % chunk + 1


def asked_by(config: Any, local_size: int | None, is_overlaid: bool) -> int | None:
    """The chunk size of a call of the mask function: a size that is the config's `attention_chunk_size`."""
    is_chunk = local_size is not None and local_size == getattr(config, "attention_chunk_size", None)
    return local_size if is_chunk and not is_overlaid else None


def size_in(config: Any) -> int | None:
    """The chunk size of a model's chunked layers, if it has any."""
    types = getattr(config, "layer_types", None) or []
    return config.attention_chunk_size if "chunked_attention" in types else None


def layers_in(config: Any) -> int:
    """How many layers of a model that has such layers these are."""
    return list(config.layer_types).count("chunked_attention")
