"""Options and arguments of `TreeSFTTrainer`: choices, limits, and what goes with what."""

import contextlib
import dataclasses
import functools
import inspect
import warnings

import pytest
import torch
from datasets import Dataset, IterableDataset
from peft import LoraConfig, PrefixTuningConfig
from trl import SFTConfig

from hf_prefix_tree import DataCollatorForPrefixTree, TreeSFTConfig, TreeSFTTrainer, prepare_trees
from hf_prefix_tree.sft.config import PREPARATION
from tests.support.tokenizer import tokenizer
from tests.support.trainer_runs import config, make_model, make_trees, tree_dataset


@pytest.mark.parametrize("name", ["weighting", "reasoning", "overlong", "on_error", "attn_backend"])
def test_own_options_name_their_choices(tmp_path, name):
    with pytest.raises(ValueError, match=rf"`{name}`.*'other'"):
        TreeSFTConfig(str(tmp_path), use_cpu=True, bf16=False, **{name: "other"})


@pytest.mark.parametrize("name", ["max_packed_tokens", "selection_num_proc", "max_examples", "max_length"])
def test_limits_are_integers(tmp_path, name):
    for wrong in ("100", 0.5, 0):
        with pytest.raises(ValueError, match=rf"`{name}`.*{wrong!r}"):
            config(tmp_path, **{name: wrong})


def test_defaults():
    made = TreeSFTConfig("x", use_cpu=True, bf16=False)
    assert made.max_length is None
    assert made.per_device_train_batch_size == 1 and made.per_device_eval_batch_size == 1


@pytest.mark.parametrize("name", ["per_device_train_batch_size", "per_device_eval_batch_size"])
def test_a_packed_row_is_a_batch_by_itself(tmp_path, name):
    with pytest.raises(ValueError, match=rf"`{name}=2`.*`max_packed_tokens=9`"):
        config(tmp_path, max_packed_tokens=9, **{name: 2})
    config(tmp_path, max_packed_tokens=9, pack_trees=False, **{name: 2})
    config(tmp_path, max_packed_tokens=9)


SKIP = {"dataset_kwargs": {"skip_prepare_dataset": True}}
# One value of each option of the preparation that is not the default.
PREPARATION_VALUES = {
    "reasoning": "keep",
    "chat_template_kwargs": {"enable_thinking": True},
    "empty_thinking_in_prompt": False,
    "stop_token_ids": [9],
    "column_names": {"messages": "conversation"},
    "group_by": "group",
    "max_length": 9,
    "overlong": "drop",
    "on_error": "skip",
    "max_packed_tokens": 9,
    "overflow": "drop",
    "pack_trees": False,
    "selection_metric": "token_ratio",
    "selection_num_proc": 2,
    "max_examples": 9,
    "shuffle_dataset": True,
}


@pytest.mark.parametrize("name", PREPARATION_VALUES)
def test_options_of_a_preparation_that_is_skipped(tmp_path, name):
    given = {name: PREPARATION_VALUES[name]}
    with pytest.raises(ValueError, match=rf"`{name}=[^`]+`.*skip_prepare_dataset"):
        config(tmp_path, **SKIP, **given)
    given |= {"max_examples": 9} if name == "selection_metric" else {}
    config(tmp_path, **given)
    config(tmp_path, dataset_kwargs={"skip_prepare_dataset": False}, **given)


def test_all_options_of_the_preparation_are_named_when_it_is_skipped(tmp_path):
    assert set(PREPARATION) == set(PREPARATION_VALUES)
    known = {*inspect.signature(prepare_trees).parameters, "shuffle_dataset"}
    own = {field.name for field in dataclasses.fields(TreeSFTConfig)} & known - {"weighting"}  # the collator weights
    assert own == set(PREPARATION)
    with pytest.raises(ValueError, match=r"`max_length=4`.*`max_examples=1`"):
        config(tmp_path, max_length=4, max_examples=1, **SKIP)
    config(tmp_path, weighting="branch", **SKIP)


def test_dictionaries_come_as_json_too(tmp_path):
    made = config(tmp_path, column_names='{"messages": "talk"}', chat_template_kwargs='{"enable_thinking": false}')
    assert made.column_names == {"messages": "talk"} and made.chat_template_kwargs == {"enable_thinking": False}
    with pytest.raises(ValueError, match=r"`column_names`.*`dict`.*'messages=talk'"):
        config(tmp_path, column_names="messages=talk")


def trainer(folder, **kwargs):
    options = {"train_dataset": tree_dataset(make_trees(2)), "processing_class": tokenizer(), **kwargs}
    return TreeSFTTrainer(model=options.pop("model", None) or make_model(), args=config(folder), **options)


