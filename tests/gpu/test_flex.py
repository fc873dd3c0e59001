"""FlexAttention with the directly built block mask against the dense reference, forward and backward. Needs a GPU."""

import numpy as np
import pytest
import torch

from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.attention.kernels import attend_flex
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.gpu_rows import attend, error, forest, model_of, row_of
from tests.support.models import CONFIGS, VOCAB, branch_runs, gradients

pytestmark = pytest.mark.gpu


CASES = [
    {"heads": (4, 2), "head_dim": 64, "window": None},
    {"heads": (4, 2), "head_dim": 64, "window": 50},
    {"heads": (9, 3), "head_dim": 64, "window": None},
    {"heads": (4, 4), "head_dim": 128, "window": None, "softcap": 5.0},
    {"heads": (4, 1), "head_dim": 64, "window": 50, "sinks": True},
    {"heads": (4, 2), "head_dim": 128, "window": None},
    {"heads": (4, 2), "head_dim": 256, "window": None},
]


@pytest.mark.parametrize("case", CASES)
def test_flex_equals_the_dense_reference(case):
    exact = attend("sdpa", torch.float64, **case)
    assert error(attend("flex", torch.float32, **case), exact) < 2e-5
    dense_bf16 = error(attend("sdpa", torch.bfloat16, **case), exact)
    assert error(attend("flex", torch.bfloat16, **case), exact) < max(2 * dense_bf16, 1e-2)
    assert error(attend("flex", torch.float32, **case, autocast=True), exact) < max(3 * dense_bf16, 2e-2)


def test_the_output_lies_in_memory_as_its_query():
    """Otherwise the projection that follows copies it, and the backward keeps it twice."""
    row = row_of(forest(0))
    mask = TreeContext(row["prefix_tree"], attn_backend="flex").mask(flex=True)
    length = row["input_ids"].shape[1]
    query, key = (torch.randn(1, length, heads, 64, device="cuda").transpose(1, 2) for heads in (4, 2))
    assert attend_flex(query, key, key, mask).transpose(1, 2).is_contiguous()


def test_a_causal_mask_would_be_seen():
    case = CASES[0]
    exact = attend("sdpa", torch.float64, **case)
    other = attend("sdpa", torch.float64, **{**case, "window": 50})
    assert error(other, exact) > 0.05


@pytest.mark.parametrize("name", CONFIGS)
def test_models_equal_their_branches(name):
    model = prepare_model(model_of(name, window=40)).train()
    trees = forest(1, 2, num_branches=8, max_length=150)
    loss, _ = branch_runs(model, trees)
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    output = model(**row_of(trees))
    output.loss.backward()
    got = gradients(model)
    assert abs(output.loss.item() - loss.item()) < 2e-5 * abs(loss.item())
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert (got[key] - value).norm() <= 2e-3 * value.norm() + 1e-6, key


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_is_bit_identical(autocast, use_reentrant):
    row = row_of(forest(2, 2, num_branches=10, max_length=200))
    found = []
    for checkpointed in (False, True):
        model = prepare_model(model_of("gpt_oss" if autocast else "gemma3", window=40)).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            if use_reentrant:
                model.enable_input_require_grads()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = model(**row).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    for key, value in found[0].items():
        # embedding gradients are summed by atomics, in no fixed order
        if "embed" in key or "lm_head" in key:
            torch.testing.assert_close(value, found[1][key], rtol=1e-4, atol=1e-5)
        else:
            torch.testing.assert_close(value, found[1][key], rtol=0, atol=1e-6 if autocast else 0)


def test_bf16_error_is_at_most_twice_that_of_branches():
    trees = forest(3, 2, num_branches=8, max_length=200)
    exact = prepare_model(model_of("qwen3")).eval()
    rounded = prepare_model(model_of("qwen3", dtype=torch.bfloat16)).eval()
    with torch.no_grad():
        reference = torch.cat(branch_runs(exact, trees)[1])
        by_branch = torch.cat(branch_runs(rounded, trees)[1]).float()
        row = {key: value for key, value in row_of(trees).items() if key != "labels"}
        logits = rounded(**row).logits[0].float()
    starts = np.cumsum([0, *(len(tree) for tree in trees)])
    index = np.concatenate([path + start for tree, start in zip(trees, starts, strict=False) for path in tree.paths()])
    by_tree = logits[torch.from_numpy(index).cuda()]
    assert (by_tree - reference).norm() <= 2 * (by_branch - reference).norm()


def test_fifty_row_lengths_compile_at_most_four_graphs():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = prepare_model(model_of("gemma3", dtype=torch.bfloat16, window=40)).train()
    rng = np.random.default_rng(0)
    lengths = set()
    for step in range(50):
        trunk = rng.integers(3, VOCAB, size=100 + 60 * step)
        branches = [np.concatenate([trunk[: 50 + 3 * step], rng.integers(3, VOCAB, size=20)]), trunk]
        row = row_of([fold([Branch(ids, np.ones(len(ids))) for ids in branches])])
        lengths.add(row["input_ids"].shape[1])
        model(**row).loss.backward()
    assert len(lengths) > 20
    graphs = counters["stats"]["unique_graphs"]
    assert 1 <= graphs <= 4, dict(counters["stats"])
    assert not counters["graph_break"] and not counters["recompile_limit"]
