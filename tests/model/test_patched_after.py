"""Code that is patched after `prepare_model` is checked at the next call with a tree, before it computes anything."""

import copy
import itertools
import pickle
from types import MethodType

import pytest
import torch
from peft import LilyConfig, LoraConfig, get_peft_model
from torch import square
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from transformers import GPTNeoConfig, GPTNeoForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

import hf_prefix_tree.modeling.fingerprint as fingerprint
import hf_prefix_tree.modeling.prepare as model_module
from hf_prefix_tree import prepare_model, unprepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.call import refuse_other_backbone
from hf_prefix_tree.modeling.fingerprint import CodeWatch
from hf_prefix_tree.modeling.prepare import check_call, ensure_verified
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import VOCAB, make_model, random_forest

WRONG = "attention interface|does not give the same logits|computes something over all tokens of a call"


def batch():
    return concatenate_trees(random_forest(0), pad_token_id=0)


def causal(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
    """Attention that knows no mask."""
    shape = (*hidden_states.shape[:2], -1, self.head_dim)
    q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
    q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return self.o_proj(output.transpose(1, 2).reshape((*hidden_states.shape[:2], -1))), None


class Causal(LlamaAttention):
    forward = causal


class Shifts(LlamaMLP):
    def forward(self, x):
        return super().forward(x) + x.roll(1, dims=1)


def by_index(q, k, cos, sin, **kwargs):
    """Rotates by the place in the row."""
    places = torch.arange(q.shape[2]) * 0.3
    return q * places.cos()[:, None] + q.flip(-1) * places.sin()[:, None], k * places.cos()[:, None]


def patch_forwards(model, monkeypatch):
    for layer in model.model.layers:
        layer.self_attn.forward = MethodType(causal, layer.self_attn)


def patch_class(model, monkeypatch):
    monkeypatch.setattr(LlamaAttention, "forward", causal)


def patch_class_of_instances(model, monkeypatch):
    model.model.layers[0].self_attn.__class__ = Causal


def patch_function_of_the_file(model, monkeypatch):
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", by_index)


def patch_hook(model, monkeypatch):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + output.roll(1, dims=1))


def patch_pre_hook(model, monkeypatch):
    model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0].roll(1, dims=1),))


def patch_hook_in_place(model, monkeypatch):
    def hook(module, args, output):
        output += output.roll(1, dims=1)

    model.model.layers[0].mlp.register_forward_hook(hook)


def patch_submodule(model, monkeypatch):
    new = Shifts(model.config)
    new.load_state_dict(model.model.layers[1].mlp.state_dict())
    model.model.layers[1].mlp = new


def patch_call_of_class(model, monkeypatch):
    call = LlamaMLP.__call__
    monkeypatch.setattr(LlamaMLP, "__call__", lambda self, x: call(self, x) + call(self, x).roll(1, dims=1))


def patch_sdpa(model, monkeypatch):
    original = torch.nn.functional.scaled_dot_product_attention

    def sdpa(q, k, v, attn_mask=None, is_causal=False, **kwargs):
        return original(q, k, v, is_causal=True, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)


def patch_hook_of_all_modules(model, monkeypatch):
    def hook(module, args, output):
        return output + output.roll(1, dims=1) if isinstance(module, LlamaMLP) else None

    register_module_forward_hook(hook)


def patch_backward_hook(model, monkeypatch):
    model.model.layers[1].mlp.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] - inputs[0].mean(dim=1, keepdim=True),)
    )


def patch_hook_of_data(model, monkeypatch):
    def hook(module, args, output):
        output.data = output - output.mean(dim=1, keepdim=True)

    model.model.layers[0].mlp.register_forward_hook(hook)


def shift(x):
    with torch.no_grad():
        x.add_(x.roll(1, dims=1))


def patch_hook_that_calls(model, monkeypatch):
    def hook(module, args, output):
        shift(output)

    model.model.layers[0].mlp.register_forward_hook(hook)


def patch_hook_with_out(model, monkeypatch):
    def hook(module, args, output):
        x = output.detach()
        square(x - x.mean(dim=1, keepdim=True), out=x)

    model.model.layers[0].mlp.register_forward_hook(hook)


