# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`validate_export`] finds what a serving engine would skip in silence, guess or misread in a folder with a draft;
[`load_exported`] reads the draft.

Validation reads `config.json`, and of the weights only names, shapes and the two vocabulary maps.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from hf_prefix_tree.eagle3.config import Eagle3DraftConfig
from hf_prefix_tree.eagle3.draft import Eagle3DraftModel
from hf_prefix_tree.eagle3.export import (
    AUX_KEY,
    CONFIG,
    LAYER_KEYS,
    PORTABLE_LAYER,
    SPECULATORS_LAYER,
    WEIGHTS,
    aux_layer_ids,
)
from hf_prefix_tree.eagle3.token_mapping import ids_from_d2t, t2d_from_ids

_MAPS = ("d2t", "t2d")
_LAYER_NUMBERS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
)


def validate_export(path: str | os.PathLike[str]) -> list[str]:
    """
    Check a folder that vLLM, SGLang or speculators is to load, from whichever tool.

    Args:
        path (`str` or `os.PathLike`): The folder.

    Returns:
        `list[str]`: one sentence per problem; empty where the draft loads whole, as it was trained.
    """
    folder = Path(path)
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            return [f"There is no `{name}`."]
    try:
        config = json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        return [f"`{CONFIG}` can't be read: {error}."]
    if not isinstance(config, dict):
        return [f"`{CONFIG}` holds no object."]
    is_speculators = "speculators_model_type" in config
    layer = (config.get("transformer_layer_config") or {}) if is_speculators else config
    problems = _speculators_problems(config) if is_speculators else _portable_problems(config)
    problems += _shared_problems(config, layer)
    if all(isinstance(layer.get(name), (int, float)) for name in _LAYER_NUMBERS):
        prefix = SPECULATORS_LAYER if is_speculators else PORTABLE_LAYER
        problems += _tensor_problems(folder / WEIGHTS, config, layer, prefix)
    return problems


def load_exported(path: str | os.PathLike[str]) -> Eagle3DraftModel:
    """
    The draft in an exported folder, of any of the formats, for example to train it further.

    Args:
        path (`str` or `os.PathLike`): The folder.

    Raises:
        `ValueError`: If [`validate_export`] finds anything wrong with it.
    """
    from safetensors.torch import load_file

    problems = validate_export(path)
    if problems:
        raise ValueError(f"`path` ({os.fspath(path)}) holds no whole draft: " + " ".join(problems))
    found = json.loads(Path(path, CONFIG).read_text())
    is_speculators = "speculators_model_type" in found
    layer = found["transformer_layer_config"] if is_speculators else found
    values = {name: layer[name] for name in LAYER_KEYS if name in layer}
    values["rope_parameters"] = {"rope_type": "default", **(layer.get("rope_scaling") or {})}
    values["rope_parameters"].setdefault("rope_theta", layer["rope_theta"])
    config = Eagle3DraftConfig(
        **values,
        draft_vocab_size=found["draft_vocab_size"],
        target_hidden_size=found.get("target_hidden_size"),
        aux_layer_ids=aux_layer_ids(found),
        target_name_or_path=found.get("speculators_config", {}).get("verifier", {}).get("name_or_path"),
    )
    tensors = {
        PORTABLE_LAYER + name.removeprefix(SPECULATORS_LAYER) if name.startswith(SPECULATORS_LAYER) else name: tensor
        for name, tensor in load_file(str(Path(path, WEIGHTS))).items()
    }
    draft = Eagle3DraftModel(config).to(tensors["fc.weight"].dtype)
    if "d2t" in tensors:
        draft.set_draft_vocabulary(ids_from_d2t(tensors["d2t"].long()))
    for name in ("d2t", "t2d"):
        tensors.pop(name, None)
    draft.load_state_dict({**{n: t for n, t in draft.state_dict().items() if n in ("d2t", "t2d")}, **tensors})
    return draft


