# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Renders docstrings in Hugging Face's grammar (types with markup, bracketed names); gives tables room."""

import re
from typing import Any

_TYPE = re.compile(r"<code>((?:[^<\n]*`)[^<\n]*)</code>")  # of one line: not a block of code
_NAME = re.compile(r"\[(<code>[^<]*</code>)\](?!\()")


_COLUMNS = re.compile(r"^\|(?: *-+ *\|){7,}$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Called by mkdocs for each page: one with a wide table has no table of contents beside it."""
    if _COLUMNS.search(markdown):
        page.meta["hide"] = ["toc"]
    return markdown


def on_page_content(html: str, **kwargs: Any) -> str:
    """Called by mkdocs for each page."""
    html = _TYPE.sub(lambda match: _marked_up(match.group(1)), html)
    return _NAME.sub(r"\1", html)


def _marked_up(text: str) -> str:
    text = re.sub(r"`([^`]*)`", r"<code>\1</code>", text)
    return re.sub(r"\*(\w+)\*", r"<em>\1</em>", text)
