"""Hybrid models on trees against independent runs of every branch, in float64 kept through float32 casts."""

import functools

import numpy as np
import pytest
import torch

from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.recurrent import hooks, layers, scan
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.hybrids import FAMILIES, KINDS, errors, make_hybrid, served_here
from tests.support.models import branch_runs, gradients, random_forest, relative_error

TOLERANCE = 1e-9
WAYS = {"forked": lambda segments: True, "linked": lambda segments: segments.num_levels < 2}


def edge_cases():
    """Single-token nodes inside and at leaves, a strict prefix, a duplicate, a tree of one token, one of two."""
    trunk, middle = list(range(10, 21)), list(range(30, 39))
    single = [[*trunk, *middle, 40], [*trunk, *middle, 41, 42, 43], [*trunk, *middle], [*trunk, 50], [*trunk[:5], 51]]
    single += [[*trunk, 60, *range(61, 66)], [*trunk, 60, *range(71, 80)], single[0]]
    rng = np.random.default_rng(0)
    branches = [Branch(np.array(path), rng.uniform(0.1, 2.0, len(path))) for path in single]
    return [fold(branches), fold([Branch(np.array([5]), [1.0])]), fold([Branch(np.array([6, 7]), [1.0, 1.0])])]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_equals_independent_branches(model_type):
    served_here(model_type)
    model = prepare_model(make_hybrid(model_type)).train()
    with keep_double():
        found = errors(model, random_forest(3, num_trees=2))
    assert max(found) < TOLERANCE, found
    assert sum(p.grad is not None for p in model.parameters()) > 10


@pytest.mark.parametrize("kind", ["delta", "mamba2", "kda"])
@pytest.mark.parametrize("way", WAYS)
def test_forking_and_linking_are_exact(monkeypatch, kind, way):
    model = prepare_model(make_hybrid(KINDS[kind])).train()
    monkeypatch.setattr(scan, "forking_is_cheaper", WAYS[way])
    for trees in (edge_cases(), random_forest(0, num_trees=3, num_branches=4)):
        with keep_double():
            found = errors(model, trees)
        assert max(found) < TOLERANCE, found


def test_a_convolution_alone_is_exact():
    served_here("lfm2")
    model = prepare_model(make_hybrid("lfm2")).train()
    with keep_double():
        found = errors(model, edge_cases())
    assert max(found) < TOLERANCE, found


@pytest.mark.parametrize("kind", ["delta", "mamba2"])
def test_long_segments_of_unequal_length(monkeypatch, kind):
    """More than one chunk in a segment, several padded batches in a level, many levels."""
    rng = np.random.default_rng(1)
    trunk, paths = rng.integers(3, 97, 150), []
    for length, end in ((150, 3), (70, 90), (130, 140), (20, 1)):
        paths.append(np.concatenate([trunk[:length], rng.integers(3, 97, end)]))
    trees = [fold([Branch(path, rng.uniform(0, 1, len(path))) for path in paths])]
    model = prepare_model(make_hybrid(KINDS[kind])).train()
    for way in WAYS.values():
        monkeypatch.setattr(scan, "forking_is_cheaper", way)
        with keep_double():
            found = errors(model, trees)
        assert max(found) < TOLERANCE, found


