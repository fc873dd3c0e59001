# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which engines of Accelerate no mask of ours survives."""

from __future__ import annotations

from typing import Any


def refuse_engines(accelerator: Any) -> None:
    """
    Refuses the engines that cut the sequence or replace the attention.

    Args:
        accelerator (`Accelerator`): The trainer's.

    Raises:
        `ValueError`: Under context, sequence or pipeline parallelism (Megatron-LM).
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
