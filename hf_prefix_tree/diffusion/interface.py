# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What `attn_implementation="diffusion"` means to Transformers: one attention function and one mask function.

The mask function returns the mask of the call that runs, whatever causal mask the model asks for; the attention
function runs FlexAttention where it got a block mask, and dense attention where it got a boolean one. A call without a
layout of its own is one of full attention: every token sees every attended one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from hf_prefix_tree.modeling.attention.backend import AttentionCall, why_not_flex
from hf_prefix_tree.modeling.attention.kernels import attend_dense, attend_flex, attention_dtype
from hf_prefix_tree.modeling.attention.spans import block_mask, dense_mask, spans

IMPLEMENTATION = "diffusion"
ATTN_BACKENDS = ("auto", "flex", "sdpa")
# Keyword arguments of the call that reach the attention without meaning anything to it.
_NOT_FOR_ATTENTION = {
    *("position_ids", "cache_position", "input_ids", "token_type_ids"),
    *("labels", "shift_labels", "num_items_in_batch"),
}


class DiffusionContext:
    """
    What one call of a prepared model knows.

    Args:
        layout (`torch.Tensor` of shape `(B, 5, N)`, int32, *optional*):
            Who sees whom, see [`~hf_prefix_tree.modeling.attention.spans.spans`]. `None` is full attention, whose
            padding the mask function is told by Transformers.
        predict_positions (`torch.Tensor` of shape `(M,)`, int64, *optional*):
            Indices into the flattened `(B * N)` of the hidden states that go to the head; `None` for all.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            `"flex"`, `"sdpa"` (dense) or `"auto"`.
        longest (`int`, *optional*): Tokens of the longest sequence, as its positions tell.
    """

    def __init__(
        self,
        layout: torch.Tensor | None,
        predict_positions: torch.Tensor | None,
        attn_backend: str,
        longest: int | None = None,
    ) -> None:
        self.layout = layout
        self.predict_positions = predict_positions
        self.attn_backend = attn_backend
        self.longest = longest
        self.mask: torch.Tensor | BlockMask | None = None

    def gather(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The hidden states at `predict_positions`: `(B, N, hidden)` to `(1, M, hidden)`."""
        if self.predict_positions is None:
            return hidden_states
        return hidden_states.reshape(-1, hidden_states.shape[-1])[self.predict_positions][None]


_active: ContextVar[DiffusionContext | None] = ContextVar("hf_prefix_tree_diffusion", default=None)


def active_context() -> DiffusionContext | None:
    """The context of the call that runs now, or `None`."""
    return _active.get()


def set_active_context(context: DiffusionContext | None) -> None:
    """Enters a call, or leaves it with `None`."""
    _active.set(context)


def register() -> None:
    """Makes `"diffusion"` an attention implementation that Transformers knows."""
    AttentionInterface.register(IMPLEMENTATION, diffusion_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, diffusion_mask)


def diffusion_mask(
    *,
    config: Any,
    batch_size: int,
    q_length: int,
    kv_length: int,
    dtype: torch.dtype,
    device: torch.device,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | BlockMask:
    """The mask function behind `"diffusion"`; called by Transformers once per layer type and forward."""
    context = active_context()
    if context is None:
        raise ValueError(
            f"`attn_implementation={IMPLEMENTATION!r}` works on prepared models only: call "
            "`hf_prefix_tree.diffusion.model.prepare_diffusion_model(model)`, and call the causal LM, not its parts."
        )
    if use_vmap:
        raise ValueError(
            f"{type(config).__name__}: this model overlays its mask with one of its own, which a diffusion language "
            "model can't keep. Use a text model with plain attention."
        )
    if q_length != kv_length:
        raise ValueError(
            f"{q_length} tokens attend to {kv_length}: a diffusion language model keeps no cache, because earlier "
            "tokens see later ones. Pass whole sequences, or use `diffusion_generate`."
        )
    longest = q_length if context.longest is None else context.longest
    if local_size is not None and local_size < longest:
        raise ValueError(
            f"{type(config).__name__} has layers that see {local_size} tokens only, and a sequence has {longest}. "
            "Such a window looks back, and is not defined for a model that looks both ways: use sequences of at most "
            f"{local_size} tokens, or a model without sliding or chunked layers."
        )
    if context.mask is None:  # of all layers that have one
        layout = context.layout
        if layout is None:
            attended = attention_mask
            if attended is None:
                attended = torch.ones((batch_size, q_length), dtype=torch.bool, device=device)
            layout = spans(attended)
        call = AttentionCall.of(config, device, attention_dtype(device, dtype), q_length)
        reason = why_not_flex(device, call.dtype, min(call.head_dim, call.value_dim), q_length)
        if context.attn_backend == "flex" and reason is not None:
            raise ValueError(f"`attn_backend='flex'` cannot serve this call: {reason}. Use `attn_backend='auto'`.")
        flex = context.attn_backend != "sdpa" and reason is None
        context.mask = block_mask(layout) if flex else dense_mask(layout)
    return context.mask


def diffusion_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    The attention function behind `"diffusion"`, with the signature that Transformers expects.

    Args:
        module (`torch.nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(B, heads, N, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(B, kv_heads, N, head_dim)`): Keys.
        value (`torch.Tensor` of shape `(B, kv_heads, N, value_dim)`): Values.
        attention_mask (`torch.Tensor` or `BlockMask`): What [`diffusion_mask`] returned.

    Returns:
        `tuple`: the output `(B, N, heads, value_dim)`, and `None` for the attention weights.
    """
    name = type(module).__name__
    is_ours = isinstance(attention_mask, BlockMask) or (
        isinstance(attention_mask, torch.Tensor) and attention_mask.dtype == torch.bool
    )
    if not is_ours:
        raise ValueError(
            f"{name} got an attention mask that is not the call's: the model builds or changes masks by itself, or "
            "the call went around the causal LM. Use a model that leaves its masks to Transformers."
        )
    assert attention_mask is not None
    if dropout:
        raise ValueError(f"attention dropout ({dropout}) is not supported: set `attention_dropout=0.0`.")
    unknown = [n for n, x in kwargs.items() if isinstance(x, torch.Tensor) and n not in _NOT_FOR_ATTENTION]
    if position_bias is not None or unknown:
        raise ValueError(f"{name} hands its attention {unknown or ['position_bias']}, which is not supported.")
    dtype = attention_dtype(query.device, value.dtype)
    query, key, value = (x.to(dtype) for x in (query, key, value))
    attend: Callable = attend_flex if isinstance(attention_mask, BlockMask) else attend_dense
    output = attend(query, key, value, attention_mask, scale=scaling, softcap=softcap, sinks=s_aux)
    return output.transpose(1, 2).contiguous(), None
