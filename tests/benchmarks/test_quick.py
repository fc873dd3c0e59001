"""The benchmarks run end to end on a CPU, and what they compute beside times is right."""

import csv
import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks import attention, call_overhead, common, fold, host, mask, packed, prepare, profiles, step, streaming
from benchmarks.common import attempted, check_failures, write_csv
from benchmarks.flops import MODELS, flop_counts, model_config
from benchmarks.microbatches import BranchStep, pack, scan_starts_anew
from benchmarks.packed import Packed
from benchmarks.shapes import FOLD_SHAPES, QUICK, SHAPES, build, conversation_trees, leaf_first_rows, lightest_first
from examples.demo.dialogues import generate_dialogues
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask

original_scan = modeling_qwen3_5.torch_chunk_gated_delta_rule
ENVIRONMENT = {"device", "python", "torch", "transformers", "trl", "flash-attn-4", "cuda", "commit", "date"}


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize(
    ("name", "tokens", "branches", "branch_tokens"),
    [
        ("caterpillar-8k", 8_165, 20, 69_250),
        ("caterpillar-37k", 37_428, 61, 727_608),
        ("4k+16x512", 4096 + 16 * 512, 16, 16 * 4608),
        ("1k+64x64", 1024 + 64 * 64, 64, 64 * 1088),
        ("search", 12_544, 81, 114_048),
        ("caterpillar-400", 70_683, 400, 9_600_000),
    ],
)
def test_shapes(name, tokens, branches, branch_tokens):
    stats = build({**SHAPES, **FOLD_SHAPES}[name]).stats()
    assert (stats.tree_tokens, stats.branches, stats.branch_tokens) == (tokens, branches, branch_tokens)


def test_a_shape_is_the_same_every_time_and_follows_its_seed():
    assert build(QUICK["search"]) == build(QUICK["search"])
    assert build(QUICK["search"], seed=1) != build(QUICK["search"])


def test_caterpillar_supervises_reasoning_and_answer_of_each_turn():
    branches = build(SHAPES["caterpillar-8k"]).branches()
    assert [int(branch.weights.sum()) for branch in branches] == [60 + 70] * 20
    # turn t follows t contexts and answers
    lengths = sorted(len(branch) for branch in branches)
    assert lengths == [935 + turn * (165 + 70) + 165 + 60 + 70 for turn in range(20)]


def test_flops_of_4k_16_by_hand():
    config = model_config(quick=False)
    counts = flop_counts([build(SHAPES["4k+16x512"])], config)
    layer = 1024 * 2048 + 2 * 1024 * 1024 + 2048 * 1024 + 3 * 1024 * 3072
    head = 6 * 1024 * 151_936 * 16 * 512
    tree_pairs = 4096 * 4097 // 2 + 16 * sum(range(4097, 4609))
    branch_pairs = 16 * 4608 * 4609 // 2
    pair = 3.5 * 4 * 128 * 16 * 28
    tree = 6 * 28 * layer * 12_288 + head + pair * tree_pairs
    branches = 6 * 28 * layer * 73_728 + head + pair * branch_pairs
    assert counts["folded"]["tflop"] == pytest.approx(tree / 1e12, rel=1e-12)
    assert counts["branches"]["tflop"] == pytest.approx(branches / 1e12, rel=1e-12)
    assert branches / tree == pytest.approx(4.49, abs=0.005)


def test_pack_fills_bins_first_fit_decreasing():
    assert pack([3, 9, 4, 6, 30], 10) == [[4], [1], [3, 2], [0]]


def test_packed_branches_do_not_see_each_other():
    row = Packed.of([3, 60, 65], torch.device("cpu"))
    expected = torch.block_diag(*(torch.ones(n, n).tril() for n in (3, 60, 65))).bool()
    assert torch.equal(dense_mask(row.context.prefix_tree)[0, 0], expected)
    assert row.starts.tolist() == [0, 3, 63, 128] and row.longest == 65


