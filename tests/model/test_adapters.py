"""Adapters of PEFT on trees: exact, or refused by name. What each of them gives is compared with its branches here."""

import copy
import re
import warnings
from unittest.mock import Mock

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora.config import MontecloraConfig, VeloraConfig
from transformers import AutoModelForCausalLM, Llama4ForCausalLM, Llama4TextConfig, LlamaConfig

import hf_prefix_tree.modeling.prepare as model_module
import hf_prefix_tree.modeling.verify_adapters as verify_module
from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.verify import ROUNDING
from hf_prefix_tree.modeling.verify_adapters import verify_adapters
from tests.support.models import CONFIGS, branch_runs, gradients, make_model, random_forest, relative_error

TARGETS = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
EXACT = {
    "lora": lambda: LoraConfig(r=4, **TARGETS),
    "dora": lambda: LoraConfig(r=4, use_dora=True, **TARGETS),
    "velora, random": lambda: LoraConfig(r=4, velora_config=VeloraConfig(num_groups=4, init_type="random"), **TARGETS),
    "ia3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], **{**TARGETS, "target_modules": ["down_proj"]}),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, **TARGETS),
    "vera": lambda: peft.VeraConfig(**TARGETS),
    "lokr": lambda: peft.LoKrConfig(r=4, **TARGETS),
    "ln_tuning": lambda: peft.LNTuningConfig(**{**TARGETS, "target_modules": ["input_layernorm"]}),
}
AVERAGES, DRAWS = "computes something over all tokens of a call", "draws random numbers in each call"
REFUSED = {
    "lily": (lambda: peft.LilyConfig(**TARGETS), r"LilyConfig\) " + AVERAGES),
    "pvera": (lambda: peft.PveraConfig(**TARGETS), r"PveraConfig\) " + DRAWS),
    "velora": (
        lambda: LoraConfig(r=4, velora_config=VeloraConfig(num_groups=4), **TARGETS),
        r"LoraConfig\) with VeloraLinearVariant " + AVERAGES,
    ),
    "velora, once": (
        lambda: LoraConfig(r=4, velora_config=VeloraConfig(num_groups=4, init_type="batch_average_once"), **TARGETS),
        r"LoraConfig\) with VeloraLinearVariant " + AVERAGES,
    ),
    "monteclora": (
        lambda: LoraConfig(r=4, monteclora_config=MontecloraConfig(), **TARGETS),
        r"LoraConfig\) with MontecloraLinearVariant " + DRAWS,
    ),
}


def adapted(config, dtype=torch.float32, randomize=False):
    model = get_peft_model(make_model("llama", dtype=dtype), config)
    if randomize:
        for name, p in model.named_parameters():
            if p.requires_grad:
                p.data.add_(
                    torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)), dtype=dtype) * 0.1
                )
    return model


def errors(model, monkeypatch):
    """Loss and gradients of a tree without any check of ours, against its branches, in training mode."""
    monkeypatch.setattr(model_module, "_verify", lambda base, state, forward=None: state.verified_on.add("cpu"))
    trees, alone = random_forest(3), copy.deepcopy(model.train())
    prepare_model(model)
    with keep_double():
        loss = model(**concatenate_trees(trees, pad_token_id=0)).loss
        loss.backward()
        expected = branch_runs(alone, trees)[0]
        expected.backward()
    return abs(loss - expected).item(), relative_error(gradients(model), gradients(alone))


@pytest.mark.parametrize("name", EXACT)
def test_exact_adapters_pass_the_check_and_are_exact(name, monkeypatch):
    prepare_model(adapted(EXACT[name]()))
    loss, grads = errors(adapted(EXACT[name](), torch.float64, randomize=True), monkeypatch)
    assert loss < 1e-10 and grads < 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_look_at_the_call_are_refused(name, dtype):
    config, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"PEFT adapter 'default' .*{message}"):
        prepare_model(adapted(config(), dtype))


@pytest.mark.parametrize("name", REFUSED)
def test_they_are_refused_inside_autocast(name):
    """Autocast keeps the weights that it has cast, without the noise of the check."""
    config, message = REFUSED[name]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=message):
        prepare_model(adapted(config()))


