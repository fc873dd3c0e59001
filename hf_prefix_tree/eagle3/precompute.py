# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Hidden states on disk: run the target once, train the draft many times without it.

Every file says which target and which of its layers it is from, and for which documents: the trainer refuses others.

Cost: 4 hidden states per token and row on disk, in the target's dtype, besides the target's head and embedding.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_prefix_tree.collators.eagle3 import DOCUMENT_KEYS, HIDDEN_STATES, DataCollatorForEagle3
from hf_prefix_tree.eagle3.packing import PACKED_COLUMNS
from hf_prefix_tree.eagle3.target import TARGET_FILE, TARGET_WEIGHTS, Eagle3Target

if TYPE_CHECKING:
    from datasets import Dataset


def precompute_hidden_states(
    target: Eagle3Target, rows: Any, output_dir: str | os.PathLike[str], split: str = "train"
) -> Dataset:
    """
    Write the target's hidden states for every row, one file a row. The ranks of a process group share the work.

    Args:
        target ([`Eagle3Target`]):
            The target, on the device that it runs on.
        rows (`Dataset` or list of `dict`):
            Packed rows, or documents (`input_ids`, `loss_mask`), as [`Eagle3Trainer`] would train on them.
        output_dir (`str` or `os.PathLike`):
            Folder for the files. Pass it to [`Eagle3Trainer`] as `target_model`.
        split (`str`, *optional*, defaults to `"train"`):
            Name of these rows, where the folder holds several sets of them.

    Returns:
        `Dataset`: the rows with the column `hidden_states`, the path of each row's file; also in
        `output_dir/rows/{split}`, for `datasets.load_from_disk`.
    """
    from datasets import Dataset
    from safetensors.torch import save_file

    if target.model is None:
        raise ValueError("`target` is that of precomputed hidden states and can't run: pass one with its model.")
    if not hasattr(rows, "__len__"):
        raise ValueError("`rows` is a stream: pass a dataset of known length, every row gets a file.")
    folder = Path(output_dir).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    is_parallel = dist.is_available() and dist.is_initialized()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if is_parallel else (0, 1)
    paths = [str(folder / f"{split}_{index:08d}.safetensors") for index in range(len(rows))]
    collate = DataCollatorForEagle3(pad_token_id=0)
    for index in range(rank, len(rows), ranks):
        batch = {name: value.to(target.model.device) for name, value in collate([rows[index]]).items()}
        states = {name: value[0].cpu().contiguous() for name, value in target.states(batch).items()}
        tokens = {name: batch[name][0].cpu() for name in ("input_ids", "seq_lens")}
        save_file({**tokens, **states}, paths[index], metadata={"target_fingerprint": target.fingerprint})
    columns = PACKED_COLUMNS if "doc_remaining" in rows[0] else DOCUMENT_KEYS
    described = Dataset.from_list(
        [{**{name: row[name] for name in columns}, HIDDEN_STATES: path} for row, path in zip(rows, paths, strict=True)]
    )
    if rank == 0:
        weights = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
        save_file({name: w.detach().cpu().clone() for name, w in weights.items()}, str(folder / TARGET_WEIGHTS))
        config = {
            "aux_layer_ids": target.aux_layer_ids,
            "fingerprint": target.fingerprint,
            "config": target.config.to_dict(),
        }
        (folder / TARGET_FILE).write_text(json.dumps(config))
        described.save_to_disk(str(folder / "rows" / split))
    if is_parallel:
        dist.barrier(device_ids=[torch.cuda.current_device()] if dist.get_backend() == "nccl" else None)
    return described
