"""A drawn set-up, trained and compared with the definition step by step."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from conformance.configs import tiny_config
from conformance.double import keep_double
from hf_prefix_tree import (
    DataCollatorForPrefixTree,
    TreeLossMixin,
    TreeSFTConfig,
    TreeSFTTrainer,
    prepare_model,
    prepare_trees,
)
from tests.support.definition import decoded
from tests.support.models import make_model
from tests.support.setup_checks import LEARNING_RATE, Run, compare
from tests.support.setup_draws import DrawnData, Setup, most_packed_tokens, most_parts
from tests.support.tokenizer import tokenizer

HYBRIDS = ("lfm2", "qwen3_5_text")
SECONDS = 30  # of CPU time: a draw that takes longer has no end


class _Recording(Trainer):
    """Keeps what every micro-batch of a training holds, with the steps done before it."""

    def training_step(self, model, inputs, *args, **kwargs):
        self.__dict__.setdefault("recorded", []).append((self.state.global_step, decoded(inputs)))
        return super().training_step(model, inputs, *args, **kwargs)


class _TreeSFT(_Recording, TreeSFTTrainer):
    pass


class _Mixin(_Recording, TreeLossMixin, Trainer):
    pass


class _MixinSFT(_Recording, TreeLossMixin, SFTTrainer):
    pass


class _Plain(_Recording):
    pass


CLASSES = {
    "sft": (_TreeSFT, TreeSFTConfig),
    "grouped": (_TreeSFT, TreeSFTConfig),
    "mixin": (_Mixin, TrainingArguments),
    "mixin_sft": (_MixinSFT, SFTConfig),
    "plain": (_Plain, TrainingArguments),
}


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


def check_setup(setup: Setup, folder: str) -> None:
    """
    Trains as `setup` says and compares losses, evaluations and weights with the definition. Every rank calls it, and
    the first one compares.
    """
    precision = keep_double() if setup.is_double else nullcontext()
    with _naming(setup), _time_limit(), precision:
        train = DrawnData(setup, 0, setup.num_trees)
        evaluation = [DrawnData(setup, 1 + part, 3) for part in range(setup.eval_sets)]
        max_tokens = most_packed_tokens(setup, [train, *evaluation]) if setup.overflow else None
        for data in (train, *evaluation):
            if setup.overflow == "drop":
                data.keep(lambda tree: tree.num_tokens <= max_tokens)
            if setup.is_prepared:
                data.keep(lambda tree: tree.weight > 0)
        if len(train.given()) < setup.batch_size * setup.ranks:
            setup = replace(setup, drop_last=False)  # nothing would be left
        run = _train(setup, folder, train, evaluation, max_tokens)
        if int(os.environ.get("RANK", "0")) == 0:
            model = _new_model(setup)
            if setup.adapter is not None:
                model = get_peft_model(model, _adapter(setup))
            compare(setup, run, model, train, evaluation)


@cache
def _stock_model(name: str, dtype: torch.dtype) -> torch.nn.Module:
    if name not in HYBRIDS:
        # before transformers 5.23 gemma2 defaults to an sdpa that drops its softcap
        return make_model(name, dtype, attn_implementation="eager" if name == "gemma2" else None)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model.to(dtype)


def _new_model(setup: Setup) -> torch.nn.Module:
    return copy.deepcopy(_stock_model(setup.model, torch.float64 if setup.is_double else torch.float32))


def _adapter(setup: Setup) -> LoraConfig | None:
    if setup.adapter is None:
        return None
    is_tied = _new_model(setup).config.tie_word_embeddings
    saved = ["model.norm" if is_tied else "lm_head"] if setup.adapter == "lora_saved" else None
    return LoraConfig(
        r=2,
        target_modules=["q_proj", "v_proj"],
        init_lora_weights=False,
        modules_to_save=saved,
        use_dora=setup.adapter == "dora",
        task_type="CAUSAL_LM",
    )


def _train(setup: Setup, folder: str, train: DrawnData, evaluation: list[DrawnData], max_tokens: int | None) -> Run:
    trainer = _trainer(setup, folder, train, evaluation, max_tokens)
    start = _weights(trainer)
    if setup.resumed_at is None:
        trainer.train()
        recorded = trainer.recorded
    else:
        trainer.add_callback(_StopAt(setup.resumed_at))
        trainer.train()
        recorded = trainer.recorded
        if trainer.state.global_step < trainer.state.max_steps:
            checkpoint = f"{folder}/checkpoint-{setup.resumed_at}"
            trainer = _trainer(setup, folder, train, evaluation, max_tokens)
            trainer.train(resume_from_checkpoint=checkpoint)
            recorded = recorded + trainer.recorded
    if setup.ranks > 1:
        gathered: list = [None] * setup.ranks
        torch.distributed.all_gather_object(gathered, recorded)
        recorded = [item for own in gathered for item in own]
    return Run(start, _weights(trainer), trainer.state.log_history, recorded)


def _trainer(
    setup: Setup, folder: str, train: DrawnData, evaluation: list[DrawnData], max_tokens: int | None
) -> Trainer:
    torch.manual_seed(setup.seed)  # of the adapter
    model, adapter = _new_model(setup), _adapter(setup)
    if setup.attn_implementation is not None:
        model.set_attn_implementation(setup.attn_implementation)
    is_ours = setup.trainer in ("sft", "grouped")
    preparation = {
        "weighting": setup.weighting,
        "group_by": "group" if setup.rows == "tokens" else None,
        "max_length": setup.max_length,
        "overlong": setup.overlong,
    }
    if max_tokens is not None:
        preparation |= {
            "max_packed_tokens": max_tokens,
            "overflow": setup.overflow,
            "pack_trees": setup.pack_trees,
        }
    datasets = [Dataset.from_list(data.rows) for data in (train, *evaluation)]
    if not is_ours:
        if setup.is_prepared:
            datasets = [prepare_trees(dataset, **preparation) for dataset in datasets]
        if adapter is not None and setup.trainer != "mixin_sft":
            model, adapter = get_peft_model(model, adapter), None
            if setup.checkpointing == "reentrant":
                model.enable_input_require_grads()
    if setup.trainer == "plain":
        prepare_model(model, attn_backend=setup.attn_backend)
    trainer_class, config_class = CLASSES[setup.trainer]
    options = _options(setup, folder)
    if setup.overflow == "split":  # a step holds all parts of a tree
        parts = -(-most_parts(train, max_tokens) // (setup.batch_size * setup.ranks))
        options["gradient_accumulation_steps"] = max(setup.accumulation, parts)
    given = {}
    if is_ours:
        options |= preparation if setup.is_prepared else {"weighting": setup.weighting}
        options |= {"mode": "grouped" if setup.trainer == "grouped" else "tree", "attn_backend": setup.attn_backend}
        options |= {"pad_to_multiple_of": setup.pad_to_multiple_of}
    else:
        options["remove_unused_columns"] = False
        given["data_collator"] = DataCollatorForPrefixTree(0, setup.weighting, setup.pad_to_multiple_of)
    if setup.trainer == "mixin_sft" or (is_ours and not setup.is_prepared):
        options["dataset_kwargs"] = {"skip_prepare_dataset": True}
    if issubclass(config_class, SFTConfig):
        options |= {"bf16": False, "max_length": options.get("max_length"), "router_aux_loss_coef": 0.0}
        given |= {"processing_class": tokenizer(), "peft_config": adapter}
    eval_dataset = None
    if evaluation:
        eval_dataset = datasets[1] if len(evaluation) == 1 else {"a": datasets[1], "b": datasets[2]}
    trainer = trainer_class(
        model=model,
        args=config_class(folder, **options),
        train_dataset=datasets[0],
        eval_dataset=eval_dataset,
        **given,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _options(setup: Setup, folder: str) -> dict:
    options = {
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "num_train_epochs": setup.epochs,
        "per_device_train_batch_size": setup.batch_size,
        "per_device_eval_batch_size": setup.eval_batch_size,
        "gradient_accumulation_steps": setup.accumulation,
        "train_sampling_strategy": setup.sampling,
        "dataloader_drop_last": setup.drop_last,
        "gradient_checkpointing": setup.checkpointing is not None,
        "logging_steps": setup.logging_steps,
        "save_strategy": "no",
        "seed": setup.seed,
    }
    if setup.checkpointing is not None:
        options["gradient_checkpointing_kwargs"] = {"use_reentrant": setup.checkpointing == "reentrant"}
    if setup.eval_sets:
        options |= {"eval_strategy": "steps", "eval_steps": setup.eval_steps, "eval_on_start": setup.eval_on_start}
    if setup.resumed_at is not None:
        options |= {"save_strategy": "steps", "save_steps": setup.resumed_at}
    if setup.engine == "fsdp2":
        layer = {"transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}
        options |= {"fsdp": True, "fsdp_config": {"version": 2, **layer}}
    return options


def _weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every parameter, in full where it is sharded; all ranks call it."""
    found = {}
    for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        value = parameter.detach()
        value = value.full_tensor() if isinstance(value, torch.distributed.tensor.DTensor) else value
        found[name.replace("_checkpoint_wrapped_module.", "")] = value.clone()
    return found


@contextmanager
def _naming(setup: Setup) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"This is draw {setup.seed} of engine {setup.engine!r}: {setup}")
        raise


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_):
        raise TimeoutError(f"not done after {SECONDS} seconds of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
