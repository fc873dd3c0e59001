# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trees of random tokens in the shape of agent dialogues, for benchmarks.

Cost: one fold per tree.
"""

from __future__ import annotations

import numpy as np

from hf_prefix_tree.tree.folding import check_integer
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

_THINK = 1  # first token of reasoning leaves only: a leaf shares no token with the trunk's continuation


def caterpillar(
    num_turns: int,
    seed: int = 0,
    *,
    prompt_tokens: int = 32,
    reasoning_tokens: int = 72,
    output_tokens: int = 64,
    reply_tokens: int = 250,
    final_tokens: int = 491,
    vocab_size: int = 1024,
    weighting: str = "tree",
) -> PrefixTree:
    """
    An agent dialogue as `reasoning="side_leaf"` folds it: a visible trunk, and off it a leaf of reasoning per turn.

    The trunk is a prompt, then per turn the visible output and the reply to it (a tool's or the user's), then the
    final response. Each turn's reasoning hangs off just before its output. Supervised are reasoning, output and the
    final response. K is `num_turns` + 1; `tree.branches()` unrolls it.

    Args:
        num_turns (`int`):
            Turns with reasoning, at least 1.
        seed (`int`, *optional*, defaults to 0):
            Seed of the tokens and lengths.
        prompt_tokens, reasoning_tokens, output_tokens, reply_tokens, final_tokens (`int`, *optional*):
            Mean length of each piece, at least 1. Lengths are drawn between half and one and a half of it.
        vocab_size (`int`, *optional*, defaults to 1024):
            Token ids are below it, at least 3.
        weighting (`str`, *optional*, defaults to `"tree"`):
            See [`fold`].

    Raises:
        `ValueError`: If a number is too small, or the weighting is unknown.

    Example:

    ```python
    >>> tree = caterpillar(num_turns=20, seed=0)
    >>> tree.num_branches, len(tree.branches())
    (21, 21)

    ```
    """
    for name, value in dict(locals()).items():
        if name not in ("seed", "weighting"):
            check_integer(value, name, 3 if name == "vocab_size" else 1)
    rng = np.random.default_rng(seed)

    def piece(mean: int) -> list[int]:
        length = rng.integers(-(-mean // 2), mean + mean // 2, endpoint=True)
        return rng.integers(_THINK + 1, vocab_size, size=length).tolist()

    trunk = piece(prompt_tokens)
    weights = [0.0] * len(trunk)
    branches = []
    for _ in range(num_turns):
        reasoning = [_THINK, *piece(reasoning_tokens)[1:]]
        branches.append(Branch(trunk + reasoning, weights + [1.0] * len(reasoning)))
        output, reply = piece(output_tokens), piece(reply_tokens)
        trunk = trunk + output + reply
        weights = weights + [1.0] * len(output) + [0.0] * len(reply)
    final = piece(final_tokens)
    branches.append(Branch(trunk + final, weights + [1.0] * len(final)))
    return fold(branches, weighting)


def caterpillar_set(num_trees: int = 64, seed: int = 0) -> list[PrefixTree]:
    """
    Caterpillars in the published shape of 64 agent dialogues, within 2%: on average 20.4 branches, 8,004 tokens, a
    longest path of 6,615, 8.1 times as many tokens and 5.4 times as many attention pairs in the branches as in the
    tree.

    Args:
        num_trees (`int`, *optional*, defaults to 64):
            Number of trees.
        seed (`int`, *optional*, defaults to 0):
            Seed of all of them.

    Example:

    ```python
    >>> len(caterpillar_set(num_trees=3))
    3

    ```
    """
    check_integer(num_trees, "num_trees", 1)
    rng = np.random.default_rng(seed)
    turns = rng.permutation(np.resize(np.arange(16, 24), num_trees))
    return [caterpillar(int(n), int(rng.integers(2**32))) for n in turns]
