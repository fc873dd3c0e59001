"""Functions run as the ranks of a process group, on CPUs forked from a server that has imported everything."""

import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import sys
from pathlib import Path
from unittest import mock

PRELOADED = [
    "hf_prefix_tree.sft.trainer",
    "hf_prefix_tree.eagle3.trainer",
    "datasets",
    "peft",
    "trl.trainer.sft_trainer",
]


def run_ranks(function, folder, *args, ranks=2, timeout=240, may_die=False, gpus=False):
    """
    Calls `function(folder, *args)` in every rank, which finds its place in the environment as under `torchrun`.

    A rank that fails or hangs fails the test; what it raised and wrote to stderr is in `folder`. With `may_die` the
    exit codes are returned when the first rank ends, `None` of those that still run, and these are killed. With `gpus`
    each rank has a GPU, and is spawned: where a library starts CUDA as it is imported, no fork can use it. The
    function does not end its process group.
    """
    from torch.distributed import TCPStore

    # Listens from here on, at a free port: rank 0 does not have to bind one that was free a moment ago.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn" if gpus else "forkserver")
    if not gpus:
        context.set_forkserver_preload(PRELOADED)
    Path(folder).mkdir(exist_ok=True)
    processes = [
        context.Process(target=_call, args=(function, (str(folder), *args), rank, ranks, store.port, timeout, gpus))
        for rank in range(ranks)
    ]
    try:
        # the server, which the first process starts, finds its modules with it
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
            for process in processes:
                process.start()
        if may_die:
            ended = multiprocessing.connection.wait([process.sentinel for process in processes], timeout)
            assert ended, "no rank ended\n" + _errors(folder)
            for process in processes:
                if process.sentinel in ended:
                    process.join()  # it may have closed its end before the system knows its exit code
            return [process.exitcode for process in processes]
        for rank, process in enumerate(processes):
            process.join(timeout)
            assert process.exitcode == 0, f"rank {rank}: exit code {process.exitcode}\n" + _errors(folder)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _errors(folder):
    return "\n\n".join(file.read_text()[-4000:] for file in sorted(Path(folder).glob("error*.txt")))


def _call(function, args, rank, ranks, port, timeout, gpus):
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported is no garbage
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    # As under `torchrun`: every rank is a client of a store that another process serves.
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    if not gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ["OMP_NUM_THREADS"] = "1"  # Accelerate would set more, and they would fight for the cores
    with open(Path(args[0], f"error{rank}.txt"), "w") as file:
        os.dup2(file.fileno(), 2)  # what it raises, and what gloo says where collectives of two ranks don't match
    faulthandler.enable()  # where it crashes
    faulthandler.dump_traceback_later(timeout - 10)  # where it hangs
    function(*args)
    if torch.distributed.is_initialized():
        # A thread of gloo drops the last tensors, for which it needs the interpreter. While that shuts down, it
        # aborts the process. And where DDP is the last to hold the group, its end waits for the thread and holds
        # the interpreter: so functions leave the group alone, and it ends here, after their models.
        torch.distributed.destroy_process_group()