def test_autocast_forgets_the_noise_of_the_check():
    """A call inside autocast that is the first after the adapters came: it is checked, and runs them as they are."""
    model = make_model("llama", dtype=torch.float32)
    prepare_model(model)
    model = get_peft_model(model, LoraConfig(r=4, **TARGETS)).train()
    batch = concatenate_trees(random_forest(0), pad_token_id=0)
    found = []
    for _ in range(2):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    assert all(torch.equal(found[0][name], value) for name, value in found[1].items())


def test_rounding_of_the_model_itself_is_no_fault_of_an_adapter(monkeypatch):
    """A deep model rounds by more than the tolerance, which the check of the model would not let pass here."""
    monkeypatch.setattr(model_module, "verify_adapters", lambda *args: None)
    configs = {"lora": EXACT["lora"], "lily": REFUSED["lily"][0], "velora": REFUSED["velora"][0]}
    models = {name: prepare_model(adapted(config(), torch.bfloat16)) for name, config in configs.items()}
    monkeypatch.setitem(ROUNDING, torch.bfloat16, 2e-3)
    verify_adapters(models["lora"].get_base_model(), models["lora"])
    for name in ("lily", "velora"):
        with pytest.raises(ValueError, match=REFUSED[name][1]):
            verify_adapters(models[name].get_base_model(), models[name])


DEEP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 20, "head_dim": 4}
SCORES = {"target_modules": ["q_proj", "k_proj"], "task_type": "CAUSAL_LM"}  # whose adapters amplify rounding most


class Quantized(torch.nn.Linear):
    """As those of bitsandbytes: the weight is no floating-point number, and its layer chooses what to compute in."""

    def forward(self, hidden):
        weight = self.weight.view(torch.bfloat16).to(self.compute_dtype)
        return torch.nn.functional.linear(hidden.to(self.compute_dtype), weight).to(hidden.dtype)


def deep(config, seed=0, dtype=torch.bfloat16, quantized=False):
    """A deep model with an adapter, prepared; the test checks the adapter by itself."""
    torch.manual_seed(0)
    llama = LlamaConfig(**{**CONFIGS["llama"].to_dict(), **DEEP})
    model = AutoModelForCausalLM.from_config(llama, dtype=dtype, attn_implementation="prefix_tree")
    for layer in [x for x in model.model.modules() if quantized and isinstance(x, torch.nn.Linear)]:
        layer.__class__, layer.compute_dtype = Quantized, dtype
        layer.weight = torch.nn.Parameter(layer.weight.data.view(torch.int16), requires_grad=False)
    torch.manual_seed(seed)
    return prepare_model(get_peft_model(model, config))


def is_refused(model):
    try:
        verify_adapters(model.get_base_model(), model)
    except ValueError as error:
        assert AVERAGES in str(error)
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "autocast"])
def test_float32_decides_where_rounding_hides_an_adapter(dtype, monkeypatch):
    """How much 16 bits round depends on the CPU, so that here they are never trusted."""
    monkeypatch.setattr(model_module, "verify_adapters", lambda *args: None)
    strong = {"r": 16, "lora_alpha": 128, **SCORES}
    configs = {
        "lora": LoraConfig(**strong),
        "lily": peft.LilyConfig(**SCORES),
        "velora": LoraConfig(velora_config=VeloraConfig(num_groups=4), **strong),
    }
    models = {name: deep(config, dtype=dtype) for name, config in configs.items()}
    monkeypatch.setitem(ROUNDING, torch.bfloat16, 1.1e-3)
    monkeypatch.setattr(verify_module, "OWN_ROUNDING", 0)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        refused = {name: is_refused(model) for name, model in models.items()}
    assert refused == {"lora": False, "lily": True, "velora": True}
    if dtype == torch.bfloat16:  # whose rounding alone would not tell them apart
        monkeypatch.setattr(verify_module, "_in_float32", lambda model, **inputs: model(**inputs))
        assert is_refused(models["lora"])
        monkeypatch.setattr(verify_module, "_in_float32", Mock(side_effect=torch.OutOfMemoryError))
        with pytest.raises(RuntimeError, match=r"no memory for a float32 copy .* Load the model in float32"):
            is_refused(models["lora"])


