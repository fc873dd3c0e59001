# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Drafts for serving engines: a folder that vLLM and SGLang load, or speculators' format, and its validation.

Both formats hold the tensors of [`Eagle3DraftModel`]; speculators names the layer `layers.0` and nests the config of
the layer. So the model itself says which tensors a folder needs, and of which shapes. The metadata of the weights hold
checksums of both files, which tell a damaged folder and files of two exports.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets.fingerprint import Hasher
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from hf_prefix_tree.data.trees import write_files
from hf_prefix_tree.eagle3.config import Eagle3DraftConfig, check_aux_layer_ids
from hf_prefix_tree.eagle3.model import Eagle3DraftModel
from hf_prefix_tree.eagle3.vocabulary import checksum_of, ids_from_d2t, problem_of_ids, serialized, t2d_from_ids
from hf_prefix_tree.tree.folding import check_choice

ENGINES = ("vllm", "sglang", "speculators")
WEIGHTS, CONFIG = "model.safetensors", "config.json"
AUX_KEY = "eagle_aux_hidden_state_layer_ids"
_LAYER, _SPECULATORS_LAYER = "midlayer.", "layers.0."
_MAPS = ("d2t", "t2d")
# Fields of a Llama config that both formats write. Without the first ones, tensors have no known shapes.
_NUMBERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
)
_LAYER_FIELDS = (
    *(*_NUMBERS, "attention_bias", "mlp_bias", "attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id"),
    *("num_hidden_layers", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
)
# What engines read from a config: where it is, its values (any but an empty one, if there are none), and what a wrong
# one leads to. Of the layer's part, of both formats, and of each.
_TIED = "engines would use the embedding as the head"
_OF_LAYER = (("num_hidden_layers", (1,), "the draft has one layer"), ("tie_word_embeddings", (False, None), _TIED))
_OF_BOTH = (("tie_word_embeddings", (False,), _TIED), (AUX_KEY, (), "vLLM would guess the auxiliary layers"))
_OF_PORTABLE = (
    ("architectures", (["LlamaForCausalLMEagle3"],), "no engine takes it for an EAGLE-3 draft"),
    ("model_type", ("llama",), "engines' draft layer is 'llama'"),
    ("eagle_config.use_aux_hidden_state", (True, None), "engines would not fuse the hidden states"),
    (f"eagle_config.{AUX_KEY}", (), "SGLang would guess the auxiliary layers"),
)
_OF_SPECULATORS = (
    ("speculators_model_type", ("eagle3",), "vLLM takes it for another kind of draft"),
    ("speculators_config.verifier.name_or_path", (), "vLLM refuses the folder"),
    ("speculators_config.proposal_methods.0.speculative_tokens", (), "vLLM refuses the folder"),
    ("norm_before_residual", (False, None), "drafts of this library are trained without it"),
    ("transformer_layer_config", (), "it describes the layer"),
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
    Write a draft as an engine loads it. A config lies in the folder only beside its weights, also if a run is killed.

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
        `OSError`: If a file can't be written.
    """
    config = draft.config
    dtype = draft.dtype if dtype is None else dtype
    verifier = target_name_or_path or config.target_name_or_path
    check_choice(engine, "engine", ENGINES)
    check_aux_layer_ids(config.aux_layer_ids)
    if engine != "speculators":
        described, layer = _portable_config(config, dtype), _LAYER
    elif verifier:
        described, layer = _speculators_config(config, dtype, verifier, num_speculative_tokens), _SPECULATORS_LAYER
    else:
        raise ValueError("`target_name_or_path` is needed: speculators' format names the target.")
    tensors = _renamed(draft.state_dict(), _LAYER, layer)
    tensors = {name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()}
    content = (json.dumps(described, indent=2, sort_keys=True) + "\n").encode()
    weights = serialized(tensors, {"format": "pt", "config": Hasher.hash_bytes(content)})
    write_files({Path(path, WEIGHTS): weights, Path(path, CONFIG): content})


def validate_export(path: str | os.PathLike[str]) -> list[str]:
    """
    Check a folder for vLLM, SGLang or speculators, no matter which tool wrote it.

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
        config = json.loads((folder / CONFIG).read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        return [f"`{CONFIG}` can't be read: {error}."]
    if not isinstance(config, dict):
        return [f"`{CONFIG}` holds no object."]
    problems: list[str] = []
    try:
        problems += _problems_of(folder, config)
    except Exception as error:  # of any kind: any tool may have written any value
        problems.append(f"`{CONFIG}` describes no draft: {error} ({type(error).__name__}).")
    return problems or list(_checksum_problems(folder))


def load_exported(path: str | os.PathLike[str]) -> Eagle3DraftModel:
    """
    The draft in an exported folder, of any of the formats, for example to train it further.

    Args:
        path (`str` or `os.PathLike`): The folder.

    Raises:
        `ValueError`: If [`validate_export`] finds anything wrong with it.
    """
    if problems := validate_export(path):
        raise ValueError(f"`path` ({os.fspath(path)}) holds no whole draft: " + " ".join(problems))
    config = json.loads(Path(path, CONFIG).read_bytes())
    tensors = _renamed(load_file(Path(path, WEIGHTS)), _layer_of(config)[1], _LAYER)
    draft = Eagle3DraftModel(_draft_config(config)).to(tensors["fc.weight"].dtype)
    if "d2t" in tensors:
        draft.set_draft_vocabulary(ids_from_d2t(tensors["d2t"].long()))
    maps = {name: tensor for name, tensor in draft.state_dict().items() if name in _MAPS}
    draft.load_state_dict({**{name: tensor for name, tensor in tensors.items() if name not in _MAPS}, **maps})
    return draft


def aux_layer_ids(config: dict[str, Any]) -> list[int] | None:
    """The layers whose outputs are fused, from the config of an exported folder; `None` where it names none."""
    outputs, inputs = (config.get("eagle_config") or {}).get(AUX_KEY), config.get(AUX_KEY)
    if outputs is not None:
        return list(outputs)
    return None if inputs is None else [i - 1 for i in inputs]


def _renamed(tensors: dict[str, torch.Tensor], before: str, after: str) -> dict[str, torch.Tensor]:
    """The tensors under another name of the layer."""
    return {re.sub(f"^{re.escape(before)}", after, name): tensor for name, tensor in tensors.items()}


def _layer_of(config: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The part of a config that describes the layer, and the layer's name among the tensors."""
    if "speculators_model_type" in config:
        return config.get("transformer_layer_config") or {}, _SPECULATORS_LAYER
    return config, _LAYER


def _draft_config(config: dict[str, Any]) -> Eagle3DraftConfig:
    layer, _ = _layer_of(config)
    fields = {"head_dim": None, **{name: layer[name] for name in _LAYER_FIELDS if name in layer}}
    rope = {"rope_type": "default", "rope_theta": layer.get("rope_theta"), **(layer.get("rope_scaling") or {})}
    fields |= {"rope_parameters": rope, "aux_layer_ids": aux_layer_ids(config)}
    fields["target_name_or_path"] = config.get("speculators_config", {}).get("verifier", {}).get("name_or_path")
    fields |= {name: config.get(name) for name in ("draft_vocab_size", "target_hidden_size")}
    return Eagle3DraftConfig(**fields)


# ---- the configs ----


def _layer_config(config: Eagle3DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """The draft layer as a Llama config, RoPE in the old form and the new one."""
    rope = dict(config.rope_parameters)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {
        **{name: getattr(config, name) for name in _LAYER_FIELDS},
        "model_type": "llama",
        "tie_word_embeddings": False,
        "use_cache": True,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": rope,
        **dict.fromkeys(("torch_dtype", "dtype"), str(dtype).removeprefix("torch.")),
        "transformers_version": transformers.__version__,
    }


def _portable_config(config: Eagle3DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """vLLM reads the layers' inputs at the top, SGLang the nested outputs."""
    return {
        **_layer_config(config, dtype),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_config": {AUX_KEY: list(config.aux_layer_ids or ()), "use_aux_hidden_state": True},
        AUX_KEY: [i + 1 for i in config.aux_layer_ids or ()],
    }


def _speculators_config(
    config: Eagle3DraftConfig, dtype: torch.dtype, verifier: str, num_speculative_tokens: int
) -> dict[str, Any]:
    method = {"proposal_type": "greedy", "speculative_tokens": num_speculative_tokens}
    method |= {"verifier_accept_k": 1, "accept_tolerance": 0.0}
    layer = _layer_config(config, dtype)
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
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }


# ---- the checks ----


def _problems_of(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    layer, layer_name = _layer_of(config)
    of_format = _OF_PORTABLE if layer is config else _OF_SPECULATORS
    for part, rules in ((config, of_format), (config, _OF_BOTH), (layer, _OF_LAYER)):
        for place, allowed, consequence in rules:
            value = _value_at(part, place)
            if value not in allowed if allowed else not value:
                yield f"`{place}` is {'missing' if value is None else repr(value)}: {consequence}."
    numbers: dict[str, Any] = {name: layer.get(name) for name in (*_NUMBERS, "rope_theta")}
    numbers["draft_vocab_size"] = config.get("draft_vocab_size")
    wrong = [name for name, x in numbers.items() if type(x) not in (int, float) or not math.isfinite(x)]  # nor bools
    yield from (f"`{name}` is missing or no number: engines would take another." for name in wrong)
    if wrong:
        return
    if (layer.get("rope_parameters") or {}).get("rope_theta", layer["rope_theta"]) != layer["rope_theta"]:
        yield "`rope_theta` and `rope_parameters` differ."
    outputs, inputs = _value_at(config, f"eagle_config.{AUX_KEY}"), config.get(AUX_KEY)
    if outputs is not None and inputs is not None and [i + 1 for i in outputs] != list(inputs):
        yield (
            f"`eagle_config.{AUX_KEY}` is {outputs} (outputs, SGLang) and `{AUX_KEY}` is {inputs} (inputs, vLLM): the "
            "second must be one more each."
        )
    with torch.device("meta"):
        draft = Eagle3DraftModel(_draft_config(config))
    if draft.config.aux_layer_ids is not None:
        check_aux_layer_ids(draft.config.aux_layer_ids)
    shapes = {name: list(tensor.shape) for name, tensor in _renamed(draft.state_dict(), _LAYER, layer_name).items()}
    yield from _tensor_problems(folder / WEIGHTS, shapes, draft)


def _value_at(config: Any, place: str) -> Any:
    """A nested value, `None` where it is missing. Of a list, the first one."""
    for name in place.split("."):
        config = config.get(name) if isinstance(config, dict) else config[0] if isinstance(config, list) else None
    return config


def _tensor_problems(file: Path, expected: dict[str, list[int]], draft: Eagle3DraftModel) -> Iterator[str]:
    """The problems of a file, given the shapes of the draft's tensors."""
    try:
        with safe_open(file, framework="pt") as tensors:
            shapes = {name: list(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
            maps = {name: tensors.get_tensor(name) for name in _MAPS if name in shapes}
    except SafetensorError as error:  # truncated, or of another format
        yield f"`{file.name}` can't be read: {error}."
        return
    vocab_size, draft_vocab_size = draft.config.vocab_size, draft.lm_head.out_features
    if maps:  # maps of a whole vocabulary are allowed
        expected = {**expected, "d2t": [draft_vocab_size], "t2d": [vocab_size]}
    for name in sorted({*shapes, *expected}):
        if name not in expected:
            yield f"The tensor `{name}` is no part of the format: SGLang skips it silently, vLLM fails on it."
        elif name not in shapes:
            yield f"The tensor `{name}` is missing: engines would use what they initialize it with."
        elif shapes[name] != expected[name]:
            yield f"The tensor `{name}` has the shape {shapes[name]}; the config says {expected[name]}."
    if len(maps) == 2:
        ids, t2d = ids_from_d2t(maps["d2t"]), maps["t2d"]
        if problem := problem_of_ids(ids, vocab_size, draft_vocab_size):
            yield f"`d2t` leads to wrong target ids: {problem}."
        elif t2d.dtype != torch.bool or not torch.equal(t2d_from_ids(ids, vocab_size), t2d):
            yield f"`t2d` ({t2d.dtype}) and `d2t` name different tokens."


def _checksum_problems(folder: Path) -> Iterator[str]:
    """The problems of an export of this library; others have no checksums."""
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        metadata = file.metadata() or {}
    checksum = metadata.pop("checksum", None)
    if checksum is None:
        return
    if checksum != checksum_of(load_file(folder / WEIGHTS), metadata):
        yield f"`{WEIGHTS}` is damaged: its content doesn't match its checksum."
    elif metadata["config"] != Hasher.hash_bytes((folder / CONFIG).read_bytes()):
        yield f"`{CONFIG}` is not the one that was written with `{WEIGHTS}`: export again instead of editing it."
