"""Code that mixes tokens around the attention interface, over distances that no short forest has."""

import functools

import pytest
import torch
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

import hf_prefix_tree.modeling.verify as verify_module
from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from tests.support.models import branch_runs, gradients, make_model, random_forest, relative_error


class _OwnAttention(LlamaAttention):
    """Attention by hand: visible are the keys of the mask that are also `visible` by their place in the row."""

    def visible(self, i, j):
        return i - j < 32

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape = (*hidden_states.shape[:2], -1, self.head_dim)
        q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, *position_embeddings)
        i = torch.arange(hidden_states.shape[1])
        mask = (i[:, None] >= i) & self.visible(i[:, None], i)
        if attention_mask is not None:
            mask = mask & (attention_mask if attention_mask.dtype == torch.bool else attention_mask > -1)
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=self.scaling, enable_gqa=True)
        return self.o_proj(output.transpose(1, 2).reshape((*hidden_states.shape[:2], -1))), None


class SpanInTheConfig(_OwnAttention):
    def visible(self, i, j):
        return i - j < self.config.attn_span


class SpanInANestedDict(_OwnAttention):
    def visible(self, i, j):
        return i - j < self.config.locality["reach"]


class SpanInTheCode(_OwnAttention):
    def visible(self, i, j):
        return i - j < 600


class FarKeysOnly(_OwnAttention):
    def visible(self, i, j):
        return (i == j) | (i - j >= 300)


class ExactButByItself(_OwnAttention):
    """It is no less exact than the mask that it gets, which nobody can tell without reading it."""

    def visible(self, i, j):
        return i >= j


