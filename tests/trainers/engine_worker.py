# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What a rank does in the tests of engines: trains and evaluates on uneven rows, and leaves weights and logs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from accelerate.parallelism_config import ParallelismConfig
from accelerate.state import AcceleratorState, DistributedType
from datasets import Dataset
from packaging.version import Version
from peft import LoraConfig
from runs import config, make_model, make_trees, tokenizer
from transformers import AutoModelForCausalLM

from hf_prefix_tree import TreeSFTTrainer
from hf_prefix_tree.tree import Branch, fold

FSDP2 = {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Qwen3DecoderLayer"]}}

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or os.environ.get("DS_ACCELERATOR") != "cpu",
    reason="needs deepspeed, and DS_ACCELERATOR=cpu in the environment",
)


def needs_transformers(version, reason):
    """Skips a test on older ones, where what it uses of Transformers itself does not work."""
    return pytest.mark.skipif(Version(transformers.__version__) < Version(version), reason=reason)


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
