"""`tree_log_probs` against independent forwards of every sequence: float64 to 1e-10, prompts, search trees."""

import copy
import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl.trainer.utils import add_fused_lm_head

from conformance.double import keep_double
from hf_prefix_tree import prepare_model, tree_log_probs
from tests.support.models import VOCAB, gradients, random_branches, relative_error
from tests.support.models import make_model as double_model
from tests.support.padded_rows import Tokens
from tests.support.trainer_runs import make_model

EXACT = 1e-10


def rollouts(seed=0, number=5, prompt=9):
    """One prompt with completions of different lengths: sharing of one level."""
    rng = np.random.default_rng(seed)
    shared = rng.integers(3, VOCAB, size=prompt)
    ends = [np.concatenate([[3 + i], rng.integers(3, VOCAB, size=rng.integers(1, 7))]) for i in range(number)]
    return [torch.tensor(np.concatenate([shared, end])) for end in ends]


def deep(seed=0):
    return [torch.tensor(b.input_ids) for b in random_branches(np.random.default_rng(seed), num_branches=7)]


def masks_of(sequences, seed=0):
    """Different tokens in different sequences, also where they share them."""
    rng = np.random.default_rng(seed)
    return [torch.tensor(rng.integers(0, 2, size=len(ids))) for ids in sequences]


def alone(model, sequences, masks=None, temperature=1.0):
    """The reference: each sequence by itself, no code of ours."""
    found = []
    for index, ids in enumerate(sequences):
        logits = model(input_ids=ids[None], attention_mask=torch.ones_like(ids)[None], use_cache=False).logits[0]
        own = (logits[:-1] / temperature).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        own = torch.nn.functional.pad(own, (1, 0))
        found.append(own if masks is None else own * masks[index])
    return found


def surrogate(rows):
    """A loss with signed advantages and a clip, on one log-prob of several sequences: not linear in it."""
    losses = []
    for index, row in enumerate(rows):
        advantage = (-1.0) ** index * (1 + index)
        ratio = torch.exp(row - 0.9 * row.detach())
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean())
    return torch.stack(losses).sum()


def check(model, reference, sequences, masks, tolerance, temperature=1.0, call=None):
    """Forward and backward; returns the tokens computed."""
    tokens = Tokens(model)
    model.zero_grad()
    rows = (call or tree_log_probs)(model, sequences, completion_mask=masks, temperature=temperature)
    surrogate(rows).backward()
    reference.zero_grad()
    expected = alone(reference, sequences, masks, temperature)
    surrogate(expected).backward()
    for row, other in zip(rows, expected, strict=True):
        assert (row.shape, row.dtype) == (other.shape, other.dtype)
        assert (row - other).abs().max().item() < tolerance
    assert relative_error(gradients(model), gradients(reference)) < tolerance
    return tokens.total


def distinct(sequences):
    return len({tuple(ids[:end].tolist()) for ids in sequences for end in range(1, len(ids) + 1)})


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("make", [rollouts, deep])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "gemma3", "gpt_oss"])
def test_exact_in_float64(name, make, with_mask):
    reference, model = (double_model(name) for _ in range(2))
    reference.set_attn_implementation("eager")
    prepare_model(model)
    for seed in range(2):
        sequences = make(seed)
        masks = masks_of(sequences, seed) if with_mask else None
        with keep_double():
            assert check(model, reference, sequences, masks, EXACT, temperature=0.7) == distinct(sequences)


