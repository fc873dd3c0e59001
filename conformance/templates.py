# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""`python -m conformance.templates`, run from the root of the repository: judges what is supervised under every chat
template, and writes the table."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.dialogues import DIALOGUES
from conformance.template_page import Judged, markdown_page, summary
from conformance.template_sources import byte_tokenizer, templates_in, tokenizer_for, trl_templates, trl_twins
from conformance.template_twins import compare_with_twin
from conformance.turn_oracle import EXACT, ORDER, WRONG, Result, judge

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def judge_template(source: str, base: PreTrainedTokenizerBase, twin: str | None = None) -> Judged:
    """
    Judge all dialogues under a template.

    Args:
        source (`str`): The template.
        base ([`~transformers.PreTrainedTokenizerBase`]): The vocabulary, to which the template's tokens are added.
        twin (`str`, *optional*): TRL's training variant of the template.
    """
    from hf_prefix_tree.data.turns import conversation_branches

    tokenizer = tokenizer_for(source, base)
    results = [judge(dialogue, tokenizer, conversation_branches) for dialogue in DIALOGUES]
    cells: dict[str, Result] = {}
    for dialogue, result in zip(DIALOGUES, results, strict=True):
        reason = f"({dialogue.form}) {result.reason}" if result.reason else ""
        known = cells.get(dialogue.cell, Result(EXACT))
        worse = result if ORDER.index(result.status) > ORDER.index(known.status) else known
        cells[dialogue.cell] = Result(
            worse.status, reason if worse is result else known.reason, result.possible and known.possible
        )
    return Judged(cells, None if twin is None else compare_with_twin(twin, tokenizer, results))


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit code is 1 if something wrong is supervised without a word."""
    parser = argparse.ArgumentParser(prog="python -m conformance.templates", description=__doc__)
    parser.add_argument("--templates", type=Path, nargs="*", default=[], help="folders of further *.jinja files")
    parser.add_argument("--names", nargs="*", default=[], help="what to call these folders on the page")
    parser.add_argument("--only", nargs="+", help="only templates whose name contains one of these")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer to take the vocabulary from (default: bytes)")
    parser.add_argument("--output", type=Path, help="write the page (Markdown) to this file")
    arguments = parser.parse_args(argv)
    if len(arguments.names) > len(arguments.templates):
        parser.error("--names has more names than --templates has folders")
    import transformers

    transformers.logging.set_verbosity_error()
    base = byte_tokenizer()
    if arguments.tokenizer is not None:
        base = transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
    names = [*arguments.names, *(folder.name for folder in arguments.templates[len(arguments.names) :])]
    sources = {"TRL": trl_templates()}
    sources |= {name: templates_in(folder) for name, folder in zip(names, arguments.templates, strict=True)}
    judged: dict[str, dict[str, Judged]] = {source: {} for source in sources}
    for source, templates in sources.items():
        for name, path in templates.items():
            if arguments.only and not any(part in name for part in arguments.only):
                continue
            twin = trl_twins().get(name) if source == "TRL" else None
            answer = judge_template(path.read_text(), base, None if twin is None else twin.read_text())
            judged[source][name] = answer
            for cell, result in answer.cells.items():
                if result.status != EXACT:
                    print(f"{source} {name} | {cell} | {result.status} | {result.reason}", flush=True)
    print(summary(judged))
    if arguments.output:
        arguments.output.write_text(markdown_page(judged))
    results = [result for named in judged.values() for answer in named.values() for result in answer.cells.values()]
    return int(any(result.status in WRONG for result in results))


if __name__ == "__main__":
    sys.exit(main())
