# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which engines of Accelerate and which arguments of a trainer are refused, and how the other engines are adapted."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from packaging.version import Version

from hf_prefix_tree.training.options import refuse_options
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


# They would see rows or logits of another layout than their authors had in mind.
_REFUSED = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "formatting_func", "model_init")


def check_trainer(trainer: Any) -> None:
    """
    Refuses what would drop the mask, or weigh ranks instead of tokens.

    Args:
        trainer (`Trainer`): The trainer, initialised.

    Raises:
        `ValueError`: As [`refuse_engines`], under `nn.DataParallel`, and for functions that would see other logits.
    """
    refuse_engines(trainer.accelerator)
    if getattr(trainer.args, "compile_layers", False) and trainer.is_deepspeed_enabled:
        raise ValueError(
            "`compile_layers=True` cannot be used together with DeepSpeed, which hooks the modules inside each layer. "
            "Use FSDP2, or leave it at `False`."
        )
    if trainer.args.n_gpu > 1:
        raise ValueError("`nn.DataParallel` is not supported: start one process per GPU with `accelerate launch`.")
    for name in _REFUSED[:3]:
        if getattr(trainer, name) is not None:
            raise ValueError(
                f"`{name}` is not supported: it would see packed sequences and other logits than it expects. Leave "
                "it out."
            )


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


def check_arguments(
    args: Config | None, config_class: type[Config], model: Any, purpose: str, given: Mapping[str, Any], reason: str
) -> Config:
    """
    The configuration of a trainer, checked.

    Args:
        args (`config_class`, *optional*): The user's.
        config_class (`type`): The configuration that it must be.
        model (`str` or `PreTrainedModel`): Names the output folder where `args` is `None`.
        purpose (`str`): The end of that name.
        given (`Mapping`): Further keyword arguments of the trainer.
        reason (`str`): Why those that would see packed sequences or logits are refused.

    Raises:
        `ValueError`: For a configuration of another class, and refused arguments.
    """
    for name in _REFUSED:
        if given.get(name) is not None:
            raise ValueError(f"`{name}` is not supported: {reason}.")
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return config_class(f"{name.split('/')[-1] or type(model).__name__}-{purpose}")  # type: ignore[call-arg]
    if not isinstance(args, config_class):
        raise ValueError(f"`args` must be a `{config_class.__name__}`, got `{type(args).__name__}`.")
    return args


def check_config(
    config: Any,
    *,
    choices: Sequence[str] = (),
    at_least: Mapping[str, int] | None = None,
    above_zero: Mapping[str, float] | None = None,
    dicts: Sequence[str] = (),
) -> None:
    """
    Checks the options that a configuration adds to those of Transformers and TRL, and refuses some of theirs.

    Args:
        config (`TrainingArguments`): The configuration.
        choices (sequence of `str`): Options whose field lists `choices`.
        at_least (`Mapping`): The lowest values of numbers.
        above_zero (`Mapping`): The highest values of numbers that are above 0.
        dicts (sequence of `str`): Options that are `None`, a `dict` or JSON.

    Raises:
        `ValueError`: Names the option and its value.
    """
    refuse_options(config)
    for name in choices:
        allowed = config.__dataclass_fields__[name].metadata["choices"]
        if getattr(config, name) not in allowed:
            raise ValueError(f"`{name}` must be one of {allowed}, got {getattr(config, name)!r}.")
    for name, lowest in (at_least or {}).items():
        if getattr(config, name) < lowest:
            raise ValueError(f"`{name}` must be at least {lowest}, got {getattr(config, name)}.")
    for name, highest in (above_zero or {}).items():
        if not 0 < getattr(config, name) <= highest:
            raise ValueError(f"`{name}` must be above 0 and at most {highest}, got {getattr(config, name)}.")
    for name in dicts:
        if not isinstance(getattr(config, name), dict | None):
            raise ValueError(f"`{name}` must be a `dict` or a JSON object, got {getattr(config, name)!r}.")


def check_tree_config(config: Any, preparation: Sequence[str]) -> None:
    """Raises `ValueError` for packed sequences in larger batches, and for options of a preparation that is skipped."""
    if config.max_packed_tokens is not None and config.pack_trees:
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            if getattr(config, name) > 1:
                raise ValueError(
                    f"`{name}={getattr(config, name)}` would concatenate sequences of `max_packed_tokens="
                    f"{config.max_packed_tokens}`. Set `{name}=1`: a packed sequence is a batch by itself."
                )
    if not (config.dataset_kwargs or {}).get("skip_prepare_dataset"):
        return
    defaults = {name: config.__dataclass_fields__[name].default for name in preparation}
    ignored = [f"`{n}={getattr(config, n)!r}`" for n, default in defaults.items() if getattr(config, n) != default]
    if ignored:
        raise ValueError(
            f"{', '.join(ignored)}: without effect under `dataset_kwargs={{'skip_prepare_dataset': True}}`. Leave out "
            "these options, or `skip_prepare_dataset`: trees are taken as they are without it."
        )


