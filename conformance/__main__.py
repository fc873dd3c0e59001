# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""`python -m conformance`, run from the root of the repository: runs the architectures and writes the table."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from conformance.build import VARIANTS
from conformance.check import FAILED
from conformance.runner import run_all
from conformance.table import markdown_table, summary


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit code is 1 if an architecture failed."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--model-type", nargs="+", help="only these (default: all models of the variants)")
    parser.add_argument(
        "--variant",
        nargs="+",
        choices=list(VARIANTS),
        default=list(VARIANTS),
        help="text: causal LMs on text; images: vision-language models; lora, dora, nf4: adapters, over 4-bit weights",
    )
    parser.add_argument("--output", type=Path, help="write the table (Markdown) to this file")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds per architecture")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and tokens")
    arguments = parser.parse_args(argv)
    cases = [(name, variant) for variant in arguments.variant for name in VARIANTS[variant]]
    unknown = sorted(set(arguments.model_type or ()) - {name for name, _ in cases})
    if unknown:
        parser.error(f"not among the models of {', '.join(arguments.variant)}: {', '.join(unknown)}")
    if arguments.model_type:
        cases = [case for case in cases if case[0] in arguments.model_type]
    results = []
    for result in run_all(cases, arguments.time_limit, arguments.seed):
        results.append(result)
        error = "" if result.error is None else f"{result.error:.1e}"
        name = result.model_type if result.variant == "text" else f"{result.model_type} {result.variant}"
        print(f"{name:28} {result.status:9} {result.compared:8} {error:8} {result.reason}", flush=True)
    print(summary(results))
    if arguments.output:
        arguments.output.write_text(markdown_table(results))
    if arguments.json:
        arguments.json.write_text(json.dumps([result.to_dict() for result in results], indent=1) + "\n")
    return int(any(result.status == FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())
