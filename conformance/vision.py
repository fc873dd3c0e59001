# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Vision-language models with multimodal rotary positions: tiny ones, and a forest with images in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from conformance.configs import HIDDEN, VOCAB, shrink
from conformance.forest import Forest, conformance_forest
from hf_prefix_tree.data.images import fold_images

VISION_MODELS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm4v_moe", "glm46v", "glm_ocr"),
    *("ernie4_5_vl_moe", "paddleocr_vl", "qwen3_5"),
)
_VISION: dict[str, Any] = {
    **{"depth": 2, "num_hidden_layers": 2, "num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"hidden_size": HIDDEN, "embed_dim": HIDDEN, "out_hidden_size": HIDDEN, "text_hidden_size": HIDDEN},
    **{"intermediate_size": 24, "patch_size": 4, "image_size": 32, "window_size": 16, "num_position_embeddings": 64},
    **{"fullatt_block_indexes": [1], "deepstack_visual_indexes": [0, 1], "max_image_size": 32},
}
# Frequencies of time, height and width of the tiny models that do not have 4 of them.
_SECTIONS = {"glm4v_moe": [1, 1, 0], "ernie4_5_vl_moe": [1, 1, 2]}


def tiny_vision_config(model_type: str) -> PreTrainedConfig:
    """
    A small config of a vision-language model.

    Args:
        model_type (`str`): One of `VISION_MODELS`.
    """
    default = CONFIG_MAPPING[model_type]().to_dict()
    vision = {name: small for name, small in _VISION.items() if name in default["vision_config"]}
    section = _SECTIONS.get(model_type, [2, 1, 1])
    text = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section}}
    values = shrink(default, {"vision_config": vision, "text_config": text})
    values["vision_config"] |= vision
    values["text_config"] |= text
    special = [name for name, x in default.items() if name.endswith("_id") and isinstance(x, int) and x >= VOCAB]
    values |= {name: VOCAB - 1 - i for i, name in enumerate(special)}
    return CONFIG_MAPPING[model_type](**values)


def forest_with_images(config: Any, seed: int = 0) -> Forest:
    """
    A text tree, and two trees with images: in a shared prefix, in single branches, one image twice after different
    text, two different images of one size, and a branch without images.

    Args:
        config (`PreTrainedConfig`): A config of [`tiny_vision_config`].
        seed (`int`, *optional*, defaults to 0): Seed of the tokens, the weights and the images.
    """
    token, vision = config.image_token_id, config.vision_config
    merge = getattr(vision, "spatial_merge_size", 1)
    channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    shape = [channels * getattr(vision, "temporal_patch_size", 1), vision.patch_size, vision.patch_size]
    shape = shape if config.model_type == "paddleocr_vl" else [int(np.prod(shape))]
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    grids = torch.tensor([[1, 2, 3], [1, 4, 2], [1, 2, 3]]) * torch.tensor([1, merge, merge])
    patches = [torch.randn([int(grid.prod()), *shape], generator=generator) for grid in grids]

    def text(count: int) -> np.ndarray:
        return rng.integers(3, 80, size=count)

    def branch(*pieces: np.ndarray | int) -> dict[str, Any]:  # an integer stands for an image
        shown = [piece for piece in pieces if isinstance(piece, int)]
        ids = np.concatenate(
            [np.full(int(grids[p].prod()) // merge**2, token) if isinstance(p, int) else p for p in pieces]
        )
        values: dict[str, Any] = {"input_ids": ids, "weights": (ids != token) * rng.uniform(0, 2, size=len(ids))}
        if shown:
            values |= {"pixel_values": torch.cat([patches[i] for i in shown]), "image_grid_thw": grids[shown]}
        return values

    root, middle, question = text(3), text(4), text(5)
    groups = [
        [
            branch(root, 0, middle, text(6)),
            branch(root, 0, middle, question, 1, text(4)),
            branch(root, 0, middle, question, 1, text(2)),
            branch(root, 0, middle[:2]),  # a strict prefix
            branch(root, 2, middle, question),  # the tokens of another branch, another image
            branch(root, text(3), 0, text(3)),  # an image once more
            branch(root, text(9)),
        ],
        [branch(middle, 1, text(3)), branch(middle, 1, text(7))],
    ]
    trees, tree_images, branch_images = [], [], []
    for group in groups:
        tree, images = fold_images(group, image_token_id=token)
        trees.append(tree)
        tree_images.append(images)
        branch_images += [{name: x for name, x in values.items() if isinstance(x, torch.Tensor)} for values in group]
    trees += conformance_forest(80, seed)[1:]
    merged = {name: torch.cat([images[name] for images in tree_images]) for name in tree_images[0]}
    return Forest(trees, merged, branch_images, token)
