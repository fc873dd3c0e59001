"""What `prepare_model` installs, undoes and refuses."""

import copy
import logging
import pickle

import pytest
import torch
import transformers
from packaging.version import Version
from peft import AdaLoraConfig, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    T5Config,
    T5ForConditionalGeneration,
)

import hf_prefix_tree.modeling.context as context_module
from conformance.build import build_model
from hf_prefix_tree import PrefixTree, prepare_model, unprepare_model
from hf_prefix_tree.modeling.batch import UNPREPARED_SENTINEL, concatenate_trees, encode_weights
from hf_prefix_tree.modeling.prepare import ensure_verified, is_prepared
from tests.support.models import CONFIGS, VOCAB, make_model, random_forest


def batch(seed=0, **kwargs):
    return concatenate_trees(random_forest(seed, **kwargs), pad_token_id=0)


# ---- ordinary calls ----


def test_continuous_batching_needs_another_implementation_for_its_time():
    """As `docs/trainers.md` says; `TreeGRPOTrainer` and `TreeRLOOTrainer` do it by themselves."""
    prompts, options = [[5, 6, 7], [8, 9, 10, 11]], GenerationConfig(max_new_tokens=3, do_sample=False, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)  # the cache takes all memory by default

    def generated(model):
        found = model.generate_batch(prompts, options, small, progress_bar=False)
        return [x.generated_tokens for x in found.values()]

    refused = "prefix_tree is not supported for continuous batching"
    if Version(transformers.__version__) < Version("5.19"):  # it sets the paged form of any, which does not exist
        refused = r'"paged\|prefix_tree"` is not supported'
    model = make_model("qwen3", dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    expected = generated(model)
    prepare_model(model)
    with torch.no_grad():
        loss = model(**batch()).loss
        with pytest.raises(ValueError, match=refused):
            generated(model)
        assert model(**batch()).loss == loss
        model.set_attn_implementation("sdpa")
        assert generated(model) == expected
        with pytest.raises(ValueError, match="its attention is 'sdpa' now: call"):
            model(**batch())
        model.set_attn_implementation("prefix_tree")
        assert model(**batch()).loss == loss


@pytest.mark.parametrize("name", CONFIGS)
def test_without_a_tree_the_model_is_its_default_implementation(name):
    config = CONFIGS[name]
    torch.manual_seed(0)
    # before transformers 5.23 gemma2 defaults to an sdpa that drops its softcap; ours does not follow it there
    stock_attention = "eager" if name == "gemma2" else None
    stock = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation=stock_attention
    ).eval()
    ours = AutoModelForCausalLM.from_config(
        copy.deepcopy(config), dtype=torch.float32, attn_implementation="prefix_tree"
    ).eval()
    ours.load_state_dict(stock.state_dict())
    prepared = prepare_model(copy.deepcopy(ours))
    ids = torch.randint(3, VOCAB, (2, 20), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :7] = 0  # left padding
    packed = torch.cat([torch.arange(12), torch.arange(8)])[None]
    for model in (ours, prepared):
        for kwargs in (
            {"input_ids": ids},
            {"input_ids": ids, "attention_mask": mask, "labels": ids},
            {"input_ids": ids[:1], "position_ids": packed, "use_cache": False},
        ):
            expected, got = stock(**kwargs), model(**kwargs)
            assert torch.equal(expected.logits, got.logits)
            assert (expected.loss is None and got.loss is None) or torch.equal(expected.loss, got.loss)
        generate = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False}
        assert torch.equal(stock.generate(ids, **generate), model.generate(ids, **generate))


def test_implementation_is_accepted_everywhere(tmp_path):
    model = make_model("qwen3", dtype=torch.float32)
    assert model.config._attn_implementation == "prefix_tree"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="prefix_tree")
    assert loaded.config._attn_implementation == "prefix_tree"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    stock.set_attn_implementation("prefix_tree")
    row = batch()
    assert torch.equal(prepare_model(loaded)(**row).loss, prepare_model(stock)(**row).loss)


def test_preparing_twice_and_undoing():
    model = make_model("qwen3", dtype=torch.float32).eval()
    model.set_attn_implementation("sdpa")
    row, ids = batch(), torch.arange(3, 20)[None]
    before = model(ids, labels=ids)
    hooks = lambda: [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in (model, model.base_model)]  # noqa: E731
    clean = hooks()
    assert prepare_model(model) is model
    installed = hooks()
    prepare_model(model)
    assert hooks() == installed != clean
    assert is_prepared(model) and model.accepts_loss_kwargs is False
    assert pickle.loads(pickle.dumps(copy.deepcopy(model)))(**row).loss == model(**row).loss
    unprepare_model(model)
    assert not is_prepared(model) and hooks() == clean
    assert model.config._attn_implementation == "sdpa" and not hasattr(model, "accepts_loss_kwargs")
    after = model(ids, labels=ids)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.loss, after.loss)