def test_float32_decides_under_quantized_layers_as_well(monkeypatch):
    """They compute in a dtype of their own, whatever that of their input."""
    for check in ("verify_adapters", "verify_training"):
        monkeypatch.setattr(model_module, check, lambda *args, **kwargs: None)
    lora = LoraConfig(r=16, lora_alpha=128, **SCORES)
    models = [deep(config, 1, quantized=True) for config in (lora, peft.LilyConfig(**TARGETS))]
    monkeypatch.setitem(ROUNDING, torch.bfloat16, 1.1e-3)
    monkeypatch.setattr(verify_module, "OWN_ROUNDING", 0)
    assert [is_refused(model) for model in models] == [False, True]
    layers = [x for x in models[0].modules() if isinstance(x, Quantized)]
    assert len(layers) == 140 and all(layer.compute_dtype == torch.bfloat16 for layer in layers)


def test_sharded_weights_are_compared_with_the_rounding_of_the_model(monkeypatch):
    """They have no float32 form here, and no gradients; the tolerance of bf16 is less than what the model rounds."""
    monkeypatch.setattr(model_module, "verify_adapters", lambda *args: None)
    lora, lily = deep(LoraConfig(r=16, lora_alpha=128, **SCORES), 6), deep(peft.LilyConfig(**TARGETS))
    monkeypatch.setattr(verify_module.verify, "is_materialized", lambda model: False)
    exact = verify_module.verify.tree_logits

    def rounded(*args):  # on every CPU by as much
        logits = exact(*args)
        noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
        return logits + 2e-2 * logits.std() * noise.to(logits)

    monkeypatch.setattr(verify_module.verify, "tree_logits", rounded)
    monkeypatch.setitem(ROUNDING, torch.bfloat16, 2e-3)
    assert not is_refused(lora) and is_refused(lily)
    monkeypatch.setattr(verify_module, "OWN_ROUNDING", 0)
    assert is_refused(lora)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_not_exact(name, monkeypatch):
    _, grads = errors(adapted(REFUSED[name][0](), torch.float64, randomize=True), monkeypatch)
    assert grads > 1e-3


@pytest.mark.parametrize("name", [*EXACT, *REFUSED])
def test_the_check_leaves_no_trace(name):
    make = EXACT.get(name) or REFUSED[name][0]
    model = adapted(make()).train()
    model.base_model.model.model.layers[0].eval()
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.full_like(p, 0.5)
    before = copy.deepcopy(model.state_dict())
    flags = [(module.training, getattr(module, "_disable_adapters", None)) for module in model.modules()]
    trained = [p.requires_grad for p in model.parameters()]
    versions = [p._version for p in model.parameters()]
    initialized = copy.deepcopy([getattr(m, "lora_velora_initialized", None) for m in model.modules()])
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    try:
        prepare_model(model)
    except ValueError as error:
        assert name in REFUSED, error
    assert torch.equal(torch.rand(2), expected)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[n], x) for n, x in before.items())
    assert [(m.training, getattr(m, "_disable_adapters", None)) for m in model.modules()] == flags
    assert [p.requires_grad for p in model.parameters()] == trained
    assert [p._version for p in model.parameters()] == versions
    assert [getattr(m, "lora_velora_initialized", None) for m in model.modules()] == initialized
    assert all((p.grad == 0.5).all() if p.requires_grad else p.grad is None for p in model.parameters())


def test_a_switched_off_adapter_is_checked_as_well():
    model = adapted(REFUSED["lily"][0]())
    with model.disable_adapter(), pytest.raises(ValueError, match="LilyConfig"):
        prepare_model(model)


def test_an_adapter_that_becomes_active_later_is_checked():
    model = adapted(EXACT["lora"]())
    prepare_model(model)
    model.add_adapter("other", REFUSED["velora"][0]())
    model.set_adapter("other")
    row = concatenate_trees(random_forest(0), pad_token_id=0)
    with pytest.raises(ValueError, match="VeloraLinearVariant"):
        model(**row)
    model.set_adapter("default")
    assert model(**row).loss > 0


