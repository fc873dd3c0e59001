"""What the kernels of `flash-attn-4` are handed, with plain PyTorch in their place: tests/gpu runs them."""

import copy
import ctypes
import functools
import gc
import hashlib
import operator
import sys
import threading
import types
import weakref
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import hf_prefix_tree.modeling.attention.flash as flash
from hf_prefix_tree.modeling.attention.kernels import attend_dense, one_graph_for_all_lengths
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.streaming import sections_of
from hf_prefix_tree.tree.prefix_tree import Branch, fold

STOCK, FIRST, LAST = object(), object(), object()  # orders of blocks


def row_at(address, length):
    return torch.tensor((ctypes.c_int32 * length).from_address(address)[:])


class Lanes:
    """A value of the kernels' language, of all pairs at once."""

    def __init__(self, values):
        self.values = values

    def __getitem__(self, index):
        return self.values


def _lane_wise(function):
    return lambda a, b: Lanes(function(a.values, b.values if isinstance(b, Lanes) else b))


for _name in ("le", "lt", "eq", "add", "sub", "floordiv", "and_"):
    setattr(Lanes, f"__{_name.strip('_')}__", _lane_wise(getattr(operator, _name)))


class Memory:
    def __init__(self, address):
        self.address = address

    def __getitem__(self, index):
        index = torch.as_tensor(index)
        return row_at(self.address, int(index.max()) + 1)[index]


class Register:
    def __setitem__(self, index, value):
        self.value = value

    def load(self):
        return Lanes(self.value)


@pytest.fixture
def cute(monkeypatch):
    """The few words of the kernels' language that are used, in plain PyTorch."""
    language, package = types.ModuleType("cutlass.cute"), types.ModuleType("cutlass")
    package.cute, package.Int32, package.Int64 = language, int, int
    language.jit = lambda function: function
    language.AddressSpace = SimpleNamespace(gmem="gmem")
    language.make_ptr = lambda kind, address, space, assumed_align: address
    language.make_layout = lambda size: size
    language.make_tensor = lambda address, layout: Memory(address)
    language.make_rmem_tensor = lambda size, kind: Register()
    language.arch = SimpleNamespace()
    for name, module in {"cutlass": package, "cutlass.cute": language}.items():
        monkeypatch.setitem(sys.modules, name, module)
    cached = flash._mask_mod, flash._scheduler, flash._whole_blocks
    for function in cached:
        function.cache_clear()
    yield language
    for function in cached:
        function.cache_clear()


def visible_pairs(blocks, rows, lengths, mod, scalars, transposed):
    """The dense mask that a kernel makes of the lists: partial blocks by `mod`, full ones without looking."""
    size = blocks.block_size[0]
    assert blocks.block_size == (size, size)
    mask = torch.zeros(rows, *lengths, dtype=torch.bool)
    for row in range(rows):
        for full, count, index in ((False, *blocks[:2]), (True, *blocks[2:4])):
            for i, number in enumerate(count[0, 0].tolist()):
                for j in index[0, 0, i, :number].tolist():
                    a, b = (j, i) if transposed else (i, j)
                    q = torch.arange(a * size, (a + 1) * size)[:, None]
                    k = torch.arange(b * size, (b + 1) * size)[None]
                    lanes = map(Lanes, (row, 0, q, k))
                    mask[row, q, k] = True if full else mod(*lanes, None, None, scalars).values
    return mask


def attend(query, key, value, mask, scale):
    assert query.shape[2] == key.shape[2]  # the kernels' own sums are not needed
    scores = torch.einsum("bqhd,bkhd->bhqk", query, key) * scale
    scores = scores.masked_fill(~mask[:, None], -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), value), scores.logsumexp(-1)


class StockMask:
    """The mask of the kernels, which notes what it is asked to hide."""

    asked: ClassVar[list] = []

    def apply_mask(self, *args, **kwargs):
        self.asked.append((args, kwargs))


