"""FLASH against Triton and the dense reference, what `auto` takes, and compiled layers.

Needs a GPU, for FLASH a Hopper one with `flash-attn-4`.
"""

import numpy as np
import pytest
import torch

import hf_prefix_tree.modeling.attention.backend as backend
import hf_prefix_tree.modeling.attention.flash as flash
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.attention.backend import AttentionCall, choose_backend
from hf_prefix_tree.modeling.attention.flash import attend_flash
from hf_prefix_tree.modeling.attention.interface import prefix_tree_attention
from hf_prefix_tree.modeling.attention.masks.causal import tree_block_mask
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.gpu_rows import attend, error, model_of, row_of
from tests.support.models import VOCAB, gradients

pytestmark = pytest.mark.gpu


def call_of(length, head_dim=128, dtype=torch.bfloat16, **kwargs):
    return AttentionCall(torch.device("cuda", 0), dtype, length, 4, 2, head_dim, head_dim, **kwargs)


def needs_flash(head_dim=128):
    reason = backend._why_not_flash(call_of(8192, head_dim))
    if reason is not None:
        pytest.skip(f"no FLASH here: {reason}")


def tree_of(blocks):
    """One long trunk with a leaf: the row of a caterpillar with few turns."""
    trunk = np.arange(blocks * 128 - 40) % 90 + 3
    leaf = np.concatenate([trunk[:500], np.arange(40) % 7 + 91])
    row = row_of([fold([Branch(ids, np.ones(len(ids))) for ids in (trunk, leaf)])])
    assert row["input_ids"].shape[1] == blocks * 128
    return row


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4), (6, 2)])
@pytest.mark.parametrize("heads_first", [False, True])
def test_flash_is_as_close_to_float64_as_the_dense_mask_is(head_dim, heads, heads_first):
    needs_flash(head_dim)
    case = {"heads": heads, "head_dim": head_dim, "window": None, "heads_first": heads_first}
    exact = attend("sdpa", torch.float64, **case)
    dense = error(attend("sdpa", torch.bfloat16, **case), exact)
    assert error(attend("flash", torch.bfloat16, **case), exact) < max(2 * dense, 1e-2)
    for _ in range(20):  # a race would show in some launches only
        assert error(attend("flash", torch.bfloat16, **case), exact) < max(2 * dense, 1e-2)


def two_trees(rows):
    """Rows of two caterpillars, some 6,000 tokens: most blocks are full, under windows and chunks too."""
    rng = np.random.default_rng(0)
    trees = []
    for turns in (9, 6):
        trunk = rng.integers(3, VOCAB, size=400 * turns)
        leaves = [np.concatenate([trunk[: 400 * t - 37], rng.integers(3, VOCAB, size=90)]) for t in range(2, turns)]
        trees.append(fold([Branch(ids, np.ones(len(ids))) for ids in (trunk, *leaves)]))
    tree = row_of(trees)["prefix_tree"]
    other = row_of(trees[::-1])["prefix_tree"]
    return torch.cat([tree, other][:rows])


@pytest.mark.parametrize(
    ("limits", "heads", "rows", "dtype"),
    [
        ({}, (8, 1), 1, torch.bfloat16),
        ({}, (4, 4), 2, torch.bfloat16),
        ({}, (6, 2), 2, torch.float16),
        ({"window": 2000}, (6, 2), 1, torch.bfloat16),
        ({"window": 2000}, (8, 1), 2, torch.bfloat16),
        ({"chunk": 1500}, (6, 2), 1, torch.float16),
        ({"chunk": 1500}, (4, 4), 2, torch.bfloat16),
    ],
)
def test_flash_on_full_blocks_under_windows_and_chunks_and_of_several_rows(limits, heads, rows, dtype):
    needs_flash()
    tree = two_trees(rows)
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda n: torch.randn(rows, tree.shape[2], n, 128, device="cuda", generator=generator)  # noqa: E731
    values = [make(n).transpose(1, 2) for n in (heads[0], heads[1], heads[1])]
    grad = make(heads[0])

    def run(backend, dtype, limits=limits):
        context = TreeContext(tree)
        mask = context.mask(**limits, flex=backend != "sdpa")
        if backend == "flash":
            mask.backend = backend
            assert mask.full_kv_num_blocks.sum() > 100 and mask.kv_num_blocks.sum() > 100
        leaves = [x.to(dtype).detach().requires_grad_() for x in values]
        output, _ = prefix_tree_attention(torch.nn.Module(), *leaves, mask, prefix_tree=context)
        return [x.double() for x in (output, *torch.autograd.grad(output, leaves, grad.to(dtype)))]

    exact = run("sdpa", torch.float32)  # of 16-bit numbers
    dense = error(run("sdpa", dtype), exact)
    assert error(run("flash", dtype), exact) < max(2 * dense, 1e-2)
    if limits:  # a limit that is lost would be seen
        assert error(run("flash", dtype, {}), exact) > 0.05


