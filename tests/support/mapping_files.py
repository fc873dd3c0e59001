"""The data of the mapping tests, and cache files that are broken in as many ways as a file can be."""

import json
import os
import pickle

import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, DistributedSampler

from hf_prefix_tree import save_token_mapping
from hf_prefix_tree.eagle3.collator import DataCollatorForEagle3
from hf_prefix_tree.eagle3.vocabulary import read_tensors, write_tensors

VOCAB, DRAFT = 50, 12
SIZE = {"target_vocab_size": str(VOCAB)}
CONFIG = {"target_vocab_size": VOCAB, "draft_vocab_size": DRAFT, "special_token_ids": [49, 3]}


class Boom:
    """Unpickling this creates a file: a cache that runs code must never be loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def samples(seed=0, count=11):
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(3, 9, (1,), generator=generator))
        ids = (torch.rand(length, generator=generator) ** 3 * VOCAB).long().tolist()
        rows.append({"input_ids": ids, "loss_mask": torch.randint(0, 2, (length,), generator=generator).tolist()})
    return rows


def loader(rows, rank=None, ranks=1, batch_size=2, shuffle=False):
    sampler = DistributedSampler(rows, num_replicas=ranks, rank=rank, shuffle=shuffle) if rank is not None else None
    shuffle = shuffle and sampler is None
    return DataLoader(rows, batch_size, shuffle, sampler=sampler, collate_fn=DataCollatorForEagle3(pad_token_id=0))


def save(path, ids=None, **changes):
    """A file that would be right, but for the ids or for changes of its metadata."""
    save_token_mapping(path, torch.arange(DRAFT), VOCAB, "other")
    metadata, right = read_tensors(path)
    metadata = {name: value for name, value in {**metadata, **changes}.items() if value is not None}
    write_tensors(path, right if ids is None else {"selected_token_ids": ids}, metadata)


def _truncated(path):
    save(path)
    path.write_bytes(path.read_bytes()[:-20])


def _flipped(path):
    """One bit of an id: still ids of the right kind, only other ones."""
    save(path)
    content = path.read_bytes()
    old, new = (torch.tensor([*range(DRAFT - 1), last]).numpy().tobytes() for last in (DRAFT - 1, DRAFT + 3))
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


BROKEN = {
    "empty": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(bytes(range(256)) * 8),
    "text": lambda path: path.write_text(json.dumps({"selected_token_ids": list(range(DRAFT))})),
    "truncated": _truncated,
    "flipped": _flipped,
    "code": lambda path: path.write_bytes(pickle.dumps({"selected_token_ids": Boom(str(path) + ".ran")})),
    "code_in_torch_file": lambda path: torch.save({"selected_token_ids": Boom(str(path) + ".ran")}, path),
    "folder": lambda path: path.mkdir(),
    "pipe": lambda path: os.mkfifo(path),
    "dangling_link": lambda path: path.symlink_to(str(path) + ".nowhere"),
    "without_metadata": lambda path: save_file({"selected_token_ids": torch.arange(DRAFT)}, path),
    "without_ids": lambda path: save_file({"ids": torch.arange(DRAFT)}, path),
    "other_target": lambda path: save(path, target_vocab_size=str(VOCAB + 1)),
    "text_as_target": lambda path: save(path, target_vocab_size="large"),
    "too_few": lambda path: save(path, torch.arange(DRAFT - 1)),
    "two_dimensional": lambda path: save(path, torch.arange(DRAFT)[None]),
    "scalar": lambda path: save(path, torch.tensor(3)),
    "float": lambda path: save(path, torch.arange(DRAFT).double()),
    "bool": lambda path: save(path, torch.ones(DRAFT, dtype=torch.bool)),
    "negative": lambda path: save(path, torch.arange(DRAFT) - 1),
    "out_of_range": lambda path: save(path, torch.arange(VOCAB - DRAFT + 1, VOCAB + 1)),
    "repeated": lambda path: save(path, torch.tensor([0, 0, *range(2, DRAFT)])),
    "unordered": lambda path: save(path, torch.arange(DRAFT).flip(0)),
    "stale": save,
    "without_fingerprint": lambda path: save(path, fingerprint=None),
    "without_checksum": lambda path: save_file({"selected_token_ids": torch.arange(DRAFT)}, path, SIZE),
}
# What can be seen without knowing what the mapping should be built from.
BROKEN_IN_ITSELF = [name for name in BROKEN if name not in ("stale", "without_fingerprint")]
