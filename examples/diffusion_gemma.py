# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Fine-tune DiffusionGemma with `DiffusionSFTTrainer`, and generate with it.

DiffusionGemma has no `[x_t | x_0]`: its encoder reads clean tokens, causally, into a cache, and its decoder denoises a
canvas, a block, beside it. `feed_canvases` hands it the two halves that way, all blocks of a sample in one call. Its
noise is random tokens (`corruption="random"`), and it generates with the `generate` of Transformers. The model is in
Transformers 5.24, not in 5.17.

Without arguments a tiny random model is trained on invented sentences, on a CPU and without network:

```shell
python examples/diffusion_gemma.py
python examples/diffusion_gemma.py google/diffusiongemma-26B-A4B-it dialogues.jsonl
```
"""

import sys
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoTokenizer, DiffusionGemmaForBlockDiffusion, DynamicCache, PreTrainedModel

from hf_prefix_tree import DiffusionSFTConfig, DiffusionSFTTrainer
from hf_prefix_tree.diffusion.model import unprepare_diffusion_model
from hf_prefix_tree.modeling.attention.masks.spans import END1, START0, dense_mask


def feed_canvases(model: PreTrainedModel) -> None:
    """
    A hook through which DiffusionGemma takes the calls of `DiffusionSFTTrainer`, under `objective="block"`.

    Every block of x_t is a canvas: it sees itself and what the encoder's cache would hold at its start, in a sliding
    layer the last `sliding_window - 1` tokens. The encoder is causal.

    Args:
        model (`DiffusionGemmaForBlockDiffusion`): The model, prepared or not. It is changed in place.
    """
    model.register_forward_pre_hook(_feed_canvases, with_kwargs=True, prepend=True)
    encoder, decoder = model.get_encoder(), model.get_decoder()
    encoder.register_forward_pre_hook(_keep_whole_cache, with_kwargs=True)
    for layer in (*encoder.language_model.layers, *decoder.layers):
        layer.register_forward_pre_hook(_without_is_causal, with_kwargs=True)


def _without_is_causal(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Of the prepared config: these layers have their own, and hand both on."""
    kwargs.pop("is_causal", None)
    return args, kwargs


def _keep_whole_cache(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """No layer that slides drops tokens: the masks say, block by block, what it sees."""
    is_ours = isinstance(kwargs.get("attention_mask"), dict) and kwargs.get("cache") is None
    return args, {**kwargs, "cache": DynamicCache()} if is_ours else kwargs


def _feed_canvases(
    module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]] | None:
    if (layout := kwargs.pop("diffusion_layout", None)) is None:
        return None
    ids, positions, where = (kwargs.pop(name) for name in ("input_ids", "position_ids", "predict_positions"))
    length = ids.shape[1] // 2
    if not layout[:, END1].any() or (where % (2 * length) >= length).any():
        raise ValueError("DiffusionGemma trains with `objective='block'` and without `group_by` only.")
    is_clean = torch.arange(2 * length, device=ids.device) >= length
    # what comes before it is visible: of a clean token itself, of a noisy one the start of its block
    start = torch.where(is_clean, positions, layout[:, START0])[:, :, None]
    is_near = ~is_clean | (start - positions[:, None] < module.config.get_text_config().sliding_window)
    visible = dense_mask(layout)[:, 0] & (~is_clean | (positions[:, None] <= start))
    masks = {"full_attention": visible[:, None], "sliding_attention": (visible & is_near)[:, None]}
    return (), {
        **kwargs,
        "input_ids": ids[:, length:],
        "position_ids": positions[:, length:],
        "attention_mask": {name: mask[..., length:, length:] for name, mask in masks.items()},
        "decoder_input_ids": ids[:, :length],
        "decoder_position_ids": positions[:, :length],
        "decoder_attention_mask": {name: mask[..., :length, :].roll(length, -1) for name, mask in masks.items()},
        "predict_positions": where // (2 * length) * length + where % (2 * length),
    }


def main(model_name_or_path: str | None = None, dataset_name: str = "dialogues.jsonl") -> torch.Tensor:
    options: dict[str, Any] = {
        "objective": "block",
        "corruption": "random",
        "report_to": "none",
        "save_strategy": "no",
    }
    if model_name_or_path is None:
        from diffusion_sft import demo_rows, demo_tokenizer

        rows, _ = demo_rows()
        tokenizer = demo_tokenizer(rows)
        model = tiny_model(len(tokenizer))
        options |= {"max_steps": 30, "learning_rate": 5e-3, "per_device_train_batch_size": 32, "logging_steps": 10}
        options |= {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
    else:
        rows = load_dataset("json", data_files=dataset_name, split="train")
        tokenizer = AutoTokenizer.from_pretrained(model_name_or_path)
        model = DiffusionGemmaForBlockDiffusion.from_pretrained(model_name_or_path, dtype=torch.bfloat16)
    feed_canvases(model)
    args = DiffusionSFTConfig("diffusion-gemma", block_size=model.config.canvas_length, **options)
    DiffusionSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer).train()
    unprepare_diffusion_model(model)
    prompt = tokenizer("Anna calls Ben.", return_tensors="pt")["input_ids"].to(model.device)
    sequences = model.eval().generate(prompt, max_new_tokens=2 * model.config.canvas_length).sequences
    print(tokenizer.decode(sequences[0]))
    return sequences


def tiny_model(vocab_size: int, canvas_length: int = 4, sliding_window: int = 8) -> PreTrainedModel:
    """A random DiffusionGemma of two layers, one of which slides."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaTextConfig, Gemma4VisionConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    text = DiffusionGemmaTextConfig(
        **sizes,
        vocab_size=vocab_size,
        moe_intermediate_size=16,
        num_experts=4,
        top_k_experts=2,
        num_hidden_layers=2,
        num_key_value_heads=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=sliding_window,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    vision = Gemma4VisionConfig(**{**sizes, "num_attention_heads": 2, "hidden_size": 16}, num_hidden_layers=1)
    return DiffusionGemmaForBlockDiffusion(
        DiffusionGemmaConfig(text_config=text, vision_config=vision, canvas_length=canvas_length)
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