@pytest.mark.parametrize("side", ["left", "right", "both"])
def test_padded_rows_hold_the_same_in_their_places(side):
    reference, model = double_model("qwen3"), prepare_model(double_model("qwen3"))
    sequences = deep()
    width = max(map(len, sequences)) + 4
    starts = [{"left": width - len(ids), "right": 0, "both": i % 4}[side] for i, ids in enumerate(sequences)]

    def padded(values, fill=0):
        rows = torch.full((len(values), width), fill)
        for row, start, value in zip(rows, starts, values, strict=True):
            row[start : start + len(value)] = value
        return rows

    def call(model, sequences, completion_mask, temperature):
        rows = tree_log_probs(
            model,
            padded(sequences, fill=1),
            padded([torch.ones_like(ids) for ids in sequences]),
            completion_mask=padded(completion_mask, fill=1),
            temperature=temperature,
        )
        assert rows.shape == (len(sequences), width)
        inside = [row[s : s + len(ids)] for row, s, ids in zip(rows, starts, sequences, strict=True)]
        assert rows.count_nonzero() == sum(row.count_nonzero() for row in inside)  # padding is 0
        return inside

    with keep_double():
        computed = check(model, reference, sequences, masks_of(sequences), EXACT, call=call)
    assert computed == distinct(sequences)


def search_tree(shared_data, number=12):
    """Paths of a real search: each step's text extends a kept text of the step before. Characters are the tokens."""
    line = shared_data("data/game24_search_tree.jsonl").read_text().splitlines()[0]
    puzzle = json.loads(line)
    texts = [f"{puzzle['input']}\n{node['text']}" for node in puzzle["nodes"]]
    longest = sorted(texts, key=len, reverse=True)[:number]
    return [torch.tensor([3 + ord(letter) % (VOCAB - 3) for letter in text]) for text in longest]


def test_exact_on_a_real_search_tree(shared_data):
    sequences = search_tree(shared_data)
    reference, model = double_model("qwen3"), prepare_model(double_model("qwen3"))
    masks = masks_of(sequences)
    with keep_double():
        computed = check(model, reference, sequences, masks, EXACT)
    assert computed == distinct(sequences) < 0.5 * sum(map(len, sequences))


def test_tokens_of_a_synthetic_search_tree_fork_at_every_level():
    """Three levels, each a fork: sharing the first level alone would compute more."""
    first, second, third = [3, 4, 5, 6], [[7, 8, 9], [10, 11, 12]], [[13], [14, 15]]
    sequences = [torch.tensor(first + a + b) for a in second for b in third]
    reference, model = double_model("qwen3"), prepare_model(double_model("qwen3"))
    with keep_double():
        assert check(model, reference, sequences, None, EXACT) == 4 + 2 * 3 + 2 * (1 + 2)


def test_float32_goes_through_the_fused_head_at_each_temperature():
    reference, model = make_model(), make_model()
    add_fused_lm_head(model, temperature=0.3)  # a trainer's, which stays
    forward = model.forward
    sequences = deep()
    prepare_model(model)
    for temperature in (1.0, 2.5):
        masks = masks_of(sequences)
        assert check(model, reference, sequences, masks, 2e-5, temperature) == distinct(sequences)
    assert model.forward is forward or model.forward == forward
    plain = make_model()
    tree_log_probs(plain, sequences)
    assert "forward" not in vars(plain)


def test_no_logits_of_the_sequences_are_built():
    model = prepare_model(make_model())
    calls = []
    model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    tree_log_probs(model, deep())
    assert calls == []
    model(input_ids=deep()[0][None])
    assert calls == [1]


def test_little_sharing_runs_as_padded_rows():
    rng = np.random.default_rng(0)
    sequences = [torch.tensor(rng.integers(3, VOCAB, size=n)) for n in (9, 4, 7)]
    reference, model = double_model("qwen3"), prepare_model(double_model("qwen3"))
    with keep_double():
        assert check(model, reference, sequences, masks_of(sequences), EXACT) == 3 * 9
        model, folded = prepare_model(double_model("qwen3")), None

        def call(*args, **kwargs):
            return tree_log_probs(*args, **kwargs, min_reuse=0)

        folded = check(model, reference, sequences, masks_of(sequences), EXACT, call=call)
    assert folded == 20


