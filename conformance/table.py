# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The page of results: written from a run of the harness, and read back to compare with a new run."""

from __future__ import annotations

from collections import Counter

from conformance.check import EXACT, FAILED, NOT_BUILT, REFUSED, Result

_HEADER = "| `model_type` | class | result | layers | compared in | largest error | causal control | checkpointed |"
_REASONS = "| `model_type` | class | result | reason |"
_TEXT = """
Written by `python -m conformance --output docs/models.md`, run from the root of the repository; don't edit. The
harness builds a tiny model of every causal LM of Transformers, with every kind of layer of its default config and
amplified random weights. The model runs a forest (forks, a strict prefix, single-token nodes, a duplicate, paths
longer than windows and chunks) as one packed sequence, and every branch by itself under its default attention. The
largest error is the largest relative error of the logits of all branches and the gradients of all parameters; it is
measured in `float32` if the architecture does not run in float64, and in `(eval)` mode if it draws random numbers in
training. The causal control is the error of the logits if the packed sequence runs under a plain causal mask instead.
The last column compares the gradients under gradient checkpointing (both kinds) with those without, in float32.
"""
_VARIANTS = {
    "images": """
## With images

Vision-language models with multimodal rotary positions. The forest has images in a shared prefix, images in single
branches, one image twice after different text, and two different images of one size. The gradients are those of all
parameters, including the vision tower, which keeps its default attention. The call refuses videos, and images of other
multimodal models; their text is served like that of any causal LM.
""",
    "lora": """
## LoRA

An adapter of rank 4 on all linear layers (PEFT). The gradients are those of the adapter.
""",
    "dora": """
## DoRA

The same with weight-decomposed LoRA.
""",
    "nf4": """
## LoRA over 4-bit weights

bitsandbytes' NF4 on CPU, compared with branch runs of the same quantised model. (On a CPU with AVX512-BF16,
bitsandbytes rounds its scales to bfloat16 at the first evaluation; the harness turns this off.)
""",
}


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
    The page: a summary, the method, the architectures that ran, and the reasons of those that did not; then the same
    for models with images, with adapters and with 4-bit weights.

    Args:
        results (`list[Result]`): Results of a run.
    """
    import torch
    import transformers

    text = [result for result in results if result.variant == "text"]
    versions = f"Transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, CPU."
    lines = ["# Model architectures", "", f"{summary(text)} {versions}", *_TEXT.splitlines()]
    lines += ["", "## Exact", "", *_measured([result for result in text if result.status in (EXACT, FAILED)])]
    refused = [result for result in text if result.status == REFUSED]
    lines += ["", "## Refused", "", "`prepare_model` raises a `ValueError` with this reason.", "", *_reasons(refused)]
    not_built = [result for result in text if result.status == NOT_BUILT]
    if not_built:
        lines += [
            "",
            "## Not built",
            "",
            "The harness could not build tiny models of these.",
            "",
            *_reasons(not_built),
        ]
    for variant, introduction in _VARIANTS.items():
        chosen = [result for result in results if result.variant == variant]
        if chosen:
            lines += [*introduction.splitlines(), "", *_measured(chosen)]
    return "\n".join(lines) + "\n"


def read_statuses(page: str) -> dict[str, str]:
    """
    The status of every architecture of a page that [`markdown_table`] wrote, by `model_type`, followed by the variant
    where it is not text: `"qwen2_5_vl images"`.

    Args:
        page (`str`): The page's text.
    """
    statuses = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and cells[1].startswith("`") and cells[3] in (EXACT, REFUSED, FAILED, NOT_BUILT):
            statuses[cells[1].replace("`", "")] = cells[3]
    return statuses


def _measured(results: list[Result]) -> list[str]:
    lines = [_HEADER, "|---|---|---|---|---|---|---|---|"]
    for result in results:
        error, control = (f"{x:.0e}" if x is not None else "" for x in (result.error, result.control))
        lines.append(
            f"| {_name(result)} | {result.architecture} | {result.status} | {result.layers} "
            f"| {result.compared} | {error} | {control} | {result.checkpointed or _reason(result)} |"
        )
    return lines


def _reasons(results: list[Result]) -> list[str]:
    rows = [f"| {_name(result)} | {result.architecture} | {result.status} | {_reason(result)} |" for result in results]
    return [_REASONS, "|---|---|---|---|", *rows]


def _name(result: Result) -> str:
    return f"`{result.model_type}`" + ("" if result.variant == "text" else f" {result.variant}")


def _reason(result: Result) -> str:
    return result.reason.replace("|", "\\|")
