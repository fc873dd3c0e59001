# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A picture of the speed-up of a whole step against the token ratio, from the CSV files of `benchmarks.step`.

    python -m benchmarks.plot benchmarks/results/step_h100.csv --output benchmarks/results/step_h100.png

One point for each shape and mode: branch tokens over tree tokens across, time of the per-branch step over that of the
folded step up. Bars are the FLOP ratio, what the speed-up would be if time were FLOPs; the line is 1, no gain. Of
several backends the fastest is shown. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

MARKERS = {"eager": "o", "compiled": "s"}


def points(paths: Sequence[Path]) -> list[dict[str, str]]:
    """The fastest folded run without failure of each shape, mode and checkpointing, by token ratio."""
    best: dict[tuple[str, str, str], dict[str, str]] = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
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
    found = points(args.results)
    if not found:
        parser.error(f"no row with a speed-up in {', '.join(map(str, args.results))}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for mode, marker in MARKERS.items():
        own = [row for row in found if row["mode"] == mode]
        if own:
            across, up = ([float(row[name]) for row in own] for name in ("token_ratio", "speedup"))
            axes.plot(across, up, marker, label=f"{mode}, measured")
    bounds = {row["shape"]: row for row in found}
    across, up = ([float(row[name]) for row in bounds.values()] for name in ("token_ratio", "flop_ratio"))
    axes.plot(across, up, "_", color="black", markersize=16, label="FLOP ratio")
    for row in bounds.values():
        place = (float(row["token_ratio"]), float(row["flop_ratio"]))
        axes.annotate(row["shape"], place, xytext=(6, -10), textcoords="offset points", fontsize=8)
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="branch tokens / tree tokens", ylabel="speed-up of a whole step")
    axes.set_title(found[0]["device"], fontsize=9)
    axes.legend(frameon=False)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
