# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which code a model runs: a fingerprint that tells whether something was patched since the model was checked.

[`CodeWatch.unchanged`] compares lists of references, in about 10 microseconds for 400 modules, so that every call can
afford it. Only after a difference is the key built, which leaves out what does not change the numbers: the wrappers of
the libraries that trainers put around a model (mixed precision, FSDP, checkpointing, offloading).

A training call looks at the leaves (modules without children) in eight turns: which ones they are, their classes and
forwards. Everything else is looked at in each call, and so are the leaves outside training, in `prepare_model` and at
each step of this package's trainers.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import gc
import itertools
import operator
import types
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_prefix_tree.modeling.attention.implementations import IMPLEMENTATION
from hf_prefix_tree.modeling.attention.interface import prefix_tree_attention, prefix_tree_mask

# Packages whose modules keep tokens apart, or mix them as the conformance table has it. Other code is tested.
_KNOWN = {
    *("torch", "transformers", "peft", "trl", "accelerate", "deepspeed", "bitsandbytes", "torchao"),
    *("hf_prefix_tree", "builtins", "functools"),
}
# Fields of a config that change no number of a call with a tree; trainers toggle some of them.
_IRRELEVANT_FIELDS = {
    *("use_cache", "return_dict", "output_hidden_states", "output_attentions", "dtype", "torch_dtype"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "architectures", "id2label", "label2id", "problem_type"),
}
_SWITCHES = (bool, int, float, str)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # of a module
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)  # of all modules
# Training calls look at the leaves in turns, at so many modules at least: hardly any change.
_SHARE, _TURNS = 48, 8
_get, _config, _code = dict.get, repeat("config"), operator.attrgetter("forward", "__call__")
# Functions and methods that a hook may call and still change nothing, of tensors, containers and loggers.
_LOOKS = {
    *("abs", "all", "amax", "any", "append", "clone", "cpu", "debug", "detach", "dim", "double", "extend", "float"),
    *("get", "id", "info", "int", "is_grad_enabled", "isfinite", "isinstance", "isnan", "item", "items", "len", "max"),
    *("mean", "memory_allocated", "min", "norm", "numel", "perf_counter", "print", "size", "square", "std", "str"),
    *("sum", "time", "tolist", "type"),
}


