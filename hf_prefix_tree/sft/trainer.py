# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeSFTTrainer`]: TRL's `SFTTrainer` on prefix trees.

Everything that is not about trees is TRL's: the fused LM head (it builds no logits of whole packed sequences), PEFT,
activation offloading, saving. Overridden are the preparation of a dataset, the columns that are kept, the loss and its
metrics.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, recursively_apply
from datasets import Dataset, IterableDataset
from transformers import AutoConfig, default_data_collator
from trl import SFTTrainer
from trl.chat_template_utils import get_training_chat_template

from hf_prefix_tree import __version__
from hf_prefix_tree.data.baselines import difference, refuse_preferences
from hf_prefix_tree.data.packed import check_weightings
from hf_prefix_tree.data.prepare import prepare_trees, renamed
from hf_prefix_tree.data.rows import MESSAGE_KINDS, RowOptions, columns_of, row_kind
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.data.trees import write_files
from hf_prefix_tree.modeling.batch import BLOCK_SIZE
from hf_prefix_tree.modeling.flops import choose_overflow
from hf_prefix_tree.modeling.streaming import Section, sections_of, stream
from hf_prefix_tree.sft.collator import BranchCollator, DataCollatorForPrefixTree, EvaluationCollator, branch_batches
from hf_prefix_tree.sft.config import PREPARATION, TreeSFTConfig
from hf_prefix_tree.sft.mixin import TreeLossMixin
from hf_prefix_tree.training import checks
from hf_prefix_tree.training.step import PreparationMixin, replaced
from hf_prefix_tree.tree.folding import check_not_empty
from hf_prefix_tree.tree.prefix_tree import PrefixTree

logger = logging.getLogger(__name__)


