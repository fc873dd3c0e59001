"""Which backend a call gets, with which reason, without a GPU: devices are named, FLASH is stood in for."""

import copy
import itertools
import logging
from types import SimpleNamespace

import pytest
import torch
from packaging.version import Version
from transformers import DeepseekV3Config, Gemma2Config, Qwen3Config

import hf_prefix_tree.modeling.attention.backend as backend
import hf_prefix_tree.modeling.attention.kernels as kernels
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.attention.backend import AttentionCall, choose_backend
from hf_prefix_tree.modeling.attention.interface import prefix_tree_attention
from hf_prefix_tree.modeling.attention.kernels import attend_dense
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask, tree_block_mask
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import TreeContext
from tests.support.models import CONFIGS, make_model, random_forest

GPU = torch.device("cuda", 0)
CALL = AttentionCall(GPU, torch.bfloat16, 64 * 128, 16, 8, 128, 128)


def chain(blocks):
    """A row of one branch: every block before the diagonal is full."""
    length = blocks * 128
    tree = torch.stack([torch.full((length,), length), torch.arange(length), torch.arange(-1, length - 1)])
    return tree_block_mask(tree[None].int())


def strangers(blocks):
    """A row of tokens that see themselves only: every block is on the diagonal."""
    length = blocks * 128
    tree = torch.stack([torch.arange(1, length + 1), torch.zeros(length), torch.full((length,), -1)])
    return tree_block_mask(tree[None].int())


def never():
    raise AssertionError("the mask was looked at")


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A Hopper GPU with a good build of flash-attn-4, which was checked already."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "_flash_version", lambda: Version("4.0.0b36"))
    monkeypatch.setattr(backend, "_checked", {(GPU, torch.bfloat16, "causal", True, 2, 128, 128): None})
    monkeypatch.setattr(backend, "_sparse", {})
    backend._log_once.cache_clear()


def test_the_choice_is_logged_once_with_its_reason(caplog):
    caplog.set_level(logging.INFO, logger="hf_prefix_tree")
    for _ in range(3):
        assert choose_backend("auto", CALL, lambda: chain(64)) == "flash"
        assert choose_backend("sdpa", CALL, never) == "sdpa"
    assert [record.getMessage() for record in caplog.records] == [
        "Tree attention on cuda: flash, as flash-attn-4 4.0.0b36 agrees with Triton at these head sizes.",
        "Tree attention on cuda: sdpa, as it was asked for.",
    ]


NOT_FLEX = [
    ({"device": torch.device("cpu")}, "no backward on cpu"),
    ({"dtype": torch.float64}, "does not take torch.float64"),
    ({"head_dim": 8}, "at least 16, got 8"),
    ({"length": 8191}, "no multiple of 128"),
]
NOT_FLASH = [
    ({"dtype": torch.float32}, "does not take torch.float32"),
    ({"head_dim": 192, "value_dim": 128}, "head sizes 192 and 128"),
    ({"head_dim": 256, "value_dim": 256}, "head sizes 256 and 256"),
    ({"head_dim": 96, "value_dim": 96}, "head sizes 96 and 96"),
    ({"sinks": True}, "gradients through the log-sum-exp"),
    ({"softcap": True}, "softcap"),
    ({"length": 4097 * 128}, "blocks of 128 only"),
]


@pytest.mark.parametrize(("changes", "reason"), NOT_FLEX)
def test_where_flexattention_cannot_train(changes, reason):
    call = CALL._replace(**changes)
    assert choose_backend("auto", call, never) == "sdpa"
    for requested in ("flex", "flash"):
        with pytest.raises(ValueError, match=rf"`attn_backend='{requested}'`.*{reason}"):
            choose_backend(requested, call, never)


@pytest.mark.parametrize(("changes", "reason"), NOT_FLASH)
def test_where_flash_does_not_serve(changes, reason):
    call = CALL._replace(**changes)
    assert choose_backend("auto", call, never) == "flex"
    assert choose_backend("flex", call, never) == "flex"
    with pytest.raises(ValueError, match=rf"`attn_backend='flash'`.*{reason}.*'flex'"):
        choose_backend("flash", call, never)


