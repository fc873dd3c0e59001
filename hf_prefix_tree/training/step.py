# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`StepMixin`]: one optimizer step, exactly normalised, for any method; [`PreparationMixin`]: its dataset.

The loss of a step is a ratio: terms summed over the micro-batches of all ranks and accumulation steps, over the items
of the same micro-batches. Evaluation is the same ratio over the whole set.

[`CheckpointMixin`] resumes from the last checkpoint that is as it was saved.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler, SequentialSampler
from transformers import Trainer, TrainingArguments
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, has_length, rotate_checkpoints
from trl import SFTTrainer
from trl.trainer.utils import global_then_local_main_first

from hf_prefix_tree.data.supervision import located
from hf_prefix_tree.data.trees import PARTIAL, checksums, write_files
from hf_prefix_tree.modeling.verify import changed
from hf_prefix_tree.training.checks import check_trainer, keep_output_dtype, own_loss
from hf_prefix_tree.training.options import refuse_options
from hf_prefix_tree.training.sampling import fill_uneven_steps, is_stream, length_sampler

logger = logging.getLogger(__name__)


def replaced(owner: Any, **values: Any) -> AbstractContextManager[None]:
    """Inside, some attributes of an object are `values`."""
    vars(owner).update({name: getattr(owner, name) for name in values})  # those that its class has, too
    return changed([(vars(owner), name, value) for name, value in values.items()])


class LossTerms(NamedTuple):
    """A micro-batch's part of the loss."""

    loss: torch.Tensor  # scalar, divided by the items of the step
    sums: torch.Tensor  # float64, detached: added up for the metrics of a window or an evaluation
    outputs: Any
    auxiliary: torch.Tensor | None = None  # the router's loss, of which a step takes the mean over its forwards


CHECKSUMS = "checksums.json"
_SENTINEL = "checkpoint-is-incomplete.txt"  # Transformers removes it after a save on SIGTERM


class CheckpointMixin(Trainer):
    """
    Put it before a Trainer: a checkpoint gets a file of checksums, written last and before older ones are deleted.

    `train(resume_from_checkpoint=True)` passes over checkpoints that have no such file or differ from it, and logs
    their names. A checkpoint that is named must not differ; it may have no such file, as other trainers write none.
    """

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        word = str(resume_from_checkpoint).lower()  # the command line of a script gives a string
        if word == "true":
            resume_from_checkpoint = self._last_checkpoint()
        elif word == "false":
            resume_from_checkpoint = None
        elif resume_from_checkpoint and (problem := self._problem_of(Path(str(resume_from_checkpoint)), named=True)):
            raise ValueError(
                f"`resume_from_checkpoint` is damaged: {problem}; pass an earlier checkpoint, or True, or delete its "
                f"{CHECKSUMS!r} if you changed the files on purpose."
            )
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _last_checkpoint(self) -> str:
        """The last checkpoint in `output_dir` that is as it was saved; raises `ValueError` if there is none."""
        folder = Path(self.args.output_dir)
        names = [path.name for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.name[11:].isdigit()]
        for name in sorted(gather_object([names])[0], key=lambda name: -int(name[11:])):
            if not (problem := self._problem_of(folder / name)):
                return str(folder / name)
            logger.warning("The checkpoint %s is passed over, as it is not whole: %s.", folder / name, problem)
        raise ValueError(
            f"`resume_from_checkpoint` is True, but {str(folder)!r} holds no whole checkpoint with {CHECKSUMS!r}; "
            "leave it out, or pass the path of a checkpoint."
        )

    def _problem_of(self, checkpoint: Path, named: bool = False) -> str:
        """How a checkpoint differs from its checksums, the same on every rank; empty if it does not."""
        problem = ""
        if named and self.args.should_save and not checkpoint.is_dir():
            problem = f"{str(checkpoint)!r} is no folder"
        elif self.args.should_save and not (named and not (checkpoint / CHECKSUMS).exists()):
            try:
                expected = json.loads((checkpoint / CHECKSUMS).read_bytes())
                actual = checksums(checkpoint, map(checkpoint.joinpath, expected))
                differing = [str(checkpoint / name) for name in expected if actual[name] != expected[name]]
                problem = f"{', '.join(differing)} differ from {CHECKSUMS!r}" if differing else ""
            except (OSError, ValueError) as error:
                problem = str(error)
        return next(filter(None, gather_object([problem])), "")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = self._get_output_dir(trial)
        folder = Path(run, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        try:
            with replaced(self.args, save_total_limit=None):  # older ones are deleted below
                super()._save_checkpoint(model, trial)
        except Exception as error:  # on a full disk; those of torch and safetensors name no file
            error.add_note(f"The checkpoint {folder} was not saved whole.")
            raise
        self.accelerator.wait_for_everyone()  # all ranks write
        if self.args.should_save:
            torch.save(self.args, folder / TRAINING_ARGS_NAME)  # with its `save_total_limit`
            files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != PARTIAL]
            values = checksums(folder, (path for path in files if path.name not in (CHECKSUMS, _SENTINEL)))
            write_files({folder / CHECKSUMS: json.dumps(values, indent=1).encode()})
            rotate_checkpoints(run, self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)


