"""Design section 7: the tree path against independent runs of every branch, in float64 where the model allows it."""

import pytest
import torch

import hf_prefix_tree.modeling.attention.interface as interface_module
import hf_prefix_tree.modeling.context as context_module
import hf_prefix_tree.modeling.prepare as model_module
from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask
from hf_prefix_tree.modeling.batch import Supervised, concatenate_trees, decode_weights
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import CONFIGS, VOCAB, branch_runs, gradients, make_model, random_forest, relative_error

TOLERANCE = 1e-10


def tree_run(model, trees, labels=True):
    row = concatenate_trees(trees, pad_token_id=0)
    if not labels:
        del row["labels"], row["loss_weights"]
    return model(**row)


def compare(model, trees):
    """Errors of loss, logits and gradients, the last two relative."""
    model.zero_grad()
    loss, logits = branch_runs(model, trees)
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    output = tree_run(model, trees)
    output.loss.backward()
    got = gradients(model)
    tree_logits = tree_run(model, trees, labels=False).logits[0]
    logits_error, start, branches = 0.0, 0, iter(logits)
    for tree in trees:
        for path in tree.paths():
            expected_logits = next(branches)
            difference = (tree_logits[torch.from_numpy(path) + start] - expected_logits).abs().max()
            logits_error = max(logits_error, (difference / expected_logits.abs().max()).item())
        start += len(tree)
    return abs((output.loss - loss).item()), logits_error, relative_error(got, expected)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_loss_logits_and_all_gradients_equal_independent_branches(name, seed):
    model = prepare_model(make_model(name)).train()
    trees = random_forest(seed, num_trees=1 + seed % 3)
    with keep_double():
        errors = compare(model, trees)
    assert max(errors) < TOLERANCE, errors
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("weighting", ["branch", "branch_mean", "once"])
def test_weightings_are_weighted_sums_of_branches(weighting):
    model = prepare_model(make_model("qwen3")).train()
    trees = random_forest(7, num_trees=2, weighting=weighting)
    total = divisor = 0.0
    with keep_double():
        for tree in trees:
            branches = tree.branches()
            supervisors = {}  # (path of the token) -> number of branches that supervise it
            for branch in branches:
                for t in range(len(branch.input_ids)):
                    if branch.weights[t] > 0:
                        prefix = tuple(branch.input_ids[: t + 1])
                        supervisors[prefix] = supervisors.get(prefix, 0) + 1
            for branch in branches:
                ids = torch.tensor(branch.input_ids)[None]
                nll = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none")
                for t in range(1, len(branch.input_ids)):
                    weight = branch.weights[t]
                    if weighting == "branch_mean":
                        weight = weight / (branch.weights > 0).sum() if weight else 0.0
                    elif weighting == "once" and weight:
                        weight = weight / supervisors[tuple(branch.input_ids[: t + 1])]
                    total, divisor = total + weight * nll[t - 1], divisor + weight
        loss = tree_run(model, trees).loss
    assert abs((total / divisor - loss).item()) < TOLERANCE


def test_rows_of_a_batch_are_independent():
    model = prepare_model(make_model("gemma3")).train()
    trees = random_forest(3, num_trees=3)
    rows = [concatenate_trees([tree], pad_token_id=0) for tree in trees]
    batch = {key: torch.cat([row[key] for row in rows]) for key in rows[0]}
    with keep_double():
        together = model(**batch).loss
        expected, _ = branch_runs(model, trees)
    assert abs((together - expected).item()) < TOLERANCE


# ---- negative controls: the same comparison must fail when something is broken ----


def causal_mask_only(prefix_tree, window=None):
    length = prefix_tree.shape[-1]
    return torch.ones((prefix_tree.shape[0], 1, length, length), dtype=torch.bool).tril()


def index_distance_window(prefix_tree, window=None):
    index = torch.arange(prefix_tree.shape[-1])
    mask = dense_mask(prefix_tree)
    return mask if window is None else mask & (index[:, None] - index[None, :] < window)


