# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What the model card of a run on trees says beside TRL's card: how it was weighted, and what folding saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_prefix_tree.version import __version__

_SECTION = """
### Prefix trees

Sequences that share prefixes were folded into trees, and each shared token computed once, with
[hf_prefix_tree](https://github.com/hf-prefix-tree/hf_prefix_tree) {version}.

| | |
|---|---|
| weighting | `{weighting}` |
| branches trained on | {branches:,.0f} |
| tokens of the branches | {branch_tokens:,.0f} |
| tokens computed | {tree_tokens:,.0f} |
| token ratio | {ratio:.2f} |
"""


def tree_section(log_history: Sequence[Mapping[str, Any]], weighting: str) -> str:
    """
    The section of a model card, as Markdown.

    Args:
        log_history (sequence of mappings): `trainer.state.log_history`.
        weighting (`str`): See [`fold`].

    Returns:
        `str`: empty where nothing was trained.

    Example:

    ```python
    >>> log = [{"tree/branches": 4, "tree/tokens": 100, "tree/token_ratio": 3.0}]
    >>> print(tree_section(log, "tree").splitlines()[-1])
    | token ratio | 3.00 |

    ```
    """
    windows = [entry for entry in log_history if "tree/tokens" in entry]
    tree_tokens = sum(entry["tree/tokens"] for entry in windows)
    if not tree_tokens:
        return ""
    branch_tokens = sum(entry["tree/tokens"] * entry["tree/token_ratio"] for entry in windows)
    return _SECTION.format(
        version=__version__,
        weighting=weighting,
        branches=sum(entry["tree/branches"] for entry in windows),
        branch_tokens=branch_tokens,
        tree_tokens=tree_tokens,
        ratio=branch_tokens / tree_tokens,
    )


def add_section(card: Path, section: str) -> None:
    """Puts the section behind the part on the training procedure of TRL's card, or at its end."""
    text = card.read_text()
    before, heading, after = text.partition("\n### Framework versions")
    card.write_text(before.rstrip() + "\n" + section + heading + after)
