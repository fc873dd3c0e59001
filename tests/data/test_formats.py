# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Rows in every format that data has: what they become, that all methods read the same, and what is refused."""

from __future__ import annotations

import json
from collections import Counter

import datasets
import pytest
import trl
from datasets import Dataset
from datasets.fingerprint import generate_random_fingerprint

from hf_prefix_tree.data.counts import COUNTS, Report
from hf_prefix_tree.data.formats import FORMATS, openai_conversation, openai_tools, preference_completions
from hf_prefix_tree.data.prepare import prepare_trees
from hf_prefix_tree.data.rows import MESSAGE_KINDS, row_conversations, row_kind
from hf_prefix_tree.diffusion.data import prepare_diffusion_rows
from hf_prefix_tree.eagle3.data import prepare_eagle3_rows
from hf_prefix_tree.tree.prefix_tree import PrefixTree

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}}
SCHEMA = {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER}
TOOL = {"type": "function", "function": SCHEMA}


def call(city: str, **further) -> dict:
    return {"type": "function", **further, "function": {"name": "weather", "arguments": {"city": city}}}


def text_call(city: str) -> str:
    return json.dumps({"name": "weather", "arguments": {"city": city}})


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(text: str, *calls: dict, **further) -> dict:
    return {"role": "assistant", "content": text, **further, **({"tool_calls": list(calls)} if calls else {})}


def result(text: str, **further) -> dict:
    return {"role": "tool", **further, "content": text}


TALK = [user("Rome?"), says("I look.", call("Rome")), result("sunny"), says("It is sunny.")]
HERMES_TALK = f"I look.\n<tool_call>\n{text_call('Rome')}\n</tool_call>"

