# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A tiny config for any architecture: the default config, with every size replaced by a small one (chosen by the name
of its field), and the fewest layers that include every kind of layer of the default.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 97
WINDOW = 6  # tokens; shorter than the paths of the forest
CHUNK = 8
HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 8

# Full name of the field -> small value. The first match counts.
_SIZES: list[tuple[str, int]] = [
    (r"vocab_size|vocab_size_per_layer_input|decoder_vocab_size|unpadded_vocab_size", VOCAB),
    (
        r"hidden_size|d_model|n_embd|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim|attention_hidden_size",
        HIDDEN,
    ),
    (r"input_embedding_size|output_embedding_size", HIDDEN),
    (r"(swa_)?num_attention_heads|n_heads?|num_heads|attention_heads|(num_)?(decoder|encoder)_attention_heads", HEADS),
    (r"(swa_)?num_key_value_heads|num_kv_heads|num_query_groups", KV_HEADS),
    (r"(global_|swa_)?head_dim|d_head|dim_head|kv_channels|attention_head_size|attention_head_dim", HEAD_DIM),
    (r"query_pre_attn_scalar", HEAD_DIM),
    (r"qk_head_dim", 12),
    (r"qk_nope_head_dim", 8),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"v_head_dim", 8),
    (
        r"(q|kv|o)_lora_rank|.*_rank|index_head_dim|hidden_size_per_layer_input|router_hidden_size|gated_norm_rank|hc_lowrank",
        8,
    ),
    (r"index_n_heads", 16),
    (r"index_topk", 12),
    (r"o_groups", 2),
    (r"(num_|n_|moe_num_)(local_|routed_)?experts|zero_expert_num", 4),
    (r"(num_|n_|moe_num_)shared_experts", 1),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|num_selected_experts|top_k_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (
        r".*sliding_window(_size)?|window_size|attention_window_size|local_attention(_window_len)?|keep_window_size",
        WINDOW,
    ),
    (r"attention_chunk_size|local_attn_chunk_length|block_size|index_block_size", CHUNK),
    (r"rel_extent", 64),
    (r"d_rel", 8),
    (r".*(state_size|d_state)", 8),
    (r"(mamba_)?chunk_size", 4),
    (r"mamba_d_ssm", 64),
    (r"mamba_(n_heads|num_heads)|n_mamba_heads|linear_num_value_heads|linear_num_heads", 4),
    (r"linear_num_key_heads", 2),
    (r"mamba_(d_head|head_dim|headdim)|linear_(key_|value_)?head_dim|lightning_head_dim", 16),
    (r"(mamba_)?n_?groups|mamba_n_groups", 1),
    (
        r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_(source|target)_positions|model_max_length",
        512,
    ),
    (r".*intermediate_size.*|.*ffn_dim|.*ffn_hidden_size|n_inner|d_inner|dff|dim_ff|feed_forward_size", 24),
    (r"hc_mult|hc_count", 2),
    (r"dim_model_base", 16),
]
# Lists and dicts that the config class derives from other fields.
_DERIVED = {"id2label", "label2id", "mlp_only_layers", "hybrid_layer_ids", "full_attn_idxs", "moe_layers"}
_LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "decoder_layers", "num_decoder_layers")
_ENCODER_LAYERS = ("encoder_layers", "num_encoder_layers")
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_REQUIRED = {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS, "sliding_window": WINDOW}
_SKIPPED = re.compile(r"transformers_version|model_type|architectures|dtype|_.*|forced_.*|.*suppress_tokens")


def tiny_config(model_type: str) -> PreTrainedConfig:
    """
    A small config of an architecture, with every kind of layer that its default config has.

    Args:
        model_type (`str`): A key of Transformers' `CONFIG_MAPPING`.

    Example:

    ```python
    >>> tiny_config("gemma2").layer_types
    ['sliding_attention', 'full_attention']

    ```
    """
    from conformance.overrides import OVERRIDES

    config_class = CONFIG_MAPPING[model_type]
    override = OVERRIDES.get(model_type, {})
    if callable(override):
        return override()
    default = config_class()
    values = shrink(default.to_dict(), override)
    return config_class(**values)


