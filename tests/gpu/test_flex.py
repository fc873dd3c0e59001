"""FlexAttention with the directly built block mask against the dense reference, forward and backward. Needs a GPU."""

import copy

import numpy as np
import pytest
import torch
from models import CONFIGS, VOCAB, branch_runs, gradients, random_branches
from transformers import AutoModelForCausalLM

from hf_prefix_tree import prepare_model
from hf_prefix_tree.attention.context import TreeContext
from hf_prefix_tree.attention.interface import prefix_tree_attention
from hf_prefix_tree.attention.kernels import attend_flex
from hf_prefix_tree.batch import concatenate_trees
from hf_prefix_tree.tree import Branch, fold

pytestmark = pytest.mark.gpu
HEAD_DIM = 32


def forest(seed, num_trees=2, **kwargs):
    rng = np.random.default_rng(seed)
    return [fold(random_branches(rng, **kwargs)) for _ in range(num_trees)]


def row_of(trees):
    return {key: value.cuda() for key, value in concatenate_trees(trees, pad_token_id=0).items()}


def model_of(name, dtype=torch.float32, window=None, head_dim=HEAD_DIM):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    config.head_dim = head_dim
    config.max_position_embeddings = 4096
    if window is not None:
        config.sliding_window = window
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="prefix_tree").cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model


class Layer(torch.nn.Module):
    is_causal = True


def attend(
    backend, dtype, heads, head_dim, window, softcap=None, sinks=None, autocast=False, seed=0, heads_first=False
):
    trees = forest(seed, 3, num_branches=25, max_length=300)
    row = row_of(trees)
    length = row["input_ids"].shape[1]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, n, length, head_dim, device="cuda", generator=generator)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    if not heads_first:  # in memory; models lay tokens out before heads
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    # under autocast norms and rotary leave query and key in float32 beside a value in bf16
    dtypes = (torch.float32, torch.float32, torch.bfloat16) if autocast else (dtype,) * 3
    q, k, v = (x.to(d).requires_grad_() for x, d in zip((q, k, v), dtypes, strict=True))
    sinks = None if sinks is None else torch.linspace(-1, 3, heads[0], device="cuda", dtype=dtype).requires_grad_()
    context = TreeContext(row["prefix_tree"], attn_backend=backend)
    mask = context.mask(window, flex=backend != "sdpa")
    if backend == "flash":
        mask.backend = backend
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        output, _ = prefix_tree_attention(
            Layer(), q, k, v, mask, prefix_tree=context, softcap=softcap, s_aux=sinks, scaling=head_dim**-0.5
        )
    output.backward(grad.transpose(1, 2).to(output.dtype))
    found = [output, q.grad, k.grad, v.grad] + ([] if sinks is None else [sinks.grad])
    return [x.double() for x in found]


def error(got, expected):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True))


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
    mask = TreeContext(row["prefix_tree"], attn_backend="flex").mask(None, flex=True)
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
