# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`tree_log_probs`]: per-token log-probs on prefix trees, for RL loops that don't use TRL's trainers.

Cost: one forward over the tree of the sequences. The head is TRL's: log-probs are computed in chunks, and recomputed
in the backward, so that no `[N, vocab]` tensor is kept. It runs in float32 at most; a float64 model, as in checks,
uses the logits of its plain head instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any, TypeVar

import torch
from accelerate.utils import extract_model_from_parallel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from trl.trainer.utils import FusedCausalLMOutput, add_fused_lm_head

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.checks import base_causal_lm
from hf_prefix_tree.rl.config import MIN_REUSE
from hf_prefix_tree.rl.folded_forward import fold_shared_prefixes

Sequences = TypeVar("Sequences", torch.Tensor, Sequence[torch.Tensor])


def tree_log_probs(
    model: torch.nn.Module,
    input_ids: Sequences,
    attention_mask: torch.Tensor | None = None,
    *,
    completion_mask: Sequences | None = None,
    temperature: float = 1.0,
    min_reuse: float = MIN_REUSE,
) -> Any:
    """
    Log-probs of the tokens of sequences that share prefixes, each shared token computed once. Differentiable: the
    gradient of a shared token is the sum over its sequences.

    Position `t` of the result holds `log p(token t | tokens before it)`. It is 0 at the first token of a sequence, at
    padding and where `completion_mask` is 0. (TRL's per-token log-probs start at the second token:
    `result[:, 1:]`.) Advantages, ratios and clipping belong to the caller, on this result.

    Args:
        model (`PreTrainedModel`, `PeftModel`, or a DDP, FSDP or DeepSpeed wrapper of one):
            A causal LM. It is prepared with [`prepare_model`], in place; its forward stays unchanged. Under DDP or
            FSDP, call this function on every rank, like a forward: the wrapper's collectives run inside.
        input_ids (`torch.Tensor` of shape `(B, L)`, int64, or a sequence of tensors of shape `(L_i,)`):
            Padded rows, on the left, the right or both; or sequences without padding.
        attention_mask (`torch.Tensor` of shape `(B, L)`, *optional*):
            1 for tokens, 0 for padding; without it no token is padding. Not with a sequence of tensors.
        completion_mask (shaped like `input_ids`, *optional*):
            1 for the tokens whose log-prob is wanted, 0 elsewhere. Only those go through the head. All tokens by
            default.
        temperature (`float`, *optional*, defaults to `1.0`):
            Divisor of the logits.
        min_reuse (`float`, *optional*, defaults to `1.2`):
            As for [`~hf_prefix_tree.rl.folded_forward.fold_shared_prefixes`]: sequences that share less run as padded
            rows, with the same result.

    Returns:
        `torch.Tensor` of shape `(B, L)`, or a list of tensors of shape `(L_i,)` where `input_ids` is a sequence;
        float32 (float64 for a float64 model).

    Raises:
        `ValueError`: if an argument does not fit `input_ids`, `temperature` is not above 0, the architecture cannot be
            exact on trees, or Accelerate's mixed precision would be lost.

    Example:

    ```python
    >>> import torch
    >>> from transformers import AutoModelForCausalLM, Qwen3Config
    >>> from hf_prefix_tree import tree_log_probs

    >>> config = Qwen3Config(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=16,
    ...     num_attention_heads=1, num_key_value_heads=1,
    ... )
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> prompt, answers = [5, 6, 7], [[8, 9], [10]]
    >>> sequences = [torch.tensor(prompt + answer) for answer in answers]
    >>> wanted = [torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 0, 1])]
    >>> log_probs = tree_log_probs(model, sequences, completion_mask=wanted)
    >>> [(len(row), row[3].item() < 0, row[:3].tolist()) for row in log_probs]
    [(5, True, [0.0, 0.0, 0.0]), (4, True, [0.0, 0.0, 0.0])]

    ```
    """
    if not isinstance(temperature, int | float) or not temperature > 0:
        raise ValueError(f"`temperature` must be a number > 0, got {temperature!r}.")
    if not isinstance(input_ids, torch.Tensor):
        if attention_mask is not None:
            raise ValueError("`attention_mask` is for padded rows: leave it out with a list of sequences.")
        sequences = [torch.as_tensor(ids) for ids in input_ids]
        if not sequences:
            return []
        ids, mask, wanted = _padded(sequences, completion_mask)
        rows = tree_log_probs(model, ids, mask, completion_mask=wanted, temperature=temperature, min_reuse=min_reuse)
        return [row[: len(sequence)] for row, sequence in zip(rows, sequences, strict=True)]
    if input_ids.dim() != 2 or not input_ids.numel():
        raise ValueError(
            f"`input_ids` has the shape {tuple(input_ids.shape)}: pass padded rows `[B, L]` with a token, or a list "
            "of sequences."
        )
    for name, mask in (("attention_mask", attention_mask), ("completion_mask", completion_mask)):
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != input_ids.shape):
            actual = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
            raise ValueError(f"`{name}` must have the shape {tuple(input_ids.shape)} of `input_ids`, got {actual}.")
    is_token = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    is_wanted = is_token.bool() if completion_mask is None else is_token.bool() & completion_mask.bool()
    is_wanted = is_wanted & (is_token.cumsum(dim=1) > 1)  # nothing predicts a first token
    model = getattr(model, "_orig_mod", model)  # a compiled graph of the whole model can't hold the tree
    fold_shared_prefixes(model, min_reuse=min_reuse)
    with _fused_head(base_causal_lm(extract_model_from_parallel(model, keep_torch_compile=False)), temperature):
        labels = input_ids.masked_fill(~is_wanted, IGNORE_INDEX)
        log_probs = model(input_ids=input_ids, attention_mask=is_token, labels=labels, fused_lm_head=True).log_probs
    return torch.nn.functional.pad(log_probs, (1, 0))


