# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`Eagle3DraftModel`]: a fusion layer over three auxiliary hidden states, one decoder layer, the draft head.

[`speculative_generate`] decodes with it: the draft proposes, the target verifies, and the output equals the target's
greedy decoding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.utils import ModelOutput

from hf_prefix_tree.eagle3.attention import DRAFT_KEYS, document_tree, draft_slots, step_attention
from hf_prefix_tree.eagle3.collator import PACKED_COLUMNS
from hf_prefix_tree.eagle3.config import Eagle3DraftConfig
from hf_prefix_tree.eagle3.loss import StepSums, deciding, position_losses, weighted_steps
from hf_prefix_tree.eagle3.vocabulary import d2t_from_ids, ids_from_d2t, problem_of_ids, t2d_from_ids
from hf_prefix_tree.modeling.batch import DEPTH
from hf_prefix_tree.modeling.context import TreeContext

if TYPE_CHECKING:
    from hf_prefix_tree.eagle3.target import Eagle3Target


class Eagle3Attention(nn.Module):
    """Projections of the draft layer: from twice the hidden size, to heads and back."""

    def __init__(self, config: Eagle3DraftConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def heads(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each `(B, heads, N, head_dim)`."""
        projected = (projection(inputs) for projection in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in projected)
        return q, k, v


class Eagle3Layer(GradientCheckpointingLayer):
    """The decoder layer."""

    def __init__(self, config: Eagle3DraftConfig) -> None:
        super().__init__()
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        slots: TreeContext,
        *earlier: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        One step.

        Args:
            embeddings (`torch.Tensor` of shape `(B, N, hidden)`): Embeddings of this step's tokens.
            hidden (`torch.Tensor` of shape `(B, N, hidden)`): The state after the step before.
            cos, sin (`torch.Tensor` of shape `(B, N, head_dim)`): RoPE of this step's positions.
            slots ([`~hf_prefix_tree.modeling.context.TreeContext`]): See [`step_attention`].
            earlier (`torch.Tensor`): Keys and values of the steps before, by turns.

        Returns:
            `tuple`: the new state `(B, N, hidden)`, this step's keys and values.
        """
        inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        query, key, value = self.self_attn.heads(inputs)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        output = step_attention(query, [*earlier[::2], key], [*earlier[1::2], value], slots)
        hidden = hidden + self.self_attn.o_proj(output.flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key, value


@dataclass
class Eagle3Output(ModelOutput):
    """
    Output of a training forward.

    Args:
        loss (`torch.Tensor`, scalar): `sum_k decay^k L_k / sum_k decay^k`.
        sums ([`StepSums`]): The sums of the steps.
    """

    loss: torch.Tensor | None = None
    sums: StepSums | None = None


class Eagle3DraftModel(PreTrainedModel):
    """
    The EAGLE-3 draft head of a target.

    `forward` is a training step on a batch of [`DataCollatorForEagle3`]; [`Eagle3DraftModel.propose`] drafts tokens.
    The embedding is a frozen copy of the target's: engines replace it by the target's.

    Args:
        config ([`Eagle3DraftConfig`]):
            The shape of the head. `set_draft_vocabulary` or a checkpoint sets a draft vocabulary that is smaller than
            the target's.
    """

    config_class = Eagle3DraftConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _no_split_modules = ["Eagle3Layer"]  # noqa: RUF012 - as in Transformers
    main_input_name = "input_ids"

    def __init__(self, config: Eagle3DraftConfig) -> None:
        super().__init__(config)
        assert config.draft_vocab_size is not None and config.target_hidden_size is not None  # set by the config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(3 * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        ids = torch.arange(config.draft_vocab_size)
        is_small = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", d2t_from_ids(ids) if is_small else None)
        self.register_buffer("t2d", t2d_from_ids(ids, config.vocab_size) if is_small else None)
        self.attn_backend = "auto"
        self.embed_tokens.weight.requires_grad_(False)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).embed_tokens.weight.requires_grad_(False)
        return loaded

    @property
    def draft_ids(self) -> torch.Tensor:
        """Target ids of the draft vocabulary, ascending, int64 of shape `(draft_vocab_size,)`."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size, device=self.device)
        return ids_from_d2t(self.d2t)

    def set_draft_vocabulary(self, ids: torch.Tensor) -> None:
        """
        Set the target tokens that the outputs of the head stand for.

        Args:
            ids (`torch.Tensor` of shape `(draft_vocab_size,)`, int64): As [`build_token_mapping`] returns them.

        Raises:
            `ValueError`: If there are not as many as the head has outputs, or they are no ascending ids of the target.
        """
        if problem := problem_of_ids(ids, self.config.vocab_size, self.lm_head.out_features):
            raise ValueError(f"`ids` is no draft vocabulary: {problem}. Pass the result of `build_token_mapping`.")
        if self.d2t is not None:
            self.d2t.copy_(d2t_from_ids(ids))
            self.t2d.copy_(t2d_from_ids(ids, self.config.vocab_size))

    @torch.no_grad()
    def init_from_target(self, embedding: torch.Tensor, head: torch.Tensor | None = None) -> None:
        """
        Copy the target's embedding, and initialize the head with the target's weights for the draft vocabulary.

        Args:
            embedding (`torch.Tensor` of shape `(vocab_size, hidden)`): The target's embedding matrix.
            head (`torch.Tensor` of shape `(vocab_size, hidden)`, *optional*): The target's head.
        """
        self.embed_tokens.weight.copy_(embedding)
        if head is not None:
            self.lm_head.weight.copy_(head[self.draft_ids.to(head.device)])

    def forward(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        target_logits: torch.Tensor,
        target_ids: torch.Tensor,
        ttt_steps: int = 7,
        step_decay: float = 0.8,
        num_items_in_batch: torch.Tensor | None = None,
        draft_targets: torch.Tensor | None = None,
        **batch: torch.Tensor,
    ) -> Eagle3Output:
        """
        The loss of a batch.

        Args:
            input_ids (`torch.Tensor` of shape `(B, N)`, int64), batch:
                The batch of [`DataCollatorForEagle3`].
            aux_hidden_states (`torch.Tensor` of shape `(B, N, 3 * target_hidden_size)`):
                Outputs of the target's layers `aux_layer_ids`, side by side.
            target_logits (`torch.Tensor` of shape `(B, N, draft_vocab_size)`, or `(S, draft_vocab_size)`):
                The target's logits of the draft vocabulary, after each token or where `draft_targets` points to.
            target_ids (`torch.Tensor` of shape `(B, N)` or `(S,)`, int64):
                The target's first choice after each of these tokens, in its whole vocabulary.
            ttt_steps (`int`, *optional*, defaults to `7`):
                Steps that the draft is unrolled for, K.
            step_decay (`float`, *optional*, defaults to `0.8`):
                Weight of a step, relative to the one before.
            num_items_in_batch (`torch.Tensor` of shape `(K,)`, *optional*):
                Valid positions of each step, of the whole optimizer step. Defaults to those of this batch.
            draft_targets (`torch.Tensor` of shape `(B, K, M)`, int64, *optional*):
                Of which of the S tokens the distribution of each slot and step is, see [`needed_targets`].

        Returns:
            [`Eagle3Output`]
        """
        if unknown := batch.keys() - {*PACKED_COLUMNS, "prefix_tree", *DRAFT_KEYS}:
            raise TypeError(f"`forward` got unexpected arguments: {sorted(unknown)}.")
        tree, sources, weights = draft_slots(batch, ttt_steps).values()
        ahead = sources[:, 1:] if draft_targets is None else draft_targets
        slots = TreeContext(tree, attn_backend=self.attn_backend)
        draft_ids = self.draft_ids
        in_vocabulary = t2d_from_ids(draft_ids, self.config.vocab_size) if self.t2d is None else self.t2d
        tokens, positions = input_ids.flatten()[sources[:, 1:]], tree[:, DEPTH].long()
        hidden = self.fc(aux_hidden_states.to(self.fc.weight.dtype)).flatten(0, 1)[sources[:, 0]]
        decides = deciding(weights)
        on_track = torch.ones_like(positions, dtype=torch.bool)  # every choice so far was the target's
        cache: list[torch.Tensor] = []
        steps = []
        for k in range(ttt_steps):
            hidden = self._step(tokens[:, k], positions + k, hidden, slots, cache)
            where = decides[:, k].nonzero(as_tuple=True)
            targets, counted = ahead[:, k][where], weights[:, k][where]
            wanted = target_ids.flatten()[targets]
            normed = self.norm(hidden[where])
            losses, choices = position_losses(self.lm_head, normed, target_logits.flatten(0, -2), targets)
            matches = draft_ids[choices] == wanted
            on_track = on_track.index_put(where, on_track[where] & matches)
            valid = counted * in_vocabulary[wanted]
            total = (torch.where(valid > 0, losses, torch.zeros_like(losses)).double() * valid).sum()
            counts = (valid, counted, counted * matches, counted * on_track[where])
            steps.append((total, *(values.sum() for values in counts)))
        sums = StepSums(*(torch.stack(values) for values in zip(*steps, strict=True)))
        items = sums.valid if num_items_in_batch is None else num_items_in_batch
        return Eagle3Output(loss=weighted_steps(sums.loss, items, step_decay), sums=sums)

    def _step(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        slots: TreeContext,
        cache: list[torch.Tensor],
    ) -> torch.Tensor:
        """One pass of the layer; its keys and values are appended to the cache."""
        cos, sin = self.rotary_emb(hidden, positions)
        embeddings = self.embed_tokens(tokens).to(hidden.dtype)
        hidden, key, value = self.midlayer(embeddings, hidden, cos, sin, slots, *cache)
        cache += [key, value]
        return hidden

    @torch.no_grad()
    def propose(self, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """
        Draft the tokens after a context, greedily. There is no cache: a reference for engines, and for small models.

        Args:
            input_ids (`torch.Tensor` of shape `(1, L + 1)`, int64): The context, and the token after it.
            aux_hidden_states (`torch.Tensor` of shape `(1, L, 3 * target_hidden_size)`): The target's, of the context.
            num_tokens (`int`): Tokens to draft.

        Returns:
            `torch.Tensor` of shape `(num_tokens,)`, int64: target ids.
        """
        length = aux_hidden_states.shape[1]
        tree = document_tree(torch.tensor([[length]], device=input_ids.device), length)
        slots = TreeContext(tree, attn_backend="sdpa")
        positions = torch.arange(length, device=input_ids.device)[None]
        hidden = self.fc(aux_hidden_states.to(self.fc.weight.dtype))
        tokens = input_ids[:, 1:]
        cache: list[torch.Tensor] = []
        drafted: list[torch.Tensor] = []
        for k in range(num_tokens):
            hidden = self._step(tokens, positions + k, hidden, slots, cache)
            choice = self.draft_ids[self.lm_head(self.norm(hidden[:, -1:])).argmax(dim=-1)]
            drafted.append(choice[0, 0])
            tokens = torch.cat([tokens[:, 1:], choice], dim=1)  # only the last position matters from here on
        return torch.stack(drafted)


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

    Every round, the draft proposes some tokens and one forward of the target checks them all. The round keeps the
    tokens that the target would have chosen, and adds one token that the target chooses, so it yields at least one
    token. There is no KV cache: a round costs a forward over all tokens so far. This measures how many tokens are
    accepted, which is the same in a serving engine, and not speed.

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
