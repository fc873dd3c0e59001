"""`hf-prefix-tree`: numbers against trees counted by hand, real files, pictures, one line for wrong inputs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BambaConfig,
    DeepseekV3Config,
    Llama4TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from benchmarks.flops import flop_counts, step_flops
from hf_prefix_tree import __version__, fold, prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.flops import activation_bytes, model_costs
from hf_prefix_tree.report.gain import MEASURED_TFLOPS, estimate, parts_of
from hf_prefix_tree.report.plot import sampled_mask
from hf_prefix_tree.report.text import console, draw_tree
from hf_prefix_tree.tree.prefix_tree import Branch
from tests.conftest import REPO_ROOT
from tests.support.models import kept_bytes


def branch(*input_ids):
    return Branch(input_ids, [1] * len(input_ids))


def row(group, *branches):
    return {"group": group, "branches": [{"input_ids": ids, "weights": [1] * len(ids)} for ids in branches]}


# Row by row, the first one forks after two tokens and nothing else is shared.
ROWS = [row("a", [5, 6, 7], [5, 6, 8, 9]), row("b", [1, 2]), row("a", [5, 6, 7, 4])]


def environment():
    """Finds the package from any folder."""
    return os.environ | {"PYTHONPATH": str(REPO_ROOT)}


def write(path, rows):
    path.write_text("".join(json.dumps(content) + "\n" for content in rows))
    return path


def model_folder(tmp_path, **changes):
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **changes)
    config.save_pretrained(tmp_path / "model")
    return config


def gain(run, *arguments):
    """The JSON of `hf-prefix-tree gain`."""
    result = run("gain", *arguments, "--json")
    assert (result.code, result.err) == (0, "")
    return json.loads(result.out)


def test_counts_per_row_and_per_group_by_hand(run, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    per_row = gain(run, path, "--group-by", "none")
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
    grouped = gain(run, path, "--group_by", "group")
    # 5 6 (7 4 | 8 9): the branch 5 6 7 ends inside the third one
    assert (grouped["groups"][0]["trees"], grouped["groups"][0]["tree_tokens"]) == (1, 6)
    assert grouped["losses"] == "" and grouped["ungrouped"] == 11


def test_folded_trees_are_read_back(run, tmp_path):
    tree = fold([branch(5, 6, 7), branch(5, 6, 8, 9)]).to_dict()
    tree = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in tree.items()}
    total = gain(run, write(tmp_path / "trees.jsonl", [tree]))["total"]
    assert (total["branch_tokens"], total["tree_tokens"]) == (7, 5)


def test_what_splitting_and_truncating_costs(run, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    split = gain(run, path, "--group-by", "group", "--max-packed-tokens", 4)
    total = split["total"]
    assert (total["split_trees"], total["parts"], total["duplicated_tokens"]) == (1, 2, 2)
    assert (split["ways"]["tree"]["sequences"], split["ways"]["tree"]["tokens"]) == (3, 6 + 2 + 2)
    cut = gain(run, path, "--group-by", "none", "--max-length", 3)
    assert cut["total"]["longest_path"] == 3 and cut["ways"]["tree"]["truncated"] == 2
    assert cut["losses"] == "2 branches truncated to `max_length`"
    assert "Some data was dropped or modified: 2 branches truncated" in run("gain", path, "--max-length", 3).out


def test_the_summary_comes_first_and_groups_on_request(run, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS)
    summary = run("gain", path).out
    assert summary.startswith(f"{path}: 3 rows, 4 turns, ") and "token ratio" not in summary
    assert "token ratio" in run("gain", path, "--groups").out
    text = run("gain", path, "--group-by", "none", "--tree").out
    assert text.endswith(
        "The tree with the highest pair ratio, 1.23:\n"
        "2 tokens, 2 branches, g 0-2\n"
        "├── 2 tokens, 1 branch, g 1\n"
        "└── 1 token, 1 branch, g 1\n"
    )


def test_control_characters_of_groups_do_not_reach_the_terminal(run, tmp_path):
    rows = [{**content, "group": content["group"] + "\x1b[2J\x07"} for content in ROWS]
    text = run("gain", write(tmp_path / "rows.jsonl", rows), "--groups").out
    assert "\x1b" not in text and "\x07" not in text and "a [2J" in text


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
    assert run("gain", path, "--group-by", "none", "--plot", tmp_path / "out.png").code == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    ratios, mask = figures[0].axes
    assert ratios.get_title() == "Token ratio of 3 trees"
    assert sum(bar.get_height() for bar in ratios.patches) == 3
    assert mask.get_title() == "Mask: 2 branches, 5 tokens, 1.2x pairs"


def test_plot_without_matplotlib(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("gain", write(tmp_path / "rows.jsonl", ROWS), "--plot", tmp_path / "out.png")
    assert result.code == 2
    assert result.err == "hf-prefix-tree: a plot needs matplotlib; run `pip install matplotlib`.\n"


def test_estimate_by_hand(run, tmp_path):
    model_folder(tmp_path)
    path, model = write(tmp_path / "rows.jsonl", ROWS[:1]), ("--model", tmp_path / "model")
    result = gain(run, path, *model, "--gpu", "h100")["estimate"]
    layer = 16 * (2 * 32 + 2 * 16 + 3 * 24)

    def flops(tokens, supervised, pairs):
        return 6 * (3 * layer * tokens + 16 * 50 * supervised) + 3 * 3.5 * 4 * 32 * pairs

    assert result["tflop"]["tree"] == pytest.approx(flops(5, 4, 13) / 1e12, rel=1e-12)
    assert result["tflop"]["flat_steps"] == pytest.approx(flops(7, 5, 16) / 1e12, rel=1e-12)
    assert result["tflop"]["stock_defaults"] == pytest.approx(flops(7, 7, 16) / 1e12, rel=1e-12)
    assert result["speedup"] == pytest.approx(flops(7, 5, 16) / flops(5, 4, 13), rel=1e-12)
    assert result["pays"] and result["verdict"].startswith("Folding pays: 1.3")
    assert result["hours"]["tree"] == result["tflop"]["tree"] / MEASURED_TFLOPS["h100"] / 3600
    per_token = 3 * (16 * 16 + 10 * 32 + 10 * 16 + 8 * 24)
    assert result["activations_gib"]["tree"] == 5 * per_token / 2**30
    assert result["activations_gib"]["flat_steps"] == 4 * per_token / 2**30
    assert result["checkpointed_gib"]["tree"] == 5 * (per_token // 3 + 3 * 2 * 16) / 2**30
    split = gain(run, path, *model, "--max-packed-tokens", 4)["estimate"]
    assert split["speedup"] == pytest.approx(flops(7, 5, 16) / flops(7, 4, 16), rel=1e-12)
    assert not split["pays"] and split["tflop"]["flat_steps"] == result["tflop"]["flat_steps"]
    text = run("gain", path, *model).out
    assert "Folding pays: 1.3" in text and "- speed-up: FLOPs of matrix products" in text


@pytest.mark.parametrize("max_packed_tokens", [None, 6])
def test_pairs_outside_of_windows_are_not_counted(tmp_path, max_packed_tokens):
    types = ["full_attention", "sliding_attention", "sliding_attention"]
    config = model_folder(tmp_path, layer_types=types, use_sliding_window=True, sliding_window=3)
    trees = [fold([branch(5, 6, 7, 8, 1), branch(5, 6, 7, 8, 9, 2), branch(5, 4)]), fold([branch(1, 2)])]
    tflop = estimate(trees, config, max_packed_tokens).tflop
    parts = [part for tree in trees for part in parts_of(tree, max_packed_tokens)]
    assert tflop["tree"] == pytest.approx(flop_counts(parts, config)["folded"]["tflop"], rel=1e-12)
    assert tflop["flat_steps"] == pytest.approx(flop_counts(trees, config)["branches"]["tflop"], rel=1e-12)


def test_memory_of_weights_gradients_and_optimizer_is_theirs(run, tmp_path):
    model_folder(tmp_path)
    result = gain(run, write(tmp_path / "rows.jsonl", ROWS), "--model", tmp_path / "model")["estimate"]
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"), dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    tensors = [*model.parameters(), *(parameter.grad for parameter in model.parameters()), *moments]
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert result["state_gib"] == sum(tensor.nbytes for tensor in tensors) / 2**30


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}


@pytest.mark.parametrize(
    ("config", "pair", "experts"),
    [
        # FLOPs of a pair: 3.5 * 2 for each layer, head, and entry of a query and of a value.
        (DeepseekV3Config(**SIZES, **HEADS, **LATENT, **ROUTED, first_k_dense_replace=1), 7 * 2 * 4 * (12 + 8), 4),
        (BambaConfig(**SIZES, **HEADS, attn_layer_indices=[1], mamba_n_heads=4, mamba_d_state=4), 7 * 4 * (8 + 8), 0),
        (
            Llama4TextConfig(**SIZES, **HEADS, head_dim=8, num_local_experts=4, intermediate_size_mlp=48),
            7 * 2 * 4 * (8 + 8),
            4,
        ),
    ],
    ids=["deepseek_v3", "bamba", "llama4"],
)
def test_costs_of_models_that_are_counted_on_their_modules(config, pair, experts):
    costs = model_costs(config)
    model = AutoModelForCausalLM.from_config(config)
    met = 0.0
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and "embed" not in name and "lm_head" not in name:
            is_expert = experts and parameter.ndim == 3
            met += parameter.numel() * (config.num_experts_per_tok / experts if is_expert else 1)
    assert costs.parameters == sum(parameter.numel() for parameter in model.parameters())
    np.testing.assert_allclose(costs.flops, [6 * met, 6 * 32 * 64, pair], rtol=1e-12)
    assert 0 < costs.checkpointed_bytes < costs.activation_bytes


WIDE = {"vocab_size": 16, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
WIDE |= {"num_attention_heads": 8, "num_key_value_heads": 8}
RANKS = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}


@pytest.mark.parametrize(
    "config",
    [
        DeepseekV3Config(**WIDE, **RANKS, **ROUTED, first_k_dense_replace=2),
        Llama4TextConfig(**WIDE, head_dim=8, intermediate_size_mlp=192, moe_layers=[], attention_chunk_size=16),
    ],
    ids=["deepseek_v3", "llama4"],
)
def test_approximate_activation_memory(config):
    assert model_costs(config).activation_bytes * 128 == pytest.approx(kept_of(config), rel=0.2)


@pytest.mark.parametrize("model_type", ["kimi_linear", "nemotron_h", "qwen3_next", "gpt_oss", "gpt2"])
def test_no_family_is_refused(model_type):
    costs = model_costs(AutoConfig.for_model(model_type))
    assert np.isfinite(costs.flops).all() and (costs.flops > 0).all() and costs.activation_bytes > 0


def test_measured_throughput_is_that_of_the_results():
    """What `--gpu` divides by; and each run is predicted within 25%."""
    folder = REPO_ROOT / "benchmarks" / "results"
    for gpu, tflops in MEASURED_TFLOPS.items():
        with (folder / f"step_full_{gpu}.csv").open() as file:
            runs = [float(row["tflop"]) / float(row["ms"]) * 1e3 for row in csv.DictReader(file) if row["ms"]]
        assert len(runs) >= 6 and tflops == pytest.approx(np.median(runs), rel=0.01)
        assert all(abs(run / tflops - 1) < 0.25 for run in runs)


def test_experts_that_a_token_is_sent_to_are_counted():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    moe = Qwen3MoeConfig(**sizes, head_dim=8, moe_intermediate_size=12, num_experts=8, num_experts_per_tok=2)
    dense = Qwen3Config(**sizes, head_dim=8, intermediate_size=24, vocab_size=moe.vocab_size)
    assert step_flops(moe, 7, 3, 9) == step_flops(dense, 7, 3, 9)


def kept_of(config):
    """Bytes that the config's model keeps for a packed sequence of 128 tokens."""
    torch.manual_seed(0)
    model = prepare_model(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)).train()
    batch = concatenate_trees([fold([branch(*[1] * 100, *[n] * 14) for n in range(2, 4)])], pad_token_id=0)
    return kept_bytes(model, **{k: v for k, v in batch.items() if k in ("input_ids", "position_ids")})


