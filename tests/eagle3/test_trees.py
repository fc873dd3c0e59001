"""Drafts on trees: the branches one by one, in fewer tokens."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, load_from_disk
from safetensors.torch import load_file
from torch.nn.attention import flex_attention as flex_module
from torch.utils.data import DataLoader, DistributedSampler

from conformance.double import keep_double
from examples.demo.dialogues import generate_dialogues
from hf_prefix_tree import (
    Branch,
    DataCollatorForEagle3,
    Eagle3Config,
    build_token_mapping,
    fold,
    pack_eagle3_dataset,
)
from hf_prefix_tree.eagle3 import attention as attention_module
from hf_prefix_tree.eagle3 import collator as collator_module
from hf_prefix_tree.eagle3.attention import dense_steps, draft_slots, flex_steps
from hf_prefix_tree.eagle3.data import prepare_eagle3_trees
from hf_prefix_tree.eagle3.loss import needed_targets
from hf_prefix_tree.eagle3.target import Eagle3Target, precompute_hidden_states
from hf_prefix_tree.eagle3.vocabulary import count_supervised
from hf_prefix_tree.modeling.attention import kernels
from hf_prefix_tree.modeling.batch import SUBTREE_END
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import PrefixTree
from tests.support.drafts import AUX, TARGETS, VOCAB, make_draft, make_target, transcription
from tests.support.eagle3_runs import distance, small_draft, train, trainer_of, weights


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
def test_trees_equal_their_branches_one_by_one(steps, target):
    """217 random trees, 1 to 6 in a batch."""
    draft = make_draft(seed=steps)
    saved = supervised = 0
    for number in range(1, 7):
        for seed in range(10 * number, 10 * number + (2 if number < 5 else 1)):
            trees = [fold(random_branches(1000 * steps + 10 * seed + index)) for index in range(number)]
            documents = as_documents([branch for tree in trees for branch in tree.branches()])
            expected = run(draft, target, documents, steps, compact=False)
            got = run(draft, target, [tree.to_dict() for tree in trees], steps, compact=True)
            error, counts_differ = differs(got, expected)
            assert error < 1e-10 and not counts_differ, seed
            assert got[3]["attention_mask"].sum() == sum(map(len, trees))
            saved += sum(tree.stats().branch_tokens - len(tree) for tree in trees)
            supervised += expected[1][1][-1]
    assert saved > 100 and supervised > 20


@pytest.mark.parametrize("steps", [1, 3])
def test_trees_equal_the_formulas(steps, target):
    """The transcription knows neither trees nor packing."""
    draft, tree = make_draft(), fold(random_branches(7))
    _, _, _, batch = expected = run(draft, target, as_documents(tree.branches()), steps, compact=False)
    with keep_double():
        states = target.states(batch)
        states["target_logits"] = target.draft_logits(states["last_hidden_states"], draft.draft_ids)
        draft.zero_grad()
        loss, counts = transcription(draft, batch, states, steps)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}
    got = run(draft, target, [tree.to_dict()], steps, compact=True)
    assert differs(got, (loss.item(), counts.tolist(), gradients)) == (pytest.approx(0, abs=1e-10), False)
    assert expected[1] == counts.tolist() and counts[1, 0] > 5


def _one_less(branches, weighting):
    """Branches share a slot as soon as they share all but the last token that it reads."""
    first, shared = {}, []
    for branch in branches:
        ids = branch.input_ids.tolist()
        keys = zip(range(len(ids)), [None, *ids[:-1]], strict=True)
        shared.append(
            Branch([first.setdefault(key, token) for key, token in zip(keys, ids, strict=True)], [0] * len(ids))
        )
    return fold(shared, weighting=weighting)


@pytest.mark.parametrize("steps", [1, 2, 4, 7])
def test_forks_moved_back_by_one_less_are_noticed(steps, target, monkeypatch):
    """The last token of the last step is then that of one of the children."""
    draft, trunk = make_draft(draft_vocab_size=None), [*range(3, 3 + steps + 4)]
    tree = fold([Branch([*trunk, token, *range(30, 34 + steps)], [1.0] * (2 * steps + 9)) for token in (40, 50, 60)])
    expected = run(draft, target, as_documents(tree.branches()), steps, compact=False)
    right = run(draft, target, [tree.to_dict()], steps, compact=True)
    monkeypatch.setattr(collator_module, "fold", _one_less)
    wrong = run(draft, target, [tree.to_dict()], steps, compact=True)
    assert wrong[3]["draft_weights"].bool().any(dim=1).sum() == right[3]["draft_weights"].bool().any(dim=1).sum() - 2
    assert differs(right, expected)[0] < 1e-10 < 1e-3 < differs(wrong, expected)[0]


def test_a_token_before_a_fork_is_a_slot_of_every_child():
    tree = fold(
        [Branch([5, 6, 7, 8, 9], [0, 0, 0, 1, 1]), Branch([5, 6, 7, 4], [0, 0, 0, 1]), Branch([5, 6, 7], [0] * 3)]
    )
    slots, sources, weights = collator_module.unrolled(tree, steps=2)
    assert tree.input_ids[sources].tolist() == [[5, 6, 7, 8, 6, 7], [6, 7, 8, 9, 7, 4], [7, 8, 9, 9, 4, 4]]
    # at the last slots of a branch its end is repeated, and does not count
    assert weights.tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 1, 0, 1, 0]]
    assert slots.depth.tolist() == [0, 1, 2, 3, 1, 2]


def test_the_vocabulary_counts_a_token_once_for_each_branch(target):
    for seed in range(5):
        tree = fold(random_branches(seed))
        parts = [tree.to_dict() for tree in split_tree(tree, int(tree.branch_lengths.max()))]
        collate, sizes = DataCollatorForEagle3(0), {"target_vocab_size": VOCAB, "draft_vocab_size": 9}
        expected = count_supervised([collate(as_documents(tree.branches()))], VOCAB)
        for features in ([tree.to_dict()], parts):
            assert torch.equal(count_supervised([collate(features)], VOCAB), expected)
        ids, _ = build_token_mapping([collate([tree.to_dict()])], **sizes)
        assert torch.equal(ids, build_token_mapping([collate(as_documents(tree.branches()))], **sizes)[0])
    assert expected.max() > 1


def test_trees_that_a_sampler_repeats_count_once():
    """Five trees for two ranks: one of them is repeated."""
    trees = [fold(random_branches(seed)).to_dict() for seed in range(5)]
    collate, total = DataCollatorForEagle3(0), torch.zeros(VOCAB, dtype=torch.int64)
    for rank in range(2):
        sampler = DistributedSampler(trees, num_replicas=2, rank=rank, shuffle=False)
        total += count_supervised(DataLoader(trees, sampler=sampler, collate_fn=collate), VOCAB)
        with pytest.raises(ValueError, match=r"repeats dataset rows.*`batch_size=1`"):
            count_supervised(DataLoader(trees, 3, sampler=sampler, collate_fn=collate), VOCAB)
    assert torch.equal(total, count_supervised([collate(trees)], VOCAB)) and total.sum() > 20
    even = DistributedSampler(trees[:4], num_replicas=2, rank=0, shuffle=False)
    counts = count_supervised(DataLoader(trees[:4], 2, sampler=even, collate_fn=collate), VOCAB)
    assert torch.equal(counts, count_supervised([collate(trees[:4:2])], VOCAB))


def test_parts_of_a_split_tree_add_up(target):
    draft, tree = make_draft(), fold(random_branches(11))
    size = int(tree.branch_lengths.max())
    parts = [part.to_dict() for part in split_tree(tree, size)]
    assert len(parts) > 1
    whole = run(draft, target, [tree.to_dict()], 3, compact=True)
    error, counts_differ = differs(run(draft, target, parts, 3, compact=True), whole)
    assert error < 1e-10 and not counts_differ


def test_what_does_not_fit_is_refused(target):
    tree = fold(random_branches(0)).to_dict()
    with pytest.raises(ValueError, match="mixes trees with documents"):
        DataCollatorForEagle3(0)([tree, {"input_ids": [5], "loss_mask": [1]}])
    with pytest.raises(ValueError, match="`ttt_steps` is 3, but the trees of the batch were collated for 2"):
        draft_slots(DataCollatorForEagle3(0, ttt_steps=2)([tree]), 3)
    batch = DataCollatorForEagle3(0)([tree, {"input_ids": []}])
    assert torch.equal(batch["draft_sources"], DataCollatorForEagle3(0)([tree])["draft_sources"])


@pytest.mark.parametrize("steps", [1, 3])
def test_flex_follows_the_paths_as_the_dense_mask_does(steps, monkeypatch):
    """FlexAttention without the compiler: its values and log-sum-exp, no kernel and no backward."""
    monkeypatch.setattr(kernels, "_call_compiled", lambda function, *args: function(*args))
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, VOCAB, size=150)
    paths = [[*trunk[:cut], *rng.integers(3, VOCAB, size=40)] for cut in (150, 90, 90, 20)]
    tree = fold([Branch(path, [0.0] * (len(path) - 9) + [1.0] * 9) for path in paths])
    draft_tree = DataCollatorForEagle3(0, ttt_steps=steps)([tree.to_dict()])["draft_tree"]
    torch.manual_seed(0)
    length = draft_tree.shape[2]
    make = lambda heads: 2 * torch.randn(1, heads, length, 16)  # noqa: E731
    query, keys, values = make(4), [make(2) for _ in range(steps)], [make(2) for _ in range(steps)]
    with torch.no_grad():
        got, want = (attend(query, keys, values, TreeContext(draft_tree)) for attend in (flex_steps, dense_steps))
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


def forks():
    """Branches of more than a block of FlexAttention that fork in and between blocks."""
    rng = np.random.default_rng(0)
    trunk = rng.integers(3, VOCAB, size=150)
    paths = [[*trunk[:cut], *rng.integers(3, VOCAB, size=40)] for cut in (150, 128, 90, 90, 20)]
    return [Branch(path, (rng.random(len(path)) < 0.7).astype(float)) for path in paths]


def run_on_flex(device, dtype, draft, target, features, spoil=None):
    """`run` by FlexAttention, in float32 or under autocast, with the states of a target in float64."""
    batch = DataCollatorForEagle3(0, length=256, ttt_steps=3)(features)
    with keep_double():
        states = target.states(batch)
        states["target_logits"] = target.draft_logits(states.pop("last_hidden_states"), draft.draft_ids)
    states = {name: x.float() if x.is_floating_point() else x for name, x in states.items()}
    model = copy.deepcopy(draft).float().to(device)
    model.attn_backend = "flex"
    if spoil is not None:
        spoil(batch["draft_tree"])
    inputs = {name: value.to(device) for name, value in {**batch, **states}.items()}
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        output = model(**inputs, ttt_steps=3)
    output.loss.backward()
    gradients = {name: p.grad.double().cpu() for name, p in model.named_parameters() if p.requires_grad}
    return output.loss.item(), [value.tolist() for value in output.sums[1:3]], gradients, batch


def compare_on_flex(device, dtype):
    """Against float64 a tree is as close as its branches; one whose branches see each other is not."""

    def branches_see_each_other(draft_tree):
        draft_tree[:, SUBTREE_END] = draft_tree.shape[2]

    target, tree = Eagle3Target(make_target(), AUX), fold(forks())
    draft, documents = make_draft(head_dim=64), as_documents(tree.branches())
    loss, counts, gradients, _ = run(draft, target, documents, 3, compact=False)
    exact = loss, counts[:2], gradients  # the draft's choices are decided by rounding
    flat, got, wrong = (
        run_on_flex(device, dtype, draft, target, *arguments)
        for arguments in ((documents,), ([tree.to_dict()],), ([tree.to_dict()], branches_see_each_other))
    )
    assert got[3]["draft_tree"].shape[2] > 2 * 128 and got[1] == flat[1] == exact[1]
    of_tree, of_flat, of_wrong = (differs(x, exact)[0] for x in (got, flat, wrong))
    assert of_tree < max(2 * of_flat, 1e-4 if dtype == torch.float32 else 1e-2) < 0.1 * of_wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_on_a_tree_is_as_close_as_on_its_branches_on_a_cpu(dtype, monkeypatch):
    """Without the compiler, and with a backward that torch only lets other devices use."""
    monkeypatch.setattr(kernels, "_call_compiled", lambda function, *args: function(*args))
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)
    monkeypatch.setattr(attention_module, "takes_flex", lambda requested, *args: requested == "flex")
    compare_on_flex("cpu", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_on_a_tree_is_as_close_as_on_its_branches(dtype):
    compare_on_flex("cuda", dtype)


# ---- training ----


def rows_of(seeds):
    """Groups of completions, as rows of branches."""
    return [
        {
            "branches": [
                {"input_ids": b.input_ids.tolist(), "weights": b.weights.tolist()} for b in random_branches(seed)
            ]
        }
        for seed in seeds
    ]


def documents_of(rows):
    trees = [fold([Branch(**branch) for branch in row["branches"]]) for row in rows]
    return [document for tree in trees for document in as_documents(tree.branches()) if any(document["loss_mask"])]


def small_target(vocabulary):
    torch.manual_seed(0)
    return type(make_target())(
        type(TARGETS["llama"]).from_dict({**TARGETS["llama"].to_dict(), "vocab_size": vocabulary})
    )


@pytest.mark.parametrize("packed_sequence_size", [0, 40])
def test_training_on_trees_equals_training_on_documents(tmp_path, packed_sequence_size):
    rows = rows_of(range(6))
    options = {"max_steps": 2, "packed_sequence_size": packed_sequence_size, "seq_length": 40, "learning_rate": 0.5}
    flat = train(tmp_path, documents_of(rows), per_device_train_batch_size=50, **options)
    start = weights(small_draft())
    # of a branch that supervises nothing the first token stays
    trees = [[b if b.weights.any() else Branch(b.input_ids[:1], [0]) for b in random_branches(i)] for i in range(6)]
    tokens = sum(len(fold(branches)) for branches in trees if any(b.weights.any() for b in branches))
    if packed_sequence_size:  # trees share sequences, and tokens in them
        args = Eagle3Config(str(tmp_path), packed_sequence_size=40, use_cpu=True)
        packed = prepare_eagle3_trees(rows, args, None, 0)
        assert len(packed) < len(rows)
        tokens = sum(len(row["input_ids"]) for row in packed)
    options |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 20}
    dataset = Dataset.from_list(rows)
    for source in (rows, dataset, dataset.to_iterable_dataset()):
        trees = trainer_of(tmp_path, source, draft=small_draft(), **options)
        computed = counted_tokens(trees.target)
        trees.train()
        assert sum(computed) == 2 * tokens  # two epochs
        assert distance(weights(trees.model), weights(flat.model), start) < 1e-5
        for first, second in zip(trees.state.log_history[:2], flat.state.log_history[:2], strict=True):
            for name in ("loss", "tau", "accuracy/step_0", "accuracy/step_2"):
                assert first[name] == pytest.approx(second[name], rel=1e-5), name


def counted_tokens(target):
    """The tokens of each forward of the target from now on, without padding."""
    computed, original = [], target.hidden_states

    def hidden_states(batch):
        aux, last = original(batch)
        assert aux.shape[:2] == last.shape[:2] == batch["input_ids"].shape
        computed.append(int(batch["attention_mask"].sum()))
        return aux, last

    target.hidden_states = hidden_states
    return computed


def test_turns_of_a_conversation_are_a_tree(tmp_path, tiny_tokenizer):
    rows = [{"messages": row["messages"], "tools": row["tools"]} for row in generate_dialogues(1, 1)]
    options = {"tokenizer": tiny_tokenizer, "target": small_target(len(tiny_tokenizer)), "draft_vocab_size": 200}
    options |= {"max_steps": 1, "seq_length": 1024, "learning_rate": 0.1, "per_device_train_batch_size": 50}
    trees = trainer_of(tmp_path, rows, **options)
    flat = trainer_of(tmp_path, pack_eagle3_dataset(rows, 1024, 0, tokenizer=tiny_tokenizer), **options)
    assert torch.equal(trees.model.draft_ids, flat.model.draft_ids)
    start = weights(flat.model)
    trees.train()
    flat.train()
    assert distance(weights(trees.model), weights(flat.model), start) < 1e-4
    assert trees.state.log_history[0]["loss"] == pytest.approx(flat.state.log_history[0]["loss"], rel=1e-5)
    documents = sum(sum(row["attention_mask"]) for row in flat.train_dataset)
    assert sum(len(row["input_ids"]) for row in trees.train_dataset) < 0.5 * documents
    results = [trees.evaluate(given) for given in (rows, flat.train_dataset)]
    for name in ("eval_loss", "eval_tau", "eval_accuracy/step_1"):
        assert results[0][name] == pytest.approx(results[1][name], rel=1e-5), name


@pytest.mark.parametrize("packed_sequence_size", [0, 40])
def test_states_are_stored_once_for_each_token_of_a_tree(tmp_path, packed_sequence_size):
    options = {"gradient_accumulation_steps": 2, "packed_sequence_size": packed_sequence_size, "seq_length": 40}
    options |= {"per_device_train_batch_size": 2, "max_steps": 2}
    online = train(tmp_path, rows_of(range(6)), **options)
    target = Eagle3Target(make_target(dtype=torch.float32), AUX)
    described = precompute_hidden_states(target, online.train_dataset, tmp_path / "states")
    for row in described:
        states = load_file(Path(row["hidden_states"]))
        assert states.keys() == {"input_ids", "prefix_tree", "aux_hidden_states", "last_hidden_states", "target_ids"}
        assert {value.shape[-1] if name == "prefix_tree" else len(value) for name, value in states.items()} == {
            len(PrefixTree.from_dict(row))
        }
    for rows in (described, load_from_disk(str(tmp_path / "states" / "rows" / "train"))):
        offline = train(tmp_path, rows, target=str(tmp_path / "states"), **options)
        assert distance(weights(offline.model), weights(online.model), weights(small_draft())) < 1e-5
    other = [{**described[0], "hidden_states": described[1]["hidden_states"]}]
    with pytest.raises(ValueError, match="other tokens"):
        train(tmp_path, Dataset.from_list(other), target=str(tmp_path / "states"), **options)
