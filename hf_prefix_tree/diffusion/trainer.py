# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`DiffusionSFTTrainer`]: TRL's `SFTTrainer` for diffusion language models."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from transformers import default_data_collator
from trl import SFTTrainer

from hf_prefix_tree.diffusion.collator import COLUMNS, SAMPLE_INDEX, DataCollatorForDiffusionLM, supervised_tokens
from hf_prefix_tree.diffusion.config import DiffusionSFTConfig
from hf_prefix_tree.diffusion.data import prepare_diffusion_rows
from hf_prefix_tree.diffusion.loss import mdlm_loss, objective_inputs, objective_loss
from hf_prefix_tree.diffusion.model import prepare_diffusion_model
from hf_prefix_tree.diffusion.noise import Corrupted, corrupt, noise_seeds, window_starts
from hf_prefix_tree.modeling.batch import BLOCK_SIZE
from hf_prefix_tree.modeling.loss import safe_divisor
from hf_prefix_tree.training import checks
from hf_prefix_tree.training.sampling import PassCounter
from hf_prefix_tree.training.step import LossTerms, PreparationMixin, StepMixin, without_empty_mask

_EVALUATION = -1  # in the place of the epoch, from which training draws its noise


class Sums(NamedTuple):
    """Scalars of some micro-batches, added up."""

    loss: torch.Tensor
    bound: torch.Tensor
    next_token: torch.Tensor
    correct: torch.Tensor
    predicted: torch.Tensor
    supervised: torch.Tensor


def _ratio(total: torch.Tensor, count: torch.Tensor) -> float:
    return (total / safe_divisor(count, total)).item()


