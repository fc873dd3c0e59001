# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The page of chat templates: written from a run of the judge, and read back to compare with a new run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from conformance.dialogues import CELLS
from conformance.expected_turns import LEAVES_OUT, RAISES
from conformance.template_twins import (
    AFTER_STOP,
    DIFFERENT,
    EQUAL,
    HEADER,
    NO_BLOCK,
    NO_STOP,
    NOT_MARKED,
    THINK,
    Comparison,
)
from conformance.turn_oracle import COUNTED, EXACT, NO_REASONING, REFUSED, WRONG, Result

# What a cell of the table says for the status of a dialogue.
SYMBOLS = {EXACT: "=", NO_REASONING: "=r", COUNTED: "c", REFUSED: "c", RAISES: "-", LEAVES_OUT: "-"}
SYMBOLS |= {status: "WRONG" for status in WRONG}

# What a reason has in it, and what that says about the template; the first one counts.
_KINDS = (
    (f"{RAISES}: TemplateError: This model only supports single tool-calls", "raises on several calls at once"),
    ("System role not supported", "raises on a system message"),
    ("alternate", "raises on two assistant messages in a row"),
    (f"{RAISES}: TypeError: 'NoneType' object", "raises without tools"),
    (f"{RAISES}: UndefinedError", "raises without a variable of its own"),
    (RAISES, "raises on calls, for its own reasons (what it calls is unsafe or no JSON)"),
    (f"{LEAVES_OUT} text and calls", "leaves out the text and a call"),
    (f"{LEAVES_OUT} calls", "leaves out calls, or all but one"),
    (f"{LEAVES_OUT} text", "leaves out the text of a turn with calls"),
    (f"{LEAVES_OUT} reasoning", "writes an empty think block instead of the reasoning"),
    (f"{LEAVES_OUT} the think block", "turns reasoning off in the prompt of a turn that reasons"),
    (f"{LEAVES_OUT} what", "writes no header, or another one, into the prompt than into the turn"),
    (f"{LEAVES_OUT} a stop token", "writes no stop token after the turn"),
    (f"{LEAVES_OUT} one turn", "writes two turns for text and calls"),
    ("", "others: refused, although the template renders them"),
)

_TEXT = """
Written by `python -m conformance.templates --output docs/templates.md`, run from the root of the repository with the
folders of further templates; don't edit. [Data](data.md) explains the options.

## What is supervised

For every supervised turn of a conversation:

- The **context** is the tokens of `apply_chat_template(history, tools, add_generation_prompt=True)`, which an agent
  loop samples from. For a turn without reasoning it is the prompt with `enable_thinking=False`
  (`empty_thinking_in_prompt`), if that changes nothing before the header; for a turn that reasons where the prompt
  closes the think block, the one with `enable_thinking=True`.
- The **supervised tokens** are exactly those that the model must generate from there: its reasoning (if the template
  writes reasoning), all its text, every call with its name and arguments, and the stop token that ends generation.

If a template does not render a turn in this way, the turn is counted under the name of the reason, and refused or
skipped. It is never trained partially without notice.

## How templates are judged

Every text of the dialogues contains a unique word, which shows the message that a piece of a rendering comes from. The
judge renders prompts and turns with `apply_chat_template` alone and cuts the turn out of the text, independently of
the package's code for finding turns. The context tokens, the supervised text, and the text after it must be equal.
Every template gets a vocabulary of bytes with its control tokens. Dialogues come in several forms: reasoning in
`reasoning_content` and in the text, arguments as objects and as JSON strings, no arguments as `{}`, `"{}"`, `""` and
`null`. A cell shows the result of its worst form.

| cell | meaning |
|---|---|
| `=` | exact |
| `=r` | exact; the template writes no reasoning, so the turn is trained without it, which is counted |
| `-` | the template raises an error for this dialogue, or omits part of the turn; refused or counted |
| `c` | refused or counted, although the template renders the turn |
| `WRONG` | something else is trained without notice |
"""
_TWINS = """
## TRL's training variants

TRL has variants of its templates that mark what the model writes. They serve as a second judge: the supervised text of
every exact turn is compared with what the variant marks of it (`return_assistant_tokens_mask`). Variants also mark
text after the stop token, and the end of the prompt: a think block or the start of one, or a header. The variant of
DiffusionGemma does not mark the token at which a call stops; those of DeepSeek leave out the think block that their
prompt opens (the text after it is compared). Nothing else may differ. (Where headers are marked, two assistant
messages in a row are one piece of the mask; the second one is not compared.)
"""


@dataclass
class Judged:
    """
    The results of a template.

    Args:
        cells (`dict[str, Result]`): By kind of dialogue.
        twin ([`~conformance.template_twins.Comparison`], *optional*): The comparison with TRL's training variant.
    """

    cells: dict[str, Result]
    twin: Comparison | None = None


