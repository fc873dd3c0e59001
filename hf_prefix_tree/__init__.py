# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Train causal language models on sequences that share prefixes, each shared token computed once.

Importing the package registers `attn_implementation="prefix_tree"` with Transformers. Everything else is loaded on
first use: neither TRL nor datasets is imported before a name that needs them.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hf_prefix_tree.version import __version__ as __version__

# Listed once, in the stub that type checkers read; `__getattr__` loads a name on first use.
_HOMES = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(statement, ast.ImportFrom) and statement.module
    for alias in statement.names
    if alias.name != "__version__"
}
__all__ = ["__version__", *sorted(_HOMES)]

# The command answers `--help` without torch. A command of it that runs a model registers first.
if Path(sys.argv[0]).stem != "hf-prefix-tree" and "hf_prefix_tree.cli" not in sys.orig_argv:
    from hf_prefix_tree.modeling.attention.interface import register

    register()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
