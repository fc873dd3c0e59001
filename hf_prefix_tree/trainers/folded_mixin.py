# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`FoldedForwardMixin`]: what TRL's preference and RL trainers need to score their rows on prefix trees.

Cost: that of [`~hf_prefix_tree.trainers.folded.fold_shared_prefixes`].
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from hf_prefix_tree.model import ensure_verified
from hf_prefix_tree.trainers.engines import refuse_engines
from hf_prefix_tree.trainers.folded import MIN_REUSE, fold_shared_prefixes
from hf_prefix_tree.trainers.options import refuse_options

if TYPE_CHECKING:
    from transformers import Trainer as _Trainer  # what the mixin is put before
else:
    _Trainer = object

logger = logging.getLogger(__name__)


class FoldedForwardMixin(_Trainer):
    """
    Put it before a TRL trainer that scores padded rows with its fused head: `class TreeDPOTrainer(FoldedForwardMixin,
    DPOTrainer)`. The policy and the reference model are then folded, whichever of them the trainer has.

    Class attributes: `min_reuse` and `attn_backend`, the options of
    [`~hf_prefix_tree.trainers.folded.fold_shared_prefixes`].

    Raises:
        `ValueError`: where the architecture cannot be exact on trees, and under what [`refuse_engines`] and
            [`refuse_options`] refuse.
    """

    min_reuse: float = MIN_REUSE
    attn_backend: str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_engines(self.accelerator)
        refuse_options(self.args)
        if self.args.torch_compile:
            logger.warning(
                "Rows are not folded under `torch_compile=True`, which compiles the whole model. Leave it at `False`, "
                "and for compiled layers call `prepare_model(model, compile_layers=True)` before the trainer."
            )
            self.min_reuse = math.inf
        self.fold_models()

    def fold_models(self) -> None:
        """Folds the models that the trainer has so far. One that scores rows while it initialises calls it first."""
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                fold_shared_prefixes(model, min_reuse=self.min_reuse, attn_backend=self.attn_backend)

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        ensure_verified(self.model, model)
        return super().training_step(model, *args, **kwargs)
