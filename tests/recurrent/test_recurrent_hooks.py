"""What the hooks of recurrent layers rely on, install and undo."""

import copy
import gc
import inspect
import pickle
import sys

import pytest
import torch
from peft import LoraConfig, get_peft_model

from conformance.double import keep_double
from hf_prefix_tree import prepare_model, unprepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.recurrent import hooks
from hf_prefix_tree.modeling.recurrent.layers import line_kernel
from tests.support.hybrids import FAMILIES, KINDS, errors, make_hybrid, served_here
from tests.support.models import branch_runs, gradients, random_forest, relative_error


def functions_of(model):
    file = sys.modules[type(model).__module__]
    return {name: getattr(file, name) for name in hooks._ON_TREE if hasattr(file, name)}


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    yield
    gc.collect()
    assert hooks._replaced == {}


# ---- private names of Transformers ----


@pytest.mark.parametrize("model_type", FAMILIES)
def test_mixers_call_functions_that_take_the_tree(model_type):
    served_here(model_type)
    model = make_hybrid(model_type, dtype=torch.float32)
    mixers = [module for module in model.modules() if hooks.has_convolution(module)]
    assert mixers and all(hooks.why_not_served(mixer) is None for mixer in mixers)
    for mixer in mixers:
        calls = hooks._calls(type(mixer).forward)
        assert "causal_conv1d_fn" in calls
    names = set(functions_of(model))
    assert "causal_conv1d_fn" in names
    expected = {
        "causal_conv1d_fn": ["hidden_states", "weight", "bias"],
        "torch_chunk_gated_delta_rule": ["query", "key", "value", "g", "beta"],
        "chunk_kimi_delta_attention": ["query", "key", "value", "g", "beta"],
        "mamba2_chunk_scan": ["hidden_states", "dt", "A", "B", "C", "chunk_size", "D", "dt_bias", "initial_states"],
        "mamba2_split_conv1d_scan_combined": ["zxbcdt"],
    }
    for name, function in functions_of(model).items():
        assert list(inspect.signature(function).parameters)[: len(expected[name])] == expected[name]


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("mamba", "`mamba_selective_scan`"),
        ("recurrent_gemma", "function"),
        ("minimax", "scan"),
        ("mamba2", "keyword arguments"),
    ],
)
def test_what_is_not_served_is_refused_with_its_reason(model_type, reason):
    model = make_hybrid(model_type, dtype=torch.float32)
    with pytest.raises(ValueError, match=reason):
        prepare_model(model)


# ---- installing and undoing ----


@pytest.mark.parametrize("kind", KINDS)
def test_unprepare_restores_the_modeling_file(kind):
    served_here(KINDS[kind])
    model = make_hybrid(KINDS[kind], dtype=torch.float32)
    before = functions_of(model)
    first, second = prepare_model(model), prepare_model(make_hybrid(KINDS[kind], dtype=torch.float32))
    prepare_model(first)  # again: nothing more
    assert all(functions_of(model)[name] is not function for name, function in before.items())
    unprepare_model(first)
    assert functions_of(model) != before  # the other model still needs them
    unprepare_model(second)
    assert functions_of(model) == before


def test_copies_have_their_own_hooks_and_a_model_that_is_gone_none():
    model = make_hybrid("qwen3_5_text", dtype=torch.float32)
    before = functions_of(model)
    prepared = prepare_model(model)
    clone = copy.deepcopy(prepared)
    unprepare_model(prepared)
    row = concatenate_trees(random_forest(1), pad_token_id=0)
    assert torch.isfinite(clone(**row).loss)
    assert functions_of(model) != before
    del clone
    gc.collect()
    assert functions_of(model) == before
    use = hooks.follow_branches(model)[0]
    again = pickle.loads(pickle.dumps(use))
    use.remove()
    assert functions_of(model) != before
    again.remove()
    again.remove()  # twice is once
    assert functions_of(model) == before


def test_a_function_that_somebody_wrapped_is_left_to_them():
    model = make_hybrid("olmo_hybrid", dtype=torch.float32)
    file = sys.modules[type(model).__module__]
    original = file.causal_conv1d_fn
    prepare_model(model)
    ours = file.causal_conv1d_fn
    try:
        file.causal_conv1d_fn = lambda *args, **kwargs: ours(*args, **kwargs)
        theirs = file.causal_conv1d_fn
        unprepare_model(model)
        assert file.causal_conv1d_fn is theirs
        ids = torch.arange(3, 12)[None]
        assert torch.isfinite(model(ids).logits).all()
        prepare_model(model)  # what is left of ours in theirs hands on
        assert max(errors(model, random_forest(3))) < 1e-5
        unprepare_model(model)
    finally:
        file.causal_conv1d_fn = original


