# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Drafts for serving engines: a folder that vLLM and SGLang load, or speculators' format, and its validation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_prefix_tree.eagle3.config import Eagle3DraftConfig
from hf_prefix_tree.eagle3.model import Eagle3DraftModel
from hf_prefix_tree.eagle3.vocabulary import ids_from_d2t, t2d_from_ids

ENGINES = ("vllm", "sglang", "speculators")
WEIGHTS, CONFIG = "model.safetensors", "config.json"
PORTABLE_LAYER, SPECULATORS_LAYER = "midlayer.", "layers.0."
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
LAYER_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "max_position_embeddings",
    "initializer_range",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "mlp_bias",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def export_for_serving(
    draft: Eagle3DraftModel,
    path: str | os.PathLike[str],
    engine: str,
    *,
    dtype: torch.dtype | None = None,
    target_name_or_path: str | None = None,
    num_speculative_tokens: int = 3,
) -> None:
    """
    Write a draft as an engine loads it.

    Args:
        draft ([`Eagle3DraftModel`]):
            The draft.
        path (`str` or `os.PathLike`):
            Folder for `config.json` and `model.safetensors`.
        engine (`str`):
            `"vllm"` or `"sglang"` (the same files), or `"speculators"`.
        dtype (`torch.dtype`, *optional*):
            Dtype of the weights. Defaults to the draft's.
        target_name_or_path (`str`, *optional*):
            The target, which speculators' format names. Defaults to the one that the draft was trained for.
        num_speculative_tokens (`int`, *optional*, defaults to 3):
            Tokens to propose at a time, in speculators' format.

    Raises:
        `ValueError`: If the engine is unknown, the auxiliary layers are not, or speculators' format has no target.
    """
    from safetensors.torch import save_file

    if engine not in ENGINES:
        raise ValueError(f"`engine` must be one of {ENGINES}, got {engine!r}.")
    config = draft.config
    if config.aux_layer_ids is None or len(config.aux_layer_ids) != 3:
        raise ValueError(
            f"`draft.config.aux_layer_ids` is {config.aux_layer_ids}: engines would guess the layers, and hardly "
            "accept a token. Set it to the three target layers that the draft was trained with."
        )
    dtype = draft.dtype if dtype is None else dtype
    described = _layer_config(config, dtype)
    layer = PORTABLE_LAYER
    if engine == "speculators":
        layer = SPECULATORS_LAYER
        verifier = target_name_or_path or config.target_name_or_path
        if not verifier:
            raise ValueError("`target_name_or_path` is needed: speculators' format names the target.")
        described = _speculators_config(config, described, verifier, num_speculative_tokens)
    else:
        described |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": config.draft_vocab_size,
            "target_hidden_size": config.target_hidden_size,
            "eagle_config": {AUX_KEY: list(config.aux_layer_ids), "use_aux_hidden_state": True},
            AUX_KEY: [i + 1 for i in config.aux_layer_ids],
        }
    tensors = {}
    for name, tensor in draft.state_dict().items():
        name = layer + name.removeprefix(PORTABLE_LAYER) if name.startswith(PORTABLE_LAYER) else name
        tensor = tensor.detach().cpu()
        tensors[name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).clone().contiguous()
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / WEIGHTS), metadata={"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(described, indent=2, sort_keys=True) + "\n")


def aux_layer_ids(config: dict[str, Any]) -> list[int] | None:
    """The layers whose outputs are fused, from the config of an exported folder; `None` where it names none."""
    nested = (config.get("eagle_config") or {}).get(AUX_KEY)
    if nested is not None:
        return list(nested)
    top = config.get(AUX_KEY)
    return None if top is None else [i - 1 for i in top]


def _layer_config(config: Eagle3DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The draft layer as a Llama config, RoPE in the old form and the new one."""
    rope = dict(config.rope_parameters)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        **{name: getattr(config, name) for name in LAYER_KEYS},
        "model_type": "llama",
        "tie_word_embeddings": False,
        "use_cache": True,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "dtype": str(dtype).removeprefix("torch."),
        "transformers_version": transformers.__version__,
    }


def _speculators_config(
    config: Eagle3DraftConfig, layer: dict[str, Any], verifier: str, num_speculative_tokens: int
) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": False,
        "target_hidden_size": None if config.target_hidden_size == config.hidden_size else config.target_hidden_size,
        AUX_KEY: [i + 1 for i in config.aux_layer_ids or ()],
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": layer["dtype"],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


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
