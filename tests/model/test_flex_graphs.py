"""FlexAttention's graphs, counted and compared without a GPU: everything but the kernels themselves."""

import functools
from unittest import mock

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import hf_prefix_tree.modeling.attention.kernels as kernels
import hf_prefix_tree.modeling.attention.masks.causal as mask_module
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask, tree_block_mask
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.streaming import sections_of
from hf_prefix_tree.tree.prefix_tree import Branch, fold


@pytest.fixture
def without_kernels(monkeypatch):
    """Dynamo and the autograd tracer run as on a GPU; FlexAttention itself runs as plain operations."""
    torch._dynamo.reset()
    counters.clear()
    compiled = functools.cache(lambda function: torch.compile(function, dynamic=True, backend="aot_eager"))
    monkeypatch.setattr(kernels, "_compiled", compiled)
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize(("softcap", "head_dim"), [(None, 32), (5.0, 32), (None, 64)])
def test_one_graph_for_each_kind_of_mask_whatever_the_length(monkeypatch, softcap, head_dim):
    # heads of 64 take the way of float32 on Hopper, whose options plain operations do not read
    monkeypatch.setattr(kernels, "_splits_products", lambda device_type: True)
    rng = np.random.default_rng(0)
    # 3 and 4 blocks are also the number of rows of the tree tensor and of heads: sizes that must not be confused
    for expected_graphs, window in ((1, None), (2, 40)):
        for length in (300, 500, 200, 1100, 350):
            branches = [rng.integers(3, 90, size=length), np.arange(3, 60)]
            row = concatenate_trees([fold([Branch(ids, np.ones(len(ids))) for ids in branches])], pad_token_id=0)
            tree = row["prefix_tree"]
            query, key, value = (torch.randn(1, tree.shape[-1], n, head_dim).transpose(1, 2) for n in (4, 2, 2))
            options = {"scale": 0.2, "softcap": softcap, "sinks": torch.randn(4)}
            with torch.no_grad():
                found = kernels.attend_flex(query, key, value, tree_block_mask(tree, window=window), **options)
                expected = kernels.attend_dense(query, key, value, dense_mask(tree, window=window), **options)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert counters["stats"]["unique_graphs"] == expected_graphs
    assert not counters["graph_break"]


