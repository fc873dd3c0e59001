# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""FLOPs and activations of hybrid models: by hand, and what really runs and is kept."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5

from benchmarks.flops import flop_counts, model_config, step_flops
from benchmarks.shapes import SHAPES, build
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.flops import activation_bytes, cost_per_count
from hf_prefix_tree.tree.prefix_tree import fold
from tests.support.models import kept_bytes, random_forest


def test_flops_of_a_hybrid_by_hand():
    config = model_config(quick=False, model="qwen3.5-0.8b")
    mlp = 3 * 1024 * 3584
    attention = 1024 * (8 * 256 * 3 + 2 * 2 * 256)  # queries, their gate and the output; keys and values
    projections = 1024 * (3 * 2048 + 2048 + 16 + 16 + 2048)  # q k v, z, a, b, output
    scan = 16 * (3 * 128 * 128 + 64 * (128 + 128 + 128) + 64 * (128 + 128) / 2)
    token = 24 * mlp + 6 * attention + 18 * (projections + 3 * 2048 * 4 + scan)
    expected = 6 * token * 1000 + 6 * 1024 * 248_320 * 10 + 6 * 3.5 * 4 * 8 * 256 * 5000
    assert step_flops(config, 1000, 10, 5000) == pytest.approx(expected, rel=1e-12)
    assert scan / (projections + mlp) < 0.07  # how a scan is counted hardly matters to the whole
    counts = flop_counts([build(SHAPES["4k+16x512"])], config)
    assert counts["branches"]["tflop"] / counts["folded"]["tflop"] == pytest.approx(4.655, abs=0.005)


def test_pairs_outside_of_a_window_are_not_counted():
    """One layer of three has full attention; against the dense masks, folded and branch by branch."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = AutoConfig.for_model(
        "qwen3", num_hidden_layers=3, layer_types=types, use_sliding_window=True, sliding_window=5
    )
    forest = random_forest(0, 3)
    counts = flop_counts(forest, config)
    chains = [fold([branch], "branch") for tree in forest for branch in tree.branches()]
    for trees, method in ((forest, "folded"), (chains, "branches")):
        row = concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=1)["prefix_tree"]
        pairs = [int(dense_mask(row, window=window).sum()) for window in (5, None)]
        assert pairs[0] < pairs[1] * 0.9
        assert counts[method]["pairs"] == pytest.approx((2 * pairs[0] + pairs[1]) / 3, rel=1e-12)
        expected = cost_per_count(config) @ [counts[method]["tokens"], counts[method]["supervised"], sum(pairs) / 2]
        assert counts[method]["tflop"] < expected / 1e12  # the windows count twice


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_flops_of_a_hybrid_are_those_that_run(model_type):
    layers, tokens = ["linear_attention", "linear_attention", "full_attention"], 128
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    experts["shared_expert_intermediate_size"] = 40
    mlp = {"intermediate_size": 48} if model_type == "qwen3_5_text" else experts
    config = AutoConfig.for_model(
        model_type, vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, layer_types=layers, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=16, **mlp,
    )  # fmt: skip
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(input_ids=torch.arange(tokens)[None] % 64, use_cache=False)
    per_token, per_supervised, per_pair = cost_per_count(config)  # forward and backward
    expected = tokens * (per_token + per_supervised) / 3 + tokens**2 * per_pair / 3.5
    expected -= 2 * tokens * 4 * 64 * (8 + 16)  # triangular systems, which the counter leaves out
    expected += 2 * 3 * 2 * 4 * (2 * 2 * 8 + 4 * 16)  # what the convolution computes beyond the last token
    if "num_experts" in mlp:
        expected += 3 * tokens * 2 * 32 * (4 + 1)  # router and gate of the shared expert, which we leave out
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-4)  # rotary embeddings


class KeepsWhatKernelsKeep(torch.autograd.Function):
    """The tensors that `chunk_gated_delta_rule` of flash-linear-attention saves, in their shapes and dtypes."""

    @staticmethod
    def forward(ctx, query, key, value, decay, beta):
        inverted = torch.zeros(*value.shape[:3], 64, dtype=value.dtype)
        ctx.save_for_backward(*(x.clone() for x in (query, key, value, decay)), beta, inverted)
        return value.clone()


@pytest.mark.parametrize("layers", [["linear_attention"] * 3, ["full_attention"] * 3, None])
@pytest.mark.parametrize("value_heads", [2, 4])
def test_activation_memory_is_what_a_hybrid_keeps(monkeypatch, layers, value_heads):
    def scan(query, key, value, *, g, beta, **kwargs):
        return KeepsWhatKernelsKeep.apply(query, key, value, g, beta), None

    monkeypatch.setattr(modeling_qwen3_5, "torch_chunk_gated_delta_rule", scan)
    config = AutoConfig.for_model(
        "qwen3_5_text", vocab_size=16, hidden_size=64, intermediate_size=192, num_attention_heads=4, head_dim=32,
        num_key_value_heads=2, num_hidden_layers=3 if layers else 4, layer_types=layers, linear_num_key_heads=2,
        linear_num_value_heads=value_heads, linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    num_bytes = kept_bytes(model, input_ids=torch.arange(128)[None] % 16, use_cache=False)
    assert activation_bytes(config, 128, checkpointing=False) == pytest.approx(num_bytes, rel=0.1)


def test_checkpointed_activations_of_a_hybrid_are_those_of_its_largest_layer():
    def kept(*layers):
        config = model_config(quick=True, model="qwen3.5-0.8b")
        config.num_hidden_layers, config.layer_types = len(layers), list(layers)
        return [activation_bytes(config, 1, checkpointing) for checkpointing in (False, True)]

    recurrent, _ = kept("linear_attention")
    attention, _ = kept("full_attention")
    assert kept("linear_attention", "full_attention") == [
        recurrent + attention,
        2 * 2 * 32 + max(recurrent, attention),
    ]


@pytest.mark.parametrize("model_type", ["minimax", "kimi_linear", "olmo_hybrid"])
def test_other_recurrent_layers_are_refused(model_type):
    with pytest.raises(ValueError, match=f"{model_type}.*linear_attention"):
        step_flops(AutoConfig.for_model(model_type), 1, 1, 1)
