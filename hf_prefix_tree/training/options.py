# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The options of every trainer: honoured, refused or irrelevant. The checks, `docs/options.md` and the tests read it.

`OPTIONS` has one table for each config class, put together from the tables of `options.toml`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        if not isinstance(option, Refused):
            continue
        value = getattr(args, name)
        if value not in option.allowed:
            raise ValueError(
                f"`{name}={value!r}` is not supported: {option.remedy}. Leave it at "
                f"{' or '.join(map(repr, option.allowed))}."
            )
