# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeLossMixin`]: prefix trees for any Trainer, with the exact normaliser.

`loss = sum_t w_t * nll_t / sum_t w_t`, both sums over the whole optimizer step: all ranks, all accumulation steps. The
divisor is gathered once per step, in float64. Evaluation is the same ratio over the whole set.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler
from trl import SFTTrainer
from trl.trainer import utils as trl_utils

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.batch import STATS, WEIGHTED_BY_CALLER, Caller, summed_weights
from hf_prefix_tree.modeling.flops import cost_per_count
from hf_prefix_tree.modeling.loss import safe_divisor
from hf_prefix_tree.modeling.prepare import ensure_verified, install_tree_hooks
from hf_prefix_tree.sft.collator import DataCollatorForPrefixTree, RowCounts
from hf_prefix_tree.training import checks
from hf_prefix_tree.training.sampling import BY_LENGTH, STRATEGIES, is_stream, linked_rows, row_costs, step_sampler
from hf_prefix_tree.training.step import LossTerms, StepMixin, replaced, without_empty_mask

logger = logging.getLogger(__name__)

_LOSS_KEYS = ("prefix_tree", "labels", "loss_weights", "token_branches")
_WHOLE = "pass `data_collator=DataCollatorForPrefixTree(pad_token_id)`, and leave its batches whole in `compute_loss`"
_TREE_TOKENS, _TREE_PAIRS = STATS.index("tree_tokens"), STATS.index("tree_pairs")
_TOKENS = -3  # in what `count_details` counts


