# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Checks of what users pass to trainers: arguments, options, datasets and the engines of Accelerate.

Beside them, two adaptations of engines that are served.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from packaging.version import Version

from hf_prefix_tree.training.options import TESTED, check_types, refuse_options
from hf_prefix_tree.tree.folding import check_choice, check_integer


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


_FUNCTIONS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")


def _refuse_functions(given: Mapping[str, Any], names: Sequence[str] = _FUNCTIONS) -> None:
    for name in names:
        if given.get(name) is not None:
            raise ValueError(f"`{name}` is not supported: it expects rows or logits of another layout. Leave it out.")


def check_trainer(trainer: Any) -> None:
    """
    Refuses engines and functions under which the loss of a step would be another one.

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
    _refuse_functions({k: function for k, function in vars(trainer).items() if k not in trainer.served_functions})
    at_least = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 1}
    check_config(trainer.args, at_least=at_least)
    strategies = trainer.args.__dataclass_fields__["train_sampling_strategy"].metadata["choices"]
    check_choice(trainer.args.train_sampling_strategy, "train_sampling_strategy", strategies)


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
    args: Config | None, config_class: type[Config], model: Any, purpose: str, given: Mapping[str, Any]
) -> Config:
    """
    The configuration of a trainer, checked.

    Args:
        args (`config_class`, *optional*): The user's.
        config_class (`type`): The configuration that it must be.
        model (`str` or `PreTrainedModel`): Must be there; names the output folder where `args` is `None`.
        purpose (`str`): The end of that name.
        given (`Mapping`): Further keyword arguments of the trainer.

    Raises:
        `ValueError`: For a configuration of another class, and refused arguments.
    """
    _refuse_functions(given, (*_FUNCTIONS, "formatting_func", "model_init"))
    if model is None:
        raise ValueError("`model` is None: pass a causal LM, or its name.")
    if args is None:
        name = model if isinstance(model, str) else model.config._name_or_path
        return config_class(f"{name.split('/')[-1] or type(model).__name__}-{purpose}")  # type: ignore[call-arg]
    if not isinstance(args, config_class):
        raise ValueError(f"`args` must be a `{config_class.__name__}`, got `{type(args).__name__}`.")
    return args


def check_config(
    config: Any, *, at_least: Mapping[str, int] | None = None, above_zero: Mapping[str, float] | None = None
) -> None:
    """
    Checks the options that a configuration adds to those of Transformers and TRL, and refuses some of theirs.

    Args:
        config (`TrainingArguments`): The configuration. Values of this package's fields must be of their type and
            one of their `choices`.
        at_least (`Mapping`): The lowest values of integers.
        above_zero (`Mapping`): The highest values of numbers that are finite and above 0.

    Raises:
        `ValueError`: Names the option and its value.
    """
    refuse_options(config)
    check_types(config)
    for name, lowest in (at_least or {}).items():
        value = getattr(config, name)
        for number in value if isinstance(value, list) else [] if value is None else [value]:
            check_integer(number, name, lowest)
    for name, highest in (above_zero or {}).items():
        value = getattr(config, name)
        if not 0 < value <= highest or math.isinf(value):
            limit = "" if math.isinf(highest) else f" and at most {highest}"
            raise ValueError(f"`{name}` must be above 0{limit}, got {value!r}.")


def check_tree_config(config: Any, preparation: Sequence[str]) -> None:
    """Raises `ValueError` for packed sequences in larger batches, and for options of a preparation that is skipped."""
    if config.max_packed_tokens is not None and config.pack_trees:
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            if getattr(config, name) > 1:
                raise ValueError(
                    f"`{name}={getattr(config, name)}` would concatenate sequences of `max_packed_tokens="
                    f"{config.max_packed_tokens}`. Set `{name}=1`: a packed sequence is a batch by itself."
                )
    if config.overflow == "stream":  # which is not the preparation's work
        preparation = [name for name in preparation if name not in ("overflow", "max_packed_tokens")]
    defaults = {name: config.__dataclass_fields__[name].default for name in preparation}
    refuse_ignored(
        config, [f"`{n}={getattr(config, n)!r}`" for n, default in defaults.items() if getattr(config, n) != default]
    )


def refuse_ignored(config: Any, given: Sequence[str]) -> None:
    """Raises `ValueError` where the preparation is skipped that the `given` arguments would change."""
    if given and (config.dataset_kwargs or {}).get("skip_prepare_dataset"):
        raise ValueError(
            f"{', '.join(given)}: without effect under `dataset_kwargs={{'skip_prepare_dataset': True}}`. Leave out "
            "these options, or `skip_prepare_dataset`: trees are taken as they are without it."
        )


def check_streaming_config(config: Any, size: str = "max_packed_tokens") -> None:
    """Raises `ValueError` for options under which micro-batches cannot be computed in parts, or trees not streamed."""
    streams, is_grouped = config.overflow in ("stream", "auto"), getattr(config, "mode", "tree") == "grouped"
    given = f"`overflow={config.overflow!r}`" if streams else "`mode='grouped'`"
    if streams and not getattr(config, size):
        raise ValueError(f"{given} needs `{size}`, of a pass or a packed sequence: set it, to 8192 say.")
    if streams and is_grouped:
        raise ValueError(f"{given} has no meaning under `mode='grouped'`, which computes branch by branch.")
    optimizer = config.optim.lower()
    if (streams or is_grouped) and ("lomo" in optimizer or "layerwise" in optimizer):
        raise ValueError(
            f"`optim={optimizer!r}` changes weights in the backward, and {given} may have several in a step: use "
            "another optimizer."
        )


def check_streaming(trainer: Any, in_calls: bool = False) -> None:
    """
    Raises `ValueError` where an engine or the loss of a router does not allow that trees are streamed.

    Args:
        trainer (`Trainer`): The trainer, initialised.
        in_calls (`bool`, *optional*, defaults to `False`): Whether sections are calls inside of a call of the model.
    """
    engine = "DeepSpeed" if trainer.is_deepspeed_enabled else "Tensor parallelism" if trainer.get_tp_size() > 1 else ""
    is_sharded = trainer.accelerator.is_fsdp2 or getattr(trainer, "is_distributed_loading_by_transformers", False)
    if engine := engine or "FSDP2" * (in_calls and is_sharded):
        raise ValueError(
            f"{engine} does not allow the several backwards of a micro-batch that `overflow='stream'` does. Use DDP"
            f"{'' if in_calls else ' or FSDP2'}, or `overflow='split'`."
        )
    if trainer.aux_loss_enabled:
        raise ValueError(
            "The router's auxiliary loss is that of all tokens of a micro-batch together, which `overflow='stream'` "
            "computes apart: set `router_aux_loss_coef=0`, or use `overflow='split'`."
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


def padding_token_of(tokenizer: Any, pad_token_id: int | None = None) -> int:
    """`pad_token_id`, the padding token, or the end token in its place; raises `ValueError` where there is none."""
    for token_id in (pad_token_id, *(getattr(tokenizer, f"{name}_token_id", None) for name in ("pad", "eos"))):
        if token_id is not None:
            return token_id
    raise ValueError(
        "There is neither a padding nor an end token: pass a tokenizer that has one (set its `pad_token`), or a "
        "`pad_token_id`."
    )


def check_mask_token(mask_token_id: int | None, num_embeddings: int) -> int:
    """
    The id of the mask token, checked.

    Args:
        mask_token_id (`int`, *optional*): The id.
        num_embeddings (`int`): Embeddings of the model.

    Raises:
        `ValueError`: Where there is none, or the model does not know it.
    """
    if mask_token_id is None:
        raise ValueError(
            "There is no mask token: add one with `tokenizer.add_special_tokens({'mask_token': '<|mask|>'})` and "
            "`model.resize_token_embeddings(len(tokenizer))`, or pass the id of a token that your data never holds as "
            "`mask_token_id`."
        )
    if not 0 <= mask_token_id < num_embeddings:
        raise ValueError(
            f"`mask_token_id` is {mask_token_id}, but the model has {num_embeddings} embeddings: call "
            "`model.resize_token_embeddings(len(tokenizer))` first."
        )
    return mask_token_id


def check_mask_meaning(mask_token_id: int, collator: Any) -> None:
    """Raises `ValueError` for a mask token that also pads or ends responses in [`DataCollatorForDiffusionLM`]."""
    for is_supervised, token_id, role in (
        (True, collator.block_pad_token_id, "also ends a response"),
        (collator.supervise_padding, collator.pad_token_id, "also pads, which `supervise_padding` teaches"),
    ):
        if is_supervised and mask_token_id == token_id:
            raise ValueError(
                f"`mask_token_id` is {mask_token_id}, which {role}: pass a token that your data never holds."
            )


def check_pair(model: Any, draft_class: Any, target: Any, args: Any) -> None:
    """Raises `ValueError` where the draft of EAGLE-3 does not fit the target or contradicts `args`."""
    if not isinstance(model, draft_class):
        raise ValueError(f"`model` must be an `{draft_class.__name__}`, or a checkpoint, got {type(model).__name__}.")
    expected = {
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.head.shape[1],
        "aux_layer_ids": target.aux_layer_ids,
    }
    for name, value in expected.items():
        if getattr(model.config, name) != value:
            raise ValueError(
                f"`model` was made for another target: its `{name}` is {getattr(model.config, name)}, the target's "
                f"{value}. Pass the target that it belongs to, or leave `model` out."
            )
    asked = None if args.draft_vocab_size is None else min(args.draft_vocab_size, target.vocab_size)
    if asked not in (None, model.config.draft_vocab_size):
        raise ValueError(
            f"`draft_vocab_size={args.draft_vocab_size}`, but that of `model` is {model.config.draft_vocab_size}, "
            "which training does not change: leave out one of them."
        )
    if args.aux_layer_ids not in (None, target.aux_layer_ids):
        raise ValueError(
            f"`aux_layer_ids={args.aux_layer_ids}`, but `target_model` gives the layers {target.aux_layer_ids}: leave "
            "`aux_layer_ids` out, or make the target (or its hidden states) for these layers."
        )


def check_vocabulary_rows(rows: Any) -> None:
    """Raises `ValueError` where there are no rows to choose the draft vocabulary from."""
    if rows is None:
        raise ValueError("`train_dataset` is needed to choose the draft vocabulary: pass it, or a `model`.")


def refuse_tensor_parallelism(trainer: Any) -> None:
    """Raises `ValueError` under tensor parallelism."""
    if trainer.get_tp_size() > 1:
        raise ValueError(
            f"Tensor parallelism ({trainer.get_tp_size()} devices) is not supported: use DDP or FSDP2 instead."
        )


def check_batch(batch: Mapping[str, Any], names: Sequence[str], remedy: str) -> None:
    """Raises `ValueError`, with the remedy, for a batch that lacks one of the entries, or in which it is `None`."""
    if missing := [f"`{name}`" for name in names if batch.get(name) is None]:
        raise ValueError(f"A batch has no {', '.join(missing)}, only {sorted(batch)}: {remedy}.")


def own_loss(trainer: Any) -> str:
    """Why a loss that is not the mixin's is refused."""
    return (
        f"{type(trainer).__name__} or its model computes the loss by itself, so it cannot be weighted: put "
        "`TreeLossMixin` before `transformers.Trainer` or TRL's `SFTTrainer`, and have `compute_loss` call the one of "
        "`super()`."
    )


def check_loss(trainer: Any, returned: torch.Tensor, outputs: Any) -> torch.Tensor:
    """The loss of the model; raises `ValueError` where there is none, or the trainer returned another one."""
    loss = getattr(outputs, "loss", None)
    if loss is None or returned is not loss:
        raise ValueError(own_loss(trainer))
    return loss


def check_split_stream(args: Any) -> None:
    """Raises `ValueError` where a stream of packed rows may hold split trees."""
    if getattr(args, "overflow", "split") == "split":
        raise ValueError(
            "`train_dataset` is a stream with `tree_ids`, and nothing keeps the parts of a split tree of a stream in "
            "one optimizer step. Set `overflow='stream'`, `'drop'` or `'raise'`, or load the dataset whole."
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


for _name, (_, _highest) in TESTED.items():  # once, when a trainer is imported
    if Version(version(_name)) > Version(_highest):
        logging.getLogger(__name__).warning(
            "%s %s is newer than %s, the newest version that hf_prefix_tree is tested with: it may have options that "
            "are neither honoured nor refused.",
            _name,
            version(_name),
            _highest,
        )
