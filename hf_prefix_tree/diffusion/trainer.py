# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`DiffusionSFTTrainer`]: TRL's `SFTTrainer` for diffusion language models."""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from transformers import default_data_collator
from trl import SFTTrainer
from trl.trainer.utils import global_then_local_main_first

from hf_prefix_tree.diffusion.collator import DataCollatorForDiffusionLM
from hf_prefix_tree.diffusion.config import DiffusionSFTConfig
from hf_prefix_tree.diffusion.data import COLUMNS, WithEmptyRows, prepare_diffusion_rows
from hf_prefix_tree.diffusion.model import prepare_diffusion_model
from hf_prefix_tree.diffusion.objective import (
    EVALUATION,
    bounds_nll,
    draw_noise,
    noise_kind,
    objective_row,
    supervised_tokens,
)
from hf_prefix_tree.modeling.batch import BLOCK_SIZE
from hf_prefix_tree.modeling.loss import safe_divisor, weighted_mean
from hf_prefix_tree.training.checks import (
    check_arguments,
    check_collator,
    check_mask_token,
    check_texts,
    padding_token_of,
    refuse_tensor_parallelism,
)
from hf_prefix_tree.training.sampling import PassCounter
from hf_prefix_tree.training.step import LossTerms, StepMixin, without_empty_mask


class Sums(NamedTuple):
    """Scalars of some micro-batches, added up."""

    loss: torch.Tensor
    bound: torch.Tensor
    next_token: torch.Tensor
    correct: torch.Tensor
    predicted: torch.Tensor
    supervised: torch.Tensor

    def training_metrics(self, objective: str, has_bound: bool) -> dict[str, float]:
        """
        The metrics of a logging window besides its loss.

        Args:
            objective (`str`): `"mdlm"`, `"block"` or `"hybrid"`.
            has_bound (`bool`): Whether the noise bounds the negative log-likelihood, see [`bounds_nll`].
        """
        metrics = {"mean_token_accuracy": _ratio(self.correct, self.predicted)}
        if has_bound:
            metrics["nll_bound"] = _ratio(self.bound, self.supervised)
        if objective == "hybrid":
            metrics["next_token_loss"] = _ratio(self.next_token, self.supervised)
        return metrics

    def evaluation_metrics(self, objective: str, has_bound: bool) -> dict[str, float]:
        """The same for a whole evaluation, with its loss and perplexity: NaN where it has no supervised token."""
        metrics = {"loss": _ratio(self.loss, self.supervised), **self.training_metrics(objective, has_bound)}
        if has_bound:
            metrics["perplexity"] = math.exp(min(metrics["nll_bound"], 700.0))  # 700: the largest that has one
        # a mean of nothing: 0 would be the best there is, and an error would end the training that evaluates
        return metrics if self.supervised else dict.fromkeys(metrics, math.nan)


def _ratio(total: torch.Tensor, count: torch.Tensor) -> float:
    return (total / safe_divisor(count, total)).item()


def default_collator(args: DiffusionSFTConfig, tokenizer: Any) -> DataCollatorForDiffusionLM:
    """The collator with the numbers of `args`; on a GPU it pads to whole blocks of FlexAttention."""
    on_gpu = args.device.type == "cuda" and args.attn_backend != "sdpa"
    return DataCollatorForDiffusionLM(
        pad_token_id=padding_token_of(tokenizer),
        block_size=args.block_size,
        pad_seq_len_divisible=args.pad_to_multiple_of or (BLOCK_SIZE if on_gpu else None),
        max_seq_len=args.max_length,
        supervise_padding=args.supervise_padding,
        response_window=args.response_window,
        processing_class=tokenizer,
    )