def predicted_from_index_before(prefix_tree, labels, loss_weights=None):
    where = (labels[0] != IGNORE_INDEX).nonzero().squeeze(-1)
    return Supervised(where - 1, labels[:, where], decode_weights(loss_weights)[:, where])


@pytest.mark.parametrize(
    ("name", "module", "attribute", "broken"),
    [
        ("llama", context_module, "dense_mask", causal_mask_only),
        ("gemma3", context_module, "dense_mask", index_distance_window),
        ("gpt_oss", context_module, "dense_mask", index_distance_window),
        ("llama", model_module, "gather_supervised", predicted_from_index_before),
    ],
)
def test_negative_controls_fail(monkeypatch, name, module, attribute, broken):
    model = prepare_model(make_model(name)).train()
    trees = random_forest(0)
    monkeypatch.setattr(module, attribute, broken)
    with keep_double():
        loss_error, _, gradient_error = compare(model, trees)
    assert loss_error > 1e-4
    assert gradient_error > 1e-2


def test_dropped_sinks_are_seen_by_the_comparison(monkeypatch):
    model = prepare_model(make_model("gpt_oss")).train()
    trees = random_forest(0)
    dense = interface_module.attend_dense
    without_sinks = lambda *args, sinks, **kwargs: dense(*args, sinks=sinks * 0 - 50, **kwargs)  # noqa: E731
    monkeypatch.setattr(interface_module, "attend_dense", without_sinks)
    with keep_double():
        assert max(compare(model, trees)) > 1e-3


# ---- checkpointing ----


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_gradients_are_bit_identical(name, use_reentrant):
    row = concatenate_trees(random_forest(2), pad_token_id=0)
    found = []
    for checkpointed in (False, True):
        model = prepare_model(make_model(name, dtype=torch.float32)).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            if use_reentrant:
                model.enable_input_require_grads()
        loss = model(**row).loss
        loss.backward()
        found.append({"loss": loss.detach(), **gradients(model)})
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key


# ---- locality ----


@pytest.mark.parametrize("name", CONFIGS)
def test_a_changed_token_leaves_other_branches_untouched(name):
    trunk, left, right = [5, 6, 7, 8, 9, 10], [11, 12, 13, 14], [20, 21, 22]
    model = prepare_model(make_model(name, dtype=torch.float32)).eval()
    found = []
    for changed in (12, 50):
        left[1] = changed
        tree = fold([Branch(trunk + left, [1] * 10), Branch(trunk + right, [1] * 9), Branch(trunk[:4], [1] * 4)])
        other = fold([Branch([30, 31, 32], [1] * 3)])
        with torch.no_grad():
            found.append(tree_run(model, [tree, other], labels=False).logits[0])
    on_branch = torch.zeros(len(found[0]), dtype=torch.bool)
    on_branch[7:10] = True  # from the changed token to the end of its branch
    if name in ("qwen3_moe", "gpt_oss"):
        assert (found[0] - found[1])[~on_branch].abs().max() < 1e-6
    else:
        assert torch.equal(found[0][~on_branch], found[1][~on_branch])
    assert ((found[0] - found[1])[on_branch].abs().amax(dim=-1) > 1e-3).all()


def test_bf16_error_is_at_most_twice_that_of_branches():
    trees = random_forest(5, num_trees=3)
    exact = prepare_model(make_model("qwen3", dtype=torch.float32)).eval()
    rounded = prepare_model(make_model("qwen3", dtype=torch.bfloat16)).eval()
    with torch.no_grad():
        reference = branch_runs(exact, trees)[1]
        by_branch = branch_runs(rounded, trees)[1]
        row = tree_run(rounded, trees, labels=False).logits[0]
    by_tree, start = [], 0
    for tree in trees:
        by_tree += [row[torch.from_numpy(p) + start] for p in tree.paths()]
        start += len(tree)
    errors = [
        sum((got.float() - want).square().sum() for got, want in zip(run, reference, strict=True)).sqrt().item()
        for run in (by_tree, by_branch)
    ]
    assert 0 < errors[0] <= 2 * errors[1]
    assert reference[0].shape[-1] == VOCAB
