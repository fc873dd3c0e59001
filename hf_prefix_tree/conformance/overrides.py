# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Fields that the generic shrinker gets wrong, by `model_type`: sizes tied to each other in ways the names don't tell,
and switches without which an architecture is no causal LM."""

from __future__ import annotations

from typing import Any

_DECODER = {"is_decoder": True}
_DECODERS = (
    "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
    "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod"
).split()
_ROPE_PER_TYPE = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")}

OVERRIDES: dict[str, Any] = {
    **dict.fromkeys(_DECODERS, _DECODER),
    "cohere_compass_text": {"rope_parameters": _ROPE_PER_TYPE},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dbrx": {
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_method": "greedy", "first_k_dense_replace": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "doge": {"sliding_window": None},
    "lfm2": {"block_multiple_of": 8, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "llama4_text": {"intermediate_size_mlp": 24, "attn_temperature_tuning": True, "floor_scale": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "reformer": {**_DECODER, "axial_pos_shape": [16, 32], "axial_pos_embds_dim": [16, 16], "lsh_attn_chunk_length": 8},
    "recurrent_gemma": {"lru_width": 32},
    "zamba2": {"attention_hidden_size": 64, "attention_head_dim": 16, "mamba_headdim": 16},
    "roc_bert": {
        **_DECODER,
        "pronunciation_embed_dim": 16,
        "shape_embed_dim": 16,
        "pronunciation_vocab_size": 97,
        "shape_vocab_size": 97,
    },
}
