# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeSFTConfig`]: TRL's `SFTConfig`, less what cannot be exact on trees, plus how trees are made."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from trl import SFTConfig

from hf_prefix_tree.data.prepare import CHECKED_OPTIONS, PREPARATION_CHOICES, check_preparation
from hf_prefix_tree.training.checks import check_config, check_streaming_config, check_tree_config
from hf_prefix_tree.training.options import option_field

logger = logging.getLogger(__name__)

# Options without effect under `dataset_kwargs={"skip_prepare_dataset": True}`.
PREPARATION = (
    *("reasoning", "chat_template_kwargs", "empty_thinking_in_prompt", "stop_token_ids", "column_names"),
    *("group_by", "max_length"),
    *("overlong", "on_error", "max_packed_tokens", "overflow", "pack_trees", "selection_metric"),
    *("selection_num_proc", "max_examples", "shuffle_dataset"),
)


@dataclass
class TreeSFTConfig(SFTConfig):
    r"""
    Configuration of [`TreeSFTTrainer`]: `SFTConfig` with these parameters on top.

    `packing=True` is taken as `max_packed_tokens=max_length`. Options that cannot be exact on trees raise `ValueError`
    (`docs/options.md` lists them). So do those of the preparation (all from `reasoning` to `max_examples`
    below, `max_length` and `shuffle_dataset`) under `dataset_kwargs={"skip_prepare_dataset": True}`.

    Args:
        weighting (`str`, *optional*, defaults to `"tree"`):
            `"tree"` weighs each branch 1/K (a token that g of K branches supervise weighs g/K), `"branch"` weighs each
            branch 1 (identical to training the unfolded branches), `"branch_mean"` weighs each branch 1 / its
            supervised tokens, `"once"` counts every unique supervised token once.
        reasoning (`str`, *optional*, defaults to `"per_turn"`):
            How conversations become branches, see [`conversation_branches`].
        chat_template_kwargs (`dict` or JSON `str`, *optional*):
            Further variables for the chat template. A row's own take precedence.
        empty_thinking_in_prompt (`bool`, *optional*, defaults to `True`):
            See [`conversation_branches`].
        stop_token_ids (`list[int]`, *optional*):
            The tokens at which generation ends, see [`conversation_branches`].
        column_names (`dict` or JSON `str`, *optional*):
            Columns of the datasets that have another name than here, e.g. `{"messages": "conversation"}`.
        group_by (`str`, *optional*):
            Column whose equal values make one tree out of several rows.
        overlong (`str`, *optional*, defaults to `"truncate"`):
            What happens to a branch longer than `max_length`: `"truncate"`, `"drop"` or `"raise"`.
        on_error (`str`, *optional*, defaults to `"raise"`):
            What happens to a dataset row that cannot be rendered: `"raise"` or `"skip"` (counted and logged).
        max_packed_tokens (`int`, *optional*):
            Most tokens of a packed sequence. Small trees are packed together up to it; `overflow` says what happens to
            a larger one. At least `max_length`, unless larger ones are streamed. A packed sequence is then a batch by
            itself: batch sizes must be 1, unless `pack_trees=False`.
        overflow (`str`, *optional*, defaults to `"split"`):
            What happens to a tree of more than `max_packed_tokens` tokens: `"split"` into dataset rows of one
            optimizer step that have the whole tree's gradient together, `"stream"` through the model in passes of at
            most so many tokens, none of them computed twice, with the activations of one path in memory, `"drop"` or
            `"raise"`. A branch may be longer than `max_packed_tokens` only if it is streamed. With
            `activation_offloading=True` all that waits is kept by the host. `"auto"` splits or streams, by counted
            FLOPs and memory ([`choose_overflow`]), where `max_packed_tokens` is the largest packed sequence that fits;
            the log says which and why.
        pack_trees (`bool`, *optional*, defaults to `True`):
            Whether several trees share a packed sequence under `max_packed_tokens`. With `False` a dataset row is one
            tree, or one part of a split tree, and `per_device_train_batch_size` counts those.
        selection_metric (`str`, *optional*):
            Ranks the trees that `max_examples` chooses from: `"branching_score"`, `"forked_context"`,
            `"token_ratio"`, `"pair_ratio"` or `"num_turns"`. See [`prepare_trees`].
        selection_num_proc (`int`, *optional*):
            Number of processes that compute `selection_metric`.
        max_examples (`int`, *optional*):
            Number of trees to train on. `None` keeps all. Evaluation datasets are not selected from.
        mode (`str`, *optional*, defaults to `"tree"`):
            `"tree"` computes every token of a tree once. `"grouped"` is the baseline: the same loss and gradients,
            computed branch by branch, each branch's backward before the next one's forward.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            See [`prepare_model`].
        compile_layers (`bool`, *optional*, defaults to `False`):
            Compiles each decoder layer by itself, see [`prepare_model`]. Works with gradient checkpointing, PEFT and
            FSDP2; refused with DeepSpeed.

    > [!NOTE]
    > The defaults of these parameters differ from `SFTConfig`: `max_length` is `None` instead of `1024`, which would
    > cut most agent dialogues before their first supervised token. `per_device_train_batch_size` and
    > `per_device_eval_batch_size` are `1` instead of `8`, as trees are large and those of a batch share one packed
    > sequence.
    >
    > With several processes the rows of a step are assigned so that these wait little for each other (`tree/imbalance`
    > in the logs). As they meet at every micro-batch, that needs several rows in each: a larger
    > `per_device_train_batch_size` with fewer `gradient_accumulation_steps` (and `pack_trees=False` with
    > `max_packed_tokens`).
    > `train_sampling_strategy="group_by_length"` helps, too: the rows of a step then cost alike.
    """

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "chat_template_kwargs", "column_names"]  # noqa: RUF012

    per_device_train_batch_size: int = option_field(
        1, "Dataset rows of a micro-batch on each device. They share one packed sequence."
    )
    per_device_eval_batch_size: int = option_field(1, "The same for evaluation, where it changes no result.")

    max_length: int | None = option_field(
        None, "Longest branch in tokens; see `overlong`. `None` leaves branches whole."
    )
    weighting: str = option_field(
        "tree",
        "Weight of a branch: 'tree' 1/K, 'branch' 1, 'branch_mean' 1 / its supervised tokens; 'once': 1 per token.",
        PREPARATION_CHOICES["weighting"],
    )
    reasoning: str = option_field("per_turn", "How conversations become branches.", PREPARATION_CHOICES["reasoning"])
    chat_template_kwargs: dict[str, Any] | str | None = option_field(
        None, "Further variables for the chat template, as a JSON object."
    )
    empty_thinking_in_prompt: bool = option_field(
        True, "Whether an empty reasoning block that the template adds is part of the prompt."
    )
    stop_token_ids: list[int] | None = option_field(
        None, "Tokens at which generation ends. By default what the tokenizer's folder or the chat template says."
    )
    column_names: dict[str, str] | str | None = option_field(
        None, "Columns of the datasets that have another name than here, as a JSON object."
    )
    group_by: str | None = option_field(None, "Column whose equal values make one tree out of several rows.")
    overlong: str = option_field(
        "truncate", "What happens to a branch longer than `max_length`.", PREPARATION_CHOICES["overlong"]
    )
    on_error: str = option_field(
        "raise", "What happens to a dataset row that cannot be rendered.", PREPARATION_CHOICES["on_error"]
    )
    max_packed_tokens: int | None = option_field(
        None, "Most tokens of a packed sequence; see `overflow` and `pack_trees`. `None` sets no limit."
    )
    overflow: str = option_field(
        "split",
        "What happens to a tree of more than `max_packed_tokens` tokens.",
        ["auto", *PREPARATION_CHOICES["overflow"]],
    )
    pack_trees: bool = option_field(True, "Whether several trees share a packed sequence under `max_packed_tokens`.")
    selection_metric: str | None = option_field(
        None, "Ranks the trees that `max_examples` chooses from.", PREPARATION_CHOICES["selection_metric"]
    )
    selection_num_proc: int | None = option_field(None, "Number of processes that compute `selection_metric`.")
    max_examples: int | None = option_field(None, "Number of trees to train on. `None` keeps all.")
    mode: str = option_field(
        "tree",
        "'tree' computes every token of a tree once; 'grouped' the same branch by branch, as a baseline.",
        ["tree", "grouped"],
    )
    attn_backend: str = option_field("auto", "Attention of the tree path.", ["auto", "flex", "flash", "sdpa"])
    compile_layers: bool = option_field(
        False, "Whether each decoder layer is compiled, with the tree attention inside."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:  # type: ignore[has-type]  # from here on an option of trees, which TRL must not pack
            if self.max_length is None:
                raise ValueError(
                    "`packing=True` packs up to `max_length`, which is None; set it or `max_packed_tokens`."
                )
            self.packing = False
            self.max_packed_tokens = self.max_packed_tokens or self.max_length
            if self.process_index == 0:
                logger.warning("`packing=True` packs trees: it is `max_packed_tokens=%d`.", self.max_packed_tokens)
        check_config(self, at_least={"stop_token_ids": 0})
        check_streaming_config(self)
        if self.dataset_text_field != "text":
            self.column_names = {"text": self.dataset_text_field, **(self.column_names or {})}  # type: ignore[dict-item]
        check_tree_config(self, PREPARATION)
        options = {name: getattr(self, name) for name in CHECKED_OPTIONS if hasattr(self, name)}
        if self.overflow == "auto":  # chosen when the trees are known
            options["overflow"] = "stream"
        check_preparation(**options)
