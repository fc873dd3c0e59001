# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`DiffusionSFTTrainer`]: TRL's `SFTTrainer` for diffusion language models.

Loading, PEFT, checkpointing, saving and the fused head, which builds no logits, are TRL's. Overridden are what a
dataset becomes, the loss and what it is divided by, and evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import default_data_collator
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTTrainer
from trl.trainer.utils import global_then_local_main_first

from hf_prefix_tree.collators.diffusion import SAMPLE_INDEX, DataCollatorForDiffusionLM
from hf_prefix_tree.diffusion.config import DiffusionSFTConfig
from hf_prefix_tree.diffusion.corruption import Noised, corrupt_blockwise, corrupt_uniform
from hf_prefix_tree.diffusion.data import COLUMNS, WithEmptyRows, prepare_diffusion_rows
from hf_prefix_tree.diffusion.draws import noise_seeds
from hf_prefix_tree.diffusion.model import prepare_diffusion_model
from hf_prefix_tree.diffusion.objective import as_labels, objective_row, supervised_tokens, window_starts
from hf_prefix_tree.diffusion.start import check_collator, default_collator, find_mask_token_id
from hf_prefix_tree.loss import safe_divisor
from hf_prefix_tree.trainers.mixin import without_empty_mask
from hf_prefix_tree.trainers.padding import PaddedDataset, PaddedStream

_EVALUATION = -1  # in the place of the epoch, from which training draws its noise