def test_leaf_first_is_the_same_tree_in_the_reverse_order():
    tree = build(QUICK["caterpillar-8k"])
    lengths, parents = lightest_first(tree)
    assert parents.tolist() == [-1, 0, 0, 2, 2, 4, 4]  # each turn's leaf, then the trunk
    assert lengths.tolist() == [14, 7, 9, 7, 9, 7, 9 + 7]  # the last answer continues the trunk
    visible = dense_mask(leaf_first_rows(tree))[0, 0, : len(tree), : len(tree)]
    assert visible.sum() == tree.stats().tree_pairs
    assert not visible[14 + 7, 14 : 14 + 7].any()  # the second turn does not see the first one's leaf


@pytest.fixture(scope="module", params=[MODELS[0], pytest.param(MODELS[1], marks=pytest.mark.slow)])
def steps(request, tmp_path_factory):
    output = tmp_path_factory.mktemp("step") / "sub" / "step.csv"
    # rows of 128 tokens make several micro-batches of branches
    arguments = ["--quick", "--checkpointing", "off", "on", "--micro-batch-tokens", "128", "--seconds", "0"]
    arguments += ["--model", request.param]
    return step.main([*arguments, "--output", str(output)]), read(output)


def test_folded_and_per_branch_steps_have_the_same_loss(steps):
    rows, _ = steps
    assert len(rows) == 4 * 2 * 2
    for shape in step.DEFAULT_SHAPES:
        losses = {(r["method"], r["checkpointing"]): r["loss"] for r in rows if r["shape"] == shape}
        assert len(losses) == 4
        assert all(loss == pytest.approx(losses["folded", "off"], rel=1e-5) for loss in losses.values()), losses
    assert (
        len({round(row["loss"], 4) for row in rows}) == 4
    )  # the shapes' losses differ: the comparison tells something
    assert any(row["micro_batches"] > 1 for row in rows if row["method"] == "branches")
    assert all(row["micro_batches"] == 1 for row in rows if row["method"] == "folded")


def test_step_writes_every_column(steps):
    rows, written = steps
    measured = {"shape", "method", "mode", "checkpointing", "kernel", "row_tokens", "ms", "peak_gib", "flop_ratio"}
    assert len(written) == len(rows) and written[0].keys() >= measured | ENVIRONMENT | {"speedup", "roof_share"}
    for row in rows:
        if row["method"] == "folded":
            stock = next(
                r
                for r in rows
                if r["method"] == "branches" and all(r[k] == row[k] for k in ("shape", "checkpointing"))
            )
            assert row["speedup"] == stock["ms"] / row["ms"]
            assert row["flop_ratio"] == stock["tflop"] / row["tflop"] > 1
            assert row["bound_share"] == row["speedup"] / row["flop_ratio"]
    assert written[0]["torch"] == torch.__version__
    assert all(row["kernel"] == "sdpa" for row in rows if row["method"] == "branches")


def test_recurrent_layers_are_measured_eagerly(capsys):
    with pytest.raises(SystemExit):
        step.main(["--quick", "--model", "qwen3.5-0.8b", "--modes", "eager", "compiled"])
    assert "the recurrent layers of qwen3.5-0.8b follow a tree eagerly only" in capsys.readouterr().err


