# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Models and forests of the tests of streaming, and what a rank of them does."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from conformance.build import build_model
from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees, summed_weights
from hf_prefix_tree.modeling.streaming import sections_of, stream
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support import models
from tests.support.models import VOCAB, gradients, random_branches, relative_error

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


def compare_ranks(folder, kinds, seeds):
    """Two ranks stream their own forests through DDP, and compare with the whole forests of both in one process."""
    torch.distributed.init_process_group("gloo")
    for kind in kinds:
        model = make_model(kind)
        parallel = DistributedDataParallel(model, find_unused_parameters=True)
        for seed in seeds:
            with keep_double():
                error = _error_of_rank(model, parallel, seed)
            assert error < 1e-10, (kind, seed, error)


def _error_of_rank(model, parallel, seed):
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    forests = [forest(seed + number) for number in range(ranks)]
    batches = [concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=1) for trees in forests]
    divisor = sum(summed_weights(batch).item() for batch in batches)
    model.zero_grad()
    for batch in batches:
        model(**batch, num_items_in_batch=divisor).loss.backward()
    expected = gradients(model)
    model.zero_grad()
    sections = sections_of(batches[rank], 4 + seed % 9, multiple=4)
    names = [None] * ranks
    torch.distributed.all_gather_object(names, [section.name for section in sections])
    none = torch.zeros_like(batches[rank]["attention_mask"])
    (empty,) = sections_of({**batches[rank], "attention_mask": none}, 1)

    def forward(section):
        return ranks * parallel(**(section or empty).inputs, num_items_in_batch=divisor).loss

    with parallel.no_sync():
        stream(sections, set().union(*names), forward, lambda loss: loss.backward())
    forward(None).backward()
    return relative_error(gradients(model), expected)