def _padded(sequences: list[torch.Tensor], completion_mask: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
    """Sequences as rows padded on the right: their ids, attention mask and completion mask."""
    for index, ids in enumerate(sequences):
        if ids.dim() != 1 or len(ids) == 0:
            raise ValueError(f"`input_ids[{index}]` has the shape {tuple(ids.shape)}: pass 1-D tensors with a token.")
    is_token = [torch.ones_like(ids) for ids in sequences]
    wanted = is_token if completion_mask is None else completion_mask
    is_wanted = [torch.as_tensor(mask, device=sequences[0].device) for mask in wanted]
    if [mask.shape for mask in is_wanted] != [ids.shape for ids in sequences]:
        raise ValueError("`completion_mask` must hold one mask per sequence, as long as the sequence.")
    return [pad_sequence(values, batch_first=True) for values in (sequences, is_token, is_wanted)]


@contextmanager
def _fused_head(base: PreTrainedModel, temperature: float) -> Iterator[None]:
    """Gives a causal LM a fused head during a call. The backward needs no head: it is part of the autograd graph."""
    instance_forward = base.__dict__.get("forward")
    if "_original_forward" in base.__dict__ and not torch.is_autocast_enabled(base.device.type):
        raise ValueError(
            "`model` was prepared by Accelerate for mixed precision, which its fused head does not pass through: call "
            "`tree_log_probs` inside `with accelerator.autocast():`."
        )
    if base.dtype == torch.float64:
        base.forward = MethodType(functools.partial(_forward_with_plain_head, base.forward, temperature), base)
    else:
        add_fused_lm_head(base, temperature=temperature)
    try:
        yield
    finally:
        del base.forward
        if instance_forward is not None:
            base.forward = instance_forward


def _forward_with_plain_head(
    forward: Any, temperature: float, base: PreTrainedModel, *, fused_lm_head: bool, labels: Any, **kwargs: Any
) -> FusedCausalLMOutput:
    """The output of TRL's fused head, from the logits of the model's head. On trees these are gathered already."""
    targets = kwargs.pop("shift_labels", None)
    logits = forward(**kwargs).logits
    if targets is None:
        logits, targets = logits[:, :-1], labels[:, 1:]
    mask = targets != IGNORE_INDEX
    log_probs = (logits / temperature).log_softmax(dim=-1)
    log_probs = log_probs.gather(2, targets.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0.0)
    return FusedCausalLMOutput(log_probs=log_probs, label_mask=mask)
