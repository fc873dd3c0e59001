# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Rollouts of several rows, for [`TreeGRPOTrainer`].

A row is one (prompt, completion) sequence of TRL. A rollout has several where its context was rewritten between turns:
reasoning stripped, history compacted, a sub-agent started. TRL's loss sees a rollout as one completion, those of its
rows one after another, so that it sums, averages and clips over the whole rollout. Only the forward sees rows.

TRL marks `rollout_func` and `environment_factory` as experimental; no other file touches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from trl import GRPOTrainer
from trl.trainer.utils import is_async_callable, nanstd

from hf_prefix_tree.training.step import replaced
from hf_prefix_tree.tree.folding import common_prefix

ROLLOUTS = "rollouts"  # key of a micro-batch: its rollouts, a list of rows each


class Row(NamedTuple):
    """A row as the forward needs it: its completion is the next `length` tokens of the rollout's."""

    prompt_ids: torch.Tensor  # of lists, PyTorch would take longer than some forwards
    length: int


Rollout = list[Row]


def join_rows(output: dict[str, Any], pad_token_id: int) -> tuple[dict[str, Any], list[Rollout] | None]:
    """
    The output of a rollout function in TRL's form, with one completion per rollout.

    Args:
        output (`dict`):
            `prompt_ids`, `completion_ids`, `logprobs` (may be `None`), and optionally `env_mask`: lists with an entry
            per rollout, which is a list of tokens, or a list of rows, each a list of tokens.
        pad_token_id (`int`):
            The completion of a rollout that has none, masked. TRL fails on empty completions.

    Returns:
        The output, where the completions of a rollout's rows follow one another, and the rows of each rollout. `None`
        instead of them where each rollout is one completion, which is not empty.

    Raises:
        `ValueError`: where rows lack a prompt, or differ in length or number from field to field.

    Example:

    ```python
    >>> from hf_prefix_tree.rl.rollouts import join_rows

    >>> rows = {"prompt_ids": [[[5], [5, 8]]], "completion_ids": [[[6, 7], [9]]], "logprobs": None}
    >>> output, rollouts = join_rows(rows, pad_token_id=0)
    >>> output["completion_ids"], output["env_mask"], rollouts[0][1]
    ([[6, 7, 9]], [[1, 1, 1]], Row(prompt_ids=tensor([5, 8]), length=1))

    ```
    """
    names = [name for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask") if output.get(name) is not None]
    if not {"prompt_ids", "completion_ids"} <= set(names) or "logprobs" not in output:
        return output, None  # TRL names the missing key
    if not any(np.ndim(ids[0]) for ids in output["prompt_ids"] if len(ids)):
        if all(map(len, output["completion_ids"])):
            return output, None
        output = {**output, **{name: [[ids] for ids in output[name]] for name in names}}
    joined: dict[str, Any] = {name: [] for name in (*names, "env_mask")}
    rollouts = []
    for index, completions in enumerate(output["completion_ids"]):
        lengths = [len(ids) for ids in completions]
        entry = {"env_mask": [[1] * length for length in lengths], **{name: output[name][index] for name in names}}
        if not lengths or len(entry["prompt_ids"]) != len(lengths) or not all(map(len, entry["prompt_ids"])):
            raise ValueError(
                f"`rollout_func` must return `prompt_ids` with a token or more for each row: rollout {index} has "
                f"{len(lengths)} completions after prompts of {[len(ids) for ids in entry['prompt_ids']]} tokens."
            )
        for name in names[2:]:
            if [len(values) for values in entry[name]] != lengths:
                raise ValueError(
                    f"`rollout_func` must return `{name}` with an entry per completion token: rollout {index} has "
                    f"{[len(values) for values in entry[name]]} for completions of {lengths} tokens."
                )
        if not any(lengths):
            lengths[-1] = 1
            entry |= {"completion_ids": [[pad_token_id]], "env_mask": [[0]], "logprobs": [[0.0]]}
        prompts = [torch.from_numpy(np.array(ids)) for ids in entry["prompt_ids"]]
        rollouts.append([Row(*row) for row in zip(prompts, lengths, strict=True)])
        for name, values in joined.items():
            values.append(list(chain.from_iterable(entry[name])))
    return {**output, **joined}, rollouts


@dataclass(frozen=True)
class PaddedRows:
    """
    The rows of several rollouts as TRL pads prompts and completions.

    Args:
        input_ids, attention_mask (`torch.Tensor` of shape `(R, L)`, int64): The R rows with a completion, in order.
        is_completion (`torch.Tensor` of shape `(R, C)`, bool): The tokens of completions among the last C of each row.
        is_joined (`torch.Tensor` of shape `(B, T)`, bool): The same tokens, in the same order, in the completions of
            the B rollouts.
        sizes (list of `int`): The number of rows of each rollout.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    is_completion: torch.Tensor
    is_joined: torch.Tensor
    sizes: list[int]

    @classmethod
    def of(
        cls, rollouts: list[Rollout], input_ids: torch.Tensor, attention_mask: torch.Tensor, logits_to_keep: int
    ) -> PaddedRows:
        """
        Args:
            rollouts (list of lists of [`Row`]): The rows of each rollout.
            input_ids, attention_mask (int64 `[B, P + T]`): A prompt, which is not read, and the joined completions.
            logits_to_keep (`int`): T.
        """
        device = input_ids.device
        with_tokens = [[row for row in rows if row.length] for rows in rollouts]
        rows = [row for several in with_tokens for row in several]
        is_completion = _starts([row.length for row in rows], max(row.length for row in rows), device)
        is_joined = _starts([sum(row.length for row in several) for several in rollouts], logits_to_keep, device)
        ids = pad_sequence([row.prompt_ids for row in rows], batch_first=True, padding_side="left").to(device)
        mask = _starts([len(row.prompt_ids) for row in rows], ids.shape[1], device).flip(1)
        completions = [
            joined.new_zeros(is_completion.shape).masked_scatter(is_completion, joined[:, -logits_to_keep:][is_joined])
            for joined in (input_ids, attention_mask)
        ]
        return cls(
            torch.cat([ids, completions[0]], dim=1),
            torch.cat([mask.to(attention_mask.dtype), completions[1]], dim=1),
            is_completion,
            is_joined,
            [len(several) for several in with_tokens],
        )

    def join(self, values: torch.Tensor) -> torch.Tensor:
        """Values `(R, C)` of the tokens of rows as values `(B, T)` of those of rollouts, 0 for padding."""
        return values.new_zeros(self.is_joined.shape).masked_scatter(self.is_joined, values[self.is_completion])


def _starts(lengths: list[int], width: int, device: torch.device) -> torch.Tensor:
    """True for the first `lengths[i]` of `width` tokens."""
    return torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]


@dataclass
class SampledTurns:
    """
    The turns of rollouts while TRL's tool loop runs.

    Args:
        messages (list of lists of messages): Those of each rollout, to which the loop appends.
        turns (list of lists): For each turn of a rollout, the tokens it was sampled after, the list that holds its
            tokens, that of its log-probs or `None`, and its index in both. The loop may cut entries of these lists.
        lengths (list of `int`): The number of messages of each rollout at the last call of [`continued`].
    """

    messages: list[list[dict[str, Any]]]
    turns: list[list[tuple[list[int], list[list[int]], list[list[float]] | None, int]]]
    lengths: list[int]

    def continued(self) -> list[int]:
        """The rollouts to which tools have answered since the last call."""
        before, self.lengths = self.lengths, [len(messages) for messages in self.messages]
        return [i for i, (old, new) in enumerate(zip(before, self.lengths, strict=True)) if new > old]

    def add(self, rollouts: list[int], contexts: list[list[int]], ids: list, log_probs: list | None) -> None:
        for position, (rollout, context) in enumerate(zip(rollouts, contexts, strict=True)):
            self.turns[rollout].append((context, ids, log_probs, position))

    def rows(self) -> tuple[dict[str, Any], list[int]]:
        """
        The output of a rollout function. Each sampled token counts in one row: a turn whose context starts with the
        row before it continues that row. Also the number of rows, of sampled tokens before the last turn, and of those
        that the context of the next turn does not repeat.
        """
        output: dict[str, Any] = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
        num_rows = num_tokens = num_lost = num_sampled = 0
        for turns in self.turns:
            rows: list[tuple[list[int], list[int], list[float], list[int]]] = []
            for context, all_ids, all_log_probs, position in turns:
                ids = all_ids[position]
                if rows and not ids:  # the loop left no room for it
                    continue
                log_probs = [0.0] * len(ids) if all_log_probs is None else all_log_probs[position]
                if rows:
                    before = rows[-1][0] + rows[-1][1]  # the context and the tokens of the turn before
                    start = common_prefix(np.array(before), np.array(context))
                    num_lost += min(len(before) - start, num_sampled)
                    num_tokens += num_sampled
                num_sampled = len(ids)
                if not rows or start < len(before):
                    rows.append((context, [], [], []))
                    start = len(context)
                _, row_ids, row_log_probs, mask = rows[-1]
                row_ids += context[start:] + ids
                row_log_probs += [0.0] * len(context[start:]) + log_probs
                mask += [0] * len(context[start:]) + [1] * len(ids)
            num_rows += len(rows)
            for name, values in zip(output, zip(*rows, strict=True), strict=True):
                output[name].append(list(values))
        if any(turn[2] is None for turns in self.turns for turn in turns):
            output["logprobs"] = None
        return output, [num_rows, num_tokens, num_lost]


class RolloutRowsMixin(GRPOTrainer):
    """
    Put it after `TreePolicyMixin`: `rollout_func` may return rollouts of several rows, and completions may be empty.
    """

    _rollouts: list[Rollout] | None
    _turns: SampledTurns | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rollout_rows = getattr(self.args, "rollout_rows", "one")
        if self.rollout_rows == "as_sampled" and (not self.tools or self.rollout_func is not None or self._is_vlm):
            raise ValueError(
                "`rollout_rows='as_sampled'` needs `tools` or an `environment_factory`, and serves neither "
                "`rollout_func`, which may return several rows itself, nor vision-language models: use 'one'."
            )

    def _generate(self, prompts: list[Any]) -> tuple:
        rollout_func = self.rollout_func
        if rollout_func is None:
            return super()._generate(prompts)

        def in_trl_form(*args: Any) -> dict[str, Any]:
            returned = rollout_func(*args)
            output, self._rollouts = join_rows(returned, self._tokenizer.pad_token_id)
            if self._rollouts is not None and self.tools:
                raise ValueError("`tools` cannot extend a rollout of several rows: call them in `rollout_func`.")
            self._returned_ids = returned.get("completion_ids")
            return output

        with replaced(self, rollout_func=in_trl_form):
            prompt_ids, *generated = super()._generate(prompts)
        if self._rollouts is not None:
            prompt_ids = [rows[0].prompt_ids.tolist() for rows in self._rollouts]  # TRL has counted those of all rows
        return prompt_ids, *generated

    # ---- turns as they were sampled ----

    def _tokenize_prompts(self, prompts: list[Any]) -> tuple:
        if self.rollout_rows == "one":
            return super()._tokenize_prompts(prompts)
        with replaced(self, chat_template=None):  # TRL's own keeps what the model's template strips
            return super()._tokenize_prompts(prompts)

    def _tool_call_loop(
        self, prompts: Any, prompt_ids: Any, completion_ids: Any, completions: Any, logprobs: Any, *args: Any
    ) -> tuple:
        loop = super()._tool_call_loop
        if self.rollout_rows == "one":
            return loop(prompts, prompt_ids, completion_ids, completions, logprobs, *args)
        turns = SampledTurns(prompts, [[] for _ in prompts], [len(messages) for messages in prompts])
        first = [list(log_probs) for log_probs in logprobs] if logprobs is not None else None
        turns.add(list(range(len(prompts))), prompt_ids, list(completion_ids), first)  # the loop appends to both
        with replaced(self, _turns=turns):
            _, completions, _, _, *counts = loop(prompts, prompt_ids, completion_ids, completions, logprobs, *args)
        returned, numbers = turns.rows()
        output, self._rollouts = join_rows(returned, self._tokenizer.pad_token_id)
        self._returned_ids = returned["completion_ids"]
        totals = torch.tensor([len(prompts), *numbers], device=self.accelerator.device)
        num_rollouts, num_rows, num_tokens, num_lost = self.accelerator.reduce(totals).tolist()
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["rollouts/rows"].append(num_rows / num_rollouts)
        metrics["rollouts/drift"].append(num_lost / max(num_tokens, 1))
        return output["env_mask"], completions, output["completion_ids"], output["logprobs"], *counts

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        if self._turns is None:
            return super()._generate_single_turn(prompt_ids, *args, **kwargs)
        rollouts = self._turns.continued()
        contexts, _, _ = self._tokenize_prompts(self._turns.messages)
        contexts = [contexts[index] for index in rollouts]
        sampled = super()._generate_single_turn(contexts, *args, **kwargs)
        self._turns.add(rollouts, contexts, *sampled)
        return sampled

    # ---- rewards and advantages ----

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids: Any) -> torch.Tensor:
        if self._rollouts is None:
            return super()._calculate_rewards(inputs, prompts, completions, completion_ids)
        weights = self.reward_weights
        self._deviations = [np.zeros(len(rows)) for rows in self._rollouts]
        functions = [self._mean_of_rows(*pair) for pair in zip(self.reward_funcs, weights.tolist(), strict=True)]
        with replaced(self, reward_funcs=functions):
            rewards = super()._calculate_rewards(inputs, prompts, completions, self._returned_ids)
        self._rewards = (rewards * weights.to(rewards.device)).nansum(dim=1)
        self._rewards[rewards.isnan().all(dim=1)] = torch.nan  # as in TRL, no part of the group's statistics
        return rewards

    def _mean_of_rows(self, function: Any, weight: float) -> Any:
        """The reward function in TRL's form: a rollout gets the mean of its rows' rewards; deviations are kept."""

        def means(*args: Any, **kwargs: Any) -> list[Any]:
            rewards = list(function(*args, **kwargs))
            for index, reward in enumerate(rewards):
                if np.ndim(reward):
                    if len(reward) != len(self._deviations[index]):
                        raise ValueError(
                            f"`reward_funcs` must return a number for rollout {index} or one for each of its "
                            f"{len(self._deviations[index])} rows, got {len(reward)}."
                        )
                    rewards[index] = float(np.mean(reward))
                    self._deviations[index] += weight * (np.array(reward) - rewards[index])
            return rewards

        return function if isinstance(function, torch.nn.Module) or is_async_callable(function) else means

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        with replaced(self, _rollouts=None):  # `_generate` sets it
            output = super()._generate_and_score_completions(inputs)
            if self._rollouts is not None:
                output[ROLLOUTS] = self._rollouts
                if any(values.any() for values in self._deviations):
                    output["advantages"] = self._row_advantages(output)
            return output

    def _row_advantages(self, output: dict[str, Any]) -> torch.Tensor:
        """The advantage of each token, `(B, T)`: TRL's of its rollout, plus its row's deviation on the same scale."""
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                "`reward_funcs` may return a number per row with `multi_objective_aggregation='sum_then_normalize'` "
                f"only, not {self.multi_objective_aggregation!r}."
            )
        advantages, rewards = output["advantages"], self._rewards
        scale = torch.ones_like(rewards)
        if self.scale_rewards != "none":
            num_generations = self.num_generations if self.model.training else self.num_generations_eval
            groups = rewards.view(-1, num_generations if self.scale_rewards == "group" else len(rewards))
            scale = scale / (nanstd(groups, dim=1).nan_to_num().repeat_interleave(groups.shape[1]) + 1e-4)
        start = self.accelerator.process_index * len(advantages)
        per_token = advantages[:, None].repeat(1, output["completion_ids"].shape[1])
        for index, (rows, deviations) in enumerate(zip(self._rollouts or [], self._deviations, strict=True)):
            values = np.repeat(deviations, [row.length for row in rows])
            per_token[index, : len(values)] += scale[start + index] * torch.from_numpy(values).to(scale)
        return per_token

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        with replaced(self, _rollouts=inputs.get(ROLLOUTS)):
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, *args: Any, **kwargs: Any
    ) -> tuple:
        score = super()._get_per_token_logps_and_entropies
        if self._rollouts is None:
            return score(model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)
        images = [name for name, value in kwargs.items() if value is not None and not isinstance(value, bool)]
        if images:
            raise ValueError(f"`rollout_func` returned several rows with images ({images}): train on text.")
        rows = PaddedRows.of(self._rollouts, input_ids, attention_mask, logits_to_keep)
        *per_token, aux_loss = score(model, rows.input_ids, rows.attention_mask, rows.is_completion.shape[1], **kwargs)
        return *(None if values is None else rows.join(values) for values in per_token), aux_loss
