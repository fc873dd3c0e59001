# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A tree as HTML: its nodes with their text, weights and paths, and its mask. A page needs no further files.

Nodes stand in reading order: light children first, indented; the heaviest child last, at its parent's level. So the
trunk of a dialogue reads downwards, and a tree of N tokens is indented at most log2(N) times.

Cost: linear in the tokens drawn: the first 1,000 of a node, the first 1,000 nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hf_prefix_tree.tree.prefix_tree import PrefixTree

Decode = Callable[[list[int]], str]

_MAX_NODES, _MAX_TOKENS = 1_000, 1_000

_STYLE, _SCRIPT = (
    f"<{tag}>\n{Path(__file__).with_suffix(suffix).read_text()}</{tag}>"
    for tag, suffix in (("style", ".css"), ("script", ".js"))
)


def tree_html(tree: PrefixTree, decode: Decode | None = None) -> str:
    """
    A tree as a part of a page, with its style and script.

    Args:
        tree ([`PrefixTree`]):
            The tree.
        decode (`Callable`, *optional*):
            Text of token ids, e.g. `tokenizer.decode`. Ids are shown without it.

    Example:

    ```python
    >>> from hf_prefix_tree import Branch, fold

    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8, 9], [0, 1, 1, 1])])
    >>> tree_html(tree).count('<div class="n"')
    3

    ```
    """
    return f'{_STYLE}<div class="hpt">{_tree(tree, decode)}</div>{_SCRIPT}'


def page(
    title: str,
    lines: Sequence[str],
    tables: Sequence[tuple[str, Sequence[Sequence[str]]]],
    notes: Sequence[str],
    trees: Sequence[PrefixTree],
    decode: Decode | None = None,
) -> str:
    """
    A document of its own.

    Args:
        title (`str`), lines (sequence of `str`): Its title and first paragraphs.
        tables (sequence of `(str, rows)`): Title and rows of each table, the first of which is its head.
        notes (sequence of `str`): What the tables mean.
        trees (sequence of [`PrefixTree`]): Trees to draw.
        decode (`Callable`, *optional*): See [`tree_html`].
    """
    body = [f"<h1>{_text(title)}</h1>", *(f"<p>{_text(line)}</p>" for line in lines)]
    for name, rows in tables:
        body.append(f"<h2>{_text(name)}</h2>" * bool(name) + f'<div class="wide"><table>{_rows(rows)}</table></div>')
    body.append(f"<ul>{''.join(f'<li>{_text(note)}</li>' for note in notes)}</ul>")
    for number, tree in enumerate(trees, 1):
        body.append(f"<h2>Tree {number} of {len(trees)}</h2>{_tree(tree, decode)}")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    style = f"{_STYLE}<style>body{{margin:0}}body>.hpt{{padding:12px;min-height:100vh;box-sizing:border-box}}</style>"
    content = "\n".join(body)
    return (
        f'<!doctype html><html lang="en"><head>{head}{style}</head><body><div class="hpt">{content}</div>{_SCRIPT}'
        "</body></html>"
    )


def _rows(rows: Sequence[Sequence[str]]) -> str:
    cells = (
        "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row)
        for row, tag in zip(rows, ["th", *["td"] * len(rows)], strict=False)
    )
    return "".join(f"<tr>{row}</tr>" for row in cells)


def _text(text: str) -> str:
    """Escaped; control characters, which HTML can't hold, as their pictures."""
    return escape("".join(chr(0x2400 + ord(c)) if ord(c) < 32 and c not in "\n\t" else c for c in text))


def _tree(tree: PrefixTree, decode: Decode | None) -> str:
    stats, parents = tree.stats(), tree.node_parents.tolist()
    ends = tree.subtree_end[tree.node_starts].tolist()
    order, indents = _reading_order(parents)
    nodes = [_node(tree, node, indents[node], decode) for node in order[:_MAX_NODES]]
    if len(order) > _MAX_NODES:
        nodes.append(f"<p>... and {len(order) - _MAX_NODES:,} more nodes</p>")
    shapes = []
    for node, (start, length, end) in enumerate(
        zip(tree.node_starts.tolist(), tree.node_lengths.tolist(), ends, strict=True)
    ):
        seen = f"M{start} {start}V{end}H{start + length}V{start + length}Z"  # keys to the right, queries downwards
        title = f"node {node}: {length:,} tokens, seen by {end - start:,} queries"
        shapes.append(f'<path data-i="{node}" data-p="{parents[node]}" d="{seen}"><title>{title}</title></path>')
    size = len(tree)
    summary = (
        f"{stats.branches:,} branches, {len(parents):,} nodes, {stats.branch_tokens:,} tokens folded to "
        f"{stats.tree_tokens:,}: {stats.token_ratio:.2f}x fewer tokens, {stats.pair_ratio:.2f}x fewer pairs. Marked "
        "text is supervised. Hover for the path and the weight, click for all of a node's text."
    )
    mask = f'<svg viewBox="0 0 {size} {size}" role="img" aria-label="mask">{"".join(shapes)}</svg>'
    return f'<p>{summary}</p><div class="tree"><div class="nodes">{"".join(nodes)}</div>{mask}</div>'


def _reading_order(parents: list[int]) -> tuple[list[int], list[int]]:
    """Nodes with light children first and the heaviest, a node's first in preorder, last; how far each is indented."""
    children: list[list[int]] = [[] for _ in (*parents, -1)]  # the last list holds the roots (parent -1)
    for node, parent in enumerate(parents):
        children[parent].append(node)
    order, indents, waiting = [], [0] * len(parents), children[-1][::-1]
    while waiting:
        node = waiting.pop()
        order.append(node)
        for child in children[node]:
            indents[child] = indents[node] + (child != children[node][0])
        waiting += children[node][:1] + children[node][:0:-1]
    return order, indents


def _node(tree: PrefixTree, node: int, indent: int, decode: Decode | None) -> str:
    start, length = int(tree.node_starts[node]), int(tree.node_lengths[node])
    path, parent = [node], int(tree.node_parents[node])
    while parent >= 0:
        path.append(parent)
        parent = int(tree.node_parents[parent])
    stop = start + min(length, _MAX_TOKENS)
    counts, weights = tree.branch_count[start:stop], tree.weights[start:stop]
    changes = np.flatnonzero((np.diff(counts) != 0) | (np.diff(weights) != 0)) + 1
    text = ""
    for first, last in zip([0, *changes], [*changes, stop - start], strict=True):
        ids = tree.input_ids[start + first : start + last].tolist()
        span = _text(decode(ids) if decode is not None else " ".join(map(str, ids)) + " ")
        if counts[first]:
            weight = f"g = {counts[first]} of K = {tree.num_branches}, weight {weights[first]:.4g}"
            span = f'<mark title="{weight}">{span}</mark>'
        text += span
    if length > _MAX_TOKENS:
        text += f" ... {length - _MAX_TOKENS:,} more tokens"
    trail = " > ".join(map(str, reversed(path[:8])))
    title = f"path: {'... > ' * (len(path) > 8)}{trail}, depth {int(tree.depth[start]):,}"
    g = tree.branch_count[start : start + length]
    of_k = f"g {g.min()}{f'-{g.max()}' * bool(g.max() > g.min())} of {tree.num_branches}"
    facts = f"node {node}, {length:,} token{'s' * (length != 1)}, {of_k}"
    return (
        f'<div class="n" tabindex="0" data-i="{node}" data-p="{tree.node_parents[node]}" style="--d:{indent}" '
        f'title="{title}"><small>{facts}</small><div class="t">{text}</div></div>'
    )
