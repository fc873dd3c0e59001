"""What one of two gloo processes does: builds, and meets every broken file. Leaves what it got behind."""

import json
import logging
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hf_prefix_tree import build_eagle3_dataloader, build_token_mapping, load_or_build_token_mapping
from hf_prefix_tree.eagle3.vocabulary import _summed_over_ranks, count_supervised
from hf_prefix_tree.training.sampling import PaddedDataset
from tests.support.mapping_files import BROKEN, CONFIG, loader, samples


class Unreadable:
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        raise AssertionError("the cache was not used")


def build_and_break(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hf_prefix_tree").addHandler(handler)
    rows = samples()
    data = loader(rows, rank, ranks, shuffle=True)
    results = {"built": build_token_mapping(data, **CONFIG)[0].tolist(), "broken": {}}
    results["counts"] = _summed_over_ranks(count_supervised(data, CONFIG["target_vocab_size"])).tolist()
    for name in BROKEN:
        messages.clear()
        path = Path(folder, name)
        before = torch.get_rng_state()
        first = load_or_build_token_mapping(data, cache_path=path, **CONFIG)[0].tolist()
        warned = any("built again" in message for message in messages)
        undisturbed = torch.equal(before, torch.get_rng_state())
        results["broken"][name] = {"ids": first, "warned": warned, "undisturbed": undisturbed}
    # every rank sees another file system: rank 0's file decides, whatever the others see
    for name in ("rank0_has_it", "rank1_has_it"):
        ids = load_or_build_token_mapping(data, cache_path=Path(folder, name, str(rank)), **CONFIG)[0]
        results[name] = ids.tolist()
    # built by one process, taken by two, whatever fills the data up to a multiple of them
    for source in (rows, PaddedDataset(rows, 2 * ranks)):
        single = load_or_build_token_mapping(Unreadable(source), cache_path=Path(folder, "single"), **CONFIG)
        results["single"] = single[0].tolist()
    unread = Unreadable(rows)
    results["hit"] = load_or_build_token_mapping(unread, cache_path=Path(folder, "garbage"), **CONFIG)[0].tolist()
    results["meshes"] = {}
    for name, shape in (("data", (ranks, 1)), ("context", (1, ranks))):
        mesh = dist.device_mesh.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
        data = build_eagle3_dataloader(rows, seq_length=8, pad_token_id=0, dp_mesh=mesh["dp"])
        results["meshes"][name] = [batch["input_ids"].tolist() for batch in data]
    try:
        build_eagle3_dataloader(rows, seq_length=8, pad_token_id=0, dp_mesh=mesh)
    except ValueError as error:
        results["error"] = str(error)
    data = build_eagle3_dataloader(rows, seq_length=8, pad_token_id=0)
    results["world"] = [batch["input_ids"].tolist() for batch in data]
    results["built_by_loader"] = build_token_mapping(data, **CONFIG)[0].tolist()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