def patch_hook_that_appends(model, monkeypatch):
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: [].append(1) or output - output.mean(dim=1, keepdim=True)
    )


@pytest.fixture(autouse=True)
def no_hooks_of_all_modules():
    yield
    torch.nn.modules.module._global_forward_hooks.clear()


PATCHES = [function for name, function in list(globals().items()) if name.startswith("patch_")]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("patch", PATCHES, ids=lambda f: f.__name__)
def test_what_is_patched_later_is_refused(patch, training, monkeypatch):
    model = prepare_model(make_model("llama", dtype=torch.float32)).train(training)
    expected = model(**batch()).loss
    patch(model, monkeypatch)
    for again in (lambda: model(**batch()), lambda: prepare_model(model), lambda: ensure_verified(model, model)):
        with pytest.raises(ValueError, match=WRONG):
            again()
    monkeypatch.undo()
    if patch in (patch_class, patch_function_of_the_file):  # undone: the code that was checked
        assert torch.equal(model(**batch()).loss, expected)


def test_a_hook_that_is_replaced_in_its_place_is_checked():
    model = prepare_model(make_model("llama", dtype=torch.float32))
    mlp = model.model.layers[0].mlp
    handle = mlp.register_forward_hook(lambda module, args, output: None)
    assert model(**batch()).loss > 0
    mlp._forward_hooks[handle.id] = lambda module, args, output: output + output.roll(1, dims=1)
    with pytest.raises(ValueError, match=WRONG):
        model(**batch())


def test_hooks_of_tensors_cost_no_look_at_all_hooks(monkeypatch):
    watch, weight = CodeWatch(make_model("llama", dtype=torch.float32)), torch.ones(1, requires_grad=True)
    monkeypatch.setattr(watch, "_look_at_hooks", lambda: pytest.fail("looked at all hooks"))
    assert vars(torch.nn.modules.module._global_forward_hooks) == {}  # makes one, as compilers do
    weight.register_hook(torch.neg)  # FSDP2 registers some in each call
    assert watch.unchanged()


def test_removed_hooks_are_named():
    model = prepare_model(make_model("llama", dtype=torch.float32))
    model._forward_hooks.clear()
    with pytest.raises(ValueError, match=r"The hooks of the model were removed: call `unprepare_model"):
        model(**batch())
    assert prepare_model(unprepare_model(model))(**batch()).loss > 0


class ShiftingNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states.roll(1, dims=1))


def of_another_class(layer):
    layer.post_attention_layernorm.__class__ = ShiftingNorm


def replaced(layer):
    layer.post_attention_layernorm = ShiftingNorm(32)


def with_another_forward(layer):
    forward = layer.post_attention_layernorm.forward
    layer.post_attention_layernorm.forward = lambda hidden_states: forward(hidden_states.roll(1, dims=1))


@pytest.mark.parametrize("when", ["training", "evaluation", "step"])
@pytest.mark.parametrize("change", [of_another_class, replaced, with_another_forward])
def test_a_leaf_that_changes_is_refused(change, when, monkeypatch):
    """In training, leaves are looked at in turns; outside it and at each step of our trainers, all are."""
    monkeypatch.setattr(fingerprint, "_SHARE", 1)
    model, row = prepare_model(make_model("llama", dtype=torch.float32)).train(when != "evaluation"), batch()
    check_call(model, row)
    change(model.model.layers[1])
    with pytest.raises(ValueError, match=WRONG):
        for _ in range(fingerprint._TURNS if when == "training" else 1):
            ensure_verified(model, model) if when == "step" else check_call(model, row)


def test_what_has_children_is_looked_at_in_each_call(monkeypatch):
    monkeypatch.setattr(fingerprint, "_SHARE", 1)
    model = prepare_model(make_model("llama", dtype=torch.float32)).train()
    for patch in (patch_forwards, patch_class_of_instances, patch_submodule):
        watch = CodeWatch(model)
        last = [*itertools.islice(watch._turns, fingerprint._TURNS)][-1]  # that of the head, beside all parents
        monkeypatch.setattr(watch, "_turns", itertools.repeat(last))
        assert watch.unchanged(in_turns=True)
        patch(model, monkeypatch)
        assert not watch.unchanged(in_turns=True)