@pytest.fixture
def plain_kernels(cute, monkeypatch):
    names = ("interface", "block_sparsity", "flash_fwd_sm90", "flash_bwd_sm90", "tile_scheduler", "mask")
    modules = {f"flash_attn.cute.{name}": types.ModuleType(name) for name in names}
    interface, sparsity, forward, backward, scheduler, mask_module = modules.values()
    forward.SingleTileScheduler = backward.SingleTileScheduler = STOCK
    forward.AttentionMask = backward.AttentionMask = mask_module.AttentionMask = StockMask

    class Blocks(tuple):
        def __new__(cls, *lists, block_size):
            made = super().__new__(cls, lists)
            made.block_size = block_size
            return made

    sparsity.BlockSparseTensorsTorch = Blocks
    scheduler.SingleTileScheduler = STOCK

    def kernel(q, k, v, out, lse, softmax_scale, mask_mod, aux_scalars, block_sparse_tensors):
        assert all(x.stride(-1) == 1 for x in (q, k, v, out, lse))
        lengths = q.shape[1], k.shape[1]
        mask = visible_pairs(block_sparse_tensors, len(q), lengths, mask_mod, aux_scalars, transposed=False)
        for made, wanted in zip((out, lse), attend(q, k, v, mask, softmax_scale), strict=True):
            made.copy_(wanted)

    def run_forward(q, k, v, *, softmax_scale, return_lse, out, lse, mask_mod, aux_scalars, block_sparse_tensors):
        assert forward.SingleTileScheduler is LAST and type(forward.AttentionMask()) is flash._whole_blocks()
        assert return_lse
        cache, key = interface._flash_attn_fwd.compile_cache, (q.dtype, q.shape, k.shape)
        if key not in cache:
            cache[key] = kernel
        cache[key](q, k, v, out, lse, softmax_scale, mask_mod, aux_scalars, block_sparse_tensors)
        return {"out": out, "lse": lse}

    def run_backward(
        q, k, v, out, dout, lse, *, softmax_scale, dq, dk, dv, mask_mod, aux_scalars, block_sparse_tensors
    ):
        assert backward.SingleTileScheduler is FIRST and type(backward.AttentionMask()) is flash._whole_blocks()
        lengths = q.shape[1], k.shape[1]
        mask = visible_pairs(block_sparse_tensors, len(q), lengths, mask_mod, aux_scalars, transposed=True)
        expected, log_sum = attend(q, k, v, mask, softmax_scale)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, log_sum.to(lse.dtype))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
        shares = scores.masked_fill(~mask[:, None], -torch.inf).softmax(-1)
        change = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        change = shares * (change - (change * shares).sum(-1, keepdim=True)) * softmax_scale
        grads = (
            torch.einsum("bhqk,bkhd->bqhd", change, k),
            torch.einsum("bhqk,bqhd->bkhd", change, q),
            torch.einsum("bhqk,bqhd->bkhd", shares, dout),
        )
        for made, wanted in zip((dq, dk, dv), grads, strict=True):
            made.copy_(wanted)

    run_forward.compile_cache, run_backward.compile_cache = caches = {}, {}
    interface._flash_attn_fwd, interface._flash_attn_bwd = run_forward, run_backward
    package = types.ModuleType("flash_attn.cute")
    for name, module in zip(names, modules.values(), strict=True):
        setattr(package, name, module)
    modules |= {"flash_attn": types.ModuleType("flash_attn"), "flash_attn.cute": package}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(flash, "_scheduler", lambda last_first=False: LAST if last_first else FIRST)
    yield
    assert forward.SingleTileScheduler is backward.SingleTileScheduler is STOCK
    assert forward.AttentionMask is backward.AttentionMask is StockMask
    assert run_forward.compile_cache is caches[0] and run_backward.compile_cache is caches[1]


def assert_same(found, expected, leaves):
    """Two outputs, and the gradients of their squares."""
    torch.testing.assert_close(found, expected)
    grads = (torch.autograd.grad(output.square().sum(), leaves) for output in (found, expected))
    for got, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(got, wanted)


def watched(monkeypatch, copied=None):
    """The calls of the function around the forward kernel, which gives it a copy of one of its tensors."""
    interface, seen = sys.modules["flash_attn.cute.interface"], []
    run = interface._flash_attn_fwd

    def watch(q, k, v, **kwargs):
        seen.append((q, k, v))
        tensors = {"q": q, "k": k, "v": v, **kwargs}
        results = run(**tensors | {name: tensors[name].clone() for name in [copied] if name})
        if copied in ("out", "lse"):
            tensors[copied].copy_(results[copied])

    watch.compile_cache = run.compile_cache
    monkeypatch.setattr(interface, "_flash_attn_fwd", watch)
    return seen


