# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Drafts for serving engines: one portable folder that vLLM and SGLang both load, and speculators' own format.

What to know about the engines:

- Tensors of the portable format are named as in [`Eagle3DraftModel`]. SGLang knows the layer as `midlayer` and skips
  unknown names in silence; vLLM maps `midlayer.` to `layers.0.`, which is also speculators' name.
- The auxiliary layers are counted in two ways. SGLang reads `eagle_config.eagle_aux_hidden_state_layer_ids`: the
  layers whose output is taken. vLLM (and speculators) read `eagle_aux_hidden_state_layer_ids` at the top: the layers
  whose input is taken, one more. Both are written.
- `draft_vocab_size` is a number in any case: without it, SGLang takes the target's head instead of the draft's.

Cost: that of writing the weights.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_prefix_tree.eagle3.config import Eagle3DraftConfig
from hf_prefix_tree.eagle3.draft import Eagle3DraftModel

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
