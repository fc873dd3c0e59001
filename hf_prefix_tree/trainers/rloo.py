# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeRLOOTrainer`]: TRL's `RLOOTrainer`, each shared token of a group computed once."""

from __future__ import annotations

from trl import RLOOTrainer

from hf_prefix_tree.trainers.policy import TreePolicyMixin


class TreeRLOOTrainer(TreePolicyMixin, RLOOTrainer):
    """
    REINFORCE Leave-One-Out on prefix trees: a drop-in for TRL's [`~trl.RLOOTrainer`].

    Takes the same arguments and an [`~trl.RLOOConfig`], takes the same optimizer steps and logs the same numbers. As
    for [`TreeGRPOTrainer`], groups are kept together inside an optimizer step.

    Class attributes: those of [`TreeGRPOTrainer`].

    Args:
        model, reward_funcs, args, train_dataset, ...:
            As for `RLOOTrainer`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl import RLOOConfig
    >>> from trl.rewards import accuracy_reward
    >>> from hf_prefix_tree import TreeRLOOTrainer

    >>> trainer = TreeRLOOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=accuracy_reward,
    ...     args=RLOOConfig("Qwen3-0.6B-TreeRLOO", num_generations=8, per_device_train_batch_size=8),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    ```
    """

    _tag_names = ["trl", "rloo", "prefix-tree"]  # noqa: RUF012 - as in TRL
    _name = "Tree RLOO"