class DiffusionSFTTrainer(SFTTrainer):
    """
    Supervised fine-tuning of a causal LM as a diffusion language model.

    A dataset row has `messages` (and `tools`), `prompt` and `completion`, or `input_ids` with `loss_mask` (or TRL's
    `labels`, `completion_mask`, `assistant_masks`). Every assistant turn becomes a sample of its own. Nothing is
    shifted: the model predicts a token at the token's place.

    The objective is one of

    - `"mdlm"` (LLaDA): full attention; noised tokens, each weighted by 1 / the probability that it was noised.
    - `"block"`: rows `[x_t | x_0]` in which a noisy block sees itself and the clean blocks before it; all supervised
      tokens of x_t, unweighted. One level of noise per block.
    - `"hybrid"`: the same rows, but x_0 attends causally. `alpha` times the weighted loss of the noised tokens of x_t,
      plus next-token prediction on x_0. One level of noise per block.

    Each is divided by the supervised tokens of the whole optimizer step: all ranks, all accumulation steps. The noise
    of a sample depends on `seed`, its index in the dataset and the epoch: not on batches or ranks, or on where a run
    was resumed.

    Logged are `loss`, `nll_bound`, `mean_token_accuracy` (of all predictions) and, for `"hybrid"`, `next_token_loss`.
    `nll_bound` is the weighted loss of the noised tokens per supervised token, in nats: in expectation over the noise
    an upper bound of the negative log-likelihood. Evaluation adds `perplexity = exp(nll_bound)`, over the whole set
    and all ranks. Its noise is always `"uniform"`, and the same at every call.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            A causal LM. It is prepared with [`prepare_diffusion_model`].
        args ([`DiffusionSFTConfig`], *optional*):
            Configuration.
        data_collator ([`DataCollatorForDiffusionLM`], *optional*):
            Defaults to one with the numbers of `args`. On a GPU it pads rows to a multiple of 128 for FlexAttention.
        train_dataset, eval_dataset, processing_class, peft_config, callbacks, optimizers, ...:
            As for `SFTTrainer`. Refused: `compute_loss_func`, `compute_metrics`, `preprocess_logits_for_metrics`,
            `formatting_func`, vision datasets, prompt-learning PEFT. LoRA does not train the embedding of a new mask
            token, unless `trainable_token_indices` of its config names it.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from hf_prefix_tree import DiffusionSFTConfig, DiffusionSFTTrainer

    >>> trainer = DiffusionSFTTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     args=DiffusionSFTConfig("diffusion", objective="block", mask_token_id=151669, block_size=32),
    ...     train_dataset=load_dataset("json", data_files="dialogues.jsonl", split="train"),
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    ```
    """

    _signature_columns: list[str] | None
    data_collator: Any
    current_gradient_accumulation_steps: int
    _tag_names = ["trl", "sft", "diffusion-lm"]  # noqa: RUF012 - as in TRL
    _name = "Diffusion SFT"

    def __init__(
        self,
        model: Any,
        args: DiffusionSFTConfig | None = None,
        data_collator: DataCollatorForDiffusionLM | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else model.config._name_or_path
            args = DiffusionSFTConfig(f"{name.split('/')[-1] or type(model).__name__}-DiffusionSFT")
        elif not isinstance(args, DiffusionSFTConfig):
            raise ValueError(f"`args` must be a `DiffusionSFTConfig`, got `{type(args).__name__}`.")
        for name in ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics", "formatting_func"):
            if kwargs.get(name) is not None:
                raise ValueError(f"`{name}` is not supported: the loss and its metrics are those of the objective.")
        if data_collator is not None:
            check_collator(data_collator, args)
        self._sums: dict[str, torch.Tensor] = {}
        self._draw = 0
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator or default_data_collator,  # until the tokenizer is there
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        if self._is_vision_dataset:
            raise ValueError("`train_dataset` has images, which are not supported: use a dataset of texts.")
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "`parallelism_config` splits the sequence over devices (context or sequence parallelism), which drops "
                "the mask. Set `cp_size=1` and `sp_size=1`."
            )
        if data_collator is None:
            self.data_collator = default_collator(args, self._tokenizer)
        self.mask_token_id = find_mask_token_id(args, self._tokenizer, self.model, self.data_collator)
        prepare_diffusion_model(self.model, attn_backend=args.attn_backend)
        # Says that the loss is normalised by `num_items_in_batch`, so that Trainer does not divide it by the
        # accumulation steps. (Trainer's `loss_is_scaled_for_ga` says the same, but not before transformers 5.19.)
        self.model_accepts_loss_kwargs = True

    # ---- data ----

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: DiffusionSFTConfig, packing: bool, *_: Any
    ) -> Any:
        assert not isinstance(args.chat_template_kwargs, str)  # parsed by `DiffusionSFTConfig`
        with global_then_local_main_first():
            dataset = prepare_diffusion_rows(
                dataset,
                self._tokenizer,
                chat_template_kwargs=args.chat_template_kwargs,
                num_proc=args.dataset_num_proc,
            )
        return dataset.shuffle(seed=args.seed) if args.shuffle_dataset else dataset

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(COLUMNS)

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, **kwargs: Any) -> Any:
        """Accelerate fills an uneven last step with repeated rows, which count twice: fill it with empty ones."""
        is_training = kwargs.get("is_training", False)
        is_distributed = self.accelerator.num_processes > 1
        rows = (1 if self.accelerator.split_batches else self.args.world_size // self._copies()) * batch_size
        if isinstance(dataset, torch.utils.data.IterableDataset):
            # Trainer doesn't know where a stream ends, and would carry the gradients of an uneven last step over into
            # the next epoch's first one.
            multiple = rows * (self.args.gradient_accumulation_steps if is_training else 1)
            if is_distributed:
                self.accelerator.dataloader_config.dispatch_batches = False  # batches of ranks differ in length
            if is_distributed or multiple > rows:
                dataset = PaddedStream(dataset, multiple)
        elif is_distributed and not (is_training and self.args.dataloader_drop_last) and len(dataset) % rows:
            dataset = PaddedDataset(self._remove_unused_columns(dataset, description=description), rows)
        collator = self.data_collator
        self.data_collator = WithEmptyRows(collator)
        try:
            return super()._get_dataloader(dataset, description, batch_size, **kwargs)
        finally:
            self.data_collator = collator

    # ---- one optimizer step ----

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        if not batch_samples:
            return None
        count = torch.stack([supervised_tokens(batch).sum() for batch in batch_samples]).sum().to(device)
        return self.accelerator.gather(count[None]).sum() // self._copies()

    def _noised(self, inputs: Mapping[str, torch.Tensor]) -> Noised:
        if SAMPLE_INDEX not in inputs:
            raise ValueError(
                f"The batch has no `{SAMPLE_INDEX}`, on which the noise depends: add a column of that name, counting "
                "from 0, or leave out `skip_prepare_dataset`."
            )
        args, supervised = self.args, supervised_tokens(inputs)
        salts = (int(self.state.epoch or 0),) if self.model.training else (_EVALUATION, self._draw)
        options: dict[str, Any] = {
            "mask_token_id": self.mask_token_id,
            "seeds": noise_seeds(inputs[SAMPLE_INDEX], args.seed, *salts),
            "eps": args.noise_eps,
        }
        if args.objective != "mdlm":
            options["block_size"] = args.block_size
            options["block_start"] = window_starts(supervised) if args.response_window else None
        if self.model.training and args.corruption == "blockwise":
            return corrupt_blockwise(inputs["input_ids"], supervised, half_life=args.half_life, **options)
        return corrupt_uniform(inputs["input_ids"], supervised, **options)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        args = self.args
        row = objective_row(
            inputs,
            self._noised(inputs),
            args.objective,
            args.block_size,
            response_window=args.response_window,
            alpha=args.alpha,
        )
        model_inputs, is_empty = without_empty_mask(row.inputs)
        if self.aux_loss_enabled:
            model_inputs["output_router_logits"] = True
        outputs = model(**model_inputs, **as_labels(row))
        nll = -outputs.log_probs[0].double()
        loss_sum = (nll * row.loss_weights).sum()
        supervised = supervised_tokens(inputs).sum()
        self._record(nll.detach(), loss_sum.detach(), outputs.is_top1[0], row, supervised)
        count, steps = supervised, 1
        if self.model.training and num_items_in_batch is not None:
            count, steps = num_items_in_batch, self.current_gradient_accumulation_steps
            loss_sum = loss_sum * (self.accelerator.num_processes // self.get_tp_size())  # DDP and FSDP average ranks
        loss = loss_sum / safe_divisor(count, nll)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss * ~is_empty / steps
        return (loss, outputs) if return_outputs else loss

    def _record(
        self, nll: torch.Tensor, loss_sum: torch.Tensor, is_top1: torch.Tensor, row: Any, supervised: torch.Tensor
    ) -> None:
        sums = _Sums(
            loss=loss_sum,
            bound=(nll * row.bound_weights).sum(),
            next_token=nll[row.is_next_token].sum(),
            correct=is_top1.sum(),
            predicted=is_top1.new_tensor(len(nll), dtype=torch.float64),
            supervised=supervised,
        )
        values = torch.stack([value.double() for value in sums])
        kind = "train" if self.model.training else "eval"
        self._sums[kind] = self._sums[kind] + values if kind in self._sums else values

    # ---- evaluation and reports ----

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        inputs, losses = self._prepare_inputs(inputs), []
        with torch.no_grad(), self.compute_loss_context_manager():
            for draw in range(self.args.eval_noise_draws):
                self._draw = draw
                loss = self.compute_loss(model, inputs)
                assert isinstance(loss, torch.Tensor)
                losses.append(loss)
        return torch.stack(losses).mean(), None, None

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> EvalLoopOutput:
        self._sums.pop("eval", None)
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        sums = self._gathered("eval")
        if sums is not None:
            metrics = self._metrics_of(sums)
            metrics["loss"] = _ratio(sums.loss, sums.supervised)
            metrics["perplexity"] = math.exp(min(metrics["nll_bound"], 700.0))  # 700: the largest that has one
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # only a window's end logs "loss", on every rank; evaluations and users log too
        sums = self._gathered("train") if self.model.training and "loss" in logs else None
        if sums is not None:
            logs |= self._metrics_of(sums)
        super().log(logs, *args, **kwargs)

    def _metrics_of(self, sums: _Sums) -> dict[str, float]:
        metrics = {
            "nll_bound": _ratio(sums.bound, sums.supervised),
            "mean_token_accuracy": _ratio(sums.correct, sums.predicted),
        }
        if self.args.objective == "hybrid":
            metrics["next_token_loss"] = _ratio(sums.next_token, sums.supervised)
        return metrics

    def _gathered(self, kind: str) -> _Sums | None:
        """What was added up since last time, over all ranks; every rank must call it."""
        values = self._sums.pop(kind, None)
        return None if values is None else _Sums(*self.accelerator.gather(values[None]).sum(dim=0))

    def _copies(self) -> int:
        """Ranks that hold the same batch."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()


class _Sums(NamedTuple):
    """Scalars of some micro-batches, added up."""

    loss: torch.Tensor
    bound: torch.Tensor
    next_token: torch.Tensor
    correct: torch.Tensor
    predicted: torch.Tensor
    supervised: torch.Tensor


def _ratio(total: torch.Tensor, count: torch.Tensor) -> float:
    return (total / safe_divisor(count, total)).item()
