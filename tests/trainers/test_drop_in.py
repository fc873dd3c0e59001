"""Options of TRL's `SFTTrainer` that `TreeSFTTrainer` takes, too: the same numbers where they mean the same."""

import copy
import logging

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from hf_prefix_tree import Branch, PrefixTree, TreeSFTConfig, TreeSFTTrainer, fold
from tests.support.models import CONFIGS
from tests.support.trainer_runs import config, distance, make_model, tree_dataset, weights
from tests.support.trainer_runs import tokenizer as words_tokenizer

# Nothing of an earlier turn is dropped, and the assistant's text is marked: what is sampled is what stock trains on.
TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}
{%- else %}{{ message.content }}<|im_end|>{% endif %}
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QUESTIONS = ["Is it sunny in Rome?", "What is 2 + 3?", "Is it sunny?"]
CONVERSATIONS = [
    {"messages": [{"role": role, "content": text} for text in (question, "And now?") for role, text in turn(text)]}
    for question in QUESTIONS
    for turn in [lambda text: (("user", text), ("assistant", f"Yes: {text[::-1]}"))]
]
COMPLETIONS = [{"prompt": question, "completion": f" It is {i}."} for i, question in enumerate(QUESTIONS)]
PAIRS = [{"question": row["prompt"], "answer": row["completion"]} for row in COMPLETIONS]
TEXTS = [{"text": f"{question} It is {i}."} for i, question in enumerate(QUESTIONS)]


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def model_for(tokenizer, dtype=torch.float32):
    torch.manual_seed(0)
    model_config = copy.deepcopy(CONFIGS["qwen3"])
    model_config.vocab_size, model_config.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    return AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation="sdpa")


def step_of(folder, rows, tokenizer, trainer_class, options, **arguments):
    """One step over all rows: the trainer, its loss, and the weights after it."""
    config_class = TreeSFTConfig if trainer_class is TreeSFTTrainer else SFTConfig
    trainer = trainer_class(
        model_for(tokenizer),
        config(folder, config_class, learning_rate=0.1, **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        **arguments,
    )
    trainer.train()
    return trainer, trainer.state.log_history[0]["loss"], weights(trainer.model)


def assert_same_step(folder, rows, tokenizer, options=None, arguments=None, accumulation=None):
    """TRL's trainer and `TreeSFTTrainer` with the same options take the same step; returns the latter."""
    options, arguments = options or {}, arguments or {}
    size = {"per_device_train_batch_size": len(rows)}
    if accumulation is not None:
        size = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation}
    _, expected, end = step_of(folder, rows, tokenizer, SFTTrainer, {**size, **options}, **arguments)
    trainer, loss, got = step_of(
        folder, rows, tokenizer, TreeSFTTrainer, {**size, "weighting": "branch", **options}, **arguments
    )
    assert loss == pytest.approx(expected, rel=1e-6)
    assert distance(got, end, weights(model_for(tokenizer))) < 1e-5
    return trainer


def test_assistant_only_loss(tmp_path, tokenizer, caplog):
    with caplog.at_level(logging.WARNING, "hf_prefix_tree"):
        assert_same_step(tmp_path, CONVERSATIONS, tokenizer, {"assistant_only_loss": True})
    (line,) = (record.getMessage() for record in caplog.records if "assistant_only_loss" in record.getMessage())
    targets = sum(
        len(tokenizer.encode(f"{message['content']}<|im_end|>"))
        for row in CONVERSATIONS
        for message in row["messages"]
        if message["role"] == "assistant"
    )
    assert f"first 3 dataset rows, trees train on {targets} tokens of 6 branches" in line
    assert f"TRL on {targets} tokens of 3 sequences, which start with 6 of the 6 contexts" in line


def test_contexts_that_stock_training_lacks_are_counted(tmp_path, tiny_tokenizer, caplog):
    import trl.chat_template_utils as templates

    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.chat_template = templates.qwen3_chat_template
    turns = [("user", "Sunny?"), ("assistant", "<think>\nMaybe.\n</think>\n\nYes."), ("user", "Hot?")]
    turns += [("assistant", "<think>\nNo.\n</think>\n\nNo.")]
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    with caplog.at_level(logging.WARNING, "hf_prefix_tree"):
        step_of(tmp_path, rows, tokenizer, TreeSFTTrainer, {"assistant_only_loss": True})
    # The training template keeps the first turn's reasoning, which the second turn was sampled without.
    assert "tokens of 2 branches" in caplog.text and "start with 1 of the 2 contexts" in caplog.text


