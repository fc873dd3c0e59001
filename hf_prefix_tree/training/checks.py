# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which engines of Accelerate and which arguments of a trainer are refused, and how the other engines are adapted."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from packaging.version import Version

from hf_prefix_tree.version import TESTED


def refuse_engines(accelerator: Any) -> None:
    """
    Refuses the engines that cut the sequence, replace the attention or glue batches of different sizes.

    Args:
        accelerator (`Accelerator`): The trainer's.

    Raises:
        `ValueError`: Under context, sequence or pipeline parallelism (Megatron-LM), under FSDP1, and on several ranks
            under `dispatch_batches=True`.
    """
    parallelism = getattr(accelerator, "parallelism_config", None)
    if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
        raise ValueError(
            "`parallelism_config` splits the sequence over devices (context or sequence parallelism), which drops the "
            "mask. Set `cp_size=1` and `sp_size=1`."
        )
    if accelerator.distributed_type == "MEGATRON_LM":
        raise ValueError(
            "Megatron-LM (pipeline parallelism) replaces the model and its attention, which drops the mask. Use DDP "
            "or FSDP2."
        )
    if accelerator.distributed_type == "FSDP" and not accelerator.is_fsdp2:
        raise ValueError(
            "`fsdp_config` asks for FSDP1, which is not tested on trees. Set `version: 2` in it (`fsdp_version: 2` in "
            "a config of Accelerate)."
        )
    config = getattr(accelerator, "dataloader_config", None)
    if config is not None and config.dispatch_batches and accelerator.num_processes > 1:
        raise ValueError(
            "`accelerator_config` has `dispatch_batches=True`, which concatenates the batches of all ranks, and they "
            "differ in size. Set it to `False`."
        )


def keep_output_dtype(accelerator: Any) -> None:
    """
    Under FSDP2 in mixed precision, has the model return what it computed. Accelerate asks for outputs in the dtype of
    the parameters, which would round log-probs, losses and, in their gradients, weights to bfloat16.

    Args:
        accelerator (`Accelerator`): The trainer's, before it prepares the model.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None) if accelerator.is_fsdp2 else None
    if plugin is not None and plugin.mixed_precision_policy is not None:
        plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)


@contextmanager
def earlier_gradients_aside(model: torch.nn.Module) -> Iterator[None]:
    """
    Under tensor parallelism Transformers sums the gradients of some replicated parameters (norms of queries and keys)
    over the ranks after every backward, those of earlier micro-batches again: they wait outside meanwhile.

    Args:
        model (`torch.nn.Module`): The model whose micro-batch is computed inside.
    """
    kept = []
    for parameter in model.parameters():
        sharded = getattr(parameter.data, "placements", ())
        if parameter.grad is not None and not any(placement.is_shard() for placement in sharded):
            kept.append((parameter, parameter.grad))
            parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


Config = TypeVar("Config")

# They would see the rows and logits of another layout than their authors had in mind.
_REFUSED = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "formatting_func")


def check_arguments(
    args: Config | None, config_class: type[Config], model: Any, purpose: str, others: Mapping[str, Any], reason: str
) -> Config:
    """
    The configuration of a trainer, checked.

    Args:
        args (`config_class`, *optional*): What the user passed.
        config_class (`type`): The configuration that it must be.
        model (`str` or `PreTrainedModel`): Names the output folder where `args` is `None`.
        purpose (`str`): The end of that name.
        others (`Mapping`): The trainer's other keyword arguments.
        reason (`str`): Why those that would see rows or logits are refused.

    Raises:
        `ValueError`: For a configuration of another class, and refused arguments.
    """
    for name in _REFUSED:
        if others.get(name) is not None:
            raise ValueError(f"`{name}` is not supported: {reason}.")
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return config_class(f"{name.split('/')[-1] or type(model).__name__}-{purpose}")  # type: ignore[call-arg]
    if not isinstance(args, config_class):
        raise ValueError(f"`args` must be a `{config_class.__name__}`, got `{type(args).__name__}`.")
    return args


def _warn_of_newer_versions() -> None:
    for name, (_, highest) in TESTED.items():
        if Version(version(name)) > Version(highest):
            logging.getLogger(__name__).warning(
                "%s %s is newer than %s, the newest version that hf_prefix_tree is tested with: it may have options "
                "that are neither honoured nor refused.",
                name,
                version(name),
                highest,
            )


_warn_of_newer_versions()  # once, when a trainer is imported
