# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`diffusion_generate`]: text from a diffusion language model, block after block, the most certain tokens first.

Cost: one forward over prompt and blocks so far (for `"mdlm"`, over prompt and all blocks) per step. Nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hf_prefix_tree.diffusion.config import OBJECTIVES
from hf_prefix_tree.diffusion.model import prepared_for_diffusion
from hf_prefix_tree.modeling.attention.masks.spans import spans
from hf_prefix_tree.modeling.checks import base_causal_lm
from hf_prefix_tree.training.checks import check_mask_token
from hf_prefix_tree.tree.folding import check_choice, check_integer, integer_array


@torch.no_grad()
def diffusion_generate(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    block_size: int,
    mask_token_id: int,
    *,
    objective: str = "mdlm",
    steps_per_block: int | None = None,
    temperature: float = 0.0,
    attention_mask: torch.Tensor | None = None,
    response_window: bool = True,
    eos_token_id: int | Iterable[int] | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """
    Continue prompts with a model of [`DiffusionSFTTrainer`].

    A block begins as mask tokens. Each step predicts all of its masked tokens and keeps the most certain ones, until
    none is masked; then comes the next block. A prompt's text stops after the block that holds its end token.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            The model, prepared with [`prepare_diffusion_model`] or not; it is left as it was.
        input_ids (`torch.Tensor` of shape `(B, P)`, int64):
            The prompts, padded on either side where `attention_mask` says so.
        max_new_tokens (`int`):
            The largest number of new tokens of a prompt.
        block_size (`int`):
            Tokens of a block, as in training.
        mask_token_id (`int`):
            The mask token, as in training. It is never generated. (Models that were trained with
            `corruption="random"` have none: this is no sampler for them.)
        objective (`str`, *optional*, defaults to `"mdlm"`):
            The objective of the training. `"mdlm"` sees all blocks from the start, as masks: let `max_new_tokens` be
            what responses had in training. `"block"` and `"hybrid"` see the blocks so far.
        steps_per_block (`int`, *optional*):
            Forwards per block, at most `block_size`, which is the default: one token a step.
        temperature (`float`, *optional*, defaults to `0.0`):
            0 takes the most likely token of each place, otherwise tokens are drawn. A token's certainty is its
            probability at temperature 1.
        attention_mask (`torch.Tensor` of shape `(B, P)`, *optional*):
            0 where `input_ids` is padding.
        response_window (`bool`, *optional*, defaults to `True`):
            Blocks begin where the prompt ends, as in training with it. With `False` they begin with the prompt, and
            the first one holds its last tokens.
        eos_token_id (`int` or iterable of `int`, *optional*):
            Tokens that end a text. Defaults to those of `model.generation_config`.
        pad_token_id (`int`, *optional*):
            The padding after them. Defaults to that of `model.generation_config`, or the first end token, or 0.
        generator (`torch.Generator`, *optional*):
            For draws under a temperature.

    Returns:
        `torch.Tensor` of shape `(B, P + new)`, int64: `input_ids`, then the new tokens up to and including the first
        end token, padded to the longest one.

    Raises:
        `ValueError`: If an argument is out of range, or padding is inside a prompt.

    Example:

    ```python
    >>> ids = tokenizer("2 + 2 =", return_tensors="pt").input_ids  # doctest: +SKIP
    >>> ids = diffusion_generate(
    ...     model, ids, max_new_tokens=64, block_size=32, mask_token_id=tokenizer.mask_token_id, objective="block"
    ... )  # doctest: +SKIP
    >>> tokenizer.decode(ids[0])  # doctest: +SKIP
    '2 + 2 = 4<|im_end|>'

    ```
    """
    base = base_causal_lm(model)
    steps = block_size if steps_per_block is None else steps_per_block
    for name, value in (("max_new_tokens", max_new_tokens), ("block_size", block_size)):
        check_integer(value, name, 1)
    integer_array([steps], "steps_per_block", 1, block_size)  # a step keeps a token
    if temperature < 0:
        raise ValueError(f"`temperature` must be at least 0, got {temperature}.")
    check_choice(objective, "objective", OBJECTIVES)
    check_mask_token(mask_token_id, base.get_input_embeddings().num_embeddings)
    config: Any = base.generation_config
    eos_token_id = config.eos_token_id if eos_token_id is None else eos_token_id
    ends = [] if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else list(eos_token_id)
    if pad_token_id is None:
        pad_token_id = config.pad_token_id if config.pad_token_id is not None else (ends or [0])[0]

    tokens, lengths = _left_aligned(input_ids, attention_mask)
    limits = lengths + max_new_tokens
    window = lengths if response_window else None
    first = lengths if response_window else lengths // block_size * block_size  # where the first block begins
    canvas_ends = first + -(-(limits - first) // block_size) * block_size
    width = int(canvas_ends.max())
    tokens = torch.nn.functional.pad(tokens, (0, max(width - tokens.shape[1], 0)), value=pad_token_id)[:, :width]
    place = torch.arange(width, device=tokens.device)[None]
    is_new = (place >= lengths[:, None]) & (place < canvas_ends[:, None])
    tokens = torch.where(is_new, mask_token_id, torch.where(place < lengths[:, None], tokens, pad_token_id))
    is_masked = is_new.clone()
    end_ids = torch.tensor(ends, device=tokens.device, dtype=tokens.dtype)
    done = torch.zeros_like(lengths, dtype=torch.bool)

    was_training = model.training
    model.eval()
    try:
        with prepared_for_diffusion(model):
            for number in range(int(((canvas_ends - first) // block_size).max())):
                start = first + number * block_size
                in_block = (place >= start[:, None]) & (place < start[:, None] + block_size)
                block = (start[:, None] + torch.arange(block_size, device=tokens.device)).clamp(max=width - 1)
                until = canvas_ends if objective == "mdlm" else torch.minimum(start + block_size, canvas_ends)
                attended = place[:, : int(until.max())] < until[:, None]
                before = start if objective == "hybrid" else None
                options: Any = {"window_start": window, "causal_before": before, "block_size": block_size}
                layout = spans(attended) if objective == "mdlm" else spans(attended, "block_causal", **options)
                for step in range(steps):
                    todo = is_masked & in_block & ~done[:, None]
                    if not bool(todo.any()):
                        break
                    logits = _block_logits(model, tokens, block, attended, layout)
                    logits[..., mask_token_id] = -torch.inf
                    chosen, certainty = _choose(logits, temperature, generator)
                    certainty = certainty.masked_fill(~todo.gather(1, block), -1.0)
                    left = todo.sum(dim=1, keepdim=True)
                    quota = -(-left // (steps - step))  # the rest, spread over the steps that are left
                    rank = certainty.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
                    keep = rank < quota  # within the masked ones, which are first
                    tokens.scatter_(1, block, torch.where(keep, chosen, tokens.gather(1, block)))
                    is_masked.scatter_(1, block, is_masked.gather(1, block) & ~keep)
                ended = torch.isin(tokens, end_ids) & is_new & ~is_masked & (place < limits[:, None])
                done |= ended.any(dim=1) | (start + block_size >= canvas_ends)
                if bool(done.all()):
                    break
    finally:
        model.train(was_training)
    return torch.cat([input_ids, _new_tokens(tokens, lengths, max_new_tokens, end_ids, pad_token_id)], dim=1)


def _left_aligned(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The prompts without padding before them, and their lengths."""
    if input_ids.dim() != 2:
        raise ValueError(f"`input_ids` must have the shape (B, P), got {tuple(input_ids.shape)}.")
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"`attention_mask` has the shape {tuple(attention_mask.shape)} and `input_ids` {tuple(input_ids.shape)}: "
            "pass one number per token."
        )
    attended = attention_mask != 0
    edges = torch.diff(attended.int(), dim=1, prepend=torch.zeros_like(input_ids[:, :1]).int())
    if bool(((edges == 1).sum(dim=1) > 1).any()):
        raise ValueError("`attention_mask` has zeros inside a prompt: pad on the left or on the right.")
    return input_ids.gather(1, (~attended).int().argsort(dim=1, stable=True)), attended.sum(dim=1)


def _block_logits(
    model: torch.nn.Module, tokens: torch.Tensor, block: torch.Tensor, attended: torch.Tensor, layout: torch.Tensor
) -> torch.Tensor:
    """Logits of the current block's places: `(B, block_size, vocab)`, float32 or more."""
    length = attended.shape[1]
    inside = block.clamp(max=length - 1)  # of texts that are done already, other places
    where = inside + torch.arange(len(tokens), device=tokens.device)[:, None] * length
    outputs = model(
        input_ids=tokens[:, :length],
        attention_mask=attended.long(),
        position_ids=torch.arange(length, device=tokens.device).expand(len(tokens), -1),
        diffusion_layout=layout,
        predict_positions=where.flatten(),
    )
    logits = outputs.logits.view(*block.shape, -1)
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _choose(
    logits: torch.Tensor, temperature: float, generator: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token for each place, and its probability at temperature 1."""
    probabilities = logits.softmax(dim=-1)
    if temperature == 0:
        certainty, chosen = probabilities.max(dim=-1)
        return chosen, certainty
    flat = (logits / temperature).softmax(dim=-1).flatten(0, 1)
    chosen = torch.multinomial(flat, 1, generator=generator).view(logits.shape[:2])
    return chosen, probabilities.gather(-1, chosen[..., None])[..., 0]


def _new_tokens(
    tokens: torch.Tensor, lengths: torch.Tensor, max_new_tokens: int, end_ids: torch.Tensor, pad_token_id: int
) -> torch.Tensor:
    """The generated tokens, padded after the first end token: `(B, new)`."""
    new = tokens.gather(1, lengths[:, None] + torch.arange(max_new_tokens, device=tokens.device))
    is_end = torch.isin(new, end_ids).int()
    after_end = is_end.cumsum(dim=1) - is_end > 0
    return new.masked_fill(after_end, pad_token_id)[:, : int((~after_end).sum(dim=1).max())]
