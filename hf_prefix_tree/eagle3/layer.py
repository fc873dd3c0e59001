# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The draft's decoder layer: a Llama layer that takes the token's embedding beside the hidden state.

The two are normed by themselves and go into the attention side by side; the residual is the hidden state alone.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb

from hf_prefix_tree.eagle3.attention import Documents, step_attention
from hf_prefix_tree.eagle3.config import Eagle3DraftConfig


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
        q, k, v = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return q, k, v


class Eagle3Layer(nn.Module):
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
        documents: Documents,
        *earlier: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        One step.

        Args:
            embeddings, hidden (`torch.Tensor` of shape `(B, N, hidden)`): Of this step's tokens, and the state so far.
            cos, sin (`torch.Tensor` of shape `(B, N, head_dim)`): Of the positions of this step.
            documents ([`Documents`]): The documents.
            earlier (`torch.Tensor`): Keys of the steps before, then their values.

        Returns:
            `tuple`: the new state `(B, N, hidden)`, this step's keys and values.
        """
        inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(hidden)], dim=-1)
        query, key, value = self.self_attn.heads(inputs)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        half = len(earlier) // 2
        output = step_attention(query, [*earlier[:half], key], [*earlier[half:], value], documents)
        hidden = hidden + self.self_attn.o_proj(output.flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden)), key, value
