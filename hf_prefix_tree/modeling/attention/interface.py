# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The attention and mask functions that Transformers calls for `"prefix_tree"` and `"diffusion"`.

Without a tree those of `"prefix_tree"` call the model's default implementation: sdpa, or eager where the model has no
sdpa. With a tree the mask function chooses a backend and returns the tree's mask of the layer type, and the attention
function runs FlexAttention where it got a block mask, SDPA where it got a dense one, and plain matmul and softmax
where a dense mask meets softcap or sinks. Those of `"diffusion"` do the same with the mask of the call, whatever mask
the model asks for; a call without a layout is one of full attention.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, bidirectional_mask_function, causal_mask_function

from hf_prefix_tree.modeling.attention.backend import (
    FLASH_DTYPES,
    FLASH_HEAD_SIZES,
    AttentionCall,
    choose_backend,
    takes_flex,
)
from hf_prefix_tree.modeling.attention.flash import attend_flash
from hf_prefix_tree.modeling.attention.implementations import (
    DIFFUSION_IMPLEMENTATION,
    FALLBACK_HINT,
    IMPLEMENTATION,
    default_attention,
    default_implementation,
    refuse_attention_dropout,
    uses_attention_interface,
)
from hf_prefix_tree.modeling.attention.kernels import attend_dense, attend_flex, attention_dtype
from hf_prefix_tree.modeling.attention.masks.causal import TreeBlockMask, kind_of, limit_asked_by
from hf_prefix_tree.modeling.attention.masks.spans import block_mask, spans
from hf_prefix_tree.modeling.attention.masks.spans import dense_mask as dense_mask_of_spans
from hf_prefix_tree.modeling.context import DiffusionContext, Mask, TreeContext, active_context, active_tree
from hf_prefix_tree.modeling.positions import tempered_by_depth

# Layers that pick keys from a dense mask of what is visible.
_DERIVED_MASKS = {"indexed_attention", "deepseek_sparse_attention"}  # two names of the same
# Keyword arguments of the call that reach the attention without meaning anything to it.
_NOT_FOR_ATTENTION = {
    *("position_ids", "cache_position", "input_ids", "token_type_ids"),
    *("labels", "shift_labels", "num_items_in_batch"),
}
_DIFFUSION_HINT = "A diffusion language model needs plain attention, whose masks Transformers makes."


def _overlaid(config: Any, hint: str) -> ValueError:
    return ValueError(
        f"{type(config).__name__}: this model overlays its mask with another one, which is not carried over. {hint}"
    )


def _foreign(module: torch.nn.Module, hint: str) -> ValueError:
    return ValueError(
        f"{type(module).__name__} got an attention mask that is not the call's: this architecture builds or changes "
        "masks by itself, drops the keyword arguments of the call or attends to something else, or the call went "
        f"around the causal LM. {hint}"
    )


def prefix_tree_mask(**kwargs: Any) -> Mask | None:
    """The mask function behind `"prefix_tree"`; called by Transformers once per layer type and forward."""
    context, config = active_tree(), kwargs["config"]
    if context is None:
        return AttentionMaskInterface()[default_implementation(config.__class__)](**kwargs)
    mask_function, dtype, device = kwargs["mask_function"], kwargs["dtype"], kwargs["device"]
    local_size, use_vmap = kwargs.get("local_size"), kwargs.get("use_vmap", False)
    allow_is_causal_skip = kwargs.get("allow_is_causal_skip", True)
    if mask_function is bidirectional_mask_function:
        return None  # of a cross attention that this call does not use; an attention that does refuses it
    is_overlaid = use_vmap or (
        mask_function is not causal_mask_function if local_size is None else not allow_is_causal_skip
    )
    limit = limit_asked_by(config, local_size, is_overlaid)
    if is_overlaid and not limit:
        raise _overlaid(config, FALLBACK_HINT)
    additive = not uses_attention_interface(config.__class__)
    no_flex = None
    if additive:
        no_flex = "this architecture computes its attention by itself and takes a dense mask"
    elif _DERIVED_MASKS & set(getattr(config, "layer_types", None) or []) or not (allow_is_causal_skip or is_overlaid):
        no_flex = "this architecture computes sparse masks from a dense one"
    if context.section is not None and no_flex is not None:
        raise ValueError(f"{type(config).__name__} cannot be streamed: {no_flex}. Use `overflow='split'`.")
    kind = kind_of(limit)[0]
    if context.section is not None and context.section.start:
        kind = "path" if kind == "causal" else f"{kind} over a path"
    options = {"sinks": context.sinks, "mask_kind": kind}
    call = AttentionCall.of(config, device, attention_dtype(device, dtype), context.prefix_tree.shape[-1], **options)
    build: Any = functools.partial(context.mask, flex=True, **limit)
    backend = choose_backend(context.attn_backend, call, build, no_flex)
    mask = context.mask(flex=backend != "sdpa" and not additive, **limit)
    if additive:  # numbers to add to the scores
        assert isinstance(mask, Tensor)
        return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    if isinstance(mask, TreeBlockMask):
        mask.backend = backend
    return mask


