"""Recurrent layers on trees with the kernels of flash-linear-attention, forward and backward. Needs a GPU."""

import importlib.metadata
import importlib.util
import logging

import numpy as np
import pytest
import torch
from packaging.version import Version

from conformance.configs import tiny_config
from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.recurrent import layers, scan
from hf_prefix_tree.modeling.recurrent.scan import Segments
from hf_prefix_tree.tree.prefix_tree import fold
from tests.support.hybrids import make_hybrid
from tests.support.models import branch_runs, gradients, random_branches

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
KERNEL = {"delta": "fla.ops.gated_delta_rule.chunk_gated_delta_rule", "kda": "fla.ops.kda.chunk_kda"}
HAS_KERNELS = importlib.util.find_spec("fla") is not None
needs_kernels = pytest.mark.usefixtures("kernels")


def refused_kernels():
    """`flash-linear-attention` knows that Triton 3.4 to 3.7.0 computes wrong gradients on Hopper."""
    if not HAS_KERNELS or torch.cuda.get_device_capability()[0] != 9 or importlib.util.find_spec("tilelang"):
        return False
    return Version("3.4") <= Version(importlib.metadata.version("triton")) < Version("3.7.1")


@pytest.fixture
def kernels():
    if not HAS_KERNELS:
        pytest.skip("needs the package `flash-linear-attention`")
    if refused_kernels():
        pytest.skip("flash-linear-attention refuses this Triton on Hopper: install `tilelang`")


def reference(rule):
    from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    function = torch_chunk_gated_delta_rule if rule == "delta" else chunk_kimi_delta_attention
    while hasattr(function, "__wrapped__"):  # below the choice of a kernel
        function = function.__wrapped__
    return function


def forest(seed, num_trees=2, **kwargs):
    rng = np.random.default_rng(seed)
    return [fold(random_branches(rng, **kwargs)) for _ in range(num_trees)]


def segments_of(trees):
    row = {key: value.to(DEVICE) for key, value in concatenate_trees(trees, pad_token_id=0).items()}
    context = TreeContext(row["prefix_tree"])
    context.attention_mask = row["attention_mask"]
    return Segments(context)


def inputs_of(rule, length, heads=2, dim=64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, heads, dim, generator=generator) for _ in range(3))
    decay = -torch.rand(1, length, heads, *([dim] if rule == "kda" else []), generator=generator) * 0.2
    beta = torch.rand(1, length, heads, generator=generator)
    grad = torch.randn(length, heads, dim, generator=generator)
    return [x.to(DEVICE) for x in (q, k, v, decay, beta)], grad.to(DEVICE)


def cast(inputs, dtype):
    """Leaves in `dtype`; the decay stays in float32, as models compute it."""
    low = dtype if dtype == torch.float64 else torch.float32
    return [x.to(low if i == 3 else dtype, copy=True).requires_grad_() for i, x in enumerate(inputs)]


def on_tree(rule, way, trees, inputs, grad, dtype, by_kernel):
    leaves, segments = cast(inputs, dtype), segments_of(trees)
    name = KERNEL[rule]
    recurrence = layers.delta_rule(name, reference(rule), *leaves, use_qk_l2norm_in_kernel=True)
    assert recurrence.padded is not by_kernel
    out = way(segments, recurrence)
    count = torch.zeros(len(out), 1, 1, device=DEVICE)
    start = 0
    for tree in trees:
        for path in tree.paths():
            count[torch.from_numpy(path).to(DEVICE) + start] += 1
        start += len(tree)
    (out.double() * (grad * count).double()).sum().backward()
    return [out.detach() * (count > 0), *(x.grad for x in leaves)]


def by_branch(rule, trees, inputs, grad, dtype, kernel):
    """Every branch scanned from its root; gradients of shared tokens add up."""
    leaves, start = cast(inputs, dtype), 0
    out = torch.zeros_like(grad)
    for tree in trees:
        for path in tree.paths():
            where = torch.from_numpy(path).to(DEVICE) + start
            q, k, v, g, beta = (x[:, where] for x in leaves)
            own = kernel(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0]
            (own.double() * grad[where].double()).sum().backward()
            out[where] = own.detach().to(out.dtype)
        start += len(tree)
    return [out, *(x.grad for x in leaves)]


