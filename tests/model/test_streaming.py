# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A packed sequence in sections: loss and all gradients are those of the whole and of the branches, in float64."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from conformance.double import keep_double
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling import streaming
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask, tree_block_mask
from hf_prefix_tree.modeling.batch import concatenate_trees, summed_weights
from hf_prefix_tree.modeling.streaming import kept_on_host, plan, sections_of, stream
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.hybrids import make_hybrid
from tests.support.models import VOCAB, branch_runs, gradients, random_branches, relative_error
from tests.support.ranks import run_ranks
from tests.support.streaming_runs import KINDS, compare_ranks, forest, forget, make_model

TOLERANCE = 1e-10


def streamed(model, trees, max_tokens, **options):
    """The loss, with gradients, and the sections."""
    batch = concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=1)
    divisor, losses = summed_weights(batch).item(), []

    def forward(section):
        loss = model(**section.inputs, num_items_in_batch=divisor).loss
        losses.append(loss.item())
        return loss

    model.zero_grad()
    sections = sections_of(batch, max_tokens, **{"multiple": 4, **options})
    stream(sections, [section.name for section in sections], forward, lambda loss: loss.backward())
    return sum(losses), sections


def whole(model, trees):
    model.zero_grad()
    loss = model(**concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=1)).loss
    loss.backward()
    return loss.item(), gradients(model)


def check(model, seed):
    trees = forest(seed)
    max_tokens = int(np.random.default_rng([seed, 1]).integers(1, 24))
    with keep_double():
        loss, expected = whole(model, trees)
        model.zero_grad()
        of_branches, _ = branch_runs(model, trees)
        of_branches.backward()
        by_branch = gradients(model)
        got, sections = streamed(model, trees, max_tokens, on_host=bool(seed % 2))
        found = gradients(model)
    assert max(section.inputs["attention_mask"].sum() for section in sections) <= max_tokens
    assert got == pytest.approx(loss, rel=TOLERANCE) and got == pytest.approx(of_branches.item(), rel=TOLERANCE)
    assert relative_error(found, expected) < TOLERANCE and relative_error(found, by_branch) < TOLERANCE
    return len(sections)


def with_weight(seeds):
    return [seed for seed in seeds if any(tree.weights.any() for tree in forest(seed))]


@pytest.mark.parametrize("name", KINDS)
def test_sections_are_the_whole_and_the_branches(name):
    model = make_model(name)
    assert max(check(model, seed) for seed in with_weight(range(KINDS.index(name), 40, 13))) > 3


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_200_forests(name):
    model = make_model(name)
    seeds = with_weight(range(1000 + 100 * KINDS.index(name), 1100 + 100 * KINDS.index(name)))[:23]
    assert len(seeds) == 23 and sum(check(model, seed) > 3 for seed in seeds) > 10