def _portable_problems(config: dict[str, Any]) -> list[str]:
    problems = []
    if config.get("architectures") != ["LlamaForCausalLMEagle3"]:
        problems.append(
            f"`architectures` is {config.get('architectures')}, which no engine takes for an EAGLE-3 draft: set it to "
            "['LlamaForCausalLMEagle3']."
        )
    if config.get("model_type") != "llama":
        problems.append(f"`model_type` is {config.get('model_type')!r}: engines' draft layer is 'llama'.")
    nested, top = (config.get("eagle_config") or {}).get(AUX_KEY), config.get(AUX_KEY)
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        problems.append("`eagle_config.use_aux_hidden_state` is false: engines would not fuse the hidden states.")
    if nested is None:
        problems.append(f"`eagle_config.{AUX_KEY}` is missing: SGLang would guess the auxiliary layers.")
    if top is None:
        problems.append(f"`{AUX_KEY}` is missing at the top: vLLM would guess the auxiliary layers.")
    if nested is not None and top is not None and [i + 1 for i in nested] != list(top):
        problems.append(
            f"`eagle_config.{AUX_KEY}` is {nested} (outputs, SGLang) and `{AUX_KEY}` is {top} (inputs, vLLM): the "
            "second must be one more each."
        )
    return problems


def _speculators_problems(config: dict[str, Any]) -> list[str]:
    problems = []
    if config["speculators_model_type"] != "eagle3":
        problems.append(f"`speculators_model_type` is {config['speculators_model_type']!r}, not 'eagle3'.")
    settings = config.get("speculators_config") or {}
    if not (settings.get("verifier") or {}).get("name_or_path"):
        problems.append("`speculators_config.verifier.name_or_path` is missing: vLLM refuses the folder.")
    methods = settings.get("proposal_methods") or [{}]
    if not methods[0].get("speculative_tokens"):
        problems.append(
            "`speculators_config.proposal_methods[0].speculative_tokens` is missing: vLLM refuses the folder."
        )
    if config.get(AUX_KEY) is None:
        problems.append(f"`{AUX_KEY}` is missing: vLLM would guess the auxiliary layers.")
    if config.get("norm_before_residual"):
        problems.append("`norm_before_residual` is true: drafts of this library are trained without it.")
    if not config.get("transformer_layer_config"):
        problems.append("`transformer_layer_config` is missing.")
    return problems


def _shared_problems(config: dict[str, Any], layer: dict[str, Any]) -> list[str]:
    problems = [f"`{name}` is missing or no number." for name in _LAYER_NUMBERS if not _is_number(layer.get(name))]
    if not _is_number(config.get("draft_vocab_size")):
        problems.append("`draft_vocab_size` is missing: SGLang would take the target's head instead of the draft's.")
    if layer.get("num_hidden_layers") != 1:
        problems.append(f"`num_hidden_layers` is {layer.get('num_hidden_layers')}: the draft has one layer.")
    if config.get("tie_word_embeddings") is not False or layer.get("tie_word_embeddings", False) is not False:
        problems.append("`tie_word_embeddings` is not false: engines would use the embedding as the head.")
    if not _is_number(layer.get("rope_theta")):
        problems.append("`rope_theta` is missing: engines that don't read `rope_parameters` would take 10000.")
    elif (layer.get("rope_parameters") or {}).get("rope_theta", layer["rope_theta"]) != layer["rope_theta"]:
        problems.append("`rope_theta` and `rope_parameters` differ.")
    for name in ("attention_bias", "mlp_bias"):
        if layer.get(name):
            problems.append(f"`{name}` is true: SGLang's draft layer has no bias and skips it.")
    layer_ids = aux_layer_ids(config)
    if layer_ids is not None and (len(layer_ids) != 3 or layer_ids[0] < 0 or sorted(set(layer_ids)) != layer_ids):
        problems.append(f"The auxiliary layers {layer_ids} are not three ascending ones.")
    return problems


