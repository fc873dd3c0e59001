# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeLossMixin`]: the exact normaliser, for any Trainer.

`loss = sum_t w_t * nll_t / sum_t w_t`, both sums over the whole optimizer step: all ranks, all accumulation steps. The
divisor is gathered once per step, in float64. Evaluation is the same ratio over the whole set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.trainer_utils import EvalLoopOutput

from hf_prefix_tree.batch import STATS, summed_weights
from hf_prefix_tree.collators.prefix_tree import PADDING_FEATURE
from hf_prefix_tree.loss import safe_divisor
from hf_prefix_tree.model import ensure_verified, prepare_model

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # what the mixin is put before
else:
    _Trainer = object


class TreeLossMixin(_Trainer):
    """
    Put it before a Trainer: `class MyTrainer(TreeLossMixin, Trainer)`.

    Prepares the model, normalises the loss over the whole optimizer step, evaluates exactly, and logs `loss/sum`,
    `loss/token_count` (the summed weights, so that their ratio is the loss), `tree/branches`, `tree/tokens`,
    `tree/token_ratio`, `tree/pair_ratio` and `tree/padding` (share of padding tokens), all of them over the logging
    window, every rank and accumulation step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._tree_sums: dict[str, torch.Tensor] = {}
        super().__init__(*args, **kwargs)
        parallelism = getattr(self.accelerator, "parallelism_config", None)
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "`parallelism_config` splits the sequence over devices (context or sequence parallelism), which "
                "drops the "
                "tree mask. Set `cp_size=1` and `sp_size=1`."
            )
        if self.args.n_gpu > 1:
            raise ValueError("`nn.DataParallel` is not supported: start one process per GPU with `accelerate launch`.")
        if not self.args.average_tokens_across_devices:
            raise ValueError("`average_tokens_across_devices=False` would weigh ranks, not tokens: set it to `True`.")
        prepare_model(self.model, attn_backend=getattr(self.args, "attn_backend", "auto"))
        # Says that the loss is normalised by `num_items_in_batch`, so that Trainer does not divide it by the
        # accumulation steps. (Trainer's `loss_is_scaled_for_ga` says the same, but not before transformers 5.19.)
        self.model_accepts_loss_kwargs = True

    # ---- one optimizer step ----

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        if not batch_samples:
            return None
        weights = torch.stack([summed_weights(batch) for batch in batch_samples]).sum().to(device)
        stats = torch.cat([batch["tree_stats"] for batch in batch_samples]).sum(dim=0).to(device)
        positions = sum(batch["input_ids"].numel() for batch in batch_samples)
        local = torch.cat([weights[None], stats.double(), stats.new_tensor([positions]).double()])
        copies = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()  # ranks that hold the same batch
        total = self.accelerator.gather(local[None]).sum(dim=0) / copies
        self._add("counts", total)
        return total[0]

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        ensure_verified(self.model, model)
        return super().training_step(model, *args, **kwargs)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        # A divisor of 1 travels as a Python number: mixed precision casts float tensors that go through the model.
        _, outputs = super().compute_loss(model, {**inputs, "num_items_in_batch": 1.0}, return_outputs=True)
        auxiliary = getattr(outputs, "aux_loss", None)
        if auxiliary is not None:
            auxiliary = self.accelerator.unwrap_model(model).router_aux_loss_coef * auxiliary.to(outputs.loss.device)
        loss_sum = outputs.loss if auxiliary is None else outputs.loss - auxiliary
        self.record(loss_sum, inputs)
        loss = loss_sum / self.divisor(inputs, num_items_in_batch)
        if self.model.training:
            loss = loss * self._averaging_ranks()
        if auxiliary is not None:
            loss = loss + auxiliary / (self.current_gradient_accumulation_steps if self.model.training else 1)
        return (loss, outputs) if return_outputs else loss

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
        counts, loss_sum = self._tree_sums.pop("counts", None), self._gathered("loss_sum")
        if counts is not None and loss_sum is not None and self.model.training:
            weights, *stats, positions = counts.tolist()
            stat = dict(zip(STATS, stats, strict=True))
            logs["loss/sum"] = loss_sum.item() / self.get_tp_size()
            logs["loss/token_count"] = weights
            logs["tree/branches"] = stat["branches"]
            logs["tree/tokens"] = stat["tree_tokens"]
            logs["tree/token_ratio"] = stat["branch_tokens"] / max(stat["tree_tokens"], 1)
            logs["tree/pair_ratio"] = stat["branch_pairs"] / max(stat["tree_pairs"], 1)
            logs["tree/padding"] = 1 - stat["tree_tokens"] / positions
        super().log(logs, *args, **kwargs)

    def _add(self, name: str, value: torch.Tensor) -> None:
        self._tree_sums[name] = self._tree_sums[name] + value if name in self._tree_sums else value

    def _gathered(self, name: str) -> torch.Tensor | None:
        """The sum over all ranks of what was added under `name`, which is forgotten; every rank must call it."""
        value = self._tree_sums.pop(name, None)
        return None if value is None else self.accelerator.gather(value[None]).sum(dim=0)

    # ---- uneven last steps ----

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, **kwargs: Any) -> Any:
        """Accelerate fills an uneven last step with repeated rows, which would count twice: fill it with empty "
        "ones."""
        processes = self.accelerator.num_processes
        drops = kwargs.get("is_training", False) and self.args.dataloader_drop_last
        if processes > 1 and not drops and hasattr(dataset, "__len__") and len(dataset) % (batch_size * processes):
            dataset = _PaddedDataset(
                self._remove_unused_columns(dataset, description=description), batch_size * processes
            )
        return super()._get_dataloader(dataset, description, batch_size, **kwargs)


class _PaddedDataset(torch.utils.data.Dataset):
    """`dataset` followed by empty rows up to a multiple of `multiple`."""

    def __init__(self, dataset: Any, multiple: int) -> None:
        self.dataset = dataset
        self.length = -(-len(dataset) // multiple) * multiple

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index] if index < len(self.dataset) else PADDING_FEATURE
