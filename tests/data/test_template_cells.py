# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Chat templates by kinds of dialogue: judged anew, held against `docs/templates.md`; and that the judge can fail."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import transformers
from packaging.version import Version

from conformance.dialogues import DIALOGUES
from conformance.expected_turns import LEAVES_OUT
from conformance.template_page import SYMBOLS, read_cells
from conformance.template_sources import GPT2_SPLIT, byte_tokenizer, tokenizer_for, trl_templates, trl_twins
from conformance.template_twins import DIFFERENT, compare_with_twin
from conformance.templates import judge_template
from conformance.turn_oracle import EXACT, LOSS, NO_STOP, OTHER, PROMPT, REFUSED, WRONG, judge
from hf_prefix_tree.data.turns import ConversationBranches, conversation_branches
from hf_prefix_tree.tree.prefix_tree import Branch
from tests.data.test_chat_templates import NO_SECOND_HEADER

CELLS = read_cells((Path(__file__).resolve().parents[2] / "docs" / "templates.md").read_text())
if Version(transformers.__version__) < Version("5.24"):
    # `apply_chat_template` still hands a `content` of `None` to the template, which alone makes this one write calls
    # (and a stop token after the second one). We never pass `None`, and refuse the calls here as there.
    CELLS["deepseek_r1_distill"]["several calls"] = SYMBOLS[REFUSED]
SUBSET = (
    "qwen3",  # an empty think block on the last turn alone
    "qwen3_8",  # the prompt opens a think block
    "llama3_1",  # a call or text, one call at a time
    "gptoss",  # channels
    "glm4moe",  # stops at the next role's token
    "gemma4_v5",  # tools answer in the model's turn
    "cohere2",  # ends with two tokens, no calls
    "phi3",  # a token after the end, parts printed as Python
    "lfm2_2_5",  # calls as Python
    "nemotron_3_nano",  # drops earlier reasoning
    "deepseek_r1_distill",  # its prompt opens a think block that its rendering leaves out
    "idefics3",  # reads parts only
)


def template(name: str) -> str:
    if name not in trl_templates():
        pytest.skip(f"this TRL has no template {name}")
    return trl_templates()[name].read_text()


def judged_anew(name: str, **options) -> dict[str, str]:
    cells = judge_template(template(name), byte_tokenizer(**options)).cells
    assert {cell: result.reason for cell, result in cells.items() if result.status in WRONG} == {}
    return {cell: SYMBOLS[result.status] for cell, result in cells.items()}


@pytest.mark.parametrize("name", SUBSET)
def test_subset(name):
    assert judged_anew(name) == CELLS[name]


@pytest.mark.parametrize("name", ["qwen3", "llama3", "glm4moe"])
def test_a_vocabulary_that_cuts_line_breaks_by_what_follows(name):
    assert judged_anew(name, split=GPT2_SPLIT) == CELLS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(trl_templates().keys() - set(SUBSET)))
def test_every_template_of_trl(name):
    assert judged_anew(name) == CELLS[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(trl_twins()))
def test_supervised_is_what_trls_training_variant_marks(name):
    tokenizer = tokenizer_for(template(name), byte_tokenizer())
    results = [judge(dialogue, tokenizer, conversation_branches) for dialogue in DIALOGUES]
    comparison = compare_with_twin(trl_twins()[name].read_text(), tokenizer, results)
    assert DIFFERENT not in comparison.counts, comparison.examples
    assert sum(comparison.counts.values()) == sum(len(result.turns) for result in results)


@pytest.mark.parametrize(
    ("name", "cell", "texts"),
    [
        (
            "qwen3",
            "reasoning + two turns",
            [f"<think>\nI think zthought{n}q first.\n</think>\n\nIt is zreply{n}q there.<|im_end|>" for n in (1, 2)],
        ),
        (
            "glm4moe",
            "call",
            [
                "\n<think></think>\n<tool_call>zlookq\n<arg_key>place</arg_key>\n<arg_value>zplace1q</arg_value>\n"
                "<arg_key>limit</arg_key>\n<arg_value>73001</arg_value>\n</tool_call><|observation|>",
                "\n<think></think>\nIt is zreply2q there.<|user|>",
            ],
        ),
        (
            "gptoss",
            "reasoning",
            [
                "<|channel|>analysis<|message|>I think zthought1q first.<|end|><|start|>assistant<|channel|>final"
                "<|message|>It is zreply1q there.<|return|>"
            ],
        ),
        ("cohere2", "plain", ["It is zreply1q there.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"]),
        (
            "llama3_1",
            "call",
            [
                '{"name": "zlookq", "parameters": {"place": "zplace1q", "limit": 73001}}<|eot_id|>',
                "It is zreply2q there.<|eot_id|>",
            ],
        ),
        ("idefics3", "plain", [" It is zreply1q there.<end_of_utterance>"]),
    ],
)
def test_what_the_judge_expects(name, cell, texts):
    """Written out by hand: the judge is no better than its reading of the templates."""
    dialogue = next(dialogue for dialogue in DIALOGUES if dialogue.cell == cell)
    result = judge(dialogue, tokenizer_for(template(name), byte_tokenizer()), conversation_branches)
    assert (result.status, [turn.text for turn in result.turns]) == (EXACT, texts)


