"""Functions run as the ranks of a gloo group. The processes are forked from a server that has imported everything."""

import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path

PRELOADED = ["mapping_worker", "trainer_worker"]


def run_ranks(function, folder, ranks=2, timeout=120):
    """
    Calls `function(folder)` in every rank, which finds its place in the environment as under `torchrun`.

    A rank that fails or hangs fails the test; what it raised is in `folder`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [context.Process(target=_call, args=(function, str(folder), r, ranks, port)) for r in range(ranks)]
    try:
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            process.join(timeout)
            errors = Path(folder, f"error{rank}.txt")
            assert process.exitcode == 0, errors.read_text() if errors.exists() else f"rank {rank}: {process.exitcode}"
    finally:
        for process in processes:
            process.kill()


def _call(function, folder, rank, ranks, port):
    import torch

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    try:
        function(folder)
    except BaseException:
        Path(folder, f"error{rank}.txt").write_text(traceback.format_exc())
        sys.exit(1)
