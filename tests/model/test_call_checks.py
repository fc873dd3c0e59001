"""What a call with a tree refuses because its numbers would be wrong: weights that get lost, inputs that the tree
path would ignore, losses that are not the weighted cross-entropy."""

import functools
import logging
import types

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils.logging import warning_once
from trl.trainer.utils import add_fused_lm_head

from conformance.build import build_model
from hf_prefix_tree import PrefixTree, prepare_model, tree_log_probs, unprepare_model
from hf_prefix_tree.modeling import call_checks as refusals
from hf_prefix_tree.modeling.batch import WEIGHTED_BY_CALLER, concatenate_trees
from hf_prefix_tree.modeling.call import state_of
from hf_prefix_tree.modeling.checks import base_causal_lm
from hf_prefix_tree.modeling.prepare import check_call, install_tree_hooks
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import CONFIGS, branch_runs, make_model, random_forest


def batch(seed=0, **kwargs):
    return concatenate_trees(random_forest(seed, **kwargs), pad_token_id=0)


def prepared(name="qwen3", **kwargs):
    return prepare_model(make_model(name, dtype=torch.float32, **kwargs))


@pytest.fixture(scope="module")
def plain_model():
    """For tests that change nothing about it."""
    return prepared()


def assert_exact(model, seed=0, **kwargs):
    """A tree call still gives the loss of independent branches."""
    trees = random_forest(seed)
    with torch.no_grad():
        expected = branch_runs(base_causal_lm(model), trees)[0].item()
    row = concatenate_trees(trees, pad_token_id=0)
    assert model(**row, **kwargs).loss.item() == pytest.approx(expected, rel=1e-5)


# ---- a forward that returns no logits ----


def keep(hidden, logits_to_keep):
    return hidden[:, logits_to_keep] if isinstance(logits_to_keep, torch.Tensor) else hidden


def forward_without_logits(
    self, input_ids=None, labels=None, shift_labels=None, logits_to_keep=0, return_dict=None, **kwargs
):
    """As Liger's: in training the loss comes from a kernel that takes hidden states, and there are no logits."""
    hidden = self.model(input_ids=input_ids, **kwargs).last_hidden_state
    logits, loss = self.lm_head(keep(hidden, logits_to_keep)), None
    if labels is not None or shift_labels is not None:
        if shift_labels is None:
            shift_labels = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())
        logits = None if self.training else logits
    return (loss, logits) if return_dict is False else CausalLMOutputWithPast(loss=loss, logits=logits)


def wrapped(model, wrapper):
    if wrapper == "peft":
        return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return torch.compile(model, backend="eager") if wrapper == "compiled" else model


