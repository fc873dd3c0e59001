# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`Eagle3Config`]: Transformers' `TrainingArguments`, plus how drafts are trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from hf_prefix_tree.trainers.options import refuse_options


@dataclass
class Eagle3Config(TrainingArguments):
    r"""
    Configuration of [`Eagle3Trainer`]: `TrainingArguments` with these parameters on top.

    Args:
        draft_vocab_size (`int`, *optional*):
            Size of the draft vocabulary. `None` is the target's.
        selected_token_ids_path (`str`, *optional*):
            File that keeps the draft vocabulary, see [`load_or_build_token_mapping`].
        aux_layer_ids (`list[int]`, *optional*):
            The three target layers whose outputs are fused, counted from 0. Defaults to those that engines read.
        ttt_steps (`int`, *optional*, defaults to `7`):
            Test-time-training steps: how many tokens the draft is unrolled for.
        step_decay (`float`, *optional*, defaults to `0.8`):
            Weight of a step in the loss, relative to the one before.
        seq_length (`int`, *optional*, defaults to `2048`):
            Longest document in tokens, where rows are padded.
        packed_sequence_size (`int`, *optional*, defaults to `0`):
            Slots of a packed row. `0` pads instead. FlexAttention needs a multiple of 128.
        packing_strategy (`str`, *optional*, defaults to `"best_fit"`):
            `"best_fit"` or `"next_fit"`, see [`pack_eagle3_dataset`].
        supervise_reasoning (`bool`, *optional*, defaults to `True`):
            Whether reasoning is supervised, in conversations.
        reasoning_end (`str`, *optional*, defaults to `"</think>"`):
            Text that ends the reasoning of a turn.
        dataset_num_proc (`int`, *optional*):
            Processes that render and pack.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            Attention of target and draft: `"flex"`, `"sdpa"` (dense) or `"auto"`.
        target_model_init_kwargs (`dict[str, Any]`, *optional*):
            Arguments for `AutoModelForCausalLM.from_pretrained` where the target is a name.

    > [!NOTE]
    > Unlike in `TrainingArguments`, `logging_steps` defaults to 10 and `learning_rate` to 1e-4.
    """

    _VALID_DICT_FIELDS = [*TrainingArguments._VALID_DICT_FIELDS, "target_model_init_kwargs"]  # noqa: RUF012 - as in Transformers

    logging_steps: float = field(default=10, metadata={"help": "Log every X updates steps."})
    learning_rate: float = field(default=1e-4, metadata={"help": "The initial learning rate."})
    draft_vocab_size: int | None = field(default=None, metadata={"help": "Size of the draft vocabulary."})
    selected_token_ids_path: str | None = field(
        default=None, metadata={"help": "File that keeps the draft vocabulary between runs."}
    )
    aux_layer_ids: list[int] | None = field(
        default=None, metadata={"help": "The three target layers whose outputs are fused, counted from 0."}
    )
    ttt_steps: int = field(default=7, metadata={"help": "Steps that the draft is unrolled for in training."})
    step_decay: float = field(default=0.8, metadata={"help": "Weight of a step, relative to the one before."})
    seq_length: int = field(default=2048, metadata={"help": "Longest document in tokens, where rows are padded."})
    packed_sequence_size: int = field(default=0, metadata={"help": "Slots of a packed row; 0 pads instead."})
    packing_strategy: str = field(
        default="best_fit", metadata={"help": "How rows are packed.", "choices": ["best_fit", "next_fit"]}
    )
    supervise_reasoning: bool = field(default=True, metadata={"help": "Whether reasoning is supervised."})
    reasoning_end: str = field(default="</think>", metadata={"help": "Text that ends the reasoning of a turn."})
    dataset_num_proc: int | None = field(default=None, metadata={"help": "Processes that render and pack."})
    attn_backend: str = field(
        default="auto",
        metadata={"help": "Attention of target and draft.", "choices": ["auto", "flex", "sdpa"]},
    )
    target_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Arguments for loading the target by its name."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_options(self)
        for name in ("ttt_steps", "seq_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.packed_sequence_size < 0:
            raise ValueError(f"`packed_sequence_size` must be at least 0 (0 pads), got {self.packed_sequence_size}.")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"`step_decay` must be above 0 and at most 1, got {self.step_decay}.")
        for name in ("packing_strategy", "attn_backend"):
            choices = self.__dataclass_fields__[name].metadata["choices"]
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be one of {choices}, got {getattr(self, name)!r}.")