def shifted(branch: Branch, start: int, end: int) -> Branch:
    """The branch with its supervised tokens from `start` later to `end` later."""
    (on,) = np.nonzero(branch.weights)
    weights = np.zeros(len(branch))
    weights[on[0] + start : on[-1] + 1 + end] = 1.0
    return Branch(branch.input_ids, weights)


def without_first_token(branch: Branch) -> Branch:
    return Branch(branch.input_ids[1:], branch.weights[1:])


BROKEN = {
    "starts one token early": (PROMPT, lambda branch: shifted(branch, -1, 0)),
    "starts one token late": (OTHER, lambda branch: shifted(branch, 1, 0)),
    "ends one token short": (NO_STOP, lambda branch: shifted(branch, 0, -1)),
    "ends one token late": (OTHER, lambda branch: shifted(branch, 0, 1)),
    "has another context": (OTHER, without_first_token),
}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "phi3"])
@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_turn_is_wrong(name, fault):
    status, broken = BROKEN[fault]

    def branches_of(*args, **options):
        answer = conversation_branches(*args, **options)
        return dataclasses.replace(answer, branches=[*answer.branches[:-1], broken(answer.branches[-1])])

    tokenizer = tokenizer_for(template(name), byte_tokenizer())
    for dialogue in DIALOGUES[:2]:
        assert judge(dialogue, tokenizer, branches_of).status == status, dialogue


def test_lost_text_and_a_lost_turn_are_wrong():
    tokenizer = tokenizer_for(template("qwen3"), byte_tokenizer())
    (called,) = (d for d in DIALOGUES if (d.cell, d.form) == ("call + text", "objects"))

    def without_text(messages, *args, **options):
        cut = [{**message, "content": ""} if "tool_calls" in message else message for message in messages]
        return conversation_branches(cut, *args, **options)

    def without_last_turn(*args, **options):
        answer = conversation_branches(*args, **options)
        return dataclasses.replace(answer, branches=answer.branches[:-1])

    assert judge(called, tokenizer, conversation_branches).status == EXACT
    assert judge(called, tokenizer, without_text).status == LOSS
    assert judge(called, tokenizer, without_last_turn).status == LOSS


def test_a_tool_result_that_is_supervised_is_wrong():
    tokenizer = tokenizer_for(template("qwen3"), byte_tokenizer())
    (called,) = (d for d in DIALOGUES if (d.cell, d.form) == ("call", "objects"))

    def all_after_the_first_turn(*args, **options):
        answer = conversation_branches(*args, **options)
        first, last = answer.branches
        start = int(np.argmax(first.weights > 0))
        weights = np.where(np.arange(len(last)) < start, 0.0, 1.0)
        return dataclasses.replace(answer, branches=[first, Branch(last.input_ids, weights)])

    assert judge(called, tokenizer, all_after_the_first_turn).status == PROMPT


def test_a_lost_header_is_wrong():
    """After an assistant message the prompt has no header: a turn without it is not what the model must emit."""
    tokenizer = tokenizer_for(NO_SECOND_HEADER, byte_tokenizer())
    (adjacent,) = (dialogue for dialogue in DIALOGUES if dialogue.cell == "adjacent assistants")

    def without_header(messages, tokenizer, **options):
        branches = []
        for t, message in enumerate(messages):
            if message["role"] == "assistant":
                options = {"add_generation_prompt": True, "return_dict": False}
                context = tokenizer.apply_chat_template(messages[:t], **options)
                output = tokenizer.encode(message["content"] + "<|im_end|>")
                branches.append(Branch([*context, *output], [0] * len(context) + [1] * len(output)))
        return ConversationBranches(branches, {})

    assert judge(adjacent, tokenizer, without_header).status == OTHER
    assert judge(adjacent, tokenizer, conversation_branches).status == LEAVES_OUT
