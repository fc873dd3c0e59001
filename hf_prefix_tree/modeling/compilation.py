# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Regional compilation: each decoder layer becomes one graph with the tree attention inside, for all sequence lengths.

Only calls with a tree run compiled; others (generation, evaluation of plain sequences) stay as they were. Layers of
one kind share their graphs. Only the layer's `forward` is compiled: hooks (FSDP2's among them) and gradient
checkpointing stay outside. A layer that does not become one graph is refused, never run in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_prefix_tree.modeling.attention.kernels import one_graph_for_all_lengths
from hf_prefix_tree.modeling.checks import backbone_of
from hf_prefix_tree.modeling.context import TreeContext, active_tree
from hf_prefix_tree.modeling.recurrent.hooks import has_convolution

BACKEND = "inductor"


def compile_decoder_layers(model: PreTrainedModel) -> list[CompiledForward]:
    """
    Compiles the decoder layers of a causal LM for calls with a tree; nothing is traced before the first one.

    Args:
        model (`PreTrainedModel`): The causal LM.

    Returns:
        `list[CompiledForward]`: one for each layer that was not compiled yet; `remove()` undoes it.

    Raises:
        `ValueError`: where the model has no decoder layers to compile, recurrent ones, or ones whose `forward`
            something else has replaced.
    """
    backbone = backbone_of(model)
    assert backbone is not None  # every model that can be prepared has one
    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"`compile_layers=True`: {type(backbone).__name__} has no decoder layers that Transformers can "
            "checkpoint, which is how they are found. Leave it at `False`."
        )
    if any(has_convolution(module) for layer in layers for module in layer.modules()):
        raise ValueError(
            f"`compile_layers=True`: {type(backbone).__name__} has recurrent layers, whose scans follow the branches "
            "of each packed sequence and make no graph that serves the next. Leave it at `False`."
        )
    uncompiled = [layer for layer in layers if not isinstance(layer.__dict__.get("forward"), CompiledForward)]
    replaced = next((layer for layer in uncompiled if "forward" in layer.__dict__), None)
    if replaced is not None:
        raise ValueError(
            f"`compile_layers=True`: something has replaced the `forward` of {type(replaced).__name__} (`device_map`, "
            "offloading). Load the model without it, or leave it at `False`."
        )
    return [CompiledForward(layer) for layer in uncompiled]


class CompiledForward:
    """
    Stands in for a layer's `forward`.

    Args:
        layer (`torch.nn.Module`): The layer.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("prefix_tree"), TreeContext):
            if active_tree() is not None:
                raise ValueError(
                    f"`compile_layers=True`: the call did not hand the tree to {type(self.layer).__name__}, and a "
                    "compiled layer cannot look for it. Leave it at `False`."
                )
            return type(self.layer).forward(self.layer, *args, **kwargs)
        layer_class: Any = type(self.layer)
        forward, checkpoints = _plain_forward(layer_class)
        run = functools.partial(_run, forward, self.layer, **kwargs)
        if checkpoints and self.layer.gradient_checkpointing and self.layer.training and torch.is_grad_enabled():
            return self.layer._gradient_checkpointing_func(run, *args)
        return run(*args)

    def remove(self) -> None:
        """Restores the `forward` of the layer."""
        self.layer.__dict__.pop("forward", None)

    def __reduce__(self) -> tuple:
        return type(self), (self.layer,)


@functools.cache
def _plain_forward(layer_class: Any) -> tuple[Callable, bool]:
    """The class's `forward` without gradient checkpointing, and whether that was in it (else it is in `__call__`)."""
    forward = layer_class.forward
    if "__call__" in GradientCheckpointingLayer.__dict__:  # earlier versions of Transformers
        return forward, False
    while forward.__code__.co_name == "forward_with_checkpointing":  # once for each class that derives from a layer
        forward = forward.__wrapped__
    return forward, True


@functools.cache
def _compiled(forward: Callable, backend: str) -> Callable:
    return torch.compile(forward, dynamic=True, fullgraph=True, backend=backend)


def _run(forward: Callable, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    try:
        with one_graph_for_all_lengths():
            return _compiled(forward, BACKEND)(layer, *args, **kwargs)
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError) as error:
        raise ValueError(
            f"`compile_layers=True`: {type(layer).__name__} does not compile into one graph "
            f"({str(error).splitlines()[0]}). Leave it at `False`."
        ) from error
