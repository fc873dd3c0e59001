# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Where recurrent layers are hooked: the functions that the mixers of Transformers call by name.

A mixer calls its convolution and its scan as functions of its modeling file and hands both the keyword arguments of
the call, `prefix_tree` among them, recomputation under checkpointing included. While a prepared model of that file
exists, those names stand for functions that follow the tree where one arrives and call the original otherwise. Nothing
else of the file changes, and whatever kernel the original runs stays.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import torch

from hf_prefix_tree.modeling.attention.implementations import FALLBACK_HINT
from hf_prefix_tree.modeling.context import TreeContext, active_tree
from hf_prefix_tree.modeling.positions import Override
from hf_prefix_tree.modeling.recurrent.layers import convolve_on_tree, delta_rule_on_tree, mamba2_on_tree


def _not_fused(fused: Callable, context: TreeContext, *args: Any, **kwargs: Any) -> None:
    """Convolution and scan in one kernel: without it the mixer calls the two by themselves."""


_ON_TREE: dict[str, Callable] = {
    "causal_conv1d_fn": convolve_on_tree,
    "torch_chunk_gated_delta_rule": functools.partial(
        delta_rule_on_tree, "fla.ops.gated_delta_rule.chunk_gated_delta_rule"
    ),
    "chunk_kimi_delta_attention": functools.partial(delta_rule_on_tree, "fla.ops.kda.chunk_kda"),
    "mamba2_chunk_scan": mamba2_on_tree,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}
_WITHOUT_STATES = ("mamba_selective_scan", "mamba_inner_fn")


class _Replaced(Override):
    """A function of a modeling file while prepared models of that file exist. One that wraps ours stays."""

    def __init__(self, file: str, name: str) -> None:
        self.users = 0
        super().__init__(sys.modules[file], name, _tree_aware(self, name, getattr(sys.modules[file], name)))


Key = tuple[str, str]  # name of the modeling file's module, name of the function
_replaced: dict[Key, _Replaced] = {}


class _Use:
    """One model's use of replaced functions. Ends with `remove` or with the model; a copy of the model has another."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        for key in keys:
            if key not in _replaced:
                _replaced[key] = _Replaced(*key)
            _replaced[key].users += 1
        self._end = weakref.finalize(self, _release, keys)
        self._end.atexit = False

    def remove(self) -> None:
        """Gives the modeling files their functions back, once no model uses them."""
        self._end()

    def __reduce__(self) -> tuple:
        return (_Use, (self.keys,))


def _release(keys: list[Key]) -> None:
    for key in keys:
        _replaced[key].users -= 1
        if _replaced[key].users == 0:
            _replaced.pop(key).remove()


def follow_branches(model: torch.nn.Module) -> list[_Use]:
    """
    Makes the recurrent layers of a model follow the branches of a tree.

    Args:
        model (`torch.nn.Module`): A model all of whose recurrent layers can follow a tree.

    Returns:
        `list`: what undoes it; empty for a model without recurrent layers.
    """
    # where the forward is from: that is where it finds the functions, whatever was made of the mixer's class
    files = {inspect.unwrap(type(mixer).forward).__module__: None for mixer in _mixers(model)}
    keys = [(file, name) for file in files for name in _ON_TREE if hasattr(sys.modules[file], name)]
    return [_Use(keys)] if keys else []


def followed_functions(model: torch.nn.Module) -> set[str]:
    """The functions that every call of a model with a tree runs along its branches."""
    called = {name for mixer in _mixers(model) for name in _calls(type(mixer).forward)}
    return {name for name in called if _ON_TREE.get(name, _not_fused) is not _not_fused}


def _mixers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if has_convolution(module) and why_not_served(module) is None]


def has_convolution(module: torch.nn.Module) -> bool:
    """Whether a module convolves over time: what all recurrent layers that can follow a tree do before they scan."""
    return any(isinstance(child, torch.nn.Conv1d) for child in module.children())


def why_not_served(mixer: torch.nn.Module) -> str | None:
    """`None` where a module that holds a convolution can follow a tree, otherwise the reason why not."""
    if hasattr(mixer, "base_layer") or hasattr(mixer, "original_module"):
        return "a PEFT adapter wraps the convolution; leave it out of `target_modules` and `modules_to_save`"
    calls = _calls(type(mixer).forward)
    if scans := [name for name in _WITHOUT_STATES if name in calls]:
        return f"its scan `{scans[0]}` takes no state to start from"
    known = [name for name in _ON_TREE if name in calls]
    if "causal_conv1d_fn" not in known:
        return "it calls no function that could"
    if dropping := [name for name in known if not calls[name]]:
        return f"in this Transformers it does not hand `{dropping[0]}` the keyword arguments of the call"
    return None


@functools.cache
def _calls(forward: Callable) -> dict[str, bool]:
    """The functions that a module's forward calls by name, and whether with `**kwargs`."""
    try:
        source = inspect.getsource(inspect.unwrap(forward))
    except (OSError, TypeError):  # without a source file
        return {}
    spreads: dict[str, bool] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            spread = any(keyword.arg is None for keyword in node.keywords)
            spreads[node.func.id] = spreads.get(node.func.id, True) and spread
    return spreads


def _tree_aware(replaced: _Replaced, name: str, original: Callable) -> Callable:
    @functools.wraps(original, updated=())
    def function(*args: Any, prefix_tree: Any = None, **kwargs: Any) -> Any:
        if (context := TreeContext.at_layer(prefix_tree)) is not None:
            return _run(name, original, context, *args, **kwargs)
        # The compiler cannot read a context variable; the self-verification ran without it. Nobody uses a function
        # that somebody wrapped and kept: newer ones call it through theirs.
        if not torch.compiler.is_compiling() and replaced.users and active_tree() is not None:
            raise ValueError(
                f"`{name}` was called without the tree in a call that has one: this architecture drops the keyword "
                f"arguments of the call. {FALLBACK_HINT}"
            )
        return original(*args, **kwargs)

    return function


@torch.compiler.disable  # its shapes and its Python follow the tree
def _run(name: str, original: Callable, context: TreeContext, *args: Any, **kwargs: Any) -> Any:
    context.followed.add(name)
    return _ON_TREE[name](original, context, *args, **kwargs)