class CodeWatch:
    """
    The code that a model's calls run: forwards of modules and of their classes, hooks, functions of the modeling
    files, adapters and the config.

    Args:
        model (`PreTrainedModel`): A causal LM.

    Attributes:
        key (`tuple`): Equal for equal code; hashable.
        kept (`list`): The objects whose ids the key holds. While they live, the key means what it says.
        embeddings (`torch.nn.Module`): The input embeddings.
        unknown (`list[str]`): The functions that come from none of the known packages, by name.

    Raises:
        `ValueError`: where something else was registered under our name for attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        attention, mask = ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION], ALL_MASK_ATTENTION_FUNCTIONS[IMPLEMENTATION]
        if attention is not prefix_tree_attention or mask is not prefix_tree_mask:
            raise ValueError(
                f"Something else was registered as attention implementation {IMPLEMENTATION!r}: give it another name."
            )
        modules = dict(model.named_modules())
        everything = list(modules.values())
        self._all = _ModulesWatch(everything)
        parents = [module for module in everything if module._modules]
        size = max(_SHARE, -(-len(everything) // _TURNS))
        shares = [everything[start : start + size] for start in range(0, len(everything), size)]
        self._turns = itertools.cycle([_ModulesWatch(share, parents) for share in shares])
        self._hooks = [getattr(module, name) for module in everything for name in _HOOKS]
        self._hooks += [getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS]
        self._classes: list[Any] = list(dict.fromkeys(map(type, everything)))
        functions, methods = _functions_called(self._classes)
        self._helpers = [(c, name) for c in self._classes for name in methods[c][2:]]
        functions.append((vars(torch.nn.functional), "scaled_dot_product_attention"))  # of every file, ours included
        functions += [(vars(module), name) for module in everything for name in methods[type(module)][2:]]
        forwards = [(m, forward) for m in everything for forward in (vars(m).get("forward"), type(m).forward)]
        unknown = [m for m, forward in forwards if any(_package(f) not in _KNOWN for f in _functions_of(forward))]
        self._switches = [
            (vars(m), name) for m in dict.fromkeys([*unknown, model]) for name in _switches_of(m, m in unknown)
        ]
        tables = [*{id(config): vars(config) for config in self._all.configs}.values()]
        self._tables = [*tables, *map(vars, unknown)]
        fields = [(x, name) for x in tables for name in x if name[0] != "_" and name not in _IRRELEVANT_FIELDS]
        fields += [(vars(module), "rope_type") for module in everything if "rope_type" in vars(module)]
        fields += [(vars(m), "_active_adapter") for m in everything if hasattr(m, "adapter_layer_names")]
        self._nested = [table[name] for table, name in fields if isinstance(table.get(name), dict | list)]
        self._known_nested = copy.deepcopy(self._nested)
        self._owners, self._names = zip(*functions, *fields, strict=True)
        self._references, self._hook_functions = self._look(), self._look_at_hooks()
        self._remember_hooks()
        self._registered, self.embeddings = RemovableHandle.next_id, model.get_input_embeddings()
        self._weights = [module._parameters for module in everything if module._parameters]
        self.kept: list[Any] = []
        self.unknown: list[str] = []
        self.key = self._make_key(model, modules, methods, len(functions))

    def unchanged(self, in_turns: bool = False) -> bool:
        """
        Whether the model still runs the same code, as far as references tell.

        Args:
            in_turns (`bool`, *optional*, defaults to `False`): Whether to look at an eighth of the leaves only, at the
                next one in each call.
        """
        if self._nested != self._known_nested or self._look() != self._references:
            return False
        if (next(self._turns) if in_turns else self._all).changed():
            return False
        # the counter grows with every hook that is registered, anywhere, of a tensor for example
        if RemovableHandle.next_id != self._registered or gc.get_referents(*self._hooked) != self._hooks_seen:
            if gc.get_referents(*filter(None, self._hooks)) != self._hooks_seen:  # an empty dict may have attributes
                if self._look_at_hooks() != self._hook_functions:
                    return False
                self._remember_hooks()
            self._registered = RemovableHandle.next_id
        return True

    def _remember_hooks(self) -> None:
        self._hooked = [*filter(None, self._hooks)]
        self._hooks_seen = gc.get_referents(*self._hooked)  # their ids and functions

    @property
    def device_type(self) -> str:
        """The device of the weights, as `model.device` finds it in more time."""
        # by module: `.to()` may replace a parameter, pruning and parametrization take it away
        return next(x for table in self._weights for x in table.values() if x is not None).device.type

    def _look(self) -> list[Any]:
        return [
            *map(_get, self._owners, self._names),
            *map(_code, self._classes),
            *[getattr(c, name, None) for c, name in self._helpers],
            *map(len, self._tables),
            *[_switch(owner.get(name)) for owner, name in self._switches],
            ALL_ATTENTION_FUNCTIONS[IMPLEMENTATION],
            ALL_MASK_ATTENTION_FUNCTIONS[IMPLEMENTATION],
        ]

    def _look_at_hooks(self) -> list[tuple[int, Any, list[Any]]]:
        """
        The code of unknown hooks that may change numbers, by place, and what it was made with: hooks are often made
        anew for each step, from the same code. Those that only look (counters, profilers) cost no check, which would
        go through them.
        """
        functions_of_hooks = []
        for place, hooks in enumerate(self._hooks):
            functions = [function for hook in hooks.values() for function in _functions_of(hook)] if hooks else []
            functions_of_hooks += [
                (place, getattr(f, "__code__", f), _made_with(f)) for f in functions if not _only_looks(f)
            ]
        return functions_of_hooks

    def _make_key(self, model: PreTrainedModel, modules: dict[str, Any], methods: dict, functions: int) -> tuple:
        parts: list[Any] = []
        of_class = {c: [self._ids(getattr(c, name), True) for name in names] for c, names in methods.items()}
        for name, module in modules.items():
            parts += [name, *of_class[type(module)], self._ids(vars(module).get("forward"))]
        parts += [(name, _switch(owner.get(name))) for owner, name in self._switches]
        ids = [*map(id, self._all.configs)]
        parts += map(ids.index, ids)  # which modules share one
        for place, (name, value) in enumerate(zip(self._names, self._references, strict=False)):
            parts.append((name, self._ids(value, True) if place < functions else repr(value)))
        parts += [(place, self._ids(code), repr(given)) for place, code, given in self._hook_functions]
        parts += [(name, repr(config)) for name, config in getattr(model, "peft_config", {}).items()]
        return tuple(part for part in parts if part != ())

    def _ids(self, code: Any, known: bool = False) -> tuple[int, ...]:
        """Identifies the functions of `code`; those of known packages only if asked."""
        # FSDP makes classes whose forward Transformers wraps once more: of known wrappers, the wrapped function counts
        functions = [
            f for f in _functions_of(code) if _package(f) not in _KNOWN or (known and not hasattr(f, "__wrapped__"))
        ]
        self.kept += functions
        self.unknown += [_name(function) for function in functions if _package(function) not in _KNOWN]
        return tuple(map(id, functions))


class _ModulesWatch:
    """
    Modules, with their classes, patched forwards, configs and children.

    Args:
        modules (`list[torch.nn.Module]`): The modules.
        parents (`list[torch.nn.Module]`, *optional*): More modules, of which only those children are looked at that
            have children, and no configs.
    """

    def __init__(self, modules: list[torch.nn.Module], parents: list[torch.nn.Module] | None = None) -> None:
        self.modules = [*dict.fromkeys([*(parents or ()), *modules])]
        self._attributes = [*map(vars, self.modules)]
        self._configured = [x for x in map(vars, modules) if "config" in x]
        self.configs = [x["config"] for x in self._configured]
        branching = [m for m in parents or () if any(getattr(x, "_modules", None) for x in m._modules.values())]
        self._children = tuple(m._modules for m in dict.fromkeys([*branching, *modules]) if m._modules)
        self._classes, self._forwards = [*map(type, self.modules)], self._look_at_forwards()
        self._known_children = gc.get_referents(*self._children)  # in order; faster than to compare dicts

    def _look_at_forwards(self) -> list[tuple[int, Any]]:
        return [(id(attributes), attributes["forward"]) for attributes in self._attributes if "forward" in attributes]

    def changed(self) -> bool:
        return (
            [*map(type, self.modules)] != self._classes
            or self._look_at_forwards() != self._forwards
            or gc.get_referents(*self._children) != self._known_children
            or any(map(operator.is_not, map(_get, self._configured, _config), self.configs))
        )


def _functions_of(code: Any) -> Iterator[Any]:
    """The function that a callable binds, and the ones that this wraps."""
    pending, seen = [code], set()
    while pending:
        code = pending.pop()
        if code is None or id(code) in seen:
            continue
        seen.add(id(code))
        if isinstance(code, types.MethodType):
            pending.append(code.__func__)
        elif isinstance(code, functools.partial):
            pending += [code.func, *(x for x in code.args if isinstance(x, types.FunctionType | types.MethodType))]
        elif not isinstance(code, torch.nn.Module):
            yield code
        pending.append(getattr(code, "__wrapped__", None))


def _package(function: Any) -> str:
    if isinstance(function, types.CodeType):
        return ""
    # `functools.wraps` copies `__module__`, but not the globals; code made by `exec` may have no name there
    if isinstance(function, types.FunctionType):
        return function.__globals__.get("__name__", "").split(".")[0]
    name = getattr(function, "__module__", None)
    return (name or type(function).__module__).split(".")[0]


def _made_with(hook: Any) -> list[Any]:
    """The numbers, texts and functions in the closure and in the defaults of a hook; others are new in each step."""
    values = [*(getattr(hook, "__defaults__", None) or ()), *(getattr(hook, "__kwdefaults__", None) or {}).values()]
    for cell in getattr(hook, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            values.append(cell.cell_contents)
    values = [getattr(value, "__code__", value) for value in values]
    return [value for value in values if isinstance(value, types.CodeType | int | float | str)]


def _only_looks(hook: Any) -> bool:
    """Whether a hook is known, or returns nothing and writes into no tensor, as far as its instructions tell."""
    if _package(hook) in _KNOWN:
        return True
    function = hook if hasattr(hook, "__code__") else type(hook).__call__
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    steps = list(dis.get_instructions(code))
    pairs = list(itertools.pairwise(steps))
    nulls = [after for step, after in pairs if (step.opname, after.opname) == ("LOAD_ATTR", "PUSH_NULL")]
    # what is called is looked up together with a null, or as a method; Python 3.13 has the null of `torch.f` behind it
    called = [x for x, after in pairs if x.opname == "LOAD_METHOD" or "NULL" in x.argrepr or after in nulls]
    steps = [step for step in steps if step not in nulls]
    files = [x for x in called if isinstance(function.__globals__.get(x.argval), types.ModuleType)]  # `torch`
    called = [steps[steps.index(step) + 1] if step in files else step for step in called]
    names = [step.argval for step in called]
    operations = {step.opname for step in steps}
    if not _LOOKS.issuperset(names) or operations & {"PUSH_NULL", "CALL_FUNCTION_EX", "MAKE_FUNCTION", "STORE_SUBSCR"}:
        return False
    if any(step.opname == "LOAD_GLOBAL" and step.argval in function.__globals__ for step in called):  # no builtin
        return False
    if any(isinstance(constant, tuple) and "out" in constant for constant in code.co_consts):  # names of arguments
        return False
    # `lambda ...: seen.append(...)` returns nothing
    appends = names[:1] == ["append"] and steps[-2].opname.startswith("CALL") and steps[-1].opname == "RETURN_VALUE"
    if appends and not any("JUMP" in name for name in operations):
        return True
    for last, step in itertools.pairwise(steps):
        returns = step.opname == "RETURN_VALUE" and (last.opname != "LOAD_CONST" or last.argval is not None)
        # `x += y` on a variable may be in place; on its attributes, it counts something
        writes = step.opname.startswith(("STORE_FAST", "STORE_DEREF")) and last.argrepr.endswith("=")
        writes |= step.opname == "STORE_ATTR" and (code.co_varnames[0] != "self" or hasattr(torch.Tensor, step.argval))
        if returns or writes or (step.opname == "RETURN_CONST" and step.argval is not None):
            return False
    return True


def _name(function: Any) -> str:
    if isinstance(function, types.CodeType):
        return f"the hook `{function.co_qualname}`"
    return f"`{getattr(function, '__qualname__', type(function).__qualname__)}`"


def _functions_called(classes: list[Any]) -> tuple[list[tuple[dict[str, Any], str]], dict[Any, list[str]]]:
    """The functions of their files that the forwards of classes call, directly or not, and the methods by class."""
    functions: dict[tuple[int, str], tuple[dict[str, Any], str]] = {}
    methods = {c: ["forward", "__call__"] for c in classes}
    pending = [(c, function) for c in classes for function in _functions_of(c.forward)]
    while pending:
        c, function = pending.pop()
        file = getattr(function, "__globals__", None)
        if file is None or _package(function) == "torch":
            continue
        for name in sorted(_names_in(function.__code__)):
            value, method = file.get(name), getattr(c, name, None)
            if isinstance(value, types.FunctionType) and (id(file), name) not in functions:
                functions[id(file), name] = (file, name)
                if value.__globals__ is file:
                    pending.append((c, value))
            if isinstance(method, types.FunctionType) and name not in {*methods[c], *vars(torch.nn.Module)}:
                methods[c].append(name)
                pending += [(c, f) for f in _functions_of(method)]
    return list(functions.values()), methods


def _names_in(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)))


def _switches_of(module: torch.nn.Module, is_unknown: bool) -> list[str]:
    """Attributes that may switch something on: numbers, texts, functions; of known code, what its forward reads."""
    kinds = (*_SWITCHES, types.NoneType, types.FunctionType) if is_unknown else _SWITCHES
    present = {name for name, value in vars(module).items() if type(value) in kinds}
    functions = [function for function in _functions_of(type(module).forward) if hasattr(function, "__code__")]
    read = present if is_unknown else set().union(*(_names_in(function.__code__) for function in functions))
    return sorted(present & read - {"training", "accepts_loss_kwargs"})


def _switch(value: Any) -> Any:
    """Numbers count as on or off: some change in every step."""
    kind = type(value)
    if kind is types.FunctionType:
        return value.__code__
    return value if kind is str else bool(value) if kind in _SWITCHES else None
