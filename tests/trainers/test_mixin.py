# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""`TreeLossMixin` in front of other trainers and ways to start them: each step is the definition's."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from hf_prefix_tree import DataCollatorForPrefixTree, TreeLossMixin, TreeSFTTrainer, prepare_model
from hf_prefix_tree.tree.prefix_tree import fold
from tests.support.strategy_runs import TorchDataset, groups_of, sums_of
from tests.support.trainer_runs import config, distance, make_model, tokenizer, weights


class MixedTrainer(TreeLossMixin, Trainer):
    pass


class MixedSFTTrainer(TreeLossMixin, SFTTrainer):
    pass


OPTIONS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.5,
    "max_steps": 2,
    "logging_steps": 1,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential",
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
    "use_cpu": True,
    "remove_unused_columns": False,
}


def plain(folder, groups, **kwargs):
    args = TrainingArguments(str(folder), **{**OPTIONS, **kwargs.pop("options", {})})
    collator = DataCollatorForPrefixTree(0)
    return MixedTrainer(args=args, train_dataset=TorchDataset(groups), data_collator=collator, **kwargs)


def mixed_sft(folder, groups, **options):
    skip = {"dataset_kwargs": {"skip_prepare_dataset": True}, "gradient_checkpointing": False, "bf16": False}
    rows = Dataset.from_list([fold(group).to_dict() for group in groups])
    return MixedSFTTrainer(
        model=make_model(),
        args=SFTConfig(str(folder), **{**OPTIONS, **skip, **options}),
        train_dataset=rows,
        eval_dataset=rows,
        data_collator=DataCollatorForPrefixTree(0),
        processing_class=tokenizer(),
    )


def losses_by_definition(steps, learning_rate):
    """The loss of each step, each branch by itself, and the weights after plain gradient descent."""
    model, losses = make_model(), []
    for groups in steps:
        loss_sum, weight_sum = sums_of(groups, model)
        loss = loss_sum / weight_sum
        model.zero_grad()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(learning_rate * parameter.grad)
    return losses, weights(model)


def logged(trainer):
    return [entry["loss/sum"] / entry["loss/token_count"] for entry in trainer.state.log_history if "loss" in entry]


def check(trainer, steps):
    losses, moved = losses_by_definition(steps, 0.5)
    assert logged(trainer) == pytest.approx(losses, rel=1e-5)
    assert [e["loss"] for e in trainer.state.log_history if "loss" in e] == pytest.approx(losses, rel=1e-5)
    assert distance(weights(trainer.model), moved, weights(make_model())) < 1e-5


def test_sft_trainer(tmp_path):
    groups = groups_of(8, 3)
    trainer = mixed_sft(tmp_path, groups)
    loss_sum, weight_sum = sums_of(groups)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss_sum.item() / weight_sum, rel=1e-5)
    trainer.train()
    check(trainer, [groups[:4], groups[4:]])
    assert all("entropy" in entry for entry in trainer.state.log_history if "loss" in entry)


def test_a_loss_that_weights_do_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`loss_type='dft'`"):
        mixed_sft(tmp_path, groups_of(1, 3), loss_type="dft")


def test_an_evaluation_leaves_the_counts_of_the_training_alone(tmp_path):
    groups = groups_of(4, 3)
    options = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = plain(tmp_path, groups, model=make_model(), eval_dataset=TorchDataset(groups_of(3, 5)), options=options)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and logged(trainer) == pytest.approx(losses, rel=1e-6)


@pytest.mark.parametrize("name", ["compute_metrics", "compute_loss_func", "preprocess_logits_for_metrics"])
def test_functions_that_would_see_packed_sequences_are_refused(tmp_path, name):
    arguments = TrainingArguments(str(tmp_path), **OPTIONS)
    with pytest.raises(ValueError, match=f"`{name}`"):
        MixedTrainer(make_model(), arguments, data_collator=DataCollatorForPrefixTree(0), **{name: print})


def own_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**{name: x for name, x in inputs.items() if name not in ("labels", "loss_weights")})
    return (outputs.logits.sum(), outputs) if return_outputs else outputs.logits.sum()


def scaled_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    loss, outputs = Trainer.compute_loss(self, model, inputs, True, num_items_in_batch)
    return (3 * loss, outputs) if return_outputs else 3 * loss