@pytest.mark.parametrize("limits", [{}, {"window": 2000}])
@pytest.mark.parametrize(("heads", "rows"), [((8, 1), 1), ((4, 4), 2), ((6, 2), 2)])
def test_later_layers_of_flash_equal_a_first_one(limits, heads, rows, monkeypatch):
    """Under a mask that a layer has used, another one launches the kernel without the function around it."""
    needs_flash()
    from flash_attn.cute import interface

    tree = two_trees(rows)
    generator = torch.Generator("cuda").manual_seed(0)
    make = lambda n: torch.randn(rows, tree.shape[2], n, 128, device="cuda", generator=generator)  # noqa: E731
    layers = [[make(n).bfloat16().transpose(1, 2) for n in (heads[0], heads[1], heads[1])] for _ in range(3)]
    expected = [attend_flash(*layer, tree_block_mask(tree, **limits)) for layer in layers]
    mask = tree_block_mask(tree, **limits)
    found = [attend_flash(*layers[0], mask)]
    monkeypatch.setattr(interface, "_flash_attn_fwd", None)
    with torch.cuda.stream(stream := torch.cuda.Stream()):  # it is launched on the current stream
        stream.wait_stream(torch.cuda.default_stream())
        found += [attend_flash(*layer, mask) for layer in layers[1:]]
    torch.cuda.default_stream().wait_stream(stream)
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)


def test_other_masks_of_flash_attn_4_are_left_alone():
    needs_flash()
    import cutlass.cute as cute
    from flash_attn.cute.interface import _flash_attn_fwd

    @cute.jit
    def every_key(b, h, q, k, info, tensors):
        return k >= 0

    def other():
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (torch.randn(1, 512, 4, 128, device="cuda", generator=generator).bfloat16() for _ in range(3))
        output, *_ = _flash_attn_fwd(q, k, v, mask_mod=every_key, return_lse=True)
        expected = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
        return ((output.transpose(1, 2) - expected).float().norm() / expected.float().norm()).item()

    assert other() < 1e-2
    attend("flash", torch.bfloat16, (4, 2), 128, None)
    assert other() < 1e-2


def test_auto_takes_flash_and_what_is_forced_is_taken():
    needs_flash()
    row = tree_of(64)["prefix_tree"]
    build = lambda: tree_block_mask(row)  # noqa: E731
    assert choose_backend("auto", call_of(64 * 128), build) == "flash"
    assert choose_backend("flash", call_of(64 * 128), build) == "flash"
    assert choose_backend("flex", call_of(64 * 128), build) == "flex"
    assert choose_backend("auto", call_of(64 * 128, dtype=torch.float32), build) == "flex"
    with pytest.raises(ValueError, match="`attn_backend='flash'`"):
        choose_backend("flash", call_of(64 * 128, head_dim=96), build)


def test_the_comparison_notices_wrong_gradients(monkeypatch):
    row = tree_of(8)["prefix_tree"]
    scaled = lambda q, k, v, mask: backend.attend_flex(q, k, v.detach() + (v - v.detach()) * 1.1, mask)  # noqa: E731
    monkeypatch.setattr(backend, "attend_flash", scaled)
    assert "value gradient" in backend._difference_to_triton(call_of(1024), tree_block_mask(row))
    monkeypatch.setattr(backend, "attend_flash", backend.attend_flex)
    assert backend._difference_to_triton(call_of(1024), tree_block_mask(row)) is None


def test_the_mask_waits_for_nothing():
    row = tree_of(64)["prefix_tree"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for kind in ({}, {"window": 100}, {"chunk": 256}):
            tree_block_mask(row, **kind)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_with_blocks_of_256(monkeypatch):
    import hf_prefix_tree.modeling.attention.masks.causal as mask_module

    case = {"heads": (4, 2), "head_dim": 64, "window": None}
    exact = attend("sdpa", torch.float64, **case)
    small = error(attend("flex", torch.bfloat16, **case), exact)
    monkeypatch.setattr(mask_module, "_MOST_BLOCKS", 4)
    assert error(attend("flex", torch.bfloat16, **case), exact) < 2 * small


@pytest.mark.parametrize("attn_backend", ["flex", "flash"])
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_compiled_layers(attn_backend, checkpointing, monkeypatch):
    from torch._dynamo.utils import counters

    prepared, prepare = [], flash._prepare
    monkeypatch.setattr(flash, "_prepare", lambda *args: prepared.append(args) or prepare(*args))
    if attn_backend == "flash":
        needs_flash(64)
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, VOCAB, size=3000)
    rows = []
    for length in (700, 1500, 2900):
        branches = [trunk[:length], np.concatenate([trunk[: length // 2], rng.integers(3, VOCAB, size=60)])]
        rows.append(row_of([fold([Branch(ids, np.ones(len(ids))) for ids in branches])]))
    found, graphs = [], 0
    # eager rounds each operation to bf16, compiled code whole chains of them
    dtype, tolerance = (torch.bfloat16, 6e-2) if attn_backend == "flash" else (torch.float32, 2e-3)
    for compiled in (False, True):
        torch._dynamo.reset()
        model = model_of("llama", dtype=dtype, head_dim=64)
        model = prepare_model(model, attn_backend=attn_backend, compile_layers=compiled).train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
            model.enable_input_require_grads()
        counters.clear()
        for row in rows:
            prepared.clear()
            loss = model(**row).loss
            loss.backward()
        # once for all layers, forward and backward
        assert len(prepared) == (2 if attn_backend == "flash" else 0)
        graphs = counters["stats"]["unique_graphs"]
        found.append({"loss": loss.detach(), **gradients(model)})
        del model
    assert graphs <= 2 and not counters["graph_break"]
    for name, expected in found[0].items():
        assert (found[1][name] - expected).float().norm() <= tolerance * expected.float().norm() + 1e-6, name
