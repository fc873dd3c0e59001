# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Counts the package: files, lines of code, root modules and the longest file; exits with 1 over a limit.

A line of code is one that holds a token of code: no blank line, no comment, no docstring.

Usage: python scripts/loc.py
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent / "hf_prefix_tree"
LIMITS = {"files": 100, "lines of code": 13_500, "modules in the root": 4, "lines of the longest file": 450}
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines of code of one module."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines |= set(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def measure(package: Path) -> dict[str, int]:
    """The figures that `LIMITS` limits."""
    sources = {path: path.read_text() for path in package.rglob("*.py")}
    return {
        "files": len(sources),
        "lines of code": sum(map(code_lines, sources.values())),
        "modules in the root": sum(path.parent == package for path in sources),
        "lines of the longest file": max(source.count("\n") for source in sources.values()),
    }


if __name__ == "__main__":
    figures = measure(PACKAGE)
    for name, value in figures.items():
        print(f"{value:>7,} {name} (at most {LIMITS[name]:,})")
    sys.exit(any(value > LIMITS[name] for name, value in figures.items()))
