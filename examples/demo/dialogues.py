# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""
Small tool-use dialogues of invented help desks, generated from a seed.

The dataset rows resemble real agent data: several trials of one task share the system message, the tools and the
first user message, and differ afterwards. Most assistant turns have reasoning, some have none; some call two tools at
once; most turns that call tools have no content. Nothing is copied from a dataset. Cost: linear in the number of
rows.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from .desks import DESKS, Desk

_NAMES = ["Ada Quill", "Bo Lindgren", "Carmen Oduya", "Dov Amsel", "Elif Tan", "Farid Noor", "Greta Vos", "Hana Ito"]
_DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"]
_YES = ["Yes, please.", "Yes, go ahead.", "That would be lovely, yes."]
_NO = ["No, leave it, thank you.", "I'd rather think about it first."]
_THANKS = ["Thank you, that's all.", "Great, thanks for your help!", "Perfect. Bye!"]
_BYE = ["You're welcome, {name}. See you on {day}!", "My pleasure. Have a good day.", "Any time. Goodbye!"]
_LEFT_OPEN = ["Of course, nothing is changed. Call again any time.", "No problem, I leave everything as it is."]

_THINK_ITEM = [
    "The customer wants {item} for {day}. I have to look up the stock before I say anything.",
    "Can {item} be had? I must not guess, so I look it up first.",
]
_THINK_BOTH = [
    "I need two facts: who {member} is, and whether {item} can be had. Neither waits for the other.",
    "Account {member} and the stock of {item}: two look-ups side by side.",
]
_THINK_MEMBER = ["Now the record of {member}, to be sure the account is in order.", "I should check {member} as well."]
_THINK_OFFER = [
    "{stock} in stock, at {place}, for {price}. The rules say that I ask before I act.",
    "It can be had. I must not act without a yes, so I ask.",
]
_THINK_SOLD_OUT = ["The stock is 0, so there is nothing to offer.", "None left. I say so plainly and promise nothing."]
_THINK_ACT = ["A clear yes. I act for {member}: {item}, {day}.", "Confirmed, so now the booking for {day}."]
_THINK_DONE = ["The tool answered ok. I confirm it in one line.", "It went through; a short confirmation is enough."]
_THINK_CLOSE = ["Nothing is left to do.", "They are done, so I close the talk kindly."]


class _Writer:
    """Writes one dialogue turn by turn into `messages`; every choice is drawn from `rng`."""

    def __init__(self, desk: Desk, rng: random.Random, facts: dict[str, str], messages: list[dict[str, Any]]) -> None:
        self.desk, self.rng, self.facts, self.messages = desk, rng, facts, messages

    def _phrase(self, templates: list[str]) -> str:
        return self.rng.choice(templates).format(**self.facts)

    def user(self, templates: list[str]) -> None:
        self.messages.append({"role": "user", "content": self._phrase(templates)})

    def _assistant(self, thoughts: list[str], content: str | None) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.rng.random() < 0.75:
            message["reasoning_content"] = self._phrase(thoughts)
        self.messages.append(message)
        return message

    def say(self, thoughts: list[str], templates: list[str]) -> None:
        self._assistant(thoughts, self._phrase(templates))

    def use_tools(self, thoughts: list[str], calls: list[dict[str, Any]], results: list[dict[str, Any]]) -> None:
        """One assistant turn that calls the tools (one in four says something first), then their answers."""
        message = self._assistant(thoughts, "One moment, please." if self.rng.random() < 0.25 else None)
        ids = [f"call_{self.rng.getrandbits(32):08x}" for _ in calls]
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": call} for call_id, call in zip(ids, calls, strict=True)
        ]
        for call_id, call, result in zip(ids, calls, results, strict=True):
            answer = {"role": "tool", "tool_call_id": call_id, "name": call["name"], "content": json.dumps(result)}
            self.messages.append(answer)

    def look_up(self, first_time: bool) -> bool:
        """Looks up the item, the first time also the member (in the same turn or the next). True if in stock."""
        stock = self.rng.choice([0, 1, 2, 5])
        price, place = f"{self.rng.randint(6, 30)} euros", self.rng.choice(self.desk.places)
        self.facts |= {"stock": str(stock), "price": price, "place": place}
        item_call = self.desk.call(1, self.facts["item"])
        item_result = {"stock": stock, "price": price, "place": place}
        member_call = self.desk.call(0, self.facts["member"])
        member_result = {"name": self.facts["name"], "open": self.rng.randint(0, 2), "status": "active"}
        if first_time and self.rng.random() < 0.5:
            self.use_tools(_THINK_BOTH, [member_call, item_call], [member_result, item_result])
            return stock > 0
        self.use_tools(_THINK_ITEM, [item_call], [item_result])
        if first_time:
            self.use_tools(_THINK_MEMBER, [member_call], [member_result])
        return stock > 0

    def serve(self, first_time: bool) -> None:
        """Answers a request for `facts["item"]`: look up, offer, wait for the answer, act."""
        if not self.look_up(first_time):
            self.say(_THINK_SOLD_OUT, self.desk.sold_out)
            return
        self.say(_THINK_OFFER, self.desk.offers)
        if self.rng.random() < 0.3:
            self.user(_NO)
            self.say(_THINK_CLOSE, _LEFT_OPEN)
            return
        self.user(_YES)
        booking = self.desk.call(2, self.facts["member"], self.facts["item"], self.facts["day"])
        self.use_tools(_THINK_ACT, [booking], [{"ok": True, "number": self.rng.randint(1000, 9999)}])
        self.say(_THINK_DONE, self.desk.done)


