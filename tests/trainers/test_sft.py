"""`TreeSFTTrainer` against TRL's `SFTTrainer` on the unfolded branches, and against itself under every setting."""

import copy
import logging
from unittest import mock

import numpy as np
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.utils.logging import warning_once
from trl import SFTConfig, SFTTrainer
from trl.trainer import utils as trl_utils

from hf_prefix_tree import (
    DataCollatorForPrefixTree,
    TreeLossMixin,
    TreeSFTTrainer,
    fold_shared_prefixes,
    prepare_model,
)
from hf_prefix_tree.tree.prefix_tree import fold
from tests.support.models import VOCAB, branch_runs, gradients
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


def step_reference(trees, model=None):
    """Loss and gradients of one optimizer step over these trees, from independent runs of the branches."""
    model = make_model() if model is None else model
    loss, _ = branch_runs(model, trees)
    loss.backward()
    return loss.item(), gradients(model)


def step_gradient(start, end, learning_rate=1.0):
    return {name: (start[name] - end[name]) / learning_rate for name in start}


def trainer(folder, rows, eval_dataset=None, **options):
    return TreeSFTTrainer(
        model=make_model(),
        args=config(folder, **options),
        train_dataset=rows if isinstance(rows, Dataset) else tree_dataset(rows),
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
    )


# ---- against TRL's SFTTrainer ----


def stock_run(folder, trees, attn_implementation="sdpa", **kwargs):
    branches = [branch for tree in trees for branch in tree.branches()]
    rows = [
        {
            "input_ids": branch.input_ids.tolist(),
            "labels": [int(i) if w else -100 for i, w in zip(branch.input_ids, branch.weights, strict=True)],
        }
        for branch in branches
    ]
    trainer = SFTTrainer(
        model=make_model(attn_implementation=attn_implementation),
        args=config(folder, SFTConfig, per_device_train_batch_size=6, **kwargs),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("optimizer", ["sgd", "adamw_torch"])
def test_branch_weighting_is_sft_on_the_unfolded_branches(tmp_path, optimizer):
    trees = make_trees(10, weighting="branch", fractional=False)
    options = {"max_steps": 20, "optim": optimizer, "learning_rate": 0.05 if optimizer == "sgd" else 1e-3}
    stock = stock_run(tmp_path, trees, **options)
    ours = train(tmp_path, trees, weighting="branch", **options)
    start = weights(make_model())
    apart = distance(weights(ours.model), weights(stock.model))
    assert distance(weights(stock.model), start) > 1e-2
    if optimizer == "sgd":
        assert apart < 1e-7
    else:
        eager = stock_run(tmp_path, trees, attn_implementation="eager", **options)
        assert apart <= 2 * distance(weights(eager.model), weights(stock.model))
    losses = [[entry["loss"] for entry in run.state.log_history if "loss" in entry] for run in (ours, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)


# ---- one step against independent runs of the branches ----


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_step_is_normalised_over_accumulation(tmp_path, accumulation):
    trees = make_trees(4)
    loss, expected = step_reference(trees)
    start = weights(make_model())
    trainer = train(
        tmp_path, trees, gradient_accumulation_steps=accumulation, per_device_train_batch_size=4 // accumulation
    )
    got = step_gradient(start, weights(trainer.model))
    assert distance(got, expected) < 5e-6
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss, rel=1e-6)


def test_weights_far_below_one_are_not_clamped(tmp_path):
    trees = make_trees(1)
    small = [fold([type(b)(b.input_ids, b.weights * 1e-4) for b in tree.branches()]) for tree in trees]
    ends = [weights(train(tmp_path, data).model) for data in (trees, small)]
    assert distance(ends[1], ends[0], weights(make_model())) < 1e-5


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_nothing(tmp_path, use_reentrant):
    trees = make_trees(2)
    plain = train(tmp_path, trees, per_device_train_batch_size=2)
    model = make_model()
    if use_reentrant:
        model.enable_input_require_grads()
    checkpointed = train(
        tmp_path,
        trees,
        model,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
    )
    for name, value in weights(plain.model).items():
        assert torch.equal(value, weights(checkpointed.model)[name]), name


def test_lora(tmp_path):
    trees = make_trees(3)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    trainer = TreeSFTTrainer(
        model=make_model(),
        args=config(tmp_path, per_device_train_batch_size=3),
        train_dataset=tree_dataset(trees),
        processing_class=tokenizer(),
        peft_config=lora,
    )
    loss, _ = branch_runs(trainer.model, trees)
    loss.backward()
    expected, start = gradients(trainer.model), weights(trainer.model)
    trainer.model.zero_grad()
    trainer.train()
    got = {name: value for name, value in step_gradient(start, weights(trainer.model)).items() if name in expected}
    assert all("lora_" in name for name in got) and len(got) == 8
    assert distance(got, expected) < 5e-6
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)


