# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Where the time of a step goes: the kernels of one profiled step by category, and the functions of the host.

Kernels of the optimizer and the head are recognized by the host function that launched them, all others by their
names. `idle` is the part of the measured time of a step, without a profiler, in which no kernel ran; below it are the
kernels before which the device waited longest while it was profiled, which takes the host longer. On a CPU, operators
are listed instead of kernels, as a test run.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import re
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, print_table, write_csv

Events = list[dict[str, Any]]
LAUNCHED_BY = {"optimizer": r"^Optimizer\.step", "head and loss": r"ChunkedLogProbFunction"}
NAMED = {  # the first that matches
    "attention backward": r"FlashAttentionBackward|flash_bwd|flex_attention_backward|sdpa\w*bprop|fmha_cutlassB",
    "attention forward": r"FlashAttentionForward|flash_fwd|flex_attention|sdpa\w*fprop|fmha_cutlassF",
    "matmul": r"nvjet|gemm|cublas|cutlass|xmma|splitK|grouped_mm|triton_tem|aten::(mm|addmm|bmm|_grouped_mm)$",
    "copies": r"^Mem(cpy|set)|copy_kernel|direct_copy|CatArray|aten::(copy_|clone|cat)$",
    "fused by the compiler": r"^triton_",
    "elementwise": r"elementwise|reduce_kernel|FillFunctor|vectorized|multi_tensor",
}
KERNELS, WAITS = 16, 10
COLUMNS = ["category", "name", "calls", "kernel_ms", "share", "tflop", "tflops", "roof_share", "own_ms", "total_ms"]


@contextmanager
def profiled(device: torch.device) -> Iterator[Events]:
    """Fills the list with the events of a trace of the block."""
    events: Events = []
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        yield events
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events += [x for x in json.loads(path.read_text())["traceEvents"] if x.get("ph") == "X"]


def summary(
    events: Events, ms: float, tflop: Mapping[str, float] | None = None, roof: float | None = None
) -> list[Row]:
    """
    Rows of the categories and of the longest kernels. `ms` is the time of a step without a profiler, `tflop` the work
    of categories, `roof` the TFLOP/s of a large matrix product.
    """
    kernels = [x for x in events if x.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not any(x.get("cat") == "cuda_runtime" for x in events):
        kernels = kernels or [x for x in events if x.get("cat") == "cpu_op"]
    if not kernels:
        raise RuntimeError("the profiler saw no kernels")
    launcher = _launchers(events)
    by_category: dict[str, Counter[str]] = defaultdict(Counter)
    calls: Counter[tuple[str, str]] = Counter()
    busy, last = 0.0, min(kernel["ts"] for kernel in kernels)
    waits: Counter[str] = Counter()
    for kernel in sorted(kernels, key=lambda x: x["ts"]):
        end = kernel["ts"] + kernel["dur"]
        if kernel["ts"] > last:
            waits[kernel["name"]] += kernel["ts"] - last
        busy += max(0.0, end - max(last, kernel["ts"]))  # streams overlap, and so do operators
        last = max(last, end)
        category = launcher(kernel) or _named(kernel["name"])
        by_category[category][kernel["name"]] += kernel["dur"]
        calls[category, kernel["name"]] += 1
    rows: list[Row] = []
    for category, times in sorted(by_category.items(), key=lambda x: -x[1].total()):
        spent = times.total() / 1e3
        row: Row = {"category": category, "name": "all", "calls": None, "kernel_ms": spent, "share": spent / ms}
        if spent and (work := (tflop or {}).get(category)):
            row |= {"tflop": work, "tflops": work / spent * 1e3}
            row |= {"roof_share": row["tflops"] / roof} if roof else {}
        rows.append(row)
    rows.append({"category": "idle", "name": "all", "kernel_ms": ms - busy / 1e3, "share": 1 - busy / 1e3 / ms})
    for name, us in waits.most_common(WAITS):
        rows.append(
            {"category": "idle", "name": f"before {name[:150]}", "kernel_ms": us / 1e3, "share": us / 1e3 / ms}
        )
    longest = Counter({(c, name): us for c, times in by_category.items() for name, us in times.items()})
    for (category, name), us in longest.most_common(KERNELS):
        rows.append(
            {
                "category": category,
                "name": name[:160],
                "calls": calls[category, name],
                "kernel_ms": us / 1e3,
                "share": us / 1e3 / ms,
            }
        )
    return [{**row, "ms": ms} for row in rows]


def _named(name: str) -> str:
    return next((category for category, pattern in NAMED.items() if re.search(pattern, name)), "other")


def _launchers(events: Events) -> Callable[[dict[str, Any]], str | None]:
    """Returns a function from a kernel to the category of the host's function around its launch, if there is one."""
    around: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for x in events:
        if x.get("cat") in ("cpu_op", "user_annotation"):
            category = next((c for c, pattern in LAUNCHED_BY.items() if re.search(pattern, x["name"])), None)
            if category is not None:
                around[x["tid"]].append((x["ts"], x["ts"] + x["dur"], category))
    for intervals in around.values():
        intervals.sort()
    launches = {
        x["args"]["correlation"]: x
        for x in events
        if x.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in x.get("args", {})
    }

    def category_of(kernel: dict[str, Any]) -> str | None:
        launch = launches.get(kernel.get("args", {}).get("correlation"), kernel)
        intervals = around.get(launch["tid"], [])
        at = bisect_right(intervals, launch["ts"], key=lambda x: x[0]) - 1
        # one in another of the same kind, or of the other, is found by the last that began before
        found = [x for x in intervals[max(0, at - 3) : at + 1] if launch["ts"] <= x[1]]
        return found[-1][2] if found else None

    return category_of


def host_functions(function: Callable[[], Any], count: int = 15) -> list[Row]:
    """The functions in which the host itself spends the most time during a call, excluding their callees."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # a copy to a busy device would wait
    profile = cProfile.Profile()
    profile.runcall(function)
    stats: Any = pstats.Stats(profile)
    longest = sorted(stats.stats.items(), key=lambda x: -x[1][2])[:count]
    rows = []
    for (path, line, name), (_, calls, own, total, _) in longest:
        place = f"{'/'.join(Path(path).parts[-2:])}:{line} {name}" if line else name
        rows.append({"category": "host", "name": place, "calls": calls, "own_ms": 1e3 * own, "total_ms": 1e3 * total})
    return rows


def write_profiles(rows: list[Row], output: Path | None, where: Row, columns: list[str]) -> None:
    """Prints the rows, and writes them to `..._profile.csv` beside `output`."""
    if not rows:
        return
    print_table([{name: row.get(name) for name in columns} for row in rows])
    if output is not None:
        write_csv(output.with_name(f"{output.stem}_profile.csv"), [{**row, **where} for row in rows])
