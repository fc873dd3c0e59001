# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`speculative_generate`]: the draft proposes, the target verifies, the output equals the target's greedy decoding.

Every round, the draft proposes some tokens and one forward of the target checks them all. The round keeps the tokens
that the target would have chosen, and adds one token that the target chooses, so it yields at least one token. There
is no KV cache: a round costs a forward over all tokens so far. The function measures how many tokens are accepted,
which is the same in a serving engine; it does not measure speed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_prefix_tree.eagle3.model import Eagle3DraftModel
from hf_prefix_tree.eagle3.target import Eagle3Target


@dataclass(frozen=True)
class Generation:
    """
    The result of [`speculative_generate`].

    Args:
        tokens (`list[int]`): The generated tokens.
        accepted (`list[int]`): Accepted draft tokens of each round.
    """

    tokens: list[int]
    accepted: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round: the accepted ones and the one that the target adds."""
        return 1 + sum(self.accepted) / max(len(self.accepted), 1)


@torch.no_grad()
def speculative_generate(
    target: Eagle3Target,
    draft: Eagle3DraftModel,
    prompt_ids: list[int],
    max_new_tokens: int,
    num_draft_tokens: int = 4,
    eos_token_id: int | None = None,
) -> Generation:
    """
    Greedy decoding of the target, with the draft's help.

    Args:
        target ([`Eagle3Target`]): The target.
        draft ([`Eagle3DraftModel`]): Its draft, on the same device.
        prompt_ids (`list[int]`): The prompt.
        max_new_tokens (`int`): Tokens to generate at most.
        num_draft_tokens (`int`, *optional*, defaults to `4`): Tokens to propose in each round; 0: no draft.
        eos_token_id (`int`, *optional*): Token that ends the text.

    Returns:
        [`Generation`]: the tokens, and how many of the draft's were accepted in each round.
    """
    ids = list(prompt_ids)  # the target has processed and accepted them
    aux, choices = _run_target(target, ids)
    next_id = choices[-1]
    accepted = []
    while len(ids) - len(prompt_ids) < max_new_tokens - 1 and eos_token_id not in [*ids[len(prompt_ids) :], next_id]:
        context = torch.tensor([[*ids, next_id]], device=aux.device)
        drafted = draft.propose(context, aux, num_draft_tokens).tolist() if num_draft_tokens else []
        aux, choices = _run_target(target, [*ids, next_id, *drafted])
        choices = choices[len(ids) :]  # after `next_id` and after each drafted token
        count = 0
        while count < len(drafted) and drafted[count] == choices[count]:
            count += 1
        ids += [next_id, *drafted[:count]]
        next_id = choices[count]
        aux = aux[:, : len(ids)]
        accepted.append(count)
    tokens = [*ids, next_id][len(prompt_ids) :][:max_new_tokens]
    if eos_token_id in tokens:
        tokens = tokens[: tokens.index(eos_token_id) + 1]
    return Generation(tokens, accepted)


def _run_target(target: Eagle3Target, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Auxiliary hidden states of a sequence, and the target's first choice after each of its tokens."""
    input_ids = torch.tensor([ids], device=target.head.device)
    states = target.states({"input_ids": input_ids, "seq_lens": torch.tensor([[len(ids)]], device=input_ids.device)})
    return states["aux_hidden_states"], states["target_ids"][0].tolist()