def test_linear_layers_in_bf16_train_lora_as_in_float32_under_autocast(tmp_path):
    """Autocast rounds the weights of linear layers anyway; embeddings and norms give the residual stream its dtype."""
    trees, losses, trained = make_trees(2), [], []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model("llama", torch.bfloat16).float()
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                module.to(dtype)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        for name, parameter in model.named_parameters():
            if "lora_A" in name:  # PEFT starts adapters in the numbers of the layer's dtype
                torch.nn.init.constant_(parameter, 0.125)
        options = {"max_steps": 3, "learning_rate": 1e-2, "bf16": True, "optim": "adamw_torch"}
        run = train(tmp_path, trees, model, **options)
        losses.append([row["loss"] for row in run.state.log_history if "loss" in row])
        trained.append({name: value for name, value in weights(run.model).items() if "lora_" in name})
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gemma3"])
def test_other_architectures(tmp_path, name):
    trees = make_trees(2)
    _, expected = step_reference(trees, make_model(name, attn_implementation=None))
    start = weights(make_model(name, attn_implementation=None))
    kwargs = {} if name == "gemma3" else {"router_aux_loss_coef": 0.0}
    model = make_model(name, attn_implementation=None)
    trainer = train(tmp_path, trees, model, per_device_train_batch_size=2, **kwargs)
    got = {key: value for key, value in step_gradient(start, weights(trainer.model)).items() if key in expected}
    assert distance(got, expected) < 2e-5


def test_autocast(tmp_path):
    """bf16 autocast: the tree's gradients are no farther from float32 than twice those of the branches in bf16."""
    trees = make_trees(2)
    _, exact = step_reference(trees)
    model = make_model()
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = branch_runs(model, trees)
    loss.backward()
    by_branch = distance(gradients(model), exact)
    start = weights(make_model())
    trainer = train(tmp_path, trees, per_device_train_batch_size=2, bf16=True)
    by_tree = distance(step_gradient(start, weights(trainer.model)), exact)
    assert 1e-4 < by_tree <= 2 * by_branch


# ---- plain Trainer ----


class TreeTrainer(TreeLossMixin, Trainer):
    """The step-wide normaliser on a plain Trainer."""


def plain_arguments(folder, **kwargs):
    options = config(folder).to_dict()
    names = ("optim", "learning_rate", "lr_scheduler_type", "max_grad_norm", "train_sampling_strategy", "max_steps")
    kept = {name: options[name] for name in (*names, "use_cpu", "report_to", "save_strategy", "logging_steps")}
    return TrainingArguments(str(folder), **{**kept, "disable_tqdm": True, **kwargs})


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("normaliser", ["micro-batch", "step"])
def test_plain_trainer(tmp_path, accumulation, normaliser):
    trees = make_trees(4)
    arguments = plain_arguments(
        tmp_path,
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=4 // accumulation,
        remove_unused_columns=False,
    )
    trainer_class = TreeTrainer if normaliser == "step" else Trainer
    model = prepare_model(make_model())
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=tree_dataset(trees),
        data_collator=DataCollatorForPrefixTree(pad_token_id=0),
    )
    trainer.train()
    if normaliser == "step":
        groups = [trees]
    else:  # the mean of the micro-batches' weighted means
        size = 4 // accumulation
        groups = [trees[i : i + size] for i in range(0, 4, size)]
    losses, grads = zip(*(step_reference(group) for group in groups), strict=True)
    expected = {name: sum(grad[name] for grad in grads) / len(groups) for name in grads[0]}
    got = step_gradient(weights(make_model()), weights(trainer.model))
    assert distance(got, expected) < 5e-6
    assert trainer.state.log_history[0]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-6)