def summary(judged: dict[str, dict[str, Judged]]) -> str:
    """
    One line of counts.

    Args:
        judged (`dict[str, dict[str, Judged]]`): By source and name of the template.

    """
    results = [result for named in judged.values() for answer in named.values() for result in answer.cells.values()]
    count = Counter(SYMBOLS[result.status] for result in results)
    exact, rendered = count["="] + count["=r"], sum(result.possible for result in results)
    return (
        f"{sum(map(len, judged.values()))} templates, {len(results)} cells: {exact} exact "
        f"({_percent(exact, len(results))}), {count['-']} refused or counted because of the template, {count['c']} "
        f"others, {count['WRONG']} wrong; {_percent(exact, rendered)} of the {rendered} that the template renders are "
        "exact."
    )


def markdown_page(judged: dict[str, dict[str, Judged]]) -> str:
    """
    The page: the invariant, a table for every source, the reasons, and TRL's training variants.

    Args:
        judged (`dict[str, dict[str, Judged]]`): By source and name of the template.
    """
    import transformers
    import trl

    versions = f"Transformers {transformers.__version__}, TRL {trl.__version__}."
    lines = ["# Chat templates", "", f"{summary(judged)} {versions}", *_TEXT.splitlines()]
    for source, templates in judged.items():
        lines += ["", f"## {source}", "", summary({source: templates}), ""]
        lines += [f"| template | {' | '.join(CELLS)} |", "|---" * (1 + len(CELLS)) + "|"]
        for name, answer in templates.items():
            lines.append(f"| `{name}` | {' | '.join(SYMBOLS[answer.cells[cell].status] for cell in CELLS)} |")
    lines += [
        "",
        "## Reasons",
        "",
        *_kinds_of_reasons(judged),
        "",
        "| template | dialogues | reason |",
        "|---|---|---|",
    ]
    lines += [line for named in judged.values() for name, answer in named.items() for line in _reasons(name, answer)]
    lines += [*_TWINS.splitlines(), "", *_twins(judged)]
    return "\n".join(lines) + "\n"


def read_cells(page: str) -> dict[str, dict[str, str]]:
    """
    The symbol of every cell of a page that [`markdown_page`] wrote, by template and dialogue. Of templates that two
    sources have under one name, the first counts.

    Args:
        page (`str`): The page's text.
    """
    cells: dict[str, dict[str, str]] = {}
    for line in page.splitlines():
        name, *symbols = [cell.strip() for cell in line.strip("|").split("|")]
        if name.startswith("`") and len(symbols) == len(CELLS):
            cells.setdefault(name.strip("`"), dict(zip(CELLS, symbols, strict=True)))
    return cells


def _kinds_of_reasons(judged: dict[str, dict[str, Judged]]) -> list[str]:
    """A table of what templates do with the cells that are not exact, and why these can't be."""
    kinds: dict[str, list[str]] = {kind: [] for _, kind in _KINDS}
    for named in judged.values():
        for name, answer in named.items():
            for result in answer.cells.values():
                if SYMBOLS[result.status] in ("-", "c", "WRONG"):
                    kinds[next(kind for part, kind in _KINDS if part in result.reason)].append(name)
    rows = [
        f"| {kind} | {len(names)} | {len(set(names))} |"
        for kind, names in sorted(kinds.items(), key=lambda item: -len(item[1]))
        if names
    ]
    cells = sum(map(len, kinds.values()))
    return [
        f"Why {cells} cells are not exact. A served model does not see these turns whole either.",
        "",
        "| what the template does | cells | templates |",
        "|---|---|---|",
        *rows,
    ]


def _reasons(name: str, answer: Judged) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for cell, result in answer.cells.items():
        if SYMBOLS[result.status] in ("-", "c", "WRONG"):
            reason = f"{result.status}: {result.reason}" if result.status in WRONG else result.reason
            by_reason.setdefault(_plain(reason), []).append(cell)
    return [f"| `{name}` | {', '.join(cells)} | {reason} |" for reason, cells in by_reason.items()]


def _plain(reason: str, length: int = 240) -> str:
    """The reason as text of a table: tags and bars as they are, in one line."""
    text = " ".join(reason.split())
    text = text if len(text) <= length else text[: length - 4] + " ..."
    for sign, written in {"&": "&amp;", "<": "&lt;", "|": "&#124;", "`": "'", "*": "&#42;", "_": "&#95;"}.items():
        text = text.replace(sign, written)
    return text


def _twins(judged: dict[str, dict[str, Judged]]) -> list[str]:
    kinds = {
        EQUAL: "equal",
        AFTER_STOP: "marks text after the stop",
        THINK: "marks a think block of the prompt",
        HEADER: "marks a header of the prompt",
        NO_STOP: "does not mark the stop",
        NO_BLOCK: "leaves out the think block",
        NOT_MARKED: "does not mark the turn",
        DIFFERENT: "different",
    }
    lines = [f"| template | turns | {' | '.join(kinds.values())} |", "|---" * (2 + len(kinds)) + "|"]
    for named in judged.values():
        for name, answer in named.items():
            if answer.twin is not None:
                counts = answer.twin.counts
                cells = " | ".join(str(counts.get(kind, "")) for kind in kinds)
                lines.append(f"| {name} | {sum(counts.values())} | {cells} |")
    return lines


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f}%"
