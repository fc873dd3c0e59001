"""Started by `test_ddp.py` once per process: trains, evaluates, and leaves weights and logs behind."""

import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from runs import make_trees, train, weights  # noqa: E402


def main(folder, num_trees, accumulation, batch_size, max_steps, stream):
    torch.set_num_threads(1)
    trainer = train(
        folder,
        make_trees(num_trees),
        eval_trees=make_trees(5, seed=1),
        gradient_accumulation_steps=accumulation,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=1,
        max_steps=max_steps,
        stream=bool(stream),
        eval_strategy="steps",
        eval_steps=max_steps,
        learning_rate=0.5,
    )
    if trainer.accelerator.is_main_process:
        torch.save(weights(trainer.accelerator.unwrap_model(trainer.model)), f"{folder}/weights.pt")
        Path(folder, "log.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
