# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Common parts of all benchmarks: options, timing, the matmul roof, useful FLOPs, tables and CSV files of results."""

from __future__ import annotations

import argparse
import csv
import gc
import importlib.metadata
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

Row = dict[str, Any]
OUT_OF_MEMORY = "out of memory"  # a result, unlike all other failures
PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "trl",
    "numpy",
    "flash-attn-4",
    "flash-linear-attention",
    "bitsandbytes",
)


class Timing(NamedTuple):
    """Milliseconds of several runs."""

    ms: float  # median
    low: float
    high: float
    runs: int

    @classmethod
    def of(cls, times: list[float]) -> Timing:
        return cls(statistics.median(times), min(times), max(times), len(times))


def make_parser(
    doc: str | None, names: Iterable[str], defaults: Iterable[str] | None = None
) -> argparse.ArgumentParser:
    """The options that every benchmark has; `--only` selects among `names`."""
    names = list(names)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes for a CPU: a test run whose times mean nothing"
    )
    parser.add_argument("--output", type=Path, help="CSV file to write")
    parser.add_argument("--commit", help="commit to record (default: from git)")
    chosen = list(defaults or names)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=chosen, metavar="NAME", help=f"any of: {', '.join(names)}"
    )
    return parser


def default_device(quick: bool) -> torch.device:
    """A CUDA device, or the CPU if `quick` is set."""
    if not quick and not torch.cuda.is_available():
        raise SystemExit("This benchmark needs a CUDA GPU; `--quick` shows on a CPU that it runs.")
    return torch.device("cpu" if quick else "cuda")


def measure(
    function: Callable[[], Any],
    device: torch.device,
    *,
    warmup: int = 2,
    seconds: float = 1.0,
    min_runs: int = 3,
    max_runs: int = 10,
    busy: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """
    Runs `function` for about `seconds`, `min_runs` to `max_runs` times, each with a cold L2 cache on a GPU. Before
    each run the GPU is kept `busy`: 50 are some 5 ms, in which the host launches all kernels of a short function.
    """
    for _ in range(warmup):
        function()
    times: list[float] = []
    flush = torch.empty(2**28, dtype=torch.int8, device=device) if device.type == "cuda" else None
    while len(times) < min_runs or (len(times) < max_runs and sum(times) < 1e3 * seconds):
        if flush is None:
            start = clock()
            function()
            times.append(1e3 * (clock() - start))
        else:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for _ in range(busy):
                flush.zero_()
            begin.record()
            function()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return Timing.of(times)


def measure_in_a_row(
    function: Callable[[], Any], device: torch.device, *, seconds: float = 1.0, min_runs: int = 3, max_runs: int = 10
) -> Timing:
    """
    As [`measure`], without waiting for the device between the runs, as in training: on a GPU a run lasts from the end
    of the previous run to its end.
    """
    if device.type != "cuda":
        return measure(function, device, warmup=0, seconds=seconds, min_runs=min_runs, max_runs=max_runs)

    def end_of_run() -> torch.cuda.Event:
        function()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    events = [end_of_run()]
    start = time.perf_counter()
    while len(events) <= min_runs or (len(events) <= max_runs and time.perf_counter() - start < seconds):
        events.append(end_of_run())
    events[-1].synchronize()
    return Timing.of([before.elapsed_time(after) for before, after in pairwise(events)])


def peak_gib(function: Callable[[], Any], device: torch.device) -> float | None:
    """Highest GPU memory in use during `function`, in GiB; `None` on a CPU."""
    if device.type != "cuda":
        function()
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference divided by the norm of the expected tensors; NaN passes no comparison."""
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def best_attention(quick: bool) -> str:
    """The fastest installed attention that TRL can use for packed sequences; SDPA if none is installed."""
    from transformers.utils import import_utils

    for version in () if quick else (4, 3, 2):
        if getattr(import_utils, f"is_flash_attn_{version}_available", bool)():
            return f"flash_attention_{version}"
    return "sdpa"


def check_same_step(row: Row, stock: Row) -> None:
    """Raises unless loss and gradient norm of the first steps agree as closely as bf16 rounds."""
    for name, relative, absolute in (("loss", 2e-3, 2e-3), ("grad_norm", 0.05, 0.0)):
        if not math.isclose(row[name], stock[name], rel_tol=relative, abs_tol=absolute):
            raise RuntimeError(f"`{name}` of the first step is {row[name]}, but {stock[name]} for TRL.")


def matmul_roof(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a large square matrix product of random numbers, an upper bound for every step."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / measure(lambda: left @ right, device, max_runs=20).ms / 1e9


def versions() -> dict[str, str]:
    """Version of every relevant package, empty if it is not installed."""
    installed = {}
    for name in PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = ""
    return installed


def environment(device: torch.device, commit: str | None = None) -> Row:
    """The columns that describe the machine and the versions."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else _cpu_name(),
        "python": platform.python_version(),
        **versions(),
        "cuda": torch.version.cuda or "",
        "cudnn": torch.backends.cudnn.version() if cuda else "",
        "commit": commit or _git_commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {names[0] if names else platform.processor() or platform.machine()}"


def _git_commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).resolve().parent
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return result.stdout.strip()


def progress(rows: list[Row], row: Row) -> None:
    """Adds a row and prints it at once, so that an interrupted run leaves its results."""
    rows.append(row)
    print("  ".join(f"{name}={_text(value)}" for name, value in row.items() if value not in (None, "")), flush=True)


@contextmanager
def attempted(rows: list[Row], row: Row, device: torch.device) -> Iterator[None]:
    """Fills a row with a measurement on freed memory, or with its `failure`, so that the others continue."""
    gc.collect()  # compiled layers and hooks keep the previous model in cycles
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        row["failure"] = OUT_OF_MEMORY
    except (RuntimeError, ValueError) as error:
        row["failure"] = str(error)
    progress(rows, row)


def check_failures(rows: list[Row]) -> None:
    """Raises, at the end, failures other than running out of memory."""
    if failures := {row["failure"] for row in rows if row.get("failure")} - {OUT_OF_MEMORY}:
        raise RuntimeError("\n".join(failures))


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV file, all values text."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_csv(path: Path, rows: list[Row]) -> None:
    """Writes rows with all their columns. A process that dies while writing leaves the old file unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(path)


class Results:
    """The rows of this launch, measured `where`. With `append` the CSV file keeps its earlier rows before them."""

    def __init__(self, path: Path | None, where: Row, append: bool = False) -> None:
        self.path, self.where = path, where
        self.rows: list[Row] = []
        self.earlier: list[Row] = []
        if append and path is not None and path.is_file():
            self.earlier = read_csv(path)

    def write(self, *unfinished: Row) -> None:
        """Writes the file, with `unfinished` rows at its end."""
        if self.path is not None:
            rows = [{**row, **self.where} for row in [*self.rows, *unfinished]]
            write_csv(self.path, [*self.earlier, *rows])


def report(rows: list[Row], columns: list[str], device: torch.device, args: argparse.Namespace) -> list[Row]:
    """Writes all columns to `--output`, prints the chosen ones, and returns the rows with the environment."""
    where = environment(device, args.commit)
    rows = [{**row, **where} for row in rows]
    if args.output is not None:
        write_csv(args.output, rows)
    print(" | ".join(f"{name} {value}" for name, value in where.items() if value != ""))
    print_table([{name: row.get(name) for name in columns} for row in rows])
    return rows


def print_table(rows: list[Row]) -> None:
    """Prints rows that all have the columns of the first."""
    table = [list(rows[0])] + [[_text(value) for value in row.values()] for row in rows] if rows else []
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