class PoolsBlocks(LlamaMLP):
    """Adds the mean of the blocks of 128 tokens that are complete before each token."""

    def forward(self, x):
        blocks = x[:, : x.shape[1] // 128 * 128].unflatten(1, (-1, 128)).mean(dim=2)
        means = blocks.cumsum(dim=1).roll(1, dims=1)[:, : x.shape[1] // 128]
        pooled = torch.zeros_like(x)
        for b in range(1, means.shape[1]):
            pooled[:, b * 128 : (b + 1) * 128] = means[:, b, None]
        return super().forward(x) + pooled


class LooksBack(LlamaMLP):
    def forward(self, x):
        return super().forward(x) + torch.nn.functional.pad(x, (0, 0, 200, 0))[:, : x.shape[1]]


def replaced(make, attribute="self_attn"):
    model = make_model("llama", dtype=torch.float32)
    model.config.attn_span, model.config.locality = 100, {"reach": 200}
    for i, layer in enumerate(model.model.layers):
        new = make(model.config, i) if attribute == "self_attn" else make(model.config)
        new.load_state_dict(getattr(layer, attribute).state_dict())
        setattr(layer, attribute, new)
    return model


@pytest.mark.parametrize(
    "kind",
    [SpanInTheConfig, SpanInANestedDict, SpanInTheCode, FarKeysOnly, ExactButByItself],
    ids=lambda c: c.__name__,
)
def test_attention_of_ones_own_is_refused(kind):
    with pytest.raises(ValueError, match=r"around Transformers' attention interface.*_OwnAttention.forward"):
        prepare_model(replaced(kind))


@pytest.mark.parametrize("kind", [PoolsBlocks, LooksBack], ids=lambda c: c.__name__)
def test_modules_that_mix_tokens_far_apart_are_refused(kind):
    with pytest.raises(ValueError, match=rf"around Transformers' attention interface.*{kind.__name__}.forward"):
        prepare_model(replaced(kind, "mlp"))


def test_attention_behind_a_copied_name_is_refused():
    """`functools.wraps` makes a function look like what it replaces."""
    model = make_model("llama", dtype=torch.float32)
    for layer in model.model.layers:
        own = functools.partial(SpanInTheCode.forward, layer.self_attn)
        layer.self_attn.visible = lambda i, j: i - j < 600
        layer.self_attn.forward = functools.wraps(layer.self_attn.forward)(
            lambda *args, own=own, **kw: own(*args, **kw)
        )
    with pytest.raises(ValueError, match="around Transformers' attention interface"):
        prepare_model(model)


class BatchNorm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class SubtractsTheMean(LlamaMLP):
    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(dim=1, keepdim=True) if self.training else y


class AddLoss(torch.autograd.Function):
    """As in DeepSeek's remote code."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


class HasALossOfItsOwn(LlamaMLP):
    def forward(self, x):
        return AddLoss.apply(super().forward(x), 0.1 * x.square().mean())


def with_batch_norm(model):
    model.model.layers[0].post_attention_layernorm = BatchNorm(32)


def with_hook_in_training(model):
    def hook(module, args, output):
        return output + output.mean(dim=1, keepdim=True) if module.training else output

    model.model.embed_tokens.register_forward_hook(hook)


def with_noise(model):
    def hook(module, args, output):
        return output + torch.rand_like(output) if module.training else output

    model.model.embed_tokens.register_forward_hook(hook)


def with_backward_hook(model):
    model.model.layers[1].mlp.register_full_backward_hook(
        lambda module, inputs, outputs: (inputs[0] - inputs[0].mean(dim=1, keepdim=True),)
    )


class StopsGradients(LlamaMLP):
    """As backpropagation that is cut after so many tokens."""

    def forward(self, x):
        y = super().forward(x)
        return torch.cat([y[:, :64], y[:, 64:].detach()], dim=1)


def with_stopped_gradients(model):
    swap_mlps(model, StopsGradients)


def with_mean(model):
    swap_mlps(model, SubtractsTheMean)


def with_loss(model):
    swap_mlps(model, HasALossOfItsOwn)


def swap_mlps(model, make):
    for layer in model.model.layers:
        layer.mlp.__class__ = make


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        *(with_batch_norm, with_hook_in_training, with_noise, with_mean, with_loss, with_backward_hook),
        with_stopped_gradients,
    ],
    ids=lambda f: f.__name__,
)
def test_what_acts_in_training_or_in_the_backward_is_refused(change, training):
    model = make_model("llama", dtype=torch.float32)
    change(model)
    model.train(training)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    message = "draws random numbers" if change is with_noise else "computes something over all tokens"
    with pytest.raises(ValueError, match=f"LlamaForCausalLM {message}.* in training mode or in the backward"):
        prepare_model(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(module.training is training for module in model.modules())


class DropsOut(LlamaMLP):
    def __init__(self, config):
        super().__init__(config)
        self.dropout, self.dropout_of_features = torch.nn.Dropout(0.2), 0.3

    def forward(self, x):
        x = torch.nn.functional.dropout(x, self.dropout_of_features, self.training)
        return self.dropout(super().forward(x))


def test_dropout_in_own_code_is_no_reason_to_refuse():
    model = replaced(DropsOut, "mlp").train()
    model.model.embed_tokens.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"dropout \(p=\[0.2, 0.3\]\)"):
        prepare_model(model)
    mlp = model.model.layers[0].mlp
    assert (mlp.dropout.p, mlp.dropout_of_features) == (0.2, 0.3)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == ["model.embed_tokens.weight"]


class NarrowsTheMask(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        i = torch.arange(hidden_states.shape[1])
        mask = ((i[:, None] - i < 64) & (i[:, None] >= i))[None, None]
        mask = mask if attention_mask is None else attention_mask & mask
        return super().forward(hidden_states, position_embeddings, mask, **kwargs)


class ScalesByTheRow(LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        i = torch.arange(hidden_states.shape[1])
        cos, sin = (x * (1 + i // 50)[:, None] ** 0.25 for x in position_embeddings)
        return super().forward(hidden_states, (cos, sin), attention_mask, **kwargs)


class ScalesByTheLongest(LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return super().forward(x, position_ids * 32 / max(32, int(position_ids.max()) + 1))


@pytest.mark.parametrize("kind", [NarrowsTheMask, ScalesByTheRow, ScalesByTheLongest], ids=lambda c: c.__name__)
def test_own_code_in_front_of_the_attention_interface_is_refused(kind):
    model = make_model("llama", dtype=torch.float32)
    if kind is ScalesByTheLongest:
        model.model.rotary_emb = ScalesByTheLongest(model.config)
    else:
        model = replaced(kind)
    with pytest.raises(ValueError, match=r"does not give the same logits|other logits when it is padded"):
        prepare_model(model)


class OwnNorm(LlamaRMSNorm):
    def forward(self, hidden_states):
        return super().forward(hidden_states) * 1.5


class AsksForAttention(LlamaAttention):
    """Code of its own around attention by name."""

    def forward(self, hidden_states, *args, **kwargs):
        output, weights = super().forward(hidden_states * 0.5, *args, **kwargs)
        return output * 2, weights


def test_own_code_that_leaves_tokens_apart_is_exact():
    model = make_model("llama")
    for i, layer in enumerate(model.model.layers):
        norm, attention = OwnNorm(32), AsksForAttention(model.config, i)
        norm.load_state_dict(layer.input_layernorm.state_dict())
        attention.load_state_dict(layer.self_attn.state_dict())
        layer.input_layernorm, layer.self_attn = norm, attention
    model.double()
    trees = random_forest(3)
    prepare_model(model)
    with keep_double():
        loss = model(**concatenate_trees(trees, pad_token_id=0)).loss
        loss.backward()
        found = gradients(model)
        model.zero_grad()
        expected = branch_runs(model, trees)[0]
        expected.backward()
    assert abs(loss - expected) < 1e-10
    assert relative_error(found, gradients(model)) < 1e-10


def test_known_code_is_not_tested(monkeypatch):
    monkeypatch.setattr("hf_prefix_tree.modeling.verify._refuse_bypass", lambda *args: 1 / 0)
    prepare_model(make_model("llama", dtype=torch.float32))
    with pytest.raises(ZeroDivisionError):
        prepare_model(replaced(AsksForAttention))


def test_our_name_of_attention_is_ours():
    original = AttentionInterface._global_mapping["prefix_tree"]
    AttentionInterface.register("prefix_tree", modeling_llama.eager_attention_forward)
    try:
        with pytest.raises(
            ValueError, match="Something else was registered as attention implementation 'prefix_tree'"
        ):
            prepare_model(make_model("llama", dtype=torch.float32))
    finally:
        AttentionInterface.register("prefix_tree", original)


def test_an_error_that_is_not_a_number_is_refused(monkeypatch):
    """Of one token of one branch: the largest error of the others is 0."""

    def with_nan(*args):
        logits = original(*args).clone()
        logits[-1] = torch.nan
        return logits

    original = verify_module.tree_logits
    monkeypatch.setattr(verify_module, "tree_logits", with_nan)
    with pytest.raises(ValueError, match="does not give the same logits"):
        prepare_model(make_model("qwen3"))


def test_a_loss_function_that_was_taken_away_is_no_obstacle_to_a_check():
    model = prepare_model(make_model("qwen3")).train()
    del model._loss_function
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x)  # it is checked again
    trees = random_forest(0)
    loss = model(**concatenate_trees(trees, pad_token_id=0)).loss
    assert loss.item() == pytest.approx(branch_runs(model, trees)[0].item(), rel=1e-6)