@pytest.mark.parametrize("kind", ["delta", "convolution", "mamba2"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_a_batch_are_independent(monkeypatch, kind, way):
    served_here(KINDS[kind])
    model = prepare_model(make_hybrid(KINDS[kind])).train()
    monkeypatch.setattr(scan, "forking_is_cheaper", WAYS[way])
    trees = random_forest(4, num_trees=2)
    rows = [concatenate_trees([tree], pad_token_id=0) for tree in trees]
    rows.insert(1, concatenate_trees([], pad_token_id=0))  # a row of padding between them
    batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    with keep_double():
        expected, _ = branch_runs(model, trees)
        expected.backward()
        gradient = gradients(model)
        model.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        assert abs((loss - expected).item()) < TOLERANCE
        assert relative_error(gradients(model), gradient) < TOLERANCE


@pytest.mark.parametrize("kind", ["delta", "convolution", "mamba2"])
def test_a_batch_of_padding_weighs_nothing(kind):
    served_here(KINDS[kind])
    model = prepare_model(make_hybrid(KINDS[kind], dtype=torch.float32)).train()
    loss = model(**concatenate_trees([], pad_token_id=0)).loss
    loss.backward()
    assert loss == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("kind", ["delta", "convolution", "mamba2"])
def test_padding_that_is_not_declared_disturbs_nothing(kind):
    """Without an attention mask padding tokens are trees of one token."""
    served_here(KINDS[kind])
    model = prepare_model(make_hybrid(KINDS[kind])).train()
    row = concatenate_trees(random_forest(2), pad_token_id=0)
    with keep_double(), torch.no_grad():
        expected = model(**row).loss
        del row["attention_mask"]
        assert abs((model(**row).loss - expected).item()) < TOLERANCE


def test_float32_is_as_close_as_branches_are_to_float64():
    for kind in ("delta", "mamba2"):
        trees = random_forest(5, num_trees=2)
        exact = prepare_model(make_hybrid(KINDS[kind])).eval()
        rounded = prepare_model(make_hybrid(KINDS[kind], dtype=torch.float32)).eval()
        rounded.load_state_dict({name: value.float() for name, value in exact.state_dict().items()})
        with keep_double(), torch.no_grad():
            reference = branch_runs(exact, trees)[1]
        with torch.no_grad():
            by_branch = branch_runs(rounded, trees)[1]
            row = {k: v for k, v in concatenate_trees(trees, pad_token_id=0).items() if k != "labels"}
            logits, start, by_tree = rounded(**row).logits[0], 0, []
        for tree in trees:
            by_tree += [logits[torch.from_numpy(path) + start] for path in tree.paths()]
            start += len(tree)
        tree_error, branch_error = (
            sum((got.double() - want).square().sum() for got, want in zip(run, reference, strict=True)).sqrt().item()
            for run in (by_tree, by_branch)
        )
        assert 0 < tree_error <= 2 * branch_error, (kind, tree_error, branch_error)


# ---- negative controls: the same comparison must fail when something is broken ----


def as_one_row(function, context, *args, **kwargs):
    return function(*args, **kwargs)


def from_zero(recurrence, schedule, before, scan_segments=scan._scan):
    return scan_segments(recurrence, schedule, None if before is None else torch.zeros_like(before))


def nothing_above(segments, taps):
    reads, is_nothing, kept, writes = starts_of_runs(segments, taps)
    is_nothing.reshape(-1, 2 * taps)[:, :taps] = 1
    return reads, is_nothing, kept, writes


starts_of_runs = layers._starts_of_runs


def first_parent(values, among, find=scan._places):
    return np.zeros_like(find(values, among))


CONTROLS = {
    "states are not handed over": lambda patch: patch.setattr(scan, "_scan", from_zero),
    "states come from the wrong parent": lambda patch: patch.setattr(scan, "_places", first_parent),
    "the convolution sees no path": lambda patch: patch.setattr(layers, "_starts_of_runs", nothing_above),
    "the convolution reads the row": lambda patch: patch.setitem(hooks._ON_TREE, "causal_conv1d_fn", as_one_row),
    "the delta rule scans the row": lambda patch: patch.setitem(
        hooks._ON_TREE, "torch_chunk_gated_delta_rule", as_one_row
    ),
    "mamba2 scans the row": lambda patch: patch.setitem(hooks._ON_TREE, "mamba2_chunk_scan", as_one_row),
}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("way", WAYS)
def test_without_the_hand_over_the_comparison_fails(monkeypatch, control, way):
    kind = "mamba2" if "mamba2" in control else "delta"
    model = prepare_model(make_hybrid(KINDS[kind])).train()
    monkeypatch.setattr(scan, "forking_is_cheaper", WAYS[way])
    CONTROLS[control](monkeypatch)
    with keep_double():
        loss_error, logits_error, gradient_error = errors(model, random_forest(3, num_trees=2))
    assert loss_error > 1e-5 and logits_error > 1e-3 and gradient_error > 1e-2


def test_self_verification_sees_it_too(monkeypatch):
    monkeypatch.setattr(scan, "_scan", from_zero)
    with pytest.raises(ValueError, match="logits"):
        prepare_model(make_hybrid("qwen3_5_text", dtype=torch.float32))


# ---- checkpointing ----


@pytest.mark.parametrize("kind", ["delta", "convolution", "mamba2"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_gradients_are_bit_identical(kind, use_reentrant):
    served_here(KINDS[kind])
    row = concatenate_trees(random_forest(2), pad_token_id=0)
    found = []
    for checkpointed in (False, True):
        model = prepare_model(make_hybrid(KINDS[kind], dtype=torch.float32)).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        loss = model(**row).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key


def test_recomputation_follows_the_tree_again(monkeypatch):
    """Layers are recomputed after the call, when only their keyword arguments still know the tree."""
    calls = []
    original = hooks._ON_TREE["causal_conv1d_fn"]
    counted = functools.wraps(original)(lambda *a, **k: calls.append(1) or original(*a, **k))
    monkeypatch.setitem(hooks._ON_TREE, "causal_conv1d_fn", counted)
    model = prepare_model(make_hybrid("qwen3_5_text", dtype=torch.float32)).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    row = concatenate_trees(random_forest(2), pad_token_id=0)
    model(**row)  # verifies nothing more: the model was verified when it was prepared
    calls.clear()
    model(**row).loss.backward()
    assert len(calls) == 2 * model.config.layer_types.count("linear_attention")
