# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Records the numbers of a fixed set of runs, and compares them with the recorded ones bit for bit.

A change that only moves code must not change one bit of any loss, gradient norm, log-prob, collated batch, count or
report. Floats are stored as hexadecimal; lists of integers and tensors of data as hashes.

The bits of a matrix product depend on the machine and on the version of torch, so record before the change and
compare after it, in the same environment:

    python -m scripts.record_numbers --write             # at the commit before the change
    python -m scripts.record_numbers                     # after it; exit code 1 if anything differs
    python -m scripts.record_numbers --rtol 1e-13        # where two copies of a formula have become one
    python -m scripts.record_numbers --only sft grpo     # groups whose names start so

Models are float64. TRL's fused head rounds its results to float32, and so does what checkpointing computes again: in
the groups of trainers (but for `plain_trainer` and `eagle3`) a last bit that changes before the head may show as 1e-8.

Takes less than a minute of one core.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "TOKENIZERS_PARALLELISM": "false"}
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"

import argparse
import contextlib
import functools
import hashlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import platform
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
import trl
from datasets import Dataset, disable_caching, disable_progress_bars
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

import hf_prefix_tree as hpt
from conformance.double import keep_double
from examples.demo.dialogues import as_json_strings, dialogue_texts, generate_dialogues
from examples.demo.tokenizer import train_tokenizer

# The only names that are not public: where these modules move, this is the place to follow them.
from hf_prefix_tree.cli import main as cli

RECORDED = Path(__file__).with_name("recorded_numbers.json")
VOCAB, WINDOW = 97, 6
Values = dict[str, Any]

_SIZES = {
    **{"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_SIZES, **_EXPERTS, output_router_logits=True),
    "gemma3": lambda: transformers.Gemma3TextConfig(**_SIZES, **_SLIDING),
    "gpt_oss": lambda: transformers.GptOssConfig(**_SIZES, **_SLIDING, num_local_experts=4, num_experts_per_tok=2),
    "llama4": lambda: transformers.Llama4TextConfig(
        **_SIZES,
        intermediate_size_mlp=24,
        num_local_experts=2,
        attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_SIZES,
        **_EXPERTS,
        layer_types=["linear_attention", "full_attention"],
        shared_expert_intermediate_size=24,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    ),
    "bamba": lambda: transformers.BambaConfig(
        **{key: value for key, value in _SIZES.items() if key != "head_dim"},
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_n_groups=1,
        mamba_chunk_size=4,
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **{key: value for key, value in _SIZES.items() if key != "head_dim"},
        layer_types=["conv", "full_attention"],
        block_multiple_of=8,
    ),
}


# ---- inputs ----


def make_model(name: str = "qwen3", config: Any = None, auto: Any = None) -> Any:
    """A tiny model; its weights are amplified, because differences hide behind small ones."""
    torch.manual_seed(0)
    config = config or CONFIGS[name]()
    config._experts_implementation = "eager"  # grouped matmuls reject float64 on CPU
    model = (auto or AutoModelForCausalLM).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(10.0)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.double()  # also what some models keep in float32


def make_branches(seed: int, number: int = 6) -> list[Any]:
    """Branches that fork, end inside one another and repeat; the last token of each is supervised."""
    rng = np.random.default_rng(seed)
    paths = [rng.integers(3, VOCAB, size=20)]
    while len(paths) < number:
        parent = paths[rng.integers(len(paths))]
        keep = int(rng.integers(2, len(parent) + 1))
        more = rng.integers(3, VOCAB, size=rng.integers(0, 8))
        paths.append(np.concatenate([parent[:keep], more]))
    paths.append(paths[0].copy())
    branches = []
    for path in paths:
        weights = rng.integers(0, 2, size=len(path)) * rng.uniform(0.25, 2, size=len(path))
        branches.append(hpt.Branch(path, np.where(np.arange(len(path)) == len(path) - 1, 1.0, weights)))
    return branches


def make_trees(number: int, seed: int = 0, weighting: str = "tree") -> list[Any]:
    return [hpt.fold(make_branches(100 * seed + index), weighting) for index in range(number)]


@functools.cache
def word_tokenizer() -> Any:
    """One token per word `t3`, `t4`, ..."""
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, VOCAB - 1)}, "<mask>": VOCAB - 1}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "padding_side": "left"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@functools.cache
def dialogues() -> tuple[list[dict[str, Any]], Any]:
    """The demo's rows and its tokenizer."""
    rows = generate_dialogues(num_groups=3, trials=3, seed=0)
    return as_json_strings(rows), train_tokenizer(dialogue_texts(rows), vocab_size=1024)