def prefix_tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    prefix_tree: TreeContext | None = None,
    is_causal: bool | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """
    The attention function behind `"prefix_tree"`, with the signature that Transformers expects.

    Args:
        module (`torch.nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(B, heads, N, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(B, kv_heads, N, head_dim)`): Keys. Of a section, those of its path come before.
        value (`torch.Tensor` of shape `(B, kv_heads, N, value_dim)`): Values.
        attention_mask (`torch.Tensor` or `BlockMask`, *optional*): The result of [`prefix_tree_mask`].
        prefix_tree ([`TreeContext`], *optional*): The call's tree; without it the model's default attention runs.
        is_causal (`bool`, *optional*): What the layer asks for; a tree is causal.
        indices (`torch.Tensor` of shape `(B, N, chosen)`, *optional*): The keys that an indexer chose.

    Returns:
        `tuple`: the output `(B, N, heads, value_dim)` and the attention weights where the default gives them.
    """
    context = TreeContext.at_layer(prefix_tree) or active_tree()
    if prefix_tree is not None:
        query = tempered_by_depth(module, query, prefix_tree.prefix_tree)
    if context is None and not _made_for_a_tree(module, attention_mask):
        if indices is not None:  # what eager and sdpa find in their mask
            attention_mask = _keep_chosen(attention_mask, indices, key.shape[2], query.dtype)
        kwargs |= {} if is_causal is None else {"is_causal": is_causal}
        return default_attention(module)(module, query, key, value, attention_mask, **kwargs)
    if context is not None and not torch.compiler.is_compiling() and not context.owns(attention_mask):
        raise _foreign(module, FALLBACK_HINT)
    assert attention_mask is not None
    if is_causal is False:
        raise ValueError(f"{type(module).__name__} attends to both sides, which no tree does. {FALLBACK_HINT}")
    if context is not None and context.section is not None:
        if prefix_tree is None or indices is not None:
            reason = "does not hand the tree to its attention" if indices is None else "picks keys by an indexer"
            raise ValueError(f"{type(module).__name__} cannot be streamed: it {reason}. Use `overflow='split'`.")
        dtype = attention_dtype(query.device, value.dtype)
        key, value = context.section.extend(module, key.to(dtype), value.to(dtype))
    if indices is not None:
        attention_mask = _keep_chosen(attention_mask, indices, key.shape[2], query.dtype)
    return _attend(module, query, key, value, attention_mask, FALLBACK_HINT, **kwargs)


def _made_for_a_tree(module: torch.nn.Module, mask: Mask | None) -> bool:
    # Recomputation under checkpointing runs after the call, in models that drop its keyword arguments without them:
    # the mask tells. Only the tree path makes block masks, and boolean ones for models whose default is eager; where
    # it is sdpa the boolean masks of both mean the same.
    config: Any = module.config
    is_eager = default_implementation(config.__class__) == "eager"
    return isinstance(mask, BlockMask) or (is_eager and _is_boolean(mask))


