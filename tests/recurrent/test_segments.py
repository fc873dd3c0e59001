"""The cut into segments and the layout of convolutions against plain walks along the paths."""

import numpy as np
import pytest
import torch

from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.modeling.recurrent import scan
from hf_prefix_tree.modeling.recurrent.layers import convolve_on_tree
from hf_prefix_tree.modeling.recurrent.scan import Recurrence, Segments, fork, forking_is_cheaper, link
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import random_forest


def context_of(*forests):
    rows = [concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=128) for trees in forests]
    context = TreeContext(torch.cat([row["prefix_tree"] for row in rows]))
    context.attention_mask = torch.cat([row["attention_mask"] for row in rows])
    return context


def paths_of(*forests):
    """The tokens of every branch, as positions in the flattened rows."""
    paths = []
    for row, trees in enumerate(forests):
        start = row * 128
        for tree in trees:
            paths += [path + start for path in tree.paths()]
            start += len(tree)
    return paths


@pytest.mark.parametrize("seed", range(6))
def test_segments_are_the_nodes_and_their_parents(seed):
    forests = [random_forest(seed, num_trees=2), random_forest(seed + 50, num_trees=1)]
    segments = Segments(context_of(*forests))
    rows = [(row, tree) for row, trees in enumerate(forests) for tree in trees]
    lengths = np.concatenate([tree.node_lengths for _, tree in rows])
    merged = segments.length.sum() == lengths.sum()
    assert merged and len(segments.start) <= len(lengths)
    covered = np.concatenate([np.arange(s, s + n) for s, n in zip(segments.start, segments.length, strict=True)])
    assert np.array_equal(covered, np.unique(np.concatenate(paths_of(*forests))))  # every token once, no padding
    owner = np.full(256, -1)
    for index, (start, length) in enumerate(zip(segments.start, segments.length, strict=True)):
        owner[start : start + length] = index
    for path in paths_of(*forests):
        walk = [owner[path[0]]]
        for token in path[1:]:
            if owner[token] != walk[-1]:
                walk.append(owner[token])
        assert [-1, *walk[:-1]] == segments.parent[walk].tolist()
        assert segments.level[walk].tolist() == list(range(len(walk)))


def full_row():
    """A row without padding: two branches of 67 tokens, the first 6 shared."""
    ids = np.arange(67)
    other = np.where(ids < 6, ids, ids + 100)
    return [fold([Branch(ids, np.ones(67)), Branch(other, np.ones(67))])]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_convolution_reads_its_path(width):
    forests = [random_forest(7, num_trees=2), full_row()]
    assert len(forests[1][0]) == 128
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 128, dtype=torch.float64, generator=generator)
    weight = torch.randn(3, width, dtype=torch.float64, generator=generator)
    bias = torch.randn(3, dtype=torch.float64, generator=generator)
    shapes = []

    def convolve(x, weight, bias, activation):
        shapes.append(tuple(x.shape))
        padding = weight.shape[1] - 1
        return activation(
            torch.nn.functional.conv1d(x, weight[:, None], bias, padding=padding, groups=3)[..., : x.shape[-1]]
        )

    context = context_of(*forests)
    convolve_on_tree(convolve, context, x, torch.ones(3, 5, dtype=x.dtype), bias, activation=torch.tanh)
    shapes.clear()  # another width of the same call changes nothing
    out = convolve_on_tree(convolve, context, x, weight, bias, activation=torch.tanh)
    flat_x, flat_out = (y.transpose(1, 2).reshape(256, 3) for y in (x, out))
    for path in paths_of(*forests):
        for depth in range(len(path)):
            read = flat_x[path[max(0, depth - width + 1) : depth + 1]]
            expected = (read * weight.T[-len(read) :]).sum(0) + bias
            assert torch.allclose(flat_out[path[depth]], torch.tanh(expected), atol=1e-12)
    # the rows, and where their runs begin
    assert shapes == [(2, 3, 128), (10, 3, 2 * (width - 1))][: min(width, 2)]