class StepMixin(CheckpointMixin, Trainer):  # so that it comes before Trainer whatever else a class derives from
    """
    Put it before a Trainer and implement `count_items` and `loss_terms`; metrics are optional.

    Sums are gathered over all ranks (several ranks may hold copies of one batch), cleared when training starts, and
    batches that evaluation counts stay out of the logging window. Metrics are logged with `loss`, and those of a last
    window that was too short with `train_loss`, so every rank must log these; anything else may be logged by any rank.
    Uneven last steps are filled with empty rows. Batches have `input_ids`.
    """

    data_collator: Any
    served_functions: ClassVar[Sequence[str]] = ()  # of those that `check_arguments` refuses

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self._counted: dict[str, torch.Tensor] = {}  # of the step whose batches were fetched last
        self._is_training = False  # inside `training_step`; a model's `training` flag may say otherwise
        self._step_items: torch.Tensor | None = None
        self._step_passes: torch.Tensor | int = 1  # forwards of the step that have tokens, the mean over ranks
        for value in (*args, *kwargs.values()):
            if isinstance(value, TrainingArguments):
                refuse_options(value)  # before a trainer reads them
        super().__init__(*args, **kwargs)
        check_trainer(self)
        keep_output_dtype(self.accelerator)
        # Says that the loss is normalised by `num_items_in_batch`, so that Trainer does not divide it by the
        # accumulation steps. (Trainer's `loss_is_scaled_for_ga` says the same, but not before transformers 5.19.)
        self.model_accepts_loss_kwargs = True

    # ---- supplied by a method ----

    def count_items(self, batch: dict[str, Any]) -> torch.Tensor:
        """
        The items of a micro-batch, by which its loss is divided: a scalar, or a vector for several ratios.

        Args:
            batch (`dict`): The micro-batch.
        """
        raise NotImplementedError

    def count_details(self, batch: dict[str, Any]) -> torch.Tensor:
        """
        Counts of a micro-batch that only metrics need, a vector.

        Args:
            batch (`dict`): The micro-batch.
        """
        return torch.zeros(0)

    def loss_terms(
        self, model: torch.nn.Module, inputs: dict[str, Any], items: torch.Tensor, return_outputs: bool
    ) -> LossTerms:
        """
        The loss of a micro-batch.

        Args:
            model (`torch.nn.Module`): The wrapped model.
            inputs (`dict`): The micro-batch.
            items (`torch.Tensor`): The float64 items of the whole step; in evaluation those of the micro-batch.
            return_outputs (`bool`): Whether the caller reads `outputs`.
        """
        raise NotImplementedError

    def window_metrics(self, sums: torch.Tensor, counts: torch.Tensor, peaks: torch.Tensor) -> dict[str, float]:
        """
        The metrics of a logging window besides its loss.

        Args:
            sums (`torch.Tensor`): `LossTerms.sums` of all micro-batches of all ranks.
            counts (`torch.Tensor`): Their items and details in one vector.
            peaks (`torch.Tensor`): The same, with the largest count of all ranks instead of their sum.
        """
        return {}

    def evaluation_metrics(self, sums: torch.Tensor) -> dict[str, float]:
        """
        The metrics of an evaluation, `loss` among them.

        Args:
            sums (`torch.Tensor`): `LossTerms.sums` of the whole set.
        """
        raise NotImplementedError

    def step_sampler(self, dataset: Any, batch_size: int) -> Sampler | None:
        """
        The sampler that lays out the steps of a training dataset; `None` leaves that to Trainer.

        Args:
            dataset (`Dataset` or `IterableDataset`): The training dataset.
            batch_size (`int`): Rows of a micro-batch.
        """
        return length_sampler(self, dataset, batch_size, self._reading_ranks())

    def loader_collator(self, is_training: bool) -> Any:
        """
        The collator of a dataloader.

        Args:
            is_training (`bool`): Whether it is the training dataset's.
        """
        return self.data_collator

    # ---- one optimizer step ----

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._sums.clear()  # of an attempt that ran out of memory (`auto_find_batch_size`), or was interrupted
        if not is_stream(self.train_dataset):
            self._check_ranks_agree("rows in `train_dataset`", len(self.train_dataset))
        return super()._inner_training_loop(*args, **kwargs)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor | None:
        if is_stream(self.train_dataset):  # each rank reads its own, and only now knows whether it ends
            self._check_ranks_agree("micro-batches in a step", len(batch_samples))
        if not batch_samples:
            return None
        counts = []
        for batch in batch_samples:
            branches = batch["branch_lengths"].numel() if "branch_lengths" in batch else 1  # of `mode="grouped"`
            passes = branches * ~without_empty_mask(batch)[1]
            details, items = self.count_details(batch), self.count_items(batch)
            counts.append(torch.cat([part.reshape(-1).double().to(device) for part in (items, details, passes)]))
        by_rank = self.accelerator.gather(torch.stack(counts)[None])  # [rank, micro-batch, count]
        # where none has tokens, their router loss is 0
        passes, by_rank = by_rank[..., -1].sum(dim=1).mean().clamp(min=1e-9), by_rank[..., :-1]
        total = by_rank.sum(dim=1).sum(dim=0) / self._copies()
        self._counted = {"counts": total, "peaks": by_rank.amax(dim=0).sum(dim=0), "passes": passes}
        return total[: items.numel()].reshape(items.shape)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        # Added here and not where they are counted, since Trainer's `prediction_step` counts evaluation batches, too.
        self._counted = {}
        result = super().get_batch_samples(*args, **kwargs)
        self._step_passes = self._counted.pop("passes", 1)
        for name, value in self._counted.items():
            self._add(name, value)
        return result

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        self._has_loss = False
        with replaced(self, _is_training=True, _step_items=num_items_in_batch):
            loss = super().training_step(model, inputs, num_items_in_batch)
        if not self._has_loss:
            raise ValueError(own_loss(self))
        return loss

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        is_training = self._is_training
        # Not the argument: an override of `compute_loss` may not hand it on, and evaluation divides by its own items.
        items = self.count_items(inputs) if self._step_items is None else self._step_items
        terms = self.loss_terms(model, inputs, items.double(), return_outputs)
        self._has_loss = True
        self._add("train" if is_training else "eval", terms.sums)
        loss = terms.loss
        if is_training:
            loss = loss * (self.accelerator.num_processes // self.get_tp_size())  # DDP and FSDP average over them
        if terms.auxiliary is not None:
            loss = loss + terms.auxiliary / (self._step_passes if is_training else 1)
        return (loss, terms.outputs) if return_outputs else loss

    def trainer_loss(self, *args: Any, **kwargs: Any) -> Any:
        """`compute_loss` of the Trainer that the mixin is put before."""
        return super().compute_loss(*args, **kwargs)

    # ---- evaluation and reports ----

    def evaluation_loop(
        self, dataloader: Any, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        self._sums.pop("eval", None)
        if has_length(dataloader):
            self._check_ranks_agree("batches to evaluate", len(dataloader))
        output = super().evaluation_loop(dataloader, *args, metric_key_prefix=metric_key_prefix, **kwargs)
        if (sums := self._gathered("eval")) is not None:
            metrics = self.evaluation_metrics(sums)
            output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        # every rank logs these, at the end of a window and of the training; users may log on one rank
        sums = self._gathered("train") if {"loss", "train_loss"} & logs.keys() else None
        if sums is not None:
            logs |= self.window_metrics(sums, self._sums.pop("counts"), self._sums.pop("peaks"))
        super().log(logs, *args, **kwargs)

    def _check_ranks_agree(self, name: str, number: int) -> None:
        """Raises on every rank where ranks differ: their collectives would not match, and end the processes."""
        if self.accelerator.num_processes > 1:
            numbers = self.accelerator.gather(torch.tensor([number], device=self.accelerator.device)).tolist()
            if len(set(numbers)) > 1:
                raise ValueError(
                    f"The ranks have {numbers} {name}: they train together, and need as many; pass the same dataset "
                    "on every rank, which reads its own part of it."
                )

    def _add(self, name: str, value: torch.Tensor) -> None:
        self._sums[name] = self._sums[name] + value if name in self._sums else value

    def _gathered(self, name: str) -> torch.Tensor | None:
        """The sum over all ranks of what was added under `name`, which is cleared; every rank must call it."""
        value = self._sums.pop(name, None)
        return None if value is None else self.accelerator.gather(value[None]).sum(dim=0) / self._copies()

    # ---- the rows of a step ----

    # In order: under "group_by_length" Trainer's sampler would read the length of every row, which trees have not.
    _get_eval_sampler = staticmethod(SequentialSampler)

    def _get_dataloader(self, dataset: Any, description: str, batch_size: int, **kwargs: Any) -> Any:
        """Accelerate fills an uneven last step with repeated rows, which count twice: fill it with empty ones."""
        is_training = kwargs.get("is_training", False)
        sampler = self.step_sampler(dataset, batch_size) if is_training else None
        if sampler is not None:
            kwargs["sampler_fn"] = lambda _: sampler
        rows = self._reading_ranks() * batch_size
        dataset = fill_uneven_steps(self, dataset, rows, is_training, description, sampler)
        with replaced(self, data_collator=self.loader_collator(is_training)):
            return super()._get_dataloader(dataset, description, batch_size, **kwargs)

    def _reading_ranks(self) -> int:
        """Ranks that take `batch_size` rows of every round; with `split_batches` all of them do together."""
        return 1 if self.accelerator.split_batches else self.args.world_size // self._copies()

    def _copies(self) -> int:
        """Ranks that hold the same batch."""
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()


class PreparationMixin(SFTTrainer):
    """Put it before `SFTTrainer` and implement `prepared_rows`: each dataset is prepared once, on one rank first."""

    columns: ClassVar[Sequence[str]]  # of a prepared dataset, kept for the collator
    _signature_columns: list[str] | None

    def prepared_rows(self, dataset: Any, args: Any) -> Any:
        """
        The rows that the collator reads.

        Args:
            dataset (`Dataset` or `IterableDataset`): The user's.
            args (`SFTConfig`): The configuration.
        """
        raise NotImplementedError

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, name: str
    ) -> Any:
        prepared = self.__dict__.setdefault("_prepared", weakref.WeakSet())  # `SFTTrainer` prepares in its `__init__`
        if dataset in prepared:  # `evaluate` calls itself for each dataset of a `dict`
            return dataset
        with nullcontext() if name == "train" else located(f"Dataset {name!r}"), global_then_local_main_first():
            dataset = self.prepared_rows(dataset, args)
        if args.shuffle_dataset:
            dataset = dataset.shuffle(seed=args.seed)
        prepared.add(dataset)
        return dataset

    def _set_signature_columns_if_needed(self) -> None:
        if self._signature_columns is None:
            self._signature_columns = list(self.columns)


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