class TreeLossMixin(StepMixin):
    """
    Put it before a Trainer: `class MyTrainer(TreeLossMixin, Trainer)`, or TRL's `SFTTrainer` in its place.

    Prepares the model, normalises the loss over the whole optimizer step, evaluates exactly, and logs `loss/sum`,
    `loss/token_count` (the summed weights), `tree/branches`, `tree/tokens`, `tree/token_ratio`, `tree/pair_ratio`,
    `tree/padding` (share of padding tokens) and `tree/imbalance` (by how much the most loaded rank of a micro-batch
    exceeds the mean, in FLOPs), all of them over the logging window, every rank and accumulation step. `loss/sum` over
    `loss/token_count` is the loss of the window's tokens; `loss` is the mean of its steps' losses, the same where
    `logging_steps=1`. They come with `loss`, and at the end of training with `train_loss`, for the steps since then:
    every rank must log these two; anything else may be logged by any rank.
    `SFTTrainer`'s `entropy` and `mean_token_accuracy` are means over the tokens of the window, whereas TRL averages
    over micro-batches; `aux_loss` is the mean over the micro-batches that have tokens.

    With `DataCollatorForPrefixTree` and a training dataset of known length, rows of a step are assigned to ranks so
    that they wait little for each other ([`assign_rows`]), and the steps are the same on any number of ranks. With
    `train_sampling_strategy="group_by_length"` a step holds rows that cost alike. `dataloader_drop_last=True` leaves
    the rows to Trainer's sampler, except where parts of split trees must stay together.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._num_tokens: torch.Tensor | int = 0
        super().__init__(*args, **kwargs)
        own: Any = super(StepMixin, self).compute_loss  # nothing calls TRL's
        if isinstance(self, SFTTrainer) and own.__func__ is not SFTTrainer.compute_loss:
            raise ValueError(checks.own_loss(self))
        self._install_hooks(self.model)

    def _install_hooks(self, model: Any) -> None:
        options: dict[str, Any] = {"attn_backend": "auto", "compile_layers": False}
        dtypes = {x.dtype for x in model.parameters() if x.is_floating_point() and not x.requires_grad}
        # frozen weights of several dtypes run under autocast only; the self-check is stricter without it
        with self.accelerator.autocast() if len(dtypes) > 1 else nullcontext():
            install_tree_hooks(model, **{name: getattr(self.args, name, value) for name, value in options.items()})

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        self._install_hooks(model)  # `train` makes another one each time
        return model

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        ensure_verified(self.model, model)
        with checks.earlier_gradients_aside(self.model) if self.get_tp_size() > 1 else nullcontext():
            return super().training_step(model, *args, **kwargs)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        result = super().get_batch_samples(*args, **kwargs)
        if self._counted:
            self._num_tokens = self._num_tokens + self._counted["counts"][_TOKENS]
        return result

    # ---- the loss and its metrics ----

    def count_items(self, batch: dict[str, Any]) -> torch.Tensor:
        return summed_weights(batch)

    def count_details(self, batch: dict[str, Any]) -> torch.Tensor:
        """[`STATS`], tokens, positions and FLOPs."""
        checks.check_batch(batch, ("tree_stats", *_LOSS_KEYS), _WHOLE)
        stats = batch["tree_stats"].sum(dim=0).double()
        tokens, supervised = batch["attention_mask"].sum(), (batch["labels"] != IGNORE_INDEX).sum()
        counts = torch.stack([stats[_TREE_TOKENS], supervised.to(stats), stats[_TREE_PAIRS]])
        # nothing here waits for the device
        flops = counts @ torch.from_numpy(cost_per_count(self.model.config)).to(counts, non_blocking=True)
        positions = stats.new_full((), batch["input_ids"].numel())
        return torch.cat([stats, torch.stack([tokens.to(stats), positions, flops])])

    def loss_terms(
        self, model: torch.nn.Module, inputs: dict[str, Any], items: torch.Tensor, return_outputs: bool
    ) -> LossTerms:
        checks.check_batch(inputs, _LOSS_KEYS, _WHOLE)  # an override of `compute_loss` may have taken something out
        divisor = safe_divisor(items, inputs["input_ids"])
        inputs, is_empty = without_empty_mask(inputs)
        metrics: list[torch.Tensor] = []
        if isinstance(self, SFTTrainer):
            # Not by TRL's `compute_loss`, which waits for the device in every micro-batch, to log metrics.
            inputs, caller, auxiliary = {**inputs, "use_cache": False}, Caller(), None
            if self.aux_loss_enabled:
                inputs["output_router_logits"] = True
            # The head would first select the positions that have a label, and wait for their number. All have one.
            with replaced(trl_utils, _use_triton=lambda device: False):
                outputs = model(**inputs, fused_lm_head=True, **{WEIGHTED_BY_CALLER: caller})
            loss_sum = -(outputs.log_probs.double() * caller.supervised.weights).sum()
            metrics = [outputs.label_mask.sum(), outputs.entropy.sum(), outputs.is_top1.sum()]
            if self.aux_loss_enabled:
                router_loss = outputs.aux_loss * ~is_empty
                auxiliary = self.router_aux_loss_coef * router_loss
                metrics += [router_loss, ~is_empty]
            if return_outputs:
                dropped = ("labels", "loss_weights", "tree_stats")
                with torch.no_grad():
                    outputs = model(**{name: x for name, x in inputs.items() if name not in dropped})
        else:
            # A divisor of 1 travels as a Python number: mixed precision casts float tensors on their way to the model.
            loss, outputs = self.trainer_loss(model, {**inputs, "num_items_in_batch": 1.0}, return_outputs=True)
            loss_sum, auxiliary = checks.check_loss(self, loss, outputs), getattr(outputs, "aux_loss", None)
            if auxiliary is not None:
                auxiliary = self.accelerator.unwrap_model(model).router_aux_loss_coef * auxiliary.to(loss_sum.device)
                loss_sum = loss_sum - auxiliary
                auxiliary = auxiliary * ~is_empty
        sums = [x.detach().to(loss_sum.device, torch.float64) for x in (loss_sum, summed_weights(inputs), *metrics)]
        return LossTerms(loss_sum / divisor, torch.stack(sums), outputs, auxiliary)

    def window_metrics(self, sums: torch.Tensor, counts: torch.Tensor, peaks: torch.Tensor) -> dict[str, float]:
        weights, *stats, tokens, positions, flops = counts.tolist()
        stat = dict(zip(STATS, stats, strict=True))
        mean = flops * self._copies() / self.accelerator.num_processes
        return {
            "loss/sum": sums[0].item(),
            "loss/token_count": weights,
            "tree/branches": stat["branches"],
            "tree/tokens": stat["tree_tokens"],
            "tree/token_ratio": stat["branch_tokens"] / max(stat["tree_tokens"], 1),
            "tree/pair_ratio": stat["branch_pairs"] / max(stat["tree_pairs"], 1),
            "tree/padding": 1 - tokens / positions,
            "tree/imbalance": peaks[-1].item() / max(mean, 1.0) - 1,  # ranks meet at every micro-batch
            **self._trl_metrics(sums),
        }

    def evaluation_metrics(self, sums: torch.Tensor) -> dict[str, float]:
        return {"loss": (sums[0] / safe_divisor(sums[1], sums)).item(), **self._trl_metrics(sums)}

    def _trl_metrics(self, sums: torch.Tensor) -> dict[str, float]:
        """Those of `SFTTrainer`, without ratios to nothing."""
        if not isinstance(self, SFTTrainer):
            return {}
        _, _, tokens, entropy, correct, *router = sums.tolist()
        metrics: dict[str, float] = {"num_tokens": int(self._num_tokens)}
        if tokens:
            metrics |= {"entropy": entropy / tokens, "mean_token_accuracy": correct / tokens}
        if router and router[1]:
            metrics["aux_loss"] = router[0] / router[1]
        return metrics

    # ---- the rows of a step ----

    def step_sampler(self, dataset: Any, batch_size: int) -> Sampler | None:
        args, strategy, ranks = self.args, self.args.train_sampling_strategy, self._reading_ranks()
        has_ids = "tree_ids" in (getattr(dataset, "column_names", None) or ())
        if is_stream(dataset):
            if has_ids:
                checks.check_split_stream(args)
            return None
        units = [[row] for row in range(len(dataset))]
        if has_ids:
            tree_ids = list(dataset["tree_ids"][:])
            if batch_size > 1 and any(len(ids) > 1 for ids in tree_ids):
                logger.warning(
                    "`per_device_train_batch_size=%d` concatenates %d packed sequences, which may exceed the "
                    "`max_packed_tokens` that they were packed for. Set it to 1, or pack with `pack_trees=False`.",
                    batch_size,
                    batch_size,
                )
            if "num_parts" in dataset.column_names:
                tree_ids = checks.split_tree_ids(tree_ids, list(dataset["num_parts"][:]))
            units = linked_rows(tree_ids)
            routes = getattr(self.model.config.get_text_config(), "output_router_logits", False)
            if len(units) < len(dataset) and routes:
                logger.warning_once(  # type: ignore[attr-defined]
                    "`train_dataset` has parts of split trees. The router's auxiliary loss is that of a micro-batch, "
                    "so that of such a tree is inexact: raise `max_packed_tokens`, or set `router_aux_loss_coef=0`."
                )
        is_collated = isinstance(self.data_collator, DataCollatorForPrefixTree)
        if len(units) == len(dataset):  # every row is free to move
            if strategy not in STRATEGIES or not units or (strategy == "sequential" and ranks == 1):
                return None
            if args.dataloader_drop_last:
                if is_collated and (ranks > 1 or strategy in BY_LENGTH):
                    logger.warning(
                        "`dataloader_drop_last=True`: rows are neither assigned to ranks nor sorted by their cost. "
                        "Leave it at `False`: an uneven last step is filled with empty rows, not with repeated ones."
                    )
                return RandomSampler(dataset) if strategy in BY_LENGTH else None  # Trainer's knows no cost of a tree
            if not is_collated and strategy != "batch_rebalance":  # Trainer's sampler for it would repeat rows
                return None
        elif strategy not in STRATEGIES:
            raise ValueError(
                f"`train_sampling_strategy={strategy!r}` would tear the parts of split trees apart. Set it to one of "
                f"{STRATEGIES}."
            )
        costs = None
        if is_collated and (ranks > 1 or strategy == "group_by_length"):
            counts, num_proc = RowCounts(self.data_collator), getattr(args, "dataset_num_proc", None)
            # `datasets` caches the counts of the first rank; other kinds of datasets are counted by every rank at once
            with self.accelerator.main_process_first() if hasattr(dataset, "map") else nullcontext():
                costs = row_costs(dataset, counts, self.model.config, num_proc)
        return step_sampler(self, units, costs, batch_size, ranks)
