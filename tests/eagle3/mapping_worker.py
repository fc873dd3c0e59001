"""One of two gloo processes: builds, and meets every broken file. Leaves what it got behind."""

import json
import logging
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from mapping_files import BROKEN, CONFIG, loader, samples  # noqa: E402

from hf_prefix_tree.eagle3 import build_token_mapping, load_or_build_token_mapping  # noqa: E402


class Unreadable:
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        raise AssertionError("the cache was not used")


def main(folder, rank, ranks):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("hf_prefix_tree").addHandler(handler)
    rows = samples()
    data = loader(rows, rank, ranks, shuffle=True)
    results = {"built": build_token_mapping(data, **CONFIG)[0].tolist(), "broken": {}}
    for name in BROKEN:
        messages.clear()
        path = Path(folder, name)
        before = torch.get_rng_state()
        first = load_or_build_token_mapping(data, cache_path=path, **CONFIG)[0].tolist()
        warned = any("built again" in message for message in messages)
        undisturbed = torch.equal(before, torch.get_rng_state())
        results["broken"][name] = {"ids": first, "warned": warned, "undisturbed": undisturbed}
    unread = Unreadable(rows)
    results["hit"] = load_or_build_token_mapping(unread, cache_path=Path(folder, "garbage"), **CONFIG)[0].tolist()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
