"""`measure_speedup`: what is timed, that it changes nothing, and that ranks stay together. Tokens are the seconds."""

import functools

import numpy as np
import pytest
import torch

from hf_prefix_tree import DataCollatorForPrefixTree
from hf_prefix_tree.batch import IGNORE_INDEX, concatenate_trees
from hf_prefix_tree.trainers import speedup
from hf_prefix_tree.trainers.card import tree_section
from hf_prefix_tree.trainers.speedup import root_to_leaf_paths
from hf_prefix_tree.tree import Branch, fold
from tests.support.engine_runs import FSDP2, read, train_engine
from tests.support.models import random_forest
from tests.support.ranks import run_ranks
from tests.support.trainer_runs import config, distance, make_model, make_trees, train, weights


class TokenClock:
    """Counts the tokens of all forwards instead of seconds."""

    def __init__(self, model):
        self.tokens, self.calls = 0, 0
        model.model.register_forward_pre_hook(self.count, with_kwargs=True)

    def count(self, module, args, kwargs):
        self.tokens += kwargs["input_ids"].numel()
        self.calls += 1

    def perf_counter(self):
        return self.tokens


def test_paths_are_the_branches_that_no_other_goes_on_from():
    trees = random_forest(0, 4, num_branches=6)
    batch = concatenate_trees(trees, pad_token_id=0)
    found = {(tuple(path.input_ids), tuple(path.branch_count > 0)) for path in root_to_leaf_paths(batch)}
    expected = set()
    for tree in trees:
        ids = [tuple(branch.input_ids) for branch in tree.branches()]
        for path in tree.paths():
            own = tuple(tree.input_ids[path])
            if not any(other != own and other[: len(own)] == own for other in ids):
                supervised = batch["labels"].new_tensor(tree.branch_count[path]) > 0
                expected.add((own, tuple(supervised.tolist())))
    assert found == expected and len(found) > 8
    two_rows = {name: value.expand(2, *value.shape[1:]) for name, value in batch.items()}
    assert len(root_to_leaf_paths(two_rows)) == 2 * len(root_to_leaf_paths(batch))


def run(folder, trees, monkeypatch, **kwargs):
    model = make_model()
    clock = TokenClock(model)
    monkeypatch.setattr(speedup, "time", clock)
    trainer = train(folder, trees, model=model, learning_rate=0.3, max_steps=4, **kwargs)
    return trainer, clock


def test_the_third_step_measures_once_and_changes_nothing(tmp_path, monkeypatch):
    trees = make_trees(8)
    plain, clock = run(tmp_path / "plain", trees, monkeypatch, gradient_accumulation_steps=2)
    calls = clock.calls
    measured, clock = run(
        tmp_path / "measured", trees, monkeypatch, gradient_accumulation_steps=2, measure_speedup=True
    )
    row = DataCollatorForPrefixTree(pad_token_id=0)([trees[4]])  # the first micro-batch of the third step
    paths = root_to_leaf_paths(row)
    tokens = sum(concatenate_trees([path], pad_token_id=0)["input_ids"].numel() for path in paths)
    logged = [
        (entry["step"], entry["tree/speedup"]) for entry in measured.state.log_history if "tree/speedup" in entry
    ]
    assert logged == [(3, tokens / row["input_ids"].numel())] and logged[0][1] > 1
    assert clock.calls == calls + 2 * (1 + len(paths))  # the row and its paths, each once to warm up
    start = weights(make_model())
    assert distance(weights(measured.model), weights(plain.model)) == 0 < distance(weights(plain.model), start)
    assert f"| {logged[0][1]:.2f}x faster |" in tree_section(measured.state.log_history, "tree")
    assert "faster" not in tree_section(plain.state.log_history, "tree")


def test_training_draws_the_random_numbers_that_it_would_have_drawn(tmp_path):
    found = []
    for measure in (False, True):
        model, drawn = make_model(), []

        def draw(module, args, output, drawn=drawn):
            number = torch.rand(()).item()
            if torch.is_grad_enabled():
                drawn.append(number)

        model.model.layers[0].register_forward_hook(draw)
        train(tmp_path, make_trees(4), model=model, max_steps=4, measure_speedup=measure)
        found.append(drawn)
    assert found[0] == found[1] and len(set(found[0])) >= 4


class Compiled:
    """A model whose first forward of every length costs 1,000 tokens more, on a clock of tokens."""

    def __init__(self):
        self.tokens, self.lengths = 0, set()

    def __call__(self, input_ids, **kwargs):
        length = input_ids.shape[1]
        self.tokens += length + 1000 * (length not in self.lengths)
        self.lengths.add(length)

    def perf_counter(self):
        return self.tokens


@pytest.mark.parametrize("surplus", [0, 3])
def test_neither_compilation_nor_surplus_forwards_count(monkeypatch, surplus):
    """Surplus forwards keep a rank with fewer paths in step with the others."""
    model = Compiled()
    monkeypatch.setattr(speedup, "time", model)
    trees = [fold([Branch(np.arange(3, 3 + n), np.ones(n)) for n in (100, 200, 400)]), *random_forest(0, 2)]
    collate = functools.partial(concatenate_trees, pad_token_id=0)
    seconds = speedup.seconds_of_forwards(model, collate(trees), collate, lambda number: number + surplus)
    paths = [collate([path])["input_ids"].shape[1] for path in root_to_leaf_paths(collate(trees))]
    assert len(set(paths)) > 1
    assert seconds.tolist() == [collate(trees)["input_ids"].shape[1], sum(paths)]


def test_a_row_of_padding_is_timed_as_it_is(monkeypatch):
    model, empty = Compiled(), concatenate_trees([], pad_token_id=0)
    monkeypatch.setattr(speedup, "time", model)
    assert (empty["labels"] == IGNORE_INDEX).all() and not root_to_leaf_paths(empty)
    assert speedup.seconds_of_forwards(model, empty, concatenate_trees, lambda number: 3).tolist() == [128, 128]


def test_a_training_of_two_steps_says_that_nothing_was_measured(tmp_path, caplog):
    trainer = train(tmp_path, make_trees(2), max_steps=2, measure_speedup=True)
    assert not any("tree/speedup" in entry for entry in trainer.state.log_history)
    assert "`measure_speedup=True` measured nothing" in caplog.text


def test_grouped_mode_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"`measure_speedup=True`.*`mode='grouped'`"):
        config(tmp_path, measure_speedup=True, mode="grouped")


@pytest.mark.parametrize("engine", [{}, FSDP2], ids=["ddp", "fsdp2"])
def test_ranks_do_as_many_forwards_as_each_other(tmp_path, engine):
    for folder, measure in (("plain", False), ("measured", True)):
        (tmp_path / folder).mkdir()
        options = {**engine, "max_steps": 4, "measure_speedup": measure}
        run_ranks(train_engine, tmp_path / folder, options, 2, ranks=2)
    (plain, _), (measured, log) = (read(tmp_path / folder) for folder in ("plain", "measured"))
    assert distance(measured, plain) == 0 < distance(plain, weights(make_model()))
    assert [entry["step"] for entry in log if entry.get("tree/speedup", 0) > 0] == [3]
