"""What makes more architectures exact: chunks, ALiBi, positions, indexers; and the calls that are refused."""

import copy
import pickle

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import AutoModelForCausalLM, BigBirdConfig, Gemma3Config, LlamaConfig

import hf_prefix_tree.modeling.attention.interface as interface_module
import hf_prefix_tree.modeling.checks as support_module
from conformance.build import build_forest, build_model
from conformance.configs import tiny_config
from conformance.forest import conformance_forest
from hf_prefix_tree import prepare_model, unprepare_model
from hf_prefix_tree.modeling.attention.interface import prefix_tree_attention
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask, tree_block_mask
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.checks import attention_windows, checked_length, rope_limit
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree.prefix_tree import Branch, fold


def forest_row(**kwargs):
    return concatenate_trees(conformance_forest(97), pad_token_id=0, **kwargs)


def caterpillar(turns, length):
    """Each branch continues the one before it, less its last tokens."""
    trunk, branches = [], []
    for turn in range(turns):
        ids = trunk + [3 + (7 * i + turn) % 90 for i in range(length)]
        branches.append(Branch(ids, [1.0] * len(ids)))
        trunk = ids[: -length // 4]
    return fold(branches)


def long_rows():
    trees = [*conformance_forest(97), caterpillar(4, 150), caterpillar(6, 60)]
    return concatenate_trees(trees, pad_token_id=0)["prefix_tree"]


def test_chunks_are_of_depth():
    tree = forest_row()["prefix_tree"]
    mask, plain, depth = dense_mask(tree, chunk=8)[0, 0], dense_mask(tree)[0, 0], tree[0, 1].tolist()
    for query in range(len(depth)):
        for key in range(len(depth)):
            assert mask[query, key] == (plain[query, key] and depth[query] // 8 == depth[key] // 8)


@pytest.mark.parametrize("chunk", [5, 100, 128, 300])
def test_block_mask_of_chunks_hides_and_shows_what_the_dense_one_does(chunk):
    tree = long_rows()
    length = tree.shape[-1]
    assert length >= 6 * 128
    dense, blocks = dense_mask(tree, chunk=chunk), tree_block_mask(tree, chunk=chunk)
    generic = create_block_mask(lambda b, h, q, k: dense[b, 0, q, k], 1, None, length, length, device="cpu")
    listed = [
        {
            (query, key)
            for query in range(length // 128)
            for key in indices[0, 0, query, : counts[0, 0, query]].tolist()
        }
        for mask in (blocks, generic)
        for counts, indices in ((mask.full_kv_num_blocks, mask.full_kv_indices), (mask.kv_num_blocks, mask.kv_indices))
    ]
    full, partial, expected_full, expected_partial = listed
    assert full <= expected_full and expected_partial <= partial
    assert full | partial >= expected_full | expected_partial
    index = torch.arange(length)
    assert torch.equal(blocks.mask_mod(0, 0, index[:, None], index[None, :]), dense[0, 0])


def test_self_verification_outgrows_the_smallest_chunk():
    assert attention_windows(tiny_config("llama4_text")) == [8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model_type", ["openai-gpt", "xlm", "xlnet", "reformer", "cpmant", "gpt_neo"])
def test_what_16_bits_would_hide_is_refused_all_the_same(model_type, dtype):
    """Errors of these models are within the rounding of bfloat16: self-verification alone would take them."""
    model = build_model(model_type).to(dtype)
    with pytest.raises(ValueError, match=r"mask|distance"):
        prepare_model(model)


def test_self_verification_outgrows_the_window_of_a_full_size_model(monkeypatch):
    config = tiny_config("gpt_neo")
    config.window_size = 256  # that of the published models: no path of the harness is as long
    assert checked_length(config) == 256 + 24
    torch.manual_seed(0)
    monkeypatch.setattr(support_module, "_hides_by_index", lambda buffer: False)
    with pytest.raises(ValueError, match="logits"):
        prepare_model(AutoModelForCausalLM.from_config(config))


def test_windows_that_no_branch_outgrows_are_not_checked():
    config = tiny_config("phi3")
    assert checked_length(config) == config.sliding_window + 24
    config.sliding_window = 262_144
    assert checked_length(config) == 24


@pytest.mark.parametrize("model_type", ["bloom", "llama4_text", "bart", "roberta", "opt"])
def test_hooks_of_positions_are_undone_and_copied(model_type):
    stock = build_model(model_type).eval()
    model = prepare_model(copy.deepcopy(stock))
    row = forest_row()
    ids = row["input_ids"][:, :20]
    with torch.no_grad():
        expected = model(**row).loss
        assert torch.equal(pickle.loads(pickle.dumps(copy.deepcopy(model)))(**row).loss, expected)
        plain = stock(ids, attention_mask=torch.ones_like(ids)).logits
        assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, plain)
        unprepare_model(model)
        assert torch.equal(model(ids, attention_mask=torch.ones_like(ids)).logits, plain)
    assert vars(model).keys() == vars(stock).keys()
    for ours, theirs in zip(model.modules(), stock.modules(), strict=True):
        assert not ours._forward_hooks and not ours._forward_pre_hooks
        assert "build_alibi_tensor" not in vars(ours), type(theirs)


@pytest.mark.parametrize("model_type", ["bloom", "bart", "opt", "roberta"])
def test_rows_of_a_batch_keep_their_own_positions(model_type):
    model = prepare_model(build_model(model_type)).eval()
    rows = [concatenate_trees([tree], pad_token_id=0) for tree in conformance_forest(97)]
    batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0] if key not in ("labels", "loss_weights")}
    with torch.no_grad():
        together = model(**batch).logits
        for i, row in enumerate(rows):
            alone = model(**{key: row[key] for key in batch}).logits[0]
            real = row["attention_mask"][0].bool()
            torch.testing.assert_close(together[i][real], alone[real], rtol=0, atol=1e-5)


def test_mpt_refuses_a_batch_of_rows():
    model = prepare_model(build_model("mpt"))
    row = forest_row()
    with pytest.raises(ValueError, match=r"ALiBi.*1 packed sequence.*2"):
        model(**{key: torch.cat([value, value]) for key, value in row.items()})


def test_a_padding_token_inside_a_branch_is_refused_where_it_would_shift_positions():
    model, row = prepare_model(build_model("roberta")), forest_row()
    row["input_ids"][0, 4] = 0
    with pytest.raises(ValueError, match=r"`input_ids`.*0"):
        model(**row)


def test_a_prepared_indexer_model_is_the_stock_one_without_a_tree():
    stock = build_model("deepseek_v32").eval()
    model = prepare_model(copy.deepcopy(stock))
    ids = forest_row()["input_ids"][:, :40]
    with torch.no_grad():
        got, expected = (m(ids, attention_mask=torch.ones_like(ids)).logits for m in (model, stock))
        everything = tiny_config("deepseek_v32").index_topk * 0 + 1000
        stock.config.index_topk = everything
        for module in stock.modules():
            if hasattr(module, "index_topk"):
                module.index_topk = everything
        dense = stock(ids, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (dense - expected).abs().max() > 1e-2  # the indexer does leave keys out


def test_a_mask_that_shows_more_than_the_tree_is_refused():
    context = TreeContext(forest_row()["prefix_tree"])
    mask = context.mask(flex=False)
    length = mask.shape[-1]
    less = mask & (torch.rand(length, length) < 0.5)
    assert context.owns(mask) and context.owns(less)
    assert context.owns(torch.zeros(mask.shape).masked_fill(~less, torch.finfo(torch.float32).min))
    more = mask.clone()
    more[0, 0, 0, 1] = True
    assert not context.owns(more) and not context.owns(None) and not context.owns(mask[..., :-1])


def test_unknown_tensors_for_the_attention_are_refused():
    context = TreeContext(forest_row()["prefix_tree"])
    mask = context.mask(flex=False)
    x = torch.randn(1, 2, mask.shape[-1], 8)
    with pytest.raises(ValueError, match=r"\['gates'\]"):
        prefix_tree_attention(torch.nn.Identity(), x, x, x, mask, prefix_tree=context, gates=x)


def test_rotary_scaling_that_depends_on_the_longest_branch():
    small = {key: value for key, value in tiny_config("llama").to_dict().items() if key != "rope_parameters"}
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 140}
    assert rope_limit(LlamaConfig(**small)) is None
    config = LlamaConfig(**small, rope_parameters=scaling)
    assert rope_limit(config) == 140
    model = prepare_model(AutoModelForCausalLM.from_config(config)).eval()
    short = concatenate_trees([caterpillar(2, 60)], 0, pad_to_multiple_of=256)
    model(**short)
    with pytest.raises(ValueError, match="140"):
        model(**concatenate_trees([caterpillar(4, 60)], 0))


def test_a_multimodal_model_takes_text_only():
    config = tiny_config("gemma3")
    assert isinstance(config, Gemma3Config)
    model = prepare_model(build_model("gemma3")).eval()
    row = forest_row()
    assert model(**row).loss > 0
    with pytest.raises(ValueError, match=r"\['pixel_values'\].*`prefix_tree`"):
        model(**row, pixel_values=torch.zeros(1, 3, 8, 8))


def test_block_sparse_attention_names_the_way_out():
    config = BigBirdConfig(
        **{**tiny_config("big_bird").to_dict(), "attention_type": "block_sparse", "is_decoder": True}
    )
    with pytest.raises(ValueError, match="attention_type='original_full'"):
        prepare_model(AutoModelForCausalLM.from_config(config))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [40, 128, 300])
