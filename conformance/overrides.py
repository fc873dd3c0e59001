# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Fields that the generic shrinker gets wrong, by `model_type`: sizes that depend on each other although their names
don't show it, and switches without which an architecture is not a causal LM."""

from __future__ import annotations

from typing import Any

_DECODER = {"is_decoder": True}
_DECODERS = (
    *("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_ROPE_PER_TYPE = {
    kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
}
_QSA = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}

# Architectures that cannot run here at any size: a reason instead of their error message.
NOT_RUNNABLE = {
    "blt": "its patches come from an entropy model with sizes of its own; no small config of it runs",
    "gemma3n": "its vision tower needs timm; its text model is `gemma3n_text`",
    "gemma4_assistant": "it drafts for another model, whose keys and values it reads: no causal LM by itself",
    "gemma4_unified_assistant": "it drafts for another model, whose keys and values it reads: no causal LM by itself",
    "musicgen": "its class takes the decoder's config, which Transformers' mapping does not give it",
    "musicgen_melody": "its class takes the decoder's config, which Transformers' mapping does not give it",
}

OVERRIDES: dict[str, Any] = {
    **dict.fromkeys(_DECODERS, _DECODER),
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "big_bird": {**_DECODER, "attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": _ROPE_PER_TYPE},
    "dots3_note_text": {"head_dim": 12},
    "dots3_note": {
        "text_config": {"head_dim": 12},
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dbrx": {
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    },
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "n_routed_experts": 4,
        "topk_method": "greedy",
        "first_k_dense_replace": 1,
    },
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_n_heads": 2},
    "lfm2": {"block_multiple_of": 8, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
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
    "zamba": {
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_hidden_layers": 4,
    },
    "qwen4_exp_text": _QSA,
    "qwen4_exp": {"text_config": _QSA},
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
