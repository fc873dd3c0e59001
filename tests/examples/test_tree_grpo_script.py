"""`examples/tree_grpo.py`: offline with a tiny model, on real problems, and as stock GRPO."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from trl import GRPOTrainer

from hf_prefix_tree import TreeGRPOTrainer

REPO_ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("tree_grpo", REPO_ROOT / "examples" / "tree_grpo.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tree_grpo = load_script()


def start(folder, *arguments):
    """What `python examples/tree_grpo.py ...` does, for a few short steps on a CPU."""
    sizes = "--num_generations 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_steps 2"
    rest = "--max_completion_length 8 --use_cpu --bf16 False --logging_steps 1 --report_to none --learning_rate 1e-3"
    options = ["--output_dir", str(folder), *sizes.split(), *rest.split(), *map(str, arguments)]
    return tree_grpo.main(options)


def test_offline_run_equals_stock(tmp_path):
    logs = {}
    for kind, options in (("tree", ["--beta", "0.1"]), ("stock", ["--beta", "0.1", "--stock"])):
        trainer = start(tmp_path / kind, *options)
        assert type(trainer) is {"tree": TreeGRPOTrainer, "stock": GRPOTrainer}[kind]
        assert (tmp_path / kind / "model.safetensors").is_file()
        logs[kind] = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs["tree"]) == 2 and any(entry["reward_std"] > 0 for entry in logs["tree"])
    for entry, other in zip(logs["tree"], logs["stock"], strict=True):
        for name in ("loss", "kl", "entropy", "reward", "rewards/states_a_number/mean"):
            assert entry[name] == pytest.approx(other[name], rel=1e-5, abs=1e-6), name


def test_real_problems(shared_data, tmp_path, capsys):
    data, tokenizer = shared_data("data/gsm8k_4policies.jsonl"), shared_data("tokenizers/qwen3")
    trainer = start(
        tmp_path, "--dataset_name", data, "--tokenizer_name_or_path", tokenizer, "--max_row_tokens", "4096"
    )
    assert trainer.max_row_tokens == 4096
    assert "74 of 200 prompts have no right rollout" in capsys.readouterr().out
    rows = trainer.train_dataset
    assert len(rows) == 126
    (answer,) = (row["answer"] for row in rows if "ducks lay 16 eggs per day" in row["prompt"][0]["content"])
    assert answer == 18
    assert trainer.state.log_history[0]["rewards/right_answer/mean"] == 0


def test_rewards():
    completions = [[{"role": "assistant", "content": text}] for text in ("1,234 / 2 = $617.", "A: -5", "none", "2.50")]
    assert tree_grpo.right_answer(completions, answer=[617.0, 5.0, 0.0, 2.5]) == [1.0, 0.0, 0.0, 1.0]
    assert tree_grpo.states_a_number(completions) == [0.2, 0.2, 0.0, 0.2]


def test_questions_and_answers():
    rows = [{"question": "How many?", "answer": "3 + 4 = <<3+4=7>>7\n#### 1,007"}]
    (problem,) = tree_grpo.problems_of(Dataset.from_list(rows))
    assert problem == {"prompt": [{"role": "user", "content": "How many?"}], "answer": 1007.0}
    with pytest.raises(ValueError, match="answer"):
        tree_grpo.problems_of(Dataset.from_list([{"question": "Why?", "answer": "because"}]))
