# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""`overflow="stream"` of GRPO, RLOO, DPO and KTO: steps, losses and gradients are TRL's, in float64."""

from __future__ import annotations

import threading

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from hf_prefix_tree import TreeDPOConfig, TreeDPOTrainer, TreeGRPOConfig, TreeKTOConfig
from hf_prefix_tree.modeling import streaming
from hf_prefix_tree.rl import folded_forward
from hf_prefix_tree.rl.folded_forward import fold_shared_prefixes
from tests.support import preference_runs, rollout_runs
from tests.support.hybrids import make_hybrid
from tests.support.models import relative_error
from tests.support.ranks import run_ranks
from tests.support.streamed_rl import STREAM, all_in_double, compare_ranks, error, logs, run
from tests.support.streaming_runs import watched_paths
from tests.support.trainer_runs import config, distance, make_model, weights

TOLERANCE = 1e-10
CLIPPED = {"num_iterations": 2, "epsilon": 0.001}
SEQUENCE = {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.0}
BONUS = {"loss_type": "bnpo", "entropy_coef": 0.1, "top_entropy_quantile": 0.5}
CHECKPOINTED = [
    {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    for reentrant in (False, True)
]
RUNS = {
    "grpo": ("grpo", {"loss_type": "grpo", "beta": 0.1, **CLIPPED}),
    "dapo": ("grpo", {"loss_type": "dapo", **CHECKPOINTED[0]}),
    "sequence": ("grpo", {**SEQUENCE, "num_iterations": 2}),
    "entropies": ("grpo", BONUS),
    "grpo_lora": ("grpo", {"loss_type": "grpo", "beta": 0.1, "lora": 0.0, **CHECKPOINTED[1]}),
    "rloo": ("rloo", {"beta": 0.05}),
    "dpo": ("dpo", {}),
    "dpo_checkpointed": ("dpo", CHECKPOINTED[0]),
    "dpo_reentrant": ("dpo", CHECKPOINTED[1]),
    "dpo_weighted": ("dpo", {"use_weighting": True, "loss_type": ["ipo", "bco_pair"], "ld_alpha": 0.5}),
    "dpo_lora": ("dpo", {"lora": 0.0}),
    "kto": ("kto", {}),
    "kto_precomputed": ("kto", {"precompute_ref_log_probs": True, **CHECKPOINTED[0]}),
}
QUICK = ("grpo", "sequence", "grpo_lora", "dpo_reentrant", "kto")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow, id=name) for name in RUNS]
)
def test_steps_are_those_of_trl(tmp_path, name):
    """Of two optimizer steps: the loss, all gradients, the weights and what is logged."""
    method, options = RUNS[name]
    stock, streamed = (run(tmp_path, method, kind, **options) for kind in ("stock", "stream"))
    assert error(streamed, stock) < TOLERANCE
    ends = [weights(one.trainer.model) for one in (streamed, stock)]
    assert distance(*ends) < TOLERANCE and len(streamed.losses) == 2
    for ours, theirs in zip(logs(streamed), logs(stock), strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            near = 1e-6 if key == "loss" else 1e-9  # Trainer adds up losses in float32; `error` looks at the losses
            assert ours[key] == pytest.approx(value, rel=near, abs=near), key
    assert max(streamed.tokens[True]) <= STREAM["max_row_tokens"] and len(streamed.tokens[True]) > 8


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_rollouts_of_several_rows(tmp_path, monkeypatch, seed):
    """Every loss type of GRPO, by definition; see `test_rollouts.py`."""
    cut = []
    sections_of = folded_forward.sections_of
    monkeypatch.setattr(
        folded_forward, "sections_of", lambda *args, **kw: cut.append(sections_of(*args, **kw)) or cut[-1]
    )
    for name, value in {**STREAM, "max_row_tokens": 8, "min_reuse": 1.2}.items():
        monkeypatch.setattr(rollout_runs.Recorded, name, value, raising=False)
    monkeypatch.delattr(rollout_runs.Unfolded, "min_reuse")
    with all_in_double():
        errors = rollout_runs.compare(tmp_path, seed)
    assert max(errors) < TOLERANCE and max(map(len, cut)) > 2


@pytest.mark.parametrize("method", ["grpo", "dpo"])
def test_paths_are_freed_with_their_call(tmp_path, monkeypatch, method):
    """Those of the pass that scores before the one with gradient, and those before the optimizer's step."""
    alive, run_part = [], folded_forward._Streamed.run

    def watched(call, *args):
        alive.append(sum(path() is not None for path in paths))
        return run_part(call, *args)

    monkeypatch.setattr(folded_forward._Streamed, "run", watched)
    with watched_paths() as paths:
        run(tmp_path, method, "stream")
    assert len(alive) > 3 and set(alive) == {0} and not any(path() for path in paths)


@pytest.mark.parametrize("method", ["grpo", "dpo"])
def test_every_token_is_computed_once_in_each_pass(tmp_path, method):
    """As many as in whole trees, in the scoring pass and in the one with gradient."""
    options = {"max_steps": 1, "gradient_accumulation_steps": 1}
    tree, streamed = (run(tmp_path, method, kind, **options) for kind in ("tree", "stream"))
    (whole,) = tree.tokens[True]
    assert whole > 30
    assert sum(streamed.tokens[True]) == sum(streamed.tokens[False]) == whole
    assert not tree.tokens[False]  # GRPO's first step takes the log-probs of the loss for the old ones


def test_two_ranks(tmp_path):
    """Rows of other sizes on each rank, and so other sections."""
    jobs = {"grpo": {"loss_type": "grpo", "beta": 0.1}, "dpo": {"max_steps": 1}}
    run_ranks(compare_ranks, tmp_path, jobs, ranks=2, timeout=600)
    for method in ("grpo", "dpo"):
        ours, theirs = (torch.load(tmp_path / f"{method}-{rank}.pt") for rank in (0, 1))
        assert ours[0] < TOLERANCE and theirs[0] < TOLERANCE and ours[1] != theirs[1]
        for gradients in zip(ours[2], theirs[2], strict=True):
            assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


# ---- negative controls ----


def test_without_handed_over_gradients_the_comparison_fails(tmp_path, monkeypatch):
    handed_over = streaming._Layer.handed_over

    def forget(layer, index, grad, section):
        layer.filled[index] = min(layer.filled[index], section.start)
        return handed_over(layer, index, grad, section)

    monkeypatch.setattr(streaming._Layer, "handed_over", forget)
    options = {"max_steps": 1, "gradient_accumulation_steps": 1}
    stock, streamed = (run(tmp_path, "dpo", kind, **options) for kind in ("stock", "stream"))
    assert streamed.losses == pytest.approx(stock.losses, abs=TOLERANCE)  # a loss cannot tell
    assert error(streamed, stock) > 1e-2


def test_results_of_another_label_would_show(tmp_path, monkeypatch):
    sections_of = folded_forward.sections_of

    def shifted(batch, *args, **kwargs):
        return sections_of({**batch, "loss_weights": (batch["loss_weights"] - 1).clamp(min=0)}, *args, **kwargs)

    monkeypatch.setattr(folded_forward, "sections_of", shifted)
    options = {"max_steps": 1, "gradient_accumulation_steps": 1}
    stock, streamed = (run(tmp_path, "dpo", kind, **options) for kind in ("stock", "stream"))
    assert abs(streamed.losses[0] - stock.losses[0]) > 1e-4


# ---- one call ----

PROMPT = list(range(3, 13))
ROWS = torch.tensor([[*PROMPT, *tail] for tail in ([20, 21, 22], [20, 21, 30], [40, 41, 42], [40, 50, 51])])


class Calls:
    """A folded model whose calls have at most 6 tokens, and the log-probs that each call returned."""

    def __init__(self, model=None, pass_tokens=6, min_reuse=0):
        self.model = model or make_model()
        add_fused_lm_head(self.model)
        fold_shared_prefixes(self.model, min_reuse=min_reuse)
        folded_forward._calls_of(self.model).pass_tokens = pass_tokens
        self.returned = {False: [], True: []}
        self.model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module, args, kwargs, output):
        if kwargs["attention_mask"].any():
            self.returned[torch.is_grad_enabled()].append(output.log_probs.detach())

    def log_probs(self):
        labels = ROWS.masked_fill(torch.arange(ROWS.shape[1]) < len(PROMPT), -100)
        return self.model(input_ids=ROWS, attention_mask=torch.ones_like(ROWS), labels=labels, fused_lm_head=True)

    def gradients(self):
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