# name: (row, its conversation as OpenAI messages, the counts of its conversion)
ROWS = {
    "openai": ({"messages": TALK, "tools": [TOOL]}, TALK, {}),
    "openai_in_conversations": ({"conversations": TALK}, TALK, {}),
    "openai_as_json": ({"messages": json.dumps(TALK)}, TALK, {}),
    "sharegpt": (
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "Rome?"},
                {"from": "gpt", "value": "Sunny."},
                {"from": "user", "value": "And Oslo?"},
                {"from": "chatgpt", "value": "Cold."},
            ]
        },
        [system("Be brief."), user("Rome?"), says("Sunny."), user("And Oslo?"), says("Cold.")],
        {"sharegpt": 1},
    ),
    "sharegpt_in_messages": (
        {"messages": [{"from": "human", "value": "Rome?"}, {"from": "bing", "value": "Sunny."}]},
        [user("Rome?"), says("Sunny.")],
        {"sharegpt": 1},
    ),
    "llama_factory": (
        {
            "conversations": [
                {"from": "human", "value": "Rome?"},
                {"from": "function_call", "value": text_call("Rome")},
                {"from": "observation", "value": "sunny"},
                {"from": "gpt", "value": "It is sunny."},
            ],
            "system": "Be brief.",
            "tools": json.dumps([SCHEMA]),
        },
        [system("Be brief."), user("Rome?"), says("", call("Rome")), result("sunny"), says("It is sunny.")],
        {"sharegpt": 1, "call_roles": 1, "bare_tools": 1},
    ),
    "ms_swift": (
        {
            "messages": [
                user("Rome and Oslo?"),
                says("I look."),
                {"role": "tool_call", "content": text_call("Rome")},
                {"role": "tool_call", "content": text_call("Oslo")},
                {"role": "tool_response", "content": "sunny"},
                {"role": "tool_response", "content": "cold"},
                says("Rome is warmer."),
            ]
        },
        [
            user("Rome and Oslo?"),
            says("I look.", call("Rome"), call("Oslo")),
            result("sunny"),
            result("cold"),
            says("Rome is warmer."),
        ],
        {"call_roles": 1},
    ),
    "calls_of_a_role_after_thoughts": (
        {
            "messages": [
                user("Rome?"),
                {"role": "function_call", "content": f"<think>hm</think>[{text_call('Rome')}, {text_call('Oslo')}]"},
            ]
        },
        [user("Rome?"), says("<think>hm</think>", call("Rome"), call("Oslo"))],
        {"call_roles": 1},
    ),
    "anthropic": (
        {
            "system": "Be brief.",
            "tools": [{"name": "weather", "description": "The weather of a city.", "input_schema": WEATHER}],
            "messages": [
                user("Rome and Oslo?"),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Two cities.", "signature": "x"},
                        {"type": "thinking", "thinking": None, "signature": "y"},
                        {"type": "text", "text": "I look."},
                        {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Rome"}},
                        {"type": "tool_use", "id": "b", "name": "weather", "input": {"city": "Oslo"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]},
                        {"type": "tool_result", "tool_use_id": "b", "content": "no such city", "is_error": True},
                        {"type": "text", "text": "Go on."},
                    ],
                },
                says("Rome is warmer."),
            ],
        },
        [
            system("Be brief."),
            user("Rome and Oslo?"),
            says("I look.", call("Rome", id="a"), call("Oslo", id="b"), reasoning_content="Two cities."),
            result("sunny", tool_call_id="a"),
            result("no such city", tool_call_id="b", is_error=True),
            user("Go on."),
            says("Rome is warmer."),
        ],
        {"anthropic": 1, "bare_tools": 1},
    ),
    "hermes": (
        {
            "conversations": [
                {"from": "human", "value": "Rome?"},
                {"from": "gpt", "value": HERMES_TALK},
                {"from": "tool", "value": "<tool_response>\nsunny\n</tool_response>"},
                {"from": "gpt", "value": "It is sunny."},
            ]
        },
        TALK,
        {"sharegpt": 1, "hermes": 1},
    ),
    "hermes_in_messages": (
        {
            "messages": [
                user("Rome and Oslo?"),
                says(
                    f"<think>\nMaybe <tool_call>{text_call('Bonn')}</tool_call>?\n</think>\n\n<tool_call>"
                    "{'name': 'weather', 'arguments': {'city': 'Rome'}}</tool_call>\n"
                    f"<tool_call> {text_call('Oslo')} </tool_call>"
                ),
                user("<tool_response>sunny</tool_response>\n<tool_response>cold</tool_response>"),
                says("Rome is warmer."),
            ]
        },
        [
            user("Rome and Oslo?"),
            says(f"<think>\nMaybe <tool_call>{text_call('Bonn')}</tool_call>?\n</think>", call("Rome"), call("Oslo")),
            result("sunny"),
            result("cold"),
            says("Rome is warmer."),
        ],
        {"hermes": 1},
    ),
    "alpaca": (
        {
            "instruction": "Translate.",
            "input": "Rom",
            "output": "Rome",
            "history": [["Hi", "Hello"]],
            "system": "Be brief.",
            "text": "### Translate. Rom Rome",
        },
        [system("Be brief."), user("Hi"), says("Hello"), user("Translate.\nRom"), says("Rome")],
        {"alpaca": 1},
    ),
    "alpaca_without_input": (
        {"instruction": "Say one.", "input": "", "output": "One"},
        [user("Say one."), says("One")],
        {"alpaca": 1},
    ),
}


# What is counted while rows are read, before any tree.
READ_COUNTS = (*(name for name in COUNTS if name not in ("empty", "oversized")), "errors")


@pytest.fixture(autouse=True)
def _no_fingerprints(monkeypatch):
    """`datasets` pickles the tokenizer to name each result; nothing here is cached."""
    monkeypatch.setattr(datasets.arrow_dataset, "update_fingerprint", lambda *_: generate_random_fingerprint())


def copied(value):
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_becomes_openai_messages(name):
    row, expected, counted = ROWS[name]
    before, counts = copied(row), Counter()
    kind = row_kind(row)
    assert kind in MESSAGE_KINDS
    ((messages, num_prompt_messages),) = row_conversations(row, kind, counts)
    openai_tools(row.get("tools"), counts)
    assert [{key: value for key, value in m.items() if value not in (None, [])} for m in copied(messages)] == expected
    assert num_prompt_messages == (1 if row.get("system") else 0)
    assert counts == {key: 1 for key in counted if key != kind}
    assert row == before, "the row was changed"


def test_what_trl_converts_becomes_the_same():
    """TRL renames keys, and finds the prompt of a preference; it leaves names of roles as they are."""
    row = {"conversations": [{"from": "user", "value": "Rome?"}, {"from": "assistant", "value": "Sunny."}]}
    ((messages, _),) = row_conversations(row, "conversations", Counter())
    assert {"messages": messages} == trl.maybe_convert_to_chatml(copied(row))
    for chosen, rejected in (
        ([user("A?"), says("Yes")], [user("A?"), says("No")]),
        ([user("A?"), says("B"), user("C?"), says("Yes")], [user("A?"), says("B"), user("C?"), says("No"), user("D")]),
        ("The sky is blue", "The sky is green"),
        ("The sky is blue", "The sky is black"),
        ([user("A?"), says("Yes")], [user("A?"), says("Yes")]),
    ):
        pair = {"chosen": chosen, "rejected": rejected}
        expected = trl.extract_prompt(pair)
        assert preference_completions(pair) == (expected["prompt"], [expected["chosen"], expected["rejected"]])


