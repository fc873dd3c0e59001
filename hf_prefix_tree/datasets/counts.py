# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What was read, and what was lost on the way: counted per tree, summed, logged."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from datasets import List, Value

logger = logging.getLogger(__name__)

# What is counted as lost, and how the log says it.
LOSSES = {
    "truncated": "branches truncated to `max_length`",
    "overlong": "branches dropped as longer than `max_length`",
    "unsupervised": "branches dropped that have no supervised token",
    "prefix_mismatches": "turns whose prompt is no token prefix of their rendering, supervised from where they differ",
    "unrendered_reasoning": "turns whose reasoning the chat template leaves out",
    "filled": "rows whose tool schemas or arguments are Arrow structs, which lose nulls and the order of their keys "
    "(store them as JSON strings, or build the dataset with `on_mixed_types='use_json'`)",
    "skipped": "rows skipped",
    "empty": "trees left out because no branch remained",
}
COUNTS = ("rows", "branches", *LOSSES)
FEATURES = {**dict.fromkeys(COUNTS, Value("int32")), "errors": List(Value("string"))}


class Report:
    """The sum of the counts of many trees."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._errors: list[str] = []

    def add(self, counts: dict[str, Any]) -> None:
        """Add what one tree's rows counted: a value of `FEATURES`."""
        self._counts.update({name: counts[name] for name in COUNTS})
        self._errors += counts["errors"]

    def losses(self) -> str:
        """What was lost, with the first few errors; empty if nothing was."""
        losses = [f"{self._counts[name]} {what}" for name, what in LOSSES.items() if self._counts[name]]
        errors = [error.rstrip(".") for error in self._errors[:3]]
        return "; ".join([*losses, *errors, *(["..."] if len(self._errors) > 3 else [])])

    def __str__(self) -> str:
        return f"{self._counts['rows']} rows: {self._counts['branches']} branches"

    def log(self) -> None:
        """Log the sum: a warning if something was lost."""
        if losses := self.losses():
            logger.warning("Prepared %s. Not all is trained on as it was: %s.", self, losses)
        else:
            logger.info("Prepared %s.", self)
