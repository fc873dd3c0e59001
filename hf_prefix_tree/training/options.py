# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The options of every trainer: honoured, refused or irrelevant. The checks, `docs/options.md` and the tests read it.

`OPTIONS` has one table for each config class, put together from the tables of `options.toml`. [`Parser`] reads options
from a command line.
"""

from __future__ import annotations

import ast
import reprlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from json import JSONDecodeError
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from trl import TrlParser
from yaml import YAMLError

from hf_prefix_tree.tree.folding import check_choice

# Lowest and highest, as in requirements-lowest.txt and requirements-dev.txt. Trainers warn of newer ones.
TESTED = {"transformers": ("5.17.0", "5.24.0"), "trl": ("1.16.0", "1.16.0"), "peft": ("0.21.0", "0.21.2")}


@dataclass(frozen=True)
class Honoured:
    """Works as documented, which the test shows (`file::function` in `tests/`)."""

    test: str


@dataclass(frozen=True)
class Refused:
    """Only the allowed values pass, the default first; the remedy says why others do not, or what to do instead."""

    remedy: str
    allowed: tuple[Any, ...]


@dataclass(frozen=True)
class Irrelevant:
    """Folding changes nothing about it, or it has no effect, for this reason."""

    reason: str


Option = Honoured | Refused | Irrelevant


def _option(text: str) -> Option:
    if text.startswith("("):
        values, remedy = text.split(") ", 1)
        return Refused(remedy, ast.literal_eval(values + ")"))
    return Honoured(text) if "::" in text else Irrelevant(text)


def _merged(*names: str) -> dict[str, Option]:
    """The options of some tables by name; later tables override earlier ones."""
    entries = [entry for name in names for entry in _TABLES[name].items()]
    return {option: _option(text) for text, options in entries for option in options.split()}


_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
# By the name of the config class. `TrainingArguments` and `SFTConfig` are those of a trainer under `TreeLossMixin`.
OPTIONS: dict[str, dict[str, Option]] = {
    "TrainingArguments": _merged("trainer", "tree_loss"),
    "SFTConfig": _merged("trainer", "tree_loss", "sft", "sft_trees"),
    "TreeSFTConfig": _merged("trainer", "tree_loss", "sft", "sft_trees", "tree_sft"),
    "GRPOConfig": _merged("trainer", "folded", "policy", "grpo"),
    "RLOOConfig": _merged("trainer", "folded", "policy", "rloo"),
    "DPOConfig": _merged("trainer", "folded", "preference", "dpo"),
    "KTOConfig": _merged("trainer", "folded", "preference", "kto"),
    "DiffusionSFTConfig": _merged("trainer", "sft", "diffusion"),
    "Eagle3Config": _merged("trainer", "eagle3"),
}


def option_field(default: Any, text: str, choices: Sequence[str] = ()) -> Any:
    """The field of an option of ours; `HfArgumentParser` shows the text and the choices."""
    return field(default=default, metadata={"help": text} | ({"choices": [*choices]} if choices else {}))


def refuse_options(args: Any) -> None:
    """
    Refuses options that a trainer does not serve.

    Args:
        args (`TrainingArguments`): Of a class of [`OPTIONS`], or of one that derives from it.

    Raises:
        `ValueError`: Names the option, its value and the remedy.
    """
    table = next(OPTIONS[parent.__name__] for parent in type(args).__mro__ if parent.__name__ in OPTIONS)
    for name, option in table.items():
        if isinstance(option, Refused) and (value := getattr(args, name)) not in option.allowed:
            raise ValueError(
                f"`{name}={value!r}` is not supported: {option.remedy}. Leave it at "
                f"{' or '.join(map(repr, option.allowed))}."
            )


def check_types(config: Any) -> None:
    """
    Raises `ValueError` where a field that a class of this package declares has a value of another type, or none of its
    `choices`.
    """
    for kind in type(config).__mro__:
        if kind.__module__.startswith("hf_prefix_tree.") and kind.__annotations__:
            hints = get_type_hints(kind)
            for name, text in kind.__annotations__.items():
                value, choices = getattr(config, name), config.__dataclass_fields__[name].metadata.get("choices")
                if not _is_of_type(value, hints[name]):
                    expected = "a `dict` or a JSON object" if "dict" in text else f"`{text}`"
                    raise ValueError(f"`{name}` must be {expected}, got {reprlib.repr(value)}.")
                if choices and value is not None:
                    check_choice(value, name, choices)


def _is_of_type(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type. Transformers has parsed JSON, so that no string stands for a `dict`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is UnionType:
        has_dict = any(get_origin(part) is dict for part in parts)
        return any(_is_of_type(value, part) for part in parts if not (has_dict and part is str))
    if origin is list:
        return isinstance(value, list) and all(_is_of_type(item, parts[0]) for item in value)
    if origin is dict:
        items = value.items() if isinstance(value, dict) else [(None, None)]
        return all(_is_of_type(key, parts[0]) and _is_of_type(item, parts[1]) for key, item in items)
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    return hint is Any or isinstance(value, hint)


# What a YAML file may hold for options of a type, besides text, which is parsed as on the command line.
_YAML_TYPES: dict[Any, Any] = {int: int, float: int | float, str: dict | list}


class Parser(TrlParser):
    """TRL's parser; errors are a `ValueError` without the usage of all options, and a file's values are checked."""

    def parse_args_and_config(self, args: Any = None, *rest: Any, **kwargs: Any) -> Any:
        if [*(args or ())][-1:] == ["--config"]:
            self.error("`--config` has no file")
        try:
            return super().parse_args_and_config(args, *rest, **kwargs)
        except (OSError, UnicodeDecodeError, YAMLError) as error:
            raise ValueError(f"the file of `--config` can't be read: {error}.") from error
        except JSONDecodeError as error:  # Transformers reads options that are dicts, and names none
            words = [word for argument in args or () for word in argument.split("=", 1)]
            name = next((name for name, value in pairwise(words) if value == error.doc), "--config")
            raise ValueError(f"`{name}` has {error.doc!r}, which is no JSON: {error}.") from error

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message.rstrip('.')}; `{self.prog} --help` lists all options.")

    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        namespace, unknown = super().parse_known_args(*args, **kwargs)
        return (namespace, []) if not unknown else self.error(f"unknown options: {' '.join(unknown)}")

    def set_defaults_with_config(self, **values: Any) -> list[str]:
        if unknown := super().set_defaults_with_config(**values):
            self.error(f"unknown options in the file of `--config`: {' '.join(unknown)}")
        for option in self._actions:
            value, allowed = values.get(option.dest), _YAML_TYPES.get(option.type)
            if allowed is not None and option.nargs is None and not isinstance(value, allowed | str | None):
                self.error(f"`{option.dest}` is {value!r} in the file of `--config`, which does not fit")
        return []