def test_refused_arguments(tmp_path):
    with pytest.raises(ValueError, match="`compute_loss_func`"):
        trainer(tmp_path, compute_loss_func=lambda *args: None)


def test_refused_pieces(tmp_path):
    with pytest.raises(ValueError, match=r"`data_collator`.*`DataCollatorForPrefixTree`.*`function`"):
        trainer(tmp_path, data_collator=lambda features: {})
    with pytest.raises(ValueError, match=r"`args`.*`TreeSFTConfig`.*`SFTConfig`"):
        TreeSFTTrainer(model=make_model(), args=SFTConfig(str(tmp_path), use_cpu=True, bf16=False))
    with pytest.raises(ValueError, match="virtual tokens"):
        trainer(tmp_path, peft_config=PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="attention_dropout"):
        model = make_model()
        model.config.attention_dropout = 0.1
        trainer(tmp_path, model=model)
    with pytest.raises(ValueError, match=r"vision|image"):
        trainer(tmp_path, train_dataset=Dataset.from_list([{"messages": [], "images": [0]}]))


def test_datasets_that_cannot_be_are_named(tmp_path):
    with pytest.raises(ValueError, match="`train_dataset`"):
        trainer(tmp_path, train_dataset=Dataset.from_list([]))
    with pytest.raises(ValueError, match=r"'eval'.*`completions`"):
        trainer(tmp_path, eval_dataset=Dataset.from_list([{"prompt_ids": [3, 4], "completions": []}]))


def test_packed_rows_that_are_glued_together_are_told(tmp_path, caplog):
    rows = prepare_trees(tree_dataset(make_trees(4)), max_packed_tokens=400)
    assert max(map(len, rows["tree_ids"])) > 1
    for size in (1, 2):
        assert "`per_device_train_batch_size=" not in caplog.text
        args = config(tmp_path, per_device_train_batch_size=size)
        options = {"train_dataset": rows, "processing_class": tokenizer()}
        TreeSFTTrainer(model=make_model(), args=args, **options).get_train_dataloader()
    assert "`per_device_train_batch_size=2`" in caplog.text


def test_dropout_warns(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, peft_config=LoraConfig(target_modules=["q_proj"], lora_dropout=0.1, task_type="CAUSAL_LM"))
    assert sum("one mask for all its branches" in str(warning.message) for warning in caught) == 1


def test_padding_token_and_multiple(tmp_path):
    made = trainer(tmp_path)
    assert made.data_collator.pad_token_id == 0 and made.data_collator.pad_to_multiple_of == 128
    batch = next(iter(made.get_train_dataloader()))
    assert batch["input_ids"].shape[1] % 128 == 0 and torch.equal(
        batch["attention_mask"] == 0, batch["input_ids"] == 0
    )


@pytest.mark.parametrize(("name", "given"), [("weighting", "branch"), ("pad_to_multiple_of", 256)])
def test_a_collator_that_says_otherwise(tmp_path, name, given):
    collator = DataCollatorForPrefixTree(0)
    options = {"model": make_model(), "train_dataset": tree_dataset(make_trees(1)), "processing_class": tokenizer()}
    with pytest.raises(ValueError, match=rf"`data_collator`.*`{name}=.*{given!r}"):
        TreeSFTTrainer(args=config(tmp_path, **{name: given}), data_collator=collator, **options)
    same = DataCollatorForPrefixTree(0, **{name: given})
    TreeSFTTrainer(args=config(tmp_path, **{name: given}), data_collator=same, **options)


def without_columns(dataset):
    return IterableDataset.from_generator(functools.partial(iter, list(dataset)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("stream", [None, "of known columns", "of unknown columns"])
def test_trees_of_another_weighting_that_are_taken_as_they_are(tmp_path, packed, stream):
    trees = tree_dataset(make_trees(2))
    dataset = prepare_trees(trees, max_packed_tokens=10_000) if packed else trees
    if stream is not None:
        stream_of = {"of known columns": Dataset.to_iterable_dataset, "of unknown columns": without_columns}[stream]
        assert len(list(prepare_trees(stream_of(dataset)))) == len(dataset)
        # whole trees are weighted anew
        with pytest.raises(ValueError, match=r"`weighting`.*'branch'") if packed else contextlib.nullcontext():
            list(prepare_trees(stream_of(dataset), weighting="branch"))
        # a stream keeps no parts of trees together
        dataset = stream_of(dataset.remove_columns(["tree_ids", "num_parts"]) if packed else dataset)
    trainer = TreeSFTTrainer(
        model=make_model(),
        args=config(tmp_path, **SKIP, weighting="branch"),
        train_dataset=dataset,
        processing_class=tokenizer(),
    )
    with pytest.raises(ValueError, match=r"`weighting`.*'branch'.*`dataset`.*'tree'"):
        trainer.train()
