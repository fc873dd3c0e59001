# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The trees of all benchmarks: random tokens in fixed shapes, or the trees of a file of conversations."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import numpy as np
import torch

from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.tree import layout
from hf_prefix_tree.tree.prefix_tree import PrefixTree, fold

# Parent of each node (-1: root), its tokens, and whether they are supervised.
Nodes = list[tuple[int, int, bool]]
VOCAB = 32_000  # ids are drawn below it


def caterpillar(turns: int, prompt: int, context: int, reasoning: int, answer: int) -> Nodes:
    """An agent dialogue, one branch per turn: reasoning and answer leave a trunk that continues without reasoning."""
    nodes: Nodes = [(-1, prompt + context, False)]
    for turn in range(turns):
        trunk = 0 if turn == 0 else len(nodes) - 2
        nodes += [(trunk, answer + context, False), (trunk, reasoning + answer, True)]
    del nodes[-2]  # nothing follows the last answer
    return nodes


def rollouts(prompt: int, completions: int, length: int) -> Nodes:
    """One prompt and its completions."""
    return [(-1, prompt, False)] + [(0, length, True)] * completions


def search(prompt: int, branching: tuple[int, ...], step: int) -> Nodes:
    """A search tree: at each level every state is expanded by steps of uneven length, `step` tokens on average."""
    nodes: Nodes = [(-1, prompt, False)]
    level = [0]
    for children in branching:
        first = len(nodes)
        nodes += [(parent, step + step // 4 * (index % 3 - 1), True) for parent in level for index in range(children)]
        level = list(range(first, len(nodes)))
    return nodes


SHAPES: dict[str, Nodes] = {
    "caterpillar-8k": caterpillar(turns=20, prompt=935, context=165, reasoning=60, answer=70),
    "caterpillar-37k": caterpillar(turns=61, prompt=928, context=250, reasoning=150, answer=100),
    "4k+16x512": rollouts(prompt=4096, completions=16, length=512),
    "1k+64x64": rollouts(prompt=1024, completions=64, length=64),
    "search": search(prompt=1024, branching=(3, 3, 3, 3), step=96),
}
QUICK: dict[str, Nodes] = {
    "caterpillar-8k": caterpillar(turns=4, prompt=9, context=5, reasoning=3, answer=4),
    "caterpillar-37k": caterpillar(turns=7, prompt=9, context=5, reasoning=3, answer=4),
    "4k+16x512": rollouts(prompt=32, completions=4, length=8),
    "1k+64x64": rollouts(prompt=16, completions=8, length=3),
    "search": search(prompt=16, branching=(2, 2), step=8),
}
FOLD_SHAPES: dict[str, Nodes] = {
    "caterpillar-400": caterpillar(turns=400, prompt=1113, context=84, reasoning=30, answer=30),
    "4k+256x2k": rollouts(prompt=4096, completions=256, length=2048),
    "search-4096": search(prompt=512, branching=(8, 8, 8, 8), step=32),
}


def build(nodes: Nodes, seed: int = 0, vocab: int = VOCAB) -> PrefixTree:
    """The tree of a shape, with random tokens. Children of a node differ in their first token, so none merge."""
    rng = np.random.default_rng(seed)
    parents, lengths, supervised = zip(*nodes, strict=True)
    ids = [rng.integers(vocab, size=length) for length in lengths]
    seen: dict[int, int] = {}
    for node_ids, parent in zip(ids, parents, strict=True):
        seen[parent] = seen.get(parent, -1) + 1
        node_ids[0] = seen[parent]
    weights = [np.full(length, float(flag)) for length, flag in zip(lengths, supervised, strict=True)]
    return PrefixTree.from_nodes(list(parents), ids, weights)


def lightest_first(tree: PrefixTree) -> tuple[np.ndarray, np.ndarray]:
    """The node table of `tree` with the children of every node in the reverse order."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.node_parents.tolist()):
        children.setdefault(parent, []).append(node)
    order, stack = [], children[-1][:]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += children.get(node, [])
    rank = np.empty(len(order) + 1, dtype=np.int64)
    rank[order], rank[-1] = np.arange(len(order)), -1
    return tree.node_lengths[order], rank[tree.node_parents[order]]


def leaf_first_rows(tree: PrefixTree) -> torch.Tensor:
    """The tensor `prefix_tree` of the batch contract for the reverse order."""
    rows = concatenate_trees([tree], pad_token_id=0)["prefix_tree"]
    lengths, parents = lightest_first(tree)
    columns = (layout.subtree_end, layout.depth, layout.predecessor)
    rows[0, :, : len(tree)] = torch.from_numpy(np.stack([column(lengths, parents) for column in columns]))
    return rows


def conversation_trees(
    conversations: Path, tokenizer: str | Path, tools: Path | None = None, max_trees: int | None = None
) -> list[PrefixTree]:
    """One tree per `group` of consecutive lines of a JSONL file with `messages`, one branch per assistant turn."""
    from transformers import AutoTokenizer

    from hf_prefix_tree.data.turns import conversation_branches

    encoder = AutoTokenizer.from_pretrained(tokenizer)
    schemas = json.loads(tools.read_text()) if tools is not None else None
    rows = [json.loads(line) for line in conversations.read_text().splitlines()]
    trees = []
    for group, members in groupby(rows, key=lambda row: row["group"]):
        if len(trees) == max_trees:
            break
        schema = schemas[group] if isinstance(schemas, dict) else schemas
        turns = [conversation_branches(row["messages"], encoder, tools=schema) for row in members]
        trees.append(fold([branch for conversation in turns for branch in conversation.branches]))
    return trees