@pytest.mark.parametrize("prepare", [None, TreeTrainer, fold_shared_prefixes, prepare_model])
def test_a_stock_trainer_goes_on_with_a_model_that_knew_trees(tmp_path, caplog, prepare):
    """Without trees it normalises over the tokens of the step, as always; after `prepare_model` it says that not."""
    rng = np.random.default_rng(0)
    rows = Dataset.from_list([{"input_ids": rng.integers(3, VOCAB, size=n).tolist()} for n in (3, 30, 4)])
    model = make_model()
    if prepare is TreeTrainer:
        TreeTrainer(model=model, args=plain_arguments(tmp_path))
    elif prepare is not None:
        prepare(model)
    trainer = SFTTrainer(
        model=model,
        args=config(tmp_path, SFTConfig, gradient_accumulation_steps=3, gradient_checkpointing=False),
        train_dataset=rows,
        processing_class=tokenizer(),
    )
    warning_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
        trainer.train()
    log = trainer.state.log_history[0]
    with torch.no_grad():
        ids = [torch.tensor(row["input_ids"])[None] for row in rows]
        losses = [make_model()(input_ids=x, labels=x).loss for x in ids]
    tokens = [x.shape[1] - 1 for x in ids]
    by_tokens = sum(loss * count for loss, count in zip(losses, tokens, strict=True)) / sum(tokens)
    expected = sum(losses) / 3 if prepare is prepare_model else by_tokens
    assert log["loss"] == pytest.approx(expected.item(), rel=1e-6)
    assert ("Call `unprepare_model(model)`" in caplog.text) == (prepare is prepare_model)


@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        ({"label_smoothing_factor": 0.1}, {}, "`label_smoothing_factor=0.1`"),
        ({"neftune_noise_alpha": 5.0}, {}, "`neftune_noise_alpha=5.0`"),
        ({}, {"compute_loss_func": lambda *args, **kwargs: 0.0}, "`compute_loss_func`"),
    ],
)
def test_options_of_a_plain_trainer_that_are_refused(tmp_path, options, arguments, message):
    with pytest.raises(ValueError, match=message):
        TreeTrainer(model=make_model(), args=plain_arguments(tmp_path, **options), **arguments)


def test_a_plain_trainer_whose_batches_are_no_trees_says_what_they_lack(tmp_path):
    rows = Dataset.from_list([{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}])
    trainer = TreeTrainer(model=make_model(), args=plain_arguments(tmp_path, max_steps=1), train_dataset=rows)
    with pytest.raises(ValueError, match="`tree_stats`"):
        trainer.train()
    trainer = TreeTrainer(
        model=make_model(),
        args=plain_arguments(tmp_path, max_steps=1),  # Trainer drops the columns of trees
        train_dataset=Dataset.from_list([{"input_ids": [3], "branches": [{"input_ids": [3], "weights": [1.0]}]}]),
        data_collator=DataCollatorForPrefixTree(pad_token_id=0),
    )
    with pytest.raises(ValueError, match="`remove_unused_columns=False`"):
        trainer.train()


# ---- evaluation and reports ----