def test_versions_devices_and_modes_that_flash_does_not_serve(monkeypatch):
    def refused(reason):
        assert choose_backend("auto", CALL, never) == "flex"
        with pytest.raises(ValueError, match=reason):
            choose_backend("flash", CALL, never)

    for capability in ((8, 0), (10, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        refused(rf"this is {capability[0]}\.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    torch.use_deterministic_algorithms(True)
    try:
        refused("not deterministic")
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(backend, "_flash_version", lambda: Version("4.0.0b13"))
    refused("4.0.0b13 is not 4.0.0b36")
    monkeypatch.setattr(backend, "_flash_version", lambda: Version("4.0.0"))
    refused("4.0.0 is not 4.0.0b36")
    monkeypatch.setattr(backend, "_flash_version", lambda: None)
    refused("not installed")


def test_a_single_block_and_an_architecture_that_cannot():
    assert choose_backend("auto", CALL._replace(length=128), never) == "sdpa"
    assert choose_backend("flex", CALL._replace(length=128), never) == "flex"
    assert choose_backend("auto", CALL, never, "it takes a dense mask") == "sdpa"
    with pytest.raises(ValueError, match="dense"):
        choose_backend("flex", CALL, never, "it takes a dense mask")


def test_short_and_sparse_rows_go_to_triton_unless_forced():
    assert choose_backend("auto", CALL._replace(length=39 * 128), never) == "flex"
    looked = []
    look = lambda: looked.append(1) or strangers(64)  # noqa: E731
    for length in (64, 64, 100):
        assert choose_backend("auto", CALL._replace(length=length * 128), look) == "flex"
    assert len(looked) == 1  # the device is waited for once for each power of two
    assert choose_backend("auto", CALL._replace(length=130 * 128), lambda: chain(130)) == "flash"
    assert choose_backend("flash", CALL, never) == "flash"


def dense_standin(change=lambda q, k, v: (q, k, v)):
    def attend(query, key, value, mask):
        length = query.shape[2]
        index = torch.arange(length)
        visible = mask.mask_mod(torch.zeros(1, dtype=torch.int64), 0, index[:, None], index[None])
        return attend_dense(*change(query, key, value), visible[None, None])

    return attend


def scaled_gradient(query, key, value):
    return query, key, value.detach() + (value - value.detach()) * 1.1


def in_turn(*functions):
    turns = itertools.cycle(functions)
    return lambda *args: next(turns)(*args)


def failing(*args):
    raise NotImplementedError("head size\nof this kind")


@pytest.mark.parametrize(
    ("flash", "reason"),
    [
        (dense_standin(), None),
        (dense_standin(scaled_gradient), r"value gradient 1.0e-01"),
        (dense_standin(lambda q, k, v: (q * torch.nan, k, v)), r"output nan, query gradient nan"),
        (in_turn(dense_standin(), dense_standin(scaled_gradient)), r"value gradient 1.0e-01"),
        (failing, r"NotImplementedError: head size\."),
    ],
)
def test_flash_is_compared_with_triton_once(flash, reason, monkeypatch):
    monkeypatch.setattr(backend, "_checked", {})
    monkeypatch.setattr(backend, "attend_flex", dense_standin())
    calls = []
    monkeypatch.setattr(backend, "attend_flash", lambda *args: calls.append(args[0].shape) or flash(*args))
    call = CALL._replace(device=torch.device("cpu"), dtype=torch.float32, length=4 * 128)
    state = torch.get_rng_state()
    with torch.no_grad():  # as in evaluation: the backward is compared all the same
        if reason is None:
            assert backend._agrees_with_triton(call, lambda: chain(4)) is None
        else:
            with pytest.warns(UserWarning, match=f"`flash-attn-4`.*{reason}"):
                found = backend._agrees_with_triton(call, lambda: chain(4))
            assert backend._agrees_with_triton(call, never) == found  # no second warning, no second run
    assert calls == [(1, 16, 512, 128)] * (1 if flash is failing else 2)  # layers after the first launch by themselves
    assert torch.equal(state, torch.get_rng_state())


def test_inference_mode_takes_what_was_compared_before():
    look = lambda: chain(64)  # noqa: E731
    with torch.inference_mode():
        assert choose_backend("auto", CALL, look) == choose_backend("flash", CALL, never) == "flash"
        backend._checked.clear()
        assert choose_backend("auto", CALL, look) == "flex"
        with pytest.raises(ValueError, match="inference mode"):
            choose_backend("flash", CALL, look)
    assert not backend._checked


def test_the_comparison_is_outside_of_the_hooks_of_the_step(monkeypatch):
    """Offloading and checkpointing count what is saved, and what the backward asks for."""

    def seen(x):
        raise AssertionError("a tensor of the comparison was saved")

    for name in ("attend_flash", "attend_flex"):
        monkeypatch.setattr(backend, name, dense_standin())
    call = CALL._replace(device=torch.device("cpu"), dtype=torch.float32, length=4 * 128)
    with torch.autograd.graph.saved_tensors_hooks(seen, seen):
        assert backend._agrees_with_triton(call, lambda: chain(4)) is None


CHANGES = [{"mask_kind": "window"}, {"mask_kind": "chunk"}, {"length": 39 * 128}, {"heads": 8}, {"head_dim": 64}]


@pytest.mark.parametrize("change", CHANGES)
def test_every_kind_of_call_is_compared(change, monkeypatch):
    compared = []
    monkeypatch.setattr(backend, "_difference_to_triton", lambda call, mask: compared.append(call))
    call = CALL._replace(**change)
    call = call._replace(value_dim=call.head_dim)
    for _ in range(2):
        assert choose_backend("flash", call, lambda: chain(64)) == "flash"
        assert choose_backend("flash", CALL, never) == "flash"  # it was
    assert compared == [call]


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_windows_and_chunks_get_flash_where_it_is_asked_for(kind, monkeypatch):
    monkeypatch.setattr(backend, "_agrees_with_triton", lambda call, mask: None)
    call = CALL._replace(mask_kind=kind)
    assert choose_backend("auto", call, never) == "flex"
    assert choose_backend("flash", call, never) == "flash"


def test_a_failed_comparison_is_flex_under_auto_and_an_error_when_forced(monkeypatch):
    monkeypatch.setattr(backend, "_checked", {(GPU, torch.bfloat16, "causal", True, 2, 128, 128): "it differs"})
    assert choose_backend("auto", CALL, lambda: chain(64)) == "flex"
    with pytest.raises(ValueError, match="`attn_backend='flash'`"):
        choose_backend("flash", CALL, never)


@pytest.mark.parametrize("limit", [{}, {"window": 900}, {"chunk": 700}])
def test_a_long_dense_mask_is_built_in_place(limit):
    """More rows than one slice of it has; equal to the definition."""
    length = 1500
    generator = torch.Generator().manual_seed(0)
    depth = torch.randint(0, length, (length,), generator=generator)
    end = torch.arange(1, length + 1) + torch.randint(0, length, (length,), generator=generator)
    tree = torch.stack([end.clamp(max=length), depth, torch.zeros(length, dtype=torch.int64)])[None].int()
    q, k = torch.arange(length)[:, None], torch.arange(length)
    expected = (k <= q) & (q < tree[0, 0])
    if "window" in limit:
        expected &= depth[:, None] - depth < 900
    if "chunk" in limit:
        expected &= depth[:, None] // 700 == depth // 700
    assert torch.equal(dense_mask(tree, **limit)[0, 0], expected)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"sinks": True}, {"scale": 0.3}], ids=str)
