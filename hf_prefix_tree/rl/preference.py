# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeDPOTrainer`] and [`TreeKTOTrainer`]: TRL's trainers, with shared prefixes of a micro-batch computed once."""

from __future__ import annotations

from typing import Any

from trl import DPOTrainer, KTOTrainer

from hf_prefix_tree.rl.folded_forward import FoldedForwardMixin


class TreePreferenceMixin(FoldedForwardMixin):
    """Put it before `DPOTrainer` or `KTOTrainer`."""

    def compute_ref_log_probs(self, *args: Any, **kwargs: Any) -> Any:
        self.fold_models()  # TRL precomputes log-probs in its `__init__`
        return super().compute_ref_log_probs(*args, **kwargs)


class TreeDPOTrainer(TreePreferenceMixin, DPOTrainer):
    """
    Direct preference optimisation on prefix trees: a drop-in for TRL's [`~trl.DPOTrainer`], with its arguments, its
    `DPOConfig` and its numbers. Every loss type works, since losses see unfolded log-probs.

    Policy and reference log-probs are computed on trees, precomputed ones included. Only rows of one micro-batch share
    prefixes: put pairs of one prompt next to each other (`train_sampling_strategy="sequential"`) and raise
    `per_device_train_batch_size`, so that they share the prompt, images included. Batches whose images a tree cannot
    place, and those that share too little, run as in TRL, which is logged once.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As for `DPOTrainer`. The model is prepared with [`prepare_model`].
        ref_model, args, data_collator, train_dataset, eval_dataset, processing_class, peft_config, ...:
            As for `DPOTrainer`.

    Raises:
        `ValueError`: where the architecture cannot be exact on trees, and under context, sequence or pipeline
            parallelism, FSDP1, and `dispatch_batches=True` on several ranks.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from trl import DPOConfig
    >>> from hf_prefix_tree import TreeDPOTrainer

    >>> pairs = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}]
    >>> trainer = TreeDPOTrainer(
    ...     model="Qwen/Qwen3-0.6B", args=DPOConfig("out"), train_dataset=Dataset.from_list(pairs)
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    ```
    """

    _tag_names = ["trl", "dpo", "prefix-tree"]  # noqa: RUF012 - as in TRL
    _name = "Tree DPO"


class TreeKTOTrainer(TreePreferenceMixin, KTOTrainer):
    """
    Kahneman-Tversky optimisation on prefix trees: as [`TreeDPOTrainer`], for TRL's [`~trl.KTOTrainer`] and its
    `KTOConfig`.

    The log-probs of the KL term are computed on trees as well. The rows of a micro-batch are neighbours in the
    dataset: put those of one prompt next to each other.

    Example:

    ```python
    >>> from datasets import Dataset
    >>> from trl import KTOConfig
    >>> from hf_prefix_tree import TreeKTOTrainer

    >>> rows = [
    ...     {"prompt": "2 + 2 =", "completion": " 4", "label": True},
    ...     {"prompt": "2 + 2 =", "completion": " 5", "label": False},
    ... ]
    >>> trainer = TreeKTOTrainer(
    ...     model="Qwen/Qwen3-0.6B", args=KTOConfig("out"), train_dataset=Dataset.from_list(rows)
    ... )  # doctest: +SKIP
    >>> trainer.train()  # doctest: +SKIP

    ```
    """

    _tag_names = ["trl", "kto", "prefix-tree"]  # noqa: RUF012 - as in TRL
    _name = "Tree KTO"