def test_activation_memory_is_what_a_model_keeps():
    config = Qwen3Config(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
    )
    assert activation_bytes(config, 128, checkpointing=False) == pytest.approx(kept_of(config), rel=0.15)


@pytest.mark.parametrize("arguments", [("--help",), ("gain", "--help"), ("--version",)])
def test_help_is_fast_and_has_no_torch(arguments, tmp_path):
    script = tmp_path / "hf-prefix-tree"
    script.write_text(
        "import resource, sys\nfrom hf_prefix_tree.cli import main\n"
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_utime, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=environment())
    assert done.returncode == 0 and ("gain" in done.stdout or __version__ in done.stdout)
    assert float(done.stderr) < 1.5


@pytest.mark.slow
def test_the_command_fails_without_a_traceback(tmp_path):
    call = "from hf_prefix_tree.cli import main; main()"
    command = [sys.executable, "-c", call, "gain", str(tmp_path / "missing.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hf-prefix-tree: ") and done.stderr.count("\n") == 1


@pytest.mark.slow
def test_groups_are_found_and_named(run, shared_data):
    text = run("gain", shared_data("data/gsm8k_4policies.jsonl"), "--tokenizer", shared_data("tokenizers/qwen3")).out
    assert "Rows with an equal `group` are one tree: 1.41x fewer tokens than turn by turn, 1.00x without" in text


# Tokens of flat steps, turn by turn, and the tree; contexts that the stock row misses, and their number.
REAL = {
    ("tau_bench_airline", "qwen3"): (4_252_743, 4_252_743, 276_427, 650, 698),
    ("tau_bench_airline", "qwen3_5_think"): (2_099_128, 4_370_453, 366_745, 650, 698),
    ("tau_bench_airline", "qwen3_instruct_2507"): (360_951, 4_249_951, 221_936, 0, 698),
    ("tau_bench_airline", "qwen2_5"): (363_409, 4_265_293, 224_394, 0, 698),
    ("conversational_reasoning", "qwen3"): (53_672, 93_447, 20_148, 15, 19),
    ("conversational_reasoning", "qwen3_instruct_2507"): (14_345, 88_565, 14_345, 0, 19),
}


@pytest.mark.parametrize("page", ["README.md", "docs/cli.md"])
def test_the_pages_have_these_figures(page):
    lines = (REPO_ROOT / page).read_text(encoding="utf-8").splitlines()
    for flat, _, tree, missing, contexts in REAL.values():
        (line,) = [line for line in lines if f"| {flat:,} | {tree:,} |" in line]
        *_, ratio, lacking = line.strip("| ").split(" | ")
        assert lacking == (f"{missing} of {contexts}" if missing else "none")
        assert float(ratio.split("x")[0]) == pytest.approx(flat / tree, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("data", "template"), REAL)
def test_the_documented_figures(data, template, run, shared_data):
    options = ("--tokenizer", shared_data("tokenizers/qwen3"), "--chat_template", template)
    found = gain(run, shared_data(f"data/{data}.jsonl"), *options, "--tools", shared_data(f"data/{data}.tools.json"))
    ways = found["ways"]
    figures = [ways[name]["tokens"] for name in ("flat_steps", "per_turn", "tree")]
    assert (*figures, ways["stock_best"]["missing"], found["contexts"]) == REAL[data, template]
    assert ways["flat_steps"]["missing"] == ways["tree"]["missing"] == 0
    assert found["group_by"] == ("group" if data.startswith("tau") else None)


@pytest.mark.slow
def test_estimate_says_where_folding_does_not_pay(run, shared_data, tmp_path):
    model_folder(tmp_path)
    long, options = shared_data("data/long_reasoning_singleturn.jsonl"), ("--model", tmp_path / "model")
    text = run("gain", long, "--tokenizer", shared_data("tokenizers/qwen3"), *options, "--group-by", "none").out
    assert "Folding does not pay here: 1.00x fewer FLOPs" in text