def samples(number: int, seed: int = 0) -> Dataset:
    """Token ids whose end is supervised."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        length = int(rng.integers(6, 14))
        start = int(rng.integers(1, length - 1))
        ids = rng.integers(3, 48, size=length).tolist()  # few tokens, so that some are frequent
        rows.append({"input_ids": ids, "loss_mask": [int(i >= start) for i in range(length)]})
    return Dataset.from_list(rows)


def words(rng: Any, low: int, high: int) -> str:
    return "".join(f" t{i}" for i in rng.integers(3, VOCAB - 1, size=rng.integers(low, high)))


# ---- what is noted ----


def digest(value: Any) -> str:
    """A hash of data, whatever it is made of: its types, shapes and values."""
    hashed = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            part = part.detach().numpy()
        if isinstance(part, np.ndarray):
            hashed.update(f"{part.dtype}{part.shape}".encode() + np.ascontiguousarray(part).tobytes())
        elif isinstance(part, dict):
            for key in sorted(part):
                hashed.update(f"{key}:".encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            hashed.update(f"{len(part)}[".encode())
            for one in part:
                add(one)
        else:
            hashed.update(f"{type(part).__name__}={part!r};".encode())

    add(value)
    return hashed.hexdigest()[:20]


def norm(tensors: Any) -> float:
    """Also of parameters that differ by one bit it is another number, almost always."""
    return math.sqrt(sum(tensor.detach().double().square().sum().item() for tensor in tensors))


def gradient_norm(model: Any) -> float:
    return norm(p.grad for p in model.parameters() if p.grad is not None)


def numbers(value: Any, name: str = "") -> Values:
    """The numbers of nested dictionaries and lists by their path."""
    if isinstance(value, dict):
        value = value.items()
    elif isinstance(value, (list, tuple)):
        value = enumerate(value)
    else:
        return {name: value} if isinstance(value, (int, float)) else {}
    return {key: x for part, one in value for key, x in numbers(one, f"{name}/{part}" if name else str(part)).items()}


class GradientNorms(TrainerCallback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.norms.append(gradient_norm(model))


_NOT_COMPARED = ("runtime", "per_second", "step_time", "total_flos", "epoch", "mfu", "memory")


def trained(trainer: Any, evaluate: bool = False, resume: str | None = None) -> Values:
    """Trains; every logged number of every step, the gradient norms, and the weights' norm at the end."""
    noted = GradientNorms()
    trainer.add_callback(noted)
    trainer.train(resume_from_checkpoint=resume)
    if evaluate:
        trainer.evaluate()
    entries = [
        {key: value for key, value in entry.items() if not any(word in key for word in _NOT_COMPARED)}
        for entry in trainer.state.log_history
    ]
    return {
        **{f"log/{key}": value for key, value in numbers(entries).items()},
        **{f"gradient_norm/{step}": value for step, value in enumerate(noted.norms)},
        "weights": norm(trainer.accelerator.unwrap_model(trainer.model).parameters()),
    }


