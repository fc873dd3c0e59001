# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What a rank does in the tests of engines: trains and evaluates on uneven rows, and leaves weights and logs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import hf_prefix_tree.modeling.prepare
from hf_prefix_tree import DataCollatorForPrefixTree, TreeLossMixin, TreeSFTTrainer
from hf_prefix_tree.modeling import compilation
from hf_prefix_tree.modeling.batch import gather_supervised
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.trainer_runs import config, distance, make_model, make_trees, tokenizer, tree_dataset, weights

SAME = ("loss", "loss/sum", "loss/token_count", "grad_norm", "tree/branches", "tree/tokens", "tree/pair_ratio")
METRICS = ("num_tokens", "entropy", "mean_token_accuracy")
FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or os.environ.get("DS_ACCELERATOR") != "cpu",
    reason="needs deepspeed, and DS_ACCELERATOR=cpu in the environment",
)


def needs_transformers(version, reason):
    """Skips a test on older ones, where what it uses of Transformers itself does not work."""
    is_older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(is_older, reason=f"needs Transformers {version}: {reason}")


def zero(stage):
    optimization = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3}
    deepspeed = {
        "zero_optimization": optimization,
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # Accelerate would clip at 1
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    return {"deepspeed": deepspeed}


def uneven_rows(number, seed=0, silent=(2, 6)):
    """Rows of one to three trees of very different sizes; those in `silent` supervise nothing."""
    trees = iter(make_trees(3 * number, seed=seed, num_branches=4))
    rows = []
    for index in range(number):
        own = [next(trees) for _ in range(1 + index % 3)]
        if index in silent:
            own = [fold([Branch(b.input_ids, np.zeros(len(b))) for b in tree.branches()]) for tree in own]
        rows.append({"trees": [tree.to_dict() for tree in own], "tree_ids": [index]})
    return rows


def allow_engines_on_cpu(options):
    """Accelerate runs DDP where FSDP is asked for on CPUs, and refuses meshes; nothing of what they do needs a GPU."""
    ParallelismConfig._validate_accelerator = lambda self, accelerator: None
    original = AcceleratorState.__init__

    def init(self, *args, **kwargs):
        original(self, *args, **kwargs)
        plugin = kwargs.get("fsdp_plugin") or self.__dict__.get("fsdp_plugin")
        if plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, plugin
            if self._mixed_precision != "no":
                plugin.set_mixed_precision(self._mixed_precision)

    AcceleratorState.__init__ = init
    if "deepspeed" in options:
        import deepspeed

        deepspeed.ops.__compatible_ops__.clear()  # or each run would compile collectives in shared memory


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def make_trainer(folder, options, ranks=1):
    options = {"max_steps": 10, "learning_rate": 0.3, **options}
    model = make_model()
    if options.get("tp"):
        model = AutoModelForCausalLM.from_pretrained(options.pop("tp"), tp_plan="auto")
        ranks = 1
    peft_config = lora() if options.pop("lora", False) else None
    # Where there is a GPU, a model is checked at the first step, when ZeRO-3 has taken its weights apart.
    is_later = mock.patch.object(hf_prefix_tree.modeling.prepare, "is_materialized", return_value=False)
    with is_later if "deepspeed" in options else nullcontext():
        return TreeSFTTrainer(
            model=model,
            args=config(
                folder,
                dataset_kwargs={"skip_prepare_dataset": True},
                gradient_accumulation_steps=options.pop("step_rows", 4) // ranks,
                eval_strategy="steps",
                eval_steps=5,
                **options,
            ),
            train_dataset=Dataset.from_list(uneven_rows(11)),
            eval_dataset=Dataset.from_list(uneven_rows(5, seed=1)),
            processing_class=tokenizer(),
            peft_config=peft_config,
        )


def whole_weights(trainer):
    """Every parameter in full, by its plain name; all ranks must call it."""
    found = {}
    for name, parameter in trainer.accelerator.unwrap_model(trainer.model).named_parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters(parameter):
                value = parameter.detach().clone()
        elif isinstance(parameter.data, torch.distributed.tensor.DTensor):
            value = parameter.detach().full_tensor().clone()
        else:
            value = parameter.detach().clone()
        found[name.replace("_checkpoint_wrapped_module.", "")] = value
    return found


def train_engine(folder, options, ranks=1):
    """One training; leaves `weights.pt`, `log.json`, the engine's name and what `save_model` saves."""
    if ranks > 1:
        allow_engines_on_cpu(options)
    trainer = make_trainer(folder, options, ranks)
    trainer.train()
    found = whole_weights(trainer)
    trainer.save_model(f"{folder}/saved")
    if trainer.accelerator.is_main_process:
        torch.save(found, f"{folder}/weights.pt")
        Path(folder, "engine.txt").write_text(trainer.accelerator.distributed_type.value)
        Path(folder, "log.json").write_text(json.dumps(trainer.state.log_history))


def train_compiled(folder, options, ranks):
    """[`train_engine`] with traced layers, code generation left out; `graphs.txt` has how many graphs there are."""
    cut = mock.patch.object(DDPOptimizer, "compile_fn", side_effect=AssertionError("DDP cut the graph of a layer"))
    with mock.patch.object(compilation, "BACKEND", "eager"), cut:
        train_engine(folder, {**options, "compile_layers": True}, ranks)
    Path(folder, "graphs.txt").write_text(str(counters["stats"]["unique_graphs"]))


def train_watched(folder, options, ranks):
    """[`train_engine`]; `log_probs.json` has the dtype of every micro-batch's log-probs and its gradients' error."""
    seen = []

    loss_terms = TreeLossMixin.loss_terms

    def watched(trainer, model, inputs, items, return_outputs):
        def watch(**inputs):
            outputs = model(**inputs)
            weights = gather_supervised(inputs["prefix_tree"], inputs["labels"], inputs["loss_weights"]).weights
            if outputs.log_probs.requires_grad and weights.any():
                expected = -weights * ranks / items
                own = {"dtype": str(outputs.log_probs.dtype)}
                seen.append(own)
                outputs.log_probs.register_hook(
                    lambda gradient: own.update(error=((gradient - expected).norm() / expected.norm()).item())
                )
            return outputs

        return loss_terms(trainer, watch, inputs, items, return_outputs)

    with mock.patch.object(TreeLossMixin, "loss_terms", watched):
        train_engine(folder, options, ranks)
    Path(folder, f"log_probs{os.environ['RANK']}.json").write_text(json.dumps(seen))


class _PlainTrainer(TreeLossMixin, Trainer):
    """Keeps the dtype of every loss that the model returned."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dtypes = []

    def trainer_loss(self, *args, **kwargs):
        result = super().trainer_loss(*args, **kwargs)
        self.dtypes.append(str(result[0].dtype))
        return result


def plain_trainer(folder, trainer_class=_PlainTrainer, **options):
    """A `Trainer` with the step-wide normaliser; `train_dataset` and `eval_dataset` are among the options."""
    train_dataset = options.pop("train_dataset", None) or tree_dataset(make_trees(7))
    eval_dataset = options.pop("eval_dataset", None)
    options = {"optim": "sgd", "max_grad_norm": 0.0, "report_to": "none", "save_strategy": "no", **options}
    options = {"use_cpu": True, "max_steps": 2, "logging_steps": 1, "disable_tqdm": True, **options}
    options = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 2, **options}
    options = {"remove_unused_columns": False, **options}
    return trainer_class(
        model=make_model(),
        args=TrainingArguments(str(folder), lr_scheduler_type="constant", learning_rate=0.3, **options),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        data_collator=DataCollatorForPrefixTree(pad_token_id=0),
    )


def train_plain(folder, options):
    """Rank 0 leaves the dtypes of the losses in `dtypes.json`."""
    allow_engines_on_cpu(options)
    trainer = plain_trainer(folder, **options)
    trainer.train()
    if trainer.accelerator.is_main_process:
        Path(folder, "dtypes.json").write_text(json.dumps(trainer.dtypes))


def train_grouped(folder, options, ranks):
    """[`train_engine`]; `sharded.json` has the parameters that had a gradient after each micro-batch."""
    seen = []
    original = TreeSFTTrainer.training_step

    def training_step(trainer, model, inputs, *args, **kwargs):
        loss = original(trainer, model, inputs, *args, **kwargs)
        if "branch_lengths" in inputs:  # the branches of a micro-batch pass through here as well
            gradients = sum(parameter.grad is not None for parameter in model.parameters())
            seen.append([trainer.accelerator.sync_gradients, gradients])
        return loss

    with mock.patch.object(TreeSFTTrainer, "training_step", training_step):
        train_engine(folder, {**options, "mode": "grouped"}, ranks)
    Path(folder, f"sharded{os.environ['RANK']}.json").write_text(json.dumps(seen))


def try_refused(folder, cases):
    """Makes trainers that must be refused; rank 0 leaves what they raised in `refusals.json`."""
    allow_engines_on_cpu({})
    raised = {}
    for name, options in cases.items():
        AcceleratorState._reset_state()
        if "parallelism_config" in options:
            options = {**options, "parallelism_config": ParallelismConfig(**options["parallelism_config"])}
        try:
            with mock.patch.dict(os.environ):  # an engine is asked for in it, and the next trainer would find it there
                make_trainer(folder, dict(options), 2)
        except ValueError as error:
            raised[name] = str(error)
    if os.environ["RANK"] == "0":
        Path(folder, "refusals.json").write_text(json.dumps(raised))


SAVES = {
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 2,
    "train_sampling_strategy": "random",
    "optim": "adamw_torch",
}
SAVES |= {"learning_rate": 1e-3}


def train_and_die(folder, options, ranks):
    """Rank 1 is killed in step 4, after its first micro-batch."""
    allow_engines_on_cpu(options)
    trainer = make_trainer(folder, {**SAVES, **options}, ranks)
    original = trainer.training_step

    def training_step(*args, **kwargs):
        loss = original(*args, **kwargs)
        if trainer.state.global_step == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return loss

    trainer.training_step = training_step
    trainer.train()


def train_saving(folder, options, ranks, resume):
    """The whole training, or what is left of it."""
    allow_engines_on_cpu(options)
    trainer = make_trainer(folder, {**SAVES, **options}, ranks)
    trainer.train(resume_from_checkpoint=resume or None)
    found = whole_weights(trainer)
    if trainer.accelerator.is_main_process:
        torch.save(found, f"{folder}/weights.pt")
        Path(folder, "log.json").write_text(json.dumps(trainer.state.log_history))


def read(folder):
    return torch.load(folder / "weights.pt", map_location="cpu"), json.loads((folder / "log.json").read_text())


def check(folder, expected, engine, rel=1e-5, apart=1e-5, start=None, num_steps=10, metrics=METRICS):
    got, log = read(folder)
    assert (folder / "engine.txt").read_text() == engine
    start = weights(make_model()) if start is None else start
    assert distance(expected[0], start) > 1e-2
    assert distance(got, expected[0], start) < apart
    steps = 0
    for own, other in zip(log, expected[1], strict=True):
        for key in (name for name in (*SAME, *metrics) if name in own):
            if key == "mean_token_accuracy" and rel > 1e-3:
                continue  # in bfloat16 a single prediction may be another one
            exact = key not in ("loss", "loss/sum", "grad_norm", "entropy")
            assert own[key] == pytest.approx(other[key], rel=1e-12 if exact else rel), key
            steps += key == "loss"
        if "eval_loss" in own:
            assert own["eval_loss"] == pytest.approx(other["eval_loss"], rel=rel)
    assert steps == num_steps


def check_log_probs(folder):
    seen = [entry for rank in range(2) for entry in json.loads((folder / f"log_probs{rank}.json").read_text())]
    assert len(seen) > 2 * 10
    assert {entry["dtype"] for entry in seen} == {"torch.float32"}
    assert max(entry["error"] for entry in seen) < 1e-6