def _is_boolean(mask: Mask | None) -> bool:
    return isinstance(mask, Tensor) and mask.dtype == torch.bool


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    hint: str,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention of both implementations, by the kernel that the mask is made for."""
    refuse_attention_dropout("attention_dropout", dropout)  # of a config that names it otherwise
    unknown = [name for name, x in kwargs.items() if isinstance(x, Tensor) and name not in _NOT_FOR_ATTENTION]
    if position_bias is not None or unknown:
        raise ValueError(
            f"{type(module).__name__} hands its attention {unknown or ['position_bias']}, which is not supported. "
            f"{hint}"
        )
    dtype = attention_dtype(query.device, value.dtype)
    if isinstance(mask, BlockMask):  # the dense attention casts by itself
        query, key, value = (x.to(dtype) for x in (query, key, value))
    if isinstance(mask, TreeBlockMask) and mask.backend == "flash":
        odd_sizes = query.shape[-1] != value.shape[-1] or query.shape[-1] not in FLASH_HEAD_SIZES
        if softcap is not None or s_aux is not None or odd_sizes or dtype not in FLASH_DTYPES:
            raise ValueError(
                f"{type(module).__name__} has a softcap, sinks, heads of another size or numbers of {dtype}, which "
                "its config does not tell and `flash-attn-4` does not serve on trees. Use `attn_backend='flex'`."
            )
        output = attend_flash(query, key, value, mask, scale=scaling)
    else:
        attend: Any = attend_flex if isinstance(mask, BlockMask) else attend_dense
        output = attend(query, key, value, mask, scale=scaling, softcap=softcap, sinks=s_aux)
    return output.transpose(1, 2).contiguous(), None


def _keep_chosen(mask: Mask | None, indices: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The mask without the keys that an indexer did not choose: `indices` is `[B, queries, chosen]`."""
    if not isinstance(mask, Tensor):
        raise ValueError("sparse attention needs a dense mask: use `attn_backend='auto'`, which gives it one.")
    chosen = torch.zeros((*indices.shape[:2], length), dtype=torch.bool, device=indices.device)
    chosen = chosen.scatter(-1, indices.long(), True)[:, None]
    return mask & chosen if mask.dtype == torch.bool else mask.masked_fill(~chosen, torch.finfo(dtype).min)


def diffusion_mask(
    *,
    config: Any,
    batch_size: int,
    q_length: int,
    dtype: torch.dtype,
    device: torch.device,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Mask:
    """The mask function behind `"diffusion"`; called by Transformers once per layer type and forward."""
    context = active_context()
    if not isinstance(context, DiffusionContext):
        raise ValueError(
            f"`attn_implementation={DIFFUSION_IMPLEMENTATION!r}` works on prepared models only: call "
            "`hf_prefix_tree.diffusion.model.prepare_diffusion_model(model)`, and call the causal LM, not its parts."
        )
    if use_vmap:
        raise _overlaid(config, _DIFFUSION_HINT)
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
            everything = torch.ones((batch_size, q_length), dtype=torch.bool, device=device)
            layout = spans(everything if attention_mask is None else attention_mask)
        call = AttentionCall.of(config, device, attention_dtype(device, dtype), q_length)
        flex = takes_flex(context.attn_backend, device, call.dtype, min(call.head_dim, call.value_dim), q_length)
        context.mask = block_mask(layout) if flex else dense_mask_of_spans(layout)
    return context.mask


def diffusion_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Mask | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """
    The attention function behind `"diffusion"`, with the signature that Transformers expects.

    Args:
        module (`torch.nn.Module`): The attention layer.
        query (`torch.Tensor` of shape `(B, heads, N, head_dim)`): Queries.
        key (`torch.Tensor` of shape `(B, kv_heads, N, head_dim)`): Keys.
        value (`torch.Tensor` of shape `(B, kv_heads, N, value_dim)`): Values.
        attention_mask (`torch.Tensor` or `BlockMask`): The result of [`diffusion_mask`].

    Returns:
        `tuple`: the output `(B, N, heads, value_dim)`, and `None` for the attention weights.
    """
    if not (isinstance(attention_mask, BlockMask) or _is_boolean(attention_mask)):
        raise _foreign(module, _DIFFUSION_HINT)
    assert attention_mask is not None
    return _attend(module, query, key, value, attention_mask, _DIFFUSION_HINT, **kwargs)


AttentionInterface.register(IMPLEMENTATION, prefix_tree_attention)
AttentionMaskInterface.register(IMPLEMENTATION, prefix_tree_mask)
AttentionInterface.register(DIFFUSION_IMPLEMENTATION, diffusion_attention)
AttentionMaskInterface.register(DIFFUSION_IMPLEMENTATION, diffusion_mask)
