"""Models with the layouts of LLaDA and Dream, in tiny classes of one's own: what serves them, and what is refused."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen2Config
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model

from conformance.double import keep_double
from hf_prefix_tree import diffusion_generate
from hf_prefix_tree.diffusion.collator import supervised_tokens
from hf_prefix_tree.diffusion.model import prepare_diffusion_model
from tests.diffusion.test_shared_prefixes import noise_of, options_of, run
from tests.support.diffusion_models import stock_logits
from tests.support.diffusion_runs import MASK, collated, rows_of_ids
from tests.support.models import VOCAB, gradients

HIDDEN, HEADS, LAYERS = 32, 4, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "tie_word_embeddings": False,
}

# ---- the layout of LLaDA: the head is part of the backbone, SDPA is called without a mask, nothing is shifted ----


class LLaDALikeConfig(PreTrainedConfig):
    model_type = "llada_like"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn_norm, self.ff_norm = nn.RMSNorm(HIDDEN, eps=1e-6), nn.RMSNorm(HIDDEN, eps=1e-6)
        for name in ("q_proj", "k_proj", "v_proj", "attn_out"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN, bias=False))
        self.ff_proj, self.up_proj = nn.Linear(HIDDEN, 48, bias=False), nn.Linear(HIDDEN, 48, bias=False)
        self.ff_out = nn.Linear(48, HIDDEN, bias=False)

    def forward(self, x, angles):
        def heads(y):
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        def rotated(y):
            first, second = y.chunk(2, dim=-1)
            return torch.cat(
                [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
            )

        y = self.attn_norm(x)
        query, key, value = (heads(project(y)) for project in (self.q_proj, self.k_proj, self.v_proj))
        y = scaled_dot_product_attention(rotated(query), rotated(key), value)
        x = x + self.attn_out(y.transpose(1, 2).flatten(2))
        y = self.ff_norm(x)
        return x + self.ff_out(silu(self.ff_proj(y)) * self.up_proj(y))


class LLaDALike(PreTrainedModel):
    config_class = LLaDALikeConfig
    base_model_prefix = "model"

    def __init__(self, config):
        super().__init__(config)
        parts = {"wte": nn.Embedding(VOCAB, HIDDEN), "ln_f": nn.RMSNorm(HIDDEN, eps=1e-6)}
        parts |= {
            "blocks": nn.ModuleList(Block() for _ in range(LAYERS)),
            "ff_out": nn.Linear(HIDDEN, VOCAB, bias=False),
        }
        self.model = nn.ModuleDict({"transformer": nn.ModuleDict(parts)})
        self.post_init()

    def forward(self, input_ids):
        parts = self.model["transformer"]
        size = HIDDEN // HEADS
        frequencies = (1 / 10000.0 ** (torch.arange(0, size, 2).float() / size)).double()
        angles = torch.arange(input_ids.shape[1])[:, None] * frequencies
        x = parts["wte"](input_ids)
        for block in parts["blocks"]:
            x = block(x, angles)
        return CausalLMOutput(logits=parts["ff_out"](parts["ln_f"](x)))


# Names of the weights there, and in a Llama of the same sizes.
RENAMED = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.ff_out": "lm_head",
    "transformer.blocks": "model.layers",
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


def as_llama(name):
    name = name.removeprefix("model.")
    for old, new in RENAMED.items():
        name = name.replace(old, new)
    return name


def own_loss(logits, batch, noise):
    """MDLM, written out: masked tokens, each times 1 / p, over the supervised tokens."""
    total, supervised = 0.0, supervised_tokens(batch)
    for row, column in (noise.is_masked & supervised).nonzero().tolist():
        log_probs = logits[row][column].log_softmax(-1)
        total = total - log_probs[batch["input_ids"][row, column]] / noise.p[row, column].double()
    return total / supervised.sum()


def amplified(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 2 / math.sqrt(parameter.shape[-1]))
    return model.double()


def test_a_llada_is_a_prepared_llama_of_other_names():
    torch.manual_seed(0)
    llada = amplified(LLaDALike(LLaDALikeConfig()))
    with pytest.raises(ValueError, match="LLaDALike has no LM head over a backbone"):
        prepare_diffusion_model(llada)
    llama = LlamaForCausalLM(LlamaConfig(**SIZES)).double()
    llama.load_state_dict({as_llama(name): value for name, value in llada.state_dict().items()})
    rows, args = rows_of_ids(4), options_of("mdlm", group_by=None)
    batch = collated(rows)
    noise, items = noise_of(batch, args), supervised_tokens(batch).sum()
    with keep_double():
        logits = [
            llada(noise.input_ids[row : row + 1, :length]).logits[0] for row, length in enumerate(lengths(batch))
        ]
        expected = own_loss(logits, batch, noise)
        expected.backward()
        loss = run(prepare_diffusion_model(llama), batch, args, items, noise=noise)
        loss.backward()
    assert (loss - expected).abs() < 1e-10
    got, reference = gradients(llama), gradients(llada)
    assert len(got) == len(reference) > 10
    for name, value in reference.items():
        assert (got[as_llama(name)] - value).abs().max() < 1e-10 * (1 + value.abs().max()), name


def lengths(batch):
    return batch["attention_mask"].sum(dim=1).tolist()


# ---- the layout of Dream: a Qwen2 that looks both ways and predicts a token at the position before ----


class DreamLikeConfig(Qwen2Config):
    model_type = "dream_like"


class DreamLikeModel(Qwen2Model):
    config_class = DreamLikeConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        hidden_states = output.last_hidden_state  # leave one position later: from there on nothing is shifted
        output.last_hidden_state = torch.cat([hidden_states[:, :1], hidden_states[:, :-1]], dim=1)
        return output


class DreamLike(Qwen2ForCausalLM):
    config_class = DreamLikeConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = DreamLikeModel(config)
        self.post_init()


def test_a_dream_is_a_qwen2_whose_backbone_shifts():
    torch.manual_seed(0)
    stock = amplified(Qwen2ForCausalLM(Qwen2Config(**SIZES)))
    stock.set_attn_implementation("eager")
    dream = DreamLike(DreamLikeConfig(**SIZES)).double()
    dream.load_state_dict(stock.state_dict())
    args, batch = options_of("mdlm", group_by=None), collated(rows_of_ids(4))
    noise, items = noise_of(batch, args), supervised_tokens(batch).sum()

    def shifted(ids):
        logits = stock_logits(stock, ids, torch.ones(len(ids), len(ids), dtype=torch.bool))
        return torch.cat([logits[:1], logits[:-1]])

    with keep_double():
        rows = [noise.input_ids[row, :length] for row, length in enumerate(lengths(batch))]
        expected = own_loss(list(map(shifted, rows)), batch, noise)
        expected.backward()
        loss = run(prepare_diffusion_model(dream), batch, args, items, noise=noise)
        loss.backward()
        assert (loss - expected).abs() < 1e-10
        got, reference = gradients(dream), gradients(stock)
        assert got.keys() == reference.keys() and len(got) > 10
        for name, value in reference.items():
            assert (got[name] - value).abs().max() < 1e-10 * (1 + value.abs().max()), name
        # without the shift it is another model
        assert (own_loss([shifted(ids).roll(-1, 0) for ids in rows], batch, noise) - expected).abs() > 1e-2
        # and it generates: one step for a block of four
        prompt = torch.tensor([[5, 6, 7]])
        ids = diffusion_generate(dream, prompt, 4, 4, MASK, steps_per_block=1)
        logits = shifted(torch.tensor([5, 6, 7, *[MASK] * 4]))
        logits[:, MASK] = -torch.inf
        assert ids[0].tolist() == [5, 6, 7, *logits[3:].argmax(-1).tolist()]


def test_attention_of_its_own_is_refused():
    class OwnAttentionConfig(PreTrainedConfig):
        model_type = "own_attention"

    class OwnAttention(PreTrainedModel):
        config_class = OwnAttentionConfig
        base_model_prefix = "model"

        def __init__(self, config):
            super().__init__(config)
            self.model, self.lm_head = LLaDALike(LLaDALikeConfig()), nn.Linear(HIDDEN, VOCAB)

        def get_output_embeddings(self):
            return self.lm_head

    with pytest.raises(ValueError, match="OwnAttention computes its attention by itself"):
        prepare_diffusion_model(OwnAttention(OwnAttentionConfig()))
