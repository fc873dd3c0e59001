# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What [`DiffusionSFTTrainer`] settles before it trains: the collator, the token that hides others, the engine."""

from __future__ import annotations

from typing import Any

from hf_prefix_tree.batch import BLOCK_SIZE
from hf_prefix_tree.collators.diffusion import DataCollatorForDiffusionLM
from hf_prefix_tree.diffusion.config import DiffusionSFTConfig


def default_collator(args: DiffusionSFTConfig, tokenizer: Any) -> DataCollatorForDiffusionLM:
    """The collator with the numbers of `args`; on a GPU it pads to whole blocks of FlexAttention."""
    on_gpu = args.device.type == "cuda" and args.attn_backend != "sdpa"
    return DataCollatorForDiffusionLM(
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        block_size=args.block_size,
        pad_seq_len_divisible=args.pad_to_multiple_of or (BLOCK_SIZE if on_gpu else None),
        max_seq_len=args.max_length,
        supervise_padding=args.supervise_padding,
        response_window=args.response_window,
        processing_class=tokenizer,
    )


def check_collator(collator: object, args: DiffusionSFTConfig) -> None:
    """Raises `ValueError` for a collator that is none, or that has other blocks than `args`."""
    if not isinstance(collator, DataCollatorForDiffusionLM) or not collator.keeps_sample_index:
        raise ValueError(f"`data_collator` must be a `DataCollatorForDiffusionLM`, got `{type(collator).__name__}`.")
    for name in ("block_size", "response_window"):
        if getattr(collator, name) != getattr(args, name):
            raise ValueError(
                f"`data_collator` has `{name}={getattr(collator, name)}` and `args` has {getattr(args, name)}: pass "
                "the same, or blocks of the noise and the mask would not be those of the fill."
            )


def find_mask_token_id(
    args: DiffusionSFTConfig, tokenizer: Any, model: Any, collator: DataCollatorForDiffusionLM
) -> int | None:
    """
    The id that hides others; raises `ValueError` where there is none, or it has another meaning. `None` for
    `corruption="random"`, which hides nothing.
    """
    if args.corruption == "random":
        return None
    mask_token_id = args.mask_token_id
    if mask_token_id is None:
        mask_token_id = getattr(tokenizer, "mask_token_id", None)
    if mask_token_id is None:
        raise ValueError(
            "There is no mask token: add one with `tokenizer.add_special_tokens({'mask_token': '<|mask|>'})` and "
            "`model.resize_token_embeddings(len(tokenizer))`, or pass the id of a token that your data never holds as "
            "`mask_token_id`."
        )
    size = model.get_input_embeddings().num_embeddings
    if not 0 <= mask_token_id < size:
        raise ValueError(
            f"`mask_token_id` is {mask_token_id}, but the model has {size} embeddings: call "
            "`model.resize_token_embeddings(len(tokenizer))` first."
        )
    for supervised, token_id, what in (
        (True, collator.block_pad_token_id, "also ends a response"),
        (collator.supervise_padding, collator.pad_token_id, "also pads, which `supervise_padding` teaches"),
    ):
        if supervised and mask_token_id == token_id:
            raise ValueError(
                f"`mask_token_id` is {mask_token_id}, which {what}: pass a token that your data never holds."
            )
    return mask_token_id
