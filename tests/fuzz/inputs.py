"""Inputs for the fuzz tests: valid rows of every kind, values that are wrong almost everywhere, and mutations.

`make test` draws the same few thousand inputs each time. `make fuzz` sets FUZZ to a factor and draws new ones.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

FACTOR = int(os.environ.get("FUZZ", "1"))


def inputs(count: int) -> settings:
    """Draw so many inputs, times the factor of `make fuzz`."""
    return settings(
        max_examples=count * FACTOR,
        derandomize=FACTOR == 1,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )


class Refused(Exception):
    """The package refused an input, with an error of its own."""


class Unspecified(Exception):
    """No promise is made about this input, but that it is served or refused."""


def outcome(call: Callable[[], Any], names: str = r"`[^`]+`") -> Any:
    """
    The result of a call. An error of the package becomes `Refused`: a `ValueError` that matches `names`, by default
    with some name in backticks. All other errors pass through and fail the test.
    """
    try:
        return call()
    except ValueError as error:
        is_own = type(error) is ValueError or type(error).__module__.startswith("hf_prefix_tree")
        if not is_own or not re.search(names, str(error)):
            raise
        raise Refused(str(error)) from error


def agree(call: Callable[[], Any], reference: Callable[[], Any], names: str = r"`[^`]+`") -> None:
    """The call returns what the reference does, or both refuse the input."""
    try:
        expected = reference()
    except (Refused, Unspecified) as error:
        expected = type(error)
    try:
        found = outcome(call, names)
    except Refused as error:
        assert expected in (Refused, Unspecified), f"refused a valid input: {error}"
    else:
        assert expected is not Refused, f"accepted: {found!r}"
        assert expected is Unspecified or found == expected


# --- Values. `ODD` is wrong almost everywhere, but not always: the reference decides.

IDS = st.integers(0, 5)
TEXT = st.text(st.sampled_from("ab \né😀"), max_size=4)
ODD = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            -1,
            2**63 - 1,
            2**63,
            2**64,
            0.0,
            1.0,
            3.9,
            -0.5,
            float("nan"),
            float("inf"),
            "",
            "1",
            "\ud83d",
            "{}",
            "[" * 5000,
            b"1",
            [],
            [1],
            [None],
            [[1], [2, 3]],
            [[]],
            ["0", "1"],
            {},
            {"a": 1},
            1j,
        ]
    ),
    st.integers(-2, 4),
    st.builds(object),
    st.builds(lambda: np.array([1, 0])),
    st.builds(lambda: np.array([0.5, 1.0], dtype=np.float32)),
    st.builds(lambda: np.array(1)),
    st.builds(lambda: torch.tensor([1, 1])),
    st.builds(lambda: torch.zeros(1, 2)),
    st.builds(lambda: Nested(2000)),
)


class Nested(list):
    """A list in a list in a list..."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        last: list[Any] = self
        for _ in range(depth):
            last.append([])
            last = last[0]

    def __repr__(self) -> str:
        return "Nested()"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("Nested()")


@st.composite
def mutated(draw: Any, rows: st.SearchStrategy[Any]) -> Any:
    """A row with up to two entries, at any depth, replaced, removed, doubled or renamed."""
    row = draw(rows)
    for _ in range(draw(st.integers(0, 2))):
        row = copy.copy(row)
        _mutate(draw, row)
    return row


