# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The forest that every architecture runs: several trees with forks, a strict prefix, single-token nodes (one of them
internal), a duplicate, and paths longer than the windows and chunks of the tiny configs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold


@dataclass
class Forest:
    """
    The input of an architecture.

    Args:
        trees (`list[PrefixTree]`): The trees of the packed sequence.
        images (`dict[str, torch.Tensor]`): The images of the packed sequence, in the order of its tokens.
        branch_images (`list[dict[str, torch.Tensor]]`): The images of each branch; empty if the forest has none.
        image_token_id (`int`, *optional*, defaults to -1): The token that stands for a piece of an image.
    """

    trees: list[PrefixTree]
    images: dict[str, torch.Tensor] = field(default_factory=dict)
    branch_images: list[dict[str, torch.Tensor]] = field(default_factory=list)
    image_token_id: int = -1

    def branch_inputs(self) -> list[list[dict[str, torch.Tensor]]]:
        """The keyword arguments for running each branch alone, by tree."""
        images = iter(self.branch_images)
        return [
            [
                self.plain_inputs(torch.from_numpy(branch.input_ids.copy())[None], next(images, {}))
                for branch in branches
            ]
            for branches in (tree.branches() for tree in self.trees)
        ]

    def plain_inputs(self, input_ids: torch.Tensor, images: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The keyword arguments for running one sequence without a tree."""
        inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
        if images:
            inputs |= {**images, "mm_token_type_ids": torch.eq(input_ids, self.image_token_id).long()}
        return inputs


def conformance_forest(vocab_size: int, seed: int = 0) -> list[PrefixTree]:
    """
    Two trees, 10 branches of 2 to 28 tokens, each token with a weight between 0 and 2.

    Args:
        vocab_size (`int`): Tokens are drawn from `[3, vocab_size)`.
        seed (`int`, *optional*, defaults to 0): Seed of the tokens and weights.
    """
    rng = np.random.default_rng(seed)

    def draw(count: int) -> np.ndarray:
        return rng.integers(3, vocab_size, size=count)

    trunk = draw(11)
    middle, single = draw(9), draw(1)
    long = [trunk, middle, draw(8)]
    first = [
        long,
        [trunk, middle, draw(3)],
        [trunk, middle[:4]],  # a strict prefix that ends inside a node
        [trunk, middle[:6], single, draw(5)],
        [trunk, middle[:6], single, draw(7)],  # `single` is a node of one token with two children
        [trunk[:5], draw(1)],  # a leaf of one token
        long,  # a duplicate
    ]
    root = draw(2)
    second = [[root, draw(10)], [root, draw(4)], [root]]
    return [_tree(rng, paths) for paths in (first, second)]


def _tree(rng: np.random.Generator, paths: list[list[np.ndarray]]) -> PrefixTree:
    branches = []
    for path in paths:
        ids = np.concatenate(path)
        branches.append(Branch(ids, rng.integers(0, 4, size=len(ids)) * rng.uniform(0.1, 0.6, size=len(ids))))
    return fold(branches)