def test_flex_with_chunks_equals_the_dense_reference(chunk):
    tree = long_rows().cuda()
    shape = (1, 2, tree.shape[-1], 64)
    found = []
    for backend, dtype in (("flex", torch.float32), ("sdpa", torch.float64)):
        torch.manual_seed(0)
        q, k, v = (torch.randn(shape, device="cuda").to(dtype).requires_grad_() for _ in range(3))
        context = TreeContext(tree, attn_backend=backend)
        mask = context.mask(chunk=chunk, flex=backend == "flex")
        out, _ = prefix_tree_attention(torch.nn.Identity(), q, k, v, mask, prefix_tree=context)
        (out * torch.linspace(0, 1, out.numel(), device="cuda").view_as(out)).sum().backward()
        found.append([out.double(), q.grad.double(), k.grad.double(), v.grad.double()])
    for got, expected in zip(*found, strict=True):
        assert (got - expected).norm() / expected.norm() < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model_type", "variant"),
    [
        *((name, "text") for name in ("llama4_text", "deepseek_v3", "deepseek_v32", "bloom", "nemotron", "bart")),
        ("gemma3_text", "text"),
        ("qwen2_5_vl", "images"),
        ("qwen3_vl", "images"),
        ("gpt_oss", "lora"),
        ("llama", "dora"),
    ],
)
def test_architectures_train_on_a_gpu(model_type, variant):
    model = prepare_model(build_model(model_type, variant=variant).cuda()).train()
    reference = prepare_model(build_model(model_type, variant=variant)).train()
    forest = build_forest(reference, variant=variant)
    row = {**concatenate_trees(forest.trees, pad_token_id=0, pad_to_multiple_of=256), **forest.images}
    for m in (model, reference):
        m.gradient_checkpointing_enable({"use_reentrant": False})
        m(**{key: value.to(m.device) for key, value in row.items()}).loss.backward()
    for (name, got), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is not None:
            scale = max(expected.grad.abs().max().item(), 1e-3)
            assert (got.grad.cpu() - expected.grad).abs().max() / scale < 2e-3, name


def test_self_verification_compares_with_the_stock_attention(monkeypatch):
    """Where the prepared model drops the indexer's choice with and without a tree, it agrees with itself."""
    monkeypatch.setattr(interface_module, "_keep_chosen", lambda mask, *rest: mask)
    with pytest.raises(ValueError, match="logits"):
        prepare_model(build_model("deepseek_v32"))