def scan_with_boundaries(query, key, value, *, g, beta, cu_seqlens=None, **kwargs):
    """What the kernels of flash-linear-attention do: every sequence starts from a state of zero."""
    bounds = [0, query.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    parts = [
        original_scan(*(x[:, i:j] for x in (query, key, value)), g=g[:, i:j], beta=beta[:, i:j], **kwargs)[0]
        for i, j in pairwise(bounds)
    ]
    return torch.cat(parts, dim=1), None


def test_packed_branches_are_apart_in_recurrent_layers(monkeypatch):
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", scan_with_boundaries)
    monkeypatch.setitem(AttentionInterface._global_mapping, packed.IMPLEMENTATION, packed.packed_attention)
    cpu = torch.device("cpu")
    model = step.make_model(model_config(True, "qwen3.5-0.8b"), "branches", "auto", False, cpu, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-4.0)  # so that states last
            elif parameter.dim() > 1:
                parameter.mul_(3.0)
    trees = [build(QUICK["search"], vocab=512)]

    def run(budget, gap):
        model.zero_grad()
        losses = [loss(model) for loss in BranchStep(trees, budget, cpu, gap).losses]
        sum(losses).backward()
        return len(losses), sum(losses).item(), model.model.embed_tokens.weight.grad.clone()

    rows, loss, grad = run(budget=0, gap=0)
    one, packed_loss, packed_grad = run(budget=1024, gap=3)
    assert (rows, one) == (4, 1)
    assert packed_loss == pytest.approx(loss, rel=1e-6)
    assert (packed_grad - grad).norm() < 1e-5 * grad.norm()
    _, leaking, _ = run(budget=1024, gap=2)  # the convolution reads the token before the gap
    assert abs(leaking - loss) > 1e-4 * loss
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", scan_without_boundaries)
    _, leaking, _ = run(budget=1024, gap=3)
    assert abs(leaking - loss) > 1e-4 * loss


def scan_without_boundaries(*args, cu_seqlens=None, **kwargs):
    return original_scan(*args, **kwargs)


def test_a_scan_that_scans_over_boundaries_is_found(monkeypatch):
    config = model_config(True, "qwen3.5-0.8b")
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", scan_with_boundaries)
    assert scan_starts_anew(config, torch.device("cpu"))
    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", scan_without_boundaries)
    assert not scan_starts_anew(config, torch.device("cpu"))


def test_kernels_that_refuse_the_heads_are_left_out(monkeypatch, capsys):
    def refuse(*args):
        raise AssertionError("head_dim 16\nmore")

    monkeypatch.setattr(packed, "installed_kernels", lambda device: ["fa4", "sdpa"])
    monkeypatch.setattr(packed, "varlen_causal", refuse)
    branches = BranchStep([build(QUICK["search"])], 1024, torch.device("cpu"))
    config = model_config(True, "qwen3.5-0.8b")
    times = branches.time_kernels(config, torch.device("cpu"), torch.float32)
    assert times["fa4"] == float("inf") and times["sdpa"] < 1e6  # what did not run stays visible in the results
    assert "kernel fa4 does not run here: AssertionError: head_dim 16" in capsys.readouterr().err
    monkeypatch.setattr(packed, "installed_kernels", lambda device: ["fa4"])
    with pytest.raises(RuntimeError, match="fa4"):
        branches.time_kernels(config, torch.device("cpu"), torch.float32)


def test_attention_agrees_with_the_dense_mask(tmp_path):
    rows = attention.main(["--quick", "--only", "search", "1k+64x64", "--output", str(tmp_path / "a.csv")])
    methods = {row["method"] for row in rows}
    assert methods == {"causal", "flex", "sdpa", "flex, leaf first", "gather"}
    assert all(row["error"] < 1e-5 for row in rows if row["method"] != "causal")
    assert read(tmp_path / "a.csv")[0].keys() >= ENVIRONMENT | {
        "shape",
        "method",
        "kernel",
        "tflops",
        "forward_tflops",
    }
    row = next(row for row in rows if row["shape"] == "1k+64x64")
    pairs = 16 * 17 // 2 + 8 * (17 + 18 + 19)
    assert row["tflops"] == pytest.approx(pairs * 4 * 16 * 4 * 3.5 / (row["ms"] * 1e-3) / 1e12)


def test_controls_have_the_size_of_the_tree():
    tree = build(SHAPES["1k+64x64"])
    assert attention.control_of("rectangle", tree, 8, False)[1:] == (8 * 4096 * 1024, (8, 4096, 1024))
    assert attention.control_of("causal-1k", tree, 8, False)[1:] == (40 * 1024 * 1025 // 2, (40, 1024, 1024))
    whole = attention.control_of("causal-whole, fa4", tree, 8, False)
    assert whole[1:] == (40_960 * 40_961 // 2, (1, 40_960, 40_960))
    query, key = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 3, 4)
    attend, _, _ = attention.control_of("rectangle", tree, 1, True)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key).transpose(1, 2)
    assert torch.equal(attend(query, key, key), expected)  # a causal one would differ


def test_filled_sequences_are_measured_without_methods_of_one_tree():
    methods = ["causal", "flex", "gather", "rectangle"]
    rows = attention.main(["--quick", "--only", "search", "--methods", *methods, "--fill", "180"])
    found = [(row["method"], row.get("trees"), row["tokens"]) for row in rows]
    one = [("flex", 1, 58), ("gather", 1, 58), ("rectangle", 1, 42)]
    assert found == [("causal", None, 128), *one, ("flex", 3, 174), ("rectangle", 3, 126)]
    flex = [row for row in rows if row["method"] == "flex"]
    assert flex[0]["pairs"] * 3 == flex[1]["pairs"] and flex[0]["useful"] == 1175 / 128**2
    for row in rows:
        work = [row["pairs"] * 4 * 16 * 4 * factor / 1e9 for factor in (1.0, 2.5)]
        assert row["backward_tflops"] == pytest.approx(work[1] / (row["ms"] - row["forward_ms"]))


def test_a_wrong_kernel_is_refused(monkeypatch):
    monkeypatch.setattr(
        attention,
        "gather_paths",
        lambda tree, device, kernel: lambda q, k, v: attention.causal(q, k, v).transpose(1, 2),
    )
    (row,) = attention.main(["--quick", "--only", "search", "--methods", "gather"])
    assert "is off by" in row["failure"] and "ms" not in row


def test_mask_and_fold_rows(tmp_path):
    rows = mask.main(["--quick", "--output", str(tmp_path / "m.csv")])
    assert [(row["method"], row["tokens"]) for row in rows] == [
        (method, tokens) for tokens in (128, 384) for method in ("tree_block_mask", "create_block_mask", "dense_mask")
    ]
    assert read(tmp_path / "m.csv")[0].keys() >= ENVIRONMENT | {"method", "tokens", "ms", "peak_gib"}
    rows = fold.main(["--quick", "--only", "caterpillar-400", "--output", str(tmp_path / "f.csv")])
    assert [row["method"] for row in rows] == ["fold", "fold+check"]
    assert rows[0]["tokens_per_s"] == pytest.approx(138 / (rows[0]["ms"] * 1e-3))
    assert read(tmp_path / "f.csv")[0].keys() >= ENVIRONMENT | {"shape", "tokens_per_s"}


def test_checks_of_a_call_are_timed(tmp_path, monkeypatch):
    checked = []

    def check_call(model, kwargs, is_weighted):
        assert model.training and torch.is_grad_enabled()
        checked.append((len(kwargs), is_weighted))
        original(model, kwargs, is_weighted)

    original = call_overhead.check_call
    monkeypatch.setattr(call_overhead, "check_call", check_call)
    rows = call_overhead.main(["--quick", "--output", str(tmp_path / "c.csv")])
    assert len(checked) == 2 * (call_overhead.WARMUP + call_overhead.QUICK_CALLS) and len(set(checked)) == 2
    for row, line in zip(rows, read(tmp_path / "c.csv"), strict=True):
        assert 0 < row["low_us"] <= row["median_us"] <= row["high_us"] and float(line["low_us"]) == row["low_us"]
        assert line.keys() >= ENVIRONMENT
    assert [row["loss"] for row in rows] == ["model", "caller"]


def test_the_medians_of_launches(tmp_path, monkeypatch):
    times = iter([3.0, 1.0, 2.0])

    def run(command, check):
        assert command[1:3] == ["-m", "benchmarks.call_overhead"] and "--quick" in command and check
        time = next(times)
        rows = [
            {"shape": "caterpillar-8k", "loss": loss, **dict.fromkeys(call_overhead.TIMES, time + extra)}
            for loss, extra in (("model", 0.0), ("caller", 10.0))
        ]
        write_csv(Path(command[-1]), rows)

    monkeypatch.setattr(call_overhead, "subprocess", SimpleNamespace(run=run))
    rows = call_overhead.main(["--quick", "--launches", "3"])
    assert [row["launch"] for row in rows] == [1, 1, 2, 2, 3, 3, "", ""]
    assert [(row["loss"], row["median_us"]) for row in rows[-2:]] == [("model", 2.0), ("caller", 12.0)]


def test_prepare_rows(tmp_path):
    rows = prepare.main(["--quick", "--seconds", "0", "--output", str(tmp_path / "p.csv")])
    steps = ["rendering", "tokenizing", "folding", "splitting and packing", "prepare_trees"]
    naive = [("naive", "rendering"), ("naive", "tokenizing")]
    assert [(row["method"], row["step"]) for row in rows] == [*(("ours", step) for step in steps), *naive]
    dialogues = generate_dialogues(num_groups=2, trials=2)
    turns = [message for row in dialogues for message in row["messages"] if message["role"] == "assistant"]
    assert (rows[0]["conversations"], rows[0]["trees"], rows[0]["branches"]) == (4, 2, len(turns))
    assert all(row["tokens_per_s"] == pytest.approx(row["branch_tokens"] / (row["ms"] * 1e-3)) for row in rows)
    assert rows[0]["branch_tokens"] > 2 * rows[0]["tree_tokens"]
    assert read(tmp_path / "p.csv")[0].keys() >= ENVIRONMENT | {"data", "step", "ms", "tokens_per_s"}


def test_prepare_refuses_other_texts_than_the_naive_ones(monkeypatch):
    monkeypatch.setattr(prepare, "rendered", lambda talks, template: ["other"])
    with pytest.raises(AssertionError):
        prepare.main(["--quick", "--only", "folding"])


def test_stock_block_mask_is_the_same_mask():
    rows = torch.from_numpy(np.stack([leaf_first_rows(build(QUICK["search"]))[0].numpy()]))
    stock = mask.stock_block_mask(rows)
    index = torch.arange(128)
    visible = stock.mask_mod(torch.tensor(0), None, index[:, None], index[None])
    assert torch.equal(visible, dense_mask(rows)[0, 0])


def test_conversations_make_one_tree_per_group(shared_data):
    data = shared_data("data/tau_bench_airline.jsonl")
    tools = Path(shared_data("data/tau_bench_airline.tools.json"))
    (tree,) = conversation_trees(data, shared_data("tokenizers/qwen3"), tools, max_trees=1)
    stats = tree.stats()
    assert (stats.branches, stats.branch_tokens, stats.tree_tokens) == (60, 376_759, 27_706)


def test_a_profile_adds_up():
    launch = {"cat": "cuda_driver", "name": "cuLaunchKernel", "tid": 7, "dur": 1}
    events = [
        {"cat": "user_annotation", "name": "Optimizer.step#AdamW.step", "tid": 7, "ts": 100, "dur": 50},
        {**launch, "ts": 10, "args": {"correlation": 1}},
        {**launch, "ts": 120, "args": {"correlation": 2}},
        {**launch, "ts": 160, "args": {"correlation": 3}},
        {"cat": "kernel", "name": "nvjet_tst_128x256", "tid": 0, "ts": 300, "dur": 400, "args": {"correlation": 1}},
        {"cat": "kernel", "name": "multi_tensor_apply", "tid": 0, "ts": 600, "dur": 200, "args": {"correlation": 2}},
        {"cat": "kernel", "name": "multi_tensor_apply", "tid": 0, "ts": 900, "dur": 100, "args": {"correlation": 3}},
        {"cat": "gpu_user_annotation", "name": "Optimizer.step#AdamW.step", "tid": 0, "ts": 600, "dur": 200},
    ]
    rows = profiles.summary(events, ms=1.0, tflop={"matmul": 0.2}, roof=1000.0)
    spent = {row["category"]: row["kernel_ms"] for row in rows if row["name"] == "all"}
    # kernels overlap from 600 to 700
    assert spent == pytest.approx({"matmul": 0.4, "optimizer": 0.2, "elementwise": 0.1, "idle": 1.0 - 0.6})
    assert rows[0]["tflops"] == pytest.approx(500.0) and rows[0]["roof_share"] == pytest.approx(0.5)
    wait = rows[4]
    assert (wait["category"], wait["name"]) == ("idle", "before multi_tensor_apply")
    assert wait["kernel_ms"] == pytest.approx(0.1)  # from 800 to 900
    longest = [(row["category"], row["name"], row["calls"]) for row in rows[5:]]
    assert longest[1:] == [("optimizer", "multi_tensor_apply", 1), ("elementwise", "multi_tensor_apply", 1)]
    assert longest[0] == ("matmul", "nvjet_tst_128x256", 1)


@pytest.mark.parametrize(
    ("name", "category"),
    [
        ("kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object", "attention backward"),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object", "attention forward"),
        ("triton_tem_fused_flex_attention_backward_1", "attention backward"),
        ("triton_tem_fused_flex_attention_0", "attention forward"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128", "attention backward"),
        ("void cutlass::device_kernel<GemmUniversal<GroupProblemShape>>", "matmul"),
        ("triton_poi_fused_mul_silu_3", "fused by the compiler"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::(anonymous namespace)::indexSelect", "other"),
    ],
)
def test_kernels_have_categories(name, category):
    assert profiles._named(name) == category


def test_backends_take_turns_in_the_host_times(monkeypatch):
    asked, measured = [], step.host_times

    def recorded(sides, device, repeats):
        asked.append(len(sides))
        return [times | {"host_forward_ms": 100.0 + len(asked)} for times in measured(sides, device, repeats=1)]

    monkeypatch.setattr(step, "host_times", recorded)
    options = "--quick --modes eager --methods folded --only search --seconds 0 --profile --backends auto sdpa"
    rows = step.main(options.split())
    assert asked == [1, 1, 2] and [row["host_forward_ms"] for row in rows] == [103.0, 103.0]


def test_host_times_of_backends(tmp_path, monkeypatch):
    """Means of the calls of a round, medians of rounds, sums over a forward and a step."""
    clock = iter(range(10**6))
    monkeypatch.setattr(host, "time", SimpleNamespace(perf_counter=lambda: next(clock) ** 2 / 1e6))
    monkeypatch.setattr(host, "ROUNDS", 3)
    rows = host.main(["--quick", "--output", str(tmp_path / "h.csv")])
    (row,) = read(tmp_path / "h.csv")
    assert rows[0]["backend"] == "sdpa" and row.keys() >= ENVIRONMENT
    # eight readings in a round: of the middle one of three, after the two to warm up, 24 to 31
    mask_us, first_us, forward_us, backward_us = (
        (2 * start + 1) / calls for start, calls in zip((24, 26, 28, 30), (20, 1, 20, 20), strict=True)
    )
    expected = [mask_us, first_us, forward_us, backward_us, (mask_us + first_us + 27 * forward_us) / 1e3]
    assert [float(row[name]) for name in host.TIMES] == pytest.approx(
        [*expected, expected[-1] + 28 * backward_us / 1e3]
    )


def test_a_profiled_step(tmp_path):
    options = ["--quick", "--modes", "eager", "graphs", "--methods", "folded", "--only", "search", "--seconds", "0"]
    rows = step.main([*options, "--profile", "--output", str(tmp_path / "s.csv")])
    assert [row["mode"] for row in rows] == ["eager", "graphs"] and rows[0]["loss"] == rows[1]["loss"]
    lines = read(tmp_path / "s_profile.csv")
    assert lines[0].keys() >= ENVIRONMENT | {"category", "kernel_ms", "share"}
    for mode, row in zip(("eager", "graphs"), rows, strict=True):
        mine = {line["category"]: line for line in lines if line["mode"] == mode and line["name"] == "all"}
        assert mine.keys() >= {"matmul", "optimizer", "head and loss", "idle"}
        assert float(mine["matmul"]["ms"]) == row["ms"] and row["host_forward_ms"] > 0
        host = [line for line in lines if line["mode"] == mode and line["category"] == "host"]
        assert len(host) == 15 and all(0 < float(line["own_ms"]) <= float(line["total_ms"]) for line in host)
        work = sum(float(line["tflop"] or 0) for line in mine.values())
        attention = row["pairs"] * 4 * 8 * 4 * 2 * 3.5 / 1e12  # SDPA is no category on a CPU
        assert work + attention == pytest.approx(row["tflop"])


def test_streaming_computes_every_token_once(tmp_path):
    output = tmp_path / "streaming.csv"
    rows = streaming.main(["--quick", "--output", str(output)])
    assert len(rows) == len(read(output)) == 12 and {"peak_gib", *ENVIRONMENT} <= read(output)[0].keys()
    for row in rows:
        (split,) = (other for other in rows if (other["shape"], other["side"]) == (row["shape"], "split"))
        assert row["speedup"] == split["s"] / row["s"]
        if row["side"] == "path":
            assert row["tokens"] == row["longest_path"] and row["passes"] == 1
        elif row["side"] == "split":
            assert row["tokens"] > row["tree_tokens"] and row["passes"] > 1
        else:
            assert row["tokens"] == row["tree_tokens"] and row["passes"] > 2
            assert row["longest_path"] > row["max_tokens"]
            assert row["loss"] == pytest.approx(split["loss"], rel=1e-5)


def test_settings_that_do_not_fit_are_followed_by_the_next(tmp_path, monkeypatch):
    train, tried = streaming.train, []

    def limited(steps, shape, weights, trees, settings, args):
        tried.append(settings)
        first, second, *long = trees
        assert first is second and len(long) == 2 and long[0] is long[1]  # the first one of each is not measured
        if len(tried) == 3:  # the first settings of the last cap, in the step of the long path
            train(steps, shape, weights, trees[:2], settings, args)
            raise torch.cuda.OutOfMemoryError("CUDA")
        return train(steps, shape, weights, trees, settings, args)

    monkeypatch.setattr(streaming, "train", limited)
    output = tmp_path / "settings.csv"
    rows = streaming.main(["--quick", "--only", "settings", "--caps", "80", "24", "48", "--output", str(output)])
    assert len(read(output)) == len(rows) == 8
    assert [row["cap_gb"] for row in rows] == [80, 80, 24, 24, 48, 48, 48, 48]
    assert [row.get("failure") for row in rows] == [None] * 4 + ["out of memory"] + [None] * 3
    assert rows[4].get("s") is None and rows[5]["shape"] == "tau-bench"  # ended before
    for row in rows[:4] + rows[5:]:
        assert row["tokens"] == row["tree_tokens"] and row["hours"] > 0
        assert (row["passes"] > 2) == (row["longest_path"] > (row["max_tokens"] or math.inf))
    assert rows[0]["hours"] == pytest.approx(1000 * 69_632 * rows[0]["s"] / rows[0]["tree_tokens"] / 3600)
    assert "overflow='stream', max_packed_tokens=32, activation_offloading=True" in rows[2]["settings"]
    assert rows[2]["side"] == "qlora" and rows[0]["settings"] == "gradient_checkpointing=True"
    assert streaming.EPOCH["tau-bench"] == int(
        read(Path(common.__file__).with_name("results") / "prepare_tau_bench.csv")[0]["tree_tokens"]
    )


def test_a_failed_measurement_is_raised_at_the_end():
    rows = []
    for error in (None, torch.cuda.OutOfMemoryError("CUDA"), RuntimeError("`loss` differs"), ValueError("too long")):
        with attempted(rows, row := {"side": "tree"}, torch.device("cpu")):
            row["started"] = True
            if error is not None:
                raise error
    assert [row.get("failure") for row in rows] == [None, "out of memory", "`loss` differs", "too long"]
    assert all(row["started"] for row in rows)
    check_failures(rows[:2])
    with pytest.raises(RuntimeError) as raised:
        check_failures(rows)
    assert set(str(raised.value).split("\n")) == {"`loss` differs", "too long"}
    with pytest.raises(KeyError), attempted(rows, {}, torch.device("cpu")):  # a bug of the benchmark
        raise KeyError("ms")
