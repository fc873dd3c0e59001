"""Short training runs on tiny models, shared by the trainer tests and by the processes that they start."""

import copy

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import CONFIGS, random_branches
from tests.support.tokenizer import tokenizer


def make_model(name="qwen3", dtype=torch.float32, attn_implementation="sdpa"):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
    return model


def make_trees(number, seed=0, weighting="tree", fractional=True, num_branches=6):
    rng = np.random.default_rng(seed)
    trees = []
    for _ in range(number):
        branches = random_branches(rng, num_branches=num_branches, fractional=fractional)
        # every branch supervises something, so that a stock trainer keeps it
        branches = [Branch(b.input_ids, np.where(np.arange(len(b)) == len(b) - 1, 1.0, b.weights)) for b in branches]
        trees.append(fold(branches, weighting))
    return trees


def tree_dataset(trees):
    return Dataset.from_list([tree.to_dict() for tree in trees])


def config(folder, config_class=TreeSFTConfig, **kwargs):
    defaults = {
        "max_steps": 1,
        "per_device_train_batch_size": 1,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "max_length": None,
    }
    return config_class(str(folder), **{**defaults, **kwargs})


def train(folder, trees, model=None, eval_trees=None, peft_config=None, stream=False, **kwargs):
    """One run of `TreeSFTTrainer`, with `stream` on streaming datasets; returns the trainer."""
    train_dataset, eval_dataset = (None if rows is None else tree_dataset(rows) for rows in (trees, eval_trees))
    if stream:  # of two files: Accelerate would give each process one of them
        train_dataset = train_dataset.to_iterable_dataset(num_shards=2)
        eval_dataset = None if eval_dataset is None else eval_dataset.to_iterable_dataset(num_shards=2)
    trainer = TreeSFTTrainer(
        model=make_model() if model is None else model,
        args=config(folder, **kwargs),
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def distance(got, expected, start=None):
    """Norm of the difference over all parameters, relative to the norm of what they moved (or of the weights)."""
    assert got.keys() == expected.keys()
    apart = sum((got[n].double() - expected[n].double()).square().sum() for n in expected)
    size = sum((expected[n].double() - (0 if start is None else start[n].double())).square().sum() for n in expected)
    return (apart / size).sqrt().item()