def test_a_hook_made_with_another_number_is_checked():
    def make(scale, look=len):
        return lambda module, args, output: output + scale * output.roll(1, dims=1)

    model = prepare_model(make_model("llama", dtype=torch.float32))
    mlp = model.model.layers[0].mlp
    for scale in (0.0, 0.0, 1.0):
        handle = mlp.register_forward_hook(make(scale))
        if scale:
            with pytest.raises(ValueError, match=WRONG):
                model(**batch())
        else:
            assert model(**batch()).loss > 0
        handle.remove()


def test_code_without_the_name_of_a_file_is_unknown():
    model = make_model("llama", dtype=torch.float32)
    names = {"mlp": type(model.model.layers[0].mlp).forward}
    exec("def forward(self, x):\n    return mlp(self, x)", names)
    model.model.layers[0].mlp.forward = MethodType(names["forward"], model.model.layers[0].mlp)
    assert CodeWatch(model).unknown == ["`forward`"]


def test_dropout_that_comes_later_is_warned_of():
    model = prepare_model(make_model("llama", dtype=torch.float32))
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0.3)
    with pytest.warns(UserWarning, match=r"dropout \(p=\[0.3\]\)"):
        get_peft_model(model, lora)(**batch())


def test_hooks_have_the_names_that_the_fingerprint_reads():
    for name in (*fingerprint._HOOKS, *fingerprint._GLOBAL_HOOKS):
        owner = torch.nn.modules.module if "global" in name else torch.nn.Linear(1, 1)
        assert isinstance(getattr(owner, name), dict), name
    handle = register_module_full_backward_hook(print)
    try:
        assert print in torch.nn.modules.module._global_backward_hooks.values()
    finally:
        handle.remove()


def test_another_implementation_under_our_name_is_refused(monkeypatch):
    model = prepare_model(make_model("llama", dtype=torch.float32))
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "prefix_tree", modeling_llama.eager_attention_forward)
    with pytest.raises(ValueError, match="Something else was registered"):
        model(**batch())


def test_an_adapter_that_comes_later_is_checked():
    model = prepare_model(make_model("llama", dtype=torch.float32))
    lora = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert lora(**batch()).loss > 0
    model = prepare_model(make_model("llama", dtype=torch.float32))
    lily = get_peft_model(model, LilyConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"'default' \(LilyConfig\) computes something over all tokens"):
        lily(**batch())


def test_a_changed_window_is_checked(monkeypatch):
    checks = count_checks(monkeypatch)
    model = prepare_model(make_model("gemma3", dtype=torch.float32))
    model.config.sliding_window = 9
    model(**batch())
    assert len(checks) == 2


def own_attn(self, query, key, value, attention_mask=None, *args, **kwargs):
    """GPT-Neo's attention with a mask of its own."""
    scores = query @ key.transpose(-1, -2)
    visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return scores.masked_fill(~visible, -1e9).softmax(-1) @ value, None


@pytest.mark.parametrize("of", ["class", "instance"])
def test_a_helper_method_that_is_patched_later_is_checked(of, monkeypatch):
    config = GPTNeoConfig(
        vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]],
        attention_dropout=0.0, resid_dropout=0.0, embed_dropout=0.0,
    )  # fmt: skip
    model = prepare_model(GPTNeoForCausalLM(config))
    expected = model(**batch()).loss
    attention = model.transformer.h[1].attn.attention
    if of == "class":
        monkeypatch.setattr(type(attention), "_attn", own_attn)
    else:
        attention._attn = MethodType(own_attn, attention)
    with pytest.raises(ValueError, match=WRONG):
        model(**batch())
    monkeypatch.undo()
    vars(attention).pop("_attn", None)
    assert torch.equal(model(**batch()).loss, expected)


def by_another_config(model):
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)


def by_a_nested_value(model):
    model.config.rope_parameters["partial_rotary_factor"] = 0.5


def by_rope_type(model):
    model.model.rotary_emb.rope_type = "linear"


