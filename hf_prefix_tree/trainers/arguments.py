# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The arguments that a subclass of TRL's `SFTTrainer` is made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

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
