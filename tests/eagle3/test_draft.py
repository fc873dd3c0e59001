"""The draft model and its loss: against the formulas, packed against padded, one document against the others."""

import gc
import itertools
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.attention import flex_attention as flex_module

from conformance.double import keep_double
from hf_prefix_tree import Eagle3DraftConfig, Eagle3DraftModel
from hf_prefix_tree.eagle3 import attention as attention_module
from hf_prefix_tree.eagle3 import model as layer_module
from hf_prefix_tree.eagle3.attention import dense_steps, document_tree, draft_slots, flex_steps
from hf_prefix_tree.eagle3.config import default_aux_layer_ids
from hf_prefix_tree.eagle3.loss import StepSums
from hf_prefix_tree.eagle3.target import Eagle3Target
from hf_prefix_tree.modeling.attention import kernels
from hf_prefix_tree.modeling.context import TreeContext
from tests.support.drafts import (
    AUX,
    DRAFT_VOCAB,
    TARGETS,
    VOCAB,
    agree_often,
    collated,
    document_steps,
    make_draft,
    make_target,
    random_documents,
    random_states,
    tokens_of,
    transcription,
)

STEPS = 4


def run(draft, batch, states, steps=STEPS, **kwargs):
    """Loss, sums, and the gradients of every parameter and of the hidden states, all in float64."""
    draft.zero_grad()
    aux = states["aux_hidden_states"].clone().requires_grad_()
    with keep_double():
        output = draft(**batch, **{**states, "aux_hidden_states": aux}, ttt_steps=steps, **kwargs)
        output.loss.backward()
    return output.loss, output.sums, {n: p.grad for n, p in draft.named_parameters() if p.requires_grad}, aux.grad


def counts_of(sums):
    return [value.tolist() for value in sums[1:]]


def distance(got, expected):
    assert got.keys() == expected.keys()
    return max(((got[n] - expected[n]).abs().max() / expected[n].abs().max()).item() for n in expected)


# ---- the formulas ----


@pytest.mark.parametrize(("seed", "vocab"), [(0, DRAFT_VOCAB), (1, DRAFT_VOCAB), (2, None)])
def test_the_loss_equals_the_transcription(seed, vocab):
    draft = make_draft(seed=seed, draft_vocab_size=vocab)
    # tokens that are not supervised between ones that are: whether they were hit decides about later ones
    gaps = {"input_ids": list(range(5, 14)), "loss_mask": [0, 1, 1, 0, 1, 1, 1, 0, 1]}
    batch = collated([*random_documents(seed), gaps], 16)
    states = random_states(batch, draft)
    with keep_double():  # for the table of RoPE, here and below
        agree_often(draft, batch, states, 2)
    loss, sums, gradients, _ = run(draft, batch, states)
    draft.zero_grad()
    with keep_double():
        expected, counts = transcription(draft, batch, states, STEPS)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert counts_of(sums) == counts.tolist()
    assert counts[0, 0] > 3 and counts[3, 0] > 1 and (vocab is None) == (counts[0] == counts[1]).all()
    plain = {name: p.grad for name, p in draft.named_parameters() if p.requires_grad}
    assert distance(gradients, plain) < 1e-11


def _without_documents(seq_lens, length):
    return document_tree(torch.full((len(seq_lens), 1), length), length)


def _without_gate(batch, steps):
    slots = SLOTS(batch, steps)
    index = torch.arange(batch["loss_mask"].numel()).view_as(batch["loss_mask"])
    sources = torch.stack([(index + ahead) % index.numel() for ahead in range(steps + 1)], dim=1)
    weights = (batch["loss_mask"].flatten()[sources[:, 1:]] != 0).long()
    return {**slots, "draft_sources": sources, "draft_weights": weights}


def _without_step_positions(self, tokens, positions, hidden, documents, cache):
    return STEP(self, tokens, positions - len(cache) // 2, hidden, documents, cache)


def _without_diagonals(query, keys, values, documents):
    return ATTEND(query, keys[:1], values[:1], documents)


STEP, ATTEND, SLOTS = Eagle3DraftModel._step, layer_module.step_attention, layer_module.draft_slots


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (attention_module, "document_tree", _without_documents),
        (Eagle3DraftModel, "_step", _without_step_positions),
        (layer_module, "step_attention", _without_diagonals),
        (layer_module, "draft_slots", _without_gate),
    ],
    ids=["documents", "positions", "diagonals", "gate"],
)
def test_the_comparison_can_fail(where, name, wrong, monkeypatch):
    draft = make_draft()
    batch = collated(random_documents(0), 16)
    states = random_states(batch, draft)
    right = run(draft, batch, states)[0]
    monkeypatch.setattr(where, name, wrong)
    assert abs(run(draft, batch, states)[0] - right) > 1e-3


