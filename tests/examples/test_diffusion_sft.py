"""`examples/diffusion_sft.py`: the tiny model learns its sentences and completes prompts that it never saw."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

REPO_ROOT = Path(__file__).resolve().parents[2]


def load_script():
    spec = importlib.util.spec_from_file_location("diffusion_sft", REPO_ROOT / "examples" / "diffusion_sft.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


diffusion_sft = load_script()


def start(*options):
    """What `python examples/diffusion_sft.py options` does."""
    return diffusion_sft.main([str(option) for option in (*options, "--use_cpu")])


@pytest.mark.slow
@pytest.mark.parametrize(("objective", "steps"), [("block", 100), ("mdlm", 150)])
def test_the_demo_learns_and_completes_held_out_prompts(objective, steps, tmp_path, capsys):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        trainer = start(
            *("--objective", objective, "--output_dir", tmp_path, "--num_prompts", 16, "--max_steps", steps),
            *("--eval_steps", steps, "--eval_noise_draws", 8),
        )
        (bound,) = (log["eval_nll_bound"] for log in trainer.state.log_history if "eval_nll_bound" in log)
        entropy = diffusion_sft.unigram_entropy(trainer)
        completions = diffusion_sft.complete(trainer, 32, 8)
    finally:
        torch.set_num_threads(threads)
    assert 2 < entropy < 3  # of sentences with two names out of twelve and a verb out of five
    assert bound < entropy / 2
    right = [text == reference for _, reference, text in completions]
    assert sum(right) >= 30
    train_rows, test_rows = diffusion_sft.demo_rows()
    assert not {row["prompt"] for row in train_rows} & {row["prompt"] for row in test_rows}
    assert {prompt for prompt, _, _ in completions} <= {row["prompt"] for row in test_rows}
    printed = capsys.readouterr().out
    assert f"NLL bound {bound:.3f}, unigram entropy {entropy:.3f}" in printed
    assert len(re.findall(r"\w+ is \w+ by \w+\.", printed)) >= 2 * 15  # reference and completion


def test_a_model_and_a_file_of_rows(tmp_path):
    train_rows, _ = diffusion_sft.demo_rows()
    tokenizer = diffusion_sft.demo_tokenizer(train_rows)
    tokenizer.mask_token = None  # the script adds one
    tokenizer.save_pretrained(tmp_path / "model")
    config = Qwen3Config(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    messages = [{"role": "user", "content": "Anna calls Ben."}, {"role": "assistant", "content": "Ben is called."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    trainer = start(
        *("--model_name_or_path", tmp_path / "model", "--dataset_name", tmp_path / "rows.jsonl"),
        *("--objective", "hybrid", "--block_size", 4, "--max_steps", 1, "--bf16", "false", "--report_to", "none"),
        *("--use_peft", "--output_dir", tmp_path / "out"),
    )
    assert trainer.args.learning_rate == 2e-5  # the demo's settings are the demo's
    assert trainer.mask_token_id == trainer.processing_class.mask_token_id
    assert trainer.model.get_input_embeddings().num_embeddings == len(trainer.processing_class)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
