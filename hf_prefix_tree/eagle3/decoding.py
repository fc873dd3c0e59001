# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`speculative_generate`]: the draft proposes, the target verifies, the text is the target's own.

Every round, the draft proposes some tokens and one forward of the target checks them all: those that the target would
have chosen itself are kept, and one token of the target's own follows. So a round brings at least one token, and the
output equals greedy decoding. There is no KV cache: a round costs a forward over all tokens so far. It shows how many
tokens are accepted, which is the same in a serving engine, and not how fast it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_prefix_tree.eagle3.model import Eagle3DraftModel
from hf_prefix_tree.eagle3.target import Eagle3Target


@dataclass(frozen=True)
class Generation:
    """
    What [`speculative_generate`] generated.

    Args:
        tokens (`list[int]`): The generated tokens.
        accepted (`list[int]`): Accepted draft tokens of each round.
    """

    tokens: list[int]
    accepted: list[int]

    @property
    def acceptance_length(self) -> float:
        """Tokens per round of the target: the accepted ones and its own."""
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
    ids = list(prompt_ids)  # what the target has seen and agreed with
    aux, choices = _run_target(target, ids)
    own = choices[-1]  # the target's next token
    accepted = []
    while len(ids) - len(prompt_ids) < max_new_tokens - 1 and eos_token_id not in [*ids[len(prompt_ids) :], own]:
        context = torch.tensor([[*ids, own]], device=aux.device)
        drafted = draft.propose(context, aux, num_draft_tokens).tolist() if num_draft_tokens else []
        aux, choices = _run_target(target, [*ids, own, *drafted])
        at = len(ids)  # the target's choice after `own`
        count = 0
        while count < len(drafted) and drafted[count] == choices[at + count]:
            count += 1
        ids += [own, *drafted[:count]]
        own = choices[at + count]
        aux = aux[:, : len(ids)]
        accepted.append(count)
    tokens = [*ids, own][len(prompt_ids) :][:max_new_tokens]
    if eos_token_id in tokens:
        tokens = tokens[: tokens.index(eos_token_id) + 1]
    return Generation(tokens, accepted)


def _run_target(target: Eagle3Target, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Auxiliary hidden states of a sequence, and the target's first choice after each of its tokens."""
    input_ids = torch.tensor([ids], device=target.head.device)
    states = target.states({"input_ids": input_ids, "seq_lens": torch.tensor([[len(ids)]], device=input_ids.device)})
    return states["aux_hidden_states"], states["target_ids"][0].tolist()