def caterpillars(seed):
    """Two trees of some 600 tokens: blocks that are full, partial and hidden, off the diagonal as well."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(3, 90, size=420)
    leaves = [np.concatenate([trunk[:fork], [90 + i] * 20]) for i, fork in enumerate((150 + seed, 290, 400))]
    return [fold([Branch(ids, np.ones(len(ids))) for ids in branches]) for branches in ([trunk, *leaves], leaves[:1])]


def inputs(rows, heads, lengths=768, seed=0):
    trees = [caterpillars(seed + row)[:: 1 - 2 * (row % 2)] for row in range(rows)]  # rows with other lists of blocks
    batches = [concatenate_trees(own, 0, pad_to_multiple_of=lengths) for own in trees]
    tree = torch.cat([batch["prefix_tree"] for batch in batches])
    generator = torch.Generator().manual_seed(seed)
    leaves = [
        torch.randn(rows, tree.shape[2], n, 8, generator=generator, dtype=torch.float64).transpose(1, 2)
        for n in (*heads, heads[1])
    ]
    return tree, [x.requires_grad_() for x in leaves]


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("heads", [(4, 1), (8, 2), (6, 3), (2, 2)])
@pytest.mark.parametrize("limits", [{}, {"window": 300}, {"chunk": 256}])
def test_output_and_gradients(rows, heads, limits):
    tree, leaves = inputs(rows, heads)
    mask = TreeContext(tree).mask(**limits, flex=True)
    assert mask.full_kv_num_blocks.sum() > 0 and mask.kv_num_blocks.sum() > mask.kv_num_blocks.numel()
    found = flash.attend_flash(*leaves, mask, scale=0.3)
    expected = attend_dense(*leaves, dense_mask(tree, **limits), scale=0.3)
    torch.testing.assert_close(found, expected)
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, wanted in zip(
        torch.autograd.grad(found, leaves, grad), torch.autograd.grad(expected, leaves, grad), strict=True
    ):
        torch.testing.assert_close(got, wanted)
        assert got.transpose(1, 2).is_contiguous()  # the projections read them without a copy
    assert found.transpose(1, 2).is_contiguous()


@pytest.mark.usefixtures("plain_kernels")
def test_nothing_of_a_single_row_is_copied(monkeypatch):
    tree, leaves = inputs(1, (6, 3))
    seen = watched(monkeypatch)
    found = flash.attend_flash(*leaves, TreeContext(tree).mask(flex=True))
    assert [x.data_ptr() for x in seen[0]] == [x.data_ptr() for x in leaves]
    assert seen[0][0].shape == (2, tree.shape[2], 3, 8) and seen[0][1].stride(0) == 0
    torch.testing.assert_close(found, attend_dense(*leaves, dense_mask(tree)))  # the scale of the head size


@pytest.fixture(params=["eager", "compiled"])
def attend_tree(request, plain_kernels):
    """`attend_flash`, of eager layers or as compiled ones call it."""
    if request.param == "eager":
        yield flash.attend_flash
        return
    torch._dynamo.reset()
    yield torch.compile(flash.attend_flash, dynamic=True, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


def test_a_mask_is_prepared_once_for_all_layers(attend_tree, monkeypatch):
    """Once for each pair of numbers of heads: layers may have different ones."""
    made = []
    prepare = flash._prepare
    monkeypatch.setattr(flash, "_prepare", lambda *args: made.append(args) or prepare(*args))
    tree, _ = inputs(2, (4, 2))
    mask = TreeContext(tree).mask(flex=True)
    for heads in ((4, 2), (4, 1), (4, 2), (2, 2)):
        _, leaves = inputs(2, heads)
        assert_same(attend_tree(*leaves, mask, scale=0.3), attend_dense(*leaves, dense_mask(tree), scale=0.3), leaves)
    assert len(made) == 2 * 3  # forward and backward


def test_a_prepared_mask_goes_with_its_tree(attend_tree):
    gc.collect()  # masks of other tests
    tree, leaves = inputs(1, (4, 2))
    mask = TreeContext(tree).mask(flex=True)
    before, blocks = len(flash._prepared), weakref.ref(mask.kv_indices)
    attend_tree(*leaves, mask, scale=0.3).sum().backward()
    assert len(flash._prepared) == before + 1
    del mask
    assert len(flash._prepared) == before and blocks() is None


@pytest.mark.parametrize(("name", "times"), [("depth", 2), ("limit", 2), ("full_kv_num_blocks", 1), ("q_indices", 1)])
def test_a_prepared_mask_serves_no_other_tensors(attend_tree, monkeypatch, name, times):
    """Of a mask with the same `subtree_end`: the kernels read them by address."""
    made, prepare = [], flash._prepare
    monkeypatch.setattr(flash, "_prepare", lambda *args: made.append(args) or prepare(*args))
    tree, leaves = inputs(1, (4, 2))
    mask = TreeContext(tree).mask(window=300, flex=True)
    attend_tree(*leaves, mask, scale=0.3).sum().backward()
    other = copy.copy(mask)
    setattr(other, name, getattr(mask, name).clone())
    if name == "limit":
        getattr(mask, name).zero_()
    expected = attend_dense(*leaves, dense_mask(tree, window=300), scale=0.3)
    assert_same(attend_tree(*leaves, other, scale=0.3), expected, leaves)
    assert len(made) == 2 + times


@pytest.mark.parametrize("rows", [1, 2])
def test_later_layers_launch_the_kernel_alone(attend_tree, monkeypatch, rows):
    tree, leaves = inputs(rows, (4, 2))
    mask, seen, devices = TreeContext(tree).mask(flex=True), watched(monkeypatch), []
    monkeypatch.setattr(torch.accelerator, "device_index", lambda index: nullcontext(devices.append(index)))
    for number in range(3):
        layer = [(x.detach() + number).requires_grad_() for x in leaves]
        del devices[:]
        found = attend_tree(*layer, mask, scale=0.3)
        assert len(seen) == len(devices) == rows  # on the device of the tensors
        assert_same(found, attend_dense(*layer, dense_mask(tree), scale=0.3), layer)


def offset(x):
    """The same numbers in the same layout, one element further in memory."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].as_strided(x.shape, x.stride(), 1)
    return moved.copy_(x)