def test_the_gate_of_the_golden_packing(shared_data):
    case = json.loads(shared_data("goldens/eagle3_packing.json").read_text())[0]
    batch = {name: torch.tensor(values) for name, values in case["collated"].items()}
    expected = (("01110110", "10100000"), ("11100100", "01000000"), ("11000000", "10000000"))
    weights = draft_slots(batch, len(expected))["draft_weights"]
    for step, rows in enumerate(expected):
        assert ["".join(map(str, row)) for row in weights[:, step].tolist()] == list(rows)


def test_accepted_length_counts_tokens_outside_of_the_vocabulary_as_misses():
    hits, slots = torch.tensor([6, 3, 1]), torch.tensor([8, 6, 4])
    sums = StepSums(torch.zeros(3), torch.tensor([7, 5, 3]), slots, hits, hits)
    assert sums.metrics() == {"accuracy/step_0": 0.75, "accuracy/step_1": 0.5, "accuracy/step_2": 0.25, "tau": 2.5}


# ---- packed, padded, perturbed ----


@pytest.mark.parametrize("seed", range(3))
def test_packed_equals_padded(seed):
    draft, documents = make_draft(seed=seed), random_documents(seed, count=7, longest=12)
    results = []
    for batch in (collated(documents, 16), collated(documents, 48), collated(documents)):
        loss, sums, gradients, _ = run(draft, batch, random_states(batch, draft))
        results.append((loss.item(), counts_of(sums), gradients))
    for loss, counts, gradients in results[1:]:
        assert loss == pytest.approx(results[0][0], rel=1e-12)
        assert counts == results[0][1]
        assert distance(gradients, results[0][2]) < 1e-10


def test_perturbing_a_document_leaves_the_others_bit_identical():
    draft, documents = make_draft(), random_documents(3, count=4, longest=10)
    batch = collated(documents, 40)
    states = random_states(batch, draft)
    counts = torch.full((STEPS,), 20)  # as in one optimizer step: the divisor is not the perturbed document's
    _, _, _, before = run(draft, batch, states, num_items_in_batch=counts)
    spans = [(at, at + len(ids)) for _, at, ids in tokens_of(batch)]
    for start, end in spans:
        changed = {name: value.clone() for name, value in batch.items()}
        changed["input_ids"][0, start:end] = torch.randint(3, VOCAB, (end - start,))
        other = {name: value.clone() for name, value in states.items()}
        for name in ("aux_hidden_states", "target_logits"):
            other[name][0, start:end] += torch.randn_like(other[name][0, start:end])
        _, _, _, after = run(draft, changed, other, num_items_in_batch=counts)
        for own_start, own_end in spans:
            same = torch.equal(after[0, own_start:own_end], before[0, own_start:own_end])
            assert same == (own_start != start or not before[0, own_start:own_end].any())


def test_what_padding_holds_does_not_matter():
    draft, documents = make_draft(), random_documents(1, count=2)
    batch = collated(documents, 24)
    states = random_states(batch, draft)
    loss = run(draft, batch, states)[0]
    batch["input_ids"][batch["attention_mask"] == 0] = 7
    states["aux_hidden_states"][batch["attention_mask"] == 0] = 100.0
    assert torch.equal(run(draft, batch, states)[0], loss)


def test_parts_of_an_optimizer_step_add_up():
    draft, documents = make_draft(), random_documents(5, count=6)
    whole = collated(documents)
    loss, sums, gradients, _ = run(draft, whole, random_states(whole, draft))
    total, added = 0.0, None
    for part in (documents[:1], documents[1:4], documents[4:]):
        batch = collated(part)
        own, _, grads, _ = run(draft, batch, random_states(batch, draft), num_items_in_batch=sums.valid)
        total += own.item()
        added = grads if added is None else {name: added[name] + grads[name] for name in added}
    assert total == pytest.approx(loss.item(), rel=1e-12)
    assert distance(added, gradients) < 1e-10


