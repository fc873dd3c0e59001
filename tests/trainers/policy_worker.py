"""Started by `test_policy_ddp.py` in two processes: trains stock and on trees, and leaves logs and weights behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from policy_runs import rollouts, run  # noqa: E402

# Micro-batches smaller than a group, and prompts of other lengths on each rank: ranks would choose other numbers of
# parts by themselves, and some micro-batches come out empty.
JOBS = {
    "grpo": {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2, "epsilon": 0.001},
    "dapo": {"loss_type": "dapo"},
    "rloo": {"beta": 0.05, "optim": "sgd", "learning_rate": 0.3},
}
COMMON = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_generations": 4}
COMMON |= {"max_steps": 3, "learning_rate": 3e-3, "prompt_lengths": (4, 40)}


def main(folder: str) -> None:
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    for name, options in JOBS.items():
        for kind in ("stock", "tree"):
            algorithm = "rloo" if name == "rloo" else "grpo"
            extra = {} if algorithm == "rloo" else {"rollout_func": rollouts()}
            found = run(Path(folder, rank), algorithm, kind, **{**COMMON, **options}, **extra)
            state = {"logs": found.logs, "start": found.start, "weights": found.weights}
            state |= {"trained": found.tokens.trained, "forward": found.tokens.forward}
            torch.save(state, Path(folder, f"{name}-{kind}-{rank}.pt"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