def _tensor_problems(file: Path, config: dict[str, Any], layer: dict[str, Any], prefix: str) -> list[str]:
    from safetensors import SafetensorError, safe_open

    expected = _expected_shapes(config, layer, prefix)
    try:
        with safe_open(str(file), framework="pt") as tensors:
            shapes = {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            maps = {name: tensors.get_tensor(name) for name in _MAPS if name in shapes}
    except SafetensorError as error:  # cut off, or of another format
        return [f"`{file.name}` can't be read: {error}."]
    problems = [
        f"The tensor `{name}` is no part of the format: SGLang skips it in silence, vLLM fails on it."
        for name in sorted(shapes.keys() - expected.keys() - set(_MAPS))
    ]
    problems += [
        f"The tensor `{name}` is missing: its weights would stay as they were initialized."
        for name in sorted(expected.keys() - shapes.keys())
    ]
    for name in sorted(expected.keys() & shapes.keys()):
        if shapes[name] != expected[name]:
            problems.append(f"The tensor `{name}` has the shape {shapes[name]}; the config says {expected[name]}.")
    return problems + _map_problems(maps, layer["vocab_size"], config.get("draft_vocab_size") or layer["vocab_size"])


def _expected_shapes(config: dict[str, Any], layer: dict[str, Any], prefix: str) -> dict[str, list[int]]:
    hidden, inner = layer["hidden_size"], layer["intermediate_size"]
    head_dim = layer.get("head_dim") or hidden // layer["num_attention_heads"]
    width, kv_width = layer["num_attention_heads"] * head_dim, layer["num_key_value_heads"] * head_dim
    in_layer = {
        "self_attn.q_proj": [width, 2 * hidden],
        "self_attn.k_proj": [kv_width, 2 * hidden],
        "self_attn.v_proj": [kv_width, 2 * hidden],
        "self_attn.o_proj": [hidden, width],
        "mlp.gate_proj": [inner, hidden],
        "mlp.up_proj": [inner, hidden],
        "mlp.down_proj": [hidden, inner],
        "input_layernorm": [hidden],
        "hidden_norm": [hidden],
        "post_attention_layernorm": [hidden],
    }
    return {
        "embed_tokens.weight": [layer["vocab_size"], hidden],
        "fc.weight": [hidden, 3 * (config.get("target_hidden_size") or hidden)],
        **{f"{prefix}{name}.weight": shape for name, shape in in_layer.items()},
        "norm.weight": [hidden],
        "lm_head.weight": [config.get("draft_vocab_size") or layer["vocab_size"], hidden],
    }


def _map_problems(maps: dict[str, torch.Tensor], vocab_size: int, draft_vocab_size: int) -> list[str]:
    if not maps:
        if draft_vocab_size < vocab_size:
            return ["`d2t` and `t2d` are missing: engines would read draft ids as target ids."]
        return []
    if len(maps) == 1:
        return [f"`{next(iter(maps))}` is there without the other one of `d2t` and `t2d`."]
    d2t, t2d = maps["d2t"], maps["t2d"]
    if d2t.dtype != torch.int64 or list(d2t.shape) != [draft_vocab_size]:
        return [f"`d2t` is {d2t.dtype} of shape {list(d2t.shape)}, not int64 of shape {[draft_vocab_size]}."]
    if t2d.dtype != torch.bool or list(t2d.shape) != [vocab_size]:
        return [f"`t2d` is {t2d.dtype} of shape {list(t2d.shape)}, not bool of shape {[vocab_size]}."]
    ids = ids_from_d2t(d2t)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return [f"`d2t` leads to ids from {int(ids.min())} to {int(ids.max())}, outside of the target's vocabulary."]
    if not bool((ids.diff() > 0).all()):
        return ["`d2t` is not in ascending order of target ids: tools that slice by `t2d` would mix tokens up."]
    if not torch.equal(t2d_from_ids(ids, vocab_size), t2d):
        return ["`t2d` and `d2t` name different tokens."]
    return []


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