def test_assistant_only_loss_needs_no_training_template(tmp_path, tiny_tokenizer, caplog):
    with caplog.at_level(logging.WARNING, "hf_prefix_tree"):
        trainer, loss, _ = step_of(
            tmp_path, CONVERSATIONS, tiny_tokenizer, TreeSFTTrainer, {"assistant_only_loss": True}
        )
    assert loss == step_of(tmp_path, CONVERSATIONS, tiny_tokenizer, TreeSFTTrainer, {})[1]
    assert "can't be compared with TRL" in caplog.text and trainer.args.assistant_only_loss
    with pytest.raises(ValueError, match="`assistant_only_loss=True`"):
        step_of(tmp_path, TEXTS, tiny_tokenizer, TreeSFTTrainer, {"assistant_only_loss": True})
    with pytest.raises(ValueError, match=r"`assistant_only_loss=True`.*`skip_prepare_dataset`"):
        step_of(
            tmp_path, [fold(BRANCHES[0]).to_dict()], tiny_tokenizer, TreeSFTTrainer,
            {"assistant_only_loss": True, "dataset_kwargs": {"skip_prepare_dataset": True}},
        )  # fmt: skip


def test_completion_only_loss(tmp_path, tokenizer, caplog):
    with caplog.at_level(logging.WARNING, "hf_prefix_tree"):
        assert_same_step(tmp_path, COMPLETIONS, tokenizer, {"completion_only_loss": True})
    targets = sum(len(tokenizer.encode(f"{row['completion']}{tokenizer.eos_token}")) for row in COMPLETIONS)
    assert f"trees train on {targets} tokens of 3 branches, TRL on {targets} tokens of 3 sequences" in caplog.text
    # Of a conversation TRL trains on everything then, and under False on the prompts.
    for rows, value in ((CONVERSATIONS, True), (CONVERSATIONS, False), (COMPLETIONS, False)):
        with pytest.raises(ValueError, match=f"`completion_only_loss={value}`"):
            step_of(tmp_path, rows, tokenizer, TreeSFTTrainer, {"completion_only_loss": value})


def formatted(row):
    return row["question"] + row["answer"]


@pytest.mark.parametrize(
    ("rows", "options", "arguments"),
    [
        (TEXTS, {}, {}),
        ([{"body": row["text"], "source": "x"} for row in TEXTS], {"dataset_text_field": "body"}, {}),
        (PAIRS, {"completion_only_loss": False}, {"formatting_func": formatted}),
    ],
)
def test_texts(tmp_path, tokenizer, rows, options, arguments):
    assert_same_step(tmp_path, rows, tokenizer, options, arguments)


