# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`TreeKTOTrainer`]: TRL's `KTOTrainer`, with the prefixes that the rows of a micro-batch share computed once.

Rows of one prompt share it, and their answers up to where they differ. The mismatched rows that estimate the KL term
are a batch of their own.
"""

from __future__ import annotations

from typing import Any

from trl import KTOTrainer

from hf_prefix_tree.trainers.folded_mixin import FoldedForwardMixin


class TreeKTOTrainer(FoldedForwardMixin, KTOTrainer):
    """
    Kahneman-Tversky optimisation on prefix trees: a drop-in for TRL's [`~trl.KTOTrainer`], with its arguments, its
    `KTOConfig` and its numbers.

    Policy, reference and KL log-probs are computed on trees, precomputed ones included. Sharing ends at the
    micro-batch, which holds neighbours of the dataset: put rows of one prompt next to each other and raise
    `per_device_train_batch_size` to share it among them. Batches with images, and those that share too little, run as
    in TRL, which is logged once.

    Args:
        model (`str`, `PreTrainedModel` or `PeftModel`):
            As for `KTOTrainer`. The model is prepared with [`prepare_model`].
        ref_model, args, data_collator, train_dataset, eval_dataset, processing_class, peft_config, ...:
            As for `KTOTrainer`.

    Raises:
        `ValueError`: where the architecture cannot be exact on trees, and under context, sequence or pipeline
            parallelism, FSDP1, and `dispatch_batches=True` on several ranks.

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

    def compute_ref_log_probs(self, *args: Any, **kwargs: Any) -> Any:
        self.fold_models()  # TRL precomputes them while it initialises
        return super().compute_ref_log_probs(*args, **kwargs)
