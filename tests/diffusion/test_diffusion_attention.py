"""The masks of diffusion models against their definition, and prepared models against stock ones, block by block."""

import copy

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM, BloomConfig, Lfm2Config, LlamaConfig, Qwen3NextConfig

from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.diffusion.model import prepare_diffusion_model, unprepare_diffusion_model
from hf_prefix_tree.modeling.attention.masks.spans import LAYOUTS, block_mask, dense_mask, spans
from tests.support.diffusion_models import block_of, pair, sees, stock_logits
from tests.support.models import CONFIGS, VOCAB, gradients, make_model

# ---- masks ----


def test_the_rows_of_the_paper():
    rows = ["11000000", "11000000", "00111100", "00111100", "00001100", "00001100", "00001111", "00001111"]
    expected = torch.tensor([[int(digit) for digit in row] for row in rows], dtype=torch.bool)
    assert torch.equal(dense_mask(spans(torch.ones(1, 4), "block_diffusion", 2))[0, 0], expected)


def written_out(attended, layout, size, starts, causal_before=(0, 0, 0)):
    batch_size, length = attended.shape
    total = length if layout in ("full", "block_causal") else 2 * length
    mask = torch.zeros(batch_size, 1, total, total, dtype=torch.bool)
    for row in range(batch_size):
        for q in range(total):
            for k in range(total):
                inside = sees(layout, size, starts[row], length, q, k, causal_before[row])
                mask[row, 0, q, k] = q == k or (inside and bool(attended[row, k % length]))
    return mask


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(6))
def test_dense_masks_are_their_definition(layout, seed):
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 14, (1,), generator=generator))
    size = int(torch.randint(1, length + 2, (1,), generator=generator))
    starts = torch.randint(0, length + 1, (3,), generator=generator) if seed % 2 else torch.zeros(3, dtype=torch.int64)
    attended = torch.randint(0, 4, (3, length), generator=generator) > 0  # holes too
    causal = torch.randint(0, length + 1, (3,), generator=generator) if layout == "block_causal" else None
    found = spans(attended.long(), layout, size, window_start=starts if seed % 2 else None, causal_before=causal)
    expected = written_out(attended, layout, size, starts.tolist(), (0, 0, 0) if causal is None else causal.tolist())
    assert found.dtype == torch.int32
    assert torch.equal(dense_mask(found), expected)


