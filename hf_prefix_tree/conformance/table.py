# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The page of results: written from a run of the harness, and read back to compare with a new run."""

from __future__ import annotations

from collections import Counter

from hf_prefix_tree.conformance.check import EXACT, FAILED, NOT_BUILT, REFUSED, Result

_HEADER = "| `model_type` | class | result | layers | compared in | largest error | causal control | checkpointed |"


def summary(results: list[Result]) -> str:
    """
    One line of counts.

    Args:
        results (`list[Result]`): Results of a run.

    Example:

    ```python
    >>> summary([Result("llama", status="exact"), Result("mamba", status="refused")])
    '2 architectures: 1 exact, 1 refused, 0 failed, 0 not built.'

    ```
    """
    count = Counter(result.status for result in results)
    parts = ", ".join(f"{count[status]} {status}" for status in (EXACT, REFUSED, FAILED, NOT_BUILT))
    return f"{len(results)} architectures: {parts}."


def markdown_table(results: list[Result]) -> str:
    """
    The page: a summary, what was compared, the architectures that ran, and the reasons of those that did not.

    Args:
        results (`list[Result]`): Results of a run.
    """
    import torch
    import transformers

    lines = [
        "# Model architectures",
        "",
        f"{summary(results)} Transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, CPU.",
        "",
        "Written by `python -m hf_prefix_tree.conformance --output docs/models.md`; don't edit. Every causal LM of",
        "Transformers is built tiny, with every kind of layer of its default config and amplified random weights, and",
        "runs a forest (forks, a strict prefix, single-token nodes, a duplicate, paths longer than windows and",
        "chunks) as one tree row, and every branch by itself under the model's default attention. The largest",
        "relative error is over the logits of all branches and the gradients of all parameters; `float32` where the",
        "architecture does not run in float64, `(eval)` where it draws random numbers in training. The causal",
        "control is the error of the logits where the row runs under a plain causal mask instead. The last column",
        "compares the gradients under gradient checkpointing (both kinds) with those without, in float32. Multimodal",
        "models run on text only.",
        "",
        "## Exact",
        "",
        _HEADER,
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        if result.status in (EXACT, FAILED):
            error, control = (f"{x:.0e}" if x is not None else "" for x in (result.error, result.control))
            lines.append(
                f"| `{result.model_type}` | {result.architecture} | {result.status} | {result.layers} "
                f"| {result.compared} | {error} | {control} | {result.checkpointed or result.reason} |"
            )
    lines += ["", "## Refused", "", "`prepare_model` raises a `ValueError` with this reason.", ""]
    lines += ["| `model_type` | class | result | reason |", "|---|---|---|---|"]
    lines += [_reason_row(result) for result in results if result.status == REFUSED]
    if any(result.status == NOT_BUILT for result in results):
        lines += ["", "## Not built", "", "No tiny model of these could be made here.", ""]
        lines += ["| `model_type` | class | result | reason |", "|---|---|---|---|"]
        lines += [_reason_row(result) for result in results if result.status == NOT_BUILT]
    return "\n".join(lines) + "\n"


def read_statuses(page: str) -> dict[str, str]:
    """
    The status of every architecture of a page that [`markdown_table`] wrote.

    Args:
        page (`str`): The page's text.
    """
    statuses = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and cells[1].startswith("`") and cells[3] in (EXACT, REFUSED, FAILED, NOT_BUILT):
            statuses[cells[1].strip("`")] = cells[3]
    return statuses


def _reason_row(result: Result) -> str:
    reason = result.reason.replace("|", "\\|")
    return f"| `{result.model_type}` | {result.architecture} | {result.status} | {reason} |"
