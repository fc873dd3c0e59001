# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Three invented help desks: policies, tools, items and phrases. Data only; `dialogues` turns it into dialogues."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Desk:
    """
    One help desk. Templates may use `{name}`, `{member}`, `{item}`, `{place}`, `{stock}`, `{price}` and `{day}`.

    Args:
        id_letter (`str`): First letter of a member's id.
        policy (`str`): The system message.
        tools (`list[dict]`): Three JSON schemas: look up a member (by id), look up an item (by name), act on it (id,
            name, day).
        places (`list[str]`): Where an item may stand.
        items (`list[str]`): The items that people ask for.
        openings (`list[str]`): A customer's first message.
        follow_ups (`list[str]`): A later question about another item.
        offers (`list[str]`): The desk asks for a yes before it acts.
        done (`list[str]`): The action is carried out.
        sold_out (`list[str]`): The item can't be had.
    """

    id_letter: str
    policy: str
    tools: list[dict[str, Any]]
    places: list[str]
    items: list[str]
    openings: list[str]
    follow_ups: list[str]
    offers: list[str]
    done: list[str]
    sold_out: list[str]

    def call(self, tool: int, *values: str) -> dict[str, Any]:
        """The call of one of the three tools, its values in the order of the schema."""
        function = self.tools[tool]["function"]
        keys = function["parameters"]["required"]
        return {"name": function["name"], "arguments": dict(zip(keys, values, strict=True))}


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_RULES = (
    "Rules:\n"
    "- Look facts up with the tools. Never guess a stock number, a price or a place.\n"
    "- Before you change anything, say what you are about to do and wait for a yes.\n"
    "- One customer at a time: act only for the member who is talking to you.\n"
    "- Two look-ups that don't depend on each other may run side by side.\n"
    "- Keep answers short and friendly."
)

BOOKS = Desk(
    id_letter="L",
    policy=(
        "You work at the counter of Millbrook Second-Hand Books. Customers reserve a book here, collect it on the day "
        "they name and pay then. Whoever has three open reservations collects one before making another.\n\n" + _RULES
    ),
    tools=[
        _tool("get_reader", "Read a customer's record.", reader_id="Number on the reader card, such as L-204."),
        _tool("find_book", "Stock, price and shelf of a book.", title="The full title."),
        _tool(
            "reserve_book",
            "Put a copy aside for a customer.",
            reader_id="Number on the reader card.",
            title="The full title.",
            day="Day of collection.",
        ),
    ],
    places=["shelf A3", "shelf B7", "the back room", "the children's corner", "the cellar"],
    items=[
        "Rivers Underground",
        "The Clockmaker's Orchard",
        "Small Engines",
        "A Field Guide to Moss",
        "Letters from the Lighthouse",
        "Bread Without Hurry",
    ],
    openings=[
        "Hello, this is {name}, card {member}. Do you have {item}? I would like to collect it on {day}.",
        "Hi! I'm looking for {item}. My card number is {member}, and {day} would suit me best.",
        "Good morning. Could you put {item} aside for me until {day}? {name}, card {member}.",
    ],
    follow_ups=[
        "And is {item} in as well?",
        "My sister asked for {item}. Is there a copy?",
        "One more thing: where would I find {item}?",
    ],
    offers=[
        "{item} is in: {stock} left, in {place}, for {price}. Shall I reserve one for {day}?",
        "Good news, we have {stock} of {item} in {place}. May I put one aside for {day}?",
    ],
    done=[
        "Done. {item} is waiting for you on {day}; please bring your card.",
        "It's reserved: {item}, collection on {day}, {price} to pay.",
    ],
    sold_out=[
        "I'm sorry, every copy of {item} is gone.",
        "{item} is sold out, and we never know when the next one comes in.",
    ],
)

BIKES = Desk(
    id_letter="R",
    policy=(
        "You answer the phone of Towpath Bikes, a rental shop by the canal. Bikes are booked by the day and picked up "
        "before ten. A deposit of 40 is returned when the bike comes back.\n\n" + _RULES
    ),
    tools=[
        _tool("get_rider", "Read a rider's account.", rider_id="Account number, such as R-118."),
        _tool("check_bike", "Stock, price and stand of a kind of bike.", kind="Kind of bike."),
        _tool(
            "book_bike",
            "Book a bike for one day.",
            rider_id="Account number.",
            kind="Kind of bike.",
            day="Day of hire.",
        ),
    ],
    places=["the front stand", "the back yard", "the boat house", "the tram stop stand"],
    items=["city bike", "cargo bike", "folding bike", "tandem", "mountain bike", "child trailer"],
    openings=[
        "Hi, {name} here, account {member}. Is a {item} free on {day}, and what does it cost?",
        "Hello! I need a {item} for {day}. I'm rider {member}.",
        "Could I hire a {item} on {day}, please? My account is {member}.",
    ],
    follow_ups=[
        "A friend wants to come along. Do you also have a {item}?",
        "What about a {item} for the same day?",
        "Could I take a {item} too?",
    ],
    offers=[
        "Yes: {stock} of our {item}s are free, {price} a day, at {place}. Shall I book one for {day}?",
        "A {item} costs {price} a day and stands at {place}. Should I book it for {day}?",
    ],
    done=[
        "Booked. Your {item} is at {place} on {day}; come before ten.",
        "All set for {day}: one {item}, {price}, deposit on top.",
    ],
    sold_out=[
        "Sorry, no {item} is left for that day.",
        "Every {item} is out then. A different day may work.",
    ],
)

PLANTS = Desk(
    id_letter="P",
    policy=(
        "You help at the counter of Fern and Kettle, a plant shop with a tea room. Plants can be held for two days. "
        "Delivery is by hand cart, inside the ring road only.\n\n" + _RULES
    ),
    tools=[
        _tool("get_customer", "Read a customer's card.", customer_id="Card number, such as P-177."),
        _tool("find_plant", "Stock, price and bench of a plant.", plant="Common name of the plant."),
        _tool(
            "hold_plant",
            "Hold a plant for a customer.",
            customer_id="Card number.",
            plant="Common name of the plant.",
            day="Last day of the hold.",
        ),
    ],
    places=["the window bench", "the shade house", "the long table", "the top rack"],
    items=["lady fern", "string of pearls", "rubber plant", "lemon balm", "snake plant", "hart's tongue"],
    openings=[
        "Hello, do you have a {item}? I'm {name}, card {member}, and I can come on {day}.",
        "Hi there. I'd like a {item} held until {day}. Card {member}.",
        "I saw a {item} in your window last week. Could you keep one for {name}, {member}, until {day}?",
    ],
    follow_ups=[
        "Would a {item} stand the same light? Do you have one?",
        "I might take a {item} as well. How much is it?",
        "And a {item}, for the kitchen?",
    ],
    offers=[
        "We have {stock}, each {price}, on {place}. Shall I hold a {item} until {day}?",
        "A {item} is {price}. There are {stock} on {place}; may I hold one until {day}?",
    ],
    done=[
        "Your {item} is on hold until {day}, with your name on the pot.",
        "Held until {day}. Ask for the {item} at the counter.",
    ],
    sold_out=[
        "The last {item} went this morning, I'm afraid.",
        "No {item} right now. The grower comes again in a week.",
    ],
)

DESKS = (BOOKS, BIKES, PLANTS)