# ---- the tree call ----


def test_labels_give_one_row_of_logits_per_supervised_token():
    model = prepare_model(make_model("qwen3", dtype=torch.float32)).eval()
    row = batch()
    output = model(**row)
    everywhere = model(**{key: value for key, value in row.items() if key != "labels"})
    supervised = (row["labels"][0] != -100).nonzero().squeeze(-1)
    predecessors = row["prefix_tree"][0, 2, supervised].long()
    assert output.logits.shape == (1, len(supervised), VOCAB)
    torch.testing.assert_close(output.logits[0], everywhere.logits[0, predecessors], rtol=0, atol=2e-5)
    assert everywhere.loss is None


def test_uniform_weights_where_none_are_given():
    model = prepare_model(make_model("qwen3", dtype=torch.float32)).eval()
    row = batch()
    ones = encode_weights((row["labels"] != -100).double())
    explicit = model(**{**row, "loss_weights": ones}).loss
    del row["loss_weights"]
    with pytest.raises(ValueError, match=r"lost its `loss_weights`.*`tree_stats`"):
        model(**row)
    del row["tree_stats"]
    assert torch.equal(model(**row).loss, explicit)


def test_a_row_without_weight_gives_a_differentiable_zero():
    model = prepare_model(make_model("qwen3_moe", dtype=torch.float32)).train()
    loss = model(**concatenate_trees([], pad_token_id=0)).loss
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad.abs().max() == 0 for p in model.parameters() if p.grad is not None)
    assert model.lm_head.weight.grad is not None


def test_num_items_in_batch_is_the_divisor():
    model = prepare_model(make_model("qwen3", dtype=torch.float32)).eval()
    row = batch()
    weights = row["loss_weights"].view(torch.float64).sum()
    torch.testing.assert_close(
        model(**row, num_items_in_batch=weights * 4).loss * 4, model(**row).loss, rtol=1e-6, atol=0
    )


def test_positional_arguments_and_missing_mask():
    model = prepare_model(make_model("qwen3", dtype=torch.float32)).eval()
    row = batch()
    expected = model(**row).loss
    ids = row.pop("input_ids")
    del row["attention_mask"], row["position_ids"]
    assert torch.equal(model(ids, **row).loss, expected)


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_lora(wrapped_first):
    model, row = make_model("qwen3", dtype=torch.float32), batch()
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(model if wrapped_first else prepare_model(model), lora)
    prepare_model(model)
    merged = prepare_model(copy.deepcopy(model).merge_and_unload())
    torch.testing.assert_close(model(**row).loss, merged(**row).loss, rtol=1e-5, atol=0)
    model(**row).loss.backward()
    grads = [p.grad for n, p in model.named_parameters() if "lora_" in n]
    assert all(g is not None and g.abs().max() > 0 for g in grads)


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"past_key_values": object()}, "`past_key_values`"),
        ({"seq_idx": torch.zeros(1, 128)}, "`seq_idx`"),
        ({"logits_to_keep": 1}, "`logits_to_keep`"),
        ({"ignore_index": 5}, "`ignore_index`"),
        ({"shift_labels": torch.zeros(1, 128, dtype=torch.int64)}, "`shift_labels`"),
        ({"output_attentions": True}, "`output_attentions`"),
        ({"attention_mask": torch.ones(1, 1, 128, 128)}, "`attention_mask`.*1.*128"),
        ({"labels": torch.zeros(1, 5, dtype=torch.int64)}, "`labels`.*1.*5"),
        ({"prefix_tree": torch.zeros(1, 3, 128)}, "`prefix_tree`.*torch.float32"),
        ({"prefix_tree": [1, 2]}, "`prefix_tree`"),
        ({"loss_weights": torch.ones(1, 128)}, "`loss_weights`.*torch.float32"),
        ({"node_lengths": [3, 2], "sample_paths": [[0, 1]]}, r"PrefixTree.from_node_paths"),
        ({"prefix_tree": None}, "`loss_weights`.*`prefix_tree`"),
        ({"prefix_tree": None, "loss_weights": None}, "`tree_stats`.*`prefix_tree`"),
    ],
)
def test_call_refusals(change, message):
    model = prepare_model(make_model("qwen3", dtype=torch.float32))
    with pytest.raises(ValueError, match=message):
        model(**{**batch(num_trees=1), **change})
    assert context_module.active_context() is None
    model(**batch(num_trees=1))  # and the model still works


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_switched_implementation_is_refused(implementation):
    model = prepare_model(make_model("qwen3", dtype=torch.float32))
    expected = model(**batch()).loss
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=rf"'{implementation}'.*prepare_model"):
        model(**batch())
    assert torch.equal(prepare_model(model)(**batch()).loss, expected)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "prefix_tree"])
