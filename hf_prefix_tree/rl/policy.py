# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeGRPOTrainer`] and [`TreeRLOOTrainer`]: TRL's trainers, with each shared token of a group computed once.

TRL shuffles the completions of a generation into micro-batches. Here those of one optimizer step (a window) are
regrouped, so that completions of one prompt meet in one forward. Losses are scaled to sum to the step's loss, and
metrics are logged for TRL's own micro-batches.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from trl import RLOOTrainer
from trl.trainer.utils import split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from hf_prefix_tree.modeling.attention.implementations import (
    default_implementation,
    implementations,
    set_implementations,
)
from hf_prefix_tree.modeling.checks import base_causal_lm
from hf_prefix_tree.rl.folded_forward import FoldedForwardMixin, ids_to_fold
from hf_prefix_tree.rl.folded_rows import TOO_MANY, SortedRows, row_multiple, select_rows
from hf_prefix_tree.rl.rollouts import ROLLOUTS, PaddedRows, Rollout, RolloutRowsMixin
from hf_prefix_tree.training.step import replaced

logger = logging.getLogger(__name__)

Scored = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # log-probs, entropies, auxiliary loss
REGROUPED = "regrouped"  # key of a micro-batch that is not TRL's own
# How each `loss_type` normalises the loss of a micro-batch: as a mean over its completions, or as a sum with a divisor
# of the whole step. (`bnpo` divides by the tokens of the micro-batch.)
MEANS_OVER_COMPLETIONS = ("grpo", "sapo", "dr_grpo", "luspo")
SUMS = ("dapo", "cispo", "vespo")


@dataclass
class Window:
    """TRL's micro-batches of (a part of) an optimizer step, and the rows of each micro-batch after regrouping."""

    batches: list[dict[str, Any]]
    parts: list[list[int]]
    scored: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # by the index of the part

    def scored_batches(self) -> list[Scored]:
        """Log-probs and entropies of each of TRL's micro-batches, after all parts were computed; clears `scored`."""
        scored = [self.scored[index] for index in range(len(self.parts))]
        log_probs, entropies = (_in_row_order(values, self.parts) for values in zip(*scored, strict=True))
        self.scored.clear()
        size = len(log_probs) // len(self.batches)
        return [(*values, None) for values in zip(log_probs.split(size), entropies.split(size), strict=True)]


@dataclass
class Regrouped:
    """Marks a micro-batch as a part of a window. The loss is multiplied by `scale`."""

    window: Window
    part: int
    scale: float


def _in_row_order(values: Sequence[torch.Tensor], parts: list[list[int]]) -> torch.Tensor:
    """Results of parts of a batch, in the order of its rows."""
    order = torch.tensor([row for part in parts for row in part], device=values[0].device)
    return torch.cat(list(values))[order.argsort()]


