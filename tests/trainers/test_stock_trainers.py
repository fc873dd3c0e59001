"""Trainers that are not this package's, on prepared models and batches of trees: equal to independent branches, or
refused in one sentence."""

import tempfile
import types

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments
from transformers.modeling_outputs import CausalLMOutputWithPast
from trl import SFTConfig, SFTTrainer

from hf_prefix_tree import DataCollatorForPrefixTree, TreeLossMixin, TreeSFTTrainer, prepare_model, tree_log_probs
from hf_prefix_tree.modeling.prepare import install_tree_hooks
from tests.support.models import branch_runs, gradients, relative_error
from tests.support.trainer_runs import config, make_model, make_trees, tokenizer, tree_dataset


class Trees(Dataset):
    def __init__(self, trees):
        self.trees = trees

    def __len__(self):
        return len(self.trees)

    def __getitem__(self, index):
        return self.trees[index]


class KeepsGradients:
    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.gradients = gradients(self.model)
        return loss


class PlainTrainer(KeepsGradients, Trainer):
    pass


class MixedTrainer(KeepsGradients, TreeLossMixin, Trainer):
    pass


def make_trainer(folder, model, trees, trainer_class=PlainTrainer, compute_loss_func=None, **kwargs):
    options = {"per_device_train_batch_size": len(trees), "remove_unused_columns": False, "learning_rate": 0.0}
    options = {**options, **kwargs}
    args = TrainingArguments(
        str(folder), max_steps=1, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
        logging_steps=1, max_grad_norm=0.0, **options,
    )  # fmt: skip
    return trainer_class(
        model=model,
        args=args,
        train_dataset=Trees(trees),
        eval_dataset=Trees(trees),
        data_collator=DataCollatorForPrefixTree(pad_token_id=0),
        compute_loss_func=compute_loss_func,
    )


def assert_equals_branches(trainer, trees):
    """One step of all trees: its loss and its gradients are those of independent branches."""
    trainer.train()
    reference = make_model()
    reference.load_state_dict(trainer.model.state_dict())
    loss, _ = branch_runs(reference, trees)
    loss.backward()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert relative_error(trainer.gradients, gradients(reference)) < 1e-4


# ---- the order of Trainer and `prepare_model` ----


@pytest.mark.parametrize("steps", [1, 2])
def test_a_model_that_was_prepared_first_trains_exactly(tmp_path, steps):
    trees = make_trees(4)
    model = prepare_model(make_model())
    if steps == 1:
        trainer = make_trainer(tmp_path, model, trees)
    else:  # the mean of equal micro-batches
        trainer = make_trainer(
            tmp_path, model, [trees[0]] * 2, per_device_train_batch_size=1, gradient_accumulation_steps=2
        )
        trees = trees[:1]
    assert_equals_branches(trainer, trees)


def by_log_probs(model):
    tree_log_probs(model, [torch.tensor([5, 6, 7]), torch.tensor([5, 6, 8])], min_reuse=0)


def by_mixin(model):
    class Other(TreeLossMixin, Trainer):
        pass

    args = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none", remove_unused_columns=False)
    Other(model=model, args=args, data_collator=DataCollatorForPrefixTree(pad_token_id=0))


@pytest.mark.parametrize("prepare", [prepare_model, install_tree_hooks, by_log_probs, by_mixin])
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_trainer_that_counts_labels_is_refused(tmp_path, prepare, evaluates):
    model, trees = make_model(), make_trees(2)
    if prepare is prepare_model:  # after the Trainer
        trainer = make_trainer(tmp_path, model, trees)
        prepare(model)
    else:
        prepare(model)
        trainer = make_trainer(tmp_path, model, trees)
    with pytest.raises(ValueError, match="`num_items_in_batch`"):
        trainer.evaluate() if evaluates else trainer.train()
    prepare_model(model)
    assert_equals_branches(make_trainer(tmp_path, model, trees), trees)


# ---- labels that Trainer takes out ----


class OwnLoss(PlainTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], labels[0, 1:])
        return (loss, outputs) if return_outputs else loss


def loss_of_outputs(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs.logits[0, :-1], labels[0, 1:])