def _mutate(draw: Any, value: Any) -> None:
    """Change an entry of a dict or list that is the caller's own copy."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = draw(st.sampled_from(keys))
    if isinstance(value[key], (dict, list)) and len(value[key]) and draw(st.integers(0, 2)):
        value[key] = copy.copy(value[key])
        _mutate(draw, value[key])
        return
    change = draw(st.sampled_from(("odd", "odd", "odd", "remove", "double", "array")))
    if change == "odd":
        value[key] = draw(ODD)
    elif change == "remove":
        del value[key]
    elif change == "double" and isinstance(value, list):
        value.insert(key, value[key])
    elif change == "array" and isinstance(value[key], list):
        value[key] = tuple(value[key])


# --- Rows of every kind that are right.


@st.composite
def supervised(draw: Any, weighted: bool = False) -> dict[str, Any]:
    """A row of `input_ids` with columns that say which tokens are supervised."""
    ids = draw(st.lists(IDS, min_size=1, max_size=5))
    mask = draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    row: dict[str, Any] = {"input_ids": ids}
    forms = {
        "loss_mask": mask,
        "labels": [token if m else -100 for token, m in zip(ids, mask, strict=True)],
        "completion_mask": [bool(m) for m in mask],
        "assistant_masks": [float(m) for m in mask],
    }
    names = draw(st.lists(st.sampled_from(sorted(forms)), min_size=0 if weighted else 1, max_size=3, unique=True))
    row |= {name: forms[name] for name in names}
    if weighted and draw(st.booleans()):
        row["weights"] = draw(st.lists(st.sampled_from([0, 0.5, 1, 2]), min_size=len(ids), max_size=len(ids)))
    if draw(st.booleans()):
        real = draw(st.integers(0, len(ids)))
        row["attention_mask"] = [int(at < real) for at in range(len(ids))]
    if draw(st.integers(0, 3)) == 0:
        row["seq_lengths"] = [len(ids)]
    if draw(st.integers(0, 3)) == 0:
        row["position_ids"] = list(range(len(ids)))
    return row


@st.composite
def branches(draw: Any) -> dict[str, Any]:
    return {"branches": [draw(_branch()) for _ in range(draw(st.integers(1, 3)))]}


@st.composite
def _branch(draw: Any) -> dict[str, Any]:
    ids = draw(st.lists(IDS, min_size=1, max_size=4))
    return {"input_ids": ids, "weights": [draw(st.sampled_from([0, 1, 0.25])) for _ in ids]}


ROLLOUTS = st.fixed_dictionaries(
    {
        "prompt_ids": st.lists(IDS, max_size=3),
        "completions": st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=3),
    }
)


def _parents(draw: Any, nodes: int) -> list[Any]:
    return [draw(st.one_of(st.none(), st.integers(-1, node - 1))) for node in range(nodes)]


@st.composite
def nodes(draw: Any) -> dict[str, Any]:
    count = draw(st.integers(1, 4))
    given = []
    for _ in range(count):
        node = draw(_branch())
        given.append(draw(st.sampled_from([node, {"input_ids": node["input_ids"]}, node["input_ids"]])))
    return {"parents": _parents(draw, count), "nodes": given}


@st.composite
def texts(draw: Any) -> dict[str, Any]:
    count = draw(st.integers(1, 4))
    row = {"parents": _parents(draw, count), "texts": [draw(TEXT) for _ in range(count)]}
    if draw(st.booleans()):
        row["weights"] = [draw(st.sampled_from([0, 1, 0.5])) for _ in range(count)]
    return row


@st.composite
def searches(draw: Any) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"step": 0, "text": draw(TEXT), "kept": draw(st.booleans())}]
    for _ in range(draw(st.integers(0, 5))):
        before = draw(st.sampled_from(steps))
        text = before["text"] + draw(TEXT) if draw(st.integers(0, 3)) else draw(TEXT)
        number = before["step"] + 1 if text.startswith(before["text"]) and draw(st.booleans()) else before["step"]
        number = number if text.startswith(before["text"]) else 0
        steps.append({"step": number, "text": text, "kept": draw(st.booleans())})
    return {"input": draw(TEXT), "nodes": steps}


@st.composite
def messages(draw: Any, first: int = 1) -> list[dict[str, Any]]:
    chat = [{"role": draw(st.sampled_from(("system", "user"))), "content": draw(TEXT)} for _ in range(first)]
    for _ in range(draw(st.integers(1, 2))):
        chat += [{"role": "user", "content": draw(TEXT)}] if draw(st.booleans()) else []
        chat += [{"role": "assistant", "content": draw(TEXT)}]
        chat += [{"role": "tool", "content": draw(TEXT)}] if draw(st.booleans()) else []
    return chat


CONVERSATIONS = st.fixed_dictionaries({"messages": messages()})


@st.composite
def completions(draw: Any) -> dict[str, Any]:
    as_text = draw(st.booleans())
    prompt = draw(TEXT) if as_text else draw(messages())
    texts = [draw(TEXT) if as_text else draw(messages(first=0)) for _ in range(draw(st.integers(1, 3)))]
    return (
        {"prompt": prompt, "completion": texts[0]} if draw(st.booleans()) else {"prompt": prompt, "completions": texts}
    )


# By the names of `ROW_KINDS`; both forms of completions are drawn in one.
ROWS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "tokens": supervised(weighted=True),
    "branches": branches(),
    "rollouts": ROLLOUTS,
    "nodes": nodes(),
    "texts": texts(),
    "search": searches(),
    "conversation": CONVERSATIONS,
    "completions": completions(),
}


# --- Chat data as it comes: every format, with tools, reasoning and switches.

_VALUES = st.one_of(TEXT, st.sampled_from([0, 1, True, None, "<think>a</think>b", "<think>a", "<tool_call>\n{}"]))
_CALLS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT, "arguments": _VALUES})}),
        st.fixed_dictionaries({"name": TEXT, "arguments": st.dictionaries(TEXT, _VALUES, max_size=2)}),
        st.just({"function": "f"}),
        st.just('{"name": "f", "arguments": {}}'),
    ),
    max_size=2,
)
_BLOCKS = st.lists(
    st.one_of(
        st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}),
        st.fixed_dictionaries({"type": st.just("thinking"), "thinking": TEXT}),
        st.fixed_dictionaries({"type": st.just("tool_use"), "name": TEXT, "input": st.just({"a": 1})}),
        st.fixed_dictionaries({"type": st.just("tool_result"), "content": TEXT}),
        TEXT,
    ),
    max_size=2,
)
_HERMES = st.sampled_from(
    [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "a<tool_call>{'name': 'f', 'arguments': {}}</tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_response>\n1\n</tool_response>",
        '{"name": "f", "arguments": {}}',
    ]
)
_ROLES = st.sampled_from(["assistant"] * 3 + ["user", "system", "tool", "function_call", "observation", "function"])
_MESSAGE = st.fixed_dictionaries(
    {"role": _ROLES, "content": st.one_of(TEXT, _BLOCKS, _HERMES, st.none())},
    optional={
        "reasoning_content": TEXT,
        "thinking": TEXT,
        "tool_calls": _CALLS,
        "function_call": st.just({"name": "f", "arguments": "{}"}),
        "weight": st.sampled_from([0, 1, 2, "1"]),
        "train_reasoning": st.booleans(),
    },
)
_SHAREGPT = st.fixed_dictionaries(
    {"from": st.sampled_from(["human", "gpt", "system", "function_call", "observation", "x"]), "value": _HERMES | TEXT}
)
_TALK = st.one_of(*(st.lists(of, min_size=1, max_size=4) for of in (_MESSAGE, _SHAREGPT)))
_TOOLS = st.one_of(
    st.sampled_from(["", "[]", "{}", "[" * 3000, '[{"name": "f"}]']),
    st.lists(st.sampled_from([{"name": "f", "input_schema": {}}, {"type": "function", "function": {}}, "x", 1])),
)
_EXTRA = {
    "tools": _TOOLS,
    "system": TEXT,
    "chat_template_kwargs": st.sampled_from(["{}", {}, {"enable_thinking": True}, {"chat_template": "{{ 1 }}"}, 1]),
    "train_response": st.booleans(),
}
CHATS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "conversation": st.fixed_dictionaries({"messages": _TALK}, optional=_EXTRA),
    "conversations": st.fixed_dictionaries({"conversations": _TALK}, optional=_EXTRA),
    "completion": st.fixed_dictionaries({"prompt": _TALK | TEXT, "completion": _TALK | TEXT}, optional=_EXTRA),
    "preference": st.fixed_dictionaries(
        {"chosen": _TALK | TEXT, "rejected": _TALK | TEXT}, optional={"prompt": _TALK | TEXT, **_EXTRA}
    ),
    "alpaca": st.fixed_dictionaries(
        {"instruction": TEXT, "output": TEXT}, optional={"input": TEXT, "history": st.just([["a", "b"]]), **_EXTRA}
    ),
    "text": st.fixed_dictionaries({"text": TEXT}),
}