class TreeSFTTrainer(TreeLossMixin, PreparationMixin, SFTTrainer):
    """
    Supervised fine-tuning on prefix trees: a drop-in for TRL's [`~trl.SFTTrainer`].

    A dataset row is one of: a folded tree ([`PrefixTree.to_dict`]), `branches`, `prompt_ids` + `completions`, `prompt`
    + `completion(s)`, `messages` (with `tools`), or `input_ids` (with `labels`); `TreeSFTConfig(group_by="group")`
    makes one tree of the rows with an equal `group`. Each row or group becomes one tree; the trees of a micro-batch
    share one packed sequence. Under `max_packed_tokens` a dataset row holds several small trees, or a part of a large
    one; the parts of a tree stay in one optimizer step, which needs a dataset of known length.

    `TreeSFTConfig(mode="grouped")` trains the same branch by branch, as a baseline: same loss, gradients and step
    metrics (`entropy`, `mean_token_accuracy` and `num_tokens` are those of the branches), memory of one branch. Micro-
    batches are then computed in as many passes as the rank with the most branches needs. Evaluation stays on trees.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As for `SFTTrainer`. The model is prepared with [`prepare_model`].
        args ([`TreeSFTConfig`], *optional*):
            Configuration.
        data_collator (`DataCollatorForPrefixTree`, *optional*):
            Defaults to one with the tokenizer's padding token.
        train_dataset, eval_dataset, processing_class, peft_config, callbacks, optimizers, ...:
            As for `SFTTrainer`. Refused: `compute_loss_func`, vision datasets, prompt-learning PEFT.
        formatting_func (`Callable`, *optional*):
            As for `SFTTrainer`: makes a text of each dataset row, all of which is trained on.
        compute_metrics, preprocess_logits_for_metrics (`Callable`, *optional*):
            As for `SFTTrainer` on the branches: `predictions` and `label_ids` have one entry for each branch that
            supervises anything, in the order of the dataset unless trees are packed or split. `predict` returns the
            same.

    Raises:
        `ValueError`: where the architecture or an argument cannot be exact on trees, and under context, sequence or
            pipeline parallelism, FSDP1, and `dispatch_batches=True` on several ranks.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer

    >>> trainer = TreeSFTTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     args=TreeSFTConfig(group_by="group"),
    ...     train_dataset=load_dataset("json", data_files="dialogues.jsonl", split="train"),
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    ```
    """

    served_functions = ("compute_metrics", "preprocess_logits_for_metrics", "formatting_func")
    columns = (
        *(field.name for field in dataclasses.fields(PrefixTree)),
        *("branches", "prompt_ids", "completions"),  # folded by the collator under `skip_prepare_dataset`
        *("trees", "tree_ids"),
    )
    data_collator: Any
    _tag_names = ["trl", "sft", "prefix-tree"]  # noqa: RUF012 - as in TRL
    _name = "Tree SFT"

    def __init__(
        self,
        model: Any,
        args: TreeSFTConfig | None = None,
        data_collator: DataCollatorForPrefixTree | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        refusable = {name: value for name, value in kwargs.items() if name not in self.served_functions}
        args = checks.check_arguments(args, TreeSFTConfig, model, "TreeSFT", refusable)
        if data_collator is not None:
            checks.check_collator(data_collator, DataCollatorForPrefixTree, args, ("weighting", "pad_to_multiple_of"))
        check_not_empty(train_dataset, "train_dataset")
        # `SFTTrainer` prepares the training dataset first; the same object may be an evaluation dataset as well
        self._to_select_from: Any = train_dataset
        self._model_to_count: Any = model
        self._format: Callable[[Any], str] | None = kwargs.get("formatting_func")
        # TRL would look for a training template of its own, which trees do not need
        self._asked, args.assistant_only_loss = args.assistant_only_loss, False
        collator = data_collator or default_data_collator  # until the tokenizer is there
        super().__init__(model, args, collator, train_dataset, eval_dataset, processing_class, **kwargs)
        args.assistant_only_loss = self._asked
        checks.check_texts(self)
        if args.overflow == "stream":
            checks.check_streaming(self)
        if data_collator is None:
            pad_token_id, multiple = checks.padding_token_of(self._tokenizer), args.pad_to_multiple_of or BLOCK_SIZE
            self.data_collator = DataCollatorForPrefixTree(pad_token_id, args.weighting, multiple)
        self._log_differences(train_dataset)

    def prepared_rows(self, dataset: Any, args: TreeSFTConfig) -> Any:
        is_selected_from = dataset is self._to_select_from
        refuse_preferences(dataset, args.column_names)
        dataset, kind = self._texts(dataset, args)
        meaning = {"completion": True, "completions": True, "rollouts": True, "text": False}.get(kind)
        if args.completion_only_loss not in (None, meaning) or (self._asked and kind not in MESSAGE_KINDS):
            raise ValueError(
                f"`completion_only_loss={args.completion_only_loss}`, `assistant_only_loss={self._asked}`: of {kind} "
                "rows, completions, assistants' turns or whole texts are trained on; leave out what does not fit."
            )
        names = {"weighting", *PREPARATION} - {"shuffle_dataset", "column_names"}  # columns have been renamed
        options = {name: getattr(args, name) for name in names} | {"num_proc": args.dataset_num_proc}
        if is_selected_from:
            self._to_select_from = None
        else:
            options |= {"selection_metric": None, "selection_num_proc": None, "max_examples": None}
        if args.overflow == "auto":
            if isinstance(dataset, IterableDataset):
                raise ValueError("`overflow='auto'` counts all trees, but a stream is read once; pass 'split', say.")
            trees = prepare_trees(
                dataset, self._tokenizer, **options | {"max_packed_tokens": None, "overflow": "split"}
            )
            self._choose_overflow(trees, args)
            options |= {"overflow": args.overflow, "max_packed_tokens": args.max_packed_tokens}
        return prepare_trees(dataset, self._tokenizer, **options)

    def _choose_overflow(self, trees: Dataset, args: TreeSFTConfig) -> None:
        model, most = self._model_to_count, args.max_packed_tokens
        assert most is not None  # checked with the configuration
        config = AutoConfig.from_pretrained(model) if isinstance(model, str) else model.config
        large = [index for index, ids in enumerate(trees["input_ids"]) if len(ids) > most]
        memory = args.gradient_checkpointing, args.activation_offloading
        choice, args.max_packed_tokens, numbers = choose_overflow(
            (PrefixTree.from_dict(trees[index]) for index in large), config, most, *memory
        )
        args.overflow = "stream" if choice == "stream" else "split"
        if args.process_index == 0:
            logger.warning("`overflow='auto'`: %s, as %s.", choice, numbers)

    def _get_dataloader(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        is_skipped = (self.args.dataset_kwargs or {}).get("skip_prepare_dataset")
        if is_skipped and isinstance(dataset, Dataset | IterableDataset):
            for column in {"trees", "weighting"}.intersection(columns_of(dataset)):
                dataset = check_weightings(dataset, column, self.args.weighting)
        return super()._get_dataloader(dataset, *args, **kwargs)

    def loader_collator(self, is_training: bool) -> Any:
        if not is_training:
            return EvaluationCollator(self.data_collator)
        if self.args.mode != "grouped":
            return self.data_collator
        if self.is_deepspeed_enabled:
            raise ValueError(
                "`mode='grouped'` does several backwards in a micro-batch, and DeepSpeed may step after each. Use DDP "
                "or FSDP, or `mode='tree'`."
            )
        return BranchCollator(self.data_collator)

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if "branch_lengths" not in inputs:
            return super().training_step(model, inputs, *args, **kwargs)
        number = torch.tensor([inputs["branch_lengths"].numel()], device=self.args.device)
        branches = branch_batches(inputs, number=self.accelerator.gather(number).max().item())
        losses = []
        for index, branch in enumerate(branches):
            # Gradients are reduced once, with the last branch (unless the caller holds them back further). Not under
            # FSDP2: those that wait there are whole, and the end of an inner `no_sync` would end the caller's.
            waits = index < len(branches) - 1 and not self.accelerator.is_fsdp2
            with self.accelerator.no_sync(model) if waits else nullcontext():
                losses.append(super().training_step(model, branch, *args, **kwargs))
        return torch.stack(losses).sum()

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.args.overflow != "stream":
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        on_host = self.args.activation_offloading and self._is_training
        sections = sections_of(inputs, self.args.max_packed_tokens, on_host=on_host)
        # Every rank runs all of them: sharded weights are gathered, and their gradients reduced, with each.
        names = set().union(*gather_object([[section.name for section in sections]]))
        if len(names) == 1:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if return_outputs:
            raise ValueError(
                f"Predictions of a tree of more than `max_packed_tokens={self.args.max_packed_tokens}` tokens cannot "
                "be streamed: leave out `compute_metrics`, or raise it for evaluation."
            )
        (empty,) = sections_of(inputs | {"attention_mask": torch.zeros_like(inputs["attention_mask"])}, 1)
        part_loss, losses, is_training = super().compute_loss, [], self._is_training
        device = inputs["input_ids"].device

        def forward(section: Section | None) -> torch.Tensor:
            part = {name: tensor.to(device) for name, tensor in (section or empty).inputs.items()}
            loss: Any = part_loss(model, part, num_items_in_batch=num_items_in_batch)
            losses.append(loss.detach())
            return loss

        # DDP reduces gradients once, with an empty row. In evaluation, the items are those of the batch.
        waits = is_training and self.accelerator.num_processes > 1 and not self.accelerator.is_fsdp2
        items = self.count_items(inputs) if self._step_items is None else self._step_items
        with replaced(self, _step_items=items):
            with self.accelerator.no_sync(model) if waits else nullcontext():
                stream(sections, names, forward, self.accelerator.backward if is_training else None)
            last = forward(None) if waits else losses[-1].requires_grad_(is_training)  # for the backward of Trainer
        return last + (torch.stack(losses).sum().detach() - last.detach())

    def prediction_step(
        self, model: Any, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        inputs = self._prepare_inputs(inputs)
        positions, labels = inputs.pop("branch_positions", None), inputs.pop("branch_labels", None)
        loss, logits, tree_labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if logits is None or positions is None:  # a collator of the user's has none
            return loss, logits, tree_labels
        self.gather_function = self._gather_branches
        return loss, logits[0, positions].masked_fill(positions[..., None] < 0, IGNORE_INDEX), labels

    def _gather_branches(self, values: Any) -> Any:
        """The branches of all ranks, which differ in number. (Trainer would keep as many as there are rows.)"""

        def gather(tensor: torch.Tensor) -> torch.Tensor:
            sizes = self.accelerator.gather(torch.tensor([len(tensor)], device=tensor.device)).tolist()
            filled = self.accelerator.pad_across_processes(tensor)
            parts = self.accelerator.gather(filled).split(len(filled))
            return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=False)])

        return recursively_apply(gather, values)

    def _texts(self, dataset: Any, args: TreeSFTConfig) -> tuple[Any, str]:
        """The dataset with the columns of `prepare_trees`, those texts that `formatting_func` makes, and its kind."""
        columns, make = columns_of(dataset), self._format
        if make is not None:
            options = {"num_proc": args.dataset_num_proc} if isinstance(dataset, Dataset) else {}
            removed = [name for name in columns if name not in ("text", args.group_by)]
            return dataset.map(lambda row: {"text": make(row)}, remove_columns=removed, **options), "text"
        if args.column_names:
            dataset, columns = renamed(dataset, columns, args.column_names)  # type: ignore[arg-type]
        return dataset, row_kind(columns)

    def _log_differences(self, dataset: Any) -> None:
        """Says for options of TRL by how much the tokens that are trained on differ from those of TRL."""
        args: Any = self.args
        given = [f"`{name}=True`" for name in ("assistant_only_loss", "completion_only_loss") if getattr(args, name)]
        given += ["`formatting_func`"] if self._format is not None else []
        checks.refuse_ignored(args, given)
        if not given or not isinstance(dataset, Dataset):
            return
        dataset = dataset.select(range(min(len(dataset), 100)))  # prepared once more, as TRL does
        rows, kind = self._texts(dataset, args)
        options = {name: getattr(args, name) for name in PREPARATION if name in RowOptions.__dataclass_fields__}
        options["chat_template_kwargs"] = args.chat_template_kwargs or {}
        reading = RowOptions(kind, self._tokenizer, rows.features, **options)
        try:
            processor = self.processing_class
            if args.assistant_only_loss:
                self.chat_template = get_training_chat_template(processor)  # `None` leaves the tokenizer's
            stock = SFTTrainer._prepare_dataset(self, dataset, processor, args, False, self._format, "train")
            counts = difference(rows, reading, stock)
        except Exception as error:  # TRL does not read all columns and messages that are read here
            counts = f"the first dataset rows can't be compared with TRL: {str(error).rstrip('.')}"
        if self.is_world_process_zero():
            logger.warning("%s: %s.", ", ".join(given), counts)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero():
            add_tree_section(Path(self.args.output_dir, "README.md"), self.state.log_history, self.args.weighting)


def add_tree_section(card: Path, log_history: Sequence[Mapping[str, Any]], weighting: str) -> None:
    """Adds to TRL's model card, before the versions, how the trees were weighted and what folding saved."""
    windows = [entry for entry in log_history if "tree/tokens" in entry]
    tree_tokens = sum(entry["tree/tokens"] for entry in windows)
    if not tree_tokens:  # nothing was trained
        return
    branches = sum(entry["tree/branches"] for entry in windows)
    branch_tokens = sum(entry["tree/tokens"] * entry["tree/token_ratio"] for entry in windows)
    section = f"""
### Prefix trees

Sequences that share prefixes were folded into trees, and each shared token computed once, with
[hf_prefix_tree](https://github.com/hf-prefix-tree/hf_prefix_tree) {__version__}.

| | |
|---|---|
| weighting | `{weighting}` |
| branches trained on | {branches:,.0f} |
| tokens of the branches | {branch_tokens:,.0f} |
| tokens computed | {tree_tokens:,.0f} |
| token ratio | {branch_tokens / tree_tokens:.2f} |
"""
    before, heading, after = card.read_text(encoding="utf-8").partition("\n### Framework versions")
    write_files({card: (before.rstrip() + "\n" + section + heading + after).encode()})