def test_evaluation_does_not_depend_on_the_batch_size(tmp_path):
    trees, model = make_trees(5), make_model()
    expected, _ = branch_runs(model, trees)
    found = []
    for batch_size in (1, 2, 5):
        trainer = TreeSFTTrainer(
            model=make_model(),
            args=config(tmp_path, per_device_eval_batch_size=batch_size),
            train_dataset=tree_dataset(trees),
            eval_dataset=tree_dataset(trees),
            processing_class=tokenizer(),
        )
        found.append(trainer.evaluate()["eval_loss"])
        found.append(trainer.evaluate(tree_dataset(trees))["eval_loss"])
    assert found == pytest.approx([expected.item()] * 6, rel=1e-6)


def test_logged_numbers(tmp_path):
    trees = make_trees(4)
    trainer = train(tmp_path, trees, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    log = trainer.state.log_history[0]
    stats = [tree.stats() for tree in trees]
    tokens = sum(s.tree_tokens for s in stats)
    assert log["tree/branches"] == 24
    assert log["tree/tokens"] == tokens == log["num_tokens"]
    assert log["tree/token_ratio"] == pytest.approx(sum(s.branch_tokens for s in stats) / tokens)
    assert log["tree/pair_ratio"] == pytest.approx(
        sum(s.branch_pairs for s in stats) / sum(s.tree_pairs for s in stats)
    )
    rows = [-(-sum(s.tree_tokens for s in stats[i : i + 2]) // 128) * 128 for i in (0, 2)]
    assert log["tree/padding"] == pytest.approx(1 - tokens / sum(rows))
    assert log["loss/token_count"] == pytest.approx(sum(tree.weights.sum() for tree in trees))
    assert log["loss/sum"] / log["loss/token_count"] == pytest.approx(log["loss"], rel=1e-6)
    assert {"entropy", "mean_token_accuracy", "grad_norm", "learning_rate"} <= log.keys()


def test_saving_and_resuming(tmp_path):
    trees = make_trees(4)
    options = {
        "max_steps": 4,
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = train(tmp_path / "whole", trees, **options)
    resumed = TreeSFTTrainer(
        model=make_model(),
        args=config(tmp_path / "resumed", **options),
        train_dataset=tree_dataset(trees),
        processing_class=tokenizer(),
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for name, value in weights(whole.model).items():
        assert torch.equal(value, weights(resumed.model)[name]), name


def test_workers(tmp_path):
    trees = make_trees(4)
    plain = train(tmp_path, trees, max_steps=4)
    workers = train(tmp_path, trees, max_steps=4, dataloader_num_workers=2)
    for name, value in weights(plain.model).items():
        assert torch.equal(value, weights(workers.model)[name]), name


def test_what_a_user_logs_leaves_the_sums_of_the_window_alone(tmp_path):
    """Sums are gathered from all ranks, which a single rank that logs would wait for."""
    trees = make_trees(3)

    class Logs(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            made.log({"x": 1.0})

    made = trainer(tmp_path, trees, max_steps=3, logging_steps=2)
    made.add_callback(Logs())
    made.train()
    logs = made.state.log_history
    own = [entry for entry in logs if "x" in entry]
    assert len(own) == 3 and not any(name.startswith(("tree/", "loss")) for entry in own for name in entry)
    expected = [sum(map(len, trees[:2])), len(trees[2])]
    assert [entry["tree/tokens"] for entry in logs if "tree/tokens" in entry] == expected
    made.train()
    assert [e["tree/tokens"] for e in made.state.log_history if "tree/tokens" in e] == expected


def test_sums_of_an_interrupted_training_are_not_carried_over(tmp_path):
    trees = make_trees(3)
    made = trainer(tmp_path, trees, max_steps=3, logging_steps=2)
    interrupted = mock.patch.object(made, "_maybe_log_save_evaluate", side_effect=KeyboardInterrupt)
    with interrupted, pytest.raises(KeyboardInterrupt):
        made.train()
    made.train()
    log = next(entry for entry in made.state.log_history if "loss" in entry)
    assert log["tree/tokens"] == sum(map(len, trees[:2]))


def test_the_summary_has_the_metrics_of_a_last_window_that_was_too_short(tmp_path):
    """As TRL's has."""
    trees = make_trees(3)
    short = train(tmp_path, trees, max_steps=3, logging_steps=2, learning_rate=0.0).state.log_history[-1]
    each = train(tmp_path, trees, max_steps=3, logging_steps=1, learning_rate=0.0).state.log_history
    assert not any(name.startswith("tree/") for name in each[-1])  # nothing is left
    logged = {name: value for name, value in each[2].items() if name not in ("loss", "grad_norm", "learning_rate")}
    assert {name: short[name] for name in logged} == pytest.approx(logged, rel=1e-12)
    assert {"tree/tokens", "entropy", "mean_token_accuracy", "num_tokens"} <= logged.keys()


# ---- what is prepared, and how ----


ROWS = [{"prompt_ids": [5, 6, 7 + i], "completions": [[8, 9, 10], [8, 11, 12 + i]]} for i in range(6)]


def test_only_the_training_dataset_is_selected_from(tmp_path):
    rows, other = Dataset.from_list(ROWS), Dataset.from_list(ROWS[:5])
    made = trainer(tmp_path, rows, eval_dataset={"train": rows, "other": other}, max_examples=2, max_length=5)
    assert len(made.train_dataset) == 2
    assert {name: len(dataset) for name, dataset in made.eval_dataset.items()} == {"train": 6, "other": 5}
    found = made.evaluate({"train": rows, "other": other})  # prepares them once, and calls itself for each
    assert found["eval_train_loss"] == pytest.approx(made.evaluate(rows)["eval_loss"], rel=1e-12)
    assert len(made._prepare_dataset(rows, None, made.args, False, None, "train")) == 6


def test_options_of_conversations(tmp_path, tiny_tokenizer):
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
    ]
    rows = Dataset.from_list([{"conversation": talk}])
    found = {}
    for name, options in {
        "plain": {},
        "thinking": {"chat_template_kwargs": '{"enable_thinking": true}'},
        "without": {"empty_thinking_in_prompt": False},
    }.items():
        arguments = config(tmp_path, column_names={"messages": "conversation"}, **options)
        made = TreeSFTTrainer(make_model(), arguments, train_dataset=rows, processing_class=tiny_tokenizer)
        (row,) = made.train_dataset
        supervised = [i for i, w in zip(row["input_ids"], row["weights"], strict=True) if w]
        found[name] = tiny_tokenizer.decode(row["input_ids"]), tiny_tokenizer.decode(supervised)
    start, end = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "Hello<|im_end|>"
    assert found == {
        "plain": (f"{start}<think>\n\n</think>\n\n{end}\n", end),
        "thinking": (f"{start}{end}\n", end),
        "without": (f"{start}{end}\n", end),
    }


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_trains_as_a_dataset_does(tmp_path, workers):
    """Five trees, two a step: an epoch's last step has one tree, and its gradients belong to no other step."""
    trees = make_trees(5)
    options = {"gradient_accumulation_steps": 2, "max_steps": 6, "learning_rate": 0.3}
    whole = train(tmp_path, trees, **options)
    if workers:  # each reads one file, in turns: these are the files
        trees = [trees[0], trees[3], trees[1], trees[4], trees[2]]
        whole = train(tmp_path, trees, **options)
        trees = [trees[0], trees[2], trees[4], trees[1], trees[3]]
    stream = train(tmp_path, trees, stream=True, dataloader_num_workers=workers, **options)
    logs = [[e["loss/token_count"] for e in run.state.log_history if "loss" in e] for run in (stream, whole)]
    assert logs[0] == pytest.approx(logs[1], rel=1e-12) and len(logs[0]) == 6
    assert distance(weights(whole.model), weights(make_model())) > 1e-3
    assert distance(weights(stream.model), weights(whole.model)) < 1e-6


def test_an_evaluation_inside_a_logging_window_leaves_its_sums_alone(tmp_path):
    trees = make_trees(4)
    trainer = train(
        tmp_path, trees, eval_trees=trees[:1], max_steps=4, logging_steps=4, eval_strategy="steps", eval_steps=1
    )
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert log["tree/tokens"] == sum(len(tree) for tree in trees)
    assert log["loss/token_count"] == pytest.approx(sum(tree.weights.sum() for tree in trees))


def token_metrics(model, trees):
    """Entropy and accuracy at the supervised tokens of trees, by the logits of whole branches, and their number."""
    entropies, correct = {}, {}
    for number, tree in enumerate(trees):
        for branch, places in zip(tree.branches(), tree.paths(), strict=True):
            ids = torch.tensor(branch.input_ids)[None]
            with torch.no_grad():
                log_probs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(dim=-1)
            for at in range(1, len(branch)):
                if branch.weights[at]:
                    before = log_probs[at - 1]
                    entropies[number, places[at]] = -(before.exp() * before).sum().item()
                    correct[number, places[at]] = before.argmax().item() == branch.input_ids[at]
    means = [sum(values.values()) / len(values) for values in (entropies, correct)]
    return {"entropy": means[0], "mean_token_accuracy": means[1]}, len(entropies)


def test_metrics_of_tokens_are_those_of_the_window(tmp_path):
    """Of its tokens, not the mean of micro-batches (which TRL takes); an evaluation has its own."""
    trees = [*make_trees(1, num_branches=2), *make_trees(3, seed=1, num_branches=9)]
    learned = train(tmp_path, trees[:3], max_steps=30, learning_rate=0.3).model  # some tokens by heart
    options = {"gradient_accumulation_steps": 2, "max_steps": 2, "logging_steps": 2, "learning_rate": 0.0}
    with mock.patch.object(trl_utils, "_use_triton", side_effect=AssertionError):  # labels are not looked for
        trainer = train(tmp_path, trees, copy.deepcopy(learned), trees[1:3], **options)
    expected, number = token_metrics(learned, trees)
    log = next(entry for entry in trainer.state.log_history if "loss" in entry)
    assert number > 50 and {name: log[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert log["num_tokens"] == sum(map(len, trees))
    single = [token_metrics(learned, [tree])[0] for tree in trees]
    assert all(abs(np.mean([each[name] for each in single]) / value - 1) > 1e-3 for name, value in expected.items())
    evaluated = trainer.evaluate()
    expected, _ = token_metrics(learned, trees[1:3])
    assert {name: evaluated[f"eval_{name}"] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_all_tokens_of_all_trainings_are_counted(tmp_path):
    """Those of windows that were too short to be logged, too; an evaluation says how many were trained on."""
    trees = make_trees(3)
    trainer = train(tmp_path, trees, eval_trees=trees[:1], max_steps=3, logging_steps=2)
    once = sum(map(len, trees))
    assert trainer.evaluate()["eval_num_tokens"] == once
    trainer.train()
    counts = [entry["num_tokens"] for entry in trainer.state.log_history if "loss" in entry]
    assert counts[-1] == once + len(trees[0]) + len(trees[1]) and trainer.evaluate()["eval_num_tokens"] == 2 * once


def test_an_override_may_say_what_the_trainer_says(tmp_path):
    """As TRL's `compute_loss`, which writes it into the batch."""

    class Override(TreeSFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            inputs["use_cache"] = False
            return super().compute_loss(model, inputs, *args, **kwargs)

    common = {"train_dataset": tree_dataset(make_trees(1)), "processing_class": tokenizer()}
    trainer = Override(make_model(), config(tmp_path), **common)
    trainer.train()
    log = train(tmp_path, make_trees(1)).state.log_history[0]
    assert trainer.state.log_history[0]["loss/sum"] == pytest.approx(log["loss/sum"], rel=1e-12)
