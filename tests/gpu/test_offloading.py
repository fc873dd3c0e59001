"""Activations that wait in host memory change no number. TRL offloads from a GPU only."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config
from trl import DPOConfig, KTOConfig

from hf_prefix_tree import TreeDPOConfig, TreeDPOTrainer, TreeKTOTrainer
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import VOCAB
from tests.support.preference_runs import Run, assert_equal_runs, pairs, unpaired
from tests.support.trainer_runs import distance, make_model, make_trees, train, weights

pytestmark = pytest.mark.gpu


def test_sft(tmp_path):
    ends = [
        weights(train(tmp_path, make_trees(2), max_steps=2, use_cpu=False, activation_offloading=offloading).model)
        for offloading in (False, True)
    ]
    start = {name: value.to("cuda") for name, value in weights(make_model()).items()}
    assert distance(ends[0], start) > 1e-3
    assert distance(ends[1], ends[0]) < 1e-6


def test_streamed_sft(tmp_path):
    """Paths long enough that their copies last while the GPU computes: prompts of 8 passes and 4 completions."""
    rng = np.random.default_rng(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "head_dim": 64}
    config_of_model = Qwen3Config(vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=4, **sizes)
    trees = []
    for _ in range(2):
        prompt = rng.integers(3, VOCAB, size=8192)
        tails = [np.append(first, rng.integers(3, VOCAB, size=999)) for first in range(3, 7)]
        trees.append(fold([Branch(np.append(prompt, tail), np.arange(9192) >= 8192) for tail in tails]))
    options = {"overflow": "stream", "max_packed_tokens": 1024, "gradient_checkpointing": True, "use_cpu": False}
    ends = []
    for offloading in (False, True):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config_of_model))  # the trainer changes it
        start = {name: value.to("cuda") for name, value in weights(model).items()}
        options |= {"max_steps": 2, "learning_rate": 1.0, "activation_offloading": offloading}
        ends.append(weights(train(tmp_path, trees, model, **options).model))
    assert distance(ends[0], start) > 1e-3
    assert distance(ends[1], ends[0], start) < 1e-4


@pytest.mark.parametrize(
    ("trainer_class", "config_class", "rows", "streamed"),
    [
        (TreeDPOTrainer, DPOConfig, pairs(), {}),
        (TreeKTOTrainer, KTOConfig, unpaired(), {}),
        (TreeDPOTrainer, TreeDPOConfig, pairs(), {"overflow": "stream", "max_row_tokens": 16}),
    ],
)
def test_preferences(tmp_path, trainer_class, config_class, rows, streamed):
    options = {"use_cpu": False, "per_device_train_batch_size": 4, **streamed}
    plain, offloaded = (
        Run(tmp_path / str(offloading), trainer_class, config_class, rows, activation_offloading=offloading, **options)
        for offloading in (False, True)
    )
    assert_equal_runs(offloaded, plain)