def changed(position, function):
    return lambda tensors: [function(x) if position in (None, i) else x for i, x in enumerate(tensors)]


OTHER_KINDS = {
    **{f"layout of {i}": changed(i, lambda x: x.contiguous()) for i in range(3)},
    **{f"alignment of {i}": changed(i, offset) for i in range(3)},
    "head size": changed(None, lambda x: x[..., :4]),  # in the same layout
    "dtype": changed(None, lambda x: x.float()),
    "elements apart": changed(None, lambda x: x.repeat_interleave(2, dim=3)[..., ::2]),  # copied: heads first
}


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("name", OTHER_KINDS)
def test_a_kernel_is_launched_again_on_the_same_kind_of_tensors_only(name, monkeypatch):
    tree, leaves = inputs(1, (4, 2))
    mask, seen = TreeContext(tree).mask(flex=True), watched(monkeypatch)
    base = [x.detach() for x in leaves]
    for tensors, calls in ((base, 1), (OTHER_KINDS[name](base), 2), (base, 2), (OTHER_KINDS[name](base), 2)):
        found = flash.attend_flash(*tensors, mask, scale=0.3)
        torch.testing.assert_close(found, attend_dense(*tensors, dense_mask(tree), scale=0.3))
        assert len(seen) == calls
    flash.attend_flash(*base, mask, scale=0.5)
    assert len(seen) == 3  # for another scale


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("copied", ["q", "k", "v", "out", "lse"])
def test_a_kernel_that_got_a_copy_is_not_launched_on_what_was_copied(copied, monkeypatch):
    tree, leaves = inputs(1, (4, 2))
    mask, seen = TreeContext(tree).mask(flex=True), watched(monkeypatch, copied)
    for _ in range(2):
        torch.testing.assert_close(flash.attend_flash(*leaves, mask), attend_dense(*leaves, dense_mask(tree)))
    assert len(seen) == 2


@pytest.mark.usefixtures("plain_kernels")
def test_what_other_threads_launch_meanwhile_is_not_taken_for_ours():
    function = SimpleNamespace(compile_cache={"kernel": lambda *args: made.append(args)})
    made = []
    with flash._Recorder(function) as launches:
        other = threading.Thread(target=lambda: function.compile_cache["kernel"]("theirs"))
        other.start()
        other.join(10)
        function.compile_cache["kernel"]("ours")
    assert made == [("theirs",), ("ours",)] and [args for _, args in launches] == [("ours",)]


