# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A picture of the speed-up of a whole step against the token ratio, from the CSV files of `benchmarks.step`.

    python -m benchmarks.plot benchmarks/results/step_full_h100.csv --output step_full_h100.png

One bar for each shape and mode, by branch tokens over tree tokens: time of the per-branch step over that of the folded
step. Black lines are the FLOP ratio (the speed-up if time were proportional to FLOPs); the grey line is 1, no gain.
Shows the fastest of several backends. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import read_csv

COLOURS = {"eager": "#9ecae1", "compiled": "#2171b5"}
WIDTH = 0.32


def points(paths: Sequence[Path]) -> list[dict[str, str]]:
    """The fastest folded run without failure of each shape, mode and checkpointing, by token ratio."""
    best: dict[tuple[str, str, str], dict[str, str]] = {}
    for path in paths:
        for row in read_csv(path):
            if not row.get("speedup"):
                continue
            key = (row["shape"], row["mode"], row["checkpointing"])
            if key not in best or float(row["speedup"]) > float(best[key]["speedup"]):
                best[key] = row
    return sorted(best.values(), key=lambda row: float(row["token_ratio"]))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="CSV files of `benchmarks.step`")
    parser.add_argument("--output", type=Path, required=True, help="picture to write")
    args = parser.parse_args(argv)
    runs = points(args.results)
    if not runs:
        parser.error(f"no row with a speed-up in {', '.join(map(str, args.results))}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = {row["shape"]: row for row in runs}
    place = {shape: at for at, shape in enumerate(shapes)}
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.4 * len(shapes), 4.5), layout="constrained")
    modes = [mode for mode in COLOURS if any(row["mode"] == mode for row in runs)]
    for at, mode in enumerate(modes):
        of_mode = [row for row in runs if row["mode"] == mode]
        where = [place[row["shape"]] + 1.05 * WIDTH * (at - (len(modes) - 1) / 2) for row in of_mode]
        heights = [float(row["speedup"]) for row in of_mode]
        bars = axes.bar(where, heights, WIDTH, color=COLOURS[mode], label=mode)
        axes.bar_label(bars, fmt="%.1fx", fontsize=8)
    bounds = [float(row["flop_ratio"]) for row in shapes.values()]
    axes.hlines(
        bounds,
        [at - 0.4 for at in place.values()],
        [at + 0.4 for at in place.values()],
        color="black",
        label="FLOP ratio",
    )
    axes.axhline(1, color="grey", linewidth=0.8)
    labels = [f"{shape}\n{float(row['token_ratio']):.1f}" for shape, row in shapes.items()]
    axes.set_xticks(range(len(shapes)), labels, fontsize=8)
    axes.set(xlabel="branch tokens / tree tokens", ylabel="speed-up of a whole step over per-branch training")
    axes.set_title(f"{runs[0]['model']}, {runs[0]['device']}", fontsize=9)
    axes.legend(frameon=False, loc="upper left")
    axes.margins(y=0.15)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
