"""TreeGRPOTrainer against TRL's GRPOTrainer: the same numbers step by step, from fewer tokens."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import VOCAB
from tests.support.policy_runs import CountedTokens, assert_same_training, build, rollouts, run
from tests.support.trainer_runs import distance, make_model


def both(folder, steps=5, rollout=None, **options):
    """The stock run and the tree run of the same options, compared; returns them."""
    options = {"max_steps": steps, **options}
    runs = [
        run(folder, "grpo", kind, rollout_func=None if rollout is None else rollouts(**rollout), **options)
        for kind in ("stock", "tree")
    ]
    assert_same_training(runs[1], runs[0], steps)
    return runs


CLIPPED = {"num_iterations": 2, "epsilon": 0.001, "learning_rate": 3e-3}


@pytest.mark.parametrize(
    "options",
    [
        {"loss_type": "dapo"},
        {"loss_type": "grpo", "beta": 0.1, **CLIPPED},
        {"loss_type": "dr_grpo", "importance_sampling_level": "sequence", "off_policy_mask_threshold": 0.0, **CLIPPED},
        {"loss_type": "bnpo", **CLIPPED},
    ],
    ids=lambda options: options["loss_type"],
)
def test_equals_stock(tmp_path, options):
    stock, tree = both(tmp_path, rollout={}, **options)
    assert sum(tree.tokens.trained) < 0.85 * sum(stock.tokens.trained)
    if "num_iterations" in options:
        assert any(entry["clip_ratio/region_mean"] > 0.1 for entry in stock.logs)
    if "beta" in options:
        assert all(entry["kl"] > 1e-6 for entry in stock.logs[1:])


@pytest.mark.parametrize("loss_type", ["sapo", "luspo", "cispo", "vespo"])
def test_other_losses(tmp_path, loss_type):
    level = "sequence" if loss_type == "luspo" else "token"
    options = {"loss_type": loss_type, "importance_sampling_level": level, "learning_rate": 3e-3}
    both(tmp_path, steps=3, rollout={"deep": True}, num_iterations=2, **options)


@pytest.mark.parametrize(
    ("batch_size", "accumulation", "per_generation"),
    [(8, 2, 4), (8, 4, 2), (8, 2, 3), (6, 4, None), (2, 8, None)],
    ids=str,
)
def test_windows_that_do_not_match_generations(tmp_path, batch_size, accumulation, per_generation):
    """Steps of part of a generation, of several, of parts of two; groups across micro-batches, groups larger."""
    options = {"loss_type": "grpo", "num_generations": 8, "steps_per_generation": per_generation}
    options |= {"per_device_train_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
    both(tmp_path, steps=3, rollout={}, learning_rate=3e-3, **options)


def test_generated_completions(tmp_path):
    """TRL generates, also with the prepared model; some completions end early, the others are masked out."""
    options = {"max_completion_length": 24, "temperature": 0.9, "beta": 0.05, "mask_truncated_completions": True}
    stock, _ = both(tmp_path, steps=3, learning_rate=3e-3, **options)
    assert any(0 < entry["completions/clipped_ratio"] < 1 for entry in stock.logs)


def test_continuous_batching(tmp_path):
    """Generation from a paged cache, which refuses the attention that trees are trained with."""
    cache = {"num_blocks": 32, "max_batch_tokens": 64}
    _, tree = both(
        tmp_path,
        steps=2,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=cache,
        temperature=0.9,
    )
    assert tree.trainer.model.config._attn_implementation == "prefix_tree"
    assert len(tree.tokens.trained) == 2


def test_rows_that_cannot_be_folded_keep_to_the_size_of_micro_batches(tmp_path):
    """Absolute positions, prompts padded on the left: gathered rows would be as many padded ones in a forward."""
    config = GPT2Config(
        vocab_size=VOCAB,
        **{"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 512, "initializer_range": 0.3},
        **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0),
    )
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "max_steps": 2, "beta": 0.1}
    runs, most = [], []
    for kind in ("stock", "tree"):
        torch.manual_seed(0)
        trainer = build(tmp_path, "grpo", kind, model=GPT2LMHeadModel(config), rollout_func=rollouts(), **options)
        sizes = []
        for model in (trainer.model, trainer.ref_model):
            model.transformer.register_forward_pre_hook(
                lambda module, args, kwargs, sizes=sizes: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
            )
        trainer.train()
        runs.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        most.append(max(sizes))
    assert runs[1] == pytest.approx(runs[0], abs=1e-6)
    assert most[1] <= most[0]


def test_mixed_precision_with_a_reference_model(tmp_path):
    """TRL's default. The reference model comes to be folded with Accelerate's autocast around its forward."""
    options = {"beta": 0.1, "max_steps": 3, "optim": "sgd", "learning_rate": 0.3}
    exact, stock, tree = (
        run(tmp_path, "grpo", kind, model=make_model(), rollout_func=rollouts(), bf16=bf16, **options)
        for kind, bf16 in (("stock", False), ("stock", True), ("tree", True))
    )
    error, own = (distance(one.weights, exact.weights, exact.start) for one in (tree, stock))
    assert 1e-3 < error < 2 * own
    assert tree.logs[-1]["kl"] == pytest.approx(stock.logs[-1]["kl"], rel=0.1) and stock.logs[-1]["kl"] > 1e-4
    reference = tree.trainer.ref_model
    assert reference.forward != reference._original_forward  # the autocast is there again
    assert sum(tree.tokens.forward) < 0.6 * sum(stock.tokens.forward)


def test_images_that_cannot_be_folded_keep_their_micro_batches(tmp_path, monkeypatch):
    """
    Gathered rows would be as many padded ones in a forward. Another rank, with text, waits for the same collective,
    and keeps as many micro-batches.
    """
    trainer = build(tmp_path, "grpo", "tree")
    gathered = []
    monkeypatch.setattr(trainer.accelerator, "gather", lambda totals: gathered.append(totals) or totals)
    ones = torch.ones(2, 5, dtype=torch.int64)
    plain = {"prompt_ids": ones, "prompt_mask": ones, "completion_ids": ones, "completion_mask": ones}
    assert [len(batch) > 0 for batch in trainer._regroup([plain, plain])] == [False, True]
    for name in ("pixel_values", "token_type_ids"):
        batches = [{**plain, name: ones}] * 2
        assert trainer._regroup(batches) is batches
    assert [totals.shape for totals in gathered] == [(1, 2)] * 3
    assert [int((gathered[0] + totals).argmin()) for totals in gathered] == [0, 1, 1]
    lone = [{**plain, "mm_token_type_ids": ones}] * 2  # of images that are missing
    assert all(len(batch) > 0 for batch in trainer._regroup(lone))


def test_compiling_the_whole_model_is_said_to_fold_nothing(tmp_path, caplog):
    trainer = build(tmp_path, "grpo", "tree", torch_compile=True, torch_compile_backend="eager")
    assert "not folded under `torch_compile=True`" in caplog.text
    tokens = CountedTokens(trainer.model)
    ids = torch.ones(4, 9, dtype=torch.int64)
    with torch.no_grad():
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, ids, 4)
    assert tokens.forward == [4 * 9]


def test_groups_in_micro_batches_of_their_own(tmp_path):
    """Two groups are too many tokens for one forward: what is logged still is of TRL's micro-batches."""
    options = {"loss_type": "grpo", "beta": 0.1, "prompt_lengths": (3, 6), **CLIPPED}
    options |= {"optim": "sgd", "learning_rate": 0.5}
    stock, tree = both(tmp_path, steps=4, rollout={"length": 8}, **options)
    assert len(tree.tokens.trained) == len(stock.tokens.trained) == 8
    assert sum(tree.tokens.trained) < 0.8 * sum(stock.tokens.trained)
    assert any(entry["clip_ratio/low_min"] != entry["clip_ratio/high_max"] for entry in stock.logs)


