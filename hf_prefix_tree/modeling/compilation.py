# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Regional compilation: each decoder layer becomes one graph with the tree attention inside, for all sequence lengths.

Only calls with a tree run compiled; others (generation, evaluation of plain sequences) stay as they were. Layers of
one kind share their graphs. Only the layer's `forward` is compiled: hooks (FSDP2's among them) and gradient
checkpointing stay outside. Two kinds of modules inside a layer run eagerly, and the layer around them compiles in
pieces: recurrent mixers, and experts whose dispatch makes no graph. Any other layer that does not become one graph is
refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils.output_capturing import _active_collector

from hf_prefix_tree.modeling.attention.kernels import one_graph_for_all_lengths
from hf_prefix_tree.modeling.checks import backbone_of
from hf_prefix_tree.modeling.context import TreeContext, active_tree
from hf_prefix_tree.modeling.positions import Override
from hf_prefix_tree.modeling.recurrent.hooks import has_convolution
from hf_prefix_tree.modeling.verify import changed

logger = logging.getLogger(__name__)

BACKEND = "inductor"


def compile_decoder_layers(model: PreTrainedModel) -> list[EagerForward | CompiledForward]:
    """
    Compiles the decoder layers of a causal LM for calls with a tree; nothing is traced before the first one.

    Args:
        model (`PreTrainedModel`): The causal LM.

    Returns:
        `list`: what undoes it (`remove()`); empty where all layers were compiled before.

    Raises:
        `ValueError`: where the model has no decoder layers to compile, or ones whose `forward` something else has
            replaced.
    """
    backbone: Any = backbone_of(model)
    layers = [module for module in backbone.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"`compile_layers=True`: {type(backbone).__name__} has no decoder layers that Transformers can "
            "checkpoint, which is how they are found. Leave it at `False`."
        )
    uncompiled = [layer for layer in layers if not isinstance(layer.__dict__.get("forward"), CompiledForward)]
    eager = {layer: [module for module in layer.modules() if _makes_no_graph(module)] for layer in uncompiled}
    inside = [module for modules in eager.values() for module in modules]
    replaced = next((module for module in (*uncompiled, *inside) if "forward" in module.__dict__), None)
    if replaced is not None:
        raise ValueError(
            f"`compile_layers=True`: something has replaced the `forward` of {type(replaced).__name__} (`device_map`, "
            "offloading). Load the model without it, or leave it at `False`."
        )
    if inside:
        names = ", ".join(sorted({type(module).__name__ for module in inside}))
        logger.info("`compile_layers=True`: %s run eagerly; the rest of their layers is compiled in pieces.", names)
    return [*map(EagerForward, inside), *(CompiledForward(layer, not modules) for layer, modules in eager.items())]


class EagerForward(Override):
    """
    Stands in for the `forward` of a module that stays outside the graphs of its compiled layer.

    Args:
        module (`torch.nn.Module`): The module.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module, "forward", self)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.owner).forward(self.owner, *args, **kwargs)


class CompiledForward(Override):
    """
    Stands in for a layer's `forward`.

    Args:
        layer (`torch.nn.Module`): The layer.
        is_one_graph (`bool`): Whether all of it is compiled; otherwise modules in it have an [`EagerForward`].
    """

    def __init__(self, layer: Any, is_one_graph: bool) -> None:
        self.is_one_graph = is_one_graph
        super().__init__(layer, "forward", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("prefix_tree"), TreeContext):
            if active_tree() is not None:
                raise ValueError(
                    f"`compile_layers=True`: the call did not hand the tree to {type(self.owner).__name__}, and a "
                    "compiled layer cannot look for it. Leave it at `False`."
                )
            return type(self.owner).forward(self.owner, *args, **kwargs)
        layer_class: Any = type(self.owner)
        forward, checkpoints = _plain_forward(layer_class)
        is_one_graph = self.is_one_graph and kwargs["prefix_tree"].section is None  # keys are kept outside of graphs
        run = functools.partial(_run, forward, is_one_graph, self.owner, **kwargs)
        if checkpoints and self.owner.gradient_checkpointing and self.owner.training and torch.is_grad_enabled():
            return self.owner._gradient_checkpointing_func(run, *args)
        return run(*args)


def _makes_no_graph(module: Any) -> bool:
    """
    Whether a module makes no graph that serves the next packed sequence: the scans of a recurrent mixer follow the
    branches, and eager experts loop over what tokens chose. Outside bfloat16, compiled grouped matmuls are an operator
    of Transformers, whose backward makes no graph in earlier versions.
    """
    if has_convolution(module):
        return True
    experts = [weight for weight in module.parameters(recurse=False) if weight.dim() == 3]
    dispatch = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if not experts or dispatch != "grouped_mm":
        return bool(experts) and dispatch == "eager"
    return experts[0].dtype != torch.bfloat16 and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward")


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
def _compiled(forward: Callable, is_one_graph: bool, backend: str) -> Callable:
    return torch.compile(forward, dynamic=True, fullgraph=is_one_graph, backend=backend)


def _run(forward: Callable, is_one_graph: bool, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    errors = torch._dynamo.exc
    try:
        with one_graph_for_all_lengths(), _outputs_recorded(kwargs["prefix_tree"]):
            return _compiled(forward, is_one_graph, BACKEND)(layer, *args, **kwargs)
    except (errors.Unsupported, errors.UserError, errors.BackendCompilerFailed) as error:
        raise ValueError(
            f"`compile_layers=True`: {type(layer).__name__} does not compile into one graph "
            f"({str(error).splitlines()[0]}). Leave it at `False`."
        ) from error


@contextmanager
def _outputs_recorded(context: TreeContext) -> Iterator[None]:
    """
    Lets hooks inside a graph record outputs (`output_router_logits=True`), which they look for in a context variable
    that the compiler cannot read: for the time of the block it is a global.

    Each layer records into empty lists, so that all share a graph. Recomputation under checkpointing records the same,
    for nobody: another graph would keep other tensors for the backward.
    """
    collector: Any = _active_collector
    outer = collector.get()
    if outer is not None:
        context.recorded = tuple(key for key, outputs in outer.items() if isinstance(outputs, list))
    outputs: dict[str, list] = {key: [] for key in context.recorded}
    with changed([(vars(collector), "global_var", outputs), (vars(collector), "compiling", True)]):
        yield
    if outer is not None:
        for key, values in outputs.items():
            outer[key] += values