@pytest.mark.usefixtures("plain_kernels")
def test_the_operator_is_what_pytorch_expects():
    tree, leaves = inputs(1, (4, 2))
    mask = TreeContext(tree).mask(window=300, flex=True)
    lists = [
        *(mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices),
        *(mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices),
    ]
    query, key, value = (x.detach().requires_grad_() for x in leaves)
    rows = [mask.subtree_end, mask.depth, mask.limit]
    torch.library.opcheck(flash._flash, (query, key, value, rows, lists, mask.kind, 0.3))


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    tree, leaves = inputs(1, (4, 2))
    mask = TreeContext(tree).mask(flex=True)
    attend = lambda *leaves: flash.attend_flash(*leaves, mask)  # noqa: E731
    kept = torch.autograd.grad(attend(*leaves).sum(), leaves)
    checkpoint(attend, *leaves, use_reentrant=reentrant).sum().backward()
    for leaf, expected in zip(leaves, kept, strict=True):
        assert torch.equal(leaf.grad, expected)


@pytest.mark.usefixtures("plain_kernels")
def test_second_derivatives_are_refused():
    """The kernels leave none; without the error they would be those of everything else, silently."""
    tree, leaves = inputs(1, (4, 2))
    found = flash.attend_flash(*leaves, TreeContext(tree).mask(flex=True))
    (grad, *_) = torch.autograd.grad(found.square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


@pytest.mark.usefixtures("plain_kernels")
@pytest.mark.parametrize("checkpointing", [None, True, False])
def test_one_graph_whatever_the_length(checkpointing):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(flash.attend_flash, dynamic=True, fullgraph=True, backend="aot_eager")
    run = functools.partial(compiled, scale=0.3)
    if checkpointing is not None:
        run = functools.partial(checkpoint, run, use_reentrant=checkpointing)
    for seed, lengths in enumerate((768, 896, 1024)):
        tree, leaves = inputs(1, (4, 2), lengths, seed)
        mask = TreeContext(tree).mask(flex=True)
        with one_graph_for_all_lengths():
            found = run(*(x.clone() for x in leaves), mask)
            found.sum().backward()
        expected = attend_dense(*leaves, dense_mask(tree), scale=0.3)
        for leaf, wanted in zip(leaves, torch.autograd.grad(expected.sum(), leaves), strict=True):
            torch.testing.assert_close(leaf.grad, wanted)
    # reentrant checkpointing runs the forward without gradients first
    assert counters["stats"]["unique_graphs"] == (2 if checkpointing else 1) and not counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.usefixtures("plain_kernels")
def test_only_partial_blocks_are_masked_and_never_by_the_ends_of_sequences(monkeypatch):
    monkeypatch.setattr(StockMask, "asked", [])
    mask = flash._whole_blocks()()
    mask.apply_mask("scores", n_block=0, mask_seqlen=True)
    assert StockMask.asked == []
    mask.apply_mask("scores", n_block=0, mask_seqlen=True, mask_mod="visible")
    assert StockMask.asked == [(("scores",), {"n_block": 0, "mask_seqlen": False, "mask_mod": "visible"})]


@pytest.mark.usefixtures("plain_kernels")
def test_kernels_that_other_threads_compile_meanwhile_have_all_their_masks():
    forward, made = sys.modules["flash_attn.cute.flash_fwd_sm90"], []
    with flash._kernels_of(torch.device("cpu")):
        other = threading.Thread(target=lambda: made.append(forward.AttentionMask()))
        other.start()
        other.join(10)
        made.append(forward.AttentionMask())
    assert [type(mask) for mask in made] == [StockMask, flash._whole_blocks()]


@pytest.mark.usefixtures("plain_kernels")
def test_threads_take_turns():
    """The backward runs in threads of its own; an order that leaked would stay for every other user."""
    forward = sys.modules["flash_attn.cute.flash_fwd_sm90"]
    inside, leave, seen = threading.Event(), threading.Event(), []

    def first():
        with flash._kernels_of(torch.device("cpu")):
            inside.set()
            leave.wait(10)

    def second():
        with flash._kernels_of(torch.device("cpu")):
            seen.append(forward.SingleTileScheduler)

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert not seen  # it waits
    leave.set()
    for thread in threads:
        thread.join(10)
    assert seen == [LAST] and forward.SingleTileScheduler is STOCK


@pytest.mark.usefixtures("plain_kernels")
def test_the_order_of_blocks_is_given_back_after_an_error(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no kernel")

    fail.compile_cache = cache = {}

    monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], "_flash_attn_fwd", fail)
    tree, leaves = inputs(1, (2, 2))
    with pytest.raises(RuntimeError, match="no kernel"):
        flash.attend_flash(*leaves, TreeContext(tree).mask(flex=True))
    assert fail.compile_cache is cache


