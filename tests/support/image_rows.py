"""Padded rows with images, a processor of the tiny vision-language models, and what their vision towers compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PaddleOCRVLProcessor, PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from conformance.configs import VOCAB
from hf_prefix_tree.modeling.positions import image_model

TEXT = 80  # tokens below are text

TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}t5 <image> t6 {% else %}{{ part.text }} {% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}t7 {% endif %}"
)


class RowsWithImages:
    """
    Makes padded rows as TRL does: prompts padded on the left, completions on the right, images one after another.

    Args:
        config: That of a tiny vision-language model.
        seed: Of texts and pixels. The grids are those of 6, 6, and 8 tokens.
    """

    def __init__(self, config: Any, seed: int = 0) -> None:
        vision, self.token = config.vision_config, config.image_token_id
        self.rng, self.merge = np.random.default_rng(seed), getattr(vision, "spatial_merge_size", 1)
        channels = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
        shape = [channels * getattr(vision, "temporal_patch_size", 1), vision.patch_size, vision.patch_size]
        shape = shape if config.model_type == "paddleocr_vl" else [int(np.prod(shape))]
        self.grids = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 4, 2]]) * torch.tensor([1, self.merge, self.merge])
        generator = torch.Generator().manual_seed(seed)
        self.pixels = [torch.randn([int(grid.prod()), *shape], generator=generator) for grid in self.grids]

    def text(self, count: int) -> list[int]:
        return self.rng.integers(3, TEXT, size=count).tolist()

    def prompt(self, *pieces: list[int] | int) -> tuple[list[int], list[int]]:
        """The ids and the images of a prompt, in which an integer stands for an image."""
        sizes = [int(grid.prod()) // self.merge**2 for grid in self.grids]
        ids = [token for x in pieces for token in ([self.token] * sizes[x] if isinstance(x, int) else x)]
        return ids, [x for x in pieces if isinstance(x, int)]

    def batch(self, rows: list[tuple[tuple[list[int], list[int]], list[int]]]) -> dict[str, torch.Tensor]:
        """The model's inputs of (prompt, completion) pairs; completions are scored."""
        left = max(len(prompt) for (prompt, _), _ in rows)
        width = left + max(len(completion) for _, completion in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, ((prompt, _), completion) in enumerate(rows):
            where = slice(left - len(prompt), left + len(completion))
            ids[row, where], mask[row, where] = torch.tensor(prompt + completion), 1
            labels[row, left : where.stop] = torch.tensor(completion)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        shown = [image for (_, images), _ in rows for image in images]
        return {
            **batch,
            "pixel_values": torch.cat([self.pixels[image] for image in shown]),
            "image_grid_thw": self.grids[shown],
            "mm_token_type_ids": (ids == self.token).int(),
        }


class SeenImages:
    """Counts the images of each call of a model's vision tower."""

    def __init__(self, model: Any) -> None:
        self.calls: list[int] = []
        part: Any = image_model(model)
        tower = getattr(part, "visual", None) or part.vision_tower
        tower.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.calls.append(len(kwargs["grid_thw"] if "grid_thw" in kwargs else args[1]))


def processor(config: Any) -> PaddleOCRVLProcessor:
    """A processor for the tiny Qwen2.5-VL: one word per token, images in patches of 4 x 4 pixels."""
    words = {"<pad>": 0, "<unk>": 1, "<eos>": 2, **{f"t{i}": i for i in range(3, VOCAB)}}
    del words[f"t{config.image_token_id}"]
    words["<image>"] = config.image_token_id
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "<eos>", "padding_side": "left"},
        additional_special_tokens=["<image>"],
        extra_special_tokens={"image_token": "<image>"},
    )
    sizes = {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 64, "max_pixels": 64 * 16}
    return PaddleOCRVLProcessor(Qwen2VLImageProcessorPil(**sizes), tokenizer, chat_template=TEMPLATE)


def picture(seed: int) -> Image.Image:
    """24 x 16 pixels, six tokens."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (16, 24, 3), dtype=np.uint8))
