"""The folded forward on a GPU: FlexAttention under TRL's Triton head, bf16, time and memory of an actor update."""

import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from trl.trainer.utils import add_fused_lm_head

from hf_prefix_tree import tree_log_probs
from hf_prefix_tree.rl.folded_forward import fold_shared_prefixes
from tests.support.gpu_rows import model_of
from tests.support.models import VOCAB, gradients
from tests.support.padded_rows import OUTPUTS, Tokens, distinct_prefixes, padded_rows

pytestmark = pytest.mark.gpu


def rows_on_gpu(seed=0):
    """Rows with a common trunk that fork at several depths, some 230 tokens long."""
    rows = padded_rows(seed, num_branches=24)
    trunk = torch.from_numpy(np.random.default_rng(seed).integers(3, VOCAB, size=200)).expand(24, -1)
    parts = {"input_ids": trunk, "attention_mask": torch.ones_like(trunk), "labels": torch.full_like(trunk, -100)}
    return {name: torch.cat([parts[name], rows[name]], dim=1).cuda() for name in rows}


def run(model, rows, **kwargs):
    model.zero_grad()
    output = model(**rows, fused_lm_head=True, **kwargs)
    weights = torch.rand(2, *output.log_probs.shape, generator=torch.manual_seed(1)).cuda() - 0.5
    (output.log_probs * weights[0] + output.entropy * weights[1]).sum().backward()
    return output, gradients(model)


def pair(name, dtype=torch.float32, window=None):
    stock, tree = (model_of(name, dtype, window) for _ in range(2))
    stock.set_attn_implementation("eager" if name == "gpt_oss" else "sdpa")
    for model in (stock, tree):
        add_fused_lm_head(model, outputs=OUTPUTS)
    return stock, fold_shared_prefixes(tree)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_fields_and_gradients_are_those_of_the_rows(name):
    stock, tree = pair(name, window=40)
    tokens = Tokens(tree)
    for seed in range(2):
        rows = rows_on_gpu(seed)
        tokens.total = 0
        output, got = run(tree, rows)
        wanted = distinct_prefixes({key: value.cpu() for key, value in rows.items()})
        assert tokens.total == -(-wanted // 128) * 128 < rows["attention_mask"].sum() / 2
        expected_output, expected = run(stock, rows)
        for field in ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits"):
            mine, theirs = getattr(output, field), getattr(expected_output, field)
            assert (mine - theirs).norm() < 2e-4 * theirs.norm(), field
        assert (output.is_top1 != expected_output.is_top1).float().mean() < 0.01
        assert torch.equal(output.label_mask, expected_output.label_mask)
        assert got.keys() == expected.keys()
        for key, value in expected.items():
            assert (got[key] - value).norm() <= 2e-3 * value.norm() + 1e-6, key


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_error_is_at_most_twice_that_of_the_rows(autocast):
    rows = rows_on_gpu()
    exact, _ = pair("qwen3")
    stock, tree = pair("qwen3", torch.float32 if autocast else torch.bfloat16)
    exact_output, exact_gradients = run(exact, rows)
    errors = []
    for model in (stock, tree):
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            output, found = run(model, rows)
        errors.append((output.log_probs.float() - exact_output.log_probs).norm())
        errors.append(
            sum((found[key].float() - value).square().sum() for key, value in exact_gradients.items()).sqrt()
        )
    assert errors[2] <= 2 * errors[0] and errors[3] <= 2 * errors[1], errors
    assert errors[0] > 0


def test_tree_log_probs_are_those_of_the_rows():
    rows = rows_on_gpu()
    stock, tree = pair("qwen3")
    add_fused_lm_head(stock, temperature=0.8)
    expected = stock(**rows, fused_lm_head=True).log_probs
    got = tree_log_probs(
        tree,
        rows["input_ids"],
        rows["attention_mask"],
        completion_mask=rows["labels"] != -100,
        temperature=0.8,
    )
    assert (got[:, 1:] - expected).norm() < 2e-4 * expected.norm() and not got[:, 0].any()


# ---- time and memory ----


def actor(layers=28):
    """The shape of Qwen3-0.6B, random weights, bf16, checkpointed as TRL's trainers are."""
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=151_936, max_position_embeddings=8192, **sizes, **heads)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def rollouts(prompt, completion, number):
    generator = torch.Generator("cuda").manual_seed(0)
    shared = torch.randint(3, 150_000, (1, prompt), generator=generator, device="cuda").expand(number, -1)
    own = torch.randint(3, 150_000, (number, completion), generator=generator, device="cuda")
    ids = torch.cat([shared, own], dim=1)
    labels = ids.clone()
    labels[:, :prompt] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def measured(model, rows, repeats=3):
    """Seconds and peak GiB of a forward and backward, the best of some."""
    times = []
    for repeat in range(repeats + 2):  # two to compile and to warm up
        if repeat == 2:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(**rows, fused_lm_head=True).log_probs.sum().backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        model.zero_grad()
    return min(times[2:]), torch.cuda.max_memory_allocated() / 2**30


@pytest.mark.perf
def test_an_actor_update_of_a_long_prompt_is_four_times_as_fast_in_less_memory():
    rows = rollouts(prompt=4096, completion=512, number=16)
    model = actor()
    stock = measured(model, rows)
    tree = measured(fold_shared_prefixes(model), rows)
    print(f"stock {stock[0]:.3f} s {stock[1]:.1f} GiB, folded {tree[0]:.3f} s {tree[1]:.1f} GiB")
    assert stock[0] / tree[0] > 4
    assert tree[1] < stock[1]


@pytest.mark.perf
def test_little_sharing_costs_nothing():
    """Reuse 1.1, below the threshold: a prompt of 106 tokens with 8 completions of 918."""
    rows = rollouts(prompt=106, completion=918, number=8)
    model = actor()
    stock, _ = measured(model, rows, repeats=5)
    tokens = Tokens(fold_shared_prefixes(model))
    tree, _ = measured(model, rows, repeats=5)
    assert tokens.total == 7 * rows["input_ids"].numel()
    print(f"stock {stock:.3f} s, folded {tree:.3f} s")
    assert stock / tree > 0.97
