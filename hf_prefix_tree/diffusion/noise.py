# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The noise of [`DiffusionSFTTrainer`]: which kind, in which blocks, from which seeds. Cost: see `corruption.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from hf_prefix_tree.collators.diffusion import SAMPLE_INDEX
from hf_prefix_tree.diffusion.corruption import (
    Noised,
    corrupt_all_masked,
    corrupt_blockwise,
    corrupt_uniform,
    corrupt_uniform_random,
)
from hf_prefix_tree.diffusion.draws import noise_seeds
from hf_prefix_tree.diffusion.objective import supervised_tokens, window_starts

if TYPE_CHECKING:
    from hf_prefix_tree.diffusion.config import DiffusionSFTConfig

EVALUATION = -1  # in the place of the epoch, from which training draws its noise


def noise_kind(args: DiffusionSFTConfig, is_training: bool) -> str:
    """The `corruption` of training; evaluation draws `"uniform"` for `"blockwise"`, which has no bound of the NLL."""
    return "uniform" if args.corruption == "blockwise" and not is_training else args.corruption


def bounds_nll(kind: str) -> bool:
    """
    Whether the noised tokens' `nll / p`, in expectation over the noise, bounds the negative log-likelihood: for
    `"blockwise"` p is not each token's own probability, and `"random"` noise has none.
    """
    return kind in ("uniform", "all_masked")


def draw_noise(
    batch: Mapping[str, torch.Tensor],
    args: DiffusionSFTConfig,
    kind: str,
    salts: tuple[int, ...],
    *,
    mask_token_id: int | None,
    vocab_size: int,
) -> Noised:
    """
    The noise of a micro-batch.

    Args:
        batch (`Mapping[str, torch.Tensor]`): Of [`DataCollatorForDiffusionLM`], with `sample_index`.
        args ([`DiffusionSFTConfig`]): The configuration.
        kind (`str`): What [`noise_kind`] says.
        salts (`tuple` of `int`): What the noise depends on besides the sample and `args.seed`: the pass over the
            dataset, or `EVALUATION` and the number of the draw.
        mask_token_id (`int`, *optional*): The token that hides others; `None` for `"random"` noise.
        vocab_size (`int`): For `"random"` noise: how many tokens there are to draw from.

    Returns:
        [`Noised`].

    Raises:
        `ValueError`: If the batch has no `sample_index`.
    """
    if SAMPLE_INDEX not in batch:
        raise ValueError(
            f"The batch has no `{SAMPLE_INDEX}`, on which the noise depends: add a column of that name, counting "
            "from 0, or leave out `skip_prepare_dataset`."
        )
    ids, supervised = batch["input_ids"], supervised_tokens(batch)
    options: dict[str, Any] = {"seeds": noise_seeds(batch[SAMPLE_INDEX], args.seed, *salts), "eps": args.noise_eps}
    if args.objective != "mdlm":
        options["block_size"] = args.block_size
        options["block_start"] = window_starts(supervised) if args.response_window else None
    if kind == "random":
        return corrupt_uniform_random(ids, supervised, vocab_size=vocab_size, **options)
    assert mask_token_id is not None  # only "random" noise goes without
    if kind == "all_masked":
        return corrupt_all_masked(ids, supervised, mask_token_id=mask_token_id)
    if kind == "blockwise":
        options["half_life"] = args.half_life
        return corrupt_blockwise(ids, supervised, mask_token_id=mask_token_id, **options)
    return corrupt_uniform(ids, supervised, mask_token_id=mask_token_id, **options)


class PassCounter(TrainerCallback):
    """
    Counts the passes over the dataset. `state.epoch` would do, but for a stream without a length it still names the
    last pass when the next one begins, and a resumed training begins in the middle of one.
    """

    def __init__(self) -> None:
        self.epoch = 0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.epoch = -1

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epoch = max(int(state.epoch or 0), self.epoch + 1)
