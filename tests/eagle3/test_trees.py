"""Drafts on trees: the branches one by one, in fewer tokens."""

import numpy as np
import pytest

from conformance.double import keep_double
from hf_prefix_tree import Branch, DataCollatorForEagle3, fold
from hf_prefix_tree.eagle3.attention import draft_slots
from hf_prefix_tree.eagle3.loss import needed_targets
from hf_prefix_tree.eagle3.target import Eagle3Target
from tests.support.drafts import AUX, VOCAB, make_draft, make_target

PER_STEPS = 29  # trees for each number of steps


def random_branches(seed):
    """A few branches that fork anywhere, end inside each other and occur twice; few tokens, so that many are alike."""
    rng = np.random.default_rng(seed)
    branches = []
    for _ in range(rng.integers(2, 7)):
        start = []
        if branches and rng.random() < 0.85:
            other = branches[rng.integers(len(branches))].input_ids
            start = other[: rng.integers(1, len(other) + 1)].tolist()
        ids = [*start, *rng.integers(3, VOCAB, size=rng.integers(0 if start else 1, 9)).tolist()]
        share = rng.choice([0.0, 0.3, 0.7, 1.0])
        branches.append(Branch(ids, (rng.random(len(ids)) < share).astype(float)))
    return branches


def as_documents(branches):
    return [{"input_ids": b.input_ids.tolist(), "loss_mask": (b.weights > 0).astype(int).tolist()} for b in branches]


def run(draft, target, features, steps, compact):
    """Loss, the counts of each step, and the gradients of a batch."""
    batch = DataCollatorForEagle3(0, ttt_steps=steps)(features)
    draft.zero_grad()
    with keep_double():
        states = target.states(batch)
        last = states.pop("last_hidden_states")
        if compact:
            where, states["draft_targets"] = needed_targets(draft_slots(batch, steps), batch["input_ids"].numel())
            last = last.flatten(0, 1)[where]
            states["target_ids"] = target.choices(last)
        output = draft(**batch, **states, target_logits=target.draft_logits(last, draft.draft_ids), ttt_steps=steps)
        output.loss.backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}
    return output.loss.item(), [value.tolist() for value in output.sums[1:]], gradients, batch


def differs(got, expected):
    """By how much loss and gradients differ, relative to the largest; whether counts do."""
    error = abs(got[0] - expected[0]) / max(abs(expected[0]), 1e-12)
    for name, gradient in expected[2].items():
        error = max(error, ((got[2][name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-12)).item())
    return error, got[1] != expected[1]


@pytest.fixture(scope="module")
def target():
    return Eagle3Target(make_target(), AUX)


@pytest.mark.parametrize("steps", range(1, 8))
def test_a_tree_equals_its_branches_one_by_one(steps, target):
    draft = make_draft(seed=steps)
    shared = supervised = 0
    for seed in range(PER_STEPS):
        branches = random_branches(100 * steps + seed)
        tree = fold(branches)
        expected = run(draft, target, as_documents(branches), steps, compact=False)
        got = run(draft, target, [tree.to_dict()], steps, compact=True)
        error, counts_differ = differs(got, expected)
        assert error < 1e-10 and not counts_differ, seed
        assert got[3]["attention_mask"].sum() == len(tree)
        shared += tree.stats().branch_tokens - len(tree)
        supervised += expected[1][1][-1]
    assert shared > 100 and supervised > 20
