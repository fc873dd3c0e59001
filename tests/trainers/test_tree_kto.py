"""`TreeKTOTrainer` against TRL's `KTOTrainer`: same rows, same steps, same numbers, fewer tokens."""

import pytest
from trl import KTOConfig, KTOTrainer

from hf_prefix_tree import TreeKTOTrainer
from tests.support.preference_runs import check, unpaired

BATCH = {"per_device_train_batch_size": 4}
TRAININGS = {
    "kto": {"optim": "adamw_torch", "learning_rate": 1e-3, "eval_rows": unpaired(4, seed=1)},
    "precomputed": {"precompute_ref_log_probs": True, "loss_type": "apo_zero_unpaired"},
    "lora": {"lora": True, "gradient_accumulation_steps": 2, "learning_rate": 0.5, "undesirable_weight": 0.7},
}


@pytest.mark.parametrize("name", list(TRAININGS))
def test_five_steps_are_those_of_trl(name, tmp_path, monkeypatch):
    rows = unpaired(20)
    share = check(tmp_path, monkeypatch, TreeKTOTrainer, KTOTrainer, KTOConfig, rows, **BATCH, **TRAININGS[name])
    assert 0.3 < share < 0.6