@pytest.mark.parametrize("wrapper", ["none", "peft", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_loss_without_logits_is_refused(wrapper, is_first):
    model = make_model("qwen3", dtype=torch.float32)
    if not is_first:
        prepare_model(model)
    model.forward = types.MethodType(forward_without_logits, model)
    if is_first:
        prepare_model(model)
    called = wrapped(model, wrapper).train()
    with pytest.raises(ValueError, match="no logits"):
        called(**batch())
    if wrapper == "none":
        with pytest.raises(ValueError, match="computes its loss by itself"):
            called(**batch(), return_dict=False)
        assert_exact(model.eval())  # where the model does give logits


def test_log_probs_of_a_fused_head_are_refused_unless_the_caller_weights_them():
    model = make_model("qwen3", dtype=torch.float32)
    add_fused_lm_head(model)
    prepare_model(model)
    trees = random_forest(0)
    row = concatenate_trees(trees, pad_token_id=0)
    for mode in (model.train, model.eval):
        mode()
        with pytest.raises(ValueError, match="no logits"):
            model(**row, fused_lm_head=True)
    log_probs = model(**row, fused_lm_head=True, **{WEIGHTED_BY_CALLER: True}).log_probs
    weights = row["loss_weights"].view(torch.float64)[0, row["labels"][0] != -100]
    assert (-(log_probs[0] * weights).sum() / weights.sum()).item() == pytest.approx(
        branch_runs(model, trees)[0].item(), rel=1e-5
    )


# ---- the divisor ----


@pytest.mark.parametrize(
    "count", [7, True, np.int64(7), np.int32(7), *(torch.tensor(7, dtype=getattr(torch, name)) for name in
    ("int64", "int32", "float32", "bfloat16"))], ids=repr,
)  # fmt: skip
def test_a_count_of_labels_is_no_divisor(count, plain_model):
    with pytest.raises(ValueError, match="`num_items_in_batch`"):
        plain_model(**batch(), num_items_in_batch=count)


@pytest.mark.parametrize("kind", [float, np.float64, lambda x: torch.tensor(x, dtype=torch.float64)])
def test_summed_weights_are_a_divisor(kind, plain_model):
    model, trees = plain_model, random_forest(0)
    row = concatenate_trees(trees, pad_token_id=0)
    total = sum(branch.weights[1:].sum() / len(tree.branches()) for tree in trees for branch in tree.branches())
    got = model(**row, num_items_in_batch=kind(total / 3)).loss.item()
    assert got == pytest.approx(branch_runs(model, trees)[0].item() * 3, rel=1e-5)


@pytest.mark.parametrize("divisor", [0.0, -1.0, float("nan"), float("inf")])
def test_no_sum_of_weights_is_no_divisor(divisor, plain_model):
    with pytest.raises(ValueError, match=rf"`num_items_in_batch` is {divisor}, .*no sum of weights"):
        plain_model(**batch(), num_items_in_batch=divisor)


def test_a_step_without_weight_has_a_divisor_of_0(plain_model):
    row = concatenate_trees([], pad_token_id=0)
    assert plain_model(**row, num_items_in_batch=0.0).loss.item() == 0.0


# ---- labels ----


def test_a_training_call_without_labels_is_refused_where_it_has_weights(caplog):
    warning_once.cache_clear()
    model, row = prepared(), batch()
    expected = model.eval()(**row).loss
    del row["labels"]
    with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
        with torch.no_grad():
            logits = model(**row).logits
            model.train()(**row)
        model.eval()(**row)
    assert caplog.text.count("Leave out `loss_weights` where only logits are wanted") == 1
    with pytest.raises(ValueError, match=r"`loss_weights` but no `labels`.*`label_smoothing_factor`"):
        model.train()(**row)
    with pytest.raises(ValueError, match=r"`loss_weights` but no `labels`"):
        model(**row, labels=None)
    warning_once.cache_clear()
    weights = row.pop("loss_weights").view(torch.float64)[0]
    with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
        assert torch.equal(model(**row).logits, logits)  # who leaves both out takes care of both
    assert caplog.text.count("or that knows no weights is wrong") == 2
    index = weights.nonzero()[:, 0]
    index = index[row["prefix_tree"][0, 2, index] >= 0]
    before = row["prefix_tree"][0, 2, index].long()
    nll = torch.nn.functional.cross_entropy(logits[0, before], row["input_ids"][0, index], reduction="none")
    assert ((nll * weights[index]).sum() / weights[index].sum()).item() == pytest.approx(expected.item(), rel=1e-5)


def test_a_batch_without_rows_is_refused(plain_model):
    with pytest.raises(ValueError, match=r"`prefix_tree`.*\(0, 3, 128\)"):
        plain_model(**{name: value[:0] for name, value in batch().items()})


def test_transforms_of_torch_func_are_refused(plain_model):
    weights = {name: x.detach() for name, x in plain_model.named_parameters()}
    with pytest.raises(ValueError, match=r"`torch\.func`"):
        torch.func.grad(lambda x: torch.func.functional_call(plain_model, x, (), batch()).loss)(weights)


@pytest.mark.parametrize("name", ["labels", "attention_mask", "position_ids", "input_ids"])
def test_inputs_that_were_cast_are_refused(name, plain_model):
    row = batch()
    with pytest.raises(ValueError, match=rf"`{name}` must hold integers, got torch.float32"):
        plain_model(**{**row, name: row[name].float()})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.bool])
def test_labels_of_other_integers_are_refused(dtype, plain_model):
    row = batch()
    with pytest.raises(ValueError, match=f"`labels` must be of dtype torch.int64, got {dtype}"):
        plain_model(**{**row, "labels": row["labels"].to(dtype)})


# ---- positions and masks ----