def test_a_model_that_was_not_prepared_raises(implementation):
    model = make_model("qwen3", dtype=torch.float32)
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model(**batch())
    prepare_model(model)
    assert model(**batch()).loss > 0
    unprepare_model(model)
    with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
        model(**batch())


def test_a_row_without_its_guard_and_a_bypassed_hook_raise():
    model, row = make_model("qwen3", dtype=torch.float32), batch()
    del row[UNPREPARED_SENTINEL]
    with pytest.raises(ValueError, match="prepare_model"):
        model(**row)
    prepare_model(model)
    model(**row)
    with pytest.raises(ValueError, match="`prefix_tree`"):
        model.forward(**batch())


def test_after_an_interrupt_a_call_without_a_tree_sees_none():
    """PyTorch calls no hook after `KeyboardInterrupt`: the next call of the model ends the interrupted one."""
    model, other = (make_model("qwen3", dtype=torch.float32, seed=seed) for seed in (0, 1))
    layer, interrupted = model.model.layers[1], []
    forward = layer.forward

    def maybe_interrupted(*args, **kwargs):
        if interrupted:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    layer.forward = maybe_interrupted
    prepare_model(model), prepare_model(other)
    row, ids = batch(num_trees=1), torch.arange(128)[None] % 20 + 3  # as long as the row
    expected = [each(input_ids=ids, labels=ids) for each in (model, other)]
    of_tree = model(**row).loss
    for position, each in enumerate((model, other)):
        interrupted.append(True)
        with pytest.raises(KeyboardInterrupt):
            model(**row)
        assert context_module.active_context() is not None
        interrupted.clear()
        found = each(input_ids=ids, labels=ids)
        assert torch.equal(found.logits, expected[position].logits)
        assert torch.equal(found.loss, expected[position].loss)
        assert torch.equal(model(**row).loss, of_tree)
        assert context_module.active_context() is None


@pytest.mark.parametrize("inner_has_tree", [True, False])
def test_a_call_inside_a_call_has_a_tree_of_its_own(inner_has_tree):
    model, other = (prepare_model(make_model("qwen3", dtype=torch.float32, seed=seed)) for seed in (0, 1))
    ids = torch.arange(20)[None] + 3
    outer, inner = batch(0, num_trees=1), batch(1) if inner_has_tree else {"input_ids": ids, "labels": ids}
    expected, expected_inner = model(**outer).loss, other(**inner).loss
    found = []
    model.model.layers[0].register_forward_hook(lambda *args: found.append(other(**inner).loss))
    assert torch.equal(model(**outer).loss, expected)
    assert torch.equal(found[0], expected_inner)


def test_an_error_in_the_model_leaves_no_context_behind(monkeypatch):
    model = prepare_model(make_model("qwen3", dtype=torch.float32))
    monkeypatch.setattr(model.model.layers[1], "forward", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch())
    assert context_module.active_context() is None


def test_architectures_and_options_that_are_refused():
    pooled = make_model("qwen3")
    pooled.config.layer_types = ["full_attention", "compressed_sparse_attention"]
    with pytest.raises(ValueError, match="`compressed_sparse_attention`"):
        prepare_model(pooled)
    dropout = AutoModelForCausalLM.from_config(Qwen3Config(**{**CONFIGS["qwen3"].to_dict(), "attention_dropout": 0.1}))
    with pytest.raises(ValueError, match=r"attention_dropout=0.1.*attention_dropout=0.0"):
        prepare_model(dropout)
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2))
    with pytest.raises(ValueError, match="encoder-decoder"):
        prepare_model(t5)
    with pytest.raises(ValueError, match="LM head"):
        prepare_model(make_model("qwen3").model)
    prompt = get_peft_model(make_model("qwen3"), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="virtual tokens"):
        prepare_model(prompt)
    with pytest.raises(ValueError, match="PreTrainedModel"):
        prepare_model(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="attn_backend"):
        prepare_model(make_model("qwen3"), attn_backend="fast")


@pytest.mark.parametrize("wrapped_first", [True, False])
def test_an_adapter_that_starts_somewhere_in_the_row_is_refused(wrapped_first):
    model = make_model("qwen3", dtype=torch.float32)
    activated = LoraConfig(target_modules=["q_proj"], alora_invocation_tokens=[5], task_type="CAUSAL_LM")
    model = get_peft_model(model if wrapped_first else prepare_model(model), activated)
    with pytest.raises(ValueError, match="activated LoRA"):
        prepare_model(model) if wrapped_first else model(**batch())