def check_collator(collator: Any, collator_class: type, args: Any, names: Sequence[str] = ()) -> None:
    """Raises `ValueError` for a collator of another class, or of other values of the options `names` than `args`."""
    if not isinstance(collator, collator_class) or not getattr(collator, "keeps_sample_index", True):
        raise ValueError(f"`data_collator` must be a `{collator_class.__name__}`, got `{type(collator).__name__}`.")
    for name in names:
        value, expected = getattr(collator, name), getattr(args, name)
        if expected is not None and value != expected:
            raise ValueError(
                f"`data_collator` has `{name}={value!r}` and `args` has {expected!r}: pass the same, or leave "
                "`data_collator` out."
            )


def check_texts(trainer: Any) -> None:
    """Raises `ValueError` where `SFTTrainer` found images in the training dataset."""
    if trainer._is_vision_dataset:
        raise ValueError("`train_dataset` has images, which this trainer does not support: use a dataset of texts.")


def check_grouped_mode(trainer: Any) -> None:
    """Raises `ValueError` where several backwards of a micro-batch could mean several optimizer steps."""
    if trainer.is_deepspeed_enabled:
        raise ValueError(
            "`mode='grouped'` does several backwards in a micro-batch, and DeepSpeed may step after each. Use DDP or "
            "FSDP, or `mode='tree'`."
        )


def refuse_tensor_parallelism(trainer: Any) -> None:
    """Raises `ValueError` under tensor parallelism."""
    if trainer.get_tp_size() > 1:
        raise ValueError(
            f"Tensor parallelism ({trainer.get_tp_size()} devices) is not supported: use DDP or FSDP2 instead."
        )


def check_tree_batch(batch: Mapping[str, Any]) -> None:
    """Raises `ValueError` for a batch that holds no trees."""
    if "tree_stats" not in batch:
        raise ValueError(
            f"A batch has no `tree_stats`, only {sorted(batch)}: pass "
            "`data_collator=DataCollatorForPrefixTree(pad_token_id)`."
        )


def check_loss(trainer: Any, outputs: Any) -> torch.Tensor:
    """The model's own loss; raises `ValueError` where there is none."""
    loss = getattr(outputs, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(trainer).__name__} or its model computes the loss by itself, so it cannot be weighted: put "
            "`TreeLossMixin` before `transformers.Trainer` or TRL's `SFTTrainer`."
        )
    return loss


def check_split_stream(args: Any) -> None:
    """Raises `ValueError` where a stream of packed rows may hold split trees."""
    if getattr(args, "overflow", "split") == "split":
        raise ValueError(
            "`train_dataset` is a stream with `tree_ids`, and nothing keeps the parts of a split tree of a stream in "
            "one optimizer step. Set `overflow='drop'` or `'raise'`, or load the dataset whole."
        )


def check_split_strategy(strategy: str, allowed: Sequence[str]) -> None:
    """Raises `ValueError` for a `train_sampling_strategy` that knows nothing of split trees."""
    if strategy not in allowed:
        raise ValueError(
            f"`train_sampling_strategy={strategy!r}` would tear the parts of split trees apart. Set it to one of "
            f"{allowed}."
        )


def split_tree_ids(tree_ids: Sequence[Sequence[int]], num_parts: Sequence[Sequence[int]]) -> list[list[int]]:
    """
    The ids of split trees alone, checked: all parts of each are there.

    Args:
        tree_ids (sequence of sequences of `int`): The ids of each row's trees.
        num_parts (sequence of sequences of `int`): For each of them, the parts that its tree has in all rows.

    Returns:
        `list` of `list` of `int`: for each row, the ids of those with several parts.

    Raises:
        `ValueError`: If a tree's parts are not all there. (A dataset may hold a tree several times.)

    Example:

    ```python
    >>> split_tree_ids([[7, 8], [9], [8]], [[1, 2], [1], [2]])
    [[8], [], [8]]

    ```
    """
    split = [
        [(tree_id, parts) for tree_id, parts in zip(ids, numbers, strict=True) if parts > 1]
        for ids, numbers in zip(tree_ids, num_parts, strict=True)
    ]
    counts = Counter(key for row in split for key in row)
    torn = [(tree_id, parts, count) for (tree_id, parts), count in counts.items() if count % parts]
    if torn:
        tree_id, parts, count = torn[0]
        raise ValueError(
            f"`train_dataset`: rows with parts of a split tree are missing: tree {tree_id} has {parts} parts, of "
            f"which {count} are there; {len(torn)} trees are like that. Select before the trees are packed "
            "(`max_examples`), or keep all rows that have a `tree_ids` entry in common."
        )
    return [[tree_id for tree_id, _ in row] for row in split]


def check_unit_sizes(largest: int, block_size: int) -> None:
    """Raises `ValueError` where rows that belong together do not fit into one optimizer step."""
    if largest > block_size:
        raise ValueError(
            f"{largest} rows hold parts of the same split trees and must be in one optimizer step, which has "
            f"{block_size} (`gradient_accumulation_steps` x processes x `per_device_train_batch_size`). Raise "
            "`gradient_accumulation_steps`, or raise `max_packed_tokens`, so that trees have fewer parts."
        )


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