@pytest.mark.usefixtures("plain_kernels")
def test_queries_after_a_path():
    """A section of a packed sequence: more keys than queries."""
    batch = concatenate_trees(caterpillars(0), 0)
    sections = [section for section in sections_of(batch, 300) if section.start]
    assert {section.start for section in sections} != {0} and len(sections) > 1
    for section in sections:
        tree = section.inputs["prefix_tree"]
        mask = TreeContext(tree, section=section).mask(flex=True)
        generator = torch.Generator().manual_seed(0)
        keys = section.start + section.length
        leaves = [
            torch.randn(1, heads, tokens, 8, generator=generator, dtype=torch.float64).requires_grad_()
            for heads, tokens in ((4, section.length), (2, keys), (2, keys))
        ]
        found = flash.attend_flash(*leaves, mask, scale=0.3)
        assert_same(found, attend_dense(*leaves, dense_mask(tree, section.path), scale=0.3), leaves)


LIMITS = {"causal": {}, "window": {"window": 300}, "chunk": {"chunk": 256}}


@pytest.mark.usefixtures("cute")
@pytest.mark.parametrize("kind", LIMITS)
def test_the_masks_of_the_kernels(kind):
    tree, _ = inputs(2, (2, 2))
    mask = TreeContext(tree).mask(**LIMITS[kind], flex=True)
    assert mask.kind == kind
    expected = dense_mask(tree, **LIMITS[kind])[:, 0]
    length = tree.shape[2]
    query, key = torch.meshgrid(torch.arange(length), torch.arange(length), indexing="ij")
    mask_mod = flash._mask_mod(kind)
    for row in range(2):
        rows = [mask.subtree_end[row]] if mask.limit is None else [mask.subtree_end[row], mask.depth[row], mask.limit]
        scalars = [x.data_ptr() for x in rows]
        found = mask_mod(Lanes(0), Lanes(0), Lanes(query), Lanes(key), None, None, scalars).values
        assert torch.equal(found, expected[row])


@pytest.mark.usefixtures("cute")
def test_compiled_kernels_of_different_masks_are_kept_apart():
    hashes = {flash._mask_mod(kind).__cute_hash__ for kind in LIMITS}
    code = hashlib.sha256(Path(flash.__file__).read_bytes()).hexdigest()[:16]
    assert len(hashes) == 3 and all(code in own for own in hashes)


@pytest.mark.parametrize("last_first", [False, True])
def test_every_block_is_run_once(cute, monkeypatch, last_first):
    stock = types.ModuleType("flash_attn.cute.tile_scheduler")

    class SingleTileScheduler:
        Params, to_underlying_arguments = object, staticmethod(lambda args: args)

        def __init__(self, params, coordinates, loc=None, ip=None):
            self.coordinates = coordinates

    stock.SingleTileScheduler = SingleTileScheduler
    monkeypatch.setitem(sys.modules, "flash_attn.cute.tile_scheduler", stock)
    params = SimpleNamespace(num_head=3, num_splits=1, num_batch=2, num_block=5)
    order = flash._scheduler(last_first)
    across, down, deep = order.get_grid_shape(params)
    found = []
    for z, y, x in product(range(deep), range(down), range(across)):  # as the device starts them
        cute.arch.block_idx = lambda own=(x, y, z): own
        found.append(order.create(params).coordinates)
    assert sorted(found) == list(product(range(5), range(3), range(2)))  # block, head, row
    blocks = [block for block, _, _ in found]
    assert blocks == sorted(blocks, reverse=last_first)