@pytest.mark.usefixtures("without_kernels")
def test_one_graph_for_queries_after_a_path_whatever_its_length():
    """Sections of a packed sequence, whose keys are the first of a longer buffer; one more graph without a path."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, 90, size=1500)
    branches = [trunk, *(np.append(trunk[:fork], rng.integers(3, 90, size=200)) for fork in range(600, 1500, 150))]
    batch = concatenate_trees([fold([Branch(ids, np.ones(len(ids))) for ids in branches])], pad_token_id=0)
    sections = sections_of(batch, 500)
    assert len({(section.start, section.length) for section in sections}) > 4
    buffers = [torch.randn(4096, 2, 32) for _ in "kv"]
    for expected_graphs, window in ((2, None), (4, 40)):
        for section in sections:
            tree, end = section.inputs["prefix_tree"], section.start + section.length
            query = torch.randn(1, section.length, 4, 32).transpose(1, 2)
            key, value = (buffer[:end][None].transpose(1, 2) for buffer in buffers)
            with torch.no_grad():
                found = kernels.attend_flex(query, key, value, tree_block_mask(tree, section.path, window=window))
                expected = kernels.attend_dense(query, key, value, dense_mask(tree, section.path, window=window))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        assert counters["stats"]["unique_graphs"] == expected_graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize("layout", ["tokens before heads", "heads before tokens", "a slice of a fused projection"])
def test_the_kernels_read_values_as_they_lie_but_no_slices(monkeypatch, layout):
    taken = []
    monkeypatch.setattr(kernels, "_call_compiled", lambda function, *args: taken.append(args) or (args[0], None))
    row = concatenate_trees([fold([Branch(range(3, 200), np.ones(197))])], pad_token_id=0)
    if layout == "heads before tokens":
        given = [torch.randn(1, heads, 256, 32) for heads in (4, 2, 2)]
    else:
        fused = torch.randn(1, 256, 8, 32).split([4, 2, 2], dim=2)
        given = [x.transpose(1, 2) if "slice" in layout else x.contiguous().transpose(1, 2) for x in fused]
    kernels.flex_with_lse(*given, tree_block_mask(row["prefix_tree"]))
    for got, x in zip(taken[0], given, strict=False):
        torch.testing.assert_close(got, x, rtol=0, atol=0)
        assert got.untyped_storage().nbytes() == got.numel() * 4
        assert (got.data_ptr() == x.data_ptr()) is ("slice" not in layout)
        assert got.transpose(1, 2).is_contiguous() is (layout != "heads before tokens")  # so lies the output


@pytest.mark.usefixtures("without_kernels")
def test_hitting_the_recompile_limit_raises(monkeypatch):
    monkeypatch.setitem(kernels._DYNAMO_OPTIONS, "recompile_limit", 1)
    row = concatenate_trees([fold([Branch(range(3, 200), np.ones(197))])], pad_token_id=0)
    mask = tree_block_mask(row["prefix_tree"])
    with torch.no_grad():
        for head_dim in (16, 32):
            query = torch.randn(1, 2, 256, head_dim)
            if head_dim == 16:
                kernels.attend_flex(query, query, query, mask, scale=0.2)
            else:
                with pytest.raises(Exception, match=r"recompile_limit"):
                    kernels.attend_flex(query, query, query, mask, scale=0.2)


@pytest.mark.usefixtures("without_kernels")
def test_whole_blocks_are_told_to_the_kernel(monkeypatch):
    """Without it, a kernel that is compiled for all lengths checks the bounds of every load."""
    told = []
    flex_attention = kernels.flex_attention
    monkeypatch.setattr(
        kernels,
        "flex_attention",
        lambda *args, **kwargs: told.append(kwargs["kernel_options"]) or flex_attention(*args, **kwargs),
    )
    monkeypatch.setattr(kernels, "_call_compiled", lambda function, *args: function(*args))
    for most, size in ((4096, 128), (2, 256)):
        monkeypatch.setattr(mask_module, "_MOST_BLOCKS", most)
        row = concatenate_trees([fold([Branch(np.arange(380) % 90, np.ones(380))])], pad_token_id=0)
        tree = row["prefix_tree"]  # 3 blocks of 128, or one and a half of 256
        mask = tree_block_mask(tree)
        assert (size, size) == mask.BLOCK_SIZE
        query = torch.randn(1, 2, 384, 32)
        with torch.no_grad():
            found = kernels.attend_flex(query, query, query, mask)
        torch.testing.assert_close(found, kernels.attend_dense(query, query, query, dense_mask(tree)))
    assert [options["IS_DIVISIBLE"] for options in told] == [True, False]


@pytest.mark.parametrize(
    ("capability", "dtype", "head_dims", "precision", "parts"),
    [
        ((9, 0), torch.float32, (128, 128), "highest", "'bf16x6'"),
        ((9, 0), torch.float32, (64, 64), "highest", "'bf16x6'"),
        ((9, 0), torch.float32, (256, 256), "highest", "'tf32x3'"),
        ((9, 0), torch.float32, (128, 128), "ieee", "'bf16x6'"),
        ((9, 0), torch.float32, (128, 128), "high", None),  # TF32 was allowed: inductor takes it
        ((9, 0), torch.float32, (128, 128), "tf32", None),  # as `TrainingArguments(tf32=True)` allows it
        ((9, 0), torch.float32, (96, 96), "highest", None),
        ((9, 0), torch.float32, (128, 64), "highest", None),
        ((9, 0), torch.bfloat16, (128, 128), "highest", None),
        ((8, 0), torch.float32, (128, 128), "highest", None),
    ],
)
def test_float32_on_hopper_takes_split_products(monkeypatch, capability, dtype, head_dims, precision, parts):
    found = {}

    def record(query, key, value, kernel_options, **options):
        found.update(kernel_options)
        raise InterruptedError

    monkeypatch.setattr(kernels, "flex_attention", record)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: capability)
    # the older function raises where it does not agree with the newer attribute
    is_older = precision in ("highest", "high")
    older = mock.Mock(return_value=precision, side_effect=None if is_older else RuntimeError)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", older)
    monkeypatch.setattr(torch.backends.cuda, "matmul", mock.Mock(fp32_precision="none" if is_older else precision))
    mask = tree_block_mask(
        concatenate_trees([fold([Branch(range(3, 200), np.ones(197))])], pad_token_id=0)["prefix_tree"]
    )
    with FakeTensorMode():
        query, value = (torch.empty(1, 2, 256, size, dtype=dtype, device="cuda") for size in head_dims)
        with pytest.raises(InterruptedError):
            kernels._triton(query, query, value, mask, None, None)
    assert found.get("FLOAT32_PRECISION") == parts
    assert ("bwd_BLOCK_M1" in found) is (parts == "'bf16x6'")
