# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What [`Eagle3Trainer`] starts from: the target by its name, a new draft for it, and whether the two fit together."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, PreTrainedModel, set_seed

from hf_prefix_tree.collators.eagle3 import HIDDEN_STATES, DataCollatorForEagle3
from hf_prefix_tree.eagle3.arguments import Eagle3Config
from hf_prefix_tree.eagle3.config import Eagle3DraftConfig
from hf_prefix_tree.eagle3.draft import Eagle3DraftModel
from hf_prefix_tree.eagle3.mapping_cache import load_or_build_token_mapping
from hf_prefix_tree.eagle3.target import TARGET_FILE, Eagle3Target
from hf_prefix_tree.trainers.padding import PaddedDataset

logger = logging.getLogger(__name__)


def resolve_target(target_model: Any, args: Eagle3Config, model: Any) -> Eagle3Target:
    """The target, whatever it was given as; its auxiliary layers are those of `args`, of the draft, or the default."""
    if isinstance(target_model, Eagle3Target):
        return target_model
    if isinstance(target_model, (str, Path)):
        if Path(target_model, TARGET_FILE).is_file():
            return Eagle3Target.from_precomputed(target_model)
        settings = {"dtype": "auto", **(args.target_model_init_kwargs or {})}  # type: ignore[dict-item]
        target_model = AutoModelForCausalLM.from_pretrained(target_model, **settings)
    if not isinstance(target_model, PreTrainedModel):
        remedy = " Merge its adapter first: `merge_and_unload()`." if hasattr(target_model, "peft_config") else ""
        raise ValueError(
            f"`target_model` must be a causal LM, its name, or the folder of `precompute_hidden_states`, got "
            f"{type(target_model).__name__}.{remedy}"
        )
    layer_ids = args.aux_layer_ids
    if layer_ids is None and isinstance(model, Eagle3DraftModel):
        layer_ids = model.config.aux_layer_ids
    elif layer_ids is None and isinstance(model, str):
        layer_ids = Eagle3DraftConfig.from_pretrained(model).aux_layer_ids
    return Eagle3Target(target_model, layer_ids, args.attn_backend)


def new_draft(
    target: Eagle3Target, args: Eagle3Config, rows: Any, collator: DataCollatorForEagle3, tokenizer: Any
) -> Eagle3DraftModel:
    """A draft for the target: the vocabulary from the rows, embedding and head from the target."""
    config = Eagle3DraftConfig.from_target(
        target.config, draft_vocab_size=args.draft_vocab_size, aux_layer_ids=target.aux_layer_ids
    )
    set_seed(args.seed)  # as `Trainer` does, too late for the draft
    draft = Eagle3DraftModel(config)
    if config.draft_vocab_size < config.vocab_size:
        if rows is None:
            raise ValueError("`train_dataset` is needed to choose the draft vocabulary: pass it, or a `model`.")
        ids, _ = load_or_build_token_mapping(
            _counting_loader(rows, args, collator),
            target_vocab_size=config.vocab_size,
            draft_vocab_size=config.draft_vocab_size,
            special_token_ids=None if tokenizer is None else sorted(tokenizer.all_special_ids),
            cache_path=args.selected_token_ids_path,
            tokenizer=tokenizer,
        )
        draft.set_draft_vocabulary(ids)
    draft.init_from_target(target.embedding, target.head)
    return draft


def _counting_loader(rows: Any, args: Eagle3Config, collator: DataCollatorForEagle3) -> DataLoader:
    """Each rank's part of the data, every row once; without the hidden states, which counting does not need."""
    if hasattr(rows, "column_names") and HIDDEN_STATES in (rows.column_names or ()):
        rows = rows.remove_columns(HIDDEN_STATES)
    ranks, rank = args.world_size, args.process_index
    if not hasattr(rows, "__len__"):
        from datasets.distributed import split_dataset_by_node

        return DataLoader(split_dataset_by_node(rows, rank=rank, world_size=ranks), collate_fn=collator)
    sampler: DistributedSampler = DistributedSampler(
        PaddedDataset(rows, ranks), num_replicas=ranks, rank=rank, shuffle=False
    )
    return DataLoader(sampler.dataset, batch_size=1, sampler=sampler, collate_fn=collator)


def check_pair(model: Any, target: Eagle3Target, args: Eagle3Config) -> None:
    """Raises `ValueError` where the draft is none, or that of another target, or not what `args` ask for."""
    if not isinstance(model, Eagle3DraftModel):
        raise ValueError(f"`model` must be an `Eagle3DraftModel` or a checkpoint of one, got {type(model).__name__}.")
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
    own, theirs = (weight[:: max(1, len(weight) // 1024)] for weight in (model.embed_tokens.weight, target.embedding))
    if own.shape == theirs.shape and not torch.equal(own, theirs.to(own)):
        logger.warning(
            "The embedding of `model` is not the target's, and it is frozen: engines will put the target's in its "
            "place. Call `model.init_from_target(target.get_input_embeddings().weight)` before training."
        )
