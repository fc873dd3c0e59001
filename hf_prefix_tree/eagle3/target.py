# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`Eagle3Target`]: hidden states and distribution of a frozen causal LM, computed on the fly or read from disk."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.eagle3.attention import document_tree
from hf_prefix_tree.eagle3.collator import HIDDEN_STATES, ROW_COLUMNS, DataCollatorForEagle3, read_states, sequence_of
from hf_prefix_tree.eagle3.config import check_aux_layer_ids, default_aux_layer_ids
from hf_prefix_tree.eagle3.loss import CHUNK_SIZE
from hf_prefix_tree.eagle3.vocabulary import rank_and_size, read_tensors, write_tensors
from hf_prefix_tree.modeling.batch import WEIGHTED_BY_CALLER
from hf_prefix_tree.modeling.checks import backbone_of, base_causal_lm
from hf_prefix_tree.modeling.prepare import ensure_verified, install_tree_hooks
from hf_prefix_tree.modeling.verify import is_materialized
from hf_prefix_tree.tree.folding import check_not_empty

TARGET_FILE = "eagle3_target.safetensors"  # head and embedding, and a description as JSON in the metadata
STATES = ("aux_hidden_states", "last_hidden_states", "target_ids")
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"  # names in the file of weights
# Options of a config that change logits after the head.
_HEAD_OPTIONS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")


