"""`prepare_model(compile_layers=True)`: few graphs for many row lengths, the same numbers, undone and refused.

The code generator is left out. Where graphs are counted, tracing and autograd run as on a GPU, with plain operations
for kernels; elsewhere Dynamo alone runs.
"""

import copy
import logging
from unittest import mock

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch._dynamo.utils import counters
from torch.torch_version import TorchVersion

from conformance.build import build_model
from hf_prefix_tree import Branch, fold, prepare_model, unprepare_model
from hf_prefix_tree.modeling import compilation
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.prepare import ensure_verified, is_prepared
from tests.support.models import gradients, make_model, random_forest, relative_error

FUSES_ALIKE = pytest.mark.skipif(
    torch.__version__ < TorchVersion("2.13"),
    reason="needs torch 2.13: before, the code generator fuses a layer on trees otherwise, and rounds elsewhere",
)

MIXTURES = ("qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3", "mixtral", "qwen3_next")
# What a GPU runs, in float64 an operator that earlier versions of Transformers cannot compile.
HAS_OPERATOR = hasattr(torch.ops.transformers, "grouped_mm_fallback_backward")
BEST_DISPATCH = "grouped_mm" if HAS_OPERATOR else "batched_mm"


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch):
    torch._dynamo.reset()
    compilation._compiled.cache_clear()
    counters.clear()
    monkeypatch.setattr(compilation, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


def rows(number):
    """Rows of as many lengths: SDPA, unlike FlexAttention, does not ask for whole blocks."""
    forests = [random_forest(i, 1 + i % 2, num_branches=4 + i % 3, max_length=12) for i in range(number)]
    found = [concatenate_trees(own, 0, pad_to_multiple_of=112 + 8 * i) for i, own in enumerate(forests)]
    assert len({row["input_ids"].shape[1] for row in found}) == number
    return found


def runs(model, batches, **options):
    found = []
    for batch in batches:
        model.zero_grad()
        loss = model(**batch, **options).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    return found


def assert_same(model, compiled, batches, **options):
    for got, expected in zip(runs(compiled, batches, **options), runs(model, batches, **options), strict=True):
        assert relative_error(got, expected) < 1e-12


def pair(name, experts="eager"):
    """A model and its compiled copy, whose experts are dispatched as asked for."""
    model = build_model(name).double() if name in MIXTURES else make_model(name).train()
    compiled = copy.deepcopy(model)
    prepare_model(model)
    prepare_model(compiled)  # verified before it is compiled, which saves the graph without gradients
    compiled.config._experts_implementation = experts
    prepare_model(compiled, compile_layers=True)
    with mock.patch(
        "hf_prefix_tree.modeling.prepare._verify", lambda base, state, forward: state.verified_on.add("cpu")
    ):
        ensure_verified(compiled, compiled)
    return model, compiled


@pytest.mark.parametrize(("name", "kinds_of_layers"), [("qwen3", 1), ("gemma3", 2)])
def test_a_graph_for_each_kind_of_layer_whatever_the_length(monkeypatch, name, kinds_of_layers):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    model, compiled = pair(name)
    assert_same(model, compiled, rows(20 if name == "qwen3" else 3))
    assert counters["stats"]["unique_graphs"] == kinds_of_layers
    assert not counters["graph_break"] and not counters["recompile_limit"]


@pytest.mark.parametrize(
    ("name", "graphs"),
    [
        ("qwen3_moe", 1),
        pytest.param("gpt_oss", 2, marks=pytest.mark.slow),
        pytest.param("glm4_moe", 2, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 2, marks=pytest.mark.slow),
        pytest.param("mixtral", 1, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 3, marks=pytest.mark.slow),
    ],
)
def test_mixtures_of_experts_with_their_router_loss(monkeypatch, caplog, name, graphs):
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    with caplog.at_level(logging.INFO, logger=compilation.__name__):
        model, compiled = pair(name, BEST_DISPATCH)
    assert ("GatedDeltaNet run eagerly" in caplog.text) == (name == "qwen3_next")
    assert "Experts" not in caplog.text
    batches = rows(2)
    assert_same(model, compiled, batches, output_router_logits=True)
    assert counters["stats"]["unique_graphs"] == graphs  # layers around a scan have two
    if name not in ("glm4_moe", "deepseek_v3"):  # which have no such loss: it moves the gradients
        without, with_loss = (runs(compiled, batches[:1], output_router_logits=on)[0] for on in (False, True))
        assert relative_error(without, with_loss) > 1e-6


def test_experts_that_make_no_graph_stay_outside(caplog):
    with caplog.at_level(logging.INFO, logger=compilation.__name__):
        model, compiled = pair("qwen3_moe")
    assert caplog.text.count("Qwen3MoeExperts run eagerly") == 1
    assert_same(model, compiled, rows(2), output_router_logits=True)
    assert counters["graph_break"] and counters["stats"]["unique_graphs"] > 1
    unprepare_model(compiled)
    assert not any("forward" in module.__dict__ for module in compiled.modules())


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("experts", [pytest.param("eager", marks=pytest.mark.slow), BEST_DISPATCH])
def test_recomputation_records_what_the_forward_recorded(use_reentrant, experts):
    model, compiled = pair("qwen3_moe", experts)
    for own in (model, compiled):
        own.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        own.enable_input_require_grads()
    assert_same(model, compiled, rows(2), output_router_logits=True)
    if experts == BEST_DISPATCH:  # reentrant: one of them without gradients
        assert counters["stats"]["unique_graphs"] == (2 if use_reentrant else 1)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_stays_outside_the_graph(use_reentrant):
    model, compiled = pair("qwen3")
    calls = []
    compiled.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    compiled.enable_input_require_grads()
    run = compilation._run
    compilation._run = lambda *args, **kwargs: calls.append(1) or run(*args, **kwargs)
    try:
        assert_same(model, compiled, rows(2))
    finally:
        compilation._run = run
    assert len(calls) == 2 * 2 * 2  # rows, layers, forward and recomputation
    # reentrant: one of them without gradients, in training mode
    assert counters["stats"]["unique_graphs"] == (2 if use_reentrant else 1)


def test_lora():
    torch.manual_seed(0)
    model = make_model("qwen3")
    config = LoraConfig(target_modules=["q_proj", "down_proj"], r=4, init_lora_weights=False)
    model = get_peft_model(model, config).train()
    compiled = copy.deepcopy(model)
    prepare_model(model)
    prepare_model(compiled)
    prepare_model(compiled, compile_layers=True)
    assert_same(model, compiled, rows(2))


@pytest.mark.slow
def test_lora_is_checked_inside_autocast(monkeypatch):
    """Graphs cast weights anew; eager layers, with which they are compared, take what autocast has cast before."""
    monkeypatch.setattr(compilation, "BACKEND", "aot_eager")
    model = get_peft_model(make_model("llama", torch.float32), LoraConfig(r=4, target_modules="all-linear")).train()
    compiled = copy.deepcopy(model)
    (row,) = rows(1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = prepare_model(model)(**row).loss
        assert torch.equal(prepare_model(compiled, compile_layers=True)(**row).loss, expected)


@pytest.mark.parametrize(
    ("weights", "adapters", "autocast", "compiles"),
    [
        (torch.bfloat16, torch.bfloat16, False, False),
        (torch.bfloat16, torch.float32, False, False),
        (torch.bfloat16, torch.float32, True, False),
        (torch.float32, torch.float32, True, False),
        # the code generator keeps float32 where eager layers round
        pytest.param(torch.bfloat16, torch.float32, False, True, marks=[pytest.mark.slow, FUSES_ALIKE]),
    ],
)
def test_sixteen_bits_round_as_in_stock_layers_bit_for_bit(monkeypatch, weights, adapters, autocast, compiles):
    """A branch alone, of one block, in the same attention: what is left is what this package adds to a layer."""
    monkeypatch.setattr(compilation, "BACKEND", "inductor")
    model = make_model("qwen3", dtype=weights, amplify=1.0)
    config = LoraConfig(target_modules="all-linear", r=4)
    tree = get_peft_model(model, config, autocast_adapter_dtype=adapters == torch.float32).train()
    stock = copy.deepcopy(tree)
    stock.get_base_model().set_attn_implementation("sdpa")
    prepare_model(tree)
    if compiles:
        verified = mock.patch(
            "hf_prefix_tree.modeling.prepare._verify", lambda base, state, _: state.verified_on.add("cpu")
        )
        with verified:  # it was, before
            prepare_model(tree, compile_layers=True)
            ensure_verified(tree, tree)
        for layer in stock.get_base_model().model.layers:
            layer.compile()
    ids = torch.randint(3, 97, (1, 128))
    row = concatenate_trees([fold([Branch(ids[0].tolist(), [1] * 128)])], pad_token_id=0)
    # a whole mask, because SDPA rounds otherwise where it is told that attention is causal
    mask = torch.ones(128, 128, dtype=torch.bool).tril()[None, None]

    def steps(model, loss_of):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert {parameter.dtype for parameter in trained} == {adapters}
        optimizer = torch.optim.AdamW(trained, lr=1e-3)
        for _ in range(2):  # the adapters of the first are zero
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = loss_of(model)
            loss.backward()
            yield loss.detach(), *(parameter.grad.clone() for parameter in trained)
            optimizer.step()
            optimizer.zero_grad()

    def stock_loss(model):
        logits = model(input_ids=ids, attention_mask=mask).logits[0, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
        return nll.double().mean().float()

    losses = []
    for got, expected in zip(steps(tree, lambda model: model(**row).loss), steps(stock, stock_loss), strict=True):
        assert all(map(torch.equal, got, expected))
        losses.append(got[0])
    assert losses[0] != losses[1]


def test_only_calls_with_a_tree_run_compiled():
    model, compiled = pair("qwen3")
    ids = torch.arange(3, 20)[None]
    assert torch.equal(model(ids).logits, compiled(ids).logits)
    assert torch.equal(*(m.eval().generate(ids, max_new_tokens=4, do_sample=False) for m in (model, compiled)))
    assert not counters["stats"]
    (row,) = rows(1)
    compiled(**row)
    assert counters["stats"]["unique_graphs"] == 1


def test_hooks_that_come_later_are_seen():
    model, compiled = pair("qwen3")
    batches = rows(1)
    assert_same(model, compiled, batches)
    before = runs(model, batches)[0]["loss"]
    for own in (model, compiled):
        own.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 2 * output)
    assert runs(model, batches)[0]["loss"] != before
    assert_same(model, compiled, batches)


def test_a_layer_with_another_forward_is_refused():
    model = make_model("qwen3")
    add_hook_to_module(model.model.layers[1], ModelHook())
    with pytest.raises(ValueError, match=r"compile_layers=True.*`forward`.*Qwen3DecoderLayer"):
        prepare_model(model, compile_layers=True)
    assert not is_prepared(model)


def test_compiled_layers_are_verified_again():
    model = make_model("qwen3").train()
    prepare_model(model)
    ensure_verified(model, model)
    assert not counters["stats"]
    prepare_model(model, compile_layers=True)
    ensure_verified(model, model)
    assert counters["stats"]["unique_graphs"] > 0


def test_undone_and_done_again():
    model = make_model("qwen3")
    prepare_model(model, compile_layers=True)
    assert all("forward" in layer.__dict__ for layer in model.model.layers)
    prepare_model(model, compile_layers=True)
    copied = copy.deepcopy(model)
    assert all(layer.forward.owner is layer for layer in copied.model.layers)
    unprepare_model(copied)
    assert not any("forward" in layer.__dict__ for layer in copied.model.layers)
    assert all(layer.forward.owner is layer for layer in model.model.layers)
    prepare_model(copied)
    assert not any("forward" in layer.__dict__ for layer in copied.model.layers)
    prepare_model(copied, compile_layers=True)
    assert all("forward" in layer.__dict__ for layer in copied.model.layers)


def test_a_layer_that_does_not_become_one_graph_is_refused(monkeypatch):
    model = make_model("qwen3")
    forward = lambda self, x: (torch._dynamo.graph_break(), x)[1]  # noqa: E731
    monkeypatch.setattr(type(model.model.layers[0].mlp), "forward", forward)
    with pytest.raises(ValueError, match=r"compile_layers=True.*Qwen3DecoderLayer"):
        prepare_model(model, compile_layers=True)


def test_a_layer_that_gets_no_tree_is_refused():
    _, compiled = pair("qwen3")
    (row,) = rows(1)
    hook = lambda module, args, kwargs: (args, {k: v for k, v in kwargs.items() if k != "prefix_tree"})  # noqa: E731
    compiled.model.layers[1].register_forward_pre_hook(hook, with_kwargs=True)
    with pytest.raises(ValueError, match="Qwen3DecoderLayer"):
        compiled(**row)
