"""`TreeGRPOTrainer` on a GPU, with FlexAttention, bf16 autocast and checkpointing, against TRL's. Needs a GPU."""

import pytest

from hf_prefix_tree import TreeGRPOConfig
from tests.support.gpu_rows import model_of
from tests.support.policy_runs import rollouts, run
from tests.support.trainer_runs import distance

pytestmark = pytest.mark.gpu
OPTIONS = {
    "max_steps": 2,
    "loss_type": "grpo",
    "beta": 0.1,
    "num_iterations": 2,
    "epsilon": 0.01,
    "use_cpu": False,
    "optim": "sgd",
    "learning_rate": 0.3,
    "max_completion_length": 40,
    "prompt_lengths": (200, 300),
}


STREAM = {"config_class": TreeGRPOConfig, "overflow": "stream", "max_row_tokens": 256}


def train(folder, kind, **options):
    rollout = rollouts(deep=True, environment=True, longest=40)
    return run(folder, "grpo", kind, model=model_of("qwen3"), rollout_func=rollout, **{**OPTIONS, **options})


@pytest.mark.parametrize("options", [{}, STREAM], ids=["whole", "streamed"])
def test_float32_equals_stock(tmp_path, options):
    stock, tree = train(tmp_path, "stock"), train(tmp_path, "tree", **options)
    assert distance(stock.weights, stock.start) > 1e-3
    assert distance(tree.weights, stock.weights, stock.start) < 1e-3
    for entry, other in zip(tree.logs, stock.logs, strict=True):
        for name in ("loss", "kl", "entropy", "grad_norm"):
            assert entry[name] == pytest.approx(other[name], rel=1e-3, abs=1e-4), name
    # 16 rows of about 270 tokens in two micro-batches; a row of 2 prompts and their completions
    assert sum(tree.tokens.trained) < (0.5 if options else 0.3) * sum(stock.tokens.trained)  # sections are padded


@pytest.mark.parametrize(("checkpointing", "streamed"), [(True, {}), (False, {}), (True, STREAM)])
def test_autocast_is_as_close_to_float32_as_stock_is(tmp_path, checkpointing, streamed):
    exact = train(tmp_path, "stock", epsilon=0.2)
    options = {"bf16": True, "gradient_checkpointing": checkpointing, "epsilon": 0.2}  # bf16 ratios are off by 1e-2
    stock, tree = train(tmp_path, "stock", **options), train(tmp_path, "tree", **options, **streamed)
    error = distance(tree.weights, exact.weights, exact.start)
    assert 1e-4 < error <= 2 * distance(stock.weights, exact.weights, exact.start)
    assert tree.logs[0]["kl"] == pytest.approx(stock.logs[0]["kl"], abs=1e-2)