def test_texts_of_a_group_are_one_tree(tmp_path, tokenizer):
    rows = [{"question": "Is it sunny?", "answer": f" {i}", "task": i // 2} for i in range(4)]
    options = {"group_by": "task", "max_steps": 1, "weighting": "branch", "per_device_train_batch_size": 2}
    trainer, _, _ = step_of(tmp_path, rows, tokenizer, TreeSFTTrainer, options, formatting_func=formatted)
    assert [tree["num_branches"] for tree in trainer.train_dataset] == [2, 2]
    texts = [
        tokenizer.decode(branch.input_ids) for branch in PrefixTree.from_dict(trainer.train_dataset[0]).branches()
    ]
    assert texts == [f"Is it sunny? {i}{tokenizer.eos_token}" for i in range(2)]


def test_packing(tmp_path, tokenizer, caplog):
    rows = [{"text": f"{row['text']} {row['text'][:n]}"} for n, row in enumerate(TEXTS * 3)]
    options = {"packing": True, "max_length": 40}
    with caplog.at_level(logging.WARNING, "hf_prefix_tree"):
        trainers = [
            step_of(tmp_path, rows, tokenizer, trainer_class, {**options, **given, "gradient_accumulation_steps": 20})
            for trainer_class, given in ((SFTTrainer, {}), (TreeSFTTrainer, {"weighting": "branch"}))
        ]
    (stock, expected, end), (trainer, loss, got) = trainers
    assert 1 < len(trainer.train_dataset) < len(rows) and 1 < len(stock.train_dataset) < len(rows)
    assert max(sum(len(tree["input_ids"]) for tree in row["trees"]) for row in trainer.train_dataset) <= 40
    assert "`max_packed_tokens=40`" in caplog.text and f"Packed into {len(trainer.train_dataset)} rows" in caplog.text
    assert loss == pytest.approx(expected, rel=1e-6)
    assert distance(got, end, weights(model_for(tokenizer))) < 1e-5


def test_packing_needs_a_length_and_keeps_a_limit(tmp_path):
    with pytest.raises(ValueError, match=r"`packing=True`.*`max_length`"):
        config(tmp_path, packing=True)
    made = config(tmp_path, packing=True, max_length=40, max_packed_tokens=80)
    assert (made.packing, made.max_packed_tokens, made.max_length) == (False, 80, 40)


# ---- metrics on unfolded branches ----


class Collected:
    """A `compute_metrics` that keeps what it is called with; `compute_result` is that of `batch_eval_metrics`."""

    def __init__(self):
        self.calls = []

    def __call__(self, prediction, compute_result=True):
        self.calls.append((prediction.predictions, prediction.label_ids))
        scored = prediction.label_ids[..., 1:] != -100
        return {"scored": int(scored.sum())}


def evaluated(folder, trainer_class, dataset, **arguments):
    """What `compute_metrics` saw in an evaluation, and the metrics."""
    collected = Collected()
    options = arguments.pop("options", {})
    trainer = trainer_class(
        make_model(),
        config(folder, TreeSFTConfig if trainer_class is TreeSFTTrainer else SFTConfig, **options),
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=words_tokenizer(),
        compute_metrics=collected,
        **arguments,
    )
    return collected.calls, trainer.evaluate(), trainer.predict(dataset)


def top(logits, labels):
    return logits.argmax(-1)


BRANCHES = [
    [Branch([5, 6, 7, 8], [0, 0, 1, 1]), Branch([5, 6], [0, 1]), Branch([5, 6, 7, 8], [0, 0, 1, 1])],
    [Branch([9, 3, 4], [0, 1, 1]), Branch([9, 3, 8, 7, 6], [0, 0, 0, 1, 1]), Branch([9, 11], [0, 0])],
    [Branch([9, 3, 4], [0, 1, 1])],
]


@pytest.mark.parametrize("preprocess", [None, top])
@pytest.mark.parametrize("options", [{}, {"per_device_eval_batch_size": 2}, {"batch_eval_metrics": True}])
def test_metrics_are_those_of_the_branches(tmp_path, caplog, preprocess, options):
    trees = [fold(branches, weighting="branch") for branches in BRANCHES]
    arguments = {"preprocess_logits_for_metrics": preprocess}
    calls, metrics, predicted = evaluated(
        tmp_path, TreeSFTTrainer, tree_dataset(trees), options={"weighting": "branch", **options}, **arguments
    )
    rows = [
        {"input_ids": b.input_ids.tolist(), "labels": np.where(b.weights > 0, b.input_ids, -100).tolist()}
        for branches in BRANCHES
        for b in branches
        if b.weights.any()
    ]
    is_whole = "batch_eval_metrics" not in options
    expected, stock, stock_predicted = evaluated(
        tmp_path,
        SFTTrainer,
        Dataset.from_list(rows),
        options={**options, "per_device_eval_batch_size": 1},
        **arguments,
    )
    assert "loss_weights" not in caplog.text
    assert len(rows) == 6 and metrics["eval_scored"] == stock["eval_scored"] > 0
    for got, wanted in [(calls[0], expected[0]), (predicted[:2], stock_predicted[:2])][not is_whole :]:
        (predictions, labels), (stock_predictions, stock_labels) = got, wanted
        np.testing.assert_array_equal(labels, stock_labels)
        assert predictions.shape == stock_predictions.shape
        lengths = np.array([len(row["input_ids"]) for row in rows])[:, None]
        inside = np.arange(labels.shape[1]) < (np.inf if preprocess is None else lengths)  # `top` sees the filler
        inside = np.broadcast_to(inside, labels.shape)
        np.testing.assert_allclose(predictions[inside], stock_predictions[inside], rtol=1e-5, atol=1e-5)
    if preprocess is None and is_whole:
        log_probs = torch.from_numpy(calls[0][0][:, :-1]).double().log_softmax(-1)
        targets = torch.from_numpy(calls[0][1][:, 1:])
        loss = torch.nn.functional.nll_loss(log_probs.transpose(1, 2), targets, ignore_index=-100)
        assert metrics["eval_loss"] == pytest.approx(loss.item(), rel=1e-6)
