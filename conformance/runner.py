# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Runs architectures in one worker process. An architecture that crashes the worker or takes too long has failed, and
a new worker runs the rest."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

from conformance.check import FAILED, Result, check_architecture


def run_all(cases: list[tuple[str, str]], time_limit: float = 120.0, seed: int = 0) -> Iterator[Result]:
    """
    The results of these architectures, in order.

    Args:
        cases (`list[tuple[str, str]]`): Model types and variants, see [`~conformance.build.VARIANTS`].
        time_limit (`float`, *optional*, defaults to 120.0): Maximum seconds per architecture.
        seed (`int`, *optional*, defaults to 0): Seed of weights and tokens.
    """
    spawn = multiprocessing.get_context("spawn")
    worker: Any = None
    for model_type, variant in cases:
        if worker is None:
            connection, other_end = spawn.Pipe()
            worker = spawn.Process(target=_work, args=(other_end, seed), daemon=True)
            worker.start()
            other_end.close()
        result = None
        try:
            connection.send((model_type, variant))
            if connection.poll(time_limit):
                result = connection.recv()
            else:
                result = Result(
                    model_type, variant=variant, status=FAILED, reason=f"took more than {time_limit:.0f} s"
                )
                worker.kill()
                worker = None
        except (EOFError, ConnectionError):
            worker.join()
            reason = f"the process died (exit code {worker.exitcode})"
            result = Result(model_type, variant=variant, status=FAILED, reason=reason)
            worker = None
        yield result
    if worker is not None:
        worker.kill()


def _work(connection: Connection, seed: int) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    while True:
        model_type, variant = connection.recv()
        connection.send(check_architecture(model_type, seed, variant))
