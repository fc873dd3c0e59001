"""`hf-prefix-tree train`: its methods on TRL's column layouts, its options, and what it refuses."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import hf_prefix_tree
from hf_prefix_tree.cli.train import METHODS, parse, run

NUMBERS = [f"{number} + 2 =" for number in range(4)]
ROWS = {
    "dpo": [{"prompt": text, "chosen": " 4", "rejected": " 5"} for text in NUMBERS],
    "kto": [{"prompt": text, "completion": f" {i}", "label": i == 0} for text in NUMBERS for i in range(2)],
    "grpo": [{"prompt": text} for text in NUMBERS],
    "rloo": [{"prompt": text} for text in NUMBERS],
    "sft": [{"prompt": text, "completions": [" 4", " 5"]} for text in NUMBERS],
    "diffusion": [{"prompt": text, "completion": " 4"} for text in NUMBERS],
    "eagle3": [{"prompt": text, "completion": " 4 5 6"} for text in NUMBERS],
}
OPTIONS = {
    "dpo": ["--per_device_train_batch_size", "2", "--overflow", "stream", "--max_row_tokens", "4"],
    "kto": ["--per_device_train_batch_size", "4", "--min_reuse", "1.0"],
    "grpo": ["--reward_funcs", "tests.cli.test_train.reward", "--max_row_tokens", "4096", "--min_reuse", "1.0"],
    "rloo": ["--reward_funcs", "tests.cli.test_train.reward", "--max_row_tokens", "4096", "--min_reuse", "1.0"],
    "eagle3": ["--seq_length", "64", "--ttt_steps", "2", "--draft_vocab_size", "64"],
}
GENERATION = ["--num_generations", "2", "--max_completion_length", "4", "--per_device_train_batch_size", "2"]


def reward(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory, tiny_tokenizer):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 7, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    config = Qwen3Config(vocab_size=len(tiny_tokenizer), **sizes, **heads)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


def words(method, model_path, tmp_path, rows=None):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS[method]))
    common = ["--model_name_or_path", model_path, "--dataset_name", tmp_path / "rows.jsonl", "--max_steps", 1]
    common += ["--output_dir", tmp_path / "out", "--report_to", "none", "--logging_steps", 1, "--use_cpu"]
    generation = GENERATION if method in ("grpo", "rloo") else []
    return [str(word) for word in [*common, *generation, *OPTIONS.get(method, [])]]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_on_the_columns_that_trl_takes(method, model_path, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "hf_prefix_tree"):
        trainer = run(method, *parse(method, words(method, model_path, tmp_path)))
    assert ("bf16 is off" in caplog.text) != torch.accelerator.is_available()
    assert type(trainer) is getattr(hf_prefix_tree, METHODS[method].trainer)
    (log,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert log["loss"] == log["loss"] and (tmp_path / "out" / "model.safetensors").is_file()
    if method not in ("diffusion", "eagle3"):
        assert log["tree/token_ratio"] > 1
    if method in ("grpo", "rloo"):
        assert (trainer.max_row_tokens, trainer.min_reuse) == (4096, 1.0)
    if method == "dpo":
        assert (trainer.max_row_tokens, trainer.overflow) == (4, "stream")


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("sft", ["--trust_remote_code", "true", "--model_revision", "v2"]),
        ("eagle3", ["--target_model_init_kwargs", '{"trust_remote_code": true, "revision": "v2"}']),
    ],
)
def test_the_tokenizer_is_loaded_as_the_model_is(method, options, model_path, tmp_path, monkeypatch):
    seen, load = [], AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name, **kw: seen.append(kw) or load(name, **kw))
    options = [*words(method, model_path, tmp_path), *options, "--dry_run"]
    run(method, *parse(method, options))
    run(method, *parse(method, [*options, "--tokenizer_name_or_path", str(model_path)]))
    assert seen[0] | {"gguf_file": None} == {"trust_remote_code": True, "revision": "v2", "gguf_file": None}
    assert seen[1] == {"trust_remote_code": True}  # another tokenizer has other revisions


@pytest.mark.parametrize(
    ("rows", "options", "expected"),
    [
        ("dpo", ["--dry_run"], "SFT would imitate both"),
        ("dpo", ["--baseline", "per_branch"], "SFT would imitate both"),
        ("sft", ["--dry_run", "--chat_template_path", "chat.jinja"], r"`chat_template_path='chat.jinja'`"),
        ("sft", ["--baseline", "per_branch", "--eos_token", "<|im_end|>"], r"`eos_token='<\|im_end\|>'`"),
    ],
)
def test_what_trees_refuse_or_read_is_not_passed_over(rows, options, expected, model_path, tmp_path):
    with pytest.raises(ValueError, match=expected):
        run("sft", *parse("sft", [*words("sft", model_path, tmp_path, ROWS[rows]), *options]))


def test_a_baseline_is_evaluated_on_all_rows(model_path, tmp_path, capsys):
    options = ["--baseline", "per_branch", "--eval_strategy", "steps", "--eval_steps", "1", "--max_examples", "1"]
    trainer = run("sft", *parse("sft", [*words("sft", model_path, tmp_path), *options]))
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (2, 8)
    capsys.readouterr()
    run("sft", *parse("sft", [*words("sft", model_path, tmp_path), *options, "--dry_run"]))
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("Without trees:")]
    assert [line[2] for line in lines] == ["2", "8"]


def turns(*texts):
    return [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=False)]


@pytest.mark.parametrize(
    ("method", "row"),
    [
        ("sft", {"prompt": turns("2 + 2 ="), "completion": turns("2 + 2 =", "4")[1:]}),
        ("dpo", {"chosen": turns("2 + 2 =", "4"), "rejected": turns("2 + 2 =", "5")}),
        ("kto", {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}),
        ("grpo", {"prompt": turns("2 + 2 =")}),
        ("eagle3", {"messages": turns("2 + 2 =", "4 and nothing else")}),
    ],
)
def test_further_columns_of_trl(method, row, model_path, tmp_path):
    trainer = run(method, *parse(method, words(method, model_path, tmp_path, [row] * 4)))
    (log,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    assert log["loss"] == log["loss"]


def test_the_logged_ratio_is_that_of_the_rows(model_path, tmp_path):
    options = [*words("dpo", model_path, tmp_path), "--per_device_train_batch_size", "4"]
    trainer = run("dpo", *parse("dpo", options))
    (log,) = (entry for entry in trainer.state.log_history if "loss" in entry)
    rows = [
        (*row["prompt_ids"], *row[name]) for row in trainer.train_dataset for name in ("chosen_ids", "rejected_ids")
    ]
    prefixes = {row[:end] for row in rows for end in range(1, len(row) + 1)}
    assert log["tree/tokens"] == len(prefixes)
    assert log["tree/token_ratio"] == sum(map(len, rows)) / len(prefixes)


def test_stock_trains_with_the_trainer_of_trl(model_path, tmp_path):
    trainer = run("kto", *parse("kto", [*words("kto", model_path, tmp_path), "--stock"]))
    assert type(trainer).__module__.startswith("trl.")


def test_bf16_is_off_without_a_gpu(tmp_path):
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert parse("sft", ["--output_dir", str(tmp_path)])[1].bf16 is False
    (tmp_path / "config.yaml").write_text("bf16: true\n")
    assert parse("sft", ["--config", str(tmp_path / "config.yaml"), "--output_dir", str(tmp_path)])[1].bf16 is False
    assert parse("sft", ["--bf16", "true", "--use_cpu", "--output_dir", str(tmp_path)])[1].bf16 is True


@pytest.mark.parametrize("words", [["--chat_template_kwargs", "{"], ["--chat_template_kwargs={"]])
def test_an_option_that_is_no_json_is_named(tmp_path, words):
    with pytest.raises(ValueError, match=r"`--chat_template_kwargs` has '\{'"):
        parse("sft", ["--output_dir", str(tmp_path), *words])


@pytest.mark.parametrize("method", METHODS)
def test_a_dry_run_needs_no_model(method, model_path, tmp_path, capsys):
    options = [*words(method, "no/model", tmp_path), "--dry_run", "--tokenizer_name_or_path", str(model_path)]
    assert run(method, *parse(method, options)) is None
    printed = capsys.readouterr().out
    assert "train" in printed and str(len(ROWS[method])) in printed


def test_what_is_dropped_is_logged(run, model_path, tmp_path, caplog):
    options = [*words("sft", "no/model", tmp_path), "--dry_run", "--tokenizer_name_or_path", model_path]
    with caplog.at_level(logging.WARNING, "hf_prefix_tree"):
        result = run("train", "sft", *options, "--max_length", 8)
    assert result.code == 0 and "truncated" in caplog.text
    assert run("train", "ppo").err.startswith("hf-prefix-tree: `METHOD` is 'ppo'")


@pytest.mark.parametrize(
    ("method", "change", "named"),
    [
        ("grpo", ["--reward_funcs", "no_such_reward"], "reward_funcs"),
        ("eagle3", ["--use_peft"], "use_peft"),
        ("sft", ["--dataset_name", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_wrong_options_are_named(method, change, named, model_path, tmp_path):
    with pytest.raises((ValueError, OSError), match=named):
        run(method, *parse(method, [*words(method, model_path, tmp_path), *change]))


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ValueError, match="`model_name_or_path`"):
        run("sft", *parse("sft", ["--output_dir", str(tmp_path)]))


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match=r"METHOD.*'ppo'"):
        parse("ppo", [])