@pytest.fixture
def reported(monkeypatch) -> list[dict]:
    """The counts of every preparation that logs them, all of its formats included."""
    counts: list[dict] = []
    original = Report.log

    def log(report: Report) -> None:
        counts.append(report.as_dict())
        original(report)

    monkeypatch.setattr(Report, "log", log)
    return counts


def methods(row: dict, tokenizer, reported: list[dict]) -> list[tuple[list, dict]]:
    """The samples of a row, ids and supervised ids, and the counts: of trees, diffusion and EAGLE-3."""
    found = []
    for method in ("trees", "diffusion", "eagle3"):
        reported.clear()
        dataset = Dataset.from_list([row], on_mixed_types="use_json")
        if method == "trees":
            reasoning = "keep" if "text" in row and len(row) == 1 else "per_turn"
            trees = prepare_trees(dataset, tokenizer, reasoning=reasoning, weighting="branch")
            samples = [
                (branch.input_ids.tolist()[: int(branch.weights.nonzero()[0][-1]) + 1], (branch.weights > 0).tolist())
                for branch in PrefixTree.from_dict(trees[0]).branches()
            ]
        elif method == "diffusion":
            rows = prepare_diffusion_rows(dataset, tokenizer)
            samples = [(row["input_ids"], row["loss_mask"]) for row in rows]
        else:
            sizes = {"seq_length": 999, "packed_sequence_size": 0, "strategy": "next_fit", "pad_token_id": 0}
            rows = prepare_eagle3_rows(dataset, {"tokenizer": tokenizer}, **sizes)
            samples = [(row["input_ids"], row["loss_mask"]) for row in rows]
        # A branch's first token has no predecessor: trees take it out of what is supervised.
        supervised = [[i for i, m in list(zip(ids, mask, strict=False))[1:] if m] for ids, mask in samples]
        (counts,) = reported
        found.append((sorted(zip((ids for ids, _ in samples), supervised, strict=True)), counts))
    return found


ALL_ROWS = {name: row for name, (row, _, _) in ROWS.items()} | {
    "strings": {"prompt": "Rome is", "completion": " sunny."},
    "messages_completed": {"prompt": TALK[:1], "completion": TALK[1:], "tools": [TOOL]},
    "text": {"text": "Rome is sunny."},
}


@pytest.mark.parametrize("name", ALL_ROWS)
def test_all_methods_read_a_row_alike(name, tiny_tokenizer, reported):
    (trees, counts), *others = methods(ALL_ROWS[name], tiny_tokenizer, reported)
    assert trees and all(supervised for _, supervised in trees)
    if name in ROWS:
        row, messages, counted = ROWS[name]
        assert {key: counts[key] for key in FORMATS} == Counter(counted) | dict.fromkeys(FORMATS - counted.keys(), 0)
        plain = {"messages": messages, "tools": [TOOL] if "tools" in row else None}
        assert trees == methods(plain, tiny_tokenizer, reported)[0][0]
    for samples, other in others:
        assert samples == trees
        assert {key: other[key] for key in READ_COUNTS} == {key: counts[key] for key in READ_COUNTS}