def test_an_adapter_that_goes_around_the_hooks_is_refused_at_once():
    adaptive = AdaLoraConfig(target_modules=["q_proj"], total_step=10, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="AdaLoRA"):
        prepare_model(get_peft_model(make_model("qwen3", dtype=torch.float32), adaptive))


def test_a_loss_that_a_model_computes_by_itself_is_replaced_or_refused():
    model = prepare_model(build_model("bart")).eval()
    assert model(**batch()).loss > 0
    with pytest.raises(ValueError, match="`return_dict=True`"):
        model(**batch(), return_dict=False)
    usual = prepare_model(make_model("qwen3", dtype=torch.float32)).eval()
    assert torch.equal(usual(**batch(), return_dict=False)[0], usual(**batch()).loss)


def test_forced_flex_raises_where_it_cannot_train():
    with pytest.raises(ValueError, match=r"attn_backend='flex'.*cpu"):
        prepare_model(make_model("qwen3", dtype=torch.float32), attn_backend="flex")


def test_dropout_outside_attention_warns():
    model = get_peft_model(make_model("qwen3"), LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))
    with pytest.warns(UserWarning, match=r"dropout \(p=\[0.1\]\)"):
        prepare_model(model)
    model = build_model("opt")
    model.model.decoder.layers[0].dropout = 0.2  # a rate, not a module
    with pytest.warns(UserWarning, match=r"dropout \(p=\[0.2\]\)"):
        prepare_model(model)


# ---- self-verification ----


def test_verification_fails_where_the_tree_path_is_wrong(monkeypatch):
    def causal(prefix_tree, window=None):
        length = prefix_tree.shape[-1]
        return torch.ones((1, 1, length, length), dtype=torch.bool).tril()

    model = make_model("llama", dtype=torch.float32)
    monkeypatch.setattr(context_module, "dense_mask", causal)
    with pytest.raises(ValueError, match="logits"):
        prepare_model(model)
    assert not is_prepared(model)


def test_verification_sees_a_dropped_window(monkeypatch):
    dense = context_module.dense_mask
    monkeypatch.setattr(context_module, "dense_mask", lambda tree, window=None: dense(tree))
    with pytest.raises(ValueError, match="logits"):
        prepare_model(make_model("gemma3", dtype=torch.float32))


@pytest.mark.parametrize("positions", [13, 20, 24, 26, 40, 64, 255])
def test_verification_has_no_more_positions_than_the_model(positions, caplog):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "n_positions": positions, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropout = {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **dropout, initializer_range=0.3, bos_token_id=1, eos_token_id=2))
    with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
        assert is_prepared(prepare_model(model))
    assert "cannot tell" not in caplog.text  # the control was large


def test_too_few_positions_for_the_verification():
    config = GPT2Config(vocab_size=VOCAB, n_positions=12, n_embd=16, n_layer=1, n_head=2, attn_pdrop=0)
    with pytest.raises(ValueError, match=r"GPT2LMHeadModel.*12"):
        prepare_model(GPT2LMHeadModel(config))


def test_verification_disturbs_nothing(caplog):
    model = make_model("gemma3", dtype=torch.float32).train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with caplog.at_level(logging.INFO, logger="hf_prefix_tree"):
        prepare_model(model)
    assert torch.equal(torch.rand(2), expected)
    assert [module.training for module in model.modules()] == flags
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert "causal control" in caplog.text


def test_weights_that_come_later_are_verified_at_the_first_training_step(monkeypatch):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS["llama"]))
    prepare_model(model)
    model.to_empty(device="cpu").load_state_dict(make_model("llama", dtype=torch.float32).state_dict(), strict=False)
    model.model.rotary_emb = make_model("llama", dtype=torch.float32).model.rotary_emb
    dense = context_module.dense_mask
    monkeypatch.setattr(context_module, "dense_mask", lambda tree, window=None: torch.ones_like(dense(tree)).tril())
    model.eval()(**batch())  # not a training step
    with pytest.raises(ValueError, match="logits"):
        model.train()(**batch())
    monkeypatch.setattr(context_module, "dense_mask", dense)
    model(**batch()).loss.backward()
    ensure_verified(model, model)


def test_nemo_rows_convert():
    model = prepare_model(make_model("qwen3", dtype=torch.float32)).eval()
    tree = PrefixTree.from_node_paths([5, 6, 7, 11, 12, 21], [3, 2, 1], [[0, 1], [0, 2]], weights=[0, 0, 0, 1, 1, 1])
    assert model(**concatenate_trees([tree], pad_token_id=0)).loss > 0