class DiffusionSFTTrainer(StepMixin, SFTTrainer):
    """
    Supervised fine-tuning of a causal LM as a diffusion language model.

    A dataset row has `messages` (and `tools`), `prompt` and `completion`, or `input_ids` with `loss_mask` (or TRL's
    `labels`, `completion_mask`, `assistant_masks`). Every assistant turn becomes a sample. Nothing is shifted:
    the model predicts a token at the position of that token.

    The objective is one of

    - `"mdlm"` (LLaDA): full attention; masked tokens, each weighted by 1 / the probability that it was masked.
    - `"block"`: sequences `[x_t | x_0]` in which a noisy block sees itself and the clean blocks before it; all
      supervised tokens of x_t, unweighted. One level of noise per block.
    - `"hybrid"`: the same sequences, but x_0 attends causally. `alpha` times the weighted loss of the masked tokens of
      x_t, plus next-token prediction on x_0. One level of noise per block.

    Each is divided by the supervised tokens of the whole optimizer step: all ranks, all accumulation steps. The noise
    of a sample depends on `seed`, its index in the dataset and the epoch: not on batches or ranks, or on where a run
    was resumed.

    Logged are `loss`, `mean_token_accuracy` (of all predictions), `nll_bound` and, for `"hybrid"`, `next_token_loss`.
    `nll_bound` is the weighted loss of the masked tokens per supervised token, in nats: in expectation over the noise
    an upper bound of the negative log-likelihood. Evaluation adds `perplexity = exp(nll_bound)`, over the whole set
    and all ranks. Its noise is the same at every call; for `corruption="blockwise"`, under which there is no bound in
    training, it is `"uniform"`. `"random"` noise has neither bound nor perplexity.

    After training the model is still a diffusion language model: it completes prompts by [`diffusion_generate`], and
    `generate` raises. [`~hf_prefix_tree.diffusion.model.unprepare_diffusion_model`] makes it a causal one again.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            A causal LM. It is prepared with [`prepare_diffusion_model`].
        args ([`DiffusionSFTConfig`], *optional*):
            Configuration.
        data_collator ([`DataCollatorForDiffusionLM`], *optional*):
            Defaults to one with the numbers of `args`. On a GPU it pads to a multiple of 128 for FlexAttention.
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
        args = check_arguments(args, DiffusionSFTConfig, model, "DiffusionSFT", kwargs)
        if data_collator is not None:
            check_collator(data_collator, DataCollatorForDiffusionLM, args, ("block_size", "response_window"))
        # where samples are cut; `SFTTrainer` prepares datasets while it initialises
        self._cap = (
            ("max_length", args.max_length) if data_collator is None else ("max_seq_len", data_collator.max_seq_len)
        )
        self._prepared: weakref.WeakSet = weakref.WeakSet()
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
        check_texts(self)
        refuse_tensor_parallelism(self)
        if data_collator is None:
            self.data_collator = default_collator(args, self._tokenizer)
        num_embeddings = self.model.get_input_embeddings().num_embeddings
        self.mask_token_id: int | None = None
        if args.corruption != "random":  # which replaces tokens instead of masking them
            named = getattr(self._tokenizer, "mask_token_id", None)
            mask_token_id = named if args.mask_token_id is None else args.mask_token_id
            self.mask_token_id = check_mask_token(mask_token_id, num_embeddings, self.data_collator)
        self._vocab_size = min(len(self._tokenizer), num_embeddings)
        self._passes = PassCounter()
        self.add_callback(self._passes)
        prepare_diffusion_model(self.model, attn_backend=args.attn_backend)

    # ---- data ----

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: DiffusionSFTConfig, packing: bool, *_: Any
    ) -> Any:
        if dataset in self._prepared:  # `evaluate` calls itself for each dataset of a `dict`
            return dataset
        assert not isinstance(args.chat_template_kwargs, str)  # parsed by `DiffusionSFTConfig`
        with global_then_local_main_first():
            dataset = prepare_diffusion_rows(
                dataset,
                self._tokenizer,
                chat_template_kwargs=args.chat_template_kwargs,
                on_error=args.on_error,
                num_proc=args.dataset_num_proc,
                cap=self._cap,
            )
        if args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        self._prepared.add(dataset)
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(COLUMNS)

    def loader_collator(self, is_training: bool) -> WithEmptyRows:
        return WithEmptyRows(self.data_collator)

    # ---- the loss and its metrics ----

    def count_items(self, batch: dict[str, Any]) -> torch.Tensor:
        return supervised_tokens(batch).sum()

    def loss_terms(
        self, model: torch.nn.Module, inputs: dict[str, Any], items: torch.Tensor, return_outputs: bool
    ) -> LossTerms:
        args, is_training = self.args, self._is_training
        noised = draw_noise(
            inputs,
            args,
            noise_kind(args, is_training),
            (self._passes.epoch,) if is_training else (EVALUATION, self._draw),
            mask_token_id=self.mask_token_id,
            vocab_size=self._vocab_size,
        )
        row = objective_row(
            inputs, noised, args.objective, args.block_size, response_window=args.response_window, alpha=args.alpha
        )
        model_inputs, is_empty = without_empty_mask(row.inputs)
        if self.aux_loss_enabled:
            model_inputs["output_router_logits"] = True
        labels = row.targets[None]
        # TRL's fused head scores the predictions: log-probs of shape `(1, M)`
        outputs = model(**model_inputs, labels=labels, shift_labels=labels, fused_lm_head=True)
        nll = -outputs.log_probs[0].double()
        values = nll.detach()
        sums = Sums(
            loss=(values * row.loss_weights).sum(),
            bound=(values * row.bound_weights).sum(),
            next_token=values[row.is_next_token].sum(),
            correct=outputs.is_top1[0].sum(),
            predicted=values.new_tensor(len(values)),
            supervised=self.count_items(inputs),
        )
        loss = weighted_mean(nll, row.loss_weights, items)
        auxiliary = self.router_aux_loss_coef * outputs.aux_loss * ~is_empty if self.aux_loss_enabled else None
        return LossTerms(loss, torch.stack([value.double() for value in sums]), outputs, auxiliary)

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        inputs, losses = self._prepare_inputs(inputs), []
        with torch.no_grad(), self.compute_loss_context_manager():
            draws = 1 if self.args.corruption == "all_masked" else self.args.eval_noise_draws  # all of them are equal
            for draw in range(draws):
                self._draw = draw
                loss = self.compute_loss(model, inputs)
                assert isinstance(loss, torch.Tensor)
                losses.append(loss)
        return torch.stack(losses).mean(), None, None

    def evaluation_metrics(self, sums: torch.Tensor) -> dict[str, float]:
        return Sums(*sums).evaluation_metrics(self.args.objective, bounds_nll(noise_kind(self.args, False)))

    def window_metrics(self, sums: torch.Tensor, *_: Any) -> dict[str, float]:
        return Sums(*sums).training_metrics(self.args.objective, bounds_nll(noise_kind(self.args, True)))
