# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""`overflow="stream"` takes the steps of whole trees: under every engine, checkpointing and adapters, and resumed.

Whole trees in one process are the reference, see `test_engines.py`.
"""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback

from benchmarks.flops import shape_config
from hf_prefix_tree import TreeSFTTrainer, prepare_trees
from hf_prefix_tree.modeling import streaming
from hf_prefix_tree.modeling.flops import choose_overflow, model_costs
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.engine_runs import (
    FSDP2,
    check,
    make_trainer,
    needs_transformers,
    read,
    train_and_die,
    train_compiled,
    train_engine,
    train_saving,
)
from tests.support.ranks import run_ranks
from tests.support.streaming_runs import forget, watched_paths
from tests.support.trainer_runs import (
    config,
    distance,
    make_model,
    make_trees,
    tokenizer,
    train,
    tree_dataset,
    weights,
)

STREAM = {"overflow": "stream", "max_packed_tokens": 16}
FSDP2_CHECKPOINTED = {**FSDP2, "fsdp_config": {**FSDP2["fsdp_config"], "activation_checkpointing": True}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Weights and logs of whole trees in one process."""
    made = {}

    def run(**options):
        key = json.dumps(options)
        if key not in made:
            folder = tmp_path_factory.mktemp("whole")
            train_engine(str(folder), dict(options))
            made[key] = read(folder)
        return made[key]

    return run


@pytest.mark.parametrize("accumulated", [4, 1])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ],
    ids=["plain", "checkpoint", "reentrant"],
)
def test_one_process(tmp_path, whole, options, accumulated):
    trainer = make_trainer(tmp_path, {**STREAM, **options, "step_rows": accumulated})
    trainer.train()
    expected, log = whole(step_rows=accumulated)
    start = weights(make_model())
    assert distance(expected, start) > 1e-2 and distance(weights(trainer.model), expected, start) < 1e-5
    for ours, theirs in zip(trainer.state.log_history, log, strict=True):
        assert ours.keys() == theirs.keys()
        keys = {"loss", "loss/sum", "loss/token_count", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy"}
        for key in (keys | {f"eval_{key}" for key in keys}) & theirs.keys():
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key
    assert "num_tokens" in log[0] and "eval_num_tokens" in set().union(*log)
    assert any("entropy" in entry for entry in log) and any("eval_entropy" in entry for entry in log)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_paths_are_freed_before_the_next_step(tmp_path, offloaded, checkpointing):
    """At once, since they may take more memory than the model."""
    options = {"gradient_checkpointing": checkpointing, "max_steps": 2, "step_rows": 2}
    trainer = make_trainer(tmp_path, {**STREAM, **options})
    trainer.args.activation_offloading = offloaded  # TRL's part needs a GPU
    alive = []

    class Count(TrainerCallback):
        def on_optimizer_step(self, *args, **kwargs):
            alive.append(sum(bool(path() and path().layers) for path in paths))

    trainer.add_callback(Count())
    with watched_paths() as paths:
        trainer.train()
    assert alive == [0, 0] and len(paths) > 4


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ({}, "MULTI_CPU"),
        *(pytest.param(engine, "FSDP", marks=pytest.mark.slow) for engine in (FSDP2, FSDP2_CHECKPOINTED)),
    ],
    ids=["ddp", "fsdp2", "fsdp2_checkpointed"],
)
def test_two_ranks(tmp_path, whole, engine, name):
    """Ranks with rows of other sizes, and so other sections, some without weight or empty."""
    run_ranks(train_engine, tmp_path, {**engine, **STREAM}, 2, ranks=2)
    check(tmp_path, whole(), name)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["plain", "checkpoint"])
def test_lora(tmp_path, whole, options):
    trainer = make_trainer(tmp_path, {**STREAM, **options, "lora": True})
    trainer.train()
    expected, _ = whole(lora=True)
    got = {name: value for name, value in weights(trainer.model).items() if "lora_" in name}
    expected = {name: value for name, value in expected.items() if "lora_" in name}
    start = {name: value * ("lora_A" in name) for name, value in got.items()}
    assert min(value.norm() for name, value in expected.items() if "lora_B" in name) > 1e-3
    of_b = [{name: value for name, value in run.items() if "lora_B" in name} for run in (got, expected, start)]
    assert distance(*of_b) < 1e-5


@pytest.mark.slow
def test_compiled_layers(tmp_path, whole):
    train_compiled(tmp_path, {"max_steps": 2, **STREAM}, 1)
    check(tmp_path, whole(max_steps=2), "NO", num_steps=2)