class Eagle3Target:
    """
    A frozen target.

    Args:
        model (`PreTrainedModel`):
            A causal LM, whole on one device, adapters merged. It is prepared with [`prepare_model`], frozen and put in
            eval mode; weights, buffers and dtype stay as they are.
        aux_layer_ids (sequence of `int`, *optional*):
            The three layers whose outputs the draft fuses, counted from 0. Defaults to those that engines read.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            See [`prepare_model`].

    Raises:
        `ValueError`: If the architecture is not served, its logits are not those of a plain linear head, or it is
            wrapped, sharded or spread over devices.
    """

    def __init__(
        self, model: PreTrainedModel, aux_layer_ids: Sequence[int] | None = None, attn_backend: str = "auto"
    ) -> None:
        _check_model(model)
        self.config: PretrainedConfig = model.config
        num_layers = len(backbone_of(model).layers)  # type: ignore[union-attr]  # checked
        self.aux_layer_ids = list(default_aux_layer_ids(num_layers) if aux_layer_ids is None else aux_layer_ids)
        check_aux_layer_ids(self.aux_layer_ids, num_layers)
        self.model: PreTrainedModel | None = install_tree_hooks(model, attn_backend=attn_backend)
        model.requires_grad_(False)
        model.eval()
        self.embedding = model.get_input_embeddings().weight
        self.head = model.get_output_embeddings().weight

    @classmethod
    def from_precomputed(cls, folder: str | Path) -> Eagle3Target:
        """
        The target of hidden states that [`precompute_hidden_states`] wrote: its head and embedding, no layers.

        Args:
            folder (`str` or `Path`): The `output_dir` of that call.

        Raises:
            `ValueError`: If its files are missing or damaged.
        """
        metadata, weights = read_tensors(Path(folder, TARGET_FILE))
        described = json.loads(metadata["target"])
        self = cls.__new__(cls)
        self.model, self.folder = None, Path(folder)
        self.config = AutoConfig.for_model(**described["config"])
        self.aux_layer_ids = described["aux_layer_ids"]
        self.fingerprint = described["fingerprint"]
        self.embedding, self.head = weights[_EMBEDDING], weights[_HEAD]
        return self

    folder: Path | None = None  # of precomputed hidden states

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @functools.cached_property
    def fingerprint(self) -> str:
        """Identifies the target and its auxiliary layers: a hash of some values of every weight."""
        assert self.model is not None
        digest = hashlib.sha256(f"{self.config.model_type}{self.aux_layer_ids}".encode())
        for name, weight in self.model.named_parameters():
            values = weight.detach().flatten()[:: max(1, weight.numel() // 64)].double().cpu().numpy()
            digest.update(f"{name}{tuple(weight.shape)}".encode() + values.tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device) -> Eagle3Target:
        """Moves the target, in place."""
        if self.model is None:
            self.embedding, self.head = self.embedding.to(device), self.head.to(device)
            return self
        if self.model.device != device:  # some quantized models refuse a move to their own device
            self.model.to(device)
        self.embedding = self.model.get_input_embeddings().weight
        self.head = self.model.get_output_embeddings().weight
        return self

    def states(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """
        The hidden states and the choices that train the draft, of all tokens.

        Args:
            batch (`Mapping[str, torch.Tensor]`): A batch of [`DataCollatorForEagle3`], on the target's device.

        Returns:
            `dict[str, torch.Tensor]`: `aux_hidden_states` `(B, N, 3 * hidden)`, `last_hidden_states` `(B, N, hidden)`
            (the inputs of the head) and `target_ids` `(B, N)` (the first choice after each token).
        """
        aux, last = self.hidden_states(batch)
        return dict(zip(STATES, (aux, last, self.choices(last)), strict=True))

    @torch.no_grad()
    def hidden_states(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """`aux_hidden_states` and `last_hidden_states` of [`Eagle3Target.states`]: one forward, without the head."""
        input_ids = batch["input_ids"]
        if self.model is None:
            if batch["attention_mask"].any():
                raise ValueError(
                    "The target of precomputed hidden states can't run: pass a dataset of `precompute_hidden_states`, "
                    "or the target model."
                )
            # empty dataset rows, which fill an uneven last step, have no file
            last = self.head.new_zeros(*input_ids.shape, self.head.shape[1])
            return torch.cat([last] * len(self.aux_layer_ids), dim=-1), last
        captured: dict[str | int, torch.Tensor] = {}
        backbone: Any = backbone_of(self.model)
        tree = batch["prefix_tree"] if "prefix_tree" in batch else document_tree(batch["seq_lens"], input_ids.shape[1])
        with torch.autocast(input_ids.device.type, enabled=False), ExitStack() as hooks:
            ensure_verified(self.model, self.model)
            # Before the hook that keeps the hidden states of labelled tokens only.
            for name, module in (("last", backbone), *((i, backbone.layers[i]) for i in self.aux_layer_ids)):
                hook = functools.partial(_keep, captured, name)
                hooks.callback(module.register_forward_hook(hook, prepend=True).remove)
            # Labels that supervise nothing: the head runs on a single token.
            self.model(
                input_ids=input_ids,
                prefix_tree=tree,
                labels=torch.full_like(input_ids, IGNORE_INDEX),
                **{WEIGHTED_BY_CALLER: True},  # there is no loss
            )
        return torch.cat([captured[layer_id] for layer_id in self.aux_layer_ids], dim=-1), captured["last"]

    @torch.no_grad()
    def choices(self, last_hidden_states: torch.Tensor) -> torch.Tensor:
        """The target's first choices, int64 `(...)`, for last hidden states `(..., hidden)`."""
        choices = [logits.argmax(dim=-1) for logits in self._logits(last_hidden_states, self.head)]
        return torch.cat(choices).view(last_hidden_states.shape[:-1])

    @torch.no_grad()
    def draft_logits(self, last_hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """
        The target's logits of the draft vocabulary.

        Args:
            last_hidden_states (`torch.Tensor` of shape `(..., hidden)`): See `states`.
            ids (`torch.Tensor` of shape `(draft_vocab_size,)`, int64): The draft vocabulary.

        Returns:
            `torch.Tensor` of shape `(..., draft_vocab_size)`.
        """
        head = self.head if len(ids) == self.vocab_size else self.head[ids]
        return torch.cat([*self._logits(last_hidden_states, head)]).view(*last_hidden_states.shape[:-1], len(ids))

    def _logits(self, hidden: torch.Tensor, head: torch.Tensor) -> Iterator[torch.Tensor]:
        for x in hidden.to(head.dtype).flatten(0, -2).split(CHUNK_SIZE):
            with torch.autocast(head.device.type, enabled=False):
                logits = torch.nn.functional.linear(x, head)
            yield logits


def _check_model(model: Any) -> None:
    if base_causal_lm(model, "target_model") is not model:
        raise ValueError(
            f"`target_model` is a {type(model).__name__}: merge its adapter first (`merge_and_unload()`)."
        )
    name, config, head = type(model).__name__, model.config.get_text_config(), model.get_output_embeddings()
    if not is_materialized(model):
        raise ValueError(
            f"The target ({name}) is sharded or has no weights yet: load it whole on one device, or precompute its "
            "hidden states (`precompute_hidden_states`) where that fits."
        )
    if not isinstance(getattr(backbone_of(model), "layers", None), torch.nn.ModuleList):
        raise ValueError(f"{name} has no list of decoder layers, whose outputs a draft reads.")
    changed = [option for option in _HEAD_OPTIONS if getattr(config, option, None) not in (None, 1, 1.0)]
    if changed or not isinstance(head, torch.nn.Linear) or head.bias is not None:
        options = "".join(f" (`config.{option}={getattr(config, option)}`)" for option in changed)
        raise ValueError(
            f"The logits of {name} are not those of a linear head without bias{options}, which EAGLE-3 training here "
            "relies on. Use another target."
        )


def _keep(captured: dict[Any, torch.Tensor], name: Any, module: torch.nn.Module, inputs: Any, output: Any) -> None:
    """Stores the hidden states that a module returns; a hook of it, once the first two arguments are given."""
    captured[name] = output if isinstance(output, torch.Tensor) else output[0]


def precompute_hidden_states(
    target: Eagle3Target, rows: Any, output_dir: str | os.PathLike[str], split: str = "train"
) -> Dataset:
    """
    Write the target's hidden states for every dataset row, one file each. The ranks of a process group share the work.

    Files have checksums, which every reader compares. Files that are there already, whole, of the same tokens and the
    same target, are kept: a run that was killed continues. The folder may be moved.

    Args:
        target ([`Eagle3Target`]):
            The target, on the device where it runs.
        rows (`Dataset` or list of `dict`):
            Trees, packed sequences, or documents (`input_ids`, `loss_mask`), as [`Eagle3Trainer`] would train on them.
        output_dir (`str` or `os.PathLike`):
            Folder for the files. Pass it to [`Eagle3Trainer`] as `target_model`.
        split (`str`, *optional*, defaults to `"train"`):
            Name of these dataset rows, if the folder holds several sets of them.

    Returns:
        `Dataset`: the dataset rows with the column `hidden_states`, the path of each one's file; also in
        `output_dir/rows/{split}`, for `datasets.load_from_disk`.

    Raises:
        `ValueError`: If the target can't run, or `rows` is empty.
        `OSError`: If a file can't be written.
    """
    check_not_empty(rows, "rows")
    folder = Path(output_dir).absolute()
    rank, num_ranks = rank_and_size()
    paths = [str(folder / f"{split}_{index:08d}.safetensors") for index in range(len(rows))]
    collate = DataCollatorForEagle3(pad_token_id=0)
    for index in range(rank, len(rows), num_ranks):
        sequence = sequence_of(rows[index])
        with suppress(ValueError):
            read_states(paths[index], sequence, target.fingerprint)
            continue  # it is there and whole
        batch = {name: value.to(target.head.device) for name, value in collate([rows[index]]).items()}
        length = len(sequence["input_ids"])  # without the padding that FlexAttention needs
        states = {name: value[0, :length] for name, value in target.states(batch).items()}
        write_tensors(paths[index], {**sequence, **states}, {"target_fingerprint": target.fingerprint})
    columns = [name for name in ROW_COLUMNS if name in rows[0]]
    described = Dataset.from_list(
        [{**{name: row[name] for name in columns}, HIDDEN_STATES: path} for row, path in zip(rows, paths, strict=True)]
    )
    if rank == 0:
        identity = {"aux_layer_ids": target.aux_layer_ids, "fingerprint": target.fingerprint}
        weights = {_EMBEDDING: target.embedding, _HEAD: target.head}
        metadata = {"target": json.dumps({**identity, "config": target.config.to_dict()})}
        write_tensors(folder / TARGET_FILE, weights, metadata)
        saved, new = folder / "rows" / split, folder / "rows" / f".{split}.{uuid.uuid4().hex}"
        try:
            described.save_to_disk(str(new))
            shutil.rmtree(saved, ignore_errors=True)
            new.rename(saved)
        except OSError as error:  # that of a write names no file
            raise OSError(error.errno, error.strerror, str(saved)) from error
    if num_ranks > 1:
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    return described
