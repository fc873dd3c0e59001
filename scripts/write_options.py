# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Writes `docs/options.md` from the table of options. Run it after changing the table."""

from collections import defaultdict
from pathlib import Path

from hf_prefix_tree.training.options import OPTIONS, Honoured, Option, Refused

PAGE = Path(__file__).resolve().parent.parent / "docs" / "options.md"
TRAINERS = {
    "TrainingArguments": "`TrainingArguments` with `TreeLossMixin`",
    "SFTConfig": "`SFTConfig` with `TreeLossMixin` before `SFTTrainer`",
    "TreeSFTConfig": "`TreeSFTTrainer`",
    "GRPOConfig": "`TreeGRPOTrainer`",
    "RLOOConfig": "`TreeRLOOTrainer`",
    "DPOConfig": "`TreeDPOTrainer`",
    "KTOConfig": "`TreeKTOTrainer`",
    "DiffusionSFTConfig": "`DiffusionSFTTrainer`",
    "Eagle3Config": "`Eagle3Trainer`",
}
START = """# Options

<!-- Written by scripts/write_options.py. -->

Every option of every trainer is classified: honoured (it does what its documentation says, and a test in `tests/`
compares the numbers), refused (values other than those listed raise `ValueError`), or irrelevant to folding. A test
compares these tables with the fields of the installed TRL and Transformers.

For a plain `Trainer` on a model of `prepare_model`, the options of `TrainingArguments` act as below, with two
differences: nothing checks them before the first call of the model, and the loss of a step is the mean of its
micro-batches, whatever the value of `average_tokens_across_devices`.
"""


def page() -> str:
    """The text of the page."""
    first, *rest = OPTIONS.values()
    everywhere = {name: option for name, option in first.items() if all(table.get(name) == option for table in rest)}
    parts = [START, "## All trainers", _table(everywhere)]
    for config, trainer in TRAINERS.items():
        specific = {name: option for name, option in OPTIONS[config].items() if everywhere.get(name) != option}
        parts += [f"## {trainer}", _table(specific)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _table(options: dict[str, Option]) -> str:
    names = defaultdict(list)
    for name, option in options.items():
        names[_classification(option)].append(f"`{name}`")
    rows = [f"| {', '.join(names[text])} | {text} |" for text in sorted(names, key=lambda text: text[:3])]
    return "\n".join(["| options | |", "|---|---|", *rows])


def _classification(option: Option) -> str:
    if isinstance(option, Refused):
        return f"**refused** except {', '.join(f'`{value!r}`' for value in option.allowed)}: {option.remedy}"
    if isinstance(option, Honoured):
        return f"honoured: `{option.test}`"
    return f"irrelevant: {option.reason}"


if __name__ == "__main__":
    PAGE.write_text(page())