def test_a_batch_that_supervises_nothing_gives_a_differentiable_zero():
    draft = make_draft()
    batch = collated(random_documents(0), 16)
    batch["loss_mask"].zero_()
    loss, sums, gradients, _ = run(draft, batch, random_states(batch, draft))
    assert loss.item() == 0.0 and not sums.supervised.any()
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values())


def test_chunks_and_checkpointing_change_nothing(monkeypatch):
    draft = make_draft(torch.float32)
    batch = collated(random_documents(2), 16)
    states = random_states(batch, draft)

    def gradients():
        draft.zero_grad()
        loss = draft(**batch, **states, ttt_steps=STEPS).loss
        loss.backward()
        return loss.item(), {n: p.grad.clone() for n, p in draft.named_parameters() if p.requires_grad}

    draft.train()
    loss, plain = gradients()
    draft.gradient_checkpointing_enable()
    again, checkpointed = gradients()
    assert again == loss and all(torch.equal(plain[name], checkpointed[name]) for name in plain)
    monkeypatch.setattr("hf_prefix_tree.eagle3.loss.CHUNK_SIZE", 3)
    chunked, grads = gradients()
    assert chunked == pytest.approx(loss, rel=1e-6) and distance(grads, plain) < 1e-5


def test_steps_share_one_copy_of_the_targets_logits():
    draft = make_draft()
    batch = collated(random_documents(2), 16)
    states = random_states(batch, draft)
    output = draft(**batch, **states, ttt_steps=STEPS)  # alive, with all that its backward needs
    gc.collect()
    live = (x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.shape[-1:] == (DRAFT_VOCAB,))
    sizes = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in live if x.is_floating_point()}
    assert output.loss.requires_grad
    assert sizes == {states["target_logits"].data_ptr(): states["target_logits"].nbytes}


# ---- drafting ----


def test_drafting_is_what_was_trained():
    """`propose` at a context equals the last slot of the unrolled document, fed with its own tokens."""
    draft = make_draft()
    ids = torch.randint(3, VOCAB, (1, 8))
    aux = torch.randn(1, 7, 96, dtype=torch.float64)
    with keep_double():
        drafted = draft.propose(ids, aux, num_tokens=STEPS).tolist()
    expected = list(ids[0].tolist())
    for step in range(STEPS):
        # the unrolled document holds the tokens drafted so far; its slot 6 is the last of the context
        logits = _last_slot(draft, expected, aux[0], step + 1)
        expected.append(draft.draft_ids[int(logits[step].argmax())].item())
    assert drafted == expected[8:]
    with pytest.raises(RuntimeError):  # of PyTorch: the shapes do not fit
        draft.propose(ids, aux[:, :-1], num_tokens=1)


def _last_slot(draft, ids, aux, steps):
    length = len(aux)
    padded = torch.cat([aux, aux.new_zeros(len(ids) - length, aux.shape[1])])
    with torch.no_grad(), keep_double():
        return document_steps(draft, ids, padded, steps)[length - 1]


# ---- the target ----


@pytest.mark.parametrize("name", TARGETS)
def test_the_target_on_packed_rows_equals_its_documents_one_by_one(name):
    model = make_target(name)
    batch = collated(random_documents(4, count=6, longest=14), 24)
    expected = {}
    with torch.no_grad(), keep_double():
        for _, _, ids in tokens_of(batch):
            out = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
            # hidden_states[0] is the embedding: the output of layer i is number i + 1
            aux = torch.cat([out.hidden_states[i + 1] for i in AUX], dim=-1)[0]
            expected[tuple(ids)] = aux, out.hidden_states[-1][0], out.logits[0]
        target = Eagle3Target(model, AUX)
        states = target.states(batch)
        some = torch.tensor([3, 5, 60])
        logits = target.draft_logits(states["last_hidden_states"], some)
    for row, at, ids in tokens_of(batch):
        aux, last, own_logits = expected[tuple(ids)]
        found = [value[row, at : at + len(ids)] for value in (*states.values(), logits)]
        for got, want in zip(found, (aux, last, own_logits.argmax(-1), own_logits[:, some]), strict=True):
            assert (got - want).abs().max() <= 1e-10 * want.abs().max()
    assert not any(p.requires_grad for p in model.parameters()) and not model.training


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_perturbing_a_document_leaves_the_targets_states_of_others_bit_identical(name):
    target = Eagle3Target(make_target(name, torch.float32), AUX)
    batch = collated(random_documents(3, count=4, longest=10), 40)
    before = target.states(batch)
    spans = [(at, at + len(ids)) for _, at, ids in tokens_of(batch)]
    for start, end in spans:
        changed = {**batch, "input_ids": batch["input_ids"].clone()}
        changed["input_ids"][0, start:end] = (changed["input_ids"][0, start:end] + 7) % VOCAB
        after = target.states(changed)
        for state in ("aux_hidden_states", "last_hidden_states"):
            for own_start, own_end in spans:
                same = torch.equal(after[state][0, own_start:own_end], before[state][0, own_start:own_end])
                assert same == (own_start != start)