def weigh(log_probs):
    """A loss that is no sum over tokens."""
    return (log_probs.sum(dim=1) * torch.arange(1.0, 5.0)).sigmoid().sum() + log_probs.square().sum()


def test_dropout_draws_the_same_masks_in_both_passes(monkeypatch):
    model = make_model().train()
    mlp = model.model.layers[0].mlp
    mlp.act_fn = torch.nn.Sequential(mlp.act_fn, torch.nn.Dropout(0.5))
    calls = Calls(model)
    for is_restored in (True, False):
        calls.returned = {False: [], True: []}
        loss = weigh(calls.log_probs().log_probs)
        state = torch.get_rng_state()
        loss.backward()
        equal = [torch.equal(*pair) for pair in zip(*calls.returned.values(), strict=True)]
        assert len(equal) > 3 and all(equal) == is_restored
        assert not is_restored or torch.equal(state, torch.get_rng_state())
        monkeypatch.setattr(torch, "set_rng_state", lambda state: None)


@pytest.mark.parametrize("on_host", [False, True])
def test_a_backward_in_a_thread_of_its_own(on_host):
    """As on a GPU, where context variables of the forward are not there."""
    expected, calls = Calls(pass_tokens=100), Calls()
    folded_forward._calls_of(calls.model).on_host = on_host
    weigh(expected.log_probs().log_probs).backward()
    loss = weigh(calls.log_probs().log_probs)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert len(calls.returned[True]) > 3 and len(expected.returned[True]) == 1
    assert relative_error(calls.gradients(), expected.gradients()) < 1e-5


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "gemma3"])
def test_experts_sinks_and_windows(name):
    whole, calls = (Calls(make_model(name, attn_implementation=None), pass_tokens) for pass_tokens in (100, 6))
    for each in (whole, calls):
        weigh(each.log_probs().log_probs).backward()
    assert len(calls.returned[True]) > 3
    assert relative_error(calls.gradients(), whole.gradients()) < 1e-5


