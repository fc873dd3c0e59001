# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Models and forests of the tests of streaming, and what a rank of them does."""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from conformance.build import build_model
from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling import streaming
from hf_prefix_tree.modeling.batch import concatenate_trees, summed_weights
from hf_prefix_tree.modeling.streaming import sections_of, stream
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support import models
from tests.support.models import VOCAB, branch_runs, gradients, random_branches, relative_error

KINDS = [*models.CONFIGS, "deepseek_v3", "llama4_text"]  # the last two: latent attention, and chunks


def make_model(name):
    model = models.make_model(name) if name in models.CONFIGS else build_model(name).double()
    return prepare_model(model).train()


def deep_branches(rng, nodes):
    """A trunk that a branch leaves after nearly every token, or that ends there."""
    trunk = rng.integers(3, VOCAB, size=nodes + 1)
    paths = [trunk]
    for kept in range(1, nodes):
        tail = rng.integers(3, VOCAB, size=rng.integers(0, 3))
        paths.append(np.concatenate([trunk[:kept], tail]))
    return [Branch(path, rng.integers(0, 2, size=len(path)) * rng.uniform(0.25, 2)) for path in paths]


def forest(seed):
    """One to three trees, of up to 50 nodes on a path."""
    rng = np.random.default_rng(seed)
    trees = [fold(random_branches(rng, num_branches=int(rng.integers(1, 9)))) for _ in range(1 + seed % 3)]
    if seed % 5 == 0:
        trees[0] = fold(deep_branches(rng, nodes=50 if seed % 25 == 0 else int(rng.integers(2, 16))))
    return trees


def forget(layer, index, grad, section, handed_over=streaming._Layer.handed_over):
    """As `handed_over`, without what later sections handed over."""
    layer.filled[index] = min(layer.filled[index], section.start)
    return handed_over(layer, index, grad, section)


@contextmanager
def watched_paths():
    """Collects no cycles. Gives a weak reference to each path that is made."""
    paths = []

    class Watched(streaming.PathStore):
        def __init__(self, *args):
            super().__init__(*args)
            paths.append(weakref.ref(self))

    gc.collect()
    gc.disable()
    try:
        with mock.patch.object(streaming, "PathStore", Watched):
            yield paths
    finally:
        gc.enable()


def compare_ranks(folder, kinds, seeds, forgets=False):
    """Two ranks stream their own forests through DDP, and compare with the forests of both in one process."""
    torch.distributed.init_process_group("gloo")
    if forgets:
        streaming._Layer.handed_over = forget
    for kind in kinds:
        model = make_model(kind)
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        for seed in seeds:
            with keep_double():
                error = _error_of_ranks(model, parallel, seed)
            assert error > 1e-2 if forgets else error < 1e-10, (kind, seed, error)


def _error_of_ranks(model, parallel, seed):
    """The largest relative error of loss and gradients, of the whole forests and of their branches."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    forests = [forest(seed + number) for number in range(ranks)]
    batches = [concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=1) for trees in forests]
    weights = [summed_weights(batch).item() for batch in batches]
    divisor = sum(weights)
    model.zero_grad()
    whole = sum(model(**batch, num_items_in_batch=divisor).loss for batch in batches)
    whole.backward()
    of_whole = gradients(model)
    model.zero_grad()
    parts = [branch_runs(model, trees)[0] * part for trees, part in zip(forests, weights, strict=True) if part]
    of_branches = sum(parts) / divisor
    of_branches.backward()
    by_branch = gradients(model)
    model.zero_grad()
    sections = sections_of(batches[rank], 4 + seed % 9, multiple=4)
    names = [None] * ranks
    torch.distributed.all_gather_object(names, [section.name for section in sections])
    none = torch.zeros_like(batches[rank]["attention_mask"])
    (empty,) = sections_of({**batches[rank], "attention_mask": none}, 1)
    total = torch.zeros((), dtype=torch.float64)

    def forward(section):
        loss = parallel(**(section or empty).inputs, num_items_in_batch=divisor).loss
        total.add_(loss.detach())
        return ranks * loss

    with parallel.no_sync():
        stream(sections, set().union(*names), forward, lambda loss: loss.backward())
    forward(None).backward()
    torch.distributed.all_reduce(total)
    errors = [relative_error(gradients(model), expected) for expected in (of_whole, by_branch)]
    return np.max([*errors, *(abs(total.item() / loss.item() - 1) for loss in (whole, of_branches))])
