# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`DiffusionSFTConfig`]: TRL's `SFTConfig`, less what has no meaning for diffusion, plus noise and blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trl import SFTConfig

from hf_prefix_tree.diffusion.noise import CORRUPTIONS
from hf_prefix_tree.training.checks import check_config
from hf_prefix_tree.training.options import option_field

OBJECTIVES = ("mdlm", "block", "hybrid")


@dataclass
class DiffusionSFTConfig(SFTConfig):
    r"""
    Configuration of [`DiffusionSFTTrainer`]: `SFTConfig` with these parameters on top.

    Options of `SFTConfig` without meaning here raise `ValueError` (`docs/options.md` lists them).

    Args:
        objective (`str`, *optional*, defaults to `"mdlm"`):
            `"mdlm"`, `"block"` or `"hybrid"`, see [`DiffusionSFTTrainer`].
        block_size (`int`, *optional*, defaults to `32`):
            Tokens of a block: responses are filled up to whole blocks with EOS, `"block"` and `"hybrid"` denoise block
            after block.
        response_window (`bool`, *optional*, defaults to `True`):
            Blocks begin where the response does, and attend to their EOS fill, as in generation. With `False` they
            begin with the sequence and don't, as in [`DataCollatorForDiffusionLM`].
        supervise_padding (`bool`, *optional*, defaults to `False`):
            See [`DataCollatorForDiffusionLM`]. The loss then depends on which samples share a batch, which pads them.
        mask_token_id (`int`, *optional*):
            The mask token, which the data must not hold. Defaults to the tokenizer's `mask_token_id`.
        corruption (`str`, *optional*, defaults to `"uniform"`):
            Noise of a sequence or block. `"uniform"` masks each token with the same probability, `"blockwise"` an
            exact number, later ones more often, `"all_masked"` every token, for models that write a block in one step.
            `"random"` replaces tokens by random ones of the vocabulary, for models without a mask token, which
            [`diffusion_generate`] can't sample from. The last two have p = 1: no token is weighted.
        half_life (`float`, *optional*, defaults to `0.25`):
            For `"blockwise"`: share of the tokens after which the weight doubles.
        noise_eps (`float`, *optional*, defaults to `1e-3`):
            Lowest probability of a token to be masked.
        alpha (`float`, *optional*, defaults to `1.0`):
            For `"hybrid"`: weight of the diffusion loss; that of next-token prediction is 1.
        eval_noise_draws (`int`, *optional*, defaults to `4`):
            How often evaluation draws noise for each sample. More draws make the NLL bound less noisy and cost as much
            more.
        group_by (`str`, *optional*):
            For `"block"` and `"hybrid"`: column whose equal values make one group out of several dataset rows, as in
            [`TreeSFTConfig`]. Batch sizes then count groups, and all samples of a micro-batch are one packed sequence
            that computes clean tokens which start alike once: of completions of one prompt, the prompt. The loss is
            that of the separate samples.
        chat_template_kwargs (`dict` or JSON `str`, *optional*):
            Further variables for the chat template. Those of a dataset row take precedence.
        on_error (`str`, *optional*, defaults to `"raise"`):
            Whether a dataset row that can't be read stops the preparation, or is skipped (`"skip"`) and counted.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            See [`prepare_diffusion_model`].

    > [!NOTE]
    > Unlike in `SFTConfig`, `max_length` defaults to `None`: 1024 tokens would cut many dialogues before the response.
    """

    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "chat_template_kwargs"]  # noqa: RUF012 - as in TRL

    max_length: int | None = option_field(
        None, "Longest sample in tokens; the rest is cut. `None` leaves samples whole."
    )
    objective: str = option_field("mdlm", "The objective of training.", OBJECTIVES)
    block_size: int = option_field(32, "Tokens of a block.")
    response_window: bool = option_field(
        True, "Whether blocks begin where the response does, and attend to their fill."
    )
    supervise_padding: bool = option_field(False, "Whether padding is supervised.")
    mask_token_id: int | None = option_field(None, "The mask token. Defaults to the tokenizer's.")
    corruption: str = option_field("uniform", "Noise in training.", CORRUPTIONS)
    half_life: float = option_field(0.25, "For 'blockwise': share of the tokens after which the weight doubles.")
    noise_eps: float = option_field(0.001, "Lowest probability of a token to be masked.")
    alpha: float = option_field(1.0, "For 'hybrid': weight of the diffusion loss.")
    eval_noise_draws: int = option_field(4, "Draws of noise per sample in evaluation.")
    group_by: str | None = option_field(None, "Column whose equal values share the tokens that they start with.")
    chat_template_kwargs: dict[str, Any] | str | None = option_field(
        None, "Further variables for the chat template, as a JSON object."
    )
    on_error: str = option_field("raise", "What happens to a dataset row that cannot be read.", ["raise", "skip"])
    attn_backend: str = option_field("auto", "Attention of the model.", ["auto", "flex", "sdpa"])

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(
            self,
            at_least={"block_size": 1, "eval_noise_draws": 1, "mask_token_id": 0, "max_length": 1},
            above_zero={"noise_eps": 1, "half_life": math.inf, "alpha": math.inf},
        )
        if self.group_by is not None and self.objective == "mdlm":
            raise ValueError(
                f"`group_by` is {self.group_by!r}: full bidirectional denoising (`objective='mdlm'`) sees the "
                "response from the prompt, so sharing is not exact there; pass 'block' or 'hybrid', or no `group_by`."
            )