def test_long_dense_attention_runs_in_blocks_that_keep_no_scores(monkeypatch, options):
    """SDPA would keep the mask as numbers in every layer."""
    length, generator = 300, torch.Generator().manual_seed(0)
    tree = concatenate_trees(random_forest(0), 0, length)["prefix_tree"][..., :length]
    mask = dense_mask(tree)
    shapes = {"query": (1, 4, length, 8), "key": (1, 2, length, 8), "value": (1, 2, length, 8), "sinks": (4,)}
    leaves = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for name, shape in shapes.items()
        if name != "sinks" or options.get(name)
    }

    def run():
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            output = attend_dense(**leaves, mask=mask, **{n: x for n, x in options.items() if n != "sinks"})
        gradients = torch.autograd.grad((output * output.detach().sin()).sum(), [*leaves.values()])
        return [output, *gradients], [x for x in kept if x.dtype != torch.bool and x.shape[-2:] == mask.shape[-2:]]

    expected, kept = run()
    assert kept
    monkeypatch.setattr(kernels, "LONG", 256)
    monkeypatch.setattr(kernels, "_BLOCK_SCORES", 70 * length)  # 70 or 17 queries
    found, kept = run()
    assert not kept
    torch.testing.assert_close(found, expected)


def test_the_size_of_a_dense_mask_is_said_and_limited_on_a_cpu(caplog):
    call = CALL._replace(device=torch.device("cpu"), length=2**14)
    assert choose_backend("auto", call, never) == "sdpa" and not caplog.messages
    assert choose_backend("auto", call._replace(length=2**15), never) == "sdpa"
    assert "dense mask of 32768 tokens takes 1.0 GiB" in caplog.text
    with pytest.raises(ValueError, match=r"4\.0 GiB.*`max_packed_tokens`"):
        choose_backend("auto", call._replace(length=2**16), never)
    assert choose_backend("sdpa", CALL._replace(length=2**16), never) == "sdpa"  # on a GPU