def shrink(default: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """The small values of a config's fields, except those that `override` sets; nested configs field by field."""
    layers_field = next((name for name in _LAYERS if isinstance(default.get(name), int)), None)
    num_layers = default[layers_field] if layers_field else 0
    chosen = _choose_layers(default, num_layers)
    if default.get("num_kv_shared_layers"):  # each kind of layer twice: one computes keys and values, one reuses them
        chosen = chosen * 2
    is_mla = bool(default.get("kv_lora_rank"))
    values: dict[str, Any] = {}
    for name, value in default.items():
        if isinstance(value, dict) and name.endswith("_config") and name != "per_layer_config":
            values[name] = shrink(value, override.get(name, {}))
            continue
        if _SKIPPED.fullmatch(name) or name in _DERIVED or name in override:
            continue
        if value is None:
            if name in _REQUIRED and not is_mla:
                values[name] = _REQUIRED[name]
            continue
        if is_mla and name in ("head_dim", "num_key_value_heads"):
            # MLA's `head_dim` is the rotary part of a head, or a number that the class derives
            if name == "num_key_value_heads":
                values[name] = HEADS
            elif value == default.get("qk_rope_head_dim"):
                values[name] = 4
            continue
        if "dropout" in name or name.endswith(("pdrop", "layerdrop")):
            values[name] = type(value)(0)
        elif name == "use_sliding_window":
            values |= _both_kinds(default)
        elif name in values:  # set together with an earlier field
            continue
        elif name in _TOKENS:
            values[name] = _TOKENS[name]
        elif name == layers_field or name in _ENCODER_LAYERS:
            values[name] = len(chosen)
        elif name in ("first_k_dense_replace", "num_dense_layers"):
            values[name] = min(value, 1)
        elif name == "num_kv_shared_layers":
            values[name] = len(chosen) // 2 if value else 0
        elif isinstance(value, list) and len(value) == num_layers:
            values[name] = [_small(name, value[i]) for i in chosen]
        elif name == "per_layer_config":
            values[name] = _per_layer(value, chosen)
        elif name == "rope_parameters":
            values[name] = _rope(value)
        else:
            values[name] = _small(name, value)
    return {**values, **{name: value for name, value in override.items() if not name.endswith("_config")}}


def _both_kinds(default: dict[str, Any]) -> dict[str, Any]:
    """The fields that turn on an optional sliding window: one full layer, one sliding layer."""
    values: dict[str, Any] = {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 2}
    if "max_window_layers" in default:
        values["max_window_layers"] = 1
    if "layer_types" in default:
        values["layer_types"] = ["full_attention", "sliding_attention"]
    return values


def _small(name: str, value: Any) -> Any:
    if "softcap" in name and isinstance(value, float) and value:
        return 2.0  # low enough to bend the scores of tiny models
    if not isinstance(value, int) or isinstance(value, bool) or value == 0:
        return value
    singular = name.removesuffix("_per_layer")
    return next((small for pattern, small in _SIZES if re.fullmatch(pattern, singular)), value)


def _choose_layers(default: dict[str, Any], num_layers: int) -> list[int]:
    """The first layers that together show every value of every per-layer list, at least two."""
    lists = [
        values
        for name, values in default.items()
        if isinstance(values, list) and len(values) == num_layers and num_layers and name not in _DERIVED
    ]
    chosen: list[int] = []
    seen: set[tuple[int, str]] = set()
    for i in range(num_layers):
        new = {(j, str(values[i])) for j, values in enumerate(lists)} - seen
        if new or (len(chosen) < 2 and i >= num_layers - (2 - len(chosen))):
            chosen.append(i)
            seen |= new
    return chosen if len(chosen) >= 2 else [0, 1]


def _per_layer(values: dict[str, Any], chosen: list[int]) -> dict[int, dict[str, Any]]:
    by_index = {int(i): fields for i, fields in values.items()}
    small = {new: by_index[old] for new, old in enumerate(chosen) if old in by_index}
    mla = {"num_key_value_heads": HEADS, "head_dim": 12, "qk_head_dim": 12}  # of a layer with other sizes of MLA
    return {
        i: {
            name: mla[name] if name in mla and "qk_nope_head_dim" in fields else _small(name, value)
            for name, value in fields.items()
        }
        for i, fields in small.items()
    }


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    if parameters and all(isinstance(value, dict) or value is None for value in parameters.values()):
        return {name: value and _rope(value) for name, value in parameters.items()}
    kept = {k: v for k, v in parameters.items() if k in ("rope_theta", "partial_rotary_factor")}
    return {"rope_theta": 10000.0, **kept, "rope_type": "default"}