def test_wrapped_by_lora_and_copied():
    def adapted(model):
        torch.manual_seed(1)
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
        with torch.no_grad():
            for name, parameter in wrapped.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.3)
        return wrapped

    sequences = deep()
    reference, model = adapted(make_model()), adapted(make_model())
    rows, expected = tree_log_probs(model, sequences), alone(reference, sequences)
    surrogate(rows).backward(), surrogate(expected).backward()
    assert max((a - b).abs().max().item() for a, b in zip(rows, expected, strict=True)) < 2e-5
    assert relative_error(gradients(model), gradients(reference)) < 2e-5
    assert all("lora" in name for name in gradients(model))
    twin = copy.deepcopy(model)
    assert torch.equal(tree_log_probs(twin, sequences)[2], tree_log_probs(model, sequences)[2])


def test_the_chosen_backend_of_a_prepared_model_stays():
    model = prepare_model(make_model(), attn_backend="sdpa")
    tree_log_probs(model, deep())
    assert model._hf_prefix_tree_state.attn_backend == "sdpa"


def test_accelerates_mixed_precision_is_not_lost():
    model = make_model()
    model._original_forward = model.forward  # what `Accelerator.prepare` leaves under mixed precision
    sequences = deep()
    with pytest.raises(ValueError, match=r"`tree_log_probs`.*`with accelerator.autocast\(\):`"):
        tree_log_probs(model, sequences)
    with torch.autocast("cpu", torch.bfloat16):
        rows = tree_log_probs(model, sequences)
    expected = alone(make_model(), sequences)
    error = max((a - b).abs().max().item() for a, b in zip(rows, expected, strict=True))
    assert 1e-4 < error < 0.5 and rows[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": 0}, "`temperature`.*0"),
        ({"input_ids": torch.ones(3, dtype=torch.long)}, r"`\[B, L\]`"),
        ({"input_ids": [torch.ones(1, 3)]}, r"`input_ids\[0\]`.*1.*3"),
        ({"input_ids": [torch.ones(3, dtype=torch.long)], "attention_mask": torch.ones(1, 3)}, "leave it out"),
        ({"attention_mask": torch.ones(2, 3)}, "`attention_mask`.*2.*4"),
        ({"completion_mask": [1, 0]}, "`completion_mask`"),
        ({"input_ids": deep(), "completion_mask": deep()[:2]}, "mask"),
    ],
)
def test_refuses_what_does_not_fit(change, words):
    arguments = {"input_ids": torch.ones(2, 4, dtype=torch.long), **change}
    with pytest.raises(ValueError, match=words):
        tree_log_probs(make_model(), **arguments)


def test_no_sequences_give_no_results():
    assert tree_log_probs(make_model(), []) == []


@pytest.mark.parametrize("broken", ["causal", "index"])
def test_a_wrong_layout_would_show(broken, monkeypatch):
    """Negative controls: a causal mask over the tree row, and the token before in the row as the predecessor."""
    from hf_prefix_tree.rl import folded_forward as folded

    fold_rows = folded.fold_rows

    def wrong(*args):
        rows = fold_rows(*args)
        tree = rows.batch["prefix_tree"]
        if broken == "causal":
            tree[:, 0] = tree.shape[-1]
        else:
            tree[0, 2] = torch.arange(-1, tree.shape[-1] - 1)
        return rows

    monkeypatch.setattr(folded, "fold_rows", wrong)
    reference, model = double_model("qwen3"), prepare_model(double_model("qwen3"))
    with keep_double(), pytest.raises(AssertionError):
        check(model, reference, rollouts(), None, 1e-3)


@pytest.mark.parametrize("temperature", [None, "1", 0.0, float("nan")])
def test_a_temperature_is_a_number_above_0(temperature):
    with pytest.raises(ValueError, match=f"`temperature` must be a number > 0, got {temperature!r}"):
        tree_log_probs(None, [torch.tensor([5, 6])], temperature=temperature)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0)])
def test_rows_without_tokens_are_refused(shape):
    with pytest.raises(ValueError, match=r"`input_ids` has the shape .*: pass padded rows"):
        tree_log_probs(None, torch.zeros(shape, dtype=torch.int64))
