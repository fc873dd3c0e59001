"""Options that other tests leave at their defaults: on trees they do what they do in TRL and Transformers."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOTrainer, KTOConfig, KTOTrainer

from hf_prefix_tree import DataCollatorForPrefixTree, TreeDPOTrainer, TreeGRPOTrainer, TreeKTOTrainer, TreeLossMixin
from tests.support.models import VOCAB
from tests.support.policy_runs import assert_same_training, reward, rollouts, run
from tests.support.preference_runs import Run, assert_equal_runs, check, pairs, unpaired
from tests.support.trainer_runs import distance, make_model, make_trees, tree_dataset, weights

SYNCHRONISED = {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.7}


def length_reward(completion_ids, **kwargs):
    return [len(ids) / 8 for ids in completion_ids]


# ---- GRPO and RLOO ----


def both(folder, algorithm, rollout=None, classes=(None, None), **options):
    stock, tree = (
        run(
            folder,
            algorithm,
            kind,
            rollout_func=None if rollout is None else rollout(),
            trainer_class=trainer_class,
            **options,
        )
        for kind, trainer_class in zip(("stock", "tree"), classes, strict=True)
    )
    assert_same_training(tree, stock, options["max_steps"], moved=1e-3)
    return stock, tree


def test_grpo(tmp_path):
    options = {
        **{"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False, **SYNCHRONISED},
        **{"num_iterations": 2, "epsilon": 0.001, "epsilon_high": 0.002, "delta": 1.01},
        **{"reward_funcs": [reward, length_reward], "reward_weights": [0.3, 1.0]},
        **{"scale_rewards": "batch", "multi_objective_aggregation": "normalize_then_sum"},
        **{"generation_batch_size": 16, "pad_to_multiple_of": 8, "gradient_checkpointing": True},
    }
    stock, tree = both(tmp_path, "grpo", lambda: rollouts(deep=True), max_steps=4, learning_rate=3e-3, **options)
    assert sum(tree.tokens.trained) < 0.85 * sum(stock.tokens.trained)
    assert any(entry["clip_ratio/high_mean"] > 0 for entry in stock.logs)
    unsynchronised = run(
        tmp_path,
        "grpo",
        "stock",
        rollout_func=rollouts(deep=True),
        max_steps=4,
        learning_rate=3e-3,
        **{**options, "sync_ref_model": False},
    )
    assert abs(stock.logs[-1]["kl"] - unsynchronised.logs[-1]["kl"]) > 1e-4


def test_an_entropy_bonus_that_adapts(tmp_path):
    options = {"entropy_coef": 0.1, "entropy_target": 10.0, "entropy_coef_delta": 0.05, "entropy_coef_max": 0.18}
    stock, _ = both(tmp_path, "grpo", rollouts, use_adaptive_entropy=True, max_steps=3, learning_rate=1e-2, **options)
    assert [entry["entropy_coef"] for entry in stock.logs] == pytest.approx([0.15, 0.18, 0.18])


def sampled_elsewhere():
    """Rollouts whose log-probs are near those of the model, which guesses."""
    generate = rollouts(length=8)

    def with_log_probs(prompts, trainer):
        output = generate(prompts, trainer)
        return output | {"logprobs": [[-math.log(VOCAB)] * len(ids) for ids in output["completion_ids"]]}

    return with_log_probs


@pytest.mark.parametrize(
    "options",
    [
        {"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_cap": 3.0},
        {"vllm_importance_sampling_mode": "token_truncate", "vllm_importance_sampling_clip_min": 0.5},
    ],
    ids=lambda options: options["vllm_importance_sampling_mode"],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_log_probs_of_vllm(tmp_path, options):
    """The rollouts stand in for those of vLLM, and `use_vllm` is set once its engine would have been started."""
    classes = []
    for trainer_class in (GRPOTrainer, TreeGRPOTrainer):

        class Sampled(trainer_class):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.use_vllm, self._last_loaded_step = True, 0
                self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)

        classes.append(Sampled)
    options |= {"prompt_lengths": (3, 6), "max_steps": 3, "learning_rate": 3e-3}  # the groups in two forwards
    stock, tree = both(tmp_path, "grpo", sampled_elsewhere, classes, **options)
    assert len(tree.tokens.trained) == len(stock.tokens.trained) == 6
    ratios = [entry["sampling/importance_sampling_ratio/mean"] for entry in stock.logs]
    assert all(0 < ratio != 1 for ratio in ratios)
    assert sum(tree.tokens.trained) < 0.85 * sum(stock.tokens.trained)


def test_rloo(tmp_path):
    options = {
        **{"beta": 0.1, "num_iterations": 2, "epsilon": 0.001, "epsilon_high": 0.002, **SYNCHRONISED},
        **{"reward_funcs": [reward, length_reward], "reward_weights": [0.3, 1.0], "reward_clip_range": (-0.2, 0.4)},
        **{"generation_batch_size": 16, "pad_to_multiple_of": 8, "gradient_checkpointing": True},
    }
    stock, tree = both(tmp_path, "rloo", max_steps=4, optim="sgd", learning_rate=0.3, **options)
    assert sum(tree.tokens.trained) < 0.9 * sum(stock.tokens.trained)
    assert any(entry["clip_ratio/region_mean"] > 0 for entry in stock.logs)


# ---- DPO and KTO ----

CLASSES = {"dpo": (TreeDPOTrainer, DPOTrainer, DPOConfig), "kto": (TreeKTOTrainer, KTOTrainer, KTOConfig)}
ROWS = {"dpo": pairs, "kto": unpaired}
DPO = {
    "every loss": {
        "loss_type": [
            *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot"),
            *("aot_unpaired", "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
        ],
        "loss_weights": [0.01 * (i + 1) for i in range(15)],
        **{"label_smoothing": 0.1, "discopop_tau": 0.2, "beta": 0.2, "learning_rate": 2e-3, **SYNCHRONISED},
    },
    "divergence": {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
}


@pytest.mark.parametrize("name", DPO)
def test_dpo(name, tmp_path, monkeypatch):
    check(tmp_path, monkeypatch, *CLASSES["dpo"], pairs(), **DPO[name])


def test_kto(tmp_path, monkeypatch):
    options = {"beta": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.7, "learning_rate": 0.02, **SYNCHRONISED}
    check(tmp_path, monkeypatch, *CLASSES["kto"], unpaired(), per_device_train_batch_size=4, **options)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("dpo", {"max_length": 14, "truncation_mode": "keep_end"}),
        ("kto", {"max_length": 14, "loss_type": "apo_zero_unpaired"}),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_other_batches(algorithm, options, tmp_path):
    """Cut rows in another order; some batches share too little to be folded."""
    options |= {"train_sampling_strategy": "random", "pad_to_multiple_of": 8, "per_device_train_batch_size": 8}
    tree_class, stock_class, config_class = CLASSES[algorithm]
    stock, tree = (
        Run(tmp_path / each.__name__, each, config_class, ROWS[algorithm](), **options)
        for each in (stock_class, tree_class)
    )
    assert_equal_runs(tree, stock)
    assert tree.tokens(folded=True) and {number % 64 for number in stock.tokens(folded=False)} == {0}


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_reference_log_probs_in_other_batches(algorithm, tmp_path, monkeypatch):
    options = {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 6, "per_device_train_batch_size": 4}
    check(tmp_path, monkeypatch, *CLASSES[algorithm], ROWS[algorithm](), **options)


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_noise_on_embeddings_is_that_of_trl(algorithm, tmp_path):
    """Rows with noise of their own are not folded."""
    tree_class, stock_class, config_class = CLASSES[algorithm]
    options = {"neftune_noise_alpha": 5.0, "per_device_train_batch_size": 4, "max_steps": 5}
    stock, tree, plain = (
        Run(tmp_path / name, each, config_class, ROWS[algorithm](), **options | changes)
        for name, each, changes in (
            ("stock", stock_class, {}),
            ("tree", tree_class, {}),
            ("plain", stock_class, {"neftune_noise_alpha": None}),
        )
    )
    assert_equal_runs(tree, stock)
    assert abs(plain.logs[0]["loss"] - stock.logs[0]["loss"]) > 1e-4


# ---- trees ----


class TreeTrainer(TreeLossMixin, Trainer):
    """The step-wide normaliser on a plain Trainer."""


@pytest.mark.slow
def test_a_compiled_model_under_the_mixin(tmp_path):
    ends = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=2,
            per_device_train_batch_size=1,
            optim="sgd",
            learning_rate=0.3,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            remove_unused_columns=False,
            disable_tqdm=True,
            **options,
        )
        trainer = TreeTrainer(
            model=make_model(),
            args=arguments,
            train_dataset=tree_dataset(make_trees(2)),
            data_collator=DataCollatorForPrefixTree(pad_token_id=0),
        )
        trainer.train()
        ends.append(weights(trainer.model))
    assert distance(ends[0], weights(make_model())) > 1e-3
    assert distance(ends[1], ends[0]) < 1e-6
