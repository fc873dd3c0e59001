# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Train causal language models on sequences that share prefixes, each shared token computed once.

Importing the package registers `attn_implementation="prefix_tree"` with Transformers, as soon as Transformers loads
the module that models come from, which takes seconds. Everything else is loaded on first use, too: neither torch nor
TRL nor datasets is imported before a name that needs them.
"""

import ast
import sys
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__version__ = "0.2.0"

# Listed once, in the stub that type checkers read; `__getattr__` loads a name on first use.
_HOMES = {
    alias.name: statement.module
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text()).body
    if isinstance(statement, ast.ImportFrom) and statement.module
    for alias in statement.names
}
__all__ = ["__version__", *sorted(_HOMES)]


def _call(function: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(import_module("hf_prefix_tree.modeling.attention.interface"), function)(*args, **kwargs)


def _register() -> None:
    """Registers functions that load ours at their first call; `attention.interface` then registers these."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    for name in ("prefix_tree", "diffusion"):
        AttentionInterface.register(name, partial(_call, f"{name}_attention"))
        AttentionMaskInterface.register(name, partial(_call, f"{name}_mask"))


class _Registration(MetaPathFinder):
    """Registers when Transformers loads the module that has its attention functions."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != "transformers.modeling_utils":
            return None
        sys.meta_path.remove(self)
        spec: Any = find_spec(fullname)
        load = spec.loader.exec_module
        spec.loader.exec_module = lambda module: (load(module), _register())
        return spec


if "transformers.modeling_utils" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _Registration())


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
