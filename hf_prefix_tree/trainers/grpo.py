# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeGRPOTrainer`]: TRL's `GRPOTrainer`, each shared token of a group computed once.

Policy, old and reference log-probs and entropies come out of the folded forward in TRL's shapes, so ratios, clipping,
KL and advantages are TRL's own code, per completion and token. Where completions share more than the prompt (tree
rollouts), the gradients of all of them add up in the one log-prob that they share.
"""

from __future__ import annotations

from trl import GRPOTrainer

from hf_prefix_tree.trainers.policy import TreePolicyMixin

# What a micro-batch's loss is, by `loss_type`; `bnpo` divides by the tokens of the micro-batch.
MEANS_OVER_COMPLETIONS = ("grpo", "sapo", "dr_grpo", "luspo")
SUMS = ("dapo", "cispo", "vespo")


class TreeGRPOTrainer(TreePolicyMixin, GRPOTrainer):
    """
    Group Relative Policy Optimization on prefix trees: a drop-in for TRL's [`~trl.GRPOTrainer`].

    Takes the same arguments and a [`~trl.GRPOConfig`], takes the same optimizer steps and logs the same numbers.
    Generation, rewards, tools and environments are TRL's. What differs is which completions are computed together:
    inside an optimizer step, groups are kept together in those forwards that compute the fewest tokens, none with more
    tokens than TRL's micro-batch of `per_device_train_batch_size` padded rows. So a group may be larger than a
    micro-batch, and some of the `gradient_accumulation_steps` may have nothing left to compute. What depends on a
    micro-batch as a whole keeps TRL's own micro-batches: `loss_type="bnpo"`, an entropy bonus, `top_entropy_quantile`
    below 1, a router's auxiliary loss, and images. So does the number of micro-batches under DeepSpeed, and where
    rows cannot be folded (absolute positions, `torch_compile=True`).

    A generation that spans several optimizer steps (`steps_per_generation` above `gradient_accumulation_steps`) is
    shuffled by TRL before it is cut into steps, so each step holds a part of a group, and shares as much.

    Class attributes: `max_row_tokens` (tokens that one forward may hold, where memory allows more than TRL's
    micro-batch has), `min_reuse` and `attn_backend` (as for [`fold_shared_prefixes`]).

    Args:
        model, reward_funcs, args, train_dataset, ...:
            As for `GRPOTrainer`.

    Example:

    ```python
    >>> from datasets import load_dataset
    >>> from trl import GRPOConfig
    >>> from trl.rewards import accuracy_reward
    >>> from hf_prefix_tree import TreeGRPOTrainer

    >>> trainer = TreeGRPOTrainer(
    ...     model="Qwen/Qwen3-0.6B",
    ...     reward_funcs=accuracy_reward,
    ...     args=GRPOConfig("Qwen3-0.6B-TreeGRPO", num_generations=16, per_device_train_batch_size=16),
    ...     train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    ```
    """

    _tag_names = ["trl", "grpo", "prefix-tree"]  # noqa: RUF012 - as in TRL
    _name = "Tree GRPO"

    def _why_micro_batches_stay(self) -> str | None:
        if self.loss_type not in MEANS_OVER_COMPLETIONS + SUMS:
            return f"`loss_type={self.loss_type!r}` is normalised over the tokens of a micro-batch"
        if self._entropy_bonus_enabled:
            return (
                "the entropy bonus (`entropy_coef`, `use_adaptive_entropy`) is a mean over the tokens of a micro-batch"
            )
        if self.top_entropy_quantile < 1.0:
            return f"`top_entropy_quantile={self.top_entropy_quantile}` is a quantile of a micro-batch"
        return super()._why_micro_batches_stay()

    def _loss_is_a_mean(self) -> bool:
        return self.loss_type in MEANS_OVER_COMPLETIONS
