# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A picture: how token ratios are distributed over the trees of a data set, and the attention mask of one tree.

Cost: the mask is drawn from at most 1,024 sampled tokens, so a picture costs the same for every tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.data.trees import write_files
from hf_prefix_tree.tree.prefix_tree import PrefixTree

_PIXELS = 1024


def check_matplotlib() -> None:
    """Raises `ValueError` where matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("a plot needs matplotlib; run `pip install matplotlib`.")


def plot_trees(trees: Sequence[PrefixTree], shown: PrefixTree, path: Path) -> None:
    """
    Draw the distribution of token ratios and the mask of one tree.

    Args:
        trees (sequence of [`PrefixTree`]): Trees of the distribution.
        shown ([`PrefixTree`]): Tree whose mask is drawn.
        path (`Path`): Image to write; its suffix says in which format.

    Raises:
        `ValueError`: If matplotlib is not installed, or does not know the format.
    """
    check_matplotlib()
    from matplotlib.backend_bases import FigureCanvasBase
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    if path.suffix.lstrip(".") not in FigureCanvasBase.filetypes:
        known = ", ".join(f".{name}" for name in FigureCanvasBase.filetypes)
        raise ValueError(f"the image is {str(path)!r}, whose suffix is no known format; pass one of {known}.")
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    ratios = [tree.stats().token_ratio for tree in trees]
    left.hist(ratios, bins=np.linspace(1, max(*ratios, 2), 25).tolist(), color="tab:blue", edgecolor="white")
    left.axvline(np.mean(ratios), color="black", linestyle="--", label=f"mean {np.mean(ratios):.2f}")
    left.set(title=f"Token ratio of {len(ratios):,} trees", xlabel="branch tokens per tree token", ylabel="trees")
    left.yaxis.set_major_locator(MaxNLocator(integer=True))
    left.set_xlim(left=1)
    left.legend(frameon=False)
    stats, extent = shown.stats(), (0, len(shown), len(shown), 0)
    right.imshow(sampled_mask(shown), cmap="Blues", vmin=0, vmax=1.3, interpolation="nearest", extent=extent)
    title = f"Mask: {stats.branches} branches, {len(shown):,} tokens, {stats.pair_ratio:.1f}x pairs"
    right.set(title=title, xlabel="key, in layout order", ylabel="query")
    image = BytesIO()
    figure.savefig(image, dpi=150, format=path.suffix.lstrip("."))
    write_files({path: image.getvalue()})


def sampled_mask(tree: PrefixTree) -> npt.NDArray[np.bool_]:
    """The mask between evenly spaced tokens, at most 1,024 of them: `[queries, keys]`, `True` where visible."""
    at = np.arange(0, len(tree), -(-len(tree) // _PIXELS))
    queries, keys = at[:, None], at[None, :]
    return (keys <= queries) & (queries < tree.subtree_end[at][None, :])
