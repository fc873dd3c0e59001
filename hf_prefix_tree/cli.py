# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The `hf-prefix-tree` command: does a data set fold, and what would that gain?

`inspect` counts, compares files and draws a tree; `estimate` predicts speed-up and memory for a model. An error in the
input is one line on standard error, with exit code 2.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from datasets import disable_progress_bars

from hf_prefix_tree.data.turns import REASONING_MODES
from hf_prefix_tree.report.gain import ASSUMPTIONS, Estimate, counts_of, fold_file, read_tools, top_counts
from hf_prefix_tree.report.gain import estimate as predict
from hf_prefix_tree.report.plot import check_matplotlib, plot_trees
from hf_prefix_tree.report.text import console, counts_table, draw_tree, printable

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Does a data set fold into prefix trees, and what does that gain?",
)

Tokenizer = Annotated[str | None, typer.Option(help="Tokenizer, a folder or a name on the Hub. Text needs one.")]
Reasoning = Annotated[str, typer.Option(help=f"{', '.join(REASONING_MODES[:-1])} or {REASONING_MODES[-1]}.")]
Tools = Annotated[
    Path | None, typer.Option(help="JSON file with tool schemas: a list, or an object of lists by group.")
]
GroupBy = Annotated[
    str | None, typer.Option(help="Column whose equal values make one tree. Without it, each row is a tree.")
]
MaxLength = Annotated[int | None, typer.Option(help="Longest branch in tokens. Longer ones are truncated.")]
MaxPackedTokens = Annotated[int | None, typer.Option(help="Tokens of a packed sequence. Larger trees count as split.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@app.command()
def inspect(
    data: Annotated[list[Path], typer.Argument(help="JSON Lines files. Several are compared.", show_default=False)],
    tokenizer: Tokenizer = None,
    reasoning: Reasoning = "per_turn",
    tools: Tools = None,
    group_by: GroupBy = None,
    max_length: MaxLength = None,
    max_packed_tokens: MaxPackedTokens = None,
    top: Annotated[
        int | None, typer.Option(min=1, help="Compare the trees of each file with the highest pair ratios.")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Image of the distribution and of a tree's mask to write.")] = None,
) -> None:
    """Count what folding shares, per group and in total, and draw the tree that shares most."""
    if plot is not None:
        check_matplotlib()
    loaded = _load_tokenizer(tokenizer)
    limits = {"max_length": max_length, "max_packed_tokens": max_packed_tokens}
    options = {"reasoning": reasoning, "tools": _load_tools(tools), "group_by": group_by, **limits}
    files = [fold_file(path, loaded, **options) for path in data]
    reports: list[dict[str, Any]] = [
        {
            "file": file.name,
            "total": counts_of(file.groups, max_packed_tokens),
            "groups": [{"name": group.name, **counts_of([group], max_packed_tokens)} for group in file.groups],
            "top": top_counts(file.trees, top, max_packed_tokens),
            "losses": file.losses,
        }
        for file in files
    ]
    trees = [tree for file in files for tree in file.trees]
    shown = max(trees, key=lambda tree: tree.stats().pair_ratio)
    if plot is not None:
        plot_trees(trees, shown, plot)
    if as_json:
        print(json.dumps({"files": reports}, indent=2))
    else:
        out = console()
        for report in reports:
            groups = [(group["name"], group) for group in report["groups"]]
            out.print(counts_table(report["file"], "group", groups, report["total"]))
            if report["losses"]:
                out.print(f"Some data was dropped or modified: {report['losses']}.")
        if len(reports) > 1 or top is not None:
            title = f"The {top} trees with the highest pair ratio" if top is not None else "All trees"
            title += ", after splitting" if max_packed_tokens is not None else ""
            out.print(counts_table(title, "file", [(report["file"], report["top"]) for report in reports]))
        out.print(f"\nThe tree with the highest pair ratio, {shown.stats().pair_ratio:.2f}:")
        out.print(draw_tree(shown, loaded))


@app.command()
def estimate(
    data: Annotated[Path, typer.Argument(help="A JSON Lines file.", show_default=False)],
    model: Annotated[str, typer.Option(help="Model config, a folder or a name on the Hub.", show_default=False)],
    tokenizer: Tokenizer = None,
    reasoning: Reasoning = "per_turn",
    tools: Tools = None,
    group_by: GroupBy = None,
    max_length: MaxLength = None,
    max_packed_tokens: MaxPackedTokens = None,
    as_json: AsJson = False,
) -> None:
    """Predict speed-up and activation memory of training a model on trees instead of on their branches."""
    config = _load_config(model)
    limits = {"max_length": max_length, "max_packed_tokens": max_packed_tokens}
    options = {"reasoning": reasoning, "tools": _load_tools(tools), "group_by": group_by, **limits}
    file = fold_file(data, _load_tokenizer(tokenizer), **options)
    predicted = predict(file.trees, config, max_packed_tokens)
    total = counts_of(file.groups, max_packed_tokens)
    if as_json:
        values = {**dataclasses.asdict(predicted), "verdict": predicted.verdict(), "assumptions": ASSUMPTIONS}
        print(
            json.dumps({"file": file.name, "model": model, **values, "total": total, "losses": file.losses}, indent=2)
        )
        return
    out = console()
    out.print(counts_table(file.name, "", [("all groups", total)]))
    if file.losses:
        out.print(f"Some data was dropped or modified: {file.losses}.")
    print(_prediction(predicted))


def main() -> None:
    """Entry point of `hf-prefix-tree`."""
    logger = logging.getLogger("hf_prefix_tree")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the reports name the losses
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"hf-prefix-tree: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2)
    finally:
        logger.setLevel(level)


def _prediction(predicted: Estimate) -> str:
    kept, recomputed = (
        f"{branch:.2f} GiB for the longest branch, {tree:.2f} GiB for the largest row"
        for branch, tree in (
            (predicted.branch_gib, predicted.tree_gib),
            (predicted.branch_gib_checkpointed, predicted.tree_gib_checkpointed),
        )
    )
    lines = [
        f"TFLOP of an epoch     {predicted.branch_tflop:,.4g} branch by branch, {predicted.tree_tflop:,.4g} folded",
        f"predicted speed-up    {predicted.speedup:.2f}x",
        f"activations           {kept}",
        f"  with checkpointing  {recomputed}",
        "",
        predicted.verdict(),
        "",
        "Assumptions:",
        *(f"- {assumption}." for assumption in ASSUMPTIONS),
    ]
    return "\n".join(lines)


def _load_tokenizer(name: str | None) -> Any:
    if name is None:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"`--tokenizer` is {name!r}, which can't be loaded: {error}") from error


def _load_tools(path: Path | None) -> Any:
    return None if path is None else read_tools(path, "--tools")


def _load_config(name: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"`--model` is {name!r}, whose config can't be loaded: {error}") from error


if __name__ == "__main__":
    main()