def error(got, expected):
    return [((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(got, expected, strict=True)]


@needs_kernels
@pytest.mark.parametrize("rule", KERNEL)
@pytest.mark.parametrize("way", [scan.fork, scan.link])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_a_tree_are_as_exact_as_on_branches(monkeypatch, rule, way, dtype):
    trees = forest(1, 2, num_branches=12, max_length=200)
    inputs, grad = inputs_of(rule, segments_of(trees).num_tokens)
    kernel = layers.line_kernel(KERNEL[rule], "cuda")
    with keep_double():
        exact = by_branch(rule, trees, inputs, grad.double(), torch.float64, reference(rule))
    branches = error(by_branch(rule, trees, inputs, grad, dtype, kernel), exact)
    tree = error(on_tree(rule, way, trees, inputs, grad, dtype, by_kernel=True), exact)
    for got, allowed in zip(tree, branches, strict=True):
        assert got <= 2 * allowed + 1e-6, (tree, branches)


@pytest.mark.parametrize("way", [scan.fork, scan.link])
def test_padded_batches_on_a_gpu_are_exact(monkeypatch, way):
    monkeypatch.setattr(layers, "line_kernel", lambda name, device_type: None)
    trees = forest(2, 2, num_branches=8, max_length=100)
    inputs, grad = inputs_of("delta", segments_of(trees).num_tokens)
    with keep_double():
        exact = by_branch("delta", trees, inputs, grad.double(), torch.float64, reference("delta"))
        tree = on_tree("delta", way, trees, inputs, grad.double(), torch.float64, by_kernel=False)
    assert max(error(tree, exact)) < 1e-9


@needs_kernels
def test_states_that_are_not_handed_over_would_be_seen(monkeypatch):
    original = scan._scan
    monkeypatch.setattr(scan, "_scan", lambda recurrence, schedule, before: original(recurrence, schedule, None))
    trees = forest(1, 2, num_branches=12, max_length=200)
    inputs, grad = inputs_of("delta", segments_of(trees).num_tokens)
    with keep_double():
        exact = by_branch("delta", trees, inputs, grad.double(), torch.float64, reference("delta"))
    assert max(error(on_tree("delta", scan.link, trees, inputs, grad, torch.float32, by_kernel=True), exact)) > 0.05


def hybrid(model_type, dtype):
    config = tiny_config(model_type)
    for name in ("linear_key_head_dim", "linear_value_head_dim"):  # what the kernels take
        if hasattr(config, name):
            setattr(config, name, 64)
    if hasattr(config, "head_dim"):
        config.head_dim = 32
    config.max_position_embeddings = 4096
    model = make_hybrid(model_type, config=config, dtype=torch.float32)
    return prepare_model(model.to(DEVICE, dtype)).train()


@pytest.mark.parametrize("model_type", ["qwen3_5_text", "lfm2", "bamba"])
@pytest.mark.parametrize("forks", [True, False])
def test_bf16_models_are_as_exact_as_their_branches(monkeypatch, caplog, model_type, forks):
    if model_type == "qwen3_5_text" and refused_kernels():
        pytest.skip("flash-linear-attention refuses this Triton on Hopper: install `tilelang`")
    if model_type == "lfm2":
        from tests.support.hybrids import served_here

        served_here("lfm2")
    monkeypatch.setattr(scan, "forking_is_cheaper", lambda segments: forks or segments.num_levels < 2)
    trees = forest(3, 2, num_branches=8, max_length=200)
    row = {key: value.to(DEVICE) for key, value in concatenate_trees(trees, pad_token_id=0).items()}
    exact = hybrid(model_type, torch.float32)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="hf_prefix_tree.modeling.recurrent"):
        layers.line_kernel.cache_clear()
        rounded = hybrid(model_type, torch.bfloat16)
    if model_type == "qwen3_5_text":  # which scan runs is said once, never silently
        assert len([r for r in caplog.records if "recurrent layers scan the segments" in r.message]) == 1

    def distance(a, b):
        return sum((a[name].double() - b[name].double()).square().sum() for name in b).sqrt().item()

    found = {}
    for name, model, run in (
        ("exact", exact, lambda m: branch_runs(m, trees)[0]),
        ("branches", rounded, lambda m: branch_runs(m, trees)[0]),
        ("tree", rounded, lambda m: m(**row).loss),
    ):
        model.zero_grad()
        loss = run(model)
        loss.backward()
        found[name] = {"loss": loss.detach(), **gradients(model)}
    tree, branches = distance(found["tree"], found["exact"]), distance(found["branches"], found["exact"])
    assert 0 < tree <= 2 * branches