def test_the_target_runs_in_its_own_dtype_and_keeps_nothing():
    model = make_target(dtype=torch.float32)
    modules = [model, *model.modules()]
    target = Eagle3Target(model, AUX)
    hooks = [len(module._forward_hooks) for module in modules]
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    batch, ids = collated(random_documents(4), 24), torch.tensor([3, 5, 60])
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            states = target.states(batch)
            results.append([*states.values(), target.draft_logits(states["last_hidden_states"], ids)])
    for plain, under_autocast in zip(*results, strict=True):
        assert plain.dtype == under_autocast.dtype and torch.equal(plain, under_autocast)
    assert [len(module._forward_hooks) for module in modules] == hooks
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())


def test_a_target_is_known_by_its_weights_and_layers():
    first = Eagle3Target(make_target(dtype=torch.float32), AUX).fingerprint
    assert Eagle3Target(make_target(dtype=torch.float32), AUX).fingerprint == first
    assert Eagle3Target(make_target(dtype=torch.float32), [0, 1, 3]).fingerprint != first
    tuned = make_target(dtype=torch.float32)
    with torch.no_grad():
        tuned.model.layers[2].mlp.up_proj.weight.add_(1e-4)
    assert Eagle3Target(tuned, AUX).fingerprint != first


def test_a_wrapped_sharded_or_spread_target_is_refused():
    with torch.device("meta"):
        empty = type(make_target(dtype=torch.float32))(TARGETS["llama"])
    spread = make_target(dtype=torch.float32)
    spread.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    adapted = get_peft_model(make_target(dtype=torch.float32), LoraConfig(target_modules=["q_proj"]))
    for model, message in (
        (empty, "sharded"),
        (spread, "device_map"),
        (adapted, "PeftModel"),
        (torch.nn.Linear(2, 2), "Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            Eagle3Target(model, AUX)


def test_a_target_that_is_not_served_is_refused():
    model = make_target()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"`config\.final_logit_softcapping=30\.0`"):
        Eagle3Target(model, AUX)
    for layer_ids in ([0, 1], [0, 1, 4], [1, 0, 2], [0, 0, 1], [-1, 0, 1]):
        with pytest.raises(ValueError, match="`aux_layer_ids`"):
            Eagle3Target(make_target(), layer_ids)
    with pytest.raises(ValueError, match=r"`aux_layer_ids`.*from 0 to 3"):
        Eagle3Target(make_target())
    assert default_aux_layer_ids(36) == [1, 17, 32]


# ---- configuration ----


def test_the_draft_of_a_target():
    for config in TARGETS.values():
        draft = Eagle3DraftConfig.from_target(config, draft_vocab_size=9, aux_layer_ids=AUX)
        assert (draft.vocab_size, draft.draft_vocab_size, draft.num_hidden_layers, draft.head_dim) == (VOCAB, 9, 1, 8)
        assert draft.rope_parameters["rope_theta"] == config.rope_parameters["rope_theta"]
    assert Eagle3DraftConfig.from_target(TARGETS["gpt_oss"], aux_layer_ids=AUX).intermediate_size == 128
    with pytest.raises(ValueError, match="`draft_vocab_size`"):
        Eagle3DraftConfig.from_target(TARGETS["llama"], draft_vocab_size=VOCAB + 1, aux_layer_ids=AUX)
    with pytest.raises(ValueError, match="`attention_bias=True`"):
        make_draft(attention_bias=True)


@pytest.mark.parametrize("vocab", [DRAFT_VOCAB, None])
def test_save_pretrained_round_trip(tmp_path, vocab):
    draft = make_draft(torch.float32, draft_vocab_size=vocab)
    draft.save_pretrained(tmp_path)
    loaded = Eagle3DraftModel.from_pretrained(tmp_path)
    saved, found = draft.state_dict(), loaded.state_dict()
    assert saved.keys() == found.keys() and all(torch.equal(saved[name], found[name]) for name in saved)
    assert ("d2t" in saved) == ("t2d" in saved) == (vocab is not None)
    assert torch.equal(loaded.draft_ids, draft.draft_ids)
    assert not loaded.embed_tokens.weight.requires_grad
    assert loaded.config.aux_layer_ids == AUX


@pytest.mark.parametrize("ids", [[0, 1], [*range(DRAFT_VOCAB - 1), VOCAB], [1, 0, *range(2, DRAFT_VOCAB)]])
def test_a_wrong_draft_vocabulary_is_refused(ids):
    with pytest.raises(ValueError, match="`ids`"):
        make_draft().set_draft_vocabulary(torch.tensor(ids))


def test_the_head_starts_from_the_targets_rows():
    draft, target = make_draft(torch.float32), make_target(dtype=torch.float32)
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    draft.init_from_target(embedding, head)
    assert torch.equal(draft.embed_tokens.weight, embedding)
    for row, token in zip(draft.lm_head.weight, draft.draft_ids, strict=True):
        assert torch.equal(row, head[token])


# ---- FlexAttention ----


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_flex_equals_dense_in_the_forward_on_a_cpu(steps, monkeypatch):
    """FlexAttention without the compiler: its values and log-sum-exp, no kernel and no backward."""
    monkeypatch.setattr(kernels, "_call_compiled", lambda function, *args: function(*args))
    torch.manual_seed(0)
    tree = document_tree(torch.tensor([[200, 1, 130, 53], [384, 0, 0, 0]]), 384)
    make = lambda heads: 2 * torch.randn(2, heads, 384, 16)  # noqa: E731
    query, keys, values = make(4), [make(2) for _ in range(steps)], [make(2) for _ in range(steps)]
    with torch.no_grad():
        got, want = (attend(query, keys, values, TreeContext(tree)) for attend in (flex_steps, dense_steps))
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_the_backward_goes_through_the_log_sum_exp(steps, monkeypatch):
    """On a CPU with the backward of FlexAttention's eager form, which torch only lets other devices use."""
    monkeypatch.setattr(kernels, "_call_compiled", lambda function, *args: function(*args))
    monkeypatch.setattr(flex_module, "_validate_device", lambda *args: None)
    compare_backward("cpu", steps, heads=(4, 2), head_dim=16, tolerance=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_flex_equals_dense(steps):
    compare_backward("cuda", steps, heads=(8, 4), head_dim=32, tolerance=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_training_with_flex_equals_training_with_dense_attention(autocast):
    draft = make_draft(torch.float32, hidden_size=64, head_dim=32).cuda().train()
    documents = random_documents(0, count=40, longest=40)
    batch = collated(documents, 256)
    states = {name: value.cuda() for name, value in random_states(batch, draft).items()}
    batch = {name: value.cuda() for name, value in batch.items()}
    results = []
    for backend in ("sdpa", "flex"):
        draft.attn_backend = backend
        draft.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            loss = draft(**batch, **states, ttt_steps=3).loss
        loss.backward()
        results.append((loss.item(), {n: p.grad.clone() for n, p in draft.named_parameters() if p.requires_grad}))
    assert results[1][0] == pytest.approx(results[0][0], rel=2e-2 if autocast else 1e-4)
    for name, want in results[0][1].items():
        assert (results[1][1][name] - want).norm() <= (0.1 if autocast else 5e-3) * want.norm(), name


def compare_backward(device, steps, heads, head_dim, tolerance):
    torch.manual_seed(0)
    lengths = [200, 1, 130, 53]
    tree = document_tree(torch.tensor([lengths, [384, 0, 0, 0]], device=device), 384)
    make = lambda heads: torch.randn(2, heads, 384, head_dim, device=device, requires_grad=True)  # noqa: E731
    query = make(heads[0])
    keys, values = [make(heads[1]) for _ in range(steps)], [make(heads[1]) for _ in range(steps)]
    weights = torch.randn(2, heads[0], 384, head_dim, device=device)
    results = []
    for attend in (dense_steps, flex_steps):
        output = attend(query, keys, values, TreeContext(tree))
        inputs = [query, *itertools.chain(keys, values)]
        results.append([output, *torch.autograd.grad((output * weights).sum(), inputs)])
    for got, want in zip(results[1], results[0], strict=True):
        assert (got - want).abs().max() < tolerance * want.abs().max()