@pytest.mark.parametrize("compute_loss", [own_loss, scaled_loss])
def test_a_trainer_with_a_loss_of_its_own_is_refused(tmp_path, compute_loss):
    Own = type("Own", (Trainer,), {"compute_loss": compute_loss})

    class Mixed(TreeLossMixin, Own):
        pass

    args = TrainingArguments(str(tmp_path), **OPTIONS)
    collator = DataCollatorForPrefixTree(0)
    made = Mixed(model=make_model(), args=args, train_dataset=TorchDataset(groups_of(4, 3)), data_collator=collator)
    with pytest.raises(ValueError, match="Mixed or its model computes the loss by itself"):
        made.train()


@pytest.mark.parametrize("compute_loss", [own_loss, scaled_loss])
def test_a_loss_between_the_mixin_and_trl_is_refused(tmp_path, compute_loss):
    """TRL's own is not called: one that calls it would not be, either."""
    Own = type("Own", (SFTTrainer,), {"compute_loss": compute_loss})
    Mixed = type("Mixed", (TreeLossMixin, Own), {})
    args = config(tmp_path, SFTConfig, dataset_kwargs={"skip_prepare_dataset": True})
    common = {"train_dataset": Dataset.from_list([{"input_ids": [1, 2]}]), "processing_class": tokenizer()}
    with pytest.raises(ValueError, match="Mixed or its model computes the loss by itself"):
        Mixed(make_model(), args, data_collator=DataCollatorForPrefixTree(0), **common)


def without_items(self, model, inputs, return_outputs=False, **kwargs):
    return super(type(self), self).compute_loss(model, inputs, return_outputs)


def test_a_divisor_that_an_override_does_not_hand_on(tmp_path):
    groups = groups_of(8, 3)
    override = type("Override", (MixedTrainer,), {"compute_loss": without_items})
    args = TrainingArguments(str(tmp_path), **OPTIONS)
    collator = DataCollatorForPrefixTree(0)
    trainer = override(model=make_model(), args=args, train_dataset=TorchDataset(groups), data_collator=collator)
    trainer.train()
    check(trainer, [groups[:4], groups[4:]])


def test_a_model_that_stays_in_evaluation_mode(tmp_path):
    groups, model = groups_of(8, 3), make_model()
    model.train = lambda mode=True: model
    trainer = plain(tmp_path, groups, model=model.eval())
    trainer.train()
    check(trainer, [groups[:4], groups[4:]])


@pytest.mark.parametrize("prepared", [False, True])
def test_model_init(tmp_path, prepared):
    """`train` makes another model each time, as a hyperparameter search does."""
    groups = groups_of(8, 3)
    trainer = plain(tmp_path, groups, model_init=lambda: prepare_model(make_model()) if prepared else make_model())
    for _ in range(2):
        model = trainer.model
        trainer.train()
        assert trainer.model is not model
        check(trainer, [groups[:4], groups[4:]])


@pytest.mark.parametrize("mode", ["tree", "grouped"])
@pytest.mark.parametrize("options", [{}, {"dataset_kwargs": {"skip_prepare_dataset": True}}])
def test_k_counts_branches_that_supervise_nothing(tmp_path, mode, options):
    """Folded beforehand or by the collator, and trained branch by branch: one K."""
    groups = groups_of(8, 3)
    assert all(any(not branch.weights.any() for branch in group) for group in groups)
    rows = [
        {"branches": [{"input_ids": b.input_ids.tolist(), "weights": b.weights.tolist()} for b in group]}
        for group in groups
    ]
    trainer = TreeSFTTrainer(
        model=make_model(),
        args=config(tmp_path, **{**OPTIONS, **options}, mode=mode),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    loss_sum, weight_sum = sums_of(groups)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss_sum.item() / weight_sum, rel=1e-5)
    trainer.train()
    check(trainer, [groups[:4], groups[4:]])
    assert [entry["tree/branches"] for entry in trainer.state.log_history if "loss" in entry] == [20, 20]


class Fails(TreeSFTTrainer):
    """Runs out of memory in its first attempt, after the first micro-batch."""

    failed = False

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if not self.failed:
            self.failed = True
            raise RuntimeError("CUDA out of memory.")
        return loss


def test_an_aborted_attempt_is_forgotten(tmp_path):
    """`auto_find_batch_size` starts again with a smaller batch: 4 trees, then 3."""
    groups = groups_of(6, 3)
    rows = Dataset.from_list([fold(group).to_dict() for group in groups])
    options = {**OPTIONS, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
    trainer = Fails(
        model=make_model(),
        args=config(tmp_path, **options, auto_find_batch_size=True),
        train_dataset=rows,
        processing_class=tokenizer(),
    )
    trainer.train()
    assert trainer._train_batch_size == 3
    check(trainer, [groups[:3], groups[3:]])
    assert [entry["tree/branches"] for entry in trainer.state.log_history if "loss" in entry] == [15, 15]
