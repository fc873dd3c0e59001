# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A picture of training throughput against the number of GPUs, from the CSV files of `benchmarks.scaling`.

    python -m benchmarks.plot_scaling benchmarks/results/scaling_[124]_h200.csv --output scaling_h200.png

Branches per second (for `flat_steps`: samples) on logarithmic axes. One line for each mode, step size and setting
that was measured on several numbers of GPUs; the dotted line is perfect scaling. Shows the fastest of equal
launches. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import read_csv
from benchmarks.published import ON_TREES, PUBLISHED

COLOURS = {"tree": "#2171b5", "per_branch": "#cb181d", "flat_steps": "#fd8d3c", "grouped": "#737373"}


def lines(paths: Sequence[Path], shape: str, dtype: str) -> dict[tuple[str, str], dict[int, float]]:
    """Branches per second by number of GPUs, for each mode and each setting that distinguishes its runs."""
    by_run: dict[tuple[str, str], dict[int, float]] = {}
    for path in paths:
        for row in read_csv(path):
            if row["shape"] != shape or row["dtype"] != dtype or not row["ms_per_branch"]:
                continue
            rows = row["rows_per_step"]
            if row["mode"] not in ON_TREES and row["coverage"] == "equal":  # rounded to ranks and micro-batches
                rows = f"as many as of {round(int(rows) / PUBLISHED['branches'])} trees"
            if row.get("max_packed_tokens"):
                rows = f"{rows} rows of up to {row['max_packed_tokens']} tokens"
            how = "compiled" if row["compiled"] == "True" else "eager"
            how += ", checkpointing" if row.get("checkpointing") == "True" else ""
            way = f"{rows} a step, {row['rows_per_micro_batch']} a micro-batch, {how}"
            points = by_run.setdefault((row["mode"], way), {})
            gpus = int(row["gpus"])
            points[gpus] = max(points.get(gpus, 0.0), 1e3 / float(row["ms_per_branch"]))
    return {key: dict(sorted(points.items())) for key, points in by_run.items() if len(points) > 1}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path, help="CSV files of `benchmarks.scaling`")
    parser.add_argument("--output", type=Path, required=True, help="picture to write")
    parser.add_argument("--shape", default="0.6b")
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args(argv)
    by_run = lines(args.results, args.shape, args.dtype)
    if not by_run:
        parser.error(
            f"nothing was measured on several numbers of GPUs (`--shape {args.shape}`, `--dtype {args.dtype}`) in "
            f"{', '.join(map(str, args.results))}"
        )
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    for (mode, way), points in sorted(by_run.items(), key=lambda item: -max(item[1].values())):
        gpus, rates = list(points), list(points.values())
        style = "-" if "compiled" in way else "--"
        label = f"{mode}, {way}\n{rates[-1] / rates[0]:.1f}x from {gpus[0]} to {gpus[-1]} GPUs"
        axes.plot(gpus, rates, style, marker="o", color=COLOURS[mode], label=label)
        axes.plot(gpus, [rates[0] * n / gpus[0] for n in gpus], ":", color=COLOURS[mode], linewidth=0.8)
    counts = sorted({gpus for points in by_run.values() for gpus in points})
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="branches a second")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_title(f"Qwen3 shape of {args.shape}, {args.dtype}", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=150)


if __name__ == "__main__":
    main(sys.argv[1:])