@pytest.mark.parametrize(
    ("kinds", "seeds"),
    [(["gpt_oss"], [1, 2, 4]), pytest.param(KINDS, list(range(100, 124, 2)), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_two_ranks(tmp_path, kinds, seeds):
    """Forests of other sizes on each rank, under DDP; many are 216, 24 for each kind of models."""
    run_ranks(compare_ranks, tmp_path, kinds, seeds, ranks=2, timeout=1200)


@pytest.mark.slow
def test_two_ranks_without_handed_over_gradients_fail(tmp_path):
    """Negative control."""
    run_ranks(compare_ranks, tmp_path, KINDS, [100, 104], True, ranks=2, timeout=300)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("offloaded", [False, True])
def test_checkpointing(reentrant, offloaded):
    """Recomputed layers read the same path, and add their gradients once."""
    model, trees = make_model("gpt_oss"), forest(5)
    _, expected = whole(model, trees)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert model.model.layers[0].gradient_checkpointing
    forward = model.forward

    def offload(*args, **kwargs):
        with kept_on_host(kwargs["input_ids"].shape[1]):
            return forward(*args, **kwargs)

    if offloaded:
        model.forward = offload
    _, sections = streamed(model, trees, 4, on_host=offloaded)
    assert len(sections) > 5
    assert relative_error(gradients(model), expected) < 1e-6  # norms and routers compute in float32


def test_the_host_keeps_keys_of_paths_that_autograd_saves(monkeypatch):
    """Without checkpointing every section saves them, so on the GPU they would grow with the square of the path."""
    copied, empty_like = [], torch.empty_like

    def recorded(tensor, **kwargs):
        if kwargs.get("device") == "cpu":
            copied.append(tuple(tensor.shape))
        return empty_like(tensor, **kwargs)

    monkeypatch.setattr(torch, "empty_like", recorded)
    _, sections = streamed(make_model("llama"), forest(5), 11, on_host=True)
    keys = {(section.start + section.length, section.length) for section in sections if section.start}
    # Four heads of 8: all that belongs to sections of 4 tokens looks like theirs.
    of_paths = {number for number, length in keys if length > 8} - {number for number, length in keys if length == 4}
    assert of_paths == {24, 28, 32} and of_paths <= {shape[2] for shape in copied if len(shape) == 4}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_a_path_is_freed_with_its_sections(checkpointing, on_host):
    """At once: the next step makes the same tensors, 12 GiB for a path of 40k tokens of Qwen3-0.6B."""
    model = make_model("llama")
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    gc.collect()
    gc.disable()
    try:
        _, sections = streamed(model, forest(5), 4, on_host=on_host)
        layers = sections[0].store.layers.values()
        kept = [weakref.ref(tensor) for layer in layers for tensor in (*layer.kept, *layer.sums)]
        assert len(kept) == 8 and all(tensor() is not None for tensor in kept)
        del sections, layers
        assert not any(tensor() is not None for tensor in kept)
    finally:
        gc.enable()


def test_what_was_fetched_for_a_frozen_layer_is_not_read_later():
    """The layer below is fetched during a recomputation, but one without a backward is not recomputed."""
    model, trees = make_model("llama"), forest(5)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("model.layers.1.", "model.norm.")))
    _, expected = whole(model, trees)
    model.enable_input_require_grads = lambda: None  # what enabling calls in some versions
    model.gradient_checkpointing_enable({"use_reentrant": False})
    _, sections = streamed(model, trees, 4, on_host=True)
    assert len(sections) > 5 and relative_error(gradients(model), expected) < 1e-6  # norms compute in float32


def end_late(monkeypatch):
    """
    Copies as a GPU may do them at the latest: when they are waited for, in order within a layer. Until then there is
    no number in their target. Nothing but the layer keeps the GPU's tensor. Returns the copies that have not ended.
    """
    unfinished = []

    def begin(layer, target, source):
        is_fetch = target._base is None
        target.fill_(torch.nan)
        tensors = (weakref.ref(target), lambda: source) if is_fetch else (lambda: target, weakref.ref(source))
        unfinished.append((layer, tensors, end := object()))
        return end

    def wait(layer, end):
        while any(copy[2] is end for copy in unfinished):
            copy = next(copy for copy in unfinished if copy[0] is layer)
            unfinished.remove(copy)
            target, source = (tensor() for tensor in copy[1])
            target.copy_(source)  # `None` where memory was free before the end

    monkeypatch.setattr(streaming._Layer, "_copy", begin)
    monkeypatch.setattr(streaming._Layer, "wait", wait)
    return unfinished


@pytest.mark.parametrize("checkpointing", [False, True])
def test_copies_are_waited_for(monkeypatch, checkpointing):
    model = make_model("gpt_oss")
    for seed in (3, 5):
        _, expected = whole(model, forest(seed))
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with monkeypatch.context() as patch:
            unfinished = end_late(patch)
            _, sections = streamed(model, forest(seed), 4, on_host=True)
        model.gradient_checkpointing_disable()
        assert len(sections) > 5 and not unfinished
        assert relative_error(gradients(model), expected) < 1e-6


@pytest.mark.parametrize("where", ["extended", "handed_over"])
def test_copies_are_waited_for_after_an_error(monkeypatch, where):
    """Out of memory, say: what they read and write would be free, and given to others, before their end."""
    model, calls, run, begun = make_model("llama"), [], getattr(streaming._Layer, where), []
    unfinished = end_late(monkeypatch)

    def fail(layer, *args):
        calls.append(args)
        result = run(layer, *args)
        if len(calls) == 11:
            begun.extend(unfinished)
            raise ValueError("out of memory")
        return result

    monkeypatch.setattr(streaming._Layer, where, fail)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(ValueError, match="out of memory"):
        streamed(model, forest(5), 4, on_host=True)
    assert begun and not unfinished


def test_a_deep_path_is_a_chain_of_sections():
    """Longer than a section, without a fork: what is passed down the chain comes up again."""
    rng = np.random.default_rng(0)
    model = make_model("gemma3")
    trees = [fold([Branch(rng.integers(3, VOCAB, size=60), np.ones(60))])]
    with keep_double():
        _, expected = whole(model, trees)
        _, sections = streamed(model, trees, 7)
        assert [len(section.name) for section in sections] == list(range(1, 10))
        assert relative_error(gradients(model), expected) < TOLERANCE


@pytest.mark.parametrize("on_host", [False, True])
def test_gradients_of_a_path_are_summed_in_float32(on_host):
    """In bfloat16, a sum of ones ends at 256."""
    tree = fold([Branch([5, token], np.ones(2)) for token in range(6, 406)])
    batch = concatenate_trees([tree], pad_token_id=0)
    layer, sections = torch.nn.Module(), sections_of(batch, 1, on_host=on_host, multiple=1)
    leaves = []

    def forward(section):
        leaves.append([torch.zeros(1, 1, section.length, 2, dtype=torch.bfloat16, requires_grad=True) for _ in "kv"])
        return sum(
            x[:, :, 0].float().sum() for x in section.extend(layer, *leaves[-1])
        )  # of the root and of none else

    stream(sections, [section.name for section in sections], forward, lambda loss: loss.backward())
    assert len(sections) == 401 and all(x.grad[0, 0, 0].tolist() == [400.0, 400.0] for x in leaves[0])  # 401, rounded


# ---- negative controls ----


def test_without_handed_over_gradients_the_comparison_fails(monkeypatch):
    monkeypatch.setattr(streaming._Layer, "handed_over", forget)
    model = make_model("llama")
    with keep_double():
        _, expected = whole(model, forest(3))
        streamed(model, forest(3), 6)
    assert relative_error(gradients(model), expected) > 1e-2


def test_labels_that_stay_with_their_token_fail(monkeypatch):
    """A token that begins a section is predicted in an earlier one."""
    cut = streaming._cut
    monkeypatch.setattr(streaming, "_cut", lambda *args: cut(*args[:3], args[3][:0], args[4]))
    model = make_model("llama")
    with keep_double():
        loss, _ = whole(model, forest(3))
        got, _ = streamed(model, forest(3), 6)
    assert abs(loss - got) > 1e-2


def test_a_window_by_index_fails(monkeypatch):
    """Positions of a section continue its path."""
    cut = streaming._cut

    def from_zero(*args):
        inputs = cut(*args)
        for depth in (inputs["position_ids"], inputs["prefix_tree"][:, 1]):
            depth.sub_(depth[:, :1].clone()).clamp_(min=0)
        return inputs

    monkeypatch.setattr(streaming, "_cut", from_zero)
    model = make_model("mistral")
    with keep_double():
        loss, _ = whole(model, forest(0))
        got, _ = streamed(model, forest(0), 6)
    assert abs(loss - got) > 1e-3


def test_a_backward_that_misses_a_layer_raises():
    model, batch = make_model("llama"), concatenate_trees(forest(3), pad_token_id=0)
    sections = sections_of(batch, 6)

    def forward(section):
        loss = model(**section.inputs).loss
        return 0 * model.lm_head.weight.sum() if section.is_open else loss

    with pytest.raises(RuntimeError, match="did not reach all layers"):
        stream(sections, [section.name for section in sections], forward, lambda loss: loss.backward())


# ---- the cut ----


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_computed_once_on_its_path(seed):
    trees = forest(seed)
    batch = concatenate_trees(trees, pad_token_id=0)
    max_tokens = 1 + seed
    sections = sections_of(batch, max_tokens)
    tokens = [section.inputs["input_ids"][section.inputs["attention_mask"] == 1] for section in sections]
    assert torch.equal(torch.cat(tokens), batch["input_ids"][batch["attention_mask"] == 1])
    labels = torch.cat([section.inputs["labels"][section.inputs["prefix_tree"][:, 2] >= 0] for section in sections])
    kept = batch["labels"][(batch["labels"] >= 0) & (batch["prefix_tree"][:, 2] >= 0)]
    assert torch.equal(labels[labels >= 0].sort()[0], kept.sort()[0])
    summed = sum(summed_weights(section.inputs).item() for section in sections)
    assert summed == pytest.approx(summed_weights(batch).item(), rel=1e-12)
    # in order, an open section has room for its own tokens behind those that it reads
    ends = {(): 0}
    for section in sections:
        assert section.start == ends[section.name[:-1]]
        ends[section.name] = section.start + section.length if section.is_open else None


def test_sections_of_completions_wait_for_their_prompt_alone():
    """A prompt of 4 sections and 16 completions: one at a time waits beside it, and short ones share a pass."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(3, VOCAB, size=400)
    tails = [[first, *rng.integers(3, VOCAB, size=89)] for first in range(3, 19)]
    branches = [Branch(np.append(prompt, tail), np.ones(490)) for tail in tails]
    subtree_end = fold(branches).subtree_end
    for max_tokens, number, completions in ((100, 4, 16), (150, 3, 16), (200, 2, 8)):
        planned = plan(subtree_end, max_tokens)
        assert [is_open for *_, is_open in planned] == [True] * number + [False] * completions
        assert planned[number][0] == 400  # where the prompt ends


def test_a_caterpillars_side_branches_share_passes():
    trunk = np.arange(3, 93)
    sides = [Branch(np.append(trunk[:end], [1, 2]), np.ones(end + 2)) for end in range(10, 90)]
    tree = fold([*sides, Branch(trunk, np.ones(90))])
    planned = plan(tree.subtree_end, 50)
    assert len(planned) <= -(-len(tree) // 50) + 1


# ---- masks ----


@pytest.mark.parametrize("limit", [{}, {"window": 5}, {"window": 200}, {"chunk": 8}, {"chunk": 300}])
def test_block_masks_with_a_path_are_the_dense_ones(limit):
    rng = np.random.default_rng(0)
    branches = random_branches(rng, num_branches=30, max_length=500)
    batch = concatenate_trees([fold(branches)], pad_token_id=0)
    seen = 0
    for section in sections_of(batch, 200):
        tree, path = section.inputs["prefix_tree"], section.path
        dense, blocks = dense_mask(tree, path, **limit), tree_block_mask(tree, path, **limit)
        assert dense.shape[-1] == path.shape[-1] + tree.shape[-1]
        query, key = torch.arange(dense.shape[2])[:, None], torch.arange(dense.shape[3])
        assert torch.equal(blocks.mask_mod(torch.tensor(0), None, query, key), dense[0, 0])
        in_blocks = dense.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))[0, 0].permute(0, 2, 1, 3)
        assert torch.equal(blocks.to_dense()[0, 0].bool(), in_blocks.any(-1).any(-1) | blocks.to_dense()[0, 0].bool())
        full = torch.zeros_like(blocks.to_dense()[0, 0], dtype=torch.bool)
        for row, count in enumerate(blocks.full_kv_num_blocks[0, 0].tolist()):
            full[row, blocks.full_kv_indices[0, 0, row, :count].long()] = True
        assert in_blocks.all(-1).all(-1)[full].all()
        seen += path.shape[-1] > 0
    assert seen > 2


# ---- refused ----


def test_recurrent_layers_are_refused():
    model = prepare_model(make_hybrid("qwen3_next")).train()
    with pytest.raises(ValueError, match="recurrent layers, whose states are not handed"):
        streamed(model, forest(1), 6)


def test_batches_that_cannot_be_cut_are_refused():
    batch = concatenate_trees(forest(1), pad_token_id=0)
    with pytest.raises(ValueError, match="A batch of 2 packed sequences cannot be streamed"):
        sections_of({name: torch.cat([values, values]) for name, values in batch.items()}, 6)
    with pytest.raises(ValueError, match=r"Images .* cannot be streamed"):
        sections_of({**batch, "pixel_values": torch.zeros(1, 4)}, 6)


def test_a_layer_that_attends_twice_is_refused():
    model = make_model("llama")
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="attends twice in a call"):
        streamed(model, forest(3), 6)
