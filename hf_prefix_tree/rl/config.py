# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The configurations of the RL trainers: TRL's, plus how rows are folded. TRL's own serve, too, with the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from trl import DPOConfig, GRPOConfig, KTOConfig, RLOOConfig

from hf_prefix_tree.modeling.attention.backend import ATTN_BACKENDS
from hf_prefix_tree.training.checks import check_config, check_streaming_config
from hf_prefix_tree.training.options import option_field

MIN_REUSE = 1.2  # on an H200 a folded update takes 7 % longer than a stock one at 1.1, and half as long at 4


@dataclass
class FoldingOptions:
    """
    Options of every trainer that folds padded rows.

    Args:
        min_reuse (`float`, *optional*, defaults to `1.2`):
            Calls that share less run unfolded: tokens of the rows divided by tokens of their tree.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            See [`prepare_model`].
        max_row_tokens (`int`, *optional*, defaults to `0`):
            Tokens that one forward may hold. GRPO and RLOO combine completions up to it; those of TRL's micro-batch,
            padding included, are always allowed. With `overflow="stream"` no forward has more.
        overflow (`str`, *optional*, defaults to `"split"`):
            What happens to rows whose tree has more than `max_row_tokens` tokens. `"split"`: forwards of fewer rows,
            each with the prefix again; no fewer than TRL's micro-batch, which is what DPO and KTO always compute.
            `"stream"`: the whole tree goes through the model in passes of at most so many tokens, with the activations
            of one path in memory, twice if it is trained: without gradient for the loss, and for the gradients.
    """

    min_reuse: float = option_field(MIN_REUSE, "Calls with fewer tokens of rows per token of their tree run unfolded.")
    attn_backend: str = option_field("auto", "Attention of the tree path.", ATTN_BACKENDS)
    max_row_tokens: int = option_field(0, "Tokens that one forward may hold, if memory allows more than TRL's.")
    overflow: str = option_field(
        "split", "What happens to rows whose tree has more than `max_row_tokens` tokens.", ("split", "stream")
    )

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        check_config(self, at_least={"max_row_tokens": 0})
        check_streaming_config(self, "max_row_tokens")
        if self.max_row_tokens and self.overflow == "split" and not hasattr(self, "num_generations"):
            raise ValueError(
                f"`max_row_tokens={self.max_row_tokens}` has no meaning here without `overflow='stream'`, as forwards "
                "are TRL's micro-batches: set `per_device_train_batch_size`."
            )


@dataclass
class TreeDPOConfig(FoldingOptions, DPOConfig):
    """Configuration of [`TreeDPOTrainer`]: TRL's `DPOConfig` with [`FoldingOptions`]."""


@dataclass
class TreeKTOConfig(FoldingOptions, KTOConfig):
    """Configuration of [`TreeKTOTrainer`]: TRL's `KTOConfig` with [`FoldingOptions`]."""


@dataclass
class TreeGRPOConfig(FoldingOptions, GRPOConfig):
    """
    Configuration of [`TreeGRPOTrainer`]: TRL's `GRPOConfig` with [`FoldingOptions`], and a form of rollouts.

    Args:
        rollout_rows (`str`, *optional*, defaults to `"one"`):
            What a rollout with `tools` or an `environment_factory` is trained on. `"one"` as in TRL: tool results are
            appended to one sequence, under a template that keeps earlier turns. `"as_sampled"`: each turn is sampled
            after the model's chat template over the messages so far, as a serving loop does, and trained on the tokens
            that it was sampled from and after.
    """

    rollout_rows: str = option_field(
        "one", "Sequences that a rollout with tools is trained on.", ("one", "as_sampled")
    )


@dataclass
class TreeRLOOConfig(FoldingOptions, RLOOConfig):
    """Configuration of [`TreeRLOOTrainer`]: TRL's `RLOOConfig` with [`FoldingOptions`]."""
