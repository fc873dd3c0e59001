# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""`python -m conformance.templates`, run from the root of the repository: judges what is trained on under every chat
template, and writes the table."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

from conformance.dialogues import CELLS, DIALOGUES
from conformance.template_sources import byte_tokenizer, templates_in, tokenizer_for, trl_templates
from conformance.turn_oracle import EXACT, NO_REASONING, ORDER, WRONG, Result, judge


def judge_template(source: str, base: object) -> dict[str, Result]:
    """The result of every cell: the worst of its dialogues."""
    from hf_prefix_tree.data.turns import conversation_branches

    tokenizer = tokenizer_for(source, base)
    cells: dict[str, Result] = {}
    for dialogue in DIALOGUES:
        result = judge(dialogue, tokenizer, conversation_branches)
        result.reason = f"({dialogue.form}) {result.reason}" if result.reason else ""
        known = cells.get(dialogue.cell)
        if known is not None:
            result.possible = result.possible and known.possible
            if ORDER.index(known.status) >= ORDER.index(result.status):
                known.possible = result.possible
                continue
        cells[dialogue.cell] = result
    return cells


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit code is 1 if something wrong is trained without a word."""
    parser = argparse.ArgumentParser(prog="python -m conformance.templates", description=__doc__)
    parser.add_argument("--templates", type=Path, nargs="*", default=[], help="folders of further *.jinja files")
    parser.add_argument("--only", nargs="+", help="only templates whose name contains one of these")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer to take the vocabulary of (default: bytes)")
    arguments = parser.parse_args(argv)
    import transformers

    transformers.logging.set_verbosity_error()
    base = byte_tokenizer() if arguments.tokenizer is None else transformers.AutoTokenizer.from_pretrained(arguments.tokenizer)
    sources = {"TRL": trl_templates(), **{str(folder): templates_in(folder) for folder in arguments.templates}}
    total: Counter[str] = Counter()
    wrong = possible = exact = 0
    for source, templates in sources.items():
        for name, path in templates.items():
            if arguments.only and not any(part in name for part in arguments.only):
                continue
            for cell, result in judge_template(path.read_text(), base).items():
                total[result.status] += 1
                wrong += result.status in WRONG
                good = result.status in (EXACT, NO_REASONING)
                possible += result.possible
                exact += good
                if result.status != EXACT:
                    print(f"{source.rsplit('/', 1)[-1]} {name} | {cell} | {result.status} | {result.reason}", flush=True)
    count = sum(total.values())
    print(f"{count} cells, {possible} that the template can render: {exact} exact, {wrong} wrong. {dict(total)}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