def test_all_methods_report_the_same_losses(tiny_tokenizer, caplog, reported):
    """In a dataset, a list and a stream; a row without a sample is counted, too."""
    on = {"train_response": True}
    rows = [
        {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "<think>so, or"}]} | on,
        {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B"}], "train_response": False},
        {"conversations": [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "C"}]} | on,
    ]
    found, logged = [], []
    sizes = {"seq_length": 99, "packed_sequence_size": 0, "strategy": "next_fit", "pad_token_id": 0}
    options = {"tokenizer": tiny_tokenizer}
    for prepare in (
        lambda: prepare_trees(Dataset.from_list(rows), tiny_tokenizer),
        lambda: prepare_diffusion_rows(Dataset.from_list(rows), tiny_tokenizer),
        lambda: prepare_eagle3_rows(Dataset.from_list(rows), options, **sizes),
        lambda: prepare_eagle3_rows(rows, options, **sizes),
        lambda: list(prepare_diffusion_rows(Dataset.from_list(rows).to_iterable_dataset(), tiny_tokenizer)),
    ):
        caplog.clear()
        reported.clear()
        result = prepare()
        (counts,) = reported
        found.append({key: counts[key] for key in READ_COUNTS})
        (text,) = caplog.messages
        logged.append(text.replace("; 1 trees left out because nothing in them is supervised", ""))
        assert len(result) == 2
    assert all(counts == found[0] for counts in found)
    assert {key: found[0][key] for key in ("rows", "sharegpt", "unclosed_reasoning", "unsupervised", "switched")} == {
        "rows": 3,
        "sharegpt": 3,
        "unclosed_reasoning": 1,
        "unsupervised": 1,
        "switched": 1,
    }
    assert set(logged) == {logged[0]} and "Prepared 3 rows: 2 branches." in logged[0] and "never closed" in logged[0]


# --- switches -------------------------------------------------------------------------------------------------------

THINKS = [user("A?"), says("B", reasoning_content="hm"), user("C?"), says("D", reasoning_content="so")]


def supervised_texts(row: dict, tokenizer, **options) -> list[list[str]]:
    """The supervised runs of each branch, in order; none for a branch that supervises nothing."""
    from hf_prefix_tree.data.rows import RowOptions, row_branches

    branches = row_branches(row, RowOptions("conversation", tokenizer, **options), Counter())
    texts = []
    for branch in branches:
        runs, last = [], False
        for token, weight in zip(branch.input_ids.tolist(), branch.weights, strict=True):
            if weight:
                runs = [*runs[:-1], [*runs[-1], token]] if last else [*runs, [token]]
            last = bool(weight)
        texts.append([tokenizer.decode(run) for run in runs])
    return texts


def test_switches_of_turns(tiny_tokenizer):
    end = "<|im_end|>"
    first, second = "hm\n</think>", "so\n</think>"

    def texts(*changes: dict, reasoning: str = "per_turn", **row) -> list[list[str]]:
        turns = iter(changes)
        messages = [{**m, **next(turns, {})} if m["role"] == "assistant" else m for m in THINKS]
        found = supervised_texts({"messages": messages, **row}, tiny_tokenizer, reasoning=reasoning)
        return [[text.replace("<think>\n", "").replace("\n\n", "") for text in run] for run in found]

    assert texts() == [[f"{first}B{end}"], [f"{second}D{end}"]]
    assert texts({"train_reasoning": False}) == [[f"B{end}"], [f"{second}D{end}"]]
    assert texts({}, {"train_response": False}) == [[f"{first}B{end}"], [second]]
    assert texts(train_response=False) == [[first], [second]]
    assert texts({"train_response": True}, train_response=False) == [[f"{first}B{end}"], [second]]
    assert texts({"weight": 0}, {"weight": 1}) == [[], [f"{second}D{end}"]]
    quotes = {"content": "say </think> aloud", "train_reasoning": False}  # an answer that holds the mark, too
    assert texts({}, quotes)[1] == [f"say </think> aloud{end}"]
    # Side leaves: reasoning of each turn, with the responses before it, then all responses.
    plain = texts(reasoning="side_leaf")
    assert [len(run) for run in plain] == [1, 2, 2] and plain[2] == [f"B{end}", f"D{end}"]
    leaf, (response, second_leaf), trunk = plain
    assert texts({"train_reasoning": False}, reasoning="side_leaf") == [[], [response, second_leaf], trunk]
    assert texts({"train_response": False}, reasoning="side_leaf") == [leaf, [second_leaf], trunk[1:]]
    assert texts({"train_response": False}, reasoning="keep") == [[first, f"{second}D{end}"]]
    with pytest.raises(ValueError, match=r"`weight`.*0\.5"):
        texts({"weight": 0.5})


def test_a_switch_that_can_not_be_told_is_refused(tiny_tokenizer):
    row = {"messages": THINKS, "train_reasoning": False}
    with pytest.raises(ValueError, match=r"`reasoning_end`.*'<end>'"):
        supervised_texts(row, tiny_tokenizer, reasoning_end="<end>")