def test_the_call_of_a_config():
    sizes = lambda config: AttentionCall.of(config, GPU, torch.bfloat16, 1024)[3:8]  # noqa: E731
    assert sizes(Qwen3Config(num_attention_heads=16, num_key_value_heads=8, head_dim=128)) == (16, 8, 128, 128, False)
    assert sizes(CONFIGS["llama"]) == (4, 2, 8, 8, False)
    assert sizes(Gemma2Config(num_attention_heads=8, num_key_value_heads=4, head_dim=256))[2:] == (256, 256, True)
    latent = DeepseekV3Config(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert sizes(latent)[2:] == (192, 128, False)


def test_layers_of_several_sizes_are_compared_at_one_head():
    config = SimpleNamespace(num_attention_heads=[8, 16], num_key_value_heads=2, head_dim=128)
    assert AttentionCall.of(config, GPU, torch.bfloat16, 1024)[3:5] == (1, 1)


@pytest.mark.parametrize("error", [torch.cuda.OutOfMemoryError(), RuntimeError("CUDA error: out of memory")])
def test_no_memory_says_nothing_about_flash(error, monkeypatch):
    def attend(*args):
        raise error

    monkeypatch.setattr(backend, "attend_flash", attend)
    monkeypatch.setattr(backend, "_checked", {})
    call = CALL._replace(device=torch.device("cpu"), dtype=torch.float32, length=4 * 128)
    with pytest.raises(type(error)):
        backend._agrees_with_triton(call, lambda: chain(4))
    assert not backend._checked


def test_the_kernel_that_was_chosen_is_what_runs(monkeypatch):
    """As on a GPU: the choice reaches every layer with its block mask."""
    import hf_prefix_tree.modeling.attention.interface as interface

    row = concatenate_trees(random_forest(0), pad_token_id=0)
    ran = []
    for name in ("attend_flash", "attend_flex"):
        run = lambda *args, own=name, **kwargs: ran.append(own) or dense_standin()(*args[:4])  # noqa: E731
        monkeypatch.setattr(interface, name, run)
    monkeypatch.setattr(interface, "FLASH_HEAD_SIZES", (8,))  # those of the tiny model
    monkeypatch.setattr(interface, "FLASH_DTYPES", (torch.float64,))
    for chosen in ("flash", "flex"):
        model = make_model("qwen3")
        expected = prepare_model(copy.deepcopy(model))(**row).loss
        with monkeypatch.context() as patch:
            patch.setattr(interface, "choose_backend", lambda *args, own=chosen: own)
            ran.clear()
            assert prepare_model(model)(**row).loss.item() == pytest.approx(expected.item(), rel=1e-12)
        assert set(ran) == {f"attend_{chosen}"} and len(ran) % len(model.model.layers) == 0


def test_the_check_of_a_model_does_not_force_flash(monkeypatch):
    """It may run in float32, where training under autocast is not, and on rows without a full block."""
    import hf_prefix_tree.modeling.attention.interface as interface

    seen = []
    choose = lambda requested, *args: seen.append(requested) or "sdpa"  # noqa: E731
    monkeypatch.setattr(interface, "choose_backend", choose)
    model = prepare_model(make_model("qwen3"), attn_backend="flash")
    assert set(seen) == {"auto"}
    seen.clear()
    model(**concatenate_trees(random_forest(0), pad_token_id=0))
    assert set(seen) == {"flash"}


def test_sinks_are_known_before_the_call(monkeypatch):
    seen = []
    choose = backend.choose_backend
    import hf_prefix_tree.modeling.attention.interface as interface

    monkeypatch.setattr(interface, "choose_backend", lambda *args: seen.append(args[1]) or choose(*args))
    row = concatenate_trees(random_forest(0), pad_token_id=0)
    for name in ("gpt_oss", "gemma3"):
        model = prepare_model(make_model(name))
        seen.clear()
        model(**row)
        assert {(call.sinks, call.mask_kind) for call in seen} == {
            (name == "gpt_oss", x) for x in ("causal", "window")
        }


def test_flash_gets_no_call_that_it_does_not_serve():
    tree = concatenate_trees(random_forest(0), pad_token_id=0)["prefix_tree"]
    context = TreeContext(tree)
    mask = context.mask(flex=True)
    mask.backend = "flash"
    query = torch.randn(1, 2, tree.shape[2], 64).bfloat16()
    other = torch.randn(1, 2, tree.shape[2], 96).bfloat16()
    with pytest.raises(ValueError, match=r"torch.float32.*`attn_backend='flex'`"):
        prefix_tree_attention(torch.nn.Module(), *[query.float()] * 3, mask, prefix_tree=context)
    with pytest.raises(ValueError, match="`attn_backend='flex'`"):
        prefix_tree_attention(torch.nn.Module(), other, other, other, mask, prefix_tree=context)
    for options in ({"softcap": 5.0}, {"s_aux": torch.zeros(2)}):
        with pytest.raises(ValueError, match="`attn_backend='flex'`"):
            prefix_tree_attention(torch.nn.Module(), query, query, query, mask, prefix_tree=context, **options)
    assert torch.equal(
        mask.mask_mod(torch.tensor(0), 0, torch.arange(128)[:, None], torch.arange(128)[None]),
        dense_mask(tree)[0, 0, :128, :128],
    )
