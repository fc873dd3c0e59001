"""`rollout_rows="as_sampled"`: every turn is sampled as a serving loop samples it, and trained on what was sampled."""

from __future__ import annotations

import copy
import json
import re
from unittest import mock

import pytest
import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template, qwen3_template

from conformance.double import keep_double
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeGRPOConfig, TreeGRPOTrainer
from tests.support.models import CONFIGS
from tests.support.policy_runs import CountedTokens, build, rollouts
from tests.support.rollout_loss import DoubleHead, GivenRollout, GivenRow
from tests.support.rollout_runs import OPTIONS, RATE, Recorded, differences

# The reasoning of all earlier turns is stripped, so that no turn continues the one before it.
STRIPPING = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}
""".strip()


def lookup(key: str) -> str:
    """
    Looks a value up.

    Args:
        key: The key of the value.

    Returns:
        The value.
    """
    return f"value of {key}"


def call(key, separators):
    said = json.dumps({"name": "lookup", "arguments": {"key": key}}, separators=separators)
    return f"<think>\nI look up {key}.\n</think>\n\n<tool_call>\n{said}\n</tool_call><|im_end|>"


def reply(text):
    """The policy: what it says after a context. It calls twice; on odd tasks once more, with spaces of its own."""
    task = int(re.search(r"task (\d)", text).group(1))
    calls = text.count("value of")
    if calls < 2 + task % 2:
        return call(f"k{calls}", (", ", ": ") if calls < 2 else (",", ":"))
    return f"<think>\nThat is all.\n</think>\n\nIt is {task}.<|im_end|>"


def messages_of(task):
    """With an earlier turn, whose reasoning Qwen3's template strips and that of TRL keeps."""
    return [
        {"role": "user", "content": "Be brief."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "I am asked to be brief."},
        {"role": "user", "content": f"Do task {task}."},
    ]


