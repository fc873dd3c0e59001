# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The noise: its values by an independent reading of the rules, its statistics, and what it does not depend on."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from hf_prefix_tree.diffusion.noise import (
    Corrupted,
    corrupt,
    noise_seeds,
    uniforms,
)

MASK = 999
VOCAB = 50


def seeded_noise(kind):
    def draw(ids, supervised, seeds, **options):
        return corrupt(kind, ids, supervised, seeds=seeds, mask_token_id=MASK, vocab_size=VOCAB, **options)

    return draw


SEEDED = {kind: seeded_noise(kind) for kind in ("uniform", "blockwise", "random")}
seeded = pytest.mark.parametrize("corrupt", SEEDED.values(), ids=SEEDED.keys())


def batch(size: int = 6, length: int = 37, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, a supervised mask with gaps, and seeds."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (size, length), generator=generator)
    supervised = torch.rand((size, length), generator=generator) < 0.7
    return ids, supervised, noise_seeds(torch.arange(size), seed)


def same(one: Corrupted, other: Corrupted) -> bool:
    return all(
        torch.equal(getattr(one, name), getattr(other, name))
        and getattr(one, name).dtype == getattr(other, name).dtype
        for name in ("input_ids", "is_masked", "p")
    )


def part(noisy: Corrupted, *index: object) -> Corrupted:
    return Corrupted(noisy.input_ids[index], noisy.is_masked[index], noisy.p[index])


# What the noise is.


def splitmix64(start: int, count: int) -> list[int]:
    """The published generator, in Python's integers."""
    out, state = [], start
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return out


def test_draws_are_splitmix64():
    # The first outputs of the reference implementation for the state 0; a seed and kind that start there.
    assert [hex(z) for z in splitmix64(0, 2)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]
    expected = [((z >> 12) + 0.5) / 2**52 for z in splitmix64(0, 5)]
    assert uniforms(torch.tensor([0]), 0, torch.arange(5)[None])[0].tolist() == expected


def test_draws_are_uniform_and_independent():
    seeds = torch.arange(400)  # neighbouring seeds, not mixed beforehand
    draws = torch.stack([uniforms(seeds, kind, torch.arange(250)[None]) for kind in range(3)])
    assert draws.min() > 0 and draws.max() < 1
    counts = torch.histc(draws, bins=100, min=0, max=1)
    chi2 = ((counts - 3000) ** 2 / 3000).sum().item()
    assert 50 < chi2 < 170  # 99 degrees of freedom
    centred = (draws - 0.5) * math.sqrt(12)
    for one, other in (
        (centred[0], centred[1]),  # kinds
        (centred[1], centred[2]),
        (centred[:, 1:], centred[:, :-1]),  # seeds
        (centred[..., 1:], centred[..., :-1]),  # positions
        (centred[:, 1:, :-1], centred[:, :-1, 1:]),
    ):
        assert abs((one * other).mean().item()) < 5 / math.sqrt(one.numel())


@seeded
@pytest.mark.parametrize("block_size", [None, 8])
def test_only_supervised_positions_change(corrupt, block_size):
    ids, supervised, seeds = batch(50)
    before = ids.clone(), supervised.clone()
    noisy = corrupt(ids, supervised, seeds, block_size=block_size)
    assert torch.equal(noisy.input_ids[~noisy.is_masked], ids[~noisy.is_masked])
    assert not noisy.is_masked[~supervised].any() and noisy.is_masked.any()
    assert (noisy.input_ids.dtype, noisy.is_masked.dtype, noisy.p.dtype) == (torch.int64, torch.bool, torch.float32)
    assert torch.equal(ids, before[0]) and torch.equal(supervised, before[1])
    assert same(noisy, corrupt(ids, supervised.float(), seeds, block_size=block_size))  # the collator's loss mask
    none = corrupt(ids, torch.zeros_like(supervised), seeds, block_size=block_size)
    assert torch.equal(none.input_ids, ids) and not none.is_masked.any()


def test_hidden_tokens_are_the_mask_token_and_replaced_ones_are_of_the_vocabulary():
    ids, supervised, seeds = batch(400)
    for name in ("uniform", "blockwise"):
        noisy = SEEDED[name](ids, supervised, seeds)
        assert (noisy.input_ids == MASK).equal(noisy.is_masked)
    noisy = SEEDED["random"](ids, supervised, seeds)
    drawn = noisy.input_ids[noisy.is_masked]
    counts = torch.bincount(drawn, minlength=VOCAB)
    mean = len(drawn) / VOCAB
    assert len(counts) == VOCAB and 20 < ((counts - mean) ** 2 / mean).sum() < 95  # 49 degrees of freedom
    assert (noisy.p == 1).all()
    kept = (drawn == ids[noisy.is_masked]).double().mean().item()  # counted as noisy, and as frequent as any token
    assert abs(kept - 1 / VOCAB) < 5 * math.sqrt(1 / VOCAB / len(drawn))


def test_all_masked():
    ids, supervised, seeds = batch()
    noisy = seeded_noise("all_masked")(ids, supervised.float(), seeds)
    assert torch.equal(noisy.is_masked, supervised) and noisy.p.dtype == torch.float32 and (noisy.p == 1).all()
    assert torch.equal(noisy.input_ids, torch.where(supervised, MASK, ids))


# Uniform and uniform-random: the levels and the fractions.


@pytest.mark.parametrize("eps", [1e-3, 0.4])
def test_levels_of_whole_sequences(eps: float):
    count = 4000
    ids = torch.zeros(count, 3, dtype=torch.int64)
    for name in ("uniform", "blockwise"):
        p = SEEDED[name](ids, ids + 1, noise_seeds(torch.arange(count)), eps=eps).p
        assert (p == p[:, :1]).all()
        t = ((p[:, 0].double() - eps) / (1 - eps)).sort().values
        assert t[0] > -1e-6 and t[-1] < 1 + 1e-6
        steps = torch.arange(count) / count
        assert (t - steps).abs().max() < 2 / math.sqrt(count)  # Kolmogorov-Smirnov against U(0, 1)


@pytest.mark.parametrize("name", ["uniform", "random"])
@pytest.mark.parametrize("block_size", [None, 16])
def test_fraction_is_the_level(name: str, block_size: int | None):
    """Each token is drawn on its own with probability p: mean and variance of the count per scope, given p."""
    count, length = 3000, 64
    ids = torch.zeros(count, length, dtype=torch.int64)
    seeds = noise_seeds(torch.arange(count), 5)
    noisy = SEEDED[name](ids, ids + 1, seeds, block_size=block_size)
    p = noisy.p if name == "uniform" else SEEDED["uniform"](ids, ids + 1, seeds, block_size=block_size).p
    scope = block_size or length
    p, drawn = (x.reshape(-1, scope).double() for x in (p, noisy.is_masked))
    assert (p == p[:, :1]).all() and len(p[:, 0].unique()) > 0.9 * len(p)
    deviations = (drawn.sum(1) - scope * p[:, 0]) / (scope * p[:, 0] * (1 - p[:, 0]) + 1e-9).sqrt()
    inner = deviations[(p[:, 0] > 0.05) & (p[:, 0] < 0.95)]
    assert abs(inner.mean().item()) < 5 / math.sqrt(len(inner))
    assert abs(inner.var().item() - 1) < 0.1


def test_positions_are_independent_of_each_other():
    ids = torch.zeros(20000, 3, dtype=torch.int64)
    noisy = SEEDED["uniform"](ids, ids + 1, noise_seeds(torch.arange(len(ids))))
    drawn, p = noisy.is_masked.double(), noisy.p.double()
    both = (drawn[:, 0] - p[:, 0]) * (drawn[:, 1] - p[:, 1])
    assert abs(both.mean().item()) < 5 * both.std().item() / math.sqrt(len(both))


# Block-wise: counts and weights.


@pytest.mark.parametrize("block_size", [None, 1, 5, 8, 64])
@pytest.mark.parametrize("with_start", [False, True])
def test_exact_counts(block_size: int | None, with_start: bool):
    if block_size is None and with_start:
        return
    ids, supervised, seeds = batch(200, seed=3)
    supervised[:20] = False
    supervised[20:30, 1:] = False
    start = torch.arange(len(ids)) % 11 if with_start else None
    noisy = SEEDED["blockwise"](ids, supervised, seeds, block_size=block_size, block_start=start)
    scopes = 0
    for row in range(len(ids)):
        first = int(start[row]) if with_start else 0
        members: dict[int, list[int]] = {}
        for position in range(ids.shape[1]):
            key = 0 if block_size is None else -1 if position < first else (position - first) // block_size
            members.setdefault(key, []).append(position)
        for positions in members.values():
            levels = {noisy.p[row, i].item() for i in positions}
            assert len(levels) == 1
            candidates = [i for i in positions if supervised[row, i]]
            expected = round(levels.pop() * len(candidates))
            if block_size is None and candidates:
                expected = max(expected, 1)
            assert sum(noisy.is_masked[row, i].item() for i in positions) == expected
            scopes += 1
    assert scopes >= 200


def test_a_sequence_hides_at_least_one_token_and_a_block_may_hide_none():
    ids = torch.zeros(3000, 8, dtype=torch.int64)
    seeds = noise_seeds(torch.arange(len(ids)))
    whole = SEEDED["blockwise"](ids, ids + 1, seeds)
    blocks = SEEDED["blockwise"](ids, ids + 1, seeds, block_size=8)
    low = whole.p[:, 0] < 0.5 / 8
    assert low.sum() > 100 and (whole.is_masked[low].sum(1) == 1).all()
    low = blocks.p[:, 0] < 0.5 / 8
    assert low.sum() > 100 and not blocks.is_masked[low].any()


def choice_probabilities(log_weights: list[float], count: int) -> list[float]:
    """How often each item is among `count` draws without replacement, by listing all orders."""
    weights = [math.exp(w) for w in log_weights]
    chosen = [0.0] * len(weights)
    for order in itertools.permutations(range(len(weights)), count):
        probability, left = 1.0, sum(weights)
        for item in order:
            probability *= weights[item] / left
            left -= weights[item]
        for item in order:
            chosen[item] += probability
    return chosen


@pytest.mark.parametrize("half_life", [0.25, 1.0])
@pytest.mark.parametrize("block_size", [None, 4])
def test_weights(half_life: float, block_size: int | None):
    """
    The frequency of every position against draws without replacement with the weights `exp(lambda (1 - m) i)`.

    The supervised tokens have gaps: i counts supervised tokens only.
    """
    count = 30000
    supervised = torch.tensor([[0, 1, 1, 1, 0, 0, 0, 1]] if block_size is None else [[1, 1, 1, 1, 1, 1, 1, 1]])
    ids = torch.zeros(count, 8, dtype=torch.int64)
    noisy = SEEDED["blockwise"](
        ids, supervised.expand(count, -1), noise_seeds(torch.arange(count)), half_life=half_life, block_size=block_size
    )
    columns = supervised[0].nonzero().squeeze(1)[-4:]  # one scope of four supervised tokens
    n, drawn, m = 4, noisy.is_masked[:, columns].double(), noisy.p[:, 7].double()
    bins = torch.linspace(0, 1, 41)
    checked = 0
    for low, high in itertools.pairwise(bins.tolist()):
        rows = (m >= low) & (m < high)
        wanted = {round(x * n) for x in m[rows].tolist()}
        if len(wanted) != 1 or wanted == {0} or wanted == {n}:
            continue
        middle = m[rows].mean().item()
        rate = math.log(2) / (half_life * n) * (1 - middle)
        expected = choice_probabilities([rate * i for i in range(n)], wanted.pop())
        tolerance = 5 * 0.5 / math.sqrt(rows.sum().item())
        for column in range(n):
            assert abs(drawn[rows, column].mean().item() - expected[column]) < tolerance
        checked += 1
    assert checked > 20
    few = (m > 0.126) & (m < 0.374)  # one token of four: the last one is favoured as the formula says
    frequencies = drawn[few].mean(0)
    assert frequencies[3] / frequencies[0] == pytest.approx(2 ** (3 * 0.75 / (half_life * n)), rel=0.12)


def test_blockwise_equals_a_plain_reading_of_the_rule():
    """Row by row, block by block: the k largest of log weight + Gumbel noise, from the same draws."""
    rng = random.Random(0)
    for _ in range(200):
        size, length = rng.randint(1, 4), rng.randint(1, 30)
        ids, supervised, seeds = batch(size, length, seed=rng.randint(0, 10**6))
        block_size = rng.choice([None, 1, 3, 4, 7])
        start = (
            torch.tensor([rng.randint(0, length) for _ in range(size)]) if block_size and rng.random() < 0.5 else None
        )
        eps, half_life = rng.choice([1e-3, 0.3]), rng.choice([0.1, 0.25, 2.0])
        noisy = SEEDED["blockwise"](
            ids,
            supervised,
            seeds,
            eps=eps,
            half_life=half_life,
            block_size=block_size,
            block_start=start,
        )
        for row in range(size):
            first = 0 if start is None else int(start[row])
            draws = uniforms(seeds[row : row + 1], 1, torch.arange(length)[None])[0].tolist()
            bounds = [0, *range(first, length, block_size), length] if block_size else [0, length]
            for left, right in itertools.pairwise(bounds):
                m = noisy.p[row, left:right][:1].double().sum().item()
                positions = [i for i in range(left, right) if supervised[row, i]]
                n = len(positions)
                wanted = round(m * n) if block_size else min(max(round(m * n), 1), n)
                scores = {
                    position: math.log(2) / (half_life * n) * (1 - m) * i - math.log(-math.log(draws[position]))
                    for i, position in enumerate(positions)
                }
                expected = set(sorted(scores, key=lambda i: -scores[i])[:wanted])
                assert {i for i in range(left, right) if noisy.is_masked[row, i]} == expected


# What the noise does not depend on.


@seeded
@pytest.mark.parametrize("block_size", [None, 8])
def test_noise_depends_on_the_seed_alone(corrupt, block_size):
    ids, supervised, seeds = batch(6)
    start = torch.tensor([0, 3, 8, 1, 0, 5]) if block_size else None
    whole = corrupt(ids, supervised, seeds, block_size=block_size, block_start=start)
    state = torch.get_rng_state()
    torch.manual_seed(123)

    def again(rows: list[int], padding: int = 0) -> Corrupted:
        own = torch.nn.functional.pad(ids[rows], (0, padding), value=7)
        mask = torch.nn.functional.pad(supervised[rows], (0, padding))
        return corrupt(own, mask, seeds[rows], block_size=block_size, block_start=start[rows] if block_size else None)

    assert same(again([0, 1, 2, 3, 4, 5]), whole)  # again
    assert same(again([5, 3, 1, 0, 2, 4]), part(whole, [5, 3, 1, 0, 2, 4]))  # another order
    for row in range(6):  # alone, as on another rank
        assert same(again([row]), part(whole, [row]))
    for padding in (1, 27, 91):  # in a longer batch
        longer = again([2, 4], padding)
        assert same(part(longer, slice(None), slice(0, ids.shape[1])), part(whole, [2, 4]))
        assert not longer.is_masked[:, ids.shape[1] :].any()
    torch.set_rng_state(state)
    assert not same(corrupt(ids, supervised, seeds + 1, block_size=block_size, block_start=start), whole)


@seeded
def test_padding_with_another_mask_id_or_prompt_keeps_the_choice(corrupt):
    """The ids don't decide where noise falls."""
    ids, supervised, seeds = batch(6)
    assert torch.equal(
        corrupt(ids, supervised, seeds).is_masked, corrupt(torch.zeros_like(ids), supervised, seeds).is_masked
    )


@seeded
def test_no_global_generator_is_touched(corrupt):
    state = torch.get_rng_state()
    corrupt(*batch())
    assert torch.equal(torch.get_rng_state(), state)


def test_blocks_start_where_they_are_told_to():
    ids = torch.zeros(1, 12, dtype=torch.int64)
    seeds = torch.tensor([4])
    p = SEEDED["uniform"](ids, ids + 1, seeds, block_size=4, block_start=torch.tensor([3])).p[0]
    assert [len(list(group)) for _, group in itertools.groupby(p.tolist())] == [3, 4, 4, 1]
    p = SEEDED["uniform"](ids, ids + 1, seeds, block_size=5).p[0]
    assert [len(list(group)) for _, group in itertools.groupby(p.tolist())] == [5, 5, 2]


def test_noise_seeds():
    index = torch.arange(2000)
    seeds = [noise_seeds(index, *salts) for salts in ((), (0,), (1,), (0, 1), (1, 0), (2**40,), (-1,))]
    assert len(torch.cat(seeds).unique()) == 7 * 2000  # no sample of any epoch shares a seed with another
    grid = torch.cat([noise_seeds(torch.arange(200), 42, epoch) for epoch in range(200)])
    assert len(grid.unique()) == 200 * 200  # index 3 in epoch 5 is not index 5 in epoch 3
    assert len(torch.cat([noise_seeds(torch.arange(200), epoch) for epoch in range(200)]).unique()) == 200 * 200
    assert torch.equal(noise_seeds(index, 3, 4)[70:71], noise_seeds(torch.tensor([70]), 3, 4))
    assert noise_seeds(torch.tensor([1], dtype=torch.int32), 3).dtype == torch.int64
    ids = torch.zeros(2, 40, dtype=torch.int64)
    high = SEEDED["uniform"](ids, ids + 1, torch.tensor([5, 5 + 2**32]))  # torch's CPU generators: the same for both
    assert not torch.equal(high.is_masked[0], high.is_masked[1])


def test_fixed_values():
    """Recorded from this implementation: a change of the noise changes every user's runs."""
    ids, supervised = torch.arange(12)[None], torch.ones(1, 12)
    seeds = noise_seeds(torch.tensor([0]), 42, 1)
    assert seeds.tolist() == RECORDED["seed"]
    for name, draw in SEEDED.items():
        assert draw(ids, supervised, seeds).input_ids.tolist() == RECORDED[name]


RECORDED: dict[str, list] = {
    "seed": [-2900927413331329838],
    "uniform": [[0, 1, 2, 3, 4, 999, 6, 7, 999, 999, 10, 999]],
    "blockwise": [[999, 1, 999, 3, 999, 5, 999, 7, 8, 9, 999, 999]],
    "random": [[0, 1, 2, 3, 4, 0, 6, 7, 31, 43, 10, 0]],
}


@pytest.mark.gpu
@seeded
@pytest.mark.parametrize("block_size", [None, 32])
def test_gpu_draws_the_same(corrupt, block_size):
    ids, supervised, seeds = batch(64, 777)
    expected = corrupt(ids, supervised, seeds, block_size=block_size)
    got = corrupt(ids.cuda(), supervised.cuda(), seeds.cuda(), block_size=block_size)
    assert got.input_ids.is_cuda and got.p.is_cuda
    assert same(Corrupted(got.input_ids.cpu(), got.is_masked.cpu(), got.p.cpu()), expected)