# --- preferences and texts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("A?")], "chosen": [says("Yes")], "rejected": [says("No")]},
        {"chosen": [user("A?"), says("Yes")], "rejected": [user("A?"), says("No")]},
        {"prompt": "A?", "chosen": [user("A?"), says("Yes")], "rejected": [user("A?"), says("No")]},
        {
            "prompt": [{"from": "human", "value": "A?"}],
            "chosen": [{"from": "gpt", "value": "Yes"}],
            "rejected": [{"from": "gpt", "value": "No"}],
        },
    ],
)
def test_a_preference_is_two_completions(row, tiny_tokenizer):
    counts: dict = {}
    (tree,) = prepare_trees(Dataset.from_list([row]), tiny_tokenizer, counts=counts)
    same = {"prompt": [user("A?")], "completions": [[says("Yes")], [says("No")]]}
    (expected,) = prepare_trees(Dataset.from_list([same]), tiny_tokenizer)
    assert PrefixTree.from_dict(tree) == PrefixTree.from_dict(expected)
    assert counts["preference"] == 1 and counts["branches"] == 2


def test_a_preference_of_strings(tiny_tokenizer):
    counts: dict = {}
    row = {"prompt": "A?", "chosen": " Yes", "rejected": " No"}
    trees = prepare_trees(Dataset.from_list([row]), tiny_tokenizer, counts=counts)
    (expected,) = prepare_trees(Dataset.from_list([{"prompt": "A?", "completions": [" Yes", " No"]}]), tiny_tokenizer)
    assert PrefixTree.from_dict(trees[0]) == PrefixTree.from_dict(expected) and counts["preference"] == 1


def test_rejected_completions_are_not_imitated(tiny_tokenizer, tmp_path):
    from hf_prefix_tree import TreeSFTConfig, TreeSFTTrainer
    from tests.support.models import make_model

    row = {"prompt": [user("A?")], "chosen": [says("Yes")], "rejected": [says("No")]}
    for prepare in (
        lambda dataset: prepare_diffusion_rows(dataset, tiny_tokenizer),
        lambda dataset: TreeSFTTrainer(
            make_model("qwen3"), TreeSFTConfig(str(tmp_path), report_to="none", use_cpu=True, bf16=False),
            train_dataset=dataset, processing_class=tiny_tokenizer,
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"chosen.*rejected"):
            prepare(Dataset.from_list([row]))


def test_a_text_is_supervised_as_a_whole(tiny_tokenizer):
    import copy

    from tokenizers.processors import TemplateProcessing

    dataset = Dataset.from_list([{"text": "Rome is sunny."}])
    for reasoning in ("side_leaf", "think_split"):
        with pytest.raises(ValueError, match=f"`reasoning`.*'{reasoning}'.*`text`"):
            prepare_trees(dataset, tiny_tokenizer, reasoning=reasoning)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    begin = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    texts = ["Rome is sunny.", "<|im_start|>Rome is sunny."]  # the begin token is not doubled
    for row in [{"text": text} for text in texts] + [{"prompt": text, "completion": "?"} for text in texts]:
        (tree,) = prepare_trees(Dataset.from_list([row]), tokenizer)
        (branch,) = PrefixTree.from_dict(tree).branches()
        text = f"Rome is sunny.{row.get('completion', '')}{tokenizer.eos_token}"
        assert tokenizer.decode(branch.input_ids) == f"<|im_start|>{text}"
        supervised = tokenizer.decode(branch.input_ids[branch.weights > 0])
        assert supervised == (text if "text" in row else f"?{tokenizer.eos_token}")


# --- what is refused ------------------------------------------------------------------------------------------------


def blocks(*content: dict, role: str = "assistant") -> dict:
    return {"messages": [user("A?"), {"role": role, "content": list(content)}, says("B")]}


USE = {"type": "tool_use", "id": "a", "name": "weather", "input": {}}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"conversations": [{"from": "narrator", "value": "x"}]}, r"`messages\[0\].from`.*'narrator'.*ShareGPT"),
        ({"conversations": [{"from": "human"}]}, r"`messages\[0\].value`.*ShareGPT"),
        (
            {"messages": [user("A?"), {"role": "tool_call", "content": "look()"}]},
            r"`messages\[1\].content`.*JSON.*role",
        ),
        ({"messages": [user("A?"), {"role": "tool_call", "content": "[1]"}]}, r"`messages\[1\]`.*'1'.*role.*`name`"),
        (
            blocks({"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}),
            r"\[1\].content\[1\]`.*Anthropic",
        ),
        (blocks(USE, {"type": "text", "text": "a"}), r"\[1\].content\[1\]`.*'text'.*Anthropic.*'tool_use'"),
        (blocks(USE, {"type": "image", "source": {}}), r"\[1\].content\[1\]`.*'image'.*Anthropic"),
        (blocks(USE, role="user"), r"\[1\].content\[0\]`.*'tool_use'.*user.*Anthropic"),
        (blocks({"type": "redacted_thinking", "data": "x"}), r"\[1\].content\[0\]`.*'redacted_thinking'.*Anthropic"),
        (blocks({"type": "tool_use", "input": {}}), r"`messages\[1\]`.*Anthropic.*`name`"),
        (
            blocks({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}, role="user"),
            r"`messages\[1\]`.*'image'.*Anthropic",
        ),
        ({"messages": [user("A?"), says(f"{HERMES_TALK} Done.")]}, r"`messages\[1\].content`.*Hermes"),
        ({"messages": [user("A?"), says(HERMES_TALK[:-12])]}, r"`messages\[1\].content`.*Hermes"),
        ({"messages": [user("A?"), says("<tool_call>{no: 1}</tool_call>")]}, r"`messages\[1\].content`.*JSON.*Hermes"),
        ({"messages": [user("A?"), says('<tool_call>{"a": 1}</tool_call>')]}, r"`messages\[1\]`.*Hermes.*`name`"),
        ({"instruction": 1, "output": "x"}, r"`instruction`.*int.*Alpaca"),
        ({"instruction": "a", "output": "x", "history": [["a"]]}, r"`history`.*Alpaca"),
        ({"messages": [system("a"), user("b"), says("c")], "system": "d"}, "`system`"),
        ({"chosen": "a", "rejected": [says("b")]}, "strings and messages"),
        ({"prompt": "a", "completion": "b", "system": "c"}, "`system`.*tools.*`prompt`.*messages"),
        ({"prompt": "a", "completion": "b", "tools": [{"name": "look"}]}, "tools.*`prompt`.*messages"),
        ({"messages": [user("A?"), says("B")], "train_response": "false"}, "`train_response` 'false'.*true or false"),
        ({"messages": [user("A?"), says("B")], "tools": "[{"}, "`tools`.*JSON"),
    ],
)
def test_what_can_not_be_converted_is_refused(row, expected, tiny_tokenizer):
    dataset = Dataset.from_list([row], on_mixed_types="use_json")
    with pytest.raises(ValueError, match=f"row 0: .*{expected}"):
        prepare_trees(dataset, tiny_tokenizer)


