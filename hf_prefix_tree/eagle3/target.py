# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`Eagle3Target`]: what a draft head learns from: a frozen causal LM's hidden states and distribution.

Packed documents run as a forest of chains on this library's own attention: exact for sliding windows and sinks, with
FlexAttention on a GPU. Only hidden states leave the forward; its logits exist for a chunk of slots at a time.

Cost: one forward without gradients, and the head on every slot.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, PreTrainedModel

from hf_prefix_tree.batch import IGNORE_INDEX
from hf_prefix_tree.eagle3.attention import document_tree
from hf_prefix_tree.eagle3.config import check_aux_layer_ids, default_aux_layer_ids
from hf_prefix_tree.eagle3.loss import CHUNK_SIZE
from hf_prefix_tree.model import ensure_verified, prepare_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

TARGET_FILE, TARGET_WEIGHTS = "eagle3_target.json", "eagle3_target.safetensors"
STATES = ("aux_hidden_states", "last_hidden_states", "target_ids")
# Options of a config that change logits after the head.
_HEAD_OPTIONS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class Eagle3Target:
    """
    A frozen target.

    Args:
        model (`PreTrainedModel`):
            A causal LM, whole on one device. It is prepared with [`prepare_model`], frozen and put in eval mode.
        aux_layer_ids (sequence of `int`, *optional*):
            The three layers whose outputs the draft fuses, counted from 0. Defaults to those that engines read.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            See [`prepare_model`].

    Raises:
        `ValueError`: If the architecture is not served, or its logits are not those of a plain linear head.
    """

    def __init__(
        self, model: PreTrainedModel, aux_layer_ids: Sequence[int] | None = None, attn_backend: str = "auto"
    ) -> None:
        self.config: PretrainedConfig = model.config
        self._check_head(model)
        num_layers = self.config.num_hidden_layers
        self.aux_layer_ids = list(default_aux_layer_ids(num_layers) if aux_layer_ids is None else aux_layer_ids)
        check_aux_layer_ids(self.aux_layer_ids, num_layers)
        self.model: PreTrainedModel | None = prepare_model(model, attn_backend=attn_backend)
        model.requires_grad_(False)
        model.eval()
        self.embedding = model.get_input_embeddings().weight
        self.head = model.get_output_embeddings().weight
        self._captured: dict[str | int, torch.Tensor] = {}
        for layer_id in self.aux_layer_ids:
            model.base_model.layers[layer_id].register_forward_hook(self._keep(layer_id))
        # Before the hook that keeps the hidden states of labelled tokens only.
        model.base_model.register_forward_hook(self._keep("last"), prepend=True)

    @classmethod
    def from_precomputed(cls, folder: str | Path) -> Eagle3Target:
        """
        The target of hidden states that [`precompute_hidden_states`] wrote: its head and embedding, no layers.

        Args:
            folder (`str` or `Path`): What was its `output_dir`.
        """
        from safetensors.torch import load_file

        described = json.loads(Path(folder, TARGET_FILE).read_text())
        weights = load_file(Path(folder, TARGET_WEIGHTS))
        self = cls.__new__(cls)
        self.model = None
        self.config = AutoConfig.for_model(**described["config"])
        self.aux_layer_ids = described["aux_layer_ids"]
        self.embedding, self.head = weights["embed_tokens.weight"], weights["lm_head.weight"]
        return self

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    def to(self, device: torch.device) -> Eagle3Target:
        """Moves it, in place."""
        if self.model is not None:
            self.model.to(device)
            self.embedding = self.model.get_input_embeddings().weight
            self.head = self.model.get_output_embeddings().weight
        else:
            self.embedding, self.head = self.embedding.to(device), self.head.to(device)
        return self

    @torch.no_grad()
    def states(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        What the draft is trained on.

        Args:
            batch (`Mapping[str, torch.Tensor]`): A batch of [`DataCollatorForEagle3`], on the target's device.

        Returns:
            `dict[str, torch.Tensor]`: `aux_hidden_states` `(B, N, 3 * hidden)`, `last_hidden_states` `(B, N, hidden)`
            (what the head takes) and `target_ids` `(B, N)` (the first choice after each token).
        """
        if self.model is None:
            raise ValueError(
                "The target of precomputed hidden states can't run: pass rows of `precompute_hidden_states`, or the "
                "target model."
            )
        ensure_verified(self.model, self.model)
        input_ids = batch["input_ids"]
        self._captured.clear()
        # Labels that supervise nothing: the head runs on a single token.
        self.model(
            input_ids=input_ids,
            prefix_tree=document_tree(batch["seq_lens"], input_ids.shape[1]),
            labels=torch.full_like(input_ids, IGNORE_INDEX),
        )
        aux = torch.cat([self._captured[layer_id] for layer_id in self.aux_layer_ids], dim=-1)
        last = self._captured["last"]
        self._captured.clear()
        choices = [logits.argmax(dim=-1) for logits in self._logits(last, self.head)]
        return dict(zip(STATES, (aux, last, torch.cat(choices).view_as(input_ids)), strict=True))

    @torch.no_grad()
    def draft_logits(self, last_hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """
        The target's logits after each token, of the draft vocabulary.

        Args:
            last_hidden_states (`torch.Tensor` of shape `(B, N, hidden)`): See `states`.
            ids (`torch.Tensor` of shape `(draft_vocab_size,)`, int64): The draft vocabulary.

        Returns:
            `torch.Tensor` of shape `(B, N, draft_vocab_size)`.
        """
        head = self.head if len(ids) == self.vocab_size else self.head[ids]
        return torch.cat(list(self._logits(last_hidden_states, head))).unflatten(0, last_hidden_states.shape[:2])

    def _logits(self, hidden: torch.Tensor, head: torch.Tensor) -> Any:
        return (torch.nn.functional.linear(x, head) for x in hidden.to(head.dtype).flatten(0, 1).split(CHUNK_SIZE))

    def _keep(self, name: str | int) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if name == "last":
                output = output[0] if isinstance(output, tuple) else output.last_hidden_state
            self._captured[name] = output[0] if isinstance(output, tuple) else output

        return hook

    @staticmethod
    def _check_head(model: PreTrainedModel) -> None:
        for option in _HEAD_OPTIONS:
            if getattr(model.config, option, None) not in (None, 1, 1.0):
                raise ValueError(
                    f"`config.{option}={getattr(model.config, option)}`: the target's logits are not those of a plain "
                    "head, which EAGLE-3 training here relies on. Use another target."
                )
        head = model.get_output_embeddings()
        if not isinstance(head, torch.nn.Linear) or head.bias is not None:
            raise ValueError(f"{type(model).__name__} has no linear head without bias, which is needed here.")
