# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A rank of `benchmarks.scaling` to which something happens: arguments `EVENT FOLDER [OPTION ...]`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from transformers import TrainerCallback
from trl import SFTTrainer


class LateInTheLastStep(TrainerCallback):
    """One rank ends its last step a second after the other, which no longer waits for it."""

    def on_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == state.max_steps - 1:
            time.sleep(1)


def run_out_of_memory(mode):
    original = SFTTrainer.training_step

    def training_step(self, *args, **kwargs):
        if mode[0] == "per_branch" and self.state.global_step == 1:
            raise torch.cuda.OutOfMemoryError("injected")
        return original(self, *args, **kwargs)

    SFTTrainer.training_step = training_step


def main(event, folder, *options):
    if event == "fsdp2":
        from tests.support.engine_runs import allow_engines_on_cpu

        allow_engines_on_cpu({})
    from benchmarks import scaling

    make_trainer, mode = scaling.make_trainer, [""]

    class KeepsLog(TrainerCallback):
        def on_train_end(self, args, state, control, **kwargs):
            Path(folder, f"{event}_{mode[0]}.json").write_text(json.dumps(state.log_history))

    def watched(*args):
        mode[0] = args[0]
        trainer = make_trainer(*args)
        if event == "late" and scaling.RANK == 1:
            trainer.add_callback(LateInTheLastStep())
        if scaling.RANK == 0:
            trainer.add_callback(KeepsLog())
            steps = trainer.accelerator.gradient_state.plugin_kwargs
            Path(folder, f"{event}_{mode[0]}_accumulation.json").write_text(json.dumps(steps))
        return trainer

    scaling.make_trainer = watched
    if event == "out_of_memory" and int(os.environ["RANK"]) == 1:
        run_out_of_memory(mode)
    scaling.main(options)


if __name__ == "__main__":
    main(*sys.argv[1:])
