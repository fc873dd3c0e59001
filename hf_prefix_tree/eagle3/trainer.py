# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`Eagle3Trainer`]: Transformers' `Trainer` on draft heads."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

import torch
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, set_seed
from transformers.trainer_utils import PredictionOutput

from hf_prefix_tree.data.rows import columns_of
from hf_prefix_tree.eagle3.attention import DRAFT_KEYS, draft_slots
from hf_prefix_tree.eagle3.collator import HIDDEN_STATES, ROW_COLUMNS, DataCollatorForEagle3
from hf_prefix_tree.eagle3.config import Eagle3Config, Eagle3DraftConfig
from hf_prefix_tree.eagle3.data import prepare_eagle3_trees
from hf_prefix_tree.eagle3.loss import StepSums, needed_targets, weighted_steps
from hf_prefix_tree.eagle3.model import Eagle3DraftModel
from hf_prefix_tree.eagle3.target import STATES, TARGET_FILE, Eagle3Target
from hf_prefix_tree.eagle3.vocabulary import load_or_build_token_mapping, t2d_from_ids
from hf_prefix_tree.modeling.batch import BLOCK_SIZE
from hf_prefix_tree.training import checks
from hf_prefix_tree.training.sampling import rank_loader
from hf_prefix_tree.training.step import LossTerms, StepMixin

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
    layer_ids = args.aux_layer_ids
    if layer_ids is None and isinstance(model, Eagle3DraftModel):
        layer_ids = model.config.aux_layer_ids
    return Eagle3Target(target_model, layer_ids, args.attn_backend)


def new_draft(
    target: Eagle3Target, args: Eagle3Config, rows: Any, collator: DataCollatorForEagle3, tokenizer: Any
) -> Eagle3DraftModel:
    """A draft for the target: the vocabulary from the dataset rows, embedding and head from the target."""
    config = Eagle3DraftConfig.from_target(
        target.config, draft_vocab_size=args.draft_vocab_size, aux_layer_ids=target.aux_layer_ids
    )
    set_seed(args.seed)  # as `Trainer` does, too late for the draft
    draft = Eagle3DraftModel(config)
    if config.draft_vocab_size < config.vocab_size:
        checks.check_vocabulary_rows(rows)
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
    """Each rank's part of the data, every dataset row once; without hidden states, which counting does not need."""
    if HIDDEN_STATES in (getattr(rows, "column_names", None) or ()):
        rows = rows.remove_columns(HIDDEN_STATES)
    rank, ranks = args.process_index, args.world_size
    if hasattr(rows, "__len__"):
        return rank_loader(rows, rank, ranks, batch_size=1, collate_fn=collator)
    return DataLoader(split_dataset_by_node(rows, rank=rank, world_size=ranks), collate_fn=collator)


