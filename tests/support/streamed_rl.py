# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Runs of the RL trainers in float64: TRL's, ours, and ours with `overflow="stream"`; what each step computed."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig
from transformers import TrainerCallback
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOConfig, KTOTrainer, RLOOConfig, RLOOTrainer

from conformance.double import keep_double
from hf_prefix_tree import (
    TreeDPOConfig,
    TreeDPOTrainer,
    TreeGRPOConfig,
    TreeGRPOTrainer,
    TreeKTOConfig,
    TreeKTOTrainer,
    TreeRLOOConfig,
    TreeRLOOTrainer,
)
from hf_prefix_tree.rl import folded_forward
from tests.support import policy_runs, preference_runs
from tests.support.rollout_loss import DoubleHead
from tests.support.trainer_runs import config, make_model

CLASSES: dict[str, Any] = {
    "grpo": ((GRPOTrainer, GRPOConfig), (TreeGRPOTrainer, TreeGRPOConfig)),
    "rloo": ((RLOOTrainer, RLOOConfig), (TreeRLOOTrainer, TreeRLOOConfig)),
    "dpo": ((DPOTrainer, DPOConfig), (TreeDPOTrainer, TreeDPOConfig)),
    "kto": ((KTOTrainer, KTOConfig), (TreeKTOTrainer, TreeKTOConfig)),
}
STREAM = {"overflow": "stream", "max_row_tokens": 12}
SGD = {"optim": "sgd", "learning_rate": 0.01, "max_grad_norm": 0.0, "max_steps": 2, "gradient_accumulation_steps": 2}


class Record(TrainerCallback):
    """
    Of each optimizer step: loss and gradients; and the tokens of each call of the policy, without and with gradient.
    """

    def __init__(self, trainer: Any) -> None:
        self.losses: list[float] = [0.0]
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.tokens: dict[bool, list[int]] = {False: [], True: []}
        self.trainer, self._compute_loss = trainer, trainer.compute_loss
        trainer.compute_loss = self.compute_loss
        base = trainer.model.get_base_model() if hasattr(trainer.model, "peft_config") else trainer.model
        base.register_forward_pre_hook(self._count, with_kwargs=True)
        trainer.add_callback(self)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = self._compute_loss(*args, **kwargs)
        self.losses[-1] += loss.item()
        return loss

    def _count(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        state = getattr(module, "_hf_prefix_tree_state", None)
        if kwargs.get("fused_lm_head") and not (state is not None and state.verifying):
            self.tokens[torch.is_grad_enabled()].append(int(kwargs["attention_mask"].sum()))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        named = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self.gradients.append({name: p.grad.clone() for name, p in named})
        self.losses.append(0.0)


def in_double(function: Any) -> Any:
    """Autograd calls backwards, and what checkpointing recomputes in them, outside of modes."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with keep_double():
            return function(*args, **kwargs)

    return wrapped


@contextmanager
def all_in_double() -> Iterator[None]:
    with (
        mock.patch("trl.trainer.utils._ChunkedLogProbFunction", DoubleHead),
        mock.patch.object(folded_forward, "stream", in_double(folded_forward.stream)),
        mock.patch.object(Qwen3DecoderLayer, "forward", in_double(Qwen3DecoderLayer.forward)),
        keep_double(),
    ):
        yield


def run(folder: Any, method: str, kind: str, **options: Any) -> Record:
    """Trains `SGD["max_steps"]` steps; `kind` is "stock", "tree" or "stream"."""
    trainer_class, config_class = CLASSES[method][kind != "stock"]
    options = {**SGD, **(STREAM if kind == "stream" else {}), **options}
    lora, dtype = options.pop("lora", None), options.pop("dtype", torch.float64)
    with all_in_double() if dtype == torch.float64 else nullcontext():
        model = make_model(dtype=dtype).to(dtype)
        adapter = None
        if lora is not None:
            adapter = LoraConfig(
                r=4, lora_dropout=lora, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False
            )
        if method in ("grpo", "rloo"):
            rollout = {"rollout_func": policy_runs.rollouts(deep=True)} if method == "grpo" else {}
            trainer = policy_runs.build(
                Path(folder),
                method,
                kind,
                model=model,
                trainer_class=trainer_class,
                config_class=config_class,
                peft_config=adapter,
                **{**rollout, "num_generations": 4, "per_device_train_batch_size": 4, **options},
            )
        else:
            rows = preference_runs.pairs(16) if method == "dpo" else preference_runs.unpaired(16)
            reference = None if adapter is not None else copy.deepcopy(model)
            with torch.no_grad():  # a policy that has left its reference
                for parameter in model.parameters():
                    parameter.add_(0.02 * torch.randn(parameter.shape, generator=torch.manual_seed(parameter.numel())))
            trainer = trainer_class(
                model=model,
                ref_model=reference,
                args=config(Path(folder, kind), config_class, **{"per_device_train_batch_size": 4, **options}),
                train_dataset=rows,
                processing_class=preference_runs.tokenizer(),
                peft_config=adapter,
            )
        if getattr(trainer, "ref_model", None) is not None:
            trainer.ref_model.to(dtype)
            if method in ("grpo", "rloo"):
                trainer.ref_model.load_state_dict(trainer.model.state_dict())  # TRL loads it in float32
        if adapter is not None:
            trainer.model.to(dtype)
            generator = torch.manual_seed(0)
            with torch.no_grad():
                for name, parameter in trainer.model.named_parameters():
                    if "lora_" in name:
                        parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        record = Record(trainer)
        trainer.train()
    record.losses.pop()
    return record


def error(got: Record, expected: Record) -> float:
    """The largest difference of a step's loss, and of its gradients, relative to the largest gradient of a tensor."""
    assert len(got.losses) == len(expected.losses) == len(got.gradients) == len(expected.gradients) > 0
    errors = [abs(one - other) for one, other in zip(got.losses, expected.losses, strict=True)]
    for one, other in zip(got.gradients, expected.gradients, strict=True):
        assert one.keys() == other.keys() and max(gradient.abs().max() for gradient in other.values()) > 1e-3
        errors += [((one[n] - other[n]).abs().max() / other[n].abs().max().clamp(min=1e-5)).item() for n in other]
    return max(errors)


def logs(record: Record) -> list[dict[str, float]]:
    """What was logged, without times."""
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in ("time", "second", "tree/"))}
        for entry in record.trainer.state.log_history
        if "loss" in entry
    ]


def compare_ranks(folder: str, jobs: dict[str, dict[str, Any]]) -> None:
    """What each rank does: TRL's runs, and streamed ones, on rows of its own."""
    rank = os.environ["RANK"]
    for method, options in jobs.items():
        stock, streamed = (run(Path(folder, rank), method, kind, **options) for kind in ("stock", "stream"))
        assert max(streamed.tokens[True]) <= STREAM["max_row_tokens"] and len(streamed.tokens[True]) > 8, method
        torch.save([error(streamed, stock), streamed.losses, streamed.gradients], Path(folder, f"{method}-{rank}.pt"))
