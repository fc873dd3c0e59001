# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The tiny models that the harness runs: text models, vision-language models, and models with adapters over full or
4-bit weights."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from conformance.configs import tiny_config
from conformance.forest import Forest, conformance_forest
from conformance.vision import VISION_MODELS, forest_with_images, tiny_vision_config
from hf_prefix_tree.modeling.attention.implementations import default_implementation

AMPLIFY = 3.0
_ADAPTED = ("llama", "qwen3", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "nemotron", "gpt2")
# Variants, and the architectures of each.
VARIANTS: dict[str, tuple[str, ...]] = {
    "text": tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "images": VISION_MODELS,
    "lora": _ADAPTED,
    "dora": tuple(name for name in _ADAPTED if name not in ("qwen3_moe", "deepseek_v3")),  # no DoRA for experts
    "nf4": ("llama", "qwen3", "gemma3_text", "gpt_oss"),
}


def class_name(model_type: str) -> str:
    """The class of an architecture's causal LM, or of its vision-language model if it has no causal LM."""
    return {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}[model_type]


def build_model(model_type: str, seed: int = 0, variant: str = "text") -> PreTrainedModel:
    """
    The tiny model in float32. Weights are amplified, because small weights hide errors; biases, sinks and all other
    vectors are random.

    Args:
        model_type (`str`): One of `VARIANTS[variant]`.
        seed (`int`, *optional*, defaults to 0): Seed of the weights.
        variant (`str`, *optional*, defaults to `"text"`): `"images"` builds the vision-language model, `"lora"` and
            `"dora"` wrap the text model with an adapter on all linear layers, `"nf4"` with LoRA over weights in
            bitsandbytes' 4 bits.
    """
    torch.manual_seed(seed)
    config = tiny_vision_config(model_type) if variant == "images" else tiny_config(model_type)
    if variant == "nf4":  # the kernels pack blocks of 64 weights
        for name, size in {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}.items():
            setattr(config, name, size)
    for part in [config, *(getattr(config, name, None) for name in config.sub_configs)]:
        if part is not None:
            part._experts_implementation = "eager"  # grouped matmuls reject float64 on CPU
    auto_class = AutoModelForImageTextToText if variant == "images" else AutoModelForCausalLM
    model = auto_class.from_config(config, dtype=torch.float32).train()
    if model.config._attn_implementation == "sdpa" and default_implementation(model.config.__class__) == "eager":
        model.set_attn_implementation("eager")
    _amplify(model)
    if variant == "nf4":
        model = _quantized(model)
    if variant in ("lora", "dora", "nf4"):
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(
            r=4,
            target_modules="all-linear",
            use_dora=variant == "dora",
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        model = get_peft_model(model, lora).train()
    return model


def build_forest(model: Any, seed: int = 0, variant: str = "text") -> Forest:
    """
    The forest that the model runs.

    Args:
        model (`PreTrainedModel`): A model of [`build_model`].
        seed (`int`, *optional*, defaults to 0): Seed of tokens, weights and images.
        variant (`str`, *optional*, defaults to `"text"`): The variant that was built.
    """
    if variant == "images":
        return forest_with_images(model.config, seed)
    return Forest(conformance_forest(model.config.get_text_config().vocab_size, seed))


def _amplify(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.normal_(0, 2)
            elif parameter.dim() > 1:
                zero = parameter.abs().sum(dim=-1, keepdim=True) == 0  # such as the embedding of a padding token
                parameter.add_(torch.randn_like(parameter) * 0.02 * zero).mul_(AMPLIFY)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def _quantized(model: PreTrainedModel) -> PreTrainedModel:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        model = type(model).from_pretrained(
            folder,
            quantization_config=config,
            dtype=torch.float32,
            attn_implementation=model.config._attn_implementation,
            experts_implementation="eager",
        )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):  # its first evaluation would round the scales to bfloat16
            module.support_avx512bf16_for_cpu = False
    return model