def test_dropout_is_warned_of_and_no_reason_to_refuse():
    for config, rates in (
        (LoraConfig(lora_dropout=0.3, **TARGETS), r"\[0.3\]"),
        (peft.LoHaConfig(r=4, module_dropout=0.2, rank_dropout=0.3, **TARGETS), r"\[0.2, 0.3\]"),
    ):
        with pytest.warns(UserWarning, match=rf"dropout \(p={rates}\)"):
            prepare_model(adapted(config))


ON_EMBEDDINGS = {
    "lora": {"target_modules": ["embed_tokens", "q_proj"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6, 7]},
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", ON_EMBEDDINGS)
def test_adapters_of_the_embeddings_are_exact(name, later):
    model = make_model("llama", dtype=torch.float64)
    if later:
        prepare_model(model)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False, **ON_EMBEDDINGS[name])
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    prepare_model(model)
    trees = random_forest(3)
    with keep_double():
        loss = model(**concatenate_trees(trees, pad_token_id=0)).loss
        loss.backward()
        found = gradients(model)
        model.zero_grad()
        expected = branch_runs(model, trees)[0]
        expected.backward()
    assert abs(loss - expected).item() < 1e-10 and relative_error(found, gradients(model)) < 1e-9


def test_reentrant_checkpointing_is_no_obstacle():
    model = adapted(EXACT["lora"]()).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    prepare_model(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(**concatenate_trees(random_forest(0), pad_token_id=0)).loss.backward()
    assert any(re.search("lora_B", n) and p.grad is not None for n, p in model.named_parameters())


def test_the_check_under_inference_mode_compares_gradients():
    model, refused = adapted(EXACT["lora"]()), adapted(REFUSED["velora"][0]())
    with torch.inference_mode():
        assert prepare_model(model)(**concatenate_trees(random_forest(0), pad_token_id=0)).loss > 0
        with pytest.raises(ValueError, match="VeloraLinearVariant"):
            prepare_model(refused)
        with pytest.raises(ValueError, match=r"LlamaForCausalLM were made under `torch.inference_mode\(\)`"):
            prepare_model(adapted(EXACT["lora"]()))


@pytest.mark.parametrize("later", [False, True])
def test_x_lora_is_refused(later, tmp_path):
    adapted(EXACT["lora"]()).save_pretrained(tmp_path)
    model = make_model("llama", dtype=torch.float32)
    model.config.use_cache = False
    if later:
        prepare_model(model)
    config = peft.XLoraConfig(task_type="CAUSAL_LM", hidden_size=32, adapters={"a": str(tmp_path)})
    model = get_peft_model(model, config)
    with pytest.raises(ValueError, match=r"PEFT adapter 'default' \(XLoraConfig\) runs a model once more \(X-LoRA"):
        model(**concatenate_trees(random_forest(0), pad_token_id=0)) if later else prepare_model(model)
    with pytest.raises(ValueError, match="X-LoRA"):
        prepare_model(model)


def test_tempered_queries_follow_an_adapter_that_comes_and_goes():
    """Llama 4 tempers queries by their index, which the tree path corrects in its attention."""
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=97, hidden_size=16, intermediate_size=16, intermediate_size_mlp=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, interleave_moe_layer_step=10,
        no_rope_layers=[0], attn_temperature_tuning=True, floor_scale=30, attn_scale=0.5, use_qk_norm=False,
        pad_token_id=0,
    )  # fmt: skip
    model = Llama4ForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    trees = random_forest(0, num_trees=1, num_branches=4, max_length=60)
    row = concatenate_trees(trees, pad_token_id=0)
    prepare_model(model)
    model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    with torch.no_grad():
        assert model(**row).loss == pytest.approx(branch_runs(model, trees)[0].item(), rel=1e-6)
        model = model.merge_and_unload()
        assert model(**row).loss == pytest.approx(branch_runs(model, trees)[0].item(), rel=1e-6)
