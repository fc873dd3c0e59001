# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`Eagle3Config`], how drafts are trained, and [`Eagle3DraftConfig`], the shape of a draft head.

A draft has the shape of a Llama layer for any target, which is what engines serve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig, PretrainedConfig, TrainingArguments

from hf_prefix_tree.training.checks import check_config
from hf_prefix_tree.training.options import option_field


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
            Longest branch or document in tokens, and the length that documents are padded to.
        packed_sequence_size (`int`, *optional*, defaults to `0`):
            Positions of a packed sequence, and in place of `seq_length` the longest branch or document; larger trees
            are split. `0` packs nothing: a dataset row is one tree or document. FlexAttention needs a multiple of 128.
        packing_strategy (`str`, *optional*, defaults to `"best_fit"`):
            `"best_fit"` or `"next_fit"`, see [`pack_eagle3_dataset`].
        supervise_reasoning (`bool`, *optional*, defaults to `True`):
            Whether reasoning is supervised, in conversations.
        reasoning_end (`str`, *optional*, defaults to `"</think>"`):
            Text that ends the reasoning of a turn.
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a dataset row that can't be read stops the preparation, or is skipped (`"skip"`) and counted.
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

    logging_steps: float = option_field(10, "Log every X updates steps.")
    learning_rate: float = option_field(0.0001, "The initial learning rate.")
    draft_vocab_size: int | None = option_field(None, "Size of the draft vocabulary.")
    selected_token_ids_path: str | None = option_field(None, "File that keeps the draft vocabulary between runs.")
    aux_layer_ids: list[int] | None = option_field(
        None, "The three target layers whose outputs are fused, counted from 0."
    )
    ttt_steps: int = option_field(7, "Steps that the draft is unrolled for in training.")
    step_decay: float = option_field(0.8, "Weight of a step, relative to the one before.")
    seq_length: int = option_field(2048, "Longest branch or document in tokens; documents are padded to it.")
    packed_sequence_size: int = option_field(0, "Positions of a packed sequence; 0 packs nothing.")
    packing_strategy: str = option_field("best_fit", "How documents are packed.", ["best_fit", "next_fit"])
    supervise_reasoning: bool = option_field(True, "Whether reasoning is supervised.")
    reasoning_end: str = option_field("</think>", "Text that ends the reasoning of a turn.")
    on_error: str = option_field("raise", "What happens to a dataset row that cannot be read.", ["raise", "skip"])
    dataset_num_proc: int | None = option_field(None, "Processes that render and pack.")
    attn_backend: str = option_field("auto", "Attention of target and draft.", ["auto", "flex", "sdpa"])
    target_model_init_kwargs: dict[str, Any] | str | None = option_field(
        None, "Arguments for loading the target by its name."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        lowest = dict.fromkeys(("draft_vocab_size", "ttt_steps", "seq_length", "dataset_num_proc"), 1)
        lowest |= {"aux_layer_ids": 0, "packed_sequence_size": 0}
        check_config(self, at_least=lowest, above_zero={"step_decay": 1})


@strict
class Eagle3DraftConfig(LlamaConfig):
    """
    Configuration of [`Eagle3DraftModel`]: that of a one-layer Llama, with these parameters on top.

    `vocab_size` is the target's. The draft has its own RoPE: `from_target` takes the target's base frequency and no
    scaling.

    Args:
        draft_vocab_size (`int`, *optional*):
            Size of the draft vocabulary; `None` for the target's.
        target_hidden_size (`int`, *optional*):
            Hidden size of the target; `None` for the draft's.
        aux_layer_ids (`list[int]`, *optional*):
            The three target layers whose outputs are fused, counted from 0.
        target_name_or_path (`str`, *optional*):
            The target, for exports that name it.
    """

    model_type = "eagle3_draft"

    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    aux_layer_ids: list[int] | None = None
    target_name_or_path: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        self.draft_vocab_size = self.vocab_size if self.draft_vocab_size is None else self.draft_vocab_size
        self.target_hidden_size = self.hidden_size if self.target_hidden_size is None else self.target_hidden_size
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"`draft_vocab_size` must be between 1 and `vocab_size` ({self.vocab_size}), got "
                f"{self.draft_vocab_size}."
            )
        for name in ("attention_bias", "mlp_bias", "attention_dropout"):
            if getattr(self, name):
                raise ValueError(
                    f"`{name}={getattr(self, name)}` is not served by engines' draft layers: set it to 0."
                )

    @classmethod
    def from_target(
        cls,
        target_config: PretrainedConfig,
        *,
        draft_vocab_size: int | None = None,
        aux_layer_ids: Sequence[int] | None = None,
        **overrides: Any,
    ) -> Eagle3DraftConfig:
        """
        The draft for a target.

        Args:
            target_config (`PretrainedConfig`): Config of the target.
            draft_vocab_size (`int`, *optional*): Size of the draft vocabulary.
            aux_layer_ids (sequence of `int`, *optional*): See [`default_aux_layer_ids`].
            overrides: Other values for any parameter.

        Example:

        ```python
        >>> from transformers import LlamaConfig
        >>> config = Eagle3DraftConfig.from_target(LlamaConfig(num_hidden_layers=32), draft_vocab_size=8192)
        >>> config.num_hidden_layers, config.draft_vocab_size, config.aux_layer_ids
        (1, 8192, [1, 15, 28])

        ```
        """
        text = target_config.get_text_config()
        values = {name: getattr(text, name) for name in _AS_IN_TARGET}
        if any(getattr(text, name, None) is not None for name in ("num_local_experts", "num_experts")):
            # Experts are small; a dense layer of the usual width stands in for them.
            values["intermediate_size"] = max(text.intermediate_size, 4 * text.hidden_size)
        if aux_layer_ids is None:
            aux_layer_ids = default_aux_layer_ids(text.num_hidden_layers)
        values |= {
            "target_hidden_size": text.hidden_size,
            "num_hidden_layers": 1,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(text)},
            "tie_word_embeddings": False,
            "draft_vocab_size": draft_vocab_size,
            "aux_layer_ids": list(aux_layer_ids),
            "target_name_or_path": getattr(target_config, "_name_or_path", None) or None,
        }
        config = cls(**{**values, **overrides})
        check_aux_layer_ids(config.aux_layer_ids, text.num_hidden_layers)
        return config


_AS_IN_TARGET = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
    *("max_position_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id"),
)


def default_aux_layer_ids(num_layers: int) -> list[int]:
    """
    The target layers that engines read by default: the outputs of layers 1, n/2 - 1 and n - 4.
    [`check_aux_layer_ids`] refuses them where the target is too small.

    Args:
        num_layers (`int`): Layers of the target.
    """
    return [1, num_layers // 2 - 1, num_layers - 4]


def check_aux_layer_ids(layer_ids: Sequence[int] | None, num_layers: float = math.inf) -> None:
    """Raises `ValueError` unless these are three ascending layers of a target of `num_layers` layers."""
    ids = list(layer_ids or ())
    if len(ids) != 3 or sorted(set(ids)) != ids or not 0 <= ids[0] <= ids[-1] < num_layers:
        raise ValueError(
            f"`aux_layer_ids` must be three ascending layers of the target, from 0 to {num_layers - 1}, got "
            f"{layer_ids}: pass the three that the draft reads, or engines would guess them."
        )


def _rope_theta(config: PretrainedConfig) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in parameters:  # one set for every type of layer
        parameters = parameters.get("full_attention") or parameters
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10000.0)
