"""`diffusion_generate` against a sampler written out for one prompt, on a stock model with masks made by hand."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from conformance.double import keep_double
from hf_prefix_tree import diffusion_generate
from hf_prefix_tree.diffusion.model import unprepare_diffusion_model
from tests.support.diffusion_models import pair, sees, stock_logits
from tests.support.models import VOCAB

MASK, SIZE = VOCAB - 1, 4
PROMPTS = [[5, 6, 7, 8, 9, 10], [11, 12, 13], [21, 22, 23, 24]]


def visible_pairs(objective, start, prompt_start, length):
    """Who sees whom when the block from `start` on is denoised."""
    if objective == "mdlm":
        return torch.ones(length, length, dtype=torch.bool)
    causal_before = start if objective == "hybrid" else 0
    rows = range(length)
    return torch.tensor(
        [[sees("block_causal", SIZE, prompt_start, length, q, k, causal_before) for k in rows] for q in rows]
    )


def written_out(stock, prompt, new, objective, response_window=True, steps=SIZE):
    """One prompt, greedily: the new tokens, end tokens or not."""
    count = len(prompt)
    first = count if response_window else count // SIZE * SIZE
    end = first + math.ceil((count + new - first) / SIZE) * SIZE
    tokens = torch.tensor([*prompt, *[MASK] * (end - count)])
    for start in range(first, end, SIZE):
        masked = list(range(max(start, count), start + SIZE))
        for step in range(steps):
            if not masked:
                break
            length = end if objective == "mdlm" else start + SIZE
            seen = visible_pairs(objective, start, count if response_window else 0, length)
            logits = stock_logits(stock, tokens[:length], seen)
            logits[:, MASK] = -torch.inf
            certainty, chosen = logits.softmax(-1).max(-1)
            masked.sort(key=lambda place: -certainty[place].item())
            for place in masked[: math.ceil(len(masked) / (steps - step))]:
                tokens[place] = chosen[place]
                masked = [other for other in masked if other != place]
    return tokens[count : count + new].tolist()


def padded(prompts, side):
    width = max(map(len, prompts))
    rows = [
        ([0] * (width - len(p)) + p, [0] * (width - len(p)) + [1] * len(p))
        if side == "left"
        else (p + [0] * (width - len(p)), [1] * len(p) + [0] * (width - len(p)))
        for p in prompts
    ]
    ids, mask = zip(*rows, strict=True)
    return torch.tensor(ids), torch.tensor(mask)


def generate(model, new, side="left", **kwargs):
    ids, mask = padded(PROMPTS, side)
    with keep_double():
        found = diffusion_generate(model, ids, new, SIZE, MASK, attention_mask=mask, **kwargs)
    assert torch.equal(found[:, : ids.shape[1]], ids)
    return found[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("response_window", [True, False])
@pytest.mark.parametrize("objective", ["mdlm", "block", "hybrid"])
def test_a_batch_equals_the_written_out_sampler(objective, response_window):
    model, stock = pair("qwen3")
    model.generation_config.eos_token_id = None
    for steps in (None, 1, 3):
        options = {"objective": objective, "response_window": response_window}
        found = [generate(model, 10, side, steps_per_block=steps, **options) for side in ("left", "right")]
        with keep_double(), torch.no_grad():
            expected = [
                written_out(stock, prompt, 10, objective, response_window, steps or SIZE) for prompt in PROMPTS
            ]
        assert found[0] == found[1] == expected


def test_objectives_and_windows_give_different_tokens():
    """The test above could tell a wrong mask."""
    model, _ = pair("qwen3")
    model.generation_config.eos_token_id = None
    found = [
        generate(model, 10, objective=objective, response_window=window)
        for objective in ("mdlm", "block", "hybrid")
        for window in (True, False)
    ]
    assert all(found[i] != found[j] for i in range(6) for j in range(i) if (i, j) != (1, 0))


def test_rows_end_at_their_end_token():
    model, stock = pair("qwen3")
    with keep_double(), torch.no_grad():
        free = [written_out(stock, prompt, 10, "block") for prompt in PROMPTS]
    end, other = free[0][2], free[1][5]
    expected = []
    for row in free:
        at = next((i for i, token in enumerate(row) if token in (end, other)), 9)
        expected.append(row[: at + 1])
    width = max(map(len, expected))
    assert len(expected[0]) == 3 and width > 3
    expected = [row + [0] * (width - len(row)) for row in expected]
    assert generate(model, 10, objective="block", eos_token_id=[end, other]) == expected
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [end, other], None
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    assert generate(model, 10, objective="block", pad_token_id=0) == expected
    assert sum(calls) == SIZE * math.ceil(width / SIZE)  # no step for a block that nobody needs
    assert generate(model, 10, objective="block")[0][3:] == [end] * (width - 3)  # what pads without a padding token


def test_fewer_steps_are_fewer_forwards():
    model, _ = pair("qwen3")
    model.generation_config.eos_token_id = None
    calls = []
    model.register_forward_pre_hook(lambda module, args: calls.append(1))
    for steps, expected in ((4, 12), (2, 6), (1, 3)):
        calls.clear()
        generate(model, 10, objective="block", steps_per_block=steps)
        assert len(calls) == expected


def test_draws_under_a_temperature():
    model, _ = pair("qwen3")
    model.generation_config.eos_token_id = None
    greedy = generate(model, 8, objective="block")
    found = [
        generate(model, 8, objective="block", temperature=t, generator=torch.Generator().manual_seed(seed))
        for t, seed in ((1.0, 0), (1.0, 0), (1.0, 1), (1e-4, 0))
    ]
    assert found[0] == found[1] != found[2]
    assert found[0] != greedy and found[3] == greedy
    hot = {token for row in generate(model, 64, temperature=1e6, steps_per_block=1) for token in row}
    assert MASK not in hot and len(hot) > 60


def test_the_model_is_left_as_it_was():
    model, _ = pair("llama")
    prepared = generate(model.train(), 6, objective="block")
    assert model.training
    unprepare_diffusion_model(model)
    attributes = set(model.__dict__)
    assert generate(model.eval(), 6, objective="block") == prepared
    assert not model.training and set(model.__dict__) == attributes
    assert model.config._attn_implementation != "diffusion" and not model._forward_pre_hooks


def test_a_saved_model_says_the_same(tmp_path):
    model, _ = pair("qwen3")
    expected = generate(model, 6, objective="hybrid")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config.is_causal is False
    assert generate(loaded, 6, objective="hybrid") == expected


def test_wrong_arguments_are_refused():
    model, _ = pair("llama")
    ids = torch.tensor([[5, 6, 7]])
    for kwargs, message in (
        ({"max_new_tokens": 0}, "`max_new_tokens`.*0"),
        ({"block_size": 0}, "`block_size`.*0"),
        ({"steps_per_block": 5}, "`steps_per_block`.*4.*5"),
        ({"temperature": -1.0}, "`temperature`"),
        ({"objective": "ar"}, "`objective`"),
        ({"mask_token_id": VOCAB}, "`mask_token_id`.*97"),
        ({"mask_token_id": None}, "no mask token"),
        ({"input_ids": ids[0]}, "`input_ids`"),
        ({"attention_mask": torch.ones(1, 2)}, "one number"),
        ({"attention_mask": torch.tensor([[1, 0, 1]])}, "zeros"),
    ):
        with pytest.raises(ValueError, match=message):
            diffusion_generate(
                model, **{"input_ids": ids, "max_new_tokens": 4, "block_size": 4, "mask_token_id": MASK, **kwargs}
            )
