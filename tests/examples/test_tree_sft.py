"""`examples/tree_sft.py`: real conversations through its YAML road, its baselines, and every ablation config."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import SFTTrainer

from examples.demo.dialogues import generate_dialogues
from hf_prefix_tree import TreeSFTTrainer, conversation_branches

REPO_ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((REPO_ROOT / "examples" / "ablation").glob("*.yaml"))


def load_script():
    spec = importlib.util.spec_from_file_location("tree_sft", REPO_ROOT / "examples" / "tree_sft.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tree_sft = load_script()


def start(*arguments, config=None):
    """What `python examples/tree_sft.py --config ... arguments` does."""
    arguments = ["--config", config, *arguments] if config is not None else arguments
    return tree_sft.main([str(argument) for argument in arguments])


@pytest.fixture
def model_path(tmp_path):
    def save(vocab_size):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = Qwen3Config(vocab_size=vocab_size, **sizes, num_key_value_heads=1, head_dim=8, initializer_range=0.5)
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
        return tmp_path / "model"

    return save


@pytest.fixture
def shortest_rows(shared_data, tmp_path):
    """`shortest_rows(name, count)`: the shortest conversations of a real file, cut after the second turn."""

    def write(name, count):
        rows = [json.loads(line) for line in shared_data(f"data/{name}.jsonl").read_text().splitlines()]
        rows = sorted(rows, key=lambda row: len(json.dumps(row)))[:count]
        for row in rows:
            turns = [t for t, message in enumerate(row["messages"]) if message["role"] == "assistant"]
            row["messages"] = row["messages"][: turns[1] + 1]
            row["messages"][0]["content"] = row["messages"][0]["content"][:200]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return tmp_path / f"{name}.jsonl"

    return write


@pytest.fixture
def dialogues(tmp_path, tiny_tokenizer):
    """Two generated dialogues with their tools, and the folder of their tokenizer."""
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = generate_dialogues(num_groups=2, trials=1)
    for row in rows:
        row["tools"] = json.dumps(row["tools"])
        row["messages"] = json.dumps(row["messages"])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl", tmp_path / "tokenizer"


def loss_of_branches(model_path, rows_path, tokenizer):
    """The mean over supervised tokens, each turn computed by itself."""
    (row,) = (json.loads(line) for line in Path(rows_path).read_text().splitlines())
    branches = conversation_branches(row["messages"], tokenizer, tools=row.get("tools")).branches
    model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    total = count = 0.0
    for branch in branches:
        ids = torch.from_numpy(branch.input_ids.copy())
        with torch.no_grad():
            log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        weights = torch.from_numpy(branch.weights[1:].copy())
        total -= (log_probs.gather(1, ids[1:, None])[:, 0] * weights).sum().item()
        count += weights.sum().item()
    return total / count


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tau_bench_airline", "conversational_reasoning"])
def test_trains_on_real_conversations_through_a_config(name, shortest_rows, shared_data, model_path, tmp_path):
    config = {
        "model_name_or_path": str(model_path(151_936)),
        "tokenizer_name_or_path": str(shared_data("tokenizers/qwen3")),
        "dataset_name": str(shortest_rows(name, 1)),
        "per_device_train_batch_size": 1,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    trainer = start(config=tmp_path / "config.yaml")
    assert isinstance(trainer, TreeSFTTrainer)
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    tokenizer = AutoTokenizer.from_pretrained(config["tokenizer_name_or_path"])
    assert loss == pytest.approx(loss_of_branches(tmp_path / "model", config["dataset_name"], tokenizer), rel=2e-3)
    assert trainer.train_dataset["num_branches"][:] == [2]
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(("mode", "samples"), [("tree", 1), ("grouped", 1), ("per_branch", 9), ("flat_steps", 5)])
def test_every_mode_has_the_loss_of_the_branches(mode, samples, dialogues, tiny_tokenizer, model_path, tmp_path):
    rows, tokenizer = dialogues
    rows.write_text(rows.read_text().splitlines()[0] + "\n")  # one conversation: then all modes weigh tokens alike
    trainer = start(
        *("--model_name_or_path", model_path(1024), "--tokenizer_name_or_path", tokenizer, "--dataset_name", rows),
        *("--max_steps", 1, "--logging_steps", 1, "--use_cpu", "--bf16", "false", "--output_dir", tmp_path / "out"),
        *("--gradient_accumulation_steps", samples),
        config=REPO_ROOT / "examples" / "ablation" / f"{mode}.yaml",
    )
    assert len(trainer.train_dataset) == samples
    assert isinstance(trainer, TreeSFTTrainer) == (mode in ("tree", "grouped"))
    assert type(trainer) in (TreeSFTTrainer, SFTTrainer)
    assert trainer.args.mode == ("grouped" if mode == "grouped" else "tree")
    (loss,) = (entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert loss == pytest.approx(loss_of_branches(tmp_path / "model", rows, tiny_tokenizer), rel=1e-5)


def table(text):
    """The lines of a printed table of counts."""
    return dict(re.findall(r"│ ([a-zA-Z ]+?) +│ +([\d,.]+) │$", text, re.MULTILINE))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_ablation_config_dry_runs_on_local_data(path, dialogues, tmp_path, capsys):
    config = yaml.safe_load(path.read_text())
    rows, tokenizer = dialogues
    turns = sum(json.loads(line)["messages"].count('"role": "assistant"') for line in rows.read_text().splitlines())
    single_turn = "intellect3" in path.stem
    if single_turn:
        message = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is four."}
        row = {"messages": [{"role": "user", "content": "What is two and two?"}, message]}
        rows = tmp_path / "single.jsonl"
        rows.write_text(json.dumps(row) + "\n")
    overrides = ("--dataset_name", rows, "--tokenizer_name_or_path", tokenizer, "--model_name_or_path", "no/model")
    assert start(*overrides, "--dry_run", "--use_cpu", "--bf16", "false", config=path) is None
    text = capsys.readouterr().out
    counts = table(text)
    branches = int(counts["branches"])
    assert counts["trees"] == ("1" if single_turn else "2") and "0" not in counts.values()
    if config.get("reasoning") == "side_leaf":
        turns = sum(line.count("reasoning_content") + 1 for line in rows.read_text().splitlines())
    assert branches == (2 if config.get("reasoning") == "think_split" else 1 if single_turn else turns)
    selection = {name: (mean, most) for name, mean, most in re.findall(r"│ (.+?) +│ +([\d,.]+) │ +([\d,.]+) │", text)}
    assert [*selection] == ["K", "packed tokens", "longest path", "token ratio", "pair ratio"]
    assert float(selection["K"][0]) == branches / int(counts["trees"])
    assert (selection["longest path"][1], selection["token ratio"][0]) == (
        counts["longest path"],
        counts["token ratio"],
    )
    samples = re.findall(r"Without trees: (\d+) samples of ([\d,]+) tokens", text)
    if config.get("baseline") == "per_branch":
        assert samples == [(str(branches), counts["branch tokens"])]
    elif config.get("baseline") == "flat_steps":
        assert 1 <= int(samples[0][0]) <= branches
    else:
        assert samples == []
    if "intellect5" in path.stem:
        assert counts["selected"] == counts["candidates"] == "2"
        assert (config["max_length"], config["max_packed_tokens"], config["max_examples"]) == (8192, 32768, 64)
        assert (config["selection_metric"], config["max_steps"]) == ("branching_score", 10)
        assert config["reasoning"] == ("per_turn" if config.get("baseline") == "flat_steps" else "side_leaf")
    if single_turn:
        assert (config["max_length"], config["max_steps"]) == (4096, 200)
    if "intellect" in path.stem:  # the published set-up
        assert (config["dtype"], config["learning_rate"], config["lr_scheduler_type"]) == ("float32", 2e-5, "constant")
        assert config["gradient_accumulation_steps"] == (16 if "baseline" in config else 4)
        assert (config["overlong"], config["on_error"], config["overflow"]) == ("raise", "skip", "drop")


def test_there_is_a_config_for_every_mode_layout_and_backend():
    modes = ("tree", "grouped", "per_branch", "flat_steps")
    layouts = [f"{layout}_{mode}_{backend}" for layout in ("intellect3", "intellect5") for mode in modes
               for backend in ("flex", "sdpa")]  # fmt: skip
    assert [path.stem for path in CONFIGS] == sorted([*modes, *layouts])
    for path in CONFIGS:
        config = yaml.safe_load(path.read_text())
        if "_" in path.stem.replace("_branch", "").replace("_steps", ""):
            backend = config.get("attn_backend") or config["attn_implementation"].removesuffix("_attention")
            assert path.stem.endswith(backend)


def test_tools_come_from_a_file_by_group(dialogues, tmp_path, capsys):
    rows, tokenizer = dialogues
    parsed = [json.loads(line) for line in rows.read_text().splitlines()]
    tools = {row["group"]: json.loads(row.pop("tools")) for row in parsed}
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    (tmp_path / "bare.jsonl").write_text("".join(json.dumps(row) + "\n" for row in parsed))
    options = ("--tokenizer_name_or_path", tokenizer, "--model_name_or_path", "no/model", "--output_dir", tmp_path)
    options = (*options, "--dry_run", "--use_cpu", "--bf16", "false", "--dataset_name")
    printed = []
    for own in (
        (rows,),
        (tmp_path / "bare.jsonl", "--tools_file", tmp_path / "tools.json"),
        (tmp_path / "bare.jsonl",),
    ):
        start(*options, *own)
        printed.append(table(capsys.readouterr().out))
    assert printed[0] == printed[1] and printed[1]["tree tokens"] != printed[2]["tree tokens"]
    # by the column that `group_by` names
    desks = tmp_path / "desks.jsonl"
    desks.write_text((tmp_path / "bare.jsonl").read_text().replace('"group":', '"desk":'))
    start(*options, desks, "--tools_file", tmp_path / "tools.json", "--group_by", "desk")
    assert table(capsys.readouterr().out)["tree tokens"] == printed[0]["tree tokens"]
    (tmp_path / "few.json").write_text('{"desk-0": []}')
    (tmp_path / "broken.json").write_text("{")
    for wrong, message in (
        ((desks, "--tools_file", tmp_path / "tools.json"), "'group'.*`group_by`"),
        ((tmp_path / "bare.jsonl", "--tools_file", tmp_path / "few.json"), "tools.*group='desk-1'"),
        ((tmp_path / "bare.jsonl", "--tools_file", tmp_path / "broken.json"), "JSON"),
        ((rows, "--tools_file", tmp_path / "tools.json"), "tools"),
    ):
        with pytest.raises(ValueError, match=message):
            start(*options, *wrong)


def test_columns_can_have_other_names(dialogues, tmp_path, capsys):
    rows, tokenizer = dialogues
    renamed = tmp_path / "renamed.jsonl"
    renamed.write_text(rows.read_text().replace('"messages"', '"conversation"'))
    options = ("--tokenizer_name_or_path", tokenizer, "--model_name_or_path", "no/model", "--output_dir", tmp_path)
    options = (*options, "--dry_run", "--use_cpu", "--bf16", "false", "--dataset_name")
    start(*options, rows)
    expected = capsys.readouterr().out
    start(*options, renamed, "--column_names", '{"messages": "conversation"}')
    assert capsys.readouterr().out == expected and "branches" in expected
    with pytest.raises(ValueError, match="are no known kind of rows"):
        start(*options, renamed)


def test_flat_steps_refuses_other_branches(dialogues, tmp_path):
    rows, tokenizer = dialogues
    options = ("--tokenizer_name_or_path", tokenizer, "--model_name_or_path", "no/model", "--output_dir", tmp_path)
    options = (
        *options,
        "--dry_run",
        "--use_cpu",
        "--bf16",
        "false",
        "--dataset_name",
        rows,
        "--baseline",
        "flat_steps",
    )
    for wrong in (("--reasoning", "keep"), ("--group_by", "group")):
        with pytest.raises(ValueError, match="joins the turns of one conversation"):
            start(*options, *wrong)


def test_a_missing_dataset_is_named(dialogues, tmp_path):
    _, tokenizer = dialogues
    with pytest.raises(ValueError, match="`dataset_name`"):
        start("--tokenizer_name_or_path", tokenizer, "--output_dir", tmp_path, "--dry_run")