def by_a_new_field(model):
    model.config.attention_span = 5


@pytest.mark.parametrize("change", [by_another_config, by_a_nested_value, by_rope_type, by_a_new_field])
def test_a_config_that_changes_behind_the_model_is_checked(change, monkeypatch):
    model = prepare_model(make_model("llama", dtype=torch.float32))
    checks = count_checks(monkeypatch)
    change(model)
    for _ in range(fingerprint._TURNS if change is by_another_config else 2):
        model(**batch())
    assert len(checks) == 1


def long_chain():
    ids = torch.arange(200).remainder(VOCAB - 3) + 3
    return concatenate_trees([fold([Branch(ids.tolist(), [1] * 200), Branch([3, 5], [1, 1])])], pad_token_id=0)


def dynamic(config):
    config = copy.deepcopy(config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return config


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("by", ["attribute", "module"])
def test_dynamic_rotary_behind_the_config_limits_branches(by, is_first):
    model = make_model("llama", dtype=torch.float32)
    model.config.max_position_embeddings = 150
    if not is_first:
        prepare_model(model)
        model(**long_chain())
    if by == "module":
        model.model.rotary_emb = type(model.model.rotary_emb)(dynamic(model.config))
    else:
        model.model.rotary_emb.rope_type, model.model.rotary_emb.original_max_seq_len = "dynamic", 150
    with pytest.raises(ValueError, match=r"A branch has 200 tokens, .* beyond 150 tokens"):
        prepare_model(model)(**long_chain())


class Switched(LlamaAttention):
    """Its own attention once an attribute is set."""

    mode = None

    def forward(self, *args, **kwargs):
        return (
            causal(self, *args, **kwargs)
            if getattr(self, "by_itself", self.mode)
            else super().forward(*args, **kwargs)
        )


@pytest.mark.parametrize("value", [True, 1, "causal"])
def test_an_attribute_that_switches_ones_own_attention_is_checked(value):
    model = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Switched
        layer.self_attn.by_itself = False if value is True else 0 if value == 1 else ""
    prepare_model(model)(**batch())
    model.model.layers[1].self_attn.by_itself = value
    with pytest.raises(ValueError, match=WRONG):
        model(**batch())


class Mixes(LlamaMLP):
    def forward(self, x):
        return super().forward(x) if self.mix is None else self.mix(super().forward(x))


@pytest.mark.parametrize("before", [None, torch.neg])
def test_a_function_that_ones_own_code_calls_later_is_checked(before, monkeypatch):
    model = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.__class__, layer.mlp.mix = Mixes, before and (lambda x: before(x))
    prepare_model(model)(**batch())
    checks = count_checks(monkeypatch)
    model(**batch())
    assert not checks
    model.model.layers[1].mlp.mix = lambda x: x + x.roll(1, dims=1)
    with pytest.raises(ValueError, match=WRONG):
        model(**batch())


class Counts(LlamaMLP):
    calls, last = 0, 0.0

    def forward(self, x):
        self.calls, self.last = self.calls + 1, float(x.detach().sum())
        return super().forward(x)


def test_a_counter_costs_no_check(monkeypatch):
    model = make_model("llama", dtype=torch.float32)
    model.model.layers[0].mlp.__class__ = Counts
    prepare_model(model)
    checks = count_checks(monkeypatch)
    for _ in range(3):
        model(**batch())
    assert not checks


def test_a_backbone_that_is_compiled_later_is_served():
    model = prepare_model(make_model("llama", dtype=torch.float32))
    model.model = torch.compile(model.model, backend="eager")
    refuse_other_backbone(model)


def test_another_backbone_is_refused():
    model = prepare_model(make_model("llama", dtype=torch.float32))
    model.model = make_model("llama", dtype=torch.float32).model
    with pytest.raises(ValueError, match="backbone of LlamaForCausalLM"):
        model(**batch())
    unprepare_model(model)
    assert prepare_model(model)(**batch()).loss > 0


def test_a_shadow_that_comes_later_is_refused():
    peft = pytest.importorskip("peft", reason="adapters are of PEFT")
    if not hasattr(peft, "ShadowConfig"):
        pytest.skip("this version of PEFT has no Shadow")
    model = prepare_model(make_model("llama", dtype=torch.float32))
    shadow = get_peft_model(model, peft.ShadowConfig(task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"\(ShadowConfig\) runs a model once more"):
        shadow(**batch())


def count_checks(monkeypatch):
    checks, verify = [], model_module._verify
    monkeypatch.setattr(model_module, "_verify", lambda *args: (checks.append(1), verify(*args)))
    return checks


def test_what_toggles_in_training_costs_no_check(monkeypatch):
    checks = count_checks(monkeypatch)
    lora = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(make_model("llama", dtype=torch.float32), lora)
    prepare_model(model)
    base = model.get_base_model()
    for _ in range(2):
        model.train()(**batch())
        model.eval()(**batch())
        with model.disable_adapter():
            model(**batch())
        base.config.use_cache = not base.config.use_cache
        base.gradient_checkpointing_enable({"use_reentrant": False})
        base.enable_input_require_grads()
        model.train()(**batch()).loss.backward()
        base.gradient_checkpointing_disable()
        base.disable_input_require_grads()
        handle = base.model.layers[0].register_forward_hook(lambda module, args, output: output)
        model(**batch())
        handle.remove()
        prepare_model(model)
        ensure_verified(model, model)
    assert len(checks) == 2  # the hook is from a file that nobody knows


def test_hooks_that_only_look_see_no_check(monkeypatch):
    checks, seen = count_checks(monkeypatch), []
    model = prepare_model(make_model("llama", dtype=torch.float32))

    class Counter:
        total = 0

        def __call__(self, module, args, output):
            self.total += 1

    def look(module, args, output):
        seen.append(module)

    counter = Counter()
    model.model.layers[0].register_forward_hook(counter)
    model.model.layers[0].register_forward_hook(look)
    model(**batch())
    assert len(checks) == counter.total == len(seen) == 1


def test_wrappers_of_known_packages_cost_no_check(monkeypatch):
    from accelerate.utils import convert_outputs_to_fp32

    checks = count_checks(monkeypatch)
    model = prepare_model(make_model("llama", dtype=torch.float32))
    expected = model(**batch()).loss
    forward = torch.autocast("cpu", torch.bfloat16, enabled=False)(model.forward.__func__)
    model.forward = MethodType(convert_outputs_to_fp32(forward), model)
    assert torch.equal(model(**batch()).loss, expected)
    assert len(checks) == 1


def test_a_copy_is_checked_by_itself(monkeypatch):
    model = prepare_model(make_model("llama", dtype=torch.float32))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        patch_forwards(copied, monkeypatch)
        with pytest.raises(ValueError, match=WRONG):
            copied(**batch())
    assert model(**batch()).loss > 0


def test_sharded_weights_are_not_checked_by_one_rank(monkeypatch):
    model = prepare_model(make_model("llama", dtype=torch.float32))
    patch_forwards(model, monkeypatch)
    monkeypatch.setattr(model_module, "is_materialized", lambda model: False)
    with pytest.raises(ValueError, match=r"LlamaForCausalLM was patched after its check.*one rank cannot check"):
        model(**batch())


def test_the_fingerprint_tells_code_apart():
    model = make_model("llama", dtype=torch.float32)
    watch = CodeWatch(model)
    assert watch.unchanged() and watch.key == CodeWatch(model).key and not watch.unknown
    ids = torch.arange(3, 20)[None] % VOCAB
    model(ids, labels=ids).loss.backward()
    assert watch.unchanged()
    model.model.layers[0].mlp.forward = MethodType(LlamaMLP.forward, model.model.layers[0].mlp)
    assert not watch.unchanged()


def test_the_device_is_found_after_the_embeddings_are_parametrized():
    model = prepare_model(make_model("llama", dtype=torch.float32))
    watch = CodeWatch(model)
    torch.nn.utils.parametrize.register_parametrization(model.model.embed_tokens, "weight", torch.nn.Identity())
    assert watch.device_type == CodeWatch(model).device_type == "cpu"
    assert model(**batch()).loss > 0
    assert CodeWatch(model.to("meta")).device_type == "meta"