@pytest.mark.parametrize(
    "content",
    [
        "Write <tool_call> around calls.",
        "<tool_call>\n<function=weather>\n</function>\n</tool_call>",
        "<tool_response> is a tag.",
    ],
)
def test_text_that_only_looks_like_a_call_stays(content):
    messages, counts = [user("How?"), says(content)], Counter()
    assert openai_conversation(messages, 0, {}, counts) == (messages, 0) and not counts


def test_tools_of_other_columns(tiny_tokenizer):
    (expected,) = prepare_trees(
        Dataset.from_list([{"messages": TALK[:1] + TALK[3:], "tools": [TOOL]}]), tiny_tokenizer
    )
    for name, tools in (("functions", [SCHEMA]), ("tool_defs", json.dumps([SCHEMA])), ("tools", [json.dumps(SCHEMA)])):
        (tree,) = prepare_trees(Dataset.from_list([{"messages": TALK[:1] + TALK[3:], name: tools}]), tiny_tokenizer)
        assert PrefixTree.from_dict(tree) == PrefixTree.from_dict(expected)


def test_raw_trajectories(tiny_tokenizer):
    """`prompt` and `completion`, arguments as objects or as JSON strings; other columns are ignored."""
    completion = [says("", call("Rome")), result("sunny"), says("It is sunny.", reasoning_content="So.")]
    raw = copied(completion)
    raw[0]["tool_calls"][0]["function"]["arguments"] = json.dumps({"city": "Rome"})
    rows = [
        {"prompt": [user("Rome?")], "completion": messages, "num_turns": 2.0, "reward": 1.0}
        for messages in (completion, raw)
    ]
    trees = [
        PrefixTree.from_dict(prepare_trees(Dataset.from_list([row], on_mixed_types="use_json"), tiny_tokenizer)[0])
        for row in rows
    ]
    assert trees[0] == trees[1] and trees[0].num_branches == 2
