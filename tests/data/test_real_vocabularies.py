# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Real conversations under real vocabularies and chat templates: what a tree unfolds to is what the template renders.

The tokenizers come from the folder in `HF_PREFIX_TREE_TOKENIZERS`: `<name>/tokenizer.json` and
`<name>/tokenizer_config.json`, or both in `<name>/models`. Qwen3's comes from the folder of real inputs.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from conformance.template_sources import trl_templates
from hf_prefix_tree.data.turns import conversation_branches
from hf_prefix_tree.tree.prefix_tree import fold

VARIABLE = "HF_PREFIX_TREE_TOKENIZERS"
FILES = ("tau_bench_airline", "reasoning_tools_multitrial", "conversational_reasoning")
SINGLE_TURNS = ("gsm8k_4policies", "long_reasoning_singleturn")
OWN = "its own"
# Llama 2 has no template in its configuration: its format without a system prompt of its own, and without tools.
INSTRUCTIONS = """{%- for message in messages -%}
{%- if message.role == 'assistant' %} {{ message.content }} {{ eos_token }}
{%- else %}{{ bos_token }}[INST] {{ message.content }} [/INST]{% endif -%}
{%- endfor -%}"""
# Vocabulary and template: the one in its configuration, or one of TRL's with the same control tokens.
PAIRS = (
    ("qwen3", OWN),
    ("qwen3", "qwen3_8"),
    ("qwen3", "qwen3_6"),
    ("qwen3", "qwen3_instruct_2507"),
    ("qwen2_5", "qwen2_5"),
    ("llama3", "llama3"),
    ("llama3_1", "llama3_1"),
    ("llama3_1", "llama3_2"),
    ("gptoss", "gptoss"),
    ("gemma3", "gemma3"),
    ("gemma3", "gemma"),
    ("deepseek_v3", "deepseekv3"),
    ("deepseek_v3", OWN),
    ("mistral_nemo", OWN),
    ("llama2", "instructions"),
)


def load_tokenizer(vocabulary: str, template: str, shared_data):
    from transformers import AutoTokenizer

    folder = shared_data("tokenizers/qwen3")
    if vocabulary != "qwen3":
        if not os.environ.get(VARIABLE):
            pytest.skip(f"no folder of real tokenizers: set {VARIABLE} to where they are")
        folder = Path(os.environ[VARIABLE]) / vocabulary
        folder = folder / "models" if (folder / "models").is_dir() else folder
        if not folder.is_dir():
            pytest.skip(f"no {vocabulary} in {VARIABLE}")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if template == "instructions":
        tokenizer.chat_template = INSTRUCTIONS
    elif template != OWN:
        if template not in trl_templates():
            pytest.skip(f"this TRL has no template {template}")
        tokenizer.chat_template = trl_templates()[template].read_text()
    return tokenizer


def rows_of(name: str, shared_data) -> list[dict]:
    rows = [json.loads(line) for line in shared_data(f"data/{name}.jsonl").read_text().splitlines()]
    if name in FILES:
        tools = json.loads(shared_data(f"data/{name}.tools.json").read_text())
        for row in rows:
            row["tools"] = tools if isinstance(tools, list) else tools[row["group"]]
            ids: dict[str, str] = {}  # Mistral takes ids of nine characters only
            for message in row["messages"]:
                for call in message.get("tool_calls") or ():
                    call["id"] = ids.setdefault(call["id"], f"c{len(ids):08d}")
                if message.get("tool_call_id"):
                    message["tool_call_id"] = ids.setdefault(message["tool_call_id"], f"c{len(ids):08d}")
    return rows


def renderings(messages: list[dict], tools, tokenizer, arguments, apart: bool) -> list[dict[str, str]]:
    """Every turn's prompt and rendering, with thinking as it is and switched, by `apply_chat_template` alone."""
    plain = []
    for message in messages:
        message = {**message, "content": message.get("content") or ""}
        if apart and "</think>" in message["content"]:  # raw output, for templates that read reasoning under a key
            thought, content = message["content"].split("</think>")
            message |= {"reasoning_content": thought.removeprefix("<think>").strip(), "content": content}
        if apart and message.get("reasoning_content"):  # line breaks set the text apart from it
            message["content"] = message["content"].lstrip("\n")
        if message.get("reasoning_content"):
            message["thinking"] = message["reasoning_content"]
        if message.get("tool_calls"):
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ]
        plain.append(message)
    turns = []
    for t, message in enumerate(plain):
        if message["role"] != "assistant":
            continue
        texts = {}
        switches = [{}, {"enable_thinking": bool(message.get("reasoning_content"))}]
        for switch in switches if "enable_thinking" in tokenizer.chat_template else [{}]:
            options = {"tools": tools, "tokenize": False, **switch}
            prompt = tokenizer.apply_chat_template(plain[:t], add_generation_prompt=True, **options)
            texts[prompt] = tokenizer.apply_chat_template(plain[: t + 1], **options)
        turns.append(texts)
    return turns


def check(row: dict, tokenizer) -> Counter[str]:
    """Compares one conversation; counts its turns by how their branch relates to the template's rendering."""
    tools, messages = row.get("tools"), row["messages"]
    try:
        branches = conversation_branches(messages, tokenizer, tools=tools).branches
    except ValueError as error:
        assert "exactly" in str(error) or "can't render" in str(error), error
        return Counter({"refused": sum(message["role"] == "assistant" for message in messages)})
    assert as_lists(fold(branches).branches()) == as_lists(branches)
    for arguments, apart in product((json.loads, lambda text: text), (False, True)):  # as the template reads them
        try:
            turns = renderings(messages, tools, tokenizer, arguments, apart)
        except Exception:  # whatever a template raises
            continue
        found = [kind_of(branch, texts, tokenizer) for branch, texts in zip(branches, turns, strict=True)]
        if "different" not in found:
            return Counter(found)
    raise AssertionError(f"a branch of {row.get('group')}, trial {row.get('trial')} is not what the template renders")


def as_lists(branches) -> list[tuple[list[int], list[float]]]:
    return [(branch.input_ids.tolist(), branch.weights.tolist()) for branch in branches]


def kind_of(branch, texts: dict[str, str], tokenizer) -> str:
    ids = branch.input_ids.tolist()
    start = int((branch.weights > 0).argmax())
    emitted = tokenizer.decode(ids[start:])
    for prompt, rendering in texts.items():
        if ids[:start] != tokenizer(prompt, add_special_tokens=False)["input_ids"]:
            continue
        whole = tokenizer(rendering, add_special_tokens=False)["input_ids"]
        if ids == whole[: len(ids)]:
            return "tokens of the rendering"
        if emitted in rendering:
            return "tokens of the prompt, then text of the rendering"
        thought = re.match(r"(.*?)\s*</think>\s*", emitted, re.DOTALL)
        if thought and prompt.rstrip().endswith("<think>") and emitted[thought.end() :] in rendering:
            return "tokens of the prompt, the end of its think block, then text of the rendering"
    return "different"


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "template"), PAIRS, ids=lambda name: name.replace(" ", "_"))
def test_unfolded_is_rendered(vocabulary, template, shared_data):
    tokenizer = load_tokenizer(vocabulary, template, shared_data)
    counts = {name: Counter[str]() for name in (*FILES, *SINGLE_TURNS)}
    for name, count in counts.items():
        for row in rows_of(name, shared_data):
            count += check(row, tokenizer)
    print(vocabulary, template, {name: dict(count) for name, count in counts.items()})
    assert counts["gsm8k_4policies"]["refused"] == 0
    assert counts["gsm8k_4policies"].total() == 800
