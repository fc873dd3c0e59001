"""Short GRPO and RLOO runs on a tiny model, stock or on trees, and what the tests compare of them."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import count
from typing import Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout functions are experimental

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers.pre_tokenizers import WhitespaceSplit
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from conformance.double import keep_double
from hf_prefix_tree import TreeGRPOTrainer, TreeRLOOTrainer
from tests.support.models import VOCAB
from tests.support.trainer_runs import distance, make_model, tokenizer, weights

CLASSES = {
    ("grpo", "stock"): GRPOTrainer,
    ("grpo", "tree"): TreeGRPOTrainer,
    ("rloo", "stock"): RLOOTrainer,
    ("rloo", "tree"): TreeRLOOTrainer,
}


class CountedTokens:
    """The positions that each call of a backbone computes: of the policy with gradient, and of all other scoring."""

    def __init__(self, *models: torch.nn.Module) -> None:
        self.forward: list[int] = []
        self.trained: list[int] = []
        for model in models:
            base = model.get_base_model() if hasattr(model, "peft_config") else model
            base.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if kwargs.get("past_key_values") is None and not kwargs.get("use_cache"):
            (self.trained if torch.is_grad_enabled() else self.forward).append(kwargs["input_ids"].numel())


@dataclass
class Run:
    logs: list[dict[str, float]]
    start: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    tokens: CountedTokens
    trainer: Any = field(repr=False)


def assert_same_training(got: Run, expected: Run, steps: int = 5, moved: float = 5e-3) -> None:
    """Every logged number of every step (loss, gradient norm, KL, entropy, clip ratios, rewards), and the weights."""
    assert len(expected.logs) == steps
    for step, (entry, other) in enumerate(zip(got.logs, expected.logs, strict=True)):
        assert {name for name in entry.keys() ^ other.keys() if not name.startswith("tree/")} == set()
        for name, value in other.items():
            if name != "step_time":
                near = 1e-5 if name == "grad_norm" else 1e-6
                assert entry[name] == pytest.approx(value, rel=near, abs=1e-6), (step, name)
    assert distance(expected.weights, expected.start) > moved
    assert distance(got.weights, expected.weights) < 1e-5


def prompts(number: int, lengths: tuple[int, int], seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    return Dataset.from_list(
        [
            {
                "prompt": " ".join(
                    f"t{i}" for i in rng.integers(3, VOCAB, size=rng.integers(lengths[0], lengths[1] + 1))
                )
            }
            for _ in range(number)
        ]
    )


def rollouts(
    deep: bool = False, environment: bool = False, length: int | None = None, longest: int = 8, eos: bool = False
) -> Any:
    """
    A rollout function with other completions at every call, all of them reproducible.

    Args:
        deep: Every second completion of a prompt starts with the same 4 tokens, and some are equal.
        environment: Some tokens are not the model's own (`env_mask` 0).
        length: All completions have as many tokens.
        eos: Every third completion ends with the end token.
    """
    calls = count()

    def generate(texts: list[str], trainer: Any) -> dict[str, Any]:
        rng = np.random.default_rng([next(calls), trainer.accelerator.process_index])
        prompt_ids = [trainer.processing_class(text)["input_ids"] for text in texts]
        stems = {text: rng.integers(3, VOCAB, size=4).tolist() for text in dict.fromkeys(texts)}
        completion_ids = []
        for index, text in enumerate(texts):
            own = rng.integers(3, VOCAB, size=length or rng.integers(1, longest + 1)).tolist()
            if deep and index % 2:
                own = stems[text] + own[: rng.integers(0, 3)]
            if eos and index % 3 == 0:
                own = [*own, trainer.processing_class.eos_token_id]
            completion_ids.append(own)
        output = {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "logprobs": [[0.0] * len(own) for own in completion_ids],
        }
        if environment:
            output["env_mask"] = [[int(i == 0 or i % 3 > 0) for i in range(len(own))] for own in completion_ids]
        return output

    return generate


def splitting_tokenizer() -> Any:
    """One token per word; without a pre-tokenizer a prompt would be one unknown token."""
    found = tokenizer()
    found.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    found.padding_side = "left"
    return found


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [sum(own) % 11 / 10 for own in completion_ids]


def build(
    folder: Any,
    algorithm: str,
    kind: str,
    *,
    model: Any = None,
    model_name: str = "qwen3",
    rollout_func: Any = None,
    peft_config: Any = None,
    num_prompts: int = 16,
    prompt_lengths: tuple[int, int] = (10, 20),
    eval_rows: int = 0,
    trainer_class: Any = None,
    reward_funcs: Any = reward,
    train_dataset: Any = None,
    processing_class: Any = None,
    config_class: Any = None,
    **options: Any,
) -> Any:
    """A trainer of a tiny model, which is saved as well, because TRL loads the reference model from a folder."""
    if model is None:
        model = make_model(model_name)
    if not (folder / "model").exists():
        model.save_pretrained(folder / "model")
    model.config._name_or_path = str(folder / "model")
    defaults: dict[str, Any] = {
        "max_steps": 5,
        "num_generations": 8,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 8,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
    }
    config_class = config_class or {"grpo": GRPOConfig, "rloo": RLOOConfig}[algorithm]
    trainer_class = trainer_class or CLASSES[algorithm, kind]
    extra = {} if rollout_func is None else {"rollout_func": rollout_func}
    return trainer_class(
        model=model,
        reward_funcs=reward_funcs,
        args=config_class(str(folder / kind), **{**defaults, **options}),
        train_dataset=train_dataset or prompts(num_prompts, prompt_lengths),
        eval_dataset=prompts(eval_rows, prompt_lengths, seed=1) if eval_rows else None,
        processing_class=processing_class or splitting_tokenizer(),
        peft_config=peft_config,
        **extra,
    )


def run(*args: Any, **kwargs: Any) -> Run:
    """
    Trains what `build` builds: the log of every step, the weights before and after, and the tokens computed. On CPU in
    float64 but for what TRL rounds: in float32 its ratios, powers of e, are as far from those in float64 as ours.
    """
    if kwargs.get("use_cpu", True):
        kwargs.setdefault("model", make_model(kwargs.get("model_name", "qwen3"), torch.float64))
    trainer = build(*args, **kwargs)
    tokens = CountedTokens(*filter(None, (trainer.model, trainer.ref_model)))
    start = weights(trainer.model)
    gc.freeze()  # or the collection before each training looks through all that is imported, which takes longer
    try:
        # casts of recomputed layers are not seen by it
        with nullcontext() if trainer.args.gradient_checkpointing else keep_double():
            trainer.train()
    finally:
        gc.unfreeze()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(logs, start, weights(trainer.model), tokens, trainer)