class TreePolicyMixin(FoldedForwardMixin):
    """
    Put it before `GRPOTrainer` or `RLOOTrainer`.

    Tokens of TRL's own micro-batch, padding included, are always allowed, since there is memory for them anyway; not
    with `overflow="stream"`, where parts of more than `max_row_tokens` tokens are streamed.
    """

    loss_type = "grpo"  # RLOO has no such option; its loss is a mean over completions, too
    _buffered_inputs: list[dict[str, Any]] | None
    _metrics: dict[str, Any]
    _regrouped: Regrouped | None = None  # the micro-batch whose loss is being computed
    _known: Scored | None = None  # the forward returns it without computing anything
    _rollouts: list[Rollout] | None = None  # of the completions that are scored, if they have several rows

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        reason = self._why_not_regroup()
        self._regroups = reason is None
        if reason is not None:
            logger.warning(
                "Micro-batches stay as TRL shuffles them, because %s: completions of a group share their prompt only "
                "inside a micro-batch.",
                reason,
            )

    def _why_not_regroup(self) -> str | None:
        """Why the loss depends on which completions share a micro-batch; `None` if it does not."""
        if self.aux_loss_enabled:
            return "the router's auxiliary loss is that of a micro-batch (`router_aux_loss_coef=0` turns it off)"
        return None

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        if not self.use_transformers_continuous_batching:
            return super()._generate_single_turn(*args, **kwargs)
        base = base_causal_lm(self.model)
        before = implementations(base)
        # continuous batching serves no other implementation
        base.set_attn_implementation(default_implementation(base.config.__class__))
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            set_implementations(base, before)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        has_images = any(row.get("image") is not None or row.get("images") for row in inputs)
        if not (self._is_vlm and self.log_multimodal) or len(set(gather_object([has_images]))) == 1:
            return super()._generate_and_score_completions(inputs)
        warnings.warn("TRL's tables of completions leave out images where a rank has none to show.", stacklevel=2)
        with replaced(self, log_multimodal=False):  # TRL gathers them, and would wait for that rank forever
            return super()._generate_and_score_completions(inputs)

    # ---- micro-batches ----

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        generated = self._buffered_inputs
        if generated is None or generated is before:
            return inputs
        # An optimizer step may start anywhere in a generation whose length it does not divide. Of the greatest common
        # divisor of micro-batches, every step holds all or none.
        size = math.gcd(self.args.gradient_accumulation_steps, len(generated))
        windows = [generated[start : start + size] for start in range(0, len(generated), size)]
        self._buffered_inputs = [batch for window in windows for batch in self._regroup(window)]
        return self._buffered_inputs[self._step % self.args.steps_per_generation]

    def _regroup(self, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The same completions, each group in as few micro-batches as fit; micro-batches left empty are `{}`."""
        if not self._regroups or len(batches) == 1 or self._keep_parts(batches[0], len(batches)):
            return batches
        count = sum(len(batch["prompt_ids"]) for batch in batches)
        whole = select_rows([split_pixel_values_by_grid(batch) for batch in batches], range(count))
        names = ("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask")
        input_ids, attention_mask = (torch.cat([whole[name] for name in pair], dim=1) for pair in names)
        rows = {**whole, "input_ids": input_ids, "attention_mask": attention_mask}
        with replaced(self, _rollouts=whole.get(ROLLOUTS)):
            parts = self._parts(self.model, rows, whole["completion_ids"].shape[1], len(batches))
        window = Window(batches, parts)
        regrouped = []
        for index, part in enumerate(parts):
            scale = len(part) * len(batches) / len(input_ids) if self.loss_type in MEANS_OVER_COMPLETIONS else 1.0
            batch = unsplit_pixel_values_by_grid(select_rows([whole], part))
            regrouped.append({**batch, REGROUPED: Regrouped(window, index, scale)})
        # Ranks reduce their gradients in the backward that ends a step, so the empty micro-batches come first.
        return [{} for _ in range(len(batches) - len(parts))] + regrouped

    def _parts(self, model: Any, rows: dict[str, Any], logits_to_keep: int, max_parts: int) -> list[list[int]]:
        """
        The completions of each forward: the number of forwards, equal on all ranks, with the fewest tokens in total.
        `rows` hold the padded `input_ids` and their `attention_mask`, and for images a list of those of each row.
        """
        input_ids, attention_mask, sizes = rows["input_ids"], rows["attention_mask"], None
        if self._rollouts is not None:
            padded = PaddedRows.of(self._rollouts, input_ids, attention_mask, logits_to_keep)
            input_ids, attention_mask, sizes = padded.input_ids, padded.attention_mask, padded.sizes
        ids = ids_to_fold(model, input_ids, attention_mask, unsplit_pixel_values_by_grid(rows))
        in_order = SortedRows.of(input_ids if ids is None else ids, attention_mask, sizes)
        streams = self.overflow == "stream" and ids is not None
        own = 0 if streams else -(-len(in_order.lengths) // max_parts) * in_order.width
        min_reuse = math.inf if ids is None else 0.0 if streams else self.min_reuse
        budget, multiple = max(own, self.max_row_tokens), row_multiple(input_ids.device)
        totals = in_order.totals(max_parts, budget, min_reuse, multiple, streams)
        return in_order.parts(self._number_of_parts(totals))

    def _number_of_parts(self, totals: npt.NDArray[np.int64]) -> int:
        """The number, equal on all ranks, for which the tokens of 1, 2, ... parts are the fewest on all of them."""
        if self.is_deepspeed_enabled:
            return len(totals)  # its engine counts the backwards
        all_totals = self.accelerator.gather(torch.from_numpy(totals).to(self.accelerator.device)[None])
        return int(all_totals.sum(dim=0).argmin()) + 1

    def _keep_parts(self, inputs: dict[str, Any], max_parts: int) -> bool:
        """Whether rows stay in TRL's order: their images are not folded. Other ranks may have other rows, and wait."""
        keeps = "token_type_ids" in inputs or ("pixel_values" in inputs and "image_grid_thw" not in inputs)
        if keeps:
            self._number_of_parts(np.array([TOO_MANY] * (max_parts - 1) + [0]))
        return keeps

    # ---- the loss ----

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        if not inputs:
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        part: Regrouped | None = inputs.get(REGROUPED)
        if part is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        ignored: dict[str, Any] = {mode: defaultdict(list) for mode in self._metrics}
        with replaced(self, _metrics=ignored, _regrouped=part):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
        window = part.window
        if part.part == len(window.parts) - 1:  # TRL logs the metrics of its own micro-batches, from these log-probs
            for batch, scored in zip(window.batches, window.scored_batches(), strict=True):
                with torch.no_grad(), replaced(self, _known=scored):
                    self._compute_loss(model, batch)
        return loss * part.scale

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> Scored:
        if self._known is not None:
            return self._known
        compute = super()._get_per_token_logps_and_entropies
        batch_size = args[0] if args else kwargs.pop("batch_size", None)  # RLOO passes it by position, GRPO by name
        inputs = {name: value for name, value in kwargs.items() if value is not None and value is not False}
        max_parts = -(-len(input_ids) // (batch_size or len(input_ids)))
        has_flags = any(value is True for value in inputs.values())
        if max_parts == 1 or has_flags or self._keep_parts(inputs, max_parts):
            scored = compute(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
            if self._regrouped is not None:
                self._regrouped.window.scored[self._regrouped.part] = scored[0].detach(), scored[1].detach()
            return scored
        # TRL computes the old and the reference log-probs of a generation in chunks of `batch_size` rows
        rows = split_pixel_values_by_grid({"input_ids": input_ids, "attention_mask": attention_mask, **inputs})
        parts = self._parts(model, rows, logits_to_keep, max_parts)
        rollouts, log_probs = self._rollouts, []
        for part in parts:
            batch = unsplit_pixel_values_by_grid(select_rows([rows], part))
            with replaced(self, _rollouts=None if rollouts is None else [rollouts[index] for index in part]):
                log_probs.append(compute(model, logits_to_keep=logits_to_keep, **batch)[0])
        return _in_row_order(log_probs, parts), None, None


class TreeGRPOTrainer(TreePolicyMixin, RolloutRowsMixin):
    """
    Group Relative Policy Optimization on prefix trees: a drop-in for TRL's [`~trl.GRPOTrainer`].

    Takes the same arguments and a [`~trl.GRPOConfig`], takes the same optimizer steps and logs the same numbers.
    Generation, rewards, tools and environments are TRL's. The trainers differ in which completions they compute
    together: inside an optimizer step, groups are kept together in the forwards that compute the fewest tokens, none
    with more tokens than TRL's micro-batch of `per_device_train_batch_size` padded rows. So a group may be larger than
    a micro-batch, and some of the `gradient_accumulation_steps` may have nothing left to compute. TRL's own
    micro-batches are kept where the loss depends on a micro-batch as a whole: `loss_type="bnpo"`, an entropy bonus,
    `top_entropy_quantile` below 1, a router's auxiliary loss, and images that cannot be folded. Their number is kept
    under DeepSpeed, and where rows cannot be folded (absolute positions, `torch_compile=True`).

    `rollout_func` may return, for each rollout, a list of rows where TRL's returns one: a row is one (prompt,
    completion) sequence. With `rollout_rows="as_sampled"`, rollouts with tools are several rows as well. `docs/rl.md`
    defines the loss.

    TRL shuffles a generation that spans several optimizer steps (`steps_per_generation` above
    `gradient_accumulation_steps`) before it splits the generation into steps, so each step holds and shares only a
    part of a group.

    A [`TreeGRPOConfig`] also says `max_row_tokens` (tokens that one forward may hold, where memory allows more than
    TRL's micro-batch has), `overflow` (what happens to larger trees), `min_reuse` and `attn_backend` (as for
    [`fold_shared_prefixes`]).

    Args:
        model, reward_funcs, args, train_dataset, ...:
            As for `GRPOTrainer`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl import GRPOConfig
    >>> from trl.rewards import accuracy_reward
    >>> from hf_prefix_tree import TreeGRPOTrainer

    >>> trainer = TreeGRPOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=accuracy_reward,
    ...     args=GRPOConfig("Qwen3-0.6B-TreeGRPO", num_generations=16, per_device_train_batch_size=16),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    ```
    """

    _tag_names = ["trl", "grpo", "prefix-tree"]  # noqa: RUF012 - as in TRL
    _name = "Tree GRPO"

    def _why_not_regroup(self) -> str | None:
        if self.loss_type not in MEANS_OVER_COMPLETIONS + SUMS:
            return f"`loss_type={self.loss_type!r}` is normalised over the tokens of a micro-batch"
        if self._entropy_bonus_enabled:
            return "the entropy bonus (`entropy_coef`, `use_adaptive_entropy`) is a mean over a micro-batch's tokens"
        if self.top_entropy_quantile < 1.0:
            return f"`top_entropy_quantile={self.top_entropy_quantile}` is a quantile of a micro-batch"
        return super()._why_not_regroup()


class TreeRLOOTrainer(TreePolicyMixin, RLOOTrainer):
    """
    REINFORCE Leave-One-Out on prefix trees: a drop-in for TRL's [`~trl.RLOOTrainer`].

    Takes the same arguments and an [`~trl.RLOOConfig`], takes the same optimizer steps and logs the same numbers. As
    for [`TreeGRPOTrainer`], groups are kept together inside an optimizer step.

    A [`TreeRLOOConfig`] has the options of a [`TreeGRPOConfig`].

    Args:
        model, reward_funcs, args, train_dataset, ...:
            As for `RLOOTrainer`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl import RLOOConfig
    >>> from trl.rewards import accuracy_reward
    >>> from hf_prefix_tree import TreeRLOOTrainer

    >>> trainer = TreeRLOOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=accuracy_reward,
    ...     args=RLOOConfig("Qwen3-0.6B-TreeRLOO", num_generations=8, per_device_train_batch_size=8),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    ```
    """

    _tag_names = ["trl", "rloo", "prefix-tree"]  # noqa: RUF012 - as in TRL
    _name = "Tree RLOO"
