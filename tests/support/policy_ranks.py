"""What each process of `test_policy_ddp.py` does: trains stock and on trees, and leaves logs and weights behind."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from tests.support.policy_runs import rollouts, run

# Micro-batches smaller than a group, and prompts of other lengths on each rank: ranks would choose other numbers of
# parts by themselves, and some micro-batches come out empty.
JOBS = {
    "grpo": {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "epsilon": 0.001},
    "dapo": {"loss_type": "dapo"},
    "rloo": {"beta": 0.05, "optim": "sgd", "learning_rate": 0.3},
}
COMMON = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 4}
COMMON |= {"max_steps": 3, "learning_rate": 3e-3, "prompt_lengths": (4, 40)}


def train_all(folder: str) -> None:
    rank = os.environ["RANK"]
    for name, options in JOBS.items():
        algorithm = "rloo" if name == "rloo" else "grpo"
        for kind in ("stock", "tree"):
            own = {"rollout_func": rollouts()} if algorithm == "grpo" else {}
            found = run(Path(folder, rank), algorithm, kind, **{**COMMON, **options}, **own)
            state = {"logs": found.logs, "start": found.start, "weights": found.weights}
            state |= {"trained": found.tokens.trained, "forward": found.tokens.forward}
            torch.save(state, Path(folder, f"{name}-{kind}-{rank}.pt"))