def sums(segments, padded):
    """A scan whose state is decayed by half at each token and counts them; a token's output is the state after it."""
    values = torch.arange(1.0, segments.num_tokens + 1, dtype=torch.float64)[:, None]
    calls = []

    def run(batch, state):
        calls.append(batch.tokens.numel())
        taken = batch.take(values)
        if padded:
            rows = taken.unbind(0)
            lengths = [taken.shape[1]] * len(rows) if batch.padding is None else (~batch.padding).sum(1).tolist()
        else:
            rows = taken[0].split(batch.bounds.diff().tolist())
            lengths = [len(row) for row in rows]
        outputs, ends = [], []
        for index, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            now = torch.zeros(1, dtype=torch.float64) if state is None else state[index]
            output = torch.zeros_like(row)
            for token in range(length):
                now = 0.5 * now + row[token]
                output[token] = now
            outputs.append(output)
            ends.append(now)
        return (torch.stack(outputs) if padded else torch.cat(outputs)[None]), torch.stack(ends)

    def affine(batch):
        lengths = (~batch.padding).sum(1) if batch.padding is not None else None
        if lengths is None:
            lengths = batch.bounds.diff() if batch.bounds is not None else torch.tensor([batch.tokens.shape[1]])
            lengths = lengths.expand(len(batch.tokens)) if batch.bounds is None else lengths
        return run(batch, None)[1], (0.5 ** lengths.double())[:, None]

    return Recurrence(run, affine, torch.mul, padded), values, calls


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("way", [fork, link])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_scans_follow_the_paths(padded, way, rows, seed):
    forests = [random_forest(seed, num_trees=2), random_forest(seed + 50, num_trees=1)][:rows]
    segments = Segments(context_of(*forests))
    recurrence, values, calls = sums(segments, padded)
    out = way(segments, recurrence)
    for path in paths_of(*forests):
        state = 0.0
        for token in path.tolist():
            state = 0.5 * state + values[token].item()
            assert out[token].item() == pytest.approx(state, rel=1e-12)
    padding = np.setdiff1d(np.arange(128 * rows), np.concatenate(paths_of(*forests)))
    assert (out[padding] == 0).all()
    assert len(calls) == (segments.num_levels if way is fork else 2)


def test_tokens_that_follow_one_another_are_not_copied():
    segments = Segments(context_of(random_forest(0, num_trees=2)))
    values = torch.randn(segments.num_tokens, 3)
    (batch,) = segments.schedule(np.arange(len(segments.start)), padded=False).batches
    taken = batch.take(values)
    assert taken.data_ptr() == values.data_ptr() and taken.shape == (1, segments.length.sum(), 3)
    (batch,) = segments.schedule(np.flatnonzero(segments.is_parent), padded=False).batches
    assert batch.first is None and torch.equal(batch.take(values), values[batch.tokens])


def test_the_cheaper_way(monkeypatch):
    def segments(*paths):
        return Segments(context_of([fold([Branch(np.array(path), np.ones(len(path))) for path in paths])]))

    rollouts = segments(*([*range(50), 60 + i] for i in range(5)))
    assert rollouts.num_levels == 2 and forking_is_cheaper(rollouts)  # linking could save no call
    caterpillar = segments(*([*range(10 * i), 90 - i] for i in range(1, 6)))
    assert caterpillar.num_levels == 5 and caterpillar.length[caterpillar.is_parent].sum() == 40
    assert not forking_is_cheaper(caterpillar)
    monkeypatch.setattr(scan, "CALL_TOKENS_CPU", 26)  # 3 calls of 26 against 40 tokens twice
    assert forking_is_cheaper(caterpillar)
    monkeypatch.setattr(scan, "CALL_TOKENS_CPU", 27)
    assert not forking_is_cheaper(caterpillar)