def test_lost_gradients_are_noticed(tmp_path, whole, monkeypatch):
    """Negative control: without what later sections hand over, other weights are trained."""
    monkeypatch.setattr(streaming._Layer, "handed_over", forget)
    trainer = make_trainer(tmp_path, dict(STREAM))
    trainer.train()
    assert distance(weights(trainer.model), whole()[0], weights(make_model())) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=needs_transformers("5.24", "older ones load no optimizer state of a CPU rank"))]
)
def test_killed_and_resumed(tmp_path, ranks):
    broken, unbroken = tmp_path / "broken", tmp_path / "unbroken"
    if ranks == 1:
        train_saving(unbroken, dict(STREAM), 1, False)
        train_saving(broken, {**STREAM, "num_train_epochs": 1}, 1, False)  # its last checkpoint is removed below
        expected = torch.load(unbroken / "weights.pt")
        for name in ("checkpoint-6", "checkpoint-4"):
            for file in (broken / name).glob("*"):
                file.unlink()
            (broken / name).rmdir()
        train_saving(broken, dict(STREAM), 1, True)
    else:
        codes = run_ranks(train_and_die, broken, STREAM, 2, ranks=2, may_die=True)
        assert codes[1] == -signal.SIGKILL and codes[0] != 0
        run_ranks(train_saving, broken, STREAM, 2, True, ranks=2)
        run_ranks(train_saving, unbroken, STREAM, 2, False, ranks=2)
        expected = torch.load(unbroken / "weights.pt")
    got = torch.load(broken / "weights.pt")
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


def test_every_token_is_computed_once(tmp_path):
    """In passes of at most so many tokens; recomputation under checkpointing calls the layers, not the model."""
    trees, seen = make_trees(2, num_branches=12), []
    trainer = make_sft(tmp_path, trees, gradient_accumulation_steps=2, gradient_checkpointing=True, **STREAM)
    state = trainer.model._hf_prefix_tree_state

    def count(module, args, kwargs):
        if not state.verifying:
            seen.append(int(kwargs["attention_mask"].sum()))

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    assert sum(seen) == sum(map(len, trees)) and len(seen) > 5 and max(seen) <= 16


def make_sft(folder, trees, model=None, **options):
    return TreeSFTTrainer(
        model=model or make_model(),
        args=config(folder, **options),
        train_dataset=tree_dataset(trees),
        processing_class=tokenizer(),
    )


@pytest.mark.parametrize("streams", [False, True])
def test_larger_trees_have_a_row_of_their_own(streams):
    trees = sorted(make_trees(4, num_branches=3) + make_trees(1, seed=1, num_branches=12), key=len)
    limit = len(trees[-2])
    dataset = tree_dataset(trees)
    rows = prepare_trees(
        dataset.to_iterable_dataset() if streams else dataset, max_packed_tokens=limit, overflow="stream"
    )
    sizes = [[len(tree["input_ids"]) for tree in row["trees"]] for row in rows]
    assert sorted(size for row in sizes for size in row) == [len(tree) for tree in trees]
    assert [len(trees[-1])] in sizes and all(sum(row) <= limit for row in sizes if row != [len(trees[-1])])
    assert {number for row in rows for number in row["num_parts"]} == {1}


@pytest.mark.parametrize(
    ("limit", "choice", "why"),
    [
        (500, "split", "whole, as no tree has more than 500 tokens"),
        (40, "split", "beside a pass"),
        (20, "stream", "it may not fit: set `activation_offloading=True`"),
    ],
)
def test_auto(tmp_path, caplog, limit, choice, why):
    trees = make_trees(2, num_branches=12)
    longest = max(tree.stats().longest_path for tree in trees)
    assert 20 < longest < 40 < len(trees[0])
    trainer = make_sft(tmp_path, trees, overflow="auto", max_packed_tokens=limit, gradient_accumulation_steps=4)
    assert trainer.args.overflow == choice and why in caplog.text
    trainer.train()
    assert trainer.state.log_history[0]["tree/tokens"] >= sum(map(len, trees))


def rollouts(prompt, completions, length):
    paths = [np.append(np.arange(prompt), np.full(length, index)) for index in range(completions)]
    return fold([Branch(path, np.arange(prompt + length) >= prompt) for path in paths])


