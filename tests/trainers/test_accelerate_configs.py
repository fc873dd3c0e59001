# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The configs of examples/accelerate: Accelerate reads them, and the example script runs with them unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from examples.demo.dialogues import generate_dialogues

REPO_ROOT = Path(__file__).resolve().parents[2]
CONFIGS = REPO_ROOT / "examples" / "accelerate"
ENGINES = {"single_gpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}


def test_every_config_is_tested():
    assert {file.stem for file in CONFIGS.glob("*.yaml")} == set(ENGINES)


@pytest.mark.parametrize("name", ENGINES)
def test_accelerate_reads_it(tmp_path, name):
    path = CONFIGS / f"{name}.yaml"
    config = load_config_from_file(str(path))  # an unknown key raises
    assert str(config.distributed_type).split(".")[-1] == ENGINES[name] and config.mixed_precision == "bf16"
    if name == "fsdp2":
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"  # `save_pretrained` from every engine
    if name == "zero3":
        assert config.deepspeed_config["zero_stage"] == 3 and config.deepspeed_config["zero3_save_16bit_model"]
    broken = tmp_path / "broken.yaml"
    broken.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "unknown_key": 1}))
    with pytest.raises(ValueError, match="unknown_key"):
        load_config_from_file(str(broken))


@pytest.mark.slow
def test_the_script_runs_on_one_and_two_processes(tmp_path, tiny_tokenizer):
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=1024, **sizes, num_key_value_heads=1, head_dim=8, initializer_range=0.5)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    rows = generate_dialogues(num_groups=4, trials=1)
    texts = [json.dumps({**row, "tools": json.dumps(row["tools"])}) for row in rows]
    (tmp_path / "rows.jsonl").write_text("\n".join(texts) + "\n")
    options = {
        "model_name_or_path": str(tmp_path / "model"),
        "dataset_name": str(tmp_path / "rows.jsonl"),
        "max_steps": 2,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
    }
    # With `--cpu`, `accelerate launch` starts one process whatever the config says.
    single = [str(CONFIGS / "single_gpu.yaml"), "--cpu", "--mixed_precision", "no"]
    launchers = {
        "one": ["accelerate.commands.launch", "--config_file", *single],
        "two": ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--master-port=0"],
    }
    for name, launcher in launchers.items():
        own = {**options, "output_dir": str(tmp_path / name), "gradient_accumulation_steps": 4 if name == "one" else 2}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(own))
        script = [str(REPO_ROOT / "examples" / "tree_sft.py"), "--config", str(tmp_path / f"{name}.yaml")]
        command = [sys.executable, "-m", *launcher, *script]
        done = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPO_ROOT)},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    start, one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "one", "two"))
    moved = sum((one[name] - start[name]).norm().item() for name in one)
    assert moved > 1e-2
    assert sum((one[name] - two[name]).norm().item() for name in one) < 1e-4 * moved
