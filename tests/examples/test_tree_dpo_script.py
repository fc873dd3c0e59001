"""`examples/tree_dpo.py`: its pairs, an offline run against TRL's trainer, and real answers of several policies."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import DPOTrainer

from hf_prefix_tree import TreeDPOTrainer

REPO_ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("tree_dpo", REPO_ROOT / "examples" / "tree_dpo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tree_dpo = load_script()
OPTIONS = [
    *(
        "--use_cpu",
        "--bf16",
        "false",
        "--report_to",
        "none",
        "--logging_steps",
        "1",
        "--learning_rate",
        "0.3",
        "--optim",
        "sgd",
    ),
    *("--train_sampling_strategy", "sequential", "--per_device_train_batch_size", "4", "--disable_tqdm", "true"),
]


def start(folder, *arguments):
    """What `python examples/tree_dpo.py arguments` does; the trainer and the losses that it logged."""
    arguments = [*OPTIONS, "--output_dir", folder, *arguments]
    trainer = tree_dpo.main([str(argument) for argument in arguments])
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def row(group, reward, answer="a", question="q"):
    return {
        "group": group,
        "reward": reward,
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
    }


def texts(pairs):
    return [(p["prompt"][0]["content"], p["chosen"][0]["content"], p["rejected"][0]["content"]) for p in pairs]


def test_pairs_are_a_better_and_a_worse_answer_to_one_prompt():
    rows = [row(1, 1.0, "good"), row(2, 0.5, "x", "r"), row(1, 0.0, "bad"), row(1, 0.5, "fair"), row(2, 0.5, "y", "r")]
    pairs = tree_dpo.pairs_of(Dataset.from_list(rows), max_pairs_per_prompt=4)
    assert texts(pairs) == [("q", "good", "bad"), ("q", "good", "fair"), ("q", "fair", "bad")]
    assert texts(tree_dpo.pairs_of(Dataset.from_list(rows), max_pairs_per_prompt=2)) == texts(pairs)[:2]
    with pytest.raises(ValueError, match="pairs"):
        tree_dpo.pairs_of(Dataset.from_list(rows[1:2]), max_pairs_per_prompt=4)
    with pytest.raises(ValueError, match=r"`group`.*1"):
        tree_dpo.pairs_of(Dataset.from_list([row(1, 1.0), row(1, 0.0, question="other")]), max_pairs_per_prompt=4)


def test_the_invented_answers_are_right_and_wrong():
    for example in tree_dpo.invented_rows():
        question, answer = (message["content"] for message in example["messages"])
        a, b, c = (int(word) for word in question.split() if word.isdigit())
        assert (int(answer.rsplit("A: ")[1]) == a + b - c) == (example["reward"] == 1.0)


def test_offline_run_is_that_of_trls_trainer(tmp_path):
    tree, losses = start(tmp_path / "tree", "--max_steps", "3")
    stock, expected = start(tmp_path / "stock", "--max_steps", "3", "--stock")
    assert isinstance(tree, TreeDPOTrainer) and type(stock) is DPOTrainer
    assert losses == pytest.approx(expected, abs=1e-6) and len(losses) == 3
    assert len({round(loss, 4) for loss in losses}) == 3
    saved = Qwen3ForCausalLM.from_pretrained(tmp_path / "tree")
    for name, parameter in stock.model.named_parameters():
        assert (saved.get_parameter(name) - parameter).abs().max() < 1e-5


def test_real_answers_and_a_saved_model_with_lora(tmp_path, shared_data, tiny_tokenizer):
    lines = shared_data("data/gsm8k_4policies.jsonl").read_text().splitlines()[:40]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    config = Qwen3Config(
        vocab_size=len(tiny_tokenizer),
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.5},
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "rows.jsonl"]
    arguments += ["--max_steps", "2", "--use_peft", "--lora_target_modules", "q_proj", "v_proj"]
    (tree, losses), (stock, expected) = (start(tmp_path / "out", *arguments, *kind) for kind in ([], ["--stock"]))
    # the second loss is one of log-probs that sum to thousands
    assert losses == pytest.approx(expected, abs=1e-5) and abs(losses[0] - losses[1]) > 1e-2
    assert isinstance(tree, TreeDPOTrainer) and len(tree.train_dataset) > 10
    logps = [trainer.state.log_history[1]["logps/chosen"] for trainer in (tree, stock)]
    assert logps[0] == pytest.approx(logps[1], rel=1e-5) and logps[0] < -100
