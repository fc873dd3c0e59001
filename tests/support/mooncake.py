# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The shape of a production prefix forest, from a trace that has one hash id per 512-token block and no text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hf_prefix_tree.tree.prefix_tree import Branch

BLOCK = 512


def mooncake_branches(path: Path, requests: int) -> list[Branch]:
    """
    The first requests as branches of made-up tokens: equal blocks get equal tokens, the output is supervised.

    A block's hash covers the blocks before it, so equal hashes are a shared prefix. The last block of an input is cut
    where the input ends.
    """
    branches = []
    with path.open() as lines:
        for index, line in zip(range(requests), lines, strict=False):
            row = json.loads(line)
            blocks = np.array(row["hash_ids"], dtype=np.int64)
            prompt = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()[: row["input_length"]]
            # The output belongs to no block; ids above all blocks, of this request alone.
            output = (1 << 40) + (index << 20) + np.arange(row["output_length"])
            weights = np.arange(len(prompt) + len(output)) >= len(prompt)
            branches.append(Branch(np.concatenate([prompt, output]), weights))
    return branches