def warn_of_other_embedding(model: Any, target: Eagle3Target) -> None:
    """Warns where engines would put another embedding in the place of the one that the draft is trained with."""
    drafts, targets = (
        weight[:: max(1, len(weight) // 1024)] for weight in (model.embed_tokens.weight, target.embedding)
    )
    if drafts.shape == targets.shape and not torch.equal(drafts, targets.to(drafts)):
        logger.warning(
            "The embedding of `model` is not the target's, and it is frozen: engines will put the target's in its "
            "place. Call `model.init_from_target(target.get_input_embeddings().weight)` before training."
        )


_TARGETS = "draft_targets"
_BATCH = ("input_ids", *DRAFT_KEYS, _TARGETS, STATES[0], STATES[2])  # what the draft's forward takes


class Eagle3Trainer(StepMixin, Trainer):
    """
    Trains the EAGLE-3 draft head of a frozen target.

    A dataset row is one that [`prepare_trees`] reads: a conversation, whose turns are a tree, completions of a prompt,
    branches, a tree. The frozen target computes each token of it once, and the draft learns on it what it learns on
    the branches one by one. Or it is a document, `input_ids` with `loss_mask` (or TRL's `labels`, `completion_mask`,
    `assistant_masks`), or a packed sequence of [`pack_eagle3_dataset`]. Logs `accuracy/step_k`, the
    share of positions where the draft's first choice at step k is the target's, and `tau`, the tokens that a step of
    the target is expected to bring.

    Args:
        model ([`Eagle3DraftModel`] or `str`, *optional*):
            The draft, or a checkpoint of one. Without it, one is made for the target: the draft vocabulary from the
            training data, embedding and head from the target.
        target_model (`PreTrainedModel`, [`Eagle3Target`] or `str`):
            The target, its name, or the folder of [`precompute_hidden_states`].
        args ([`Eagle3Config`], *optional*):
            Configuration.
        data_collator ([`DataCollatorForEagle3`], *optional*):
            Defaults to one with the tokenizer's padding token.
        train_dataset, eval_dataset (`Dataset`, `IterableDataset` or list of `dict`, *optional*):
            The dataset rows. For evaluation also several sets of them by name, in a `dict`.
        processing_class (`PreTrainedTokenizerBase`, *optional*):
            The tokenizer. Needed for conversations.
        kwargs:
            As for `Trainer`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from transformers import AutoTokenizer
    >>> from hf_prefix_tree import Eagle3Config, Eagle3Trainer, export_for_serving

    >>> trainer = Eagle3Trainer(
    ...     target_model="Qwen/Qwen3-8B",
    ...     args=Eagle3Config("draft", draft_vocab_size=32000, packed_sequence_size=4096, bf16=True),
    ...     train_dataset=load_dataset("json", data_files="dialogues.jsonl", split="train"),
    ...     processing_class=AutoTokenizer.from_pretrained("Qwen/Qwen3-8B"),
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP
    >>> export_for_serving(trainer.model, "draft-serving", engine="vllm")  # doctest: +SKIP

    ```
    """

    def __init__(
        self,
        model: Eagle3DraftModel | str | None = None,
        target_model: PreTrainedModel | Eagle3Target | str | None = None,
        args: Eagle3Config | None = None,
        data_collator: DataCollatorForEagle3 | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        args = checks.check_arguments(args, Eagle3Config, "eagle3", "draft", kwargs)
        length = args.packed_sequence_size or args.seq_length
        if data_collator is None:
            data_collator = DataCollatorForEagle3(checks.padding_token_of(processing_class), length=length)
        checks.check_collator(data_collator, DataCollatorForEagle3, args)
        if args.device.type == "cuda" and length % BLOCK_SIZE and args.attn_backend == "auto":
            logger.warning(
                "%d positions are no multiple of %d, which FlexAttention needs: attention of documents is dense, its "
                "memory grows with the square. Change `packed_sequence_size` or `seq_length`.",
                length,
                BLOCK_SIZE,
            )
        self._preparation = processing_class, data_collator.pad_token_id
        train_dataset, eval_dataset = (self._prepared(dataset, args) for dataset in (train_dataset, eval_dataset))
        if isinstance(model, str):
            model = Eagle3DraftModel.from_pretrained(model)
        self.target = resolve_target(target_model, args, model).to(args.device)
        data_collator = self._collator_for(args, data_collator, train_dataset, eval_dataset)
        if model is None:
            model = new_draft(self.target, args, train_dataset, data_collator, processing_class)
        checks.check_pair(model, Eagle3DraftModel, self.target, args)
        warn_of_other_embedding(model, self.target)
        assert isinstance(model, Eagle3DraftModel)
        model.attn_backend = args.attn_backend
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, processing_class, **kwargs)
        self._signature_columns = [*ROW_COLUMNS, HIDDEN_STATES]

    # ---- the loss and its metrics ----

    def count_items(self, batch: dict[str, Any]) -> torch.Tensor:
        """Runs the target on the micro-batch; the valid positions of each draft step, `(K,)`."""
        self._add_states(batch)
        draft = self.accelerator.unwrap_model(self.model)
        in_vocabulary = t2d_from_ids(draft.draft_ids.to(batch["input_ids"].device), draft.config.vocab_size)
        return (batch["draft_weights"] * in_vocabulary[batch["target_ids"][batch[_TARGETS]]]).sum(dim=(0, 2))

    def _add_states(self, batch: dict[str, Any]) -> None:
        """Adds the slots of the draft, and the target's states: of all tokens, and where the loss needs its head."""
        if _TARGETS in batch:
            return
        batch.update(self._prepare_input(dict(batch)))
        batch.update(draft_slots(batch, self.args.ttt_steps))
        where, batch[_TARGETS] = needed_targets(batch, batch["input_ids"].numel())
        aux, last, ids = (batch.get(name) for name in STATES)
        if aux is None or last is None:
            aux, last = self.target.hidden_states(batch)
        last = last.flatten(0, 1)[where]
        ids = self.target.choices(last) if ids is None else ids.flatten()[where]
        batch.update(zip(STATES, (aux, last, ids), strict=True))

    def loss_terms(
        self, model: torch.nn.Module, inputs: dict[str, Any], items: torch.Tensor, return_outputs: bool
    ) -> LossTerms:
        self._add_states(inputs)
        ids = self.accelerator.unwrap_model(self.model).draft_ids.to(self.target.head.device)
        outputs = model(
            **{name: inputs[name] for name in _BATCH if name in inputs},
            target_logits=self.target.draft_logits(inputs["last_hidden_states"], ids),
            ttt_steps=self.args.ttt_steps,
            step_decay=self.args.step_decay,
            num_items_in_batch=items.long(),  # mixed precision casts float tensors on their way to the model
        )
        return LossTerms(outputs.loss, torch.stack([value.detach().double() for value in outputs.sums]), outputs)

    def evaluation_metrics(self, sums: torch.Tensor) -> dict[str, float]:
        steps = StepSums(*sums)
        metrics = {"loss": weighted_steps(steps.loss, steps.valid, self.args.step_decay).item(), **steps.metrics()}
        # a mean of nothing: 0 would be the best there is, and an error would end the training that evaluates
        return metrics if steps.supervised.any() else dict.fromkeys(metrics, math.nan)

    def window_metrics(self, sums: torch.Tensor, *_: Any) -> dict[str, float]:
        return StepSums(*sums).metrics()

    # ---- evaluation ----

    def evaluate(self, eval_dataset: Any = None, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().evaluate(self._to_evaluate(eval_dataset), *args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> PredictionOutput:
        return super().predict(self._to_evaluate(test_dataset), *args, **kwargs)

    def _to_evaluate(self, dataset: Any) -> Any:
        dataset = self._prepared(dataset, self.args)
        self.data_collator = self._collator_for(self.args, self.data_collator, dataset)
        return dataset

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        with torch.no_grad(), self.compute_loss_context_manager():
            return self.compute_loss(model, self._prepare_inputs(inputs)), None, None  # type: ignore[return-value]

    # ---- data ----

    def _prepared(self, dataset: Any, args: Eagle3Config) -> Any:
        if dataset is None or isinstance(dataset, str):  # the name of an evaluation set, which is prepared
            return dataset
        if isinstance(dataset, Mapping):  # evaluation sets by name
            return {name: self._prepared(named, args) for name, named in dataset.items()}
        with args.main_process_first(desc="rendering and packing documents"):  # the remaining ranks read its cache
            return prepare_eagle3_trees(dataset, args, *self._preparation)

    def _collator_for(
        self, args: Eagle3Config, collator: DataCollatorForEagle3, *datasets: Any
    ) -> DataCollatorForEagle3:
        """The collator for these datasets: unrolls trees, and checks hidden states if one of the datasets has them."""
        sets = [one for given in datasets for one in (given.values() if isinstance(given, Mapping) else [given])]
        columns = [columns_of(one) for one in sets if one is not None and not isinstance(one, str)]
        collator = copy(collator)
        collator.ttt_steps = args.ttt_steps
        if self.target.model is None or any(HIDDEN_STATES in names for names in columns):
            collator.target_fingerprint, collator.states_folder = self.target.fingerprint, self.target.folder
        return collator