def two_trees():
    """Of 4 and of 2 tokens, and 2 of padding."""
    trees = [[[5, 6, 7], [5, 6, 8]], [[9, 10]]]
    trees = [fold([Branch(ids, [0] + [1] * (len(ids) - 1)) for ids in tree]) for tree in trees]
    return concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=8)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("attention_mask", [1, 1, 0, 1, 1, 1, 0, 0]),  # inside a tree
        ("attention_mask", [0, 1, 1, 1, 1, 1, 0, 0]),  # the first token of a row
        ("attention_mask", [1, 1, 1, 1, 0, 1, 0, 0]),  # a later root
        ("attention_mask", [1, 1, 1, 1, 0, 0, 0, 0]),  # a whole tree
        ("attention_mask", [0, 0, 0, 0, 0, 0, 0, 0]),
        ("position_ids", [0, 1, 2, 3, 4, 5, 6, 7]),
        ("position_ids", [0, 1, 2, 2, 1, 2, 0, 0]),
        ("position_ids", [1, 2, 3, 3, 1, 2, 1, 1]),
    ],
)
@pytest.mark.parametrize("alone", [True, False])
def test_overwritten_inputs_are_refused(name, values, alone, plain_model):
    model, row = plain_model.train(alone), two_trees()
    model(**row)
    row[name] = torch.tensor([values])
    if alone:
        del row[{"attention_mask": "position_ids", "position_ids": "attention_mask"}[name]]
    with pytest.raises(ValueError, match=r"`position_ids` must be the depth.*something overwrote them"):
        model(**row)


def same_as_the_tree():
    row = two_trees()
    padding = row["attention_mask"] == 0
    changes = (
        {"attention_mask": None},
        {"position_ids": None},
        {"attention_mask": None, "position_ids": None},
        {"attention_mask": torch.ones_like(padding).long()},
        {"attention_mask": ~padding},
        {"position_ids": row["position_ids"].masked_fill(padding, 1)},  # as Transformers does
    )
    return [{**row, **change} for change in changes]


def test_what_says_the_same_as_the_tree_is_taken(plain_model):
    model = plain_model
    expected = model(**two_trees()).loss
    for row in same_as_the_tree():
        assert torch.equal(model(**row).loss, expected)
    assert_exact(model)


WRONG_INPUTS = [
    {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]])},
    {"position_ids": torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7]]), "attention_mask": None},
    {"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 1, 0, 0]])},  # a later root
    {"attention_mask": torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0]]), "position_ids": None},
    {"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0]])},
]