@pytest.mark.parametrize(
    "options",
    [{"label_smoothing_factor": 0.1}, {"compute_loss_func": loss_of_outputs}, {"trainer_class": OwnLoss}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_loss_of_logits_and_labels_is_refused(tmp_path, options, is_first):
    model, trees = make_model(), make_trees(2)
    if is_first:
        prepare_model(model)
    trainer = make_trainer(tmp_path, model, trees, **options)
    prepare_model(model)
    with pytest.raises(ValueError, match="`loss_weights` but no `labels`"):
        trainer.train()


@pytest.mark.parametrize(
    "options", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": loss_of_outputs}], ids=lambda x: next(iter(x))
)
def test_an_evaluation_with_a_loss_of_logits_is_refused(tmp_path, options):
    trainer = make_trainer(tmp_path, prepare_model(make_model()), make_trees(2), **options)
    with pytest.raises(ValueError, match="`loss_weights` but no `labels`"):
        trainer.evaluate()


class DropsWeights:
    dropped = ("loss_weights",)

    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {n: x for n, x in inputs.items() if n not in self.dropped}, *args, **kwargs)


class DropsLabels(DropsWeights):
    dropped = ("labels", "loss_weights")


class DropsBranches(DropsWeights):
    dropped = ("token_branches",)


class OwnLogits(OwnLoss):
    def compute_loss(self, model, inputs, *args, **kwargs):
        return super().compute_loss(model, {n: x for n, x in inputs.items() if n != "loss_weights"}, *args, **kwargs)


@pytest.mark.parametrize("override", [DropsWeights, DropsLabels, DropsBranches, OwnLogits])
@pytest.mark.parametrize("trainer", ["Trainer", "SFTTrainer"])
def test_an_override_that_takes_keys_out_of_a_batch_is_refused(tmp_path, override, trainer):
    bases = (override, TreeLossMixin, Trainer)
    if trainer == "SFTTrainer":
        own = type("Own", (override, TreeSFTTrainer), {})
        args = config(
            tmp_path, per_device_train_batch_size=4, max_steps=1, dataset_kwargs={"skip_prepare_dataset": True}
        )
        made = own(
            model=make_model(), args=args, train_dataset=tree_dataset(make_trees(4)), processing_class=tokenizer()
        )
    else:
        made = make_trainer(tmp_path, make_model(), make_trees(2), type("Own", bases, {}))
    message = r"computes the loss by itself" if override is OwnLogits else f"A batch has no .*`{override.dropped[-1]}`"
    with pytest.raises(ValueError, match=message):
        made.train()


# ---- NEFTune ----


def test_neftune_is_refused(tmp_path):
    model, trees = prepare_model(make_model()), make_trees(2)
    with pytest.raises(ValueError, match=r"`neftune_noise_alpha=5\.0`"):
        make_trainer(tmp_path, model, trees, neftune_noise_alpha=5.0).train()


def test_neftune_without_noise_is_exact(tmp_path):
    trees = make_trees(2)
    assert_equals_branches(make_trainer(tmp_path, prepare_model(make_model()), trees, neftune_noise_alpha=0.0), trees)


# ---- heads that return no logits ----


@pytest.mark.parametrize("evaluates", [False, True])
def test_stock_sft_trainer_is_refused(tmp_path, evaluates):
    trees = make_trees(4)
    args = config(
        tmp_path, SFTConfig, per_device_train_batch_size=4, learning_rate=0.0, remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    trainer = SFTTrainer(
        model=prepare_model(make_model()),
        args=args,
        train_dataset=tree_dataset(trees),
        eval_dataset=tree_dataset(trees),
        data_collator=DataCollatorForPrefixTree(pad_token_id=0),
        processing_class=tokenizer(),
    )
    with pytest.raises(ValueError, match="no logits"):
        trainer.evaluate() if evaluates else trainer.train()


def liger_forward(self, input_ids=None, labels=None, shift_labels=None, num_items_in_batch=None, **kwargs):
    """As Liger's: in training a kernel takes hidden states and labels, and there are no logits."""
    logits = self.lm_head(self.model(input_ids=input_ids, **kwargs).last_hidden_state)
    if not self.training:
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits, labels, self.config.vocab_size, num_items_in_batch, shift_labels=shift_labels
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits)
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = torch.nn.functional.cross_entropy(logits[0], shift_labels[0], reduction=reduction)
    return CausalLMOutputWithPast(loss=loss if num_items_in_batch is None else loss / num_items_in_batch)


@pytest.mark.parametrize("trainer_class", [PlainTrainer, MixedTrainer])
def test_a_fused_loss_is_refused(tmp_path, trainer_class):
    model, trees = prepare_model(make_model()), make_trees(2)
    trainer = make_trainer(tmp_path, model, trees, trainer_class)
    model.forward = types.MethodType(liger_forward, model)
    with pytest.raises(ValueError, match="`use_liger_kernel=False`"):
        trainer.train()
    del model.forward
    assert_equals_branches(make_trainer(tmp_path, model, trees, trainer_class), trees)


# ---- values that no trainer can use ----


@pytest.mark.parametrize(
    ("name", "value"),
    [("train_sampling_strategy", "x"), ("per_device_train_batch_size", 0), ("per_device_eval_batch_size", -1)],
)
def test_impossible_options_are_refused(tmp_path, name, value):
    with pytest.raises(ValueError, match=rf"`{name}` .*{value}"):
        make_trainer(tmp_path, make_model(), make_trees(2), MixedTrainer, **{name: value})


def test_no_model_is_refused():
    with pytest.raises(ValueError, match="`model` is None: pass a causal LM"):
        TreeSFTTrainer(model=None)