@pytest.mark.parametrize(("pass_tokens", "streams"), [(6, True), (ROWS.numel() - 1, False), (ROWS.numel(), False)])
def test_rows_that_share_little_are_streamed_if_they_are_large(pass_tokens, streams):
    """They run unfolded only if all of them, with padding, fit."""
    calls = Calls(pass_tokens=pass_tokens, min_reuse=100)
    seen = []
    calls.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs.get("prefix_tree") is not None), with_kwargs=True
    )
    log_probs = calls.log_probs().log_probs
    assert torch.allclose(log_probs, Calls(pass_tokens=100).log_probs().log_probs, atol=1e-6)
    assert seen == [True] * len(seen) if pass_tokens < ROWS.numel() else seen == [False]
    assert (len(seen) > 3) == streams


def test_without_gradient_nothing_is_computed_twice():
    calls = Calls()
    with torch.no_grad():
        log_probs = calls.log_probs().log_probs
    assert not log_probs.requires_grad and not calls.returned[True]
    with torch.no_grad():
        assert torch.allclose(log_probs, Calls(pass_tokens=100).log_probs().log_probs, atol=1e-6)


@pytest.mark.parametrize("lora", [None, 0.0], ids=["model", "lora"])
def test_mixed_precision(tmp_path, lora):
    """The autocast around a forward, of PEFT's model as well, is there in the backward of a streamed call."""
    options = {"max_steps": 1, "dtype": torch.float32, "lora": lora}
    exact = run(tmp_path, "dpo", "stock", **options)
    stock, streamed = (run(tmp_path, "dpo", kind, bf16=True, **options) for kind in ("stock", "stream"))
    errors = [relative_error(one.gradients[0], exact.gradients[0]) for one in (streamed, stock)]
    assert 1e-4 < errors[0] < 2 * errors[1]
    assert relative_error(streamed.gradients[0], stock.gradients[0]) < 2 * errors[1]


# ---- forwards ----


def test_groups_that_fit_are_not_streamed(tmp_path):
    """Two groups in one forward, in two, and streamed: only the last scores first."""
    options = {"loss_type": "dapo", "max_steps": 1}
    tree = run(tmp_path, "grpo", "tree", **options)
    (whole,) = tree.tokens[True]
    one, two, streamed = (
        run(tmp_path, "grpo", "stream", **options, max_row_tokens=size) for size in (whole, whole - 1, 16)
    )
    assert one.tokens == tree.tokens and not two.tokens[False]
    assert len(two.tokens[True]) == 2 and sum(two.tokens[True]) == sum(streamed.tokens[False]) == whole
    assert max(error(other, tree) for other in (one, two, streamed)) < TOLERANCE


# ---- refused ----


@pytest.mark.parametrize(
    ("config_class", "options", "message"),
    [
        (TreeGRPOConfig, {"max_row_tokens": 0}, "`overflow='stream'` needs `max_row_tokens`"),
        (TreeDPOConfig, {"optim": "lomo"}, "changes weights in the backward"),
        (TreeDPOConfig, {"overflow": "streem"}, "`overflow` is 'streem'; pass one of 'split', 'stream'"),
        (TreeKTOConfig, {"overflow": "split"}, "`max_row_tokens=12` has no meaning here without `overflow='stream'`"),
    ],
)
def test_refused_options(tmp_path, config_class, options, message):
    with pytest.raises(ValueError, match=message):
        config_class(str(tmp_path), bf16=False, **{**STREAM, **options})


def make_dpo(folder, model=None, **options):
    return TreeDPOTrainer(
        model=model or make_model(),
        ref_model=make_model(),
        args=config(folder, TreeDPOConfig, **STREAM, **options),
        train_dataset=preference_runs.pairs(4),
        processing_class=preference_runs.tokenizer(),
    )


def test_refused_models_and_engines(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="set `router_aux_loss_coef=0`"):
        make_dpo(tmp_path, make_model("qwen3_moe", attn_implementation=None))
    with pytest.raises(ValueError, match=r"under `torch_compile=True` or `min_reuse=inf` none are folded"):
        make_dpo(tmp_path, min_reuse=float("inf"))
    with pytest.raises(ValueError, match="recurrent layers, whose states are not handed"):
        Calls(make_hybrid("qwen3_next")).log_probs()
    monkeypatch.setattr("accelerate.Accelerator.is_fsdp2", True)
    with pytest.raises(ValueError, match=r"FSDP2 does not allow .* Use DDP, or `overflow='split'`"):
        make_dpo(tmp_path)