@pytest.fixture
def on_a_gpu(monkeypatch, plain_model):
    """The checks of calls as if their tensors were on a GPU, after the first ones."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    model = plain_model.train()
    inputs = state_of(model).inputs = refusals.OverwrittenInputs()
    for _ in range(refusals._TOGETHER):
        check_call(model, two_trees())
        assert not inputs.pending  # each of the first is compared at once
    return model


@pytest.mark.parametrize("place", [0, 4, 7])
@pytest.mark.parametrize("wrong", WRONG_INPUTS, ids=range(len(WRONG_INPUTS)))
def test_beside_a_gpu_calls_are_compared_together(wrong, place, on_a_gpu):
    rows = [*same_as_the_tree(), batch(), batch(seed=1), two_trees()]
    for row in rows:
        check_call(on_a_gpu, row)
    assert not state_of(on_a_gpu).inputs.pending
    rows[place] = {**two_trees(), **wrong}
    for row in rows[:-1]:
        check_call(on_a_gpu, row)
    assert len(state_of(on_a_gpu).inputs.pending) == 7
    with pytest.raises(ValueError, match="something overwrote them"):
        check_call(on_a_gpu, rows[-1])
    check_call(on_a_gpu, two_trees())


@pytest.mark.parametrize("wrong", WRONG_INPUTS, ids=range(len(WRONG_INPUTS)))
def test_the_first_calls_beside_a_gpu_are_compared_at_once(wrong, on_a_gpu):
    state_of(on_a_gpu).inputs = refusals.OverwrittenInputs()
    with pytest.raises(ValueError, match="something overwrote them"):
        check_call(on_a_gpu, {**two_trees(), **wrong})


@pytest.mark.parametrize("then", ["evaluation", "logits", "without a tree", "saving", "unprepare"])
def test_nothing_is_left_uncompared(then, on_a_gpu, tmp_path, monkeypatch):
    model = on_a_gpu
    check_call(model, {**two_trees(), **WRONG_INPUTS[0]})
    with pytest.raises(ValueError, match="something overwrote them"):
        if then == "evaluation":
            check_call(model.eval(), two_trees())
        elif then == "logits":
            with torch.no_grad():
                check_call(model, {name: x for name, x in two_trees().items() if name in ("input_ids", "prefix_tree")})
        elif then == "without a tree":
            model(torch.arange(5)[None])
        elif then == "saving":
            model.save_pretrained(tmp_path)
        else:
            unprepare_model(model)
    monkeypatch.undo()
    prepare_model(model)  # the next test's, too
    assert not state_of(model).inputs.pending


def test_logits_beside_a_gpu_are_not_waited_for(on_a_gpu):
    row = {**two_trees(), **WRONG_INPUTS[0], "labels": None, "loss_weights": None}
    with torch.no_grad(), pytest.raises(RuntimeError, match="something overwrote them"):  # an assertion of the device
        check_call(on_a_gpu, row)


@pytest.mark.slow
def test_overwritten_inputs_are_refused_in_a_compiled_model():
    called, row = torch.compile(prepared(), backend="eager"), two_trees()
    called(**row)
    changes = {"position_ids": [*range(8)], "attention_mask": [1, 1, 1, 1, 0, 1, 0, 0]}  # a hidden root
    for name, values in [*changes.items(), ("attention_mask", [1, 1, 1, 1, 0, 0, 0, 0])]:
        with pytest.raises(RuntimeError, match="something overwrote them"):
            called(**{**row, name: torch.tensor([values])})


# ---- noise ----


def noisy_forward(orig_embed, alpha):
    def neftune_forward(x):
        embedded = orig_embed(x)
        size = alpha / (embedded.size(1) * embedded.size(2)) ** 0.5
        return embedded + torch.zeros_like(embedded).uniform_(-size, size)

    return neftune_forward


@pytest.mark.parametrize("kind", ["hook", "own hook", "forward"])
@pytest.mark.parametrize("wrapper", ["none", "peft"])
def test_neftune_is_refused_in_training(kind, wrapper):
    model = prepared()
    called = wrapped(model, wrapper)
    embeddings = model.get_input_embeddings()
    if kind == "forward":  # as its authors switch it on
        original = embeddings.forward
        embeddings.forward = noisy_forward(original, 5.0)
    else:
        embeddings.neftune_noise_alpha = 5.0
        hook = neftune_post_forward_hook if kind == "hook" else lambda m, a, out: neftune_post_forward_hook(m, a, out)
        handle = embeddings.register_forward_hook(hook)
    with pytest.raises(ValueError, match="NEFTune"):
        called.train()(**batch())
    with pytest.raises(ValueError, match="NEFTune"), torch.no_grad():
        called(**{key: x for key, x in batch().items() if key not in ("labels", "loss_weights")})
    if kind == "forward":
        del embeddings.forward
    else:
        assert_exact(called.eval())  # no noise outside training
        embeddings.neftune_noise_alpha = 0
        assert_exact(called.train())
        handle.remove()
    called.enable_input_require_grads()  # another hook on the embeddings
    assert_exact(called.train())


# ---- losses that are not the weighted cross-entropy ----


def with_z_loss(logits, labels, vocab_size, **kwargs):
    return ForCausalLMLoss(logits, labels, vocab_size, **kwargs) + 1e-2 * logits.logsumexp(-1).square().mean()


def replace_loss(model, how):
    if how == "smoothing":
        model.loss_function = functools.partial(ForCausalLMLoss, label_smoothing=0.1)
    elif how == "of another":
        model.loss_function = functools.partial(with_z_loss, vocab_size=97)
    else:
        model.loss_function = with_z_loss


@pytest.mark.parametrize("how", ["function", "smoothing", "of another"])
@pytest.mark.parametrize("wrapper", ["none", "peft"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_loss_function_of_its_own_is_refused(how, wrapper, is_first):
    model = make_model("qwen3", dtype=torch.float32)
    if is_first:
        replace_loss(model, how)
    prepare_model(model)
    if not is_first:
        replace_loss(model, how)
    called = wrapped(model, wrapper)
    for mode in (called.train, called.eval):
        mode()
        with pytest.raises(ValueError, match=r"`model\.loss_function`"):
            called(**batch())
    ids = torch.arange(3, 20)[None]
    assert called(ids, labels=ids).loss.item() == model.loss_function(called(ids).logits, ids, vocab_size=97).item()
    log_probs = tree_log_probs(called, [ids[0], ids[0, :9]], min_reuse=0)  # has nothing to do with the loss
    expected = called(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    torch.testing.assert_close(log_probs[0][1:], expected, rtol=1e-4, atol=1e-4)
    unprepare_model(model)
    assert called(ids, labels=ids).loss.item() == model.loss_function(called(ids).logits, ids, vocab_size=97).item()
    assert model.loss_function is not ForCausalLMLoss


@pytest.mark.parametrize("is_first", [True, False])
def test_a_loss_function_that_was_removed_is_gone(is_first):
    model = make_model("qwen3", dtype=torch.float32)
    if is_first:
        model.loss_function = with_z_loss
    prepare_model(model)
    if not is_first:
        model.loss_function = with_z_loss
    with pytest.raises(ValueError, match=r"with_z_loss.*`del model._loss_function`"):
        model(**batch())
    del model._loss_function
    assert_exact(model)
    assert unprepare_model(model).loss_function is ForCausalLMLoss


@pytest.mark.parametrize("kind", ["method", "property"])
def test_a_loss_function_of_a_subclass_is_refused(kind):
    own = (
        property(lambda self: with_z_loss)
        if kind == "property"
        else lambda self, *args, **kw: with_z_loss(*args, **kw)
    )
    subclass = type("Own", (Qwen3ForCausalLM,), {"loss_function": own})
    model = subclass._from_config(CONFIGS["qwen3"], dtype=torch.float32, attn_implementation="prefix_tree")
    with pytest.raises(ValueError, match=r"`model.loss_function` is .*weighted cross-entropy of a tree"):
        prepare_model(model)(**batch())


def test_a_loss_function_of_the_class_is_refused(monkeypatch):
    model = prepared()
    monkeypatch.setattr(type(model), "loss_function", property(lambda self: with_z_loss))
    with pytest.raises(ValueError, match=r"`model.loss_function` is with_z_loss"):
        model(**batch())


class ZLoss(Qwen3ForCausalLM):
    """Adds a term to the loss, of `loss_function` or of its own."""

    calls_loss_function, only_in_training = True, False

    def forward(self, input_ids=None, labels=None, shift_labels=None, logits_to_keep=0, **kwargs):
        logits = self.lm_head(keep(self.model(input_ids=input_ids, **kwargs).last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            if self.calls_loss_function:
                loss = self.loss_function(logits, labels, self.config.vocab_size, shift_labels=shift_labels)
            else:
                loss = ForCausalLMLoss(logits, labels, self.config.vocab_size, shift_labels=shift_labels)
            if self.training or not self.only_in_training:
                loss = loss + 1e-4 * logits.logsumexp(-1).square().mean()
        return CausalLMOutputWithPast(loss=loss, logits=logits)


@pytest.mark.parametrize("calls_loss_function", [True, False])
@pytest.mark.parametrize("only_in_training", [True, False])
@pytest.mark.parametrize("trainer", ["stock", "ours"])
def test_a_term_in_the_forward_is_refused(calls_loss_function, only_in_training, trainer):
    model = ZLoss._from_config(CONFIGS["qwen3"], dtype=torch.float32, attn_implementation="prefix_tree")
    model.calls_loss_function, model.only_in_training = calls_loss_function, only_in_training
    (prepare_model if trainer == "stock" else install_tree_hooks)(model)
    with pytest.raises(ValueError, match=r"ZLoss returns the loss .*cross-entropy of its logits is .*another term"):
        model.train()(**batch())
    model(**{key: x for key, x in batch().items() if key not in ("labels", "loss_weights")})  # logits are right


class Switch(ZLoss):
    """The term comes with an attribute, or while the backbone trains."""

    def forward(self, labels=None, **kwargs):
        output = Qwen3ForCausalLM.forward(self, labels=labels, **kwargs)
        if labels is not None and (getattr(self, "z", 0) or (self.beta and self.model.training)):
            output.loss = output.loss + 1e-2 * output.logits.logsumexp(-1).square().mean()
        return output


@pytest.mark.parametrize("name", ["z", "beta"])
def test_a_term_that_is_switched_on_later_is_refused(name):
    model = Switch._from_config(CONFIGS["qwen3"], dtype=torch.float32, attn_implementation="prefix_tree")
    model.beta = 0.0
    assert_exact(prepare_model(model).train())
    setattr(model, name, 1e-2)
    with pytest.raises(ValueError, match="another term"):
        model(**batch())


@pytest.mark.parametrize("wrapper", ["none", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [{}, {"return_dict": False}])
def test_a_term_of_a_schedule_is_refused(wrapper, options):
    model, schedule = make_model("qwen3", dtype=torch.float32), {"coefficient": torch.zeros(())}
    forward = model.forward

    def with_term(*args, return_dict=None, **kwargs):
        output = forward(*args, **kwargs)
        if output.loss is not None:
            output.loss = output.loss + schedule["coefficient"] * output.logits.logsumexp(-1).square().mean()
        return output.to_tuple() if return_dict is False else output

    model.forward = with_term
    called = wrapped(prepare_model(model), wrapper).train()
    assert_exact(model)
    called(**batch(), **options)
    schedule["coefficient"] += 1e-3
    with pytest.raises(ValueError, match=r"where the weighted cross-entropy of the tree is .*another term"):
        called(**batch(), **options)


@pytest.mark.parametrize("again", [False, True])
def test_a_hook_that_comes_later_and_then_adds_a_term_is_refused(again):
    model, schedule = prepared().train(), {"coefficient": 0.0}

    def add_term(module, args, output):
        if output.loss is not None:
            output.loss = output.loss + schedule["coefficient"] * output.logits.logsumexp(-1).square().mean()

    handle = model.register_forward_hook(add_term)
    assert_exact(model)
    if again:  # known, so that nothing is checked anew
        handle.remove()
        model.register_forward_hook(add_term)
        assert_exact(model)
    schedule["coefficient"] = 1e-2
    with pytest.raises(ValueError, match=r"where the weighted cross-entropy of the tree is .*another term"):
        model(**batch())


def test_the_z_loss_of_bamba_is_refused_when_it_comes_later():
    model = prepare_model(build_model("bamba"))
    assert model(**batch()).loss > 0
    model.z_loss_coefficient = 1e-3
    with pytest.raises(ValueError, match="`z_loss_coefficient`"):
        model(**batch())


@pytest.mark.parametrize("how", ["loss_type", "mapping"])
def test_a_loss_of_another_name_is_refused(how, monkeypatch):
    model = prepared()
    if how == "mapping":
        monkeypatch.setitem(LOSS_MAPPING, "ForCausalLM", with_z_loss)
    else:
        monkeypatch.setitem(LOSS_MAPPING, "Mine", with_z_loss)
        model.loss_type = "Mine"
    with pytest.raises(ValueError, match=r"`model.loss_function` is with_z_loss"):
        model(**batch())


@pytest.mark.parametrize("name", ["bamba", "qwen3_moe"])
def test_the_z_loss_of_a_config_is_refused_and_a_router_loss_is_not(name):
    model = build_model(name)
    if name == "bamba":
        model.config.z_loss_coefficient = model.z_loss_coefficient = 1e-3
        with pytest.raises(ValueError, match=r"BambaForCausalLM returns the loss.*`z_loss_coefficient`"):
            prepare_model(model)(**batch())
        model.z_loss_coefficient = 0.0
        unprepare_model(model)
    else:
        model.config.output_router_logits = True
    assert prepare_model(model)(**batch()).loss > 0


def test_the_self_check_sees_a_term_once_weights_are_there():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"])
    prepare_model(model)
    source = make_model("qwen3", dtype=torch.float32)
    model.to_empty(device="cpu").load_state_dict(source.state_dict())
    model.model.rotary_emb = source.model.rotary_emb
    model.forward = types.MethodType(ZLoss.forward, model)
    model.calls_loss_function, model.only_in_training = True, False
    with pytest.raises(ValueError, match="another term"):
        model.train()(**batch())


def test_a_batch_of_nemo_rows_passes_all_checks():
    tree = PrefixTree.from_node_paths([5, 6, 7, 11, 12, 21], [3, 2, 1], [[0, 1], [0, 2]], weights=[0, 0, 0, 1, 1, 1])
    assert prepared().train()(**concatenate_trees([tree], pad_token_id=0)).loss > 0


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_layers_are_compiled_or_not(value):
    with pytest.raises(ValueError, match=f"`compile_layers` must be `True` or `False`, got {value!r}"):
        prepare_model(make_model("qwen3", dtype=torch.float32), compile_layers=value)