def test_a_function_that_somebody_replaces_is_an_error():
    model = prepare_model(make_hybrid("qwen3_5_text", dtype=torch.float32)).train()
    file = sys.modules[type(model).__module__]
    ours = file.causal_conv1d_fn
    row = concatenate_trees(random_forest(3), pad_token_id=0)
    try:
        file.causal_conv1d_fn = lambda *args, **kwargs: ours(*args, **kwargs)
        model(**row)
        file.causal_conv1d_fn = ours.__wrapped__
        with pytest.raises(ValueError, match=r"replaced \['causal_conv1d_fn'\]"):
            model(**row)
    finally:
        file.causal_conv1d_fn = ours


def test_mixers_of_a_subclass_are_followed():
    other = prepare_model(make_hybrid("qwen3_5_text", dtype=torch.float32))
    model = make_hybrid("qwen3_5_text", dtype=torch.float32)
    for mixer in model.modules():
        if hooks.has_convolution(mixer):
            mixer.__class__ = type("Mixer", (type(mixer),), {})
    prepare_model(model)
    unprepare_model(other)
    assert max(errors(model, random_forest(3))) < 1e-5


@pytest.mark.parametrize("kind", ["delta", "convolution", "mamba2"])
def test_generate_and_ordinary_calls_are_untouched(kind):
    served_here(KINDS[kind])
    model = make_hybrid(KINDS[kind], dtype=torch.float32).eval()
    ids = torch.arange(3, 12)[None]
    padded = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
    mask = (padded > 0).long()

    def run():
        with torch.no_grad():
            generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
            cached = model(ids, use_cache=True).logits
            return [generated, cached, model(padded, attention_mask=mask).logits]

    before = run()
    prepare_model(model)
    during = run()
    unprepare_model(model)
    for expected, got, after in zip(before, during, run(), strict=True):
        assert torch.equal(expected, got) and torch.equal(expected, after)


def test_a_model_beside_a_prepared_one_still_compiles_to_one_graph():
    model = make_hybrid("qwen3_5_text", dtype=torch.float32).eval()
    prepared = prepare_model(copy.deepcopy(model))
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        got = torch.compile(model, backend="eager", fullgraph=True)(ids, use_cache=False).logits
    assert torch.equal(got, expected)
    del prepared


def test_a_tree_that_does_not_arrive_is_an_error():
    model = prepare_model(make_hybrid("qwen3_5_text", dtype=torch.float32)).eval()
    row = concatenate_trees(random_forest(1), pad_token_id=0)
    convolve = functions_of(model)["causal_conv1d_fn"]
    with pytest.raises(ValueError, match="raw tensor"):
        convolve(torch.ones(1, 2, 3), torch.ones(2, 2), prefix_tree=row["prefix_tree"])
    mixer = model.model.layers[0].linear_attn
    forward = mixer.forward
    mixer.forward = lambda hidden_states, cache=None, cache_params=None, attention_mask=None, **kwargs: forward(
        hidden_states, attention_mask=attention_mask
    )
    with pytest.raises(ValueError, match="tree"):
        model(**row)
    del mixer.forward


@pytest.mark.parametrize("name", ["past_key_values", "cache", "cu_seq_lens_q", "seq_idx"])
def test_caches_and_packed_sequences_beside_a_tree_are_refused(name):
    model = prepare_model(make_hybrid("qwen3_5_text", dtype=torch.float32))
    with pytest.raises(ValueError, match=f"`{name}`"):
        model(**concatenate_trees(random_forest(1), pad_token_id=0), **{name: torch.tensor([0, 128])})


def test_lora_gradients():
    with keep_double():
        base = make_hybrid("qwen3_5_text")
        config = LoraConfig(r=2, target_modules=["in_proj_qkv", "in_proj_a", "out_proj", "q_proj"])
        model = prepare_model(get_peft_model(base, config).double()).train()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.3)
        trees = random_forest(2, num_trees=2)
        branch_runs(model, trees)[0].backward()
        expected = gradients(model)
        model.zero_grad()
        model(**concatenate_trees(trees, pad_token_id=0)).loss.backward()
    assert len(expected) == 8 and all("lora" in name for name in expected)
    assert relative_error(gradients(model), expected) < 1e-9


@pytest.mark.parametrize("wrapped", [{"modules_to_save": ["conv1d"]}, {"target_modules": ["q_proj", "conv1d"]}])
def test_adapters_of_convolutions_are_refused(wrapped):
    # PEFT wants a rank that the groups of the convolution divide
    config = LoraConfig(**{"r": 128, "target_modules": ["q_proj"], **wrapped})
    with pytest.raises(ValueError, match=r"`layers\.0\.linear_attn\.conv1d`"):
        prepare_model(get_peft_model(make_hybrid("qwen3_next", dtype=torch.float32), config))


def test_on_cpu_the_scan_is_that_of_the_modeling_file():
    assert line_kernel("fla.ops.gated_delta_rule.chunk_gated_delta_rule", "cpu") is None
