# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The `hf-prefix-tree` command: `gain` compares trees with the ways to train without them, `train` trains on them.

An error in the input is one line on standard error, with exit code 2. Everything that takes time to import is imported
where a command needs it, so that `--help` and `--version` answer at once.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_prefix_tree import __version__

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # `--group_by` as in configuration files and TRL's scripts, or `--group-by`.
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"hf_prefix_tree {__version__}")
        raise typer.Exit


_Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]


@app.callback()
def about(version: _Version = False) -> None:
    """Train on sequences that share prefixes, each shared token computed once."""


@app.command()
def gain(
    data: Annotated[str, typer.Argument(help="A file, a folder or a name on the Hub.", show_default=False)],
    tokenizer: Annotated[str | None, typer.Option(help="A folder or a name on the Hub. Text needs one.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="A file, or one of TRL's names: qwen3_5_think.")] = None,
    tools: Annotated[Path | None, typer.Option(help="JSON file of tools: a list, or lists by group.")] = None,
    group_by: Annotated[str, typer.Option(help="Column whose equal values make a tree, auto or none.")] = "auto",
    reasoning: Annotated[str, typer.Option(help="per_turn, side_leaf, think_split or keep.")] = "per_turn",
    max_length: Annotated[int | None, typer.Option(help="Longest branch. Longer ones are truncated.")] = None,
    max_packed_tokens: Annotated[int | None, typer.Option(help="Larger trees are split.")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "train",
    config: Annotated[str | None, typer.Option(help="Configuration of a data set that has several.")] = None,
    model: Annotated[str | None, typer.Option(help="Predict FLOPs and memory: a folder or a name.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Predict hours: h100, the one that was measured.")] = None,
    groups: Annotated[bool, typer.Option("--groups", help="Print a line for each group.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Draw the tree that shares most.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(help="Page to write, with the trees that share most.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image to write: the distribution and a mask.")] = None,
) -> None:
    """What training on trees computes, against TRL's SFTTrainer and against flat steps."""
    from hf_prefix_tree.data.trees import write_files
    from hf_prefix_tree.report import gain as report
    from hf_prefix_tree.report import plot as pictures
    from hf_prefix_tree.report import text
    from hf_prefix_tree.tree.folding import check_choice
    from hf_prefix_tree.tree.html import page

    _silence_libraries()
    logging.getLogger("hf_prefix_tree").setLevel(logging.ERROR)  # the report names the losses
    if plot is not None:
        pictures.check_matplotlib()
    if gpu is not None:
        check_choice(gpu, "--gpu", report.MEASURED_TFLOPS)
    if gpu is not None and model is None:
        raise ValueError(f"`--gpu` is {gpu!r}, but `--model` is missing; pass the model whose FLOPs to count.")
    loaded = _load("AutoTokenizer", tokenizer, "--tokenizer")
    if chat_template is not None:
        _set_chat_template(loaded, chat_template)
    loaded_config = _load("AutoConfig", model, "--model")
    folded = report.fold_rows(
        report.load_rows(data, split, config),
        data,
        loaded,
        reasoning=reasoning,
        tools=None if tools is None else report.read_tools(tools, "--tools"),
        group_by=None if group_by == "none" else group_by,
        max_length=max_length,
        max_packed_tokens=max_packed_tokens,
    )
    predicted = None
    if loaded_config is not None:
        predicted = report.estimate(folded.trees, loaded_config, max_packed_tokens, folded.ways)
    shown = sorted(folded.trees, key=lambda item: -item.stats().pair_ratio)
    of_groups = [(group.name, report.counts_of([group], max_packed_tokens)) for group in folded.groups]
    total = report.counts_of(folded.groups, max_packed_tokens)
    lines, notes = text.gain_lines(folded, predicted), text.footnotes(folded, predicted)
    table, per_group = text.gain_rows(folded, predicted, gpu), text.counts_rows(of_groups, total)
    if plot is not None:
        pictures.plot_trees(shown, shown[0], plot)
    if html is not None:
        tables = [("", table), ("Groups", per_group)]
        drawn, decode = shown[:10], None if loaded is None else loaded.decode
        written = page(f"Gain of {Path(data).name}", lines, tables, notes, drawn, decode)
        write_files({html: written.encode(errors="replace")})
    if as_json:
        ways = {name: {k: n for k, n in vars(way).items() if k != "at_depth"} for name, way in folded.ways.items()}
        named = [{"name": name, **counts} for name, counts in of_groups]
        content = {**vars(folded), "ways": ways, "total": total, "groups": named}
        if predicted is not None:
            hours = {} if gpu is None else {"hours": predicted.hours(gpu)}
            content["estimate"] = {**dataclasses.asdict(predicted), **hours, "verdict": predicted.verdict()}
        print(json.dumps(content, indent=2))
        return
    out = text.console()
    for line in lines:
        out.print(text.printable(line))
    out.print(text.table("", table))
    for note in notes:
        out.print(f"- {note}.")
    if groups:
        out.print(text.table("Groups", per_group))
    if tree:
        out.print(f"\nThe tree with the highest pair ratio, {shown[0].stats().pair_ratio:.2f}:")
        out.print(text.draw_tree(shown[0], loaded))


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    options_metavar="METHOD [OPTIONS]...",
)
def train(context: typer.Context) -> None:
    """Train: sft, dpo, kto, grpo, rloo, diffusion or eagle3. `train METHOD --help` lists the options of a method."""
    if not context.args or context.args[0] in ("-h", "--help"):
        print(f"usage: hf-prefix-tree train METHOD [OPTIONS]...\n{context.command.help}")
        return
    from hf_prefix_tree.cli.train import main

    _silence_libraries()
    main(context.args)


def main() -> None:
    """Entry point of `hf-prefix-tree`."""
    logger = logging.getLogger("hf_prefix_tree")
    level = logger.level
    try:
        code = app(args=sys.argv[1:] or ["--help"], standalone_mode=False)
    except typer.Abort:
        code = 130
    except Exception as error:
        # `format_message` marks errors of usage: their class is Click's, which typer has under its own name since 0.2x
        if not isinstance(error, ValueError | OSError | ImportError) and not hasattr(error, "format_message"):
            raise
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        line = "".join(char if char.isprintable() else " " for char in text)
        print(f"hf-prefix-tree: {' '.join(line.split())}", file=sys.stderr)
        code = 2
    finally:
        logger.setLevel(level)
    sys.exit(code)


def _silence_libraries() -> None:
    """Leaves standard error to the one line of an error, if nobody watches progress."""
    import datasets
    from transformers.utils.logging import disable_progress_bar

    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # of options nobody has set
    datasets.logging.set_verbosity(logging.CRITICAL)  # it logs what it then raises
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        disable_progress_bar()


def _load(auto_class: str, name: str | None, option: str) -> Any:
    if name is None:
        return None
    import transformers

    try:
        return getattr(transformers, auto_class).from_pretrained(name)
    except Exception as error:  # whatever a broken file makes a loader do
        reason = re.split(r"(?<=[.:])\s", str(error))[0]
        raise ValueError(f"`{option}` is {name!r}, which can't be loaded: {type(error).__name__}: {reason}") from error


def _set_chat_template(tokenizer: Any, template: str) -> None:
    """Gives the tokenizer the chat template of a file, or TRL's of that name."""
    if tokenizer is None:
        raise ValueError(f"`--chat-template` is {template!r}, but `--tokenizer` is missing; pass both.")
    shipped = Path(find_spec("trl").origin).parent / "chat_templates"  # type: ignore[union-attr, arg-type]
    path = Path(template) if Path(template).is_file() else shipped / f"{template}.jinja"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in shipped.glob("*.jinja") if "_training" not in file.stem))
        raise ValueError(f"`--chat-template` is {template!r}, which is no file; pass one, or one of {known}.")
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"`--chat-template` is {template!r}, which is no text: {error}.") from error
