# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Draws the pictures of the documentation, in `docs/assets/`.

`tree.png`: three rollouts of a prompt, the tree that they fold into, and its mask. `speed.png`: the times of
`benchmarks/results/trainers_h200.csv`.
"""

import csv
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hf_prefix_tree import Branch, PrefixTree, fold

PROMPT = ["Is", "7", "prime", "?"]
ANSWERS = [["Let", "me", "check", ":", "yes"], ["Let", "me", "think", ":", "it", "is"], ["Yes", "."]]
COLOURS = ["#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756"]
REPO_ROOT = Path(__file__).resolve().parent.parent
TIMES = REPO_ROOT / "benchmarks" / "results" / "trainers_h200.csv"
SIDES = {
    "trl": ("TRL", "#bbbbbb"),
    "trl-compiled": ("TRL, layers compiled", "#888888"),
    "tree": ("tree", "#4c78a8"),
    "tree-compiled": ("tree, layers compiled", "#1f3f66"),
}
MODELS = {
    "dense-0.6b": "Qwen3-0.6B",
    "moe": "Qwen3-30B-A3B, 6 layers",
    "lora-8b": "Qwen3-8B, LoRA",
    "qlora-8b": "Qwen3-8B, QLoRA",
}
DATA = {
    "short-completions": "1k prompt, 64 completions of 64",
    "completions": "4k prompt, 16 completions of 512",
    "stripped": "agent dialogue of 20 turns, reasoning stripped",
    "trials": "4 trials of a task, nothing stripped",
    "single": "1 trial: nothing is shared",
}


def draw_speed(path: Path) -> None:
    with TIMES.open() as file:
        rows = list(csv.DictReader(file))
    seconds: dict[str, dict[str, float]] = {}
    for row in rows:
        name = f"{DATA.get(row['rows'], row['rows'])}\n{MODELS.get(row['model'], row['model'])}"
        seconds.setdefault(name, {})[row["side"]] = float(row["s"])
    names = sorted(seconds, key=lambda name: max(seconds[name].values()))
    figure = Figure(figsize=(11, 0.9 * len(names) + 0.8), layout="constrained", dpi=110)
    axes = figure.subplots()
    for index, (side, (label, colour)) in enumerate(SIDES.items()):
        bars = [(number + 0.2 * (1.5 - index), seconds[name].get(side)) for number, name in enumerate(names)]
        places, times = zip(*((place, time) for place, time in bars if time is not None), strict=True)
        axes.barh(places, times, 0.18, color=colour, label=label)
        for place, time in zip(places, times, strict=True):
            axes.text(time + 0.04, place, f"{time:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(names)), names, fontsize=9)
    axes.set(xlabel="seconds of a step, one H200, medians")
    for edge in ("top", "right"):
        axes.spines[edge].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)


def draw_tree_and_mask(path: Path) -> None:
    words = sorted({word for text in (PROMPT, *ANSWERS) for word in text})
    sequences = [[words.index(word) for word in (*PROMPT, *answer)] for answer in ANSWERS]
    tree = fold([Branch(ids, np.r_[np.zeros(4), np.ones(len(ids) - 4)]) for ids in sequences])
    colours = [COLOURS[node] for node in np.repeat(np.arange(len(tree.node_lengths)), tree.node_lengths)]
    texts = [words[token] for token in tree.input_ids]
    stats = tree.stats()

    figure = Figure(figsize=(11, 4.4), layout="constrained", dpi=160)
    left, right = figure.subplots(1, 2, width_ratios=(1.75, 1))
    draw_tree(left, tree, texts, colours)
    title = f"{stats.branches} branches, {stats.branch_tokens} tokens: {stats.tree_tokens} in the tree"
    left.set_title(title, fontsize=12)
    draw_mask(right, tree, texts, colours)
    right.set_title("each token sees its own path", fontsize=12)
    figure.savefig(path)


def draw_tree(axes: Axes, tree: PrefixTree, texts: list[str], colours: list[str]) -> None:
    leaves = {int(path[-1]): row for row, path in enumerate(sorted(tree.paths(), key=lambda path: path[-1]))}
    row = {}
    for token in reversed(range(len(tree))):
        inside = [row[leaf] for leaf in leaves if token < leaf < tree.subtree_end[token]]
        row[token] = leaves.get(token, min(inside) if inside else 0)
    for token, (text, colour) in enumerate(zip(texts, colours, strict=True)):
        x, y = int(tree.depth[token]), -row[token]
        before = int(tree.predecessor[token])
        if before >= 0:
            axes.plot([x - 1, x], [-row[before], y], color="#999999", linewidth=1.2, zorder=1)
        box = {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": "none"}
        axes.text(x, y, text, ha="center", va="center", color="white", fontsize=11, bbox=box, zorder=2)
    axes.set(xlim=(-0.6, tree.depth.max() + 0.6), ylim=(-len(leaves) + 0.5, 0.5))
    axes.axis("off")


def draw_mask(axes: Axes, tree: PrefixTree, texts: list[str], colours: list[str]) -> None:
    index = np.arange(len(tree))
    visible = (index[None] <= index[:, None]) & (index[:, None] < tree.subtree_end[None])
    for query, key in zip(*np.nonzero(visible), strict=True):
        axes.add_patch(_square(key, query, colours[key]))
    axes.set(xlim=(-0.5, len(tree) - 0.5), ylim=(len(tree) - 0.5, -0.5), aspect="equal", xlabel="key", ylabel="query")
    axes.set_xticks(index, texts, rotation=90, fontsize=9)
    axes.set_yticks(index, texts, fontsize=9)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(length=0)


def _square(x: float, y: float, colour: str):  # type: ignore[no-untyped-def]
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.45, y - 0.45), 0.9, 0.9, facecolor=colour, edgecolor="none")


if __name__ == "__main__":
    draw_tree_and_mask(REPO_ROOT / "docs" / "assets" / "tree.png")
    draw_speed(REPO_ROOT / "docs" / "assets" / "speed.png")