def blocks_of(mask, row, query):
    return {
        kind: set(indices[row, 0, query, : counts[row, 0, query]].tolist())
        for kind, counts, indices in (
            ("partial", mask.kv_num_blocks, mask.kv_indices),
            ("full", mask.full_kv_num_blocks, mask.full_kv_indices),
        )
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [32, 48, 128, 200])
@pytest.mark.parametrize("straddles", [False, True])
def test_block_masks_equal_create_block_mask(layout, size, straddles):
    length = 576 if straddles else 640  # 2 x 576 is a multiple of 128, 576 is none: a block holds both x_t and x_0
    if straddles and layout in ("full", "block_causal"):
        length = 768
    attended = torch.arange(length)[None] < torch.tensor([length, length - 200, 130, 0])[:, None]
    starts = torch.tensor([0, 37, 256, 300])
    found = spans(attended, layout, size, window_start=starts)
    built, dense = block_mask(found), dense_mask(found)
    rows, total = dense.shape[0], dense.shape[-1]
    generic = create_block_mask(
        lambda b, h, q, k: dense[b, 0, q, k], B=rows, H=None, Q_LEN=total, KV_LEN=total, device="cpu"
    )
    for row in range(rows):
        for query in range(total // 128):
            own, expected = blocks_of(built, row, query), blocks_of(generic, row, query)
            if straddles:  # may call a block partial that is not: slower, never wrong
                assert own["full"] <= expected["full"]
                assert expected["partial"] | expected["full"] <= own["partial"] | own["full"]
                assert not own["full"] & own["partial"]
            else:
                assert own == expected, (row, query)
    index = torch.arange(total)
    pointwise = built.mask_mod(torch.arange(rows)[:, None, None], 0, index[:, None], index[None, :])
    assert torch.equal(pointwise, dense[:, 0])
    # the backward's lists hold the same blocks, by key
    assert torch.equal(built.to_dense().sum(-2), built.q_num_blocks + built.full_q_num_blocks)


def test_most_blocks_of_block_diffusion_are_skipped():
    built = block_mask(spans(torch.ones(1, 1024), "block_diffusion", 128))
    # x_t: 8 own blocks and 28 earlier clean ones; x_0: 36
    assert built.to_dense().sum() == 8 + 28 + 36
    assert built.full_kv_num_blocks.sum() == 8 + 28 + 36  # nothing is computed and thrown away


def test_wrong_layouts_are_refused():
    with pytest.raises(ValueError, match="`layout`"):
        spans(torch.ones(1, 4), "causal", 2)


# ---- models ----

LENGTH, SIZE = 10, 4


def draw(seed, batch_size=2):
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(3, VOCAB, (batch_size, LENGTH), generator=generator)
    noisy = torch.where(torch.rand(clean.shape, generator=generator) < 0.5, 1, clean)
    return clean, noisy, torch.randn(batch_size, 2 * LENGTH, VOCAB, generator=generator, dtype=torch.float64)


def reference_rows(model, clean, noisy, layout, start, length):
    """The logits of `[x_t | x_0]`, from one stock run per block and one of the clean tokens."""
    index = torch.arange(length)
    block = torch.tensor([block_of(i, SIZE, start) for i in range(length)])
    causal = index[None, :] <= index[:, None]
    seen = causal if layout == "hybrid" else block[None, :] <= block[:, None]
    clean_logits = stock_logits(model, clean[:length], seen)
    noisy_logits = torch.zeros_like(clean_logits)
    for number in block.unique().tolist():
        own = block == number
        last = int(own.nonzero().max()) + 1
        ids = torch.where(own, noisy[:length], clean[:length])[:last]
        mask = seen[:last, :last] | (own[:last, None] & own[None, :last])
        noisy_logits = torch.where(
            own[:, None],
            torch.nn.functional.pad(stock_logits(model, ids, mask), (0, 0, 0, length - last)),
            noisy_logits,
        )
    return noisy_logits, clean_logits


@pytest.mark.parametrize("layout", ["block_diffusion", "hybrid"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_equal_one_run_per_block(name, layout):
    model, stock = pair(name)
    clean, noisy, factors = draw(0)
    lengths, starts = [LENGTH, 7], torch.tensor([0, 3])
    attended = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
    layout_rows = spans(attended, layout, SIZE, window_start=starts)
    positions = torch.arange(LENGTH).repeat(2)[None].expand(2, -1)
    real = torch.cat([attended, attended], dim=1)
    with keep_double():
        logits = model(
            input_ids=torch.cat([noisy, clean], dim=1), position_ids=positions, diffusion_layout=layout_rows
        ).logits
        (logits * factors)[real].sum().backward()
        expected = torch.zeros_like(logits)
        for row, length in enumerate(lengths):
            halves = reference_rows(stock, clean[row], noisy[row], layout, int(starts[row]), length)
            for half, offset in zip(halves, (0, LENGTH), strict=True):
                expected = torch.index_put(expected, (torch.tensor(row), torch.arange(offset, offset + length)), half)
        (expected * factors)[real].sum().backward()
    assert (logits - expected)[real].abs().max() < 1e-10
    own, other = gradients(model), gradients(stock)
    assert own.keys() == other.keys() and len(own) > 10
    for key, value in other.items():
        assert (own[key] - value).abs().max() < 1e-9 * (1 + value.abs().max()), key


def full_logits(model, ids, lengths):
    attended = torch.arange(ids.shape[1])[None] < torch.tensor(lengths)[:, None]
    return model(ids, attention_mask=attended.long()).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_a_plain_call_attends_both_ways_and_not_to_padding(name):
    model, stock = pair(name)
    ids, _, _ = draw(1)
    lengths = [LENGTH, 6]
    with keep_double(), torch.no_grad():
        logits = full_logits(model, ids, lengths)
        for row, length in enumerate(lengths):
            visible = torch.ones(length, length, dtype=torch.bool)
            expected = stock_logits(stock, ids[row, :length], visible)
            assert (logits[row, :length] - expected).abs().max() < 1e-10
            # what must not pass: a causal mask, visible padding
            causal = stock_logits(stock, ids[row, :length], visible.tril())
            assert (logits[row, :length] - causal).abs().max() > 1e-2
        seen = stock_logits(stock, ids[1], torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        assert (logits[1, :6] - seen[:6]).abs().max() > 1e-2
        other = ids.clone()
        other[1, 6:] = 5  # whatever the padding is
        # (experts see the batch sorted, and round differently)
        assert (full_logits(model, other, lengths)[1, :6] - logits[1, :6]).abs().max() < 1e-13


def test_padding_is_told_by_the_mask_and_not_by_its_id():
    model, _ = pair("llama")
    ids = torch.tensor([[5, 0, 7, 0, 0, 0]])  # 0 is the padding token, and a token of the text
    with keep_double(), torch.no_grad():
        expected = model(ids[:, :4]).logits
        assert (full_logits(model, ids, [4])[:, :4] - expected).abs().max() < 1e-12


def test_only_chosen_positions_reach_the_head():
    model, _ = pair("qwen3")
    ids, _, _ = draw(2)
    layout = spans(torch.ones_like(ids))
    positions = torch.arange(LENGTH).expand(2, -1)
    with keep_double(), torch.no_grad():
        every = model(ids).logits
        where = torch.tensor([3, 15, 4])
        few = model(ids, position_ids=positions, diffusion_layout=layout, predict_positions=where).logits
        assert few.shape == (1, 3, VOCAB)
        assert (few[0] - every.flatten(0, 1)[where]).abs().max() < 1e-12
        assert torch.equal(model(ids).logits, every)  # nothing stays behind


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_nothing(use_reentrant):
    found = []
    for checkpointed in (False, True):
        model = prepare_diffusion_model(make_model("qwen3", dtype=torch.float32)).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        clean, noisy, factors = draw(3)
        rows = spans(torch.ones_like(clean), "block_diffusion", SIZE)
        positions = torch.arange(LENGTH).repeat(2)[None].expand(2, -1)
        logits = model(torch.cat([noisy, clean], 1), position_ids=positions, diffusion_layout=rows).logits
        (logits * factors.float()).sum().backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][key]) for key, value in found[0].items())


def test_everything_is_undone():
    model = make_model("qwen3")
    before = copy.deepcopy(model)
    attributes = set(model.__dict__), set(model.config.__dict__)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        expected = model(ids).logits
        prepare_diffusion_model(model)
        assert prepare_diffusion_model(model, attn_backend="sdpa") is model
        assert len(model._forward_pre_hooks) == 1  # a second call adds nothing
        assert model.config.is_causal is False
        assert (model(ids).logits[0, 0] - expected[0, 0]).abs().max() > 1e-3
        unprepare_diffusion_model(model)
        unprepare_diffusion_model(model)
        assert torch.equal(model(ids).logits, expected)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert (set(model.__dict__), set(model.config.__dict__)) == attributes
        assert model.config._attn_implementation == before.config._attn_implementation
        prepare_model(model)  # its own check runs
        with pytest.raises(ValueError, match="`unprepare_model"):
            prepare_diffusion_model(model)
    with pytest.raises(ValueError, match="`unprepare_diffusion_model"):
        prepare_model(prepare_diffusion_model(before))


def test_wrong_calls_are_refused():
    model = prepare_diffusion_model(make_model("llama", dtype=torch.float32))
    ids = torch.tensor([[5, 6, 7, 8]])
    layout, positions = spans(torch.ones_like(ids)), torch.arange(4)[None]
    for kwargs, message in (
        ({"labels": ids}, "`labels`"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "`attention_mask`.*4"),
        ({"output_attentions": True}, "`output_attentions`"),
        ({"diffusion_layout": layout}, "`diffusion_layout`.*`position_ids`"),
        (
            {"diffusion_layout": layout[:, :, :3], "position_ids": positions},
            "\\(1, 6, 3\\).*\\(1, 4\\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            model(ids, **kwargs)
    with pytest.raises(ValueError, match=r"`diffusion_generate`.*`generate`"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="`diffusion_layout`"):
        model.model(ids, diffusion_layout=layout)
    with pytest.raises(ValueError, match="prepared"):
        model.model(ids)
    model(ids)  # and after all of that it works
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="'sdpa'"):
        model(ids)
    flex = prepare_diffusion_model(make_model("llama", dtype=torch.float32), attn_backend="flex")
    with pytest.raises(ValueError, match="`attn_backend='flex'`"):
        flex(ids)
    with pytest.raises(ValueError, match="`attn_backend`"):
        prepare_diffusion_model(model, attn_backend="dense")


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
def test_windows_that_are_too_short_are_refused(name):
    model = prepare_diffusion_model(make_model(name))
    ids = torch.full((1, 6), 5)
    with keep_double():
        model(ids)
        with pytest.raises(ValueError, match=r"6.*7"):
            model(torch.full((1, 7), 5))
        # a row [x_t | x_0] is twice as long, its sequence is not
        rows = spans(torch.ones_like(ids), "block_diffusion", 2)
        model(ids.repeat(1, 2), position_ids=torch.arange(6).repeat(2)[None], diffusion_layout=rows)


_TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_GQA = {**_TINY, "num_key_value_heads": 1}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Lfm2Config(**_GQA, layer_types=["conv", "full_attention"]), "`conv`"),
        (Qwen3NextConfig(**_GQA, layer_types=["linear_attention", "full_attention"]), "`linear_attention`"),
        (BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2), "attention"),
        (LlamaConfig(**_GQA, attention_dropout=0.1), "`config.attention_dropout=0.1`"),
    ],
    ids=["lfm2", "qwen3_next", "bloom", "dropout"],
)
def test_models_that_cannot_be_one_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        prepare_diffusion_model(AutoModelForCausalLM.from_config(config))