def serve(tokenizer, task):
    """The contexts and replies of a rollout, as a serving loop has them: no code of TRL's trainer."""
    messages, turns = messages_of(task), []
    while True:
        context = tokenizer.apply_chat_template(
            messages, tools=[lookup], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        ids = tokenizer(reply(tokenizer.decode(context)))["input_ids"]
        turns.append(GivenRow(context, ids, [1] * len(ids), [0.0] * len(ids)))
        reasoning, _, rest = tokenizer.decode(ids).removesuffix("<|im_end|>").partition("</think>")
        made = re.search(r"<tool_call>\n(.*)\n</tool_call>", rest)
        if not made:
            return turns
        function = json.loads(made.group(1))
        reasoning = reasoning.removeprefix("<think>").strip()
        calls = [{"type": "function", "function": function}]
        messages.append({"role": "assistant", "content": "", "reasoning_content": reasoning, "tool_calls": calls})
        messages.append({"role": "tool", "name": "lookup", "content": lookup(**function["arguments"])})


def trainer_of(folder, template, trainer_class=TreeGRPOTrainer, dtype=torch.float32, **options):
    tokenizer = train_tokenizer(
        [reply(f"task {task}" + "value of" * n) for task in range(2) for n in range(4)]
        + [qwen3_chat_template, STRIPPING],  # whose words are those of the contexts
        vocab_size=600,
    )
    tokenizer.chat_template, tokenizer.response_template = template, qwen3_template
    tokenizer.padding_side = "left"
    config = copy.deepcopy(CONFIGS["qwen3"])
    config.vocab_size, config.eos_token_id, config.pad_token_id = len(tokenizer), tokenizer.eos_token_id, 0
    config.max_position_embeddings = 4096
    torch.manual_seed(0)
    defaults = {**OPTIONS, "max_completion_length": 1024, "max_steps": 2, "num_iterations": 2, "bf16": False}
    defaults |= {"per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none", "save_strategy": "no"}
    defaults |= {"learning_rate": RATE, "gradient_checkpointing": False, "logging_steps": 1, "loss_type": "grpo"}
    return trainer_class(
        model=Qwen3ForCausalLM(config).to(dtype),
        reward_funcs=lambda completions, **kwargs: [float(index % 3) for index in range(len(completions))],
        args=TreeGRPOConfig(str(folder), rollout_rows="as_sampled", **{**defaults, **options}),
        train_dataset=Dataset.from_list([{"prompt": messages_of(task)} for task in range(2)]),
        processing_class=tokenizer,
        tools=[lookup],
    )


@pytest.mark.parametrize("template", [qwen3_chat_template, STRIPPING], ids=["qwen3", "stripping"])
def test_turns_are_trained_as_a_serving_loop_samples_them(tmp_path, template):
    contexts = []

    def sample(self, prompt_ids, *args, **kwargs):
        contexts.extend(prompt_ids)
        texts = [reply(self.processing_class.decode(ids)) for ids in prompt_ids]
        ids = self.processing_class(texts)["input_ids"]
        return ids, [[0.0] * len(each) for each in ids]

    patches = (
        mock.patch("trl.trainer.utils._ChunkedLogProbFunction", DoubleHead),
        mock.patch.object(GRPOTrainer, "_generate_single_turn", sample),
        keep_double(),
    )
    with patches[0], patches[1], patches[2]:
        trainer = trainer_of(tmp_path, template, Recorded, torch.float64)
        trainer.model.double()
        tokens = CountedTokens(trainer.model)
        trainer.train()
    tasks = [int(re.search(r"task (\d)", prompt[-1]["content"]).group(1)) for prompt in trainer._logs["prompt"]]
    assert sorted(tasks) == [0, 0, 1, 1]
    served = [GivenRollout(serve(trainer.processing_class, task), 0.0) for task in tasks]
    expected = sorted(turn.prompt for rollout in served for turn in rollout.rows)
    assert sorted(contexts) == expected and len(expected) == 2 * 3 + 2 * 4

    # the definition, with a row per turn: how turns share rows changes nothing
    for rollout, advantage in zip(served, trainer._logs["advantages"], strict=True):
        rollout.advantages = [advantage] * len(rollout.rows)
    assert len({advantage for rollout in served for advantage in rollout.advantages}) > 1
    assert max(differences(trainer, served, 4)) < 1e-10
    served[0].rows[1].mask[-1] = 0
    assert min(differences(trainer, served, 4)[1::2]) > 1e-4

    entry = trainer.state.log_history[0]
    if template is STRIPPING:
        assert entry["rollouts/rows"] == 3.5 and entry["rollouts/drift"] == 1
    else:  # reasoning stays until the next user message; only the odd calls are rendered in another way
        assert entry["rollouts/rows"] == 1.5 and 0 < entry["rollouts/drift"] < 0.5
    assert entry["tools/call_frequency"] == 2.5
    assert max(tokens.trained) < 0.5 * sum(len(turn.prompt + turn.completion) for r in served for turn in r.rows)


def test_the_policy_samples_and_turns_that_are_cut(tmp_path):
    """A random policy that calls no tool; and a completion budget that cuts or leaves out turns."""
    trainer = trainer_of(tmp_path, qwen3_chat_template, max_completion_length=4, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["rollouts/rows"] == 1 and trainer.state.log_history[0]["rollouts/drift"] == 0

    def sample(self, prompt_ids, *args, **kwargs):
        texts = [reply(self.processing_class.decode(ids)) for ids in prompt_ids]
        return self.processing_class(texts)["input_ids"], None

    for budget in (60, 90, 120):
        with mock.patch.object(GRPOTrainer, "_generate_single_turn", sample):
            trainer = trainer_of(tmp_path, STRIPPING, max_completion_length=budget, max_steps=1)
            trainer.train()
        entry = trainer.state.log_history[0]
        assert entry["completions/max_length"] <= budget and entry["loss"] == entry["loss"]


def test_as_sampled_needs_tools(tmp_path):
    with pytest.raises(ValueError, match="rollout_rows"):
        TreeGRPOConfig(str(tmp_path), rollout_rows="sampled", bf16=False, use_cpu=True)
    args = TreeGRPOConfig(str(tmp_path), rollout_rows="as_sampled", bf16=False, use_cpu=True)
    trainer = build(tmp_path, "grpo", "tree")
    for extra in ({}, {"rollout_func": rollouts(), "tools": None}):
        with pytest.raises(ValueError, match=r"rollout_rows='as_sampled'.*tools"):
            TreeGRPOTrainer(
                model=trainer.model,
                reward_funcs=lambda **kwargs: [],
                args=args,
                train_dataset=trainer.train_dataset,
                processing_class=trainer.processing_class,
                **extra,
            )
