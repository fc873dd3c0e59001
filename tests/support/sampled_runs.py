"""An agent with a tool whose replies are recorded, trained and in a serving loop."""

from __future__ import annotations

import copy
import json
import os
import re
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from datasets import Dataset
from transformers import Qwen3ForCausalLM
from trl import GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template, qwen3_template

from conformance.double import keep_double
from examples.demo.tokenizer import train_tokenizer
from hf_prefix_tree import TreeGRPOConfig, TreeGRPOTrainer
from tests.support.models import CONFIGS
from tests.support.policy_runs import CountedTokens
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


def reply(text, variant="a"):
    """
    The policy: what it says after a context. It calls twice; on odd tasks once more, with spaces of its own. Rollouts
    of a task are of two variants, or their advantages would cancel. The first reply decides.
    """
    task = int(re.search(r"task (\d)", text).group(1))
    keys = re.findall(r"value of ([ab])", text)
    variant = keys[0] if keys else variant
    if len(keys) < 2 + task % 2:
        return call(f"{variant}{len(keys)}", (", ", ": ") if len(keys) < 2 else (",", ":"))
    return f"<think>\nThat is all.\n</think>\n\nIt is {task}, said {variant}.<|im_end|>"


def messages_of(task):
    """With an earlier turn, whose reasoning Qwen3's template strips and that of TRL keeps."""
    return [
        {"role": "user", "content": "Be brief."},
        {"role": "assistant", "content": "Yes.", "reasoning_content": "I am asked to be brief."},
        {"role": "user", "content": f"Do task {task}."},
    ]


def serve(tokenizer, task, variant):
    """The contexts and replies of a rollout, as a serving loop has them: no code of TRL's trainer."""
    messages, turns = messages_of(task), []
    while True:
        context = tokenizer.apply_chat_template(
            messages, tools=[lookup], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        ids = tokenizer(reply(tokenizer.decode(context), variant))["input_ids"]
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


class World:
    """An environment with the same tool. It knows what was looked up, so the rollouts of a task need one each."""

    def reset(self, **row: Any) -> None:
        self.keys: list[str] = []

    def lookup(self, key: str) -> str:
        """
        Looks a value up.

        Args:
            key: The key of the value.

        Returns:
            The value.
        """
        assert key == f"{(self.keys or [key])[0][0]}{len(self.keys)}", "another rollout asked"
        self.keys.append(key)
        return lookup(key)


def trainer_of(folder, template, trainer_class=TreeGRPOTrainer, dtype=torch.float32, world=None, **options):
    tokenizer = train_tokenizer(
        [reply(f"task {task}" + f"value of {variant}" * n) for task in range(2) for n in range(4) for variant in "ab"]
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
        **({"tools": [lookup]} if world is None else {"environment_factory": world}),
    )


def train_on_replies(folder: Path, template: str, trainer_class: Any = Recorded, **options: Any) -> Any:
    """Trains in float64 on the recorded replies. The trainer's `contexts` are what they were sampled after."""
    contexts = []

    def sample(self, prompt_ids, *args, **kwargs):
        contexts.extend(prompt_ids)
        texts = [reply(self.processing_class.decode(ids), "ab"[i % 2]) for i, ids in enumerate(prompt_ids)]
        ids = self.processing_class(texts)["input_ids"]
        return ids, [[0.0] * len(each) for each in ids]

    with ExitStack() as stack:
        stack.enter_context(mock.patch("trl.trainer.utils._ChunkedLogProbFunction", DoubleHead))
        stack.enter_context(mock.patch.object(GRPOTrainer, "_generate_single_turn", sample))
        stack.enter_context(keep_double())
        trainer = trainer_of(folder, template, trainer_class, torch.float64, **options)
        trainer.model.double()
        trainer.tokens, trainer.contexts = CountedTokens(trainer.model), contexts
        trainer.train()
    return trainer


def served_rollouts(trainer: Any) -> list[GivenRollout]:
    """The rollouts of all ranks as a serving loop has them, a row per turn: how turns share rows changes nothing."""
    prompts = trainer._logs["prompt"]
    tasks = [int(re.search(r"task (\d)", prompt[-1]["content"]).group(1)) for prompt in prompts]
    served = [GivenRollout(serve(trainer.processing_class, task, "ab"[i % 2]), 0.0) for i, task in enumerate(tasks)]
    for rollout, advantage in zip(served, trainer._logs["advantages"], strict=True):
        rollout.advantages = [advantage] * len(rollout.rows)
    return served


def largest_gradient(trainer: Any) -> float:
    """Of the step with the smallest gradients."""
    return min(max(gradient.abs().max().item() for gradient in step.values()) for step in trainer.gradients)


def lost_share(served: list[GivenRollout]) -> float:
    """The share of sampled tokens, last turns left out, from the first that the next context does not repeat."""
    lost = total = 0
    for rollout in served:
        for turn, following in pairwise(rollout.rows):
            ids = turn.prompt + turn.completion
            pairs = zip(ids, following.prompt, strict=False)
            same = next((index for index, (token, repeated) in enumerate(pairs) if token != repeated), len(ids))
            lost += min(len(ids) - same, len(turn.completion))
            total += len(turn.completion)
    return lost / total


def compare_in_rank(folder: str, template: str) -> None:
    """One prompt per rank, whose rollouts have three turns in one rank and four in the other."""
    rank = os.environ["RANK"]
    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    trainer = train_on_replies(Path(folder, rank), template, **options)
    served = served_rollouts(trainer)
    results = {"errors": differences(trainer, served, 1, ranks=2), "gradient": largest_gradient(trainer)}
    results |= {"turns": len(trainer.contexts), "logged": trainer.state.log_history[0], "lost": lost_share(served)}
    served[-1].rows[1].mask[-1] = 0
    results["broken"] = differences(trainer, served, 1, ranks=2)
    torch.save(results, Path(folder, f"results{rank}.pt"))