def generate_dialogues(num_groups: int, trials: int, seed: int = 0) -> list[dict[str, Any]]:
    """
    Generates `num_groups * trials` dialogues, ordered by group, then trial.

    Args:
        num_groups (`int`): Number of tasks: a desk, a customer and a first request.
        trials (`int`): Dialogues per task. They share the system message, the tools and the first user message.
        seed (`int`, *optional*, defaults to `0`): Equal seeds give equal rows.

    Returns:
        `list[dict]`: Rows `{"group", "trial", "messages", "tools"}`. `messages` are chat messages: an assistant
        message may have `reasoning_content` and `tool_calls` (`arguments` is a dict), and its `content` may be `None`.

    Example:

    ```python
    >>> rows = generate_dialogues(num_groups=2, trials=3, seed=0)
    >>> [(row["group"], row["trial"]) for row in rows[:4]]
    [('desk-0', 0), ('desk-0', 1), ('desk-0', 2), ('desk-1', 0)]
    >>> [message["role"] for message in rows[0]["messages"][:3]]
    ['system', 'user', 'assistant']

    ```
    """
    rows: list[dict[str, Any]] = []
    for group in range(num_groups):
        desk = DESKS[group % len(DESKS)]
        group_rng = random.Random(f"{seed}/{group}")
        facts = {
            "name": group_rng.choice(_NAMES),
            "member": f"{desk.id_letter}-{group_rng.randint(100, 999)}",
            "item": group_rng.choice(desk.items),
            "day": group_rng.choice(_DAYS),
        }
        opening = group_rng.choice(desk.openings).format(**facts)
        for trial in range(trials):
            messages = [{"role": "system", "content": desk.policy}, {"role": "user", "content": opening}]
            rng = random.Random(f"{seed}/{group}/{trial}")
            writer = _Writer(desk, rng, dict(facts), messages)
            writer.serve(first_time=True)
            for item in rng.sample([item for item in desk.items if item != facts["item"]], rng.randint(0, 2)):
                writer.facts["item"] = item
                writer.user(desk.follow_ups)
                writer.serve(first_time=False)
            writer.user(_THANKS)
            writer.say(_THINK_CLOSE, _BYE)
            rows.append({"group": f"desk-{group}", "trial": trial, "messages": messages, "tools": desk.tools})
    return rows


def as_json_strings(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with tool schemas and arguments as JSON strings, which Arrow stores without loss."""

    def of_message(message: dict[str, Any]) -> dict[str, Any]:
        if "tool_calls" not in message:
            return message
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    return [
        {**row, "messages": [of_message(m) for m in row["messages"]], "tools": json.dumps(row["tools"])}
        for row in rows
    ]


def dialogue_texts(dialogues: Iterable[dict[str, Any]]) -> Iterator[str]:
    """All texts of the dialogues that a chat template would render: the training corpus of a tokenizer."""
    for row in dialogues:
        yield from (json.dumps(tool) for tool in row["tools"])
        for message in row["messages"]:
            yield from (message[key] for key in ("content", "reasoning_content") if message.get(key))
            yield from (json.dumps(call["function"]) for call in message.get("tool_calls", ()))