def test_environment_tokens_and_deep_sharing(tmp_path):
    stock, tree = both(tmp_path, rollout={"deep": True, "environment": True}, loss_type="grpo", beta=0.1, **CLIPPED)
    # of completions of up to 8 tokens, half share 4
    assert sum(tree.tokens.trained) < 0.6 * sum(stock.tokens.trained)


def test_search_tree(tmp_path, shared_data):
    """The last steps of real search trees: they share all the steps before, and each has a value of its own."""
    puzzles = [json.loads(line) for line in shared_data("data/game24_search_tree.jsonl").read_text().splitlines()]
    found = []  # prompt, completions and rewards of each group, a token per character
    for puzzle in puzzles:
        leaves = [node for node in puzzle["nodes"] if node["step"] == 2][:8]
        texts = [puzzle["input"], *(node["text"] for node in leaves)]
        prompt, *completions = ([ord(character) % 60 + 3 for character in text] for text in texts)
        if len(completions) == 8:
            found.append((prompt, completions, [node["value"] for node in leaves]))
    groups = iter([])

    def generate(prompts, trainer):
        own = [next(groups) for _ in range(len(prompts) // 8)]
        completions = [ids for _, several, _ in own for ids in several]
        return {
            "prompt_ids": [prompt for prompt, several, _ in own for _ in several],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(ids) for ids in completions],
            "value": [value for _, _, values in own for value in values],
        }

    runs = []
    for kind in ("stock", "tree"):
        groups = iter(found)
        options = {"loss_type": "grpo", "max_steps": 3, "max_completion_length": 128, "optim": "sgd"}
        options |= {"learning_rate": 0.5, "beta": 0.1, "reward_funcs": lambda value, **kwargs: value}
        runs.append(run(tmp_path, "grpo", kind, rollout_func=generate, **options))
    stock, tree = runs
    assert_same_training(tree, stock, steps=3)
    assert any(entry["reward_std"] > 0 for entry in stock.logs)
    folded = [
        len(fold([Branch(prompt + own, [1] * len(prompt + own)) for prompt, several, _ in pair for own in several]))
        for pair in (found[:2], found[2:4], found[4:6])
    ]
    assert tree.tokens.trained == tree.tokens.forward == folded
    assert sum(folded) < 0.5 * sum(stock.tokens.trained)


def test_lora(tmp_path):
    peft_config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    stock, tree = both(tmp_path, rollout={}, loss_type="dapo", beta=0.1, peft_config=peft_config, learning_rate=5e-3)
    moved = [name for name, value in stock.weights.items() if not torch.equal(value, stock.start[name])]
    assert moved and all("lora_" in name for name in moved)
    assert sum(tree.tokens.forward) < 0.85 * sum(stock.tokens.forward)  # the reference, without the adapter


def test_evaluation(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 16, "eval_rows": 4}
    stock, tree = both(tmp_path, steps=3, rollout={}, learning_rate=3e-3, beta=0.1, **options)
    evaluations = [[entry for entry in one.trainer.state.log_history if "eval_loss" in entry] for one in (stock, tree)]
    assert len(evaluations[0]) == 3
    for entry, other in zip(*evaluations, strict=True):
        for name in ("eval_loss", "eval_kl", "eval_entropy", "eval_reward"):
            assert entry[name] == pytest.approx(other[name], rel=1e-6, abs=1e-6), name


def test_a_group_is_computed_once(tmp_path):
    """A prompt of 40 tokens and 8 completions of 4: 72 tokens in one forward, not 8 x 44."""
    options = {"loss_type": "dapo", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "beta": 0.1}
    stock, tree = both(
        tmp_path, steps=2, rollout={"length": 4}, learning_rate=1e-2, prompt_lengths=(40, 40), **options
    )
    assert stock.tokens.trained == [4 * 44] * 4 and stock.tokens.forward == [4 * 44] * 4
    assert tree.tokens.trained == [40 + 8 * 4] * 2 and tree.tokens.forward == [40 + 8 * 4] * 2


def test_scoring_in_parts_keeps_the_order_of_rows(tmp_path):
    """Old and reference log-probs, `batch_size` rows at a time: five groups, their rows scattered."""
    model = build(tmp_path, "grpo", "tree").model
    trainer = build(tmp_path, "grpo", "tree", model=model)
    prompts = torch.randint(3, 60, (5, 6), generator=torch.manual_seed(0))
    order = torch.tensor([3, 0, 4, 1, 2, 2, 0, 1, 4, 3, 1, 3, 2, 4, 0])
    ids = torch.cat([prompts[order], torch.randint(3, 60, (15, 4), generator=torch.manual_seed(1))], dim=1)
    mask = torch.ones_like(ids)
    tokens = CountedTokens(model)
    with torch.no_grad():
        expected, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 4)
        got, _, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, 4, 3)
    assert tokens.forward == [5 * 6 + 15 * 4] + [6 + 3 * 4] * 5  # all at once: one forest; then 5 parts of 30 tokens
    assert (got - expected).abs().max() < 1e-6 < (got - expected.roll(1, 0)).abs().max()


