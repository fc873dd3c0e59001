# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Branches as text, cut where supervision starts or ends."""

from __future__ import annotations

from itertools import pairwise

from hf_prefix_tree.data.turns import ConversationBranches
from hf_prefix_tree.tree.prefix_tree import Branch


def parts(branch: Branch, tokenizer) -> list[str]:
    """Context, supervised, context, ...: a branch's first token is always context."""
    assert set(branch.weights.tolist()) <= {0.0, 1.0}
    on = branch.weights > 0
    cuts = [0, *(i for i in range(1, len(branch)) if on[i] != on[i - 1]), len(branch)]
    return [tokenizer.decode(branch.input_ids[a:b]) for a, b in pairwise(cuts)]


def all_parts(result: ConversationBranches, tokenizer) -> list[list[str]]:
    return [parts(branch, tokenizer) for branch in result.branches]


def supervised_parts(branches: list[Branch], tokenizer) -> list[list[str]]:
    """Only what is supervised, of each branch."""
    return [parts(branch, tokenizer)[1::2] for branch in branches]
