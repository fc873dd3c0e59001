# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The engines of Accelerate: which ones are refused, and what the others would do to log-probs and gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


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