class DiffusionSFTTrainer(StepMixin, PreparationMixin, SFTTrainer):
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

    columns = COLUMNS
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
        args = checks.check_arguments(args, DiffusionSFTConfig, model, "DiffusionSFT", kwargs)
        self._cap = "max_length", args.max_length  # where `prepared_rows` cuts samples
        if data_collator is not None:
            checks.check_collator(data_collator, DataCollatorForDiffusionLM, args, ("block_size", "response_window"))
            self._cap = "max_seq_len", data_collator.max_seq_len
        self._draw = 0
        collator = data_collator or default_data_collator  # until the tokenizer is there
        super().__init__(model, args, collator, train_dataset, eval_dataset, processing_class, **kwargs)
        checks.check_texts(self)
        checks.refuse_tensor_parallelism(self)
        if args.group_by is not None and self.aux_loss_enabled:
            raise ValueError(
                f"`group_by` is {args.group_by!r}: a router counts shared tokens once; set `router_aux_loss_coef=0.0`."
            )
        if data_collator is None:
            on_gpu = args.device.type == "cuda" and args.attn_backend != "sdpa"
            self.data_collator = DataCollatorForDiffusionLM(
                pad_token_id=checks.padding_token_of(self._tokenizer),
                block_size=args.block_size,
                # whole blocks of FlexAttention
                pad_seq_len_divisible=args.pad_to_multiple_of or (BLOCK_SIZE if on_gpu else None),
                max_seq_len=args.max_length,
                supervise_padding=args.supervise_padding,
                response_window=args.response_window,
                processing_class=self._tokenizer,
            )
        num_embeddings = self.model.get_input_embeddings().num_embeddings
        self.mask_token_id: int | None = None
        if args.corruption != "random":  # which replaces tokens instead of masking them
            named = getattr(self._tokenizer, "mask_token_id", None)
            mask_token_id = named if args.mask_token_id is None else args.mask_token_id
            self.mask_token_id = checks.check_mask_token(mask_token_id, num_embeddings)
            checks.check_mask_meaning(self.mask_token_id, self.data_collator)
        self._vocab_size = min(len(self._tokenizer), num_embeddings)
        self._passes = PassCounter()
        self.add_callback(self._passes)
        prepare_diffusion_model(self.model, attn_backend=args.attn_backend)

    # ---- data ----

    def prepared_rows(self, dataset: Any, args: DiffusionSFTConfig) -> Any:
        assert not isinstance(args.chat_template_kwargs, str)  # parsed by `DiffusionSFTConfig`
        return prepare_diffusion_rows(
            dataset,
            self._tokenizer,
            chat_template_kwargs=args.chat_template_kwargs,
            on_error=args.on_error,
            num_proc=args.dataset_num_proc,
            group_by=args.group_by,
            cap=self._cap,
        )

    # ---- the loss and its metrics ----

    def count_items(self, batch: dict[str, Any]) -> torch.Tensor:
        return supervised_tokens(batch).sum()

    def loss_terms(
        self, model: torch.nn.Module, inputs: dict[str, Any], items: torch.Tensor, return_outputs: bool
    ) -> LossTerms:
        noise = self._noise(inputs)
        model_inputs, targets, is_predicted, places = objective_inputs(inputs, noise, self.args)
        model_inputs, is_empty = without_empty_mask(model_inputs)
        if self.aux_loss_enabled:
            model_inputs["output_router_logits"] = True
        where = is_predicted.flatten().nonzero().squeeze(1)
        labels, packed = targets.flatten()[where][None], where if places is None else places[where]
        # TRL's fused head scores the M predictions: log-probs of shape `(1, M)`
        outputs = model(
            **model_inputs, predict_positions=packed, labels=labels, shift_labels=labels, fused_lm_head=True
        )
        log_probs = torch.zeros(targets.numel(), dtype=torch.float64, device=where.device)
        log_probs = log_probs.index_copy(0, where, outputs.log_probs[0].double()).view_as(targets)
        loss = objective_loss(log_probs, inputs, noise, self.args, items)
        noisy, clean = log_probs.detach().tensor_split([noise.p.shape[1]], dim=1)
        supervised = supervised_tokens(inputs)
        sums = Sums(
            loss=loss.detach() * items,
            bound=mdlm_loss(noisy, inputs["input_ids"], noise.is_masked, noise.p, supervised, 1),
            next_token=-clean.sum(),
            correct=outputs.is_top1[0].sum(),
            predicted=is_predicted.sum(),
            supervised=supervised.sum(),
        )
        auxiliary = self.router_aux_loss_coef * outputs.aux_loss * ~is_empty if self.aux_loss_enabled else None
        return LossTerms(loss, torch.stack([value.double() for value in sums]), outputs, auxiliary)

    def _noise(self, batch: dict[str, Any]) -> Corrupted:
        """That of a micro-batch: it depends on its samples, `seed`, and the epoch or the draw of an evaluation."""
        args, supervised = self.args, supervised_tokens(batch)
        checks.check_batch(
            batch, [SAMPLE_INDEX], "add a column of that name, counting from 0, or prepare the dataset here"
        )
        salts = (self._passes.epoch,) if self._is_training else (_EVALUATION, self._draw)
        has_blocks = args.objective != "mdlm"
        return corrupt(
            "uniform" if args.corruption == "blockwise" and not self._is_training else args.corruption,
            batch["input_ids"],
            supervised,
            seeds=noise_seeds(batch[SAMPLE_INDEX], args.seed, *salts),
            mask_token_id=self.mask_token_id,
            vocab_size=self._vocab_size,
            eps=args.noise_eps,
            half_life=args.half_life,
            block_size=args.block_size if has_blocks else None,
            block_start=window_starts(supervised) if has_blocks and args.response_window else None,
        )

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor, None, None]:
        inputs = self._prepare_inputs(inputs)
        losses: list[Any] = []
        with torch.no_grad(), self.compute_loss_context_manager():
            draws = 1 if self.args.corruption == "all_masked" else self.args.eval_noise_draws  # all of them are equal
            for draw in range(draws):
                self._draw = draw
                losses.append(self.compute_loss(model, inputs))
        return torch.stack(losses).mean(), None, None

    def evaluation_metrics(self, sums: torch.Tensor) -> dict[str, float]:
        totals = Sums(*sums)
        metrics = {"loss": _ratio(totals.loss, totals.supervised), **self._metrics_of(totals, "random")}
        if "nll_bound" in metrics:
            metrics["perplexity"] = math.exp(min(metrics["nll_bound"], 700.0))  # 700: the largest that has one
        # a mean of nothing: 0 would be the best there is, and an error would end the training that evaluates
        return metrics if totals.supervised else dict.fromkeys(metrics, math.nan)

    def window_metrics(self, sums: torch.Tensor, *_: Any) -> dict[str, float]:
        return self._metrics_of(Sums(*sums), "random", "blockwise")

    def _metrics_of(self, totals: Sums, *unbounded: str) -> dict[str, float]:
        """
        Under `unbounded` noise the masked tokens' `nll / p`, in expectation over the noise, is no bound of the
        negative log-likelihood: `"random"` has no p, and that of `"blockwise"`, which evaluation replaces by
        `"uniform"`, is not the probability of the single token.
        """
        metrics = {"mean_token_accuracy": _ratio(totals.correct, totals.predicted)}
        if self.args.corruption not in unbounded:
            metrics["nll_bound"] = _ratio(totals.bound, totals.supervised)
        if self.args.objective == "hybrid":
            metrics["next_token_loss"] = _ratio(totals.next_token, totals.supervised)
        return metrics
