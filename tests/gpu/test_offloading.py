"""Activations that wait in host memory change no number. TRL offloads from a GPU only."""

import pytest
from trl import DPOConfig, KTOConfig

from hf_prefix_tree import TreeDPOConfig, TreeDPOTrainer, TreeKTOTrainer
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
