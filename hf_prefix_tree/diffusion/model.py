# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`prepare_diffusion_model`]: an ordinary causal LM becomes a diffusion language model.

No weight changes and no forward is replaced. The attention loses its causal mask, and hooks on the causal LM and its
backbone take two more inputs: who sees whom, and which hidden states go to the head. Cost: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling.attention.implementations import DIFFUSION_IMPLEMENTATION
from hf_prefix_tree.modeling.attention.masks.spans import FIRST, UNTIL
from hf_prefix_tree.modeling.call import Kind, check_options, prepare, state_of, unprepare
from hf_prefix_tree.modeling.checks import base_causal_lm
from hf_prefix_tree.modeling.context import DiffusionContext
from hf_prefix_tree.modeling.positions import Override


def prepare_diffusion_model(model: torch.nn.Module, *, attn_backend: str = "auto") -> torch.nn.Module:
    """
    Makes a diffusion language model of a causal LM, in place. A second call changes nothing but `attn_backend`.

    Afterwards `model(input_ids, attention_mask=...)` attends both ways: the logits at a position predict its own
    token. Two keyword arguments are new. `diffusion_layout`, from
    [`~hf_prefix_tree.modeling.attention.masks.spans.spans`], says which tokens see which; it needs `position_ids`,
    which the two halves of `[x_t | x_0]` share. `predict_positions`, `(M,)` indices into the flattened batch, says
    which hidden states go to the head: `outputs.logits` is then `[1, M, vocab]`. `config.is_causal` is `False`.

    A checkpoint keeps that, and must be prepared again once it is loaded: until then it may look both ways or not, and
    `generate` writes nonsense. To save a causal model, after `"hybrid"` training say, call
    [`unprepare_diffusion_model`] first.

    Args:
        model (`PreTrainedModel` or `PeftModel`):
            A causal LM. Wrap it with DDP, FSDP or `torch.compile` afterwards.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            `"flex"` runs FlexAttention and raises where it cannot serve, `"sdpa"` runs a dense mask, `"auto"` takes
            FlexAttention wherever it can train.

    Returns:
        The same `model`.

    Raises:
        `ValueError`: If the architecture or an option of the model can't be a diffusion language model.

    Example:

    ```python
    >>> import torch
    >>> from transformers import AutoModelForCausalLM, Qwen3Config

    >>> config = Qwen3Config(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=16,
    ...     num_attention_heads=1, num_key_value_heads=1,
    ... )
    >>> model = prepare_diffusion_model(AutoModelForCausalLM.from_config(config))
    >>> first, second = (model(torch.tensor([[5, last]])).logits[0, 0] for last in (6, 7))
    >>> torch.equal(first, second)  # the first token sees the second
    False

    ```
    """
    base, is_new = prepare(model, DIFFUSION, attn_backend)
    state = state_of(base)
    state.attn_backend = attn_backend
    if is_new:
        state.handles.append(Override(base.config, "is_causal", False))
    return model


def unprepare_diffusion_model(model: torch.nn.Module) -> torch.nn.Module:
    """
    Undoes [`prepare_diffusion_model`]; does nothing to a model that is not prepared.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
    """
    unprepare(model, DIFFUSION)
    return model


@contextmanager
def prepared_for_diffusion(model: torch.nn.Module) -> Iterator[None]:
    """
    The model prepared while the context is open; one that is prepared already stays so.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
    """
    state = state_of(base_causal_lm(model))
    if state is not None and state.kind == DIFFUSION:
        yield
        return
    prepare_diffusion_model(model)
    try:
        yield
    finally:
        unprepare_diffusion_model(model)


def _enter(module: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[DiffusionContext, dict[str, Any]]:
    """Layout and positions in, context of the call out."""
    check_options(module, DIFFUSION, kwargs)
    if hasattr(module.config, "canvas_length") and "decoder_input_ids" not in kwargs:
        raise ValueError(
            f"{type(module).__name__} denoises `decoder_input_ids`, and got none: see `examples/diffusion_gemma.py`."
        )
    kwargs = dict(kwargs)
    layout, where = kwargs.pop("diffusion_layout", None), kwargs.pop("predict_positions", None)
    longest = None
    if layout is not None:
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
        if layout.shape != (ids.shape[0], 6, ids.shape[1]):
            raise ValueError(
                f"`diffusion_layout` has the shape {tuple(layout.shape)} for {tuple(ids.shape[:2])} tokens: make it "
                "with `spans(attention_mask, ...)` of the same batch."
            )
        if kwargs.get("position_ids") is None:
            raise ValueError(
                "`diffusion_layout` needs `position_ids`: those of the sequence, twice over for `[x_t | x_0]`."
            )
        text = module.config.get_text_config()
        has_windows = any(getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size"))
        longest = int(kwargs["position_ids"].max()) + 1 if has_windows else None
        if kwargs.get("attention_mask") is None:
            kwargs["attention_mask"] = (layout[:, FIRST] < layout[:, UNTIL]).long()
    return DiffusionContext(state_of(module).attn_backend, where, layout=layout, longest=longest), kwargs


DIFFUSION = Kind(
    "diffusion",
    DIFFUSION_IMPLEMENTATION,
    ("auto", "flex", "sdpa"),
    "prepare_diffusion_model",
    "unprepare_diffusion_model",
    _enter,
)