def options(folder: Any, config_class: Any, **kwargs: Any) -> Any:
    defaults = {
        **{"max_steps": 2, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "optim": "sgd"},
        **{"learning_rate": 0.1, "lr_scheduler_type": "constant", "max_grad_norm": 1e9, "logging_steps": 1},
        **{"train_sampling_strategy": "sequential", "gradient_checkpointing": False, "bf16": False, "use_cpu": True},
        **{"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "seed": 3},
        **{"dataloader_pin_memory": False},
    }
    return config_class(str(folder), **defaults | kwargs)


# ---- the set: each function gives the values of one group ----


def data_trees() -> Values:
    recorded: Values = {}
    for weighting in ("tree", "branch", "branch_mean", "once"):
        trees = make_trees(3, weighting=weighting)
        names = ("depth", "subtree_end", "predecessor")
        recorded[f"fold/{weighting}"] = digest([tree.to_dict() for tree in trees])
        recorded[f"derived/{weighting}"] = digest([[getattr(tree, name) for name in names] for tree in trees])
        recorded[f"unfold/{weighting}"] = digest(
            [[(b.input_ids, b.weights) for b in tree.branches()] + tree.paths() for tree in trees]
        )
        longest = max(tree.stats().longest_path for tree in trees)
        parts = [part for tree in trees for part in hpt.split_tree(tree, longest)]
        recorded[f"split/{weighting}"] = digest([part.to_dict() for part in parts])
    recorded |= numbers(vars(make_trees(1)[0].stats()), "stats")
    recorded["node_paths"] = digest(make_trees(1)[0].to_node_paths())
    recorded["pack_rows"] = digest([list(map(int, row)) for row in hpt.pack_rows([5, 9, 3, 7, 2, 2, 8, 1], 10)])
    recorded["caterpillar"] = digest(hpt.caterpillar(num_turns=5, seed=0).to_dict())
    recorded["caterpillar_set"] = digest([tree.to_dict() for tree in hpt.caterpillar_set(2)])
    whole = [hpt.Branch(b.input_ids, (b.weights > 0).astype(float)) for b in make_branches(5)]
    recorded["per_branch"] = digest(hpt.per_branch([hpt.fold(whole)]))
    recorded["flat_steps"] = digest(hpt.flat_steps(whole))
    rollouts = hpt.fold_shared_prefix_rollouts([5, 6, 7], [[8, 9], [8, 10, 11], [12]])
    recorded["rollouts"] = digest(vars(rollouts))
    recorded["rollouts_tree"] = digest(rollouts.to_tree().to_dict())
    return recorded


def data_prepared() -> Values:
    rows, tokenizer = dialogues()
    dataset = Dataset.from_list(rows)
    runs: dict[str, dict[str, Any]] = {
        **{mode: {"reasoning": mode} for mode in ("per_turn", "side_leaf", "keep")},
        **{weighting: {"weighting": weighting} for weighting in ("branch", "branch_mean", "once")},
        "grouped": {"group_by": "group", "max_length": 800},
        "packed": {"group_by": "group", "max_packed_tokens": 1200, "max_length": 1000},
        "apart": {"max_packed_tokens": 1200, "max_length": 1000, "pack_trees": False},
        "selected": {"selection_metric": "forked_context", "max_examples": 3},
        "dropped": {"max_length": 800, "overlong": "drop"},
    }
    recorded: Values = {}
    for name, kwargs in runs.items():
        counts: dict[str, Any] = {}
        prepared = hpt.prepare_trees(dataset, tokenizer, counts=counts, **kwargs)
        recorded[f"{name}/rows"] = digest(list(prepared))
        recorded |= numbers(counts, f"{name}/counts")
    one_turn = Dataset.from_list([{**row, "messages": row["messages"][:3]} for row in rows[:3]])
    recorded["think_split"] = digest(list(hpt.prepare_trees(one_turn, tokenizer, reasoning="think_split")))
    ids = samples(6)
    recorded["ids"] = digest(list(hpt.prepare_trees(ids.rename_column("loss_mask", "completion_mask"))))
    searches = [
        {"parents": [-1, 0, 0, 1], "texts": ["t3 t4", " t5", " t6 t7", " t8"], "weights": [0.0, 1.0, 1.0, 1.0]}
    ]
    recorded["nodes"] = digest(list(hpt.prepare_trees(Dataset.from_list(searches), word_tokenizer())))
    return recorded


def data_collators() -> Values:
    rows = list(samples(4))
    indexed = [
        {**row, "sample_index": index, "attention_mask": [1] * len(row["input_ids"])} for index, row in enumerate(rows)
    ]
    block = {"pad_token_id": 0, "eos_token_id": 2, "block_size": 4}
    packed = hpt.pack_eagle3_dataset(rows, 16, 0)
    rollouts = hpt.fold_shared_prefix_rollouts([5, 6, 7], [[8, 9], [8, 10, 11], [12]])
    recorded = {
        "tree": hpt.DataCollatorForPrefixTree(0)([tree.to_dict() for tree in make_trees(3)]),
        "tree_short": hpt.DataCollatorForPrefixTree(0, pad_to_multiple_of=8)(make_trees(2)),
        "rollouts": hpt.prefix_tree_collate_fn([rollouts]),
        "diffusion": hpt.DataCollatorForDiffusionLM(**block)(indexed),
        "diffusion_window": hpt.DataCollatorForDiffusionLM(**block, response_window=True)(indexed),
        "diffusion_cut": hpt.DataCollatorForDiffusionLM(**block, max_seq_len=8, supervise_padding=True)(indexed),
        "dllm": hpt.DLLMCollator(block_size=4, pad_seq_len_divisible=8)(indexed),
        "eagle3": hpt.DataCollatorForEagle3(0, length=16)(rows),
        "eagle3_packed": hpt.DataCollatorForEagle3(0)(packed),
    }
    return {name: digest(dict(batch)) for name, batch in recorded.items()}


def report() -> Values:
    """`hf-prefix-tree gain`: counts, ratios, FLOPs and bytes."""
    rows, tokenizer = dialogues()
    recorded: Values = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.jsonl")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        tokenizer.save_pretrained(f"{folder}/tokenizer")
        for name in ("qwen3", "qwen3_moe", "qwen3_next"):
            CONFIGS[name]().save_pretrained(f"{folder}/{name}")
        common = ["gain", str(file), "--tokenizer", f"{folder}/tokenizer", "--json", "--group-by"]
        runs = {
            "gain": [*common, "none"],
            "gain_grouped": [*common, "group", "--max-packed-tokens", "1500"],
            **{
                name: [*common, "none", "--model", f"{folder}/{name}"] for name in ("qwen3", "qwen3_moe", "qwen3_next")
            },
            "gain_split": [*common, "none", "--model", f"{folder}/qwen3", "--max-packed-tokens", "1500"],
        }
        for name, arguments in runs.items():
            output = io.StringIO()
            with mock.patch.object(sys, "argv", ["hf-prefix-tree", *arguments]), contextlib.redirect_stdout(output):
                try:
                    cli()
                except SystemExit as end:
                    assert not end.code, f"{name}: exit code {end.code}"
            recorded |= numbers(json.loads(output.getvalue()), name)
    return recorded


def forward() -> Values:
    """Loss, logits and gradients of rows of trees, for every kind of mask and of recurrent layer."""
    recorded: Values = {}
    for name in CONFIGS:
        for weighting in ("tree", "branch") if name == "qwen3" else ("tree",):
            model = hpt.prepare_model(make_model(name))
            batch = hpt.DataCollatorForPrefixTree(0, pad_to_multiple_of=8)(make_trees(2, weighting=weighting))
            with keep_double():
                output = model(**batch)
                output.loss.backward()
            key = f"{name}/{weighting}"
            recorded |= {f"{key}/loss": output.loss.item(), f"{key}/logits": norm([output.logits])}
            recorded[f"{key}/gradient_norm"] = gradient_norm(model)
    return recorded


def images() -> Values:
    """A vision-language model whose branches share an image."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**_SIZES, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": rope}
    vision = {"depth": 1, "num_heads": 2, "hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24}
    vision |= {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [0]}
    ids = {"image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)
    model = hpt.prepare_model(make_model(config=config, auto=transformers.AutoModelForImageTextToText))
    shape = (16, 3 * 2 * 4 * 4)
    pictures = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    grid = torch.tensor([[1, 4, 4]])

    def branch(picture: int, *answer: int) -> dict[str, Any]:
        tokens = [5, 6, *[90] * 4, 7, *answer]
        weights = [0.0] * 7 + [1.0] * len(answer)
        return {"input_ids": tokens, "weights": weights, "pixel_values": pictures[picture], "image_grid_thw": grid}

    tree, shown = hpt.fold_images([branch(0, 8, 9), branch(0, 8, 10), branch(1, 8)], image_token_id=90)
    with keep_double():
        output = model(**hpt.DataCollatorForPrefixTree(0, pad_to_multiple_of=8)([tree]), **shown)
        output.loss.backward()
    return {"tree": digest(tree.to_dict()), "loss": output.loss.item(), "gradient_norm": gradient_norm(model)}


def log_probs() -> Values:
    model = make_model()
    sequences = [torch.from_numpy(branch.input_ids) for branch in make_branches(3)]
    with keep_double():
        log_probs = hpt.tree_log_probs(model, sequences, temperature=0.7, min_reuse=1.0)
        sum(row.square().sum() for row in log_probs).backward()
    return {
        "sum": sum(row.sum().item() for row in log_probs),
        "norm": norm(log_probs),
        "gradient_norm": gradient_norm(model),
    }


def _sft(
    folder: str,
    trees: list[Any],
    model: Any = None,
    peft: Any = None,
    eval_trees: Any = None,
    stream: bool = False,
    **kwargs: Any,
) -> Any:
    dataset = Dataset.from_list([tree.to_dict() for tree in trees])
    return hpt.TreeSFTTrainer(
        model=model or make_model(),
        args=options(folder, hpt.TreeSFTConfig, **kwargs),
        train_dataset=dataset.to_iterable_dataset() if stream else dataset,
        eval_dataset=eval_trees and Dataset.from_list([tree.to_dict() for tree in eval_trees]),
        processing_class=word_tokenizer(),
        peft_config=peft,
    )


def sft() -> Values:
    lora = LoraConfig(r=2, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])
    longest = 4 + max(tree.stats().longest_path for tree in make_trees(6))
    runs: dict[str, dict[str, Any]] = {
        **{weighting: {"weighting": weighting} for weighting in ("tree", "branch", "branch_mean", "once")},
        "accumulated": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_steps": 3},
        "evaluated": {"eval_trees": make_trees(3, seed=1), "max_steps": 1},
        "grouped": {"mode": "grouped", "gradient_accumulation_steps": 2},
        "packed_and_split": {"max_packed_tokens": longest, "gradient_accumulation_steps": 4, "max_steps": 3},
        "split": {"max_packed_tokens": longest, "pack_trees": False, "gradient_accumulation_steps": 4},
        "shuffled": {"train_sampling_strategy": "random", "max_steps": 3},
        "by_length": {"train_sampling_strategy": "group_by_length", "max_steps": 3},
        "streamed": {"stream": True, "gradient_accumulation_steps": 2},
        "lora": {"peft": lora},
        "checkpointed": {"gradient_checkpointing": True},
        "router": {"model": "qwen3_moe", "gradient_accumulation_steps": 2},
    }
    recorded: Values = {}
    for name, kwargs in runs.items():
        model = make_model(kwargs.pop("model", "qwen3"))
        # the mode does not reach what checkpointing computes again
        context = keep_double()
        if name == "checkpointed":
            model, context = model.float(), contextlib.nullcontext()
        trees = make_trees(6, weighting=kwargs.get("weighting", "tree"))
        with tempfile.TemporaryDirectory() as folder, context:
            values = trained(_sft(folder, trees, model, **kwargs), evaluate="eval_trees" in kwargs)
        recorded |= {f"{name}/{key}": value for key, value in values.items()}
    with tempfile.TemporaryDirectory() as folder, keep_double():
        positions = {"train_sampling_strategy": "random", "max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        _sft(folder, make_trees(3), **positions).train()
        values = trained(_sft(folder, make_trees(3), **positions), resume=f"{folder}/checkpoint-2")
        recorded |= {f"resumed/{key}": value for key, value in values.items()}
    return recorded


def sft_dialogues() -> Values:
    """From conversations to weights."""
    rows, tokenizer = dialogues()
    config = CONFIGS["qwen3"]()
    config.vocab_size = len(tokenizer)
    with tempfile.TemporaryDirectory() as folder, keep_double():
        trainer = hpt.TreeSFTTrainer(
            model=make_model(config=config),
            args=options(folder, hpt.TreeSFTConfig, max_length=700),
            train_dataset=Dataset.from_list(rows[:2]),
            processing_class=tokenizer,
        )
        return trained(trainer)


class _PlainTrainer(hpt.TreeLossMixin, Trainer):
    pass


def plain_trainer() -> Values:
    """`TreeLossMixin` on a plain `Trainer`, and the plain one alone."""
    recorded: Values = {}
    for name, trainer_class in {"mixin": _PlainTrainer, "plain": Trainer}.items():
        with tempfile.TemporaryDirectory() as folder, keep_double():
            args = options(folder, TrainingArguments, gradient_accumulation_steps=2, remove_unused_columns=False)
            trainer = trainer_class(
                model=hpt.prepare_model(make_model()),
                args=args,
                train_dataset=make_trees(4),
                eval_dataset=make_trees(3, seed=1),
                data_collator=hpt.DataCollatorForPrefixTree(0, pad_to_multiple_of=8),
            )
            values = trained(trainer, evaluate=True)
        recorded |= {f"{name}/{key}": value for key, value in values.items()}
    return recorded


def _rollouts() -> Callable[..., dict[str, Any]]:
    calls = itertools.count()

    def generate(texts: list[str], trainer: Any) -> dict[str, Any]:
        rng = np.random.default_rng(next(calls))
        prompts = [trainer.processing_class(text)["input_ids"] for text in texts]
        stem = rng.integers(3, VOCAB - 1, size=3).tolist()
        completions = [
            (stem if index % 2 else []) + rng.integers(3, VOCAB - 1, size=rng.integers(1, 6)).tolist()
            for index in range(len(texts))
        ]
        probs = [[-3.0] * len(ids) for ids in completions]
        return {"prompt_ids": prompts, "completion_ids": completions, "logprobs": probs}

    return generate


def _reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [sum(ids) % 11 / 10 for ids in completion_ids]


def _policy(trainer_class: Any, config_class: Any, extra: dict[str, Any], **kwargs: Any) -> Values:
    rng = np.random.default_rng(0)
    prompts = Dataset.from_list([{"prompt": words(rng, 8, 14)[1:]} for _ in range(8)])
    sizes = {"num_generations": 4, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    with tempfile.TemporaryDirectory() as folder, keep_double():
        model = make_model()
        model.save_pretrained(f"{folder}/model")  # TRL loads the reference from there
        model.config._name_or_path = f"{folder}/model"
        trainer = trainer_class(
            model=model,
            reward_funcs=_reward,
            args=options(f"{folder}/run", config_class, **sizes, max_completion_length=6, **kwargs),
            train_dataset=prompts,
            processing_class=word_tokenizer(),
            **extra,
        )
        return trained(trainer)


def grpo() -> Values:
    recorded: Values = {}
    runs: dict[str, dict[str, Any]] = {
        "grpo": {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "epsilon": 0.001},
        "dapo": {"loss_type": "dapo"},
    }
    for name, kwargs in runs.items():
        values = _policy(hpt.TreeGRPOTrainer, trl.GRPOConfig, {"rollout_func": _rollouts()}, **kwargs)
        recorded |= {f"{name}/{key}": value for key, value in values.items()}
    return recorded


def rloo() -> Values:
    return _policy(hpt.TreeRLOOTrainer, trl.RLOOConfig, {}, beta=0.05)


def _preference(trainer_class: Any, config_class: Any, rows: list[dict[str, Any]], **kwargs: Any) -> Values:
    with tempfile.TemporaryDirectory() as folder, keep_double():
        model, reference = make_model(), make_model()
        with torch.no_grad():  # a policy that has left its reference
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                parameter.add_(0.02 * noise)
        trainer = trainer_class(
            model=model,
            ref_model=reference,
            args=options(folder, config_class, per_device_train_batch_size=4, max_length=None, **kwargs),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:4]),
            processing_class=word_tokenizer(),
        )
        return trained(trainer, evaluate=True)


def _pairs() -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(0), []
    for _ in range(4):
        prompt = words(rng, 8, 14)[1:]
        for _ in range(2):
            start = words(rng, 0, 4)
            rows.append({"prompt": prompt, "chosen": start + words(rng, 2, 7), "rejected": start + words(rng, 2, 7)})
    return rows


def dpo() -> Values:
    recorded: Values = {}
    for name, kwargs in {"plain": {}, "precomputed": {"precompute_ref_log_probs": True}}.items():
        values = _preference(hpt.TreeDPOTrainer, trl.DPOConfig, _pairs(), **kwargs)
        recorded |= {f"{name}/{key}": value for key, value in values.items()}
    return recorded


def kto() -> Values:
    rows = [
        {"prompt": row["prompt"], "completion": row[name], "label": name == "chosen"}
        for row in _pairs()
        for name in ("chosen", "rejected")
    ]
    return _preference(hpt.TreeKTOTrainer, trl.KTOConfig, rows)


def diffusion() -> Values:
    runs: dict[str, dict[str, Any]] = {
        **{objective: {"objective": objective} for objective in ("mdlm", "block", "hybrid")},
        "blockwise": {"objective": "mdlm", "corruption": "blockwise", "response_window": False},
        "random": {"objective": "block", "corruption": "random"},
        "all_masked": {"objective": "hybrid", "corruption": "all_masked", "alpha": 0.5},
        "padding": {"objective": "block", "supervise_padding": True, "gradient_accumulation_steps": 2},
    }
    recorded: Values = {}
    prompts = torch.tensor([[5, 6, 7, 8, 9], [0, 0, 11, 12, 13]])
    for name, kwargs in runs.items():
        with tempfile.TemporaryDirectory() as folder, keep_double():
            trainer = hpt.DiffusionSFTTrainer(
                model=make_model(),
                args=options(folder, hpt.DiffusionSFTConfig, block_size=4, mask_token_id=VOCAB - 1, **kwargs),
                train_dataset=samples(6),
                eval_dataset=samples(3, seed=1),
                processing_class=word_tokenizer(),
            )
            values = trained(trainer, evaluate=name in ("mdlm", "block", "hybrid"))
            if name in ("mdlm", "block", "hybrid"):
                generated = hpt.diffusion_generate(
                    trainer.model, prompts, 8, 4, VOCAB - 1, attention_mask=(prompts > 0).long(), objective=name
                )
                values["generated"] = digest(generated)
        recorded |= {f"{name}/{key}": value for key, value in values.items()}
    return recorded


def eagle3() -> Values:
    rows, aux = list(samples(6)), [0, 1, 2]
    recorded: Values = {
        "packed_best_fit": digest(hpt.pack_eagle3_dataset(rows, 24, 0)),
        "packed_next_fit": digest(hpt.pack_eagle3_dataset(rows, 24, 0, strategy="next_fit")),
    }
    conversations, tokenizer = dialogues()
    loader = hpt.build_eagle3_dataloader(conversations[:3], tokenizer, packed_sequence_size=2048)
    recorded["loader"] = digest([dict(batch) for batch in loader])
    ids, mask = hpt.build_token_mapping(
        [hpt.DataCollatorForEagle3(0)(rows)], target_vocab_size=VOCAB, draft_vocab_size=40, special_token_ids=[2]
    )
    recorded["mapping"] = digest([ids, mask])
    for name, kwargs in {"padded": {"seq_length": 16}, "packed": {"packed_sequence_size": 24}}.items():
        target = make_model(config=transformers.Qwen3Config(**_SIZES | {"num_hidden_layers": 4}))
        torch.manual_seed(1)
        shape = {"draft_vocab_size": 40, "aux_layer_ids": aux, "initializer_range": 0.2}
        draft = hpt.Eagle3DraftModel(hpt.Eagle3DraftConfig.from_target(target.config, **shape)).double()
        draft.set_draft_vocabulary(ids)
        with tempfile.TemporaryDirectory() as folder, keep_double():
            args = options(folder, hpt.Eagle3Config, aux_layer_ids=aux, ttt_steps=3, **kwargs)
            trainer = hpt.Eagle3Trainer(
                model=draft,
                target_model=target,
                args=args,
                data_collator=hpt.DataCollatorForEagle3(0, length=next(iter(kwargs.values()))),
                train_dataset=rows,
                eval_dataset=list(samples(3, seed=1)),
            )
            values = trained(trainer, evaluate=True)
            hpt.export_for_serving(trainer.model, f"{folder}/export", "sglang")
            files = sorted(Path(folder, "export").rglob("*.*"))
            values["export"] = digest({file.name: load_file(file) for file in files if file.suffix == ".safetensors"})
        recorded |= {f"{name}/{key}": value for key, value in values.items()}
    return recorded


def two_ranks() -> Values:
    """DDP over gloo: steps that do not divide evenly, and evaluation."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # at a free port
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_rank, args=(rank, store.port, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(300)
        assert [process.exitcode for process in ranks] == [0, 0], "a rank failed"
        recorded = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(2)]
    return {f"{rank}/{key}": value for rank, values in enumerate(recorded) for key, value in values.items()}


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    _be_quiet_and_deterministic()
    with keep_double(), contextlib.redirect_stdout(io.StringIO()):
        trainer = _sft(f"{folder}/run", make_trees(7), eval_trees=make_trees(3, seed=1), gradient_accumulation_steps=2)
        values = trained(trainer, evaluate=True)
    Path(folder, f"{rank}.json").write_text(json.dumps(values))
    del trainer
    torch.distributed.destroy_process_group()


GROUPS = (
    *(data_trees, data_prepared, data_collators, report, forward, images, log_probs, sft, sft_dialogues),
    *(plain_trainer, grpo, rloo, dpo, kto, diffusion, eagle3, two_ranks),
)


# ---- recording and comparing ----


def _be_quiet_and_deterministic() -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    disable_caching()  # what is compared is computed


def record(only: list[str]) -> Iterator[tuple[str, Values]]:
    for group in GROUPS:
        name = group.__name__
        if only and not name.startswith(tuple(only)):
            continue
        transformers.set_seed(0)
        random.seed(0)
        start = time.process_time()
        with contextlib.redirect_stdout(io.StringIO()):
            values = {f"{name}/{key}": value for key, value in group().items()}
        print(f"{name}: {len(values)} values, {time.process_time() - start:.1f} s", file=sys.stderr, flush=True)
        yield name, {key: value.hex() if isinstance(value, float) else value for key, value in values.items()}


def is_equal(old: Any, new: Any, rtol: float) -> bool:
    if old == new:
        return True
    if not rtol or not all(isinstance(value, str) and "0x" in value for value in (old, new)):
        return False
    return math.isclose(float.fromhex(old), float.fromhex(new), rel_tol=rtol)


def shown(value: Any) -> str:
    return f"{float.fromhex(value)!r} ({value})" if isinstance(value, str) and "0x" in value else repr(value)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="record the numbers instead of comparing them")
    parser.add_argument("--file", type=Path, default=RECORDED, help="the recorded numbers")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative difference that floats may have")
    parser.add_argument("--only", nargs="+", default=[], help="groups whose names start so")
    args = parser.parse_args()
    _be_quiet_and_deterministic()
    environment = {
        "machine": platform.machine(),
        **{m.__name__: str(m.__version__) for m in (torch, transformers, trl)},
    }
    groups = dict(record(args.only))
    if args.write:
        old = json.loads(args.file.read_text())["groups"] if args.only and args.file.exists() else {}
        text = json.dumps({"environment": environment, "groups": old | groups}, indent=1, sort_keys=True)
        args.file.write_text(text + "\n")
        return 0
    recorded = json.loads(args.file.read_text())
    if recorded["environment"] != environment:
        print(f"Recorded in another environment: {recorded['environment']}, this one is {environment}.")
    differences = count = 0
    for name, values in groups.items():
        expected = recorded["groups"].get(name, {})
        count += len(values)
        for key in sorted(expected.keys() | values.keys()):
            old, new = expected.get(key, "missing"), values.get(key, "missing")
            if not is_equal(old, new, args.rtol):
                differences += 1
                print(f"{key}: recorded {shown(old)}, now {shown(new)}")
    print(f"{count} values, {differences} differ.")
    return int(differences > 0)


if __name__ == "__main__":
    sys.exit(main())