@pytest.mark.parametrize(
    ("tree", "checkpointing", "offloading", "expected"),
    [
        (rollouts(9216, 64, 1024), False, False, ("stream", 4352)),  # 1.65x the FLOPs; 16,384 less 10,240 x 1.171
        (rollouts(8192, 64, 1024), False, False, ("split", 16_384)),  # 1.46x the FLOPs
        (rollouts(12_288, 64, 1024), True, False, ("split", 16_384)),  # beside keys and values of a path no pass fits
        (rollouts(12_288, 64, 1024), True, True, ("stream", 8192)),  # 2.4x the FLOPs, and the path is on the host
        (rollouts(8192, 2, 16_384), True, False, ("stream", 1024)),  # a path that no packed sequence holds
    ],
)
def test_what_auto_counts(tree, checkpointing, offloading, expected):
    costs = model_costs(shape_config("0.6b"))
    *choice, numbers = choose_overflow([tree], shape_config("0.6b"), 16_384, checkpointing, offloading)
    assert tuple(choice) == expected, numbers
    longest = tree.stats().longest_path
    waiting = (28 * 2 * 1024 if checkpointing else costs.activation_bytes) + 28 * 1024 * (2 + 2 + 4 + 4)
    waiting *= 2 / 28 if offloading else 1  # those of two layers
    assert f"keeps {longest * waiting / 2**30:.1f} GiB beside" in numbers


def test_auto_with_little_room():
    config = shape_config("0.6b")
    long_path = [rollouts(1024, 2, 1024)]
    assert "set `activation_offloading=True`" in choose_overflow(long_path, config, 700, True)[2]
    choice, tokens, numbers = choose_overflow(long_path, config, 700, True, True)
    assert (choice, tokens) == ("stream", 640) and "activation_offloading" not in numbers
    # a pass of 896 tokens is as large as this room allows
    assert choose_overflow([rollouts(460, 100, 50)], config, 1023, True, True)[:2] == ("stream", 896)
    # 1.78x the FLOPs, but there is room for short passes only
    assert choose_overflow([rollouts(9984, 64, 1024)], config, 16_384, False)[:2] == ("split", 16_384)


def test_auto_of_the_trainer_counts_offloading(tmp_path, monkeypatch):
    asked = []

    def choose(trees, config, *memory):
        asked.append(memory)
        return "split", 40, ""

    monkeypatch.setattr("hf_prefix_tree.sft.trainer.choose_overflow", choose)
    trees = make_trees(2, num_branches=12)
    trainer = make_sft(tmp_path, trees, overflow="auto", max_packed_tokens=40)
    trainer.args.activation_offloading, trainer.args.max_packed_tokens = True, 30  # TRL's part needs a GPU
    trainer._choose_overflow(Dataset.from_list([tree.to_dict() for tree in trees]), trainer.args)
    assert asked == [(40, False, False), (30, False, True)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_packed_tokens": None}, "`overflow='stream'` needs `max_packed_tokens`"),
        ({"mode": "grouped"}, "no meaning under `mode='grouped'`"),
        ({"optim": "lomo"}, "`optim='lomo'` changes weights in the backward, and `overflow='stream'`"),
        ({"optim": "galore_adamw_layerwise"}, "changes weights in the backward"),
        ({"overflow": "split", "mode": "grouped", "optim": "adalomo"}, "the backward, and `mode='grouped'`"),
        ({"overflow": "streem"}, "`overflow` is 'streem'; pass one of 'auto', 'split', 'stream'"),
    ],
)
def test_refused_options(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(tmp_path, **{**STREAM, **options})


def test_refused_models_and_calls(tmp_path):
    with pytest.raises(ValueError, match="set `router_aux_loss_coef=0`"):
        make_sft(tmp_path, make_trees(1), make_model("qwen3_moe", attn_implementation=None), **STREAM)
    trainer = make_sft(tmp_path, make_trees(1, num_branches=12), **STREAM)
    with pytest.raises(ValueError, match="Predictions of a tree of more than `max_packed_tokens=16` tokens"):
        trainer.predict(trainer.train_dataset)


def test_mixture_of_experts(tmp_path):
    trees, ends = make_trees(2, num_branches=12), []
    for options in ({}, STREAM):
        model = make_model("qwen3_moe", attn_implementation=None)
        run = train(tmp_path, trees, model, router_aux_loss_coef=0.0, gradient_accumulation_steps=2, **options)
        ends.append(weights(run.model))
    start = weights(make_model("qwen3_moe", attn_implementation=None))
    assert distance(ends[0], start) > 1e-3 and distance(ends[1], ends[0], start) < 1e-5
