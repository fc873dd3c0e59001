"""`hf-prefix-tree`: numbers against trees counted by hand, real files, pictures, one line for wrong inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from hf_prefix_tree import cli, fold, prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.flops import activation_bytes, step_flops
from hf_prefix_tree.report.plot import sampled_mask
from hf_prefix_tree.report.text import console, draw_tree
from hf_prefix_tree.tree.prefix_tree import Branch
from tests.support.models import kept_bytes


def branch(*input_ids):
    return Branch(input_ids, [1] * len(input_ids))


def row(group, *branches):
    return {"group": group, "branches": [{"input_ids": ids, "weights": [1] * len(ids)} for ids in branches]}


# Row by row, the first one forks after two tokens and nothing else is shared.
ROWS = [row("a", [5, 6, 7], [5, 6, 8, 9]), row("b", [1, 2]), row("a", [5, 6, 7, 4])]


def write(path, rows):
    path.write_text("".join(json.dumps(content) + "\n" for content in rows))
    return path


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(*arguments)`: the command in this process; its exit code and what it printed."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["hf-prefix-tree", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_info:
            cli.main()
        captured = capsys.readouterr()
        return SimpleNamespace(code=exit_info.value.code or 0, out=captured.out, err=captured.err)

    return call


@pytest.fixture
def failure(run):
    """`failure(*arguments)`: the one line on standard error of a call that fails."""

    def call(*arguments):
        result = run(*arguments)
        assert result.code == 2 and result.out == ""
        assert result.err.startswith("hf-prefix-tree: ") and result.err.count("\n") == 1
        return result.err.removeprefix("hf-prefix-tree: ").rstrip()

    return call


def model_folder(tmp_path, **changes):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **changes)
    config.save_pretrained(tmp_path / "model")
    return config


def test_counts_per_row_and_per_group_by_hand(run, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    (per_row,) = json.loads(run("inspect", path, "--json").out)["files"]
    assert per_row["groups"][0] == {
        "name": "a",
        "rows": 2,
        "trees": 2,
        "branches": 3,
        "max_branches": 2,
        "branch_tokens": 3 + 4 + 4,
        "tree_tokens": 5 + 4,
        "supervised_tokens": 4 + 3,
        "token_ratio": 11 / 9,
        "pair_ratio": (6 + 10 + 10) / (13 + 10),
        "longest_path": 4,
        "largest_tree": 5,
    }
    assert [group["name"] for group in per_row["groups"]] == ["a", "b"]
    assert per_row["total"]["rows"] == 3 and per_row["total"]["tree_tokens"] == 11
    (grouped,) = json.loads(run("inspect", path, "--group-by", "group", "--json").out)["files"]
    # 5 6 (7 4 | 8 9): the branch 5 6 7 ends inside the third one
    assert (grouped["groups"][0]["trees"], grouped["groups"][0]["tree_tokens"]) == (1, 6)
    assert grouped["losses"] == ""


def test_folded_trees_are_read_back(run, tmp_path):
    tree = fold([branch(5, 6, 7), branch(5, 6, 8, 9)]).to_dict()
    tree = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in tree.items()}
    (file,) = json.loads(run("inspect", write(tmp_path / "trees.jsonl", [tree]), "--json").out)["files"]
    assert (file["total"]["branch_tokens"], file["total"]["tree_tokens"]) == (7, 5)


def test_what_splitting_and_truncating_costs(run, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    (split,) = json.loads(run("inspect", path, "--group-by", "group", "--max-packed-tokens", 4, "--json").out)["files"]
    total = split["total"]
    assert (total["split_trees"], total["parts"], total["duplicated_tokens"]) == (1, 2, 2)
    (cut,) = json.loads(run("inspect", path, "--max-length", 3, "--json").out)["files"]
    assert cut["total"]["longest_path"] == 3
    assert cut["losses"] == "2 branches truncated to `max_length`"
    assert "Some data was dropped or modified: 2 branches truncated" in run("inspect", path, "--max-length", 3).out


def test_comparison_takes_the_top_of_each_file(run, tmp_path):
    first, second = write(tmp_path / "first.jsonl", ROWS), write(tmp_path / "second.jsonl", ROWS[1:])
    result = json.loads(run("inspect", first, second, "--top", 2, "--json").out)
    best = [file["top"] for file in result["files"]]
    assert best[0]["max_pair_ratio"] == 16 / 13 and best[0]["mean_pair_ratio"] == (16 / 13 + 1) / 2
    assert best[0]["mean_branches"] == 1.5
    assert best[1] == dict.fromkeys(best[1], 1.0) | {"trees": 2}
    # after splitting into 5 6 8 9 and 5 6 7, nothing is shared
    result = json.loads(run("inspect", first, "--top", 1, "--max-packed-tokens", 4, "--json").out)
    assert result["files"][0]["top"]["max_pair_ratio"] == 1.0
    text = run("inspect", first, second, "--top", 2).out
    assert "The 2 trees with the highest pair ratio" in text and "1.23" in text


def test_draws_the_tree_that_shares_most(run, tmp_path):
    text = run("inspect", write(tmp_path / "rows.jsonl", ROWS)).out
    assert text.endswith(
        "The tree with the highest pair ratio, 1.23:\n"
        "2 tokens, 2 branches, g 0-2\n"
        "├── 2 tokens, 1 branch, g 1\n"
        "└── 1 token, 1 branch, g 1\n"
    )


def test_drawing_is_cut_and_deep_levels_are_named(capsys):
    tree = fold([branch(*[7] * n, 8) for n in range(30)])
    console().print(draw_tree(tree, max_nodes=25))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 26 and lines[-1] == "... and 33 more nodes"
    assert lines[12][4 * 11 :] == "├── 1 token, 17 branches, g 17"
    assert lines[22][4 * 11 :] == "├── (level 22) 1 token, 7 branches, g 7"


def test_sampled_mask_is_the_mask():
    tree = fold([branch(1, 2, 3), branch(1, 2, 4, 5), branch(9)])
    rows = ["10000", "11000", "11100", "11110", "11001"]
    expected = [[*map(int, line), 0] for line in rows] + [[0] * 5 + [1]]
    assert sampled_mask(tree).astype(int).tolist() == expected
    # 8 = ceil(8000 / 1024): every 8th token
    assert sampled_mask(fold([branch(*[1] * 8000)])).shape == (1000, 1000)


def test_plot_writes_a_picture_with_its_labels(run, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert run("inspect", path, "--plot", tmp_path / "out.png").code == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    ratios, mask = figures[0].axes
    assert ratios.get_title() == "Token ratio of 3 trees"
    assert sum(bar.get_height() for bar in ratios.patches) == 3
    assert mask.get_title() == "Mask: 2 branches, 5 tokens, 1.2x pairs"


def test_plot_without_matplotlib(failure, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = failure("inspect", write(tmp_path / "rows.jsonl", ROWS), "--plot", tmp_path / "out.png")
    assert message == "a plot needs matplotlib; run `pip install 'hf_prefix_tree[viz]'`."


def test_estimate_by_hand(run, tmp_path):
    model_folder(tmp_path)
    path = write(tmp_path / "rows.jsonl", ROWS[:1])
    result = json.loads(run("estimate", path, "--model", tmp_path / "model", "--json").out)
    layer = 16 * (2 * 32 + 2 * 16 + 3 * 24)

    def flops(tokens, supervised, pairs):
        return 6 * (3 * layer * tokens + 16 * 50 * supervised) + 3 * 3.5 * 4 * 32 * pairs

    assert result["tree_tflop"] == pytest.approx(flops(5, 4, 13) / 1e12, rel=1e-12)
    assert result["branch_tflop"] == pytest.approx(flops(7, 5, 16) / 1e12, rel=1e-12)
    assert result["speedup"] == pytest.approx(flops(7, 5, 16) / flops(5, 4, 13), rel=1e-12)
    assert result["pays"] and result["verdict"].startswith("Folding pays: 1.3")
    per_token = 3 * (16 * 16 + 10 * 32 + 10 * 16 + 8 * 24)
    assert result["tree_gib"] == 5 * per_token / 2**30 and result["branch_gib"] == 4 * per_token / 2**30
    assert result["tree_gib_checkpointed"] == 5 * (per_token // 3 + 3 * 2 * 16) / 2**30
    split = json.loads(run("estimate", path, "--model", tmp_path / "model", "--max-packed-tokens", 4, "--json").out)
    assert split["speedup"] == pytest.approx(flops(7, 5, 16) / flops(7, 4, 16), rel=1e-12)
    assert not split["pays"] and split["branch_tflop"] == result["branch_tflop"]
    text = run("estimate", path, "--model", tmp_path / "model").out
    assert "predicted speed-up    1.3" in text and "Assumptions:\n- speed-up: FLOPs of matrix products" in text


def test_experts_that_a_token_is_sent_to_are_counted():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    moe = Qwen3MoeConfig(**sizes, head_dim=8, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=2)
    dense = Qwen3Config(**sizes, head_dim=8, intermediate_size=24, vocab_size=moe.vocab_size)
    assert step_flops(moe, 7, 3, 9) == step_flops(dense, 7, 3, 9)


def test_activation_memory_is_what_a_model_keeps():
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
    )
    from transformers import AutoModelForCausalLM

    model = prepare_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).train()
    batch = concatenate_trees([fold([branch(*[1] * 100, *[n] * 14) for n in range(2, 4)])], pad_token_id=0)
    num_bytes = kept_bytes(model, **{k: v for k, v in batch.items() if k in ("input_ids", "position_ids")})
    assert activation_bytes(config, 128, checkpointing=False) == pytest.approx(num_bytes, rel=0.15)


@pytest.mark.parametrize(
    ("content", "arguments", "message"),
    [
        (None, (), "is no file; pass a JSON Lines file."),
        ("", (), "has no rows; pass a file with at least one."),
        ("\n \n", (), "has no rows"),
        ('{"input_ids": [1, 2]}\n\n{"input_ids": [1,\n', (), "line 3: broken JSON: Expecting value"),
        ('{"input_ids": [1, 2]}\n[1, 2]\n', (), "line 2: a list instead of an object."),
        (b'{"input_ids": "\xff"}\n', (), "row 0: 'utf-8' codec can't decode byte 0xff"),
        ('{"input_ids": [1, 2]}\n{"input_ids": [1, -2]}\n', (), "row 1: `input_ids`"),
        ('{"input_ids": [1, 2]}\n{"labels": [1, 2]}\n', (), "row 1: `input_ids` is missing"),
        (
            '{"input_ids": [1]}\n',
            (),
            "no tree is left of 1 rows: 0 branches (1 branches without a supervised token",
        ),
        ('{"speech": "a"}\n', (), "`dataset` has the columns speech, which are no known kind of rows"),
        ('{"input_ids": [1, 2]}\n', ("--group-by", "task"), "`group_by` is 'task', which is no column"),
        (
            '{"input_ids": [1, 2], "task": 1}\n{"input_ids": [1, 2]}\n',
            ("--group-by", "task"),
            "row 1: `group_by` is 'task', whose value is None",
        ),
        (
            '{"input_ids": [1], "task": [1]}\n',
            ("--group-by", "task"),
            "row 0: `group_by` is 'task', whose value is a",
        ),
        ('{"input_ids": [1, 2]}\n', ("--reasoning", "all"), "`reasoning` is 'all'; pass one of 'per_turn'"),
        ('{"messages": []}\n', (), "`tokenizer` is None, but conversation rows are text"),
        ('{"input_ids": [1, 2]}\n', ("--tokenizer", "no/where"), "`--tokenizer` is 'no/where', which can't be loaded"),
        ('{"input_ids": [1, 2]}\n', ("--tools", "nowhere.json"), "`--tools` is nowhere.json, which is no file"),
        (
            '{"input_ids": [1, 2]}\n',
            ("--max-length", 9, "--max-packed-tokens", 8),
            "`max_length` is 9, above",
        ),
        ('{"input_ids": [1, 2, 3]}\n', ("--max-packed-tokens", 2), "a branch has 3 tokens and can't be split"),
        ('{"input_ids": [1, 2]}\n', ("--plot", "no/folder/out.png"), "No such file or directory"),
    ],
)
def test_wrong_inputs_are_one_line(failure, tmp_path, content, arguments, message):
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    if "--plot" in arguments:
        arguments = ("--json", *arguments)
    assert message in failure("inspect", path, *arguments)


def test_wrong_models_are_one_line(failure, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    assert "`--model` is 'no/where', whose config can't be loaded" in failure("estimate", path, "--model", "no/where")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    assert "`model` is a mamba with layers of type linear_attention, whose FLOPs are not" in failure(
        "estimate", path, "--model", tmp_path
    )


def test_broken_tools_are_one_line(failure, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "tools.json").write_text("[1,")
    assert "which is broken JSON: Expecting value" in failure("inspect", path, "--tools", tmp_path / "tools.json")
    (tmp_path / "tools.json").write_text("7")
    assert "which holds a int; pass a list" in failure("inspect", path, "--tools", tmp_path / "tools.json")


@pytest.mark.slow
def test_the_command_fails_without_a_traceback(tmp_path):
    code = "from hf_prefix_tree.cli import main; main()"
    command = [sys.executable, "-c", code, "inspect", str(tmp_path / "missing.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"hf-prefix-tree: {tmp_path / 'missing.jsonl'} is no file; pass a JSON Lines file.\n"


def test_real_conversations(run, shared_data):
    tokenizer = shared_data("tokenizers/qwen3")
    conversations = shared_data("data/conversational_reasoning.jsonl")
    options = ("--tokenizer", tokenizer, "--tools", shared_data("data/conversational_reasoning.tools.json"))
    (file,) = json.loads(run("inspect", conversations, *options, "--json").out)["files"]
    assert [group["branches"] for group in file["groups"]] == [2, 2, 15]
    assert file["total"]["token_ratio"] > 3
    (kept,) = json.loads(run("inspect", conversations, *options, "--reasoning", "keep", "--json").out)["files"]
    assert kept["total"]["branches"] == 3 and kept["total"]["token_ratio"] == 1.0
    text = run("inspect", conversations, *options).out
    assert "15 branches, g 0  '<|im_start|>system" in text


def test_estimate_says_where_folding_does_not_pay(run, shared_data, tmp_path):
    model_folder(tmp_path)
    long = shared_data("data/long_reasoning_singleturn.jsonl")
    text = run("estimate", long, "--tokenizer", shared_data("tokenizers/qwen3"), "--model", tmp_path / "model").out
    assert "Folding does not pay here: 1.00x fewer FLOPs" in text