def test_max_row_tokens(tmp_path):
    """Groups that TRL's micro-batches have no room for stay whole where more tokens are allowed."""
    from hf_prefix_tree import TreeGRPOTrainer

    class Large(TreeGRPOTrainer):
        max_row_tokens = 60

    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "max_steps": 1}
    small, large = (
        run(
            tmp_path,
            "grpo",
            "tree",
            rollout_func=rollouts(length=4),
            prompt_lengths=(20, 20),
            trainer_class=kind,
            **options,
        )
        for kind in (TreeGRPOTrainer, Large)
    )
    assert small.tokens.trained == [24] * 8 and large.tokens.trained == [20 + 8 * 4]
    assert_same_training(large, small, steps=1, moved=1e-4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss_type": "bnpo"}, "bnpo"),
        ({"entropy_coef": 0.1}, "entropy bonus"),
        ({"top_entropy_quantile": 0.47}, "top_entropy_quantile=0.47"),  # between two tokens, as TRL rounds it
        ({"router_aux_loss_coef": 0.1, "model_name": "qwen3_moe"}, "router_aux_loss_coef=0"),
    ],
)
def test_micro_batches_that_stay_are_said_once(tmp_path, caplog, options, reason):
    with caplog.at_level(logging.WARNING, logger="hf_prefix_tree"):
        stock, tree = both(tmp_path, steps=2, rollout={}, learning_rate=1e-2, **options)
    said = [record.getMessage() for record in caplog.records if "Micro-batches stay" in record.getMessage()]
    assert len(said) == 1 and reason in said[0]
    assert len(tree.tokens.trained) == len(stock.tokens.trained)
