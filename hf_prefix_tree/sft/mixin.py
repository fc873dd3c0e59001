# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeLossMixin`]: the exact normaliser, for any Trainer.

`loss = sum_t w_t * nll_t / sum_t w_t`, both sums over the whole optimizer step: all ranks, all accumulation steps. The
divisor is gathered once per step, in float64. Evaluation is the same ratio over the whole set.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import TrainingArguments
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.batch import STATS, WEIGHTED_BY_CALLER, gather_supervised, summed_weights
from hf_prefix_tree.modeling.flops import cost_per_count
from hf_prefix_tree.modeling.loss import safe_divisor
from hf_prefix_tree.modeling.prepare import ensure_verified, install_tree_hooks
from hf_prefix_tree.sft.collator import DataCollatorForPrefixTree, RowCounts
from hf_prefix_tree.training.checks import earlier_gradients_aside, keep_output_dtype, refuse_engines
from hf_prefix_tree.training.options import refuse_options
from hf_prefix_tree.training.sampling import (
    BY_LENGTH,
    STRATEGIES,
    StepSampler,
    fill_uneven_steps,
    linked_rows,
    row_costs,
    split_tree_ids,
)

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer
else:
    _Trainer = object

logger = logging.getLogger(__name__)


class TreeLossMixin(_Trainer):
    """
    Put it before a Trainer: `class MyTrainer(TreeLossMixin, Trainer)`, or TRL's `SFTTrainer` in its place.

    Prepares the model, normalises the loss over the whole optimizer step, evaluates exactly, and logs `loss/sum`,
    `loss/token_count` (the summed weights), `tree/branches`, `tree/tokens`, `tree/token_ratio`, `tree/pair_ratio`,
    `tree/padding` (share of padding tokens) and `tree/imbalance` (by how much the most loaded rank of a micro-batch
    exceeds the mean, in FLOPs), all of them over the logging window, every rank and accumulation step. `loss/sum` over
    `loss/token_count` is the loss of the window's tokens; `loss` is the mean of its steps' losses, the same where
    `logging_steps=1`. They come with `loss`, so every rank must log that one; anything else may be logged by any rank.

    With `DataCollatorForPrefixTree` and a training dataset of known length, the rows of a step are dealt to the ranks
    so that they wait little for each other ([`assign_rows`]), and the steps are the same on any number of ranks. With
    `train_sampling_strategy="group_by_length"` a step holds rows that cost alike. `dataloader_drop_last=True` leaves
    the rows to Trainer's sampler, except where parts of split trees must stay together.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._tree_sums: dict[str, torch.Tensor] = {}
        self._counted: dict[str, torch.Tensor] = {}  # of the optimizer step whose batches were fetched last
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, TrainingArguments)]
        for arguments in given:
            refuse_options(arguments)  # before a trainer reads them
        super().__init__(*args, **kwargs)
        self._refuse_engines()
        self._refuse_functions()
        keep_output_dtype(self.accelerator)
        self._follow_trees(self.model)
        # Says that the loss is normalised by `num_items_in_batch`, so that Trainer does not divide it by the
        # accumulation steps. (Trainer's `loss_is_scaled_for_ga` says the same, but not before transformers 5.19.)
        self.model_accepts_loss_kwargs = True

    def _follow_trees(self, model: Any) -> None:
        install_tree_hooks(
            model,
            attn_backend=getattr(self.args, "attn_backend", "auto"),
            compile_layers=getattr(self.args, "compile_layers", False),
        )

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._follow_trees(model)  # `train` makes another one each time
        return model

    def _refuse_engines(self) -> None:
        """What drops the tree mask, or weighs ranks instead of tokens."""
        refuse_engines(self.accelerator)
        if getattr(self.args, "compile_layers", False) and self.is_deepspeed_enabled:
            raise ValueError(
                "`compile_layers=True` cannot be used together with DeepSpeed, which hooks the modules inside each "
                "layer. Use FSDP2, or leave it at `False`."
            )
        if self.args.n_gpu > 1:
            raise ValueError("`nn.DataParallel` is not supported: start one process per GPU with `accelerate launch`.")

    def _refuse_functions(self) -> None:
        for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"`{name}` is not supported on prefix trees: it would see packed sequences, not branches. Leave "
                    "it out."
                )

    # ---- one optimizer step ----

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        # The last window of an earlier training may have been too short to be logged, and that of an attempt that ran
        # out of memory was not (`auto_find_batch_size`).
        self._tree_sums.clear()
        if isinstance(self, SFTTrainer):
            self._metrics["train"].clear()
        return super()._inner_training_loop(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        if not batch_samples:
            return None
        if "tree_stats" not in batch_samples[0]:
            raise ValueError(
                f"A batch has no `tree_stats`, only {sorted(batch_samples[0])}: pass "
                "`data_collator=DataCollatorForPrefixTree(pad_token_id)`."
            )
        weights = torch.stack([summed_weights(batch) for batch in batch_samples]).sum().to(device)
        stats = torch.cat([batch["tree_stats"] for batch in batch_samples]).sum(dim=0).to(device)
        tokens = torch.stack([batch["attention_mask"].sum() for batch in batch_samples]).sum().to(device)
        positions = tokens.new_tensor(sum(batch["input_ids"].numel() for batch in batch_samples))
        local = torch.cat([weights[None], stats.double(), torch.stack([tokens, positions]).double()])
        ranks = self.accelerator.gather(torch.cat([local, self._work(batch_samples).to(local)])[None])
        total = ranks[:, : len(local)].sum(dim=0) / self._copies()
        work = ranks[:, len(local) :]  # [rank, micro-batch]; ranks wait for each other at every micro-batch
        self._counted = {"counts": total, "work": torch.stack([work.amax(dim=0).sum(), work.mean(dim=0).sum()])}
        return total[0]

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        result = super().get_batch_samples(*args, **kwargs)
        # Here and not where they are counted, since Trainer's `prediction_step` counts evaluation batches, too.
        for name, value in self._counted.items():
            self._add(name, value)
        self._counted = {}
        return result

    def _work(self, batch_samples: list) -> torch.Tensor:
        """FLOPs of each micro-batch, float64 `[micro-batches]`."""
        tokens, pairs = STATS.index("tree_tokens"), STATS.index("tree_pairs")
        counts = []
        for batch in batch_samples:
            stats, supervised = batch["tree_stats"].sum(dim=0), (batch["labels"] != IGNORE_INDEX).sum()
            counts.append(torch.stack([stats[tokens], supervised.to(stats), stats[pairs]]))
        costs = torch.stack(counts).double()
        return costs @ torch.from_numpy(cost_per_count(self.model.config)).to(costs)

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        ensure_verified(self.model, model)
        with earlier_gradients_aside(self.model) if self.get_tp_size() > 1 else nullcontext():
            return super().training_step(model, *args, **kwargs)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        if isinstance(self, SFTTrainer):
            return self._compute_trl_loss(model, inputs, return_outputs, num_items_in_batch)
        # A divisor of 1 travels as a Python number: mixed precision casts float tensors that go through the model.
        inputs, is_empty = without_empty_mask(inputs)
        _, outputs = super().compute_loss(model, {**inputs, "num_items_in_batch": 1.0}, return_outputs=True)
        auxiliary = getattr(outputs, "aux_loss", None)
        loss_sum = getattr(outputs, "loss", None)
        if loss_sum is None:
            raise ValueError(
                f"{type(self).__name__} or its model computes the loss by itself, so it cannot be weighted: put "
                "`TreeLossMixin` before `transformers.Trainer` or TRL's `SFTTrainer`."
            )
        if auxiliary is not None:
            auxiliary = self.accelerator.unwrap_model(model).router_aux_loss_coef * auxiliary.to(loss_sum.device)
            loss_sum = loss_sum - auxiliary
            auxiliary = auxiliary * ~is_empty
        self.record(loss_sum, inputs)
        loss = loss_sum / self.divisor(inputs, num_items_in_batch)
        if self.model.training:
            loss = loss * self._averaging_ranks()
        if auxiliary is not None:
            loss = loss + auxiliary / (self.current_gradient_accumulation_steps if self.model.training else 1)
        return (loss, outputs) if return_outputs else loss

    def _compute_trl_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool,
        num_items_in_batch: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        divisor = self.divisor(inputs, num_items_in_batch)
        if not self.model.training:
            divisor = divisor * self._averaging_ranks()  # TRL multiplies by them whenever it is given a divisor
        weighted = _WeightedLogProbs(model, divisor)
        # TRL clamps its divisor at 1, while summed weights are often smaller: divide first and hand it a 1.
        result = super().compute_loss(weighted, inputs, return_outputs, num_items_in_batch=1)
        self.record(weighted.loss_sum, inputs)
        self._forget_empty_metrics()
        return result

    def _forget_empty_metrics(self) -> None:
        """TRL averages the metrics of micro-batches and puts zeros where none of the ranks has a token."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        names = ("entropy", "mean_token_accuracy")
        if all(metrics[name][-1] == 0.0 for name in names):
            for name in names:
                metrics[name].pop()
                if not metrics[name]:
                    del metrics[name]

    def divisor(self, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | None) -> torch.Tensor:
        """
        What a micro-batch's `sum(w * nll)` is divided by, a float64 scalar: the summed weights of the step, or the
        micro-batch's own in evaluation.

        Args:
            inputs (`dict`): The micro-batch.
            num_items_in_batch (`torch.Tensor`, *optional*): The summed weights of the optimizer step, over all ranks.
        """
        weights = (
            summed_weights(inputs) if not self.model.training or num_items_in_batch is None else num_items_in_batch
        )
        return safe_divisor(weights, inputs["input_ids"])

    def record(self, loss_sum: torch.Tensor, inputs: dict[str, Any]) -> None:
        """
        Keeps a micro-batch's `sum(w * nll)` for `loss/sum`, or for the evaluation loss.

        Args:
            loss_sum (`torch.Tensor`): Scalar.
            inputs (`dict`): The micro-batch.
        """
        loss_sum = loss_sum.detach().double()
        if self.model.training:
            self._add("loss_sum", loss_sum)
        else:
            self._add("eval", torch.stack([loss_sum, summed_weights(inputs).to(loss_sum.device)]))

    def _averaging_ranks(self) -> int:
        return self.accelerator.num_processes // self.get_tp_size()

    # ---- evaluation and reports ----

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        self._tree_sums.pop("eval", None)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums = self._gathered("eval")
        if sums is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = (sums[0] / safe_divisor(sums[1], sums)).item()
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # only a window's end logs "loss", on every rank; evaluations and users log too, the latter on one rank perhaps
        loss_sum = self._gathered("loss_sum") if "loss" in logs else None
        if loss_sum is not None:
            weights, *stats, tokens, positions = self._tree_sums.pop("counts").tolist()
            most, mean = self._tree_sums.pop("work").tolist()
            stat = dict(zip(STATS, stats, strict=True))
            logs["loss/sum"] = loss_sum.item() / self.get_tp_size()
            logs["loss/token_count"] = weights
            logs["tree/branches"] = stat["branches"]
            logs["tree/tokens"] = stat["tree_tokens"]
            logs["tree/token_ratio"] = stat["branch_tokens"] / max(stat["tree_tokens"], 1)
            logs["tree/pair_ratio"] = stat["branch_pairs"] / max(stat["tree_pairs"], 1)
            logs["tree/padding"] = 1 - tokens / positions
            logs["tree/imbalance"] = most / max(mean, 1.0) - 1
        super().log(logs, *args, **kwargs)

    def _add(self, name: str, value: torch.Tensor) -> None:
        self._tree_sums[name] = self._tree_sums[name] + value if name in self._tree_sums else value

    def _gathered(self, name: str) -> torch.Tensor | None:
        """The sum over all ranks of what was added under `name`, which is forgotten; every rank must call it."""
        value = self._tree_sums.pop(name, None)
        return None if value is None else self.accelerator.gather(value[None]).sum(dim=0)

    # ---- uneven last steps ----

    # In order: Trainer's own would read every row for its length under "group_by_length", also empty and packed rows.
    _get_eval_sampler = staticmethod(SequentialSampler)

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, **kwargs: Any) -> Any:
        """Accelerate fills an uneven last step with repeated rows, which count twice: fill it with empty ones."""
        is_training = kwargs.get("is_training", False)
        sampler = self._step_sampler(dataset, batch_size) if is_training else None
        if sampler is not None:
            kwargs["sampler_fn"] = lambda _: sampler
        elif is_training and self.args.dataloader_drop_last and self.args.train_sampling_strategy in BY_LENGTH:
            kwargs["sampler_fn"] = RandomSampler  # Trainer's knows no cost of a tree
        dataset = fill_uneven_steps(
            self,
            dataset,
            self._ranks() * batch_size,
            is_training=is_training,
            description=description,
            sampler=sampler,
        )
        return super()._get_dataloader(dataset, description, batch_size, **kwargs)

    def _step_sampler(self, dataset: Any, batch_size: int) -> StepSampler | None:
        """What lays out the steps of a training dataset; `None` where Trainer's own sampler does."""
        args, strategy = self.args, self.args.train_sampling_strategy
        has_ids = "tree_ids" in (getattr(dataset, "column_names", None) or ())
        if not hasattr(dataset, "__len__") or isinstance(dataset, torch.utils.data.IterableDataset):
            if has_ids and getattr(args, "overflow", "split") == "split":
                raise ValueError(
                    "`train_dataset` is a stream with `tree_ids`, and nothing keeps the parts of a split tree of a "
                    "stream in one optimizer step. Set `overflow='drop'` or `'raise'`, or load the dataset whole."
                )
            return None
        units = [[row] for row in range(len(dataset))]
        if has_ids:
            tree_ids = list(dataset["tree_ids"])
            if batch_size > 1 and any(len(ids) > 1 for ids in tree_ids):
                logger.warning(
                    "`per_device_train_batch_size=%d` makes one row of %d packed ones, which may exceed the "
                    "`max_packed_tokens` that they were packed for. Set it to 1, or pack with `pack_trees=False`.",
                    batch_size,
                    batch_size,
                )
            if "num_parts" in dataset.column_names:
                tree_ids = split_tree_ids(tree_ids, list(dataset["num_parts"]))
            units = linked_rows(tree_ids)
        ranks = self._ranks()
        collator = getattr(self.data_collator, "collator", self.data_collator)
        counts = RowCounts(collator) if isinstance(collator, DataCollatorForPrefixTree) else None
        if len(units) == len(dataset):
            in_order = strategy == "sequential" and ranks == 1
            if in_order or strategy not in STRATEGIES or not units:
                return None
            if counts is None and strategy != "batch_rebalance":  # Trainer's sampler for it would repeat rows
                return None
            if args.dataloader_drop_last:
                if ranks > 1 or strategy in BY_LENGTH:
                    logger.warning(
                        "`dataloader_drop_last=True`: rows are neither dealt to ranks nor sorted by what they cost. "
                        "Leave it at `False`: an uneven last step is filled with empty rows, not with repeated ones."
                    )
                return None
        elif strategy not in STRATEGIES:
            raise ValueError(
                f"`train_sampling_strategy={strategy!r}` would tear the parts of split trees apart. Set it to one of "
                f"{STRATEGIES}."
            )
        return StepSampler(
            units,
            args.gradient_accumulation_steps * ranks * batch_size,
            strategy=strategy,
            seed=args.seed if args.data_seed is None else args.data_seed,
            global_step=lambda: self.state.global_step,
            costs=None if counts is None else self._row_costs(dataset, counts),
            ranks=ranks,
            batch_size=batch_size,
        )

    def _row_costs(self, dataset: Any, counts: RowCounts) -> npt.NDArray[np.float64] | None:
        """FLOPs of every row; `None` where nothing is dealt or sorted by them."""
        if self._ranks() == 1 and self.args.train_sampling_strategy != "group_by_length":
            return None
        # `datasets` caches what the first rank counts; others count at the same time
        with self.accelerator.main_process_first() if hasattr(dataset, "map") else nullcontext():
            return row_costs(dataset, counts, self.model.config, getattr(self.args, "dataset_num_proc", None))

    def _ranks(self) -> int:
        """Ranks that take `batch_size` rows of every round; with `split_batches` all of them do together."""
        return 1 if self.accelerator.split_batches else self.args.world_size // self._copies()

    def _copies(self) -> int:
        """Ranks that hold the same batch."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()


class _WeightedLogProbs:
    """Stands in for the model in TRL's `compute_loss`: its log-probs come out times their weight over the divisor."""

    def __init__(self, model: Callable, divisor: torch.Tensor) -> None:
        self.model, self.divisor = model, divisor
        self.loss_sum: torch.Tensor

    def __call__(self, **inputs: Any) -> Any:
        inputs, is_empty = without_empty_mask(inputs)
        takes_log_probs = {WEIGHTED_BY_CALLER: True} if inputs.get("fused_lm_head") else {}
        outputs = self.model(**inputs, **takes_log_probs)
        if getattr(outputs, "aux_loss", None) is not None:
            outputs.aux_loss = outputs.aux_loss * ~is_empty
        if takes_log_probs:
            weights = gather_supervised(inputs["prefix_tree"], inputs["labels"], inputs.get("loss_weights")).weights
            weighted = outputs.log_probs.double() * weights
            self.loss_sum = -weighted.detach().sum()
            outputs.log_probs = weighted / self.divisor
        return outputs


def without_empty_mask(inputs: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """
    A router's auxiliary loss divides by the tokens of the attention mask. An empty row has none, so that it would be
    NaN: such a row passes as one of real tokens instead.

    Args:
        inputs (`dict`): The micro-batch.

    Returns:
        `tuple`: the micro-batch, and a bool scalar that says whether it was empty and the loss must be taken off.
    """
    mask = inputs.get("attention_mask")
    if mask is None:
        return inputs, torch.zeros((), dtype=torch.bool, device=inputs["input_ids"].device)
    is_empty = ~mask.any()
    return {**inputs, "attention_mask": mask | is_empty}, is_empty
