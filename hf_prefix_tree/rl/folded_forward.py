# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The folded forward: padded rows in, one tree forward, per-token results unfolded to the padded shape."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import extract_model_from_parallel
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import get_device_states, set_device_states
from transformers import PreTrainedModel

from hf_prefix_tree.data.images import mark_images
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.batch import WEIGHTED_BY_CALLER, is_supervised
from hf_prefix_tree.modeling.checks import base_causal_lm, rope_limit
from hf_prefix_tree.modeling.positions import IMAGE_INPUTS
from hf_prefix_tree.modeling.prepare import ensure_verified, install_tree_hooks, is_prepared
from hf_prefix_tree.modeling.streaming import Section, sections_of, stream
from hf_prefix_tree.rl.config import MIN_REUSE, FoldingOptions
from hf_prefix_tree.rl.folded_rows import TREE_INPUTS, FoldedRows, empty_row, fold_rows, images_of_rows, row_multiple
from hf_prefix_tree.training.checks import check_streaming, refuse_engines
from hf_prefix_tree.training.options import refuse_options
from hf_prefix_tree.training.step import CheckpointMixin, replaced

logger = logging.getLogger(__name__)

_STATE = "_hf_prefix_tree_folded"
# Arguments that a folded call serves. A call with any other one is not folded.
_SERVED = {"input_ids", "attention_mask", "labels", "shift_labels", "fused_lm_head", "num_items_in_batch"}
_SERVED |= {"use_cache", "output_router_logits", "return_dict", *IMAGE_INPUTS}
_NOT_FOR_TREES = ("shift_labels", "num_items_in_batch", *IMAGE_INPUTS)  # they describe the padded rows


def fold_shared_prefixes(
    model: torch.nn.Module, *, min_reuse: float = MIN_REUSE, attn_backend: str | None = None
) -> torch.nn.Module:
    """
    Makes the fused-head calls of TRL's trainers share the prefixes of their rows, in place.

    Afterwards `model(input_ids=..., attention_mask=..., labels=..., fused_lm_head=True)` returns the same output, of
    the same shapes and dtypes, with each token that several rows share computed once. `shift_labels` work as well.
    Rows may be padded on the left, on the right or both; shared prefixes are found by comparing tokens, at every
    depth. Image tokens are equal where the images are equal by their pixels; the vision tower sees each image once.
    Calls without `fused_lm_head=True` (generation, logits) are not touched. Calling this function again only changes
    the options.

    A call falls back to the unfolded forward, with one logged warning per reason, when: fewer than `min_reuse` tokens
    share each computed one; it has other arguments (`position_ids`, `past_key_values`, ...), or images of a model
    without multimodal rotary positions; the attention mask has holes; a label is not the row's own token or is
    predicted from padding; rows are padded on the left and positions are absolute (GPT-2); the rows are longer than
    dynamic rotary frequencies allow; or NEFTune adds noise to each row. A call that `torch.compile` traces as a whole
    falls back without a warning.

    The output's `loss` is recomputed from the unfolded log-probs, and a MoE's `aux_loss` counts a token once for each
    row, so both equal those of the padded rows.

    Args:
        model (`PreTrainedModel`, `PeftModel`, or a DDP, FSDP or DeepSpeed wrapper of one):
            The model that a TRL trainer calls. It is prepared with [`prepare_model`]. Call it before or after
            `trl.trainer.utils.add_fused_lm_head`.
        min_reuse (`float`, *optional*, defaults to `1.2`):
            Tokens of the rows, without padding, per token of the packed sequence, with its padding to a multiple of
            128 (on CPU there is none). Calls below it are not folded. 0 folds every call, `math.inf` none.
        attn_backend (`str`, *optional*):
            As for [`prepare_model`]. By default, a model that is prepared already keeps its backend.

    Returns:
        The same `model`.

    Raises:
        `ValueError`: where [`prepare_model`] raises it, or `min_reuse` is negative.

    Example:

    ```python
    >>> import torch
    >>> from transformers import AutoModelForCausalLM, Qwen3Config
    >>> from trl.trainer.utils import add_fused_lm_head
    >>> from hf_prefix_tree.rl.folded_forward import fold_shared_prefixes

    >>> config = Qwen3Config(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=16,
    ...     num_attention_heads=1, num_key_value_heads=1,
    ... )
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> add_fused_lm_head(model)
    >>> model = fold_shared_prefixes(model)
    >>> ids = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 10]])  # 9 tokens, 6 of them different
    >>> labels = torch.tensor([[-100, -100, -100, 8, -100], [-100, -100, -100, 9, 10]])
    >>> model(input_ids=ids, attention_mask=(ids > 0).long(), labels=labels, fused_lm_head=True).log_probs.shape
    torch.Size([2, 4])

    ```
    """
    if not min_reuse >= 0:
        raise ValueError(f"`min_reuse` must be a number >= 0, got {min_reuse!r}.")
    inner = extract_model_from_parallel(model, keep_torch_compile=False)
    base = base_causal_lm(inner)
    if attn_backend is not None or not is_prepared(inner):
        # A reference model arrives with Accelerate's mixed precision, which would round the logits of the self-check.
        original = base.__dict__.get("_original_forward")
        with nullcontext() if original is None else replaced(base, forward=original):
            install_tree_hooks(inner, attn_backend=attn_backend or "auto")
    if not hasattr(base, _STATE):
        setattr(base, _STATE, _FoldedCalls(base, min_reuse))
    getattr(base, _STATE).min_reuse = min_reuse
    return model


def ids_to_fold(
    model: torch.nn.Module, input_ids: torch.Tensor, attention_mask: torch.Tensor, inputs: Mapping[str, Any]
) -> torch.Tensor | None:
    """
    The ids by which padded rows of a model of [`fold_shared_prefixes`] are folded, if they share enough: image tokens
    are equal only where the images are. `None` where the rows are not folded, whatever they share.

    Args:
        model (`torch.nn.Module`): The model that was passed to [`fold_shared_prefixes`].
        input_ids, attention_mask (`torch.Tensor` of shape `(B, L)`, int64): Padded rows.
        inputs (mapping): The images, as for [`~hf_prefix_tree.rl.folded_rows.images_of_rows`].
    """
    base = base_causal_lm(extract_model_from_parallel(model, keep_torch_compile=False))
    ids, is_token = input_ids.cpu().numpy(), (attention_mask != 0).cpu().numpy()
    images = images_of_rows(base, ids, is_token, inputs)
    if isinstance(images, str) or getattr(base, _STATE).why_not(base, is_token) is not None:
        return None
    if not images.patches:
        return input_ids
    marked = mark_images([row[mask] for row, mask in zip(ids, is_token, strict=True)], images)
    return input_ids.masked_scatter(attention_mask != 0, torch.from_numpy(np.concatenate(marked)).to(input_ids.device))


def _calls_of(model: torch.nn.Module) -> _FoldedCalls:
    return getattr(base_causal_lm(extract_model_from_parallel(model, keep_torch_compile=False)), _STATE)


class _FoldedCalls:
    """The hooks around one causal LM, and a stack of its running calls (the self-check runs calls inside a call)."""

    def __init__(self, base: PreTrainedModel, min_reuse: float) -> None:
        self.min_reuse = min_reuse
        self.pass_tokens, self.on_host = math.inf, False  # a larger call is streamed, and the host keeps what waits
        self.row_tokens = self.packed_tokens = 0  # of the folded training calls since the last log
        self._running: list[_Call | None] = []
        self._warned: set[str] = set()
        config = base.config.get_text_config()
        self._rope_limit = rope_limit(base.config)
        # Rotary scores depend on distances alone, so padding on the left changes nothing.
        self._is_rotary = bool(getattr(config, "rope_parameters", None))
        self._is_rotary &= not getattr(config, "attn_temperature_tuning", None)
        # before the hook of `prepare_model`, which reads the tree
        base.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        base.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    def _before(self, module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict] | None:
        self._running.append(None)
        if torch.compiler.is_compiling() or math.isinf(self.min_reuse):  # the fold is numpy, which graphs don't hold
            return None
        if not kwargs.get("fused_lm_head") or kwargs.get("prefix_tree") is not None or not is_prepared(module):
            return None
        call = self._fold(module, args, kwargs)
        if isinstance(call, str):
            self._warn_once(call)
            return None
        self._running[-1] = call
        if module.training:
            self.row_tokens += call.rows.tokens.numel()
            self.packed_tokens += call.rows.batch["input_ids"].numel()
        device, batch = kwargs["input_ids"].device, call.rows.batch
        flags = {name: x for name, x in kwargs.items() if name not in (*batch, *_NOT_FOR_TREES)}
        flags[WEIGHTED_BY_CALLER] = True
        if batch["attention_mask"].sum() > self.pass_tokens:
            call.streamed = _Streamed(self, module, batch, flags, device)
            batch = empty_row(device)  # the rest of this call: a graph to hang the backward of the sections on
        return (), {**{name: x.to(device, non_blocking=True) for name, x in batch.items()}, **flags}

    def _after(self, module: PreTrainedModel, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        call = self._running.pop()
        if call is None or output is None:  # not folded, or the call raised
            return None
        return call.unfold(output, module.config.get_text_config())

    def _warn_once(self, reason: str) -> None:
        kind = reason.split(":")[0]
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning("Falling back to the unfolded forward where %s (logged once).", reason)

    def why_not(self, module: PreTrainedModel, is_token: npt.NDArray[np.bool_]) -> str | None:
        """Why padded rows are not folded, whatever their tokens: a kind of reason, and after a colon the case."""
        width = is_token.shape[1]
        if self._rope_limit is not None and width > self._rope_limit:
            return f"rows exceed the limit of this model's rotary frequencies: {width} > {self._rope_limit} tokens"
        if module.training and getattr(module.get_input_embeddings(), "neftune_noise_alpha", None):
            return "NEFTune adds noise to each row (`neftune_noise_alpha`)"
        filled = is_token.any(axis=1)
        if not filled.any():
            return "there is no token"
        if not self._is_rotary and not is_token[filled, 0].all():
            return "rows are padded on the left of absolute positions"
        return None

    def _fold(self, module: PreTrainedModel, args: tuple, kwargs: dict[str, Any]) -> _Call | str:
        """The folded call, or why the call is not folded: a kind of reason, and after a colon the case."""
        unserved = [name for name, x in kwargs.items() if name not in _SERVED and x is not None and x is not False]
        if args or unserved:
            return f"the model gets other inputs than padded rows: {unserved or 'positional arguments'}"
        input_ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
        shifted = kwargs.get("shift_labels")
        labels = kwargs.get("labels") if shifted is None else shifted
        if input_ids is None or labels is None or labels.shape != input_ids.shape:
            return "`input_ids` or labels of their shape are missing"
        if mask is None:
            mask = torch.ones_like(input_ids)
        if mask.shape != input_ids.shape:
            return f"the attention mask is not that of padded rows: shape {tuple(mask.shape)}"
        # one copy, hence one wait for the device
        ids, is_token, row_labels = torch.stack([input_ids, mask != 0, labels]).cpu().numpy()
        is_token = is_token != 0
        if shifted is not None:  # the label of a position is the next token, and the last position has none
            if (row_labels[:, -1] != IGNORE_INDEX).any():
                return "a label is not the row's own token: the last of `shift_labels`"
            row_labels = np.roll(row_labels, 1, axis=1)
        is_wanted = row_labels != IGNORE_INDEX
        is_wanted[:, 0] = False
        follows_token = np.pad(is_token[:, :-1], ((0, 0), (1, 0)))
        if ((is_token & ~follows_token).sum(axis=1) > 1).any():
            return "the attention mask has holes"
        if (is_wanted & ~(is_token & follows_token)).any():
            return "a label is at padding or predicted from it"
        if (row_labels != ids)[is_wanted].any():
            return "a label is not the row's own token"
        reason = self.why_not(module, is_token)
        if reason is not None:
            return reason
        images = images_of_rows(module, ids, is_token, kwargs)
        if isinstance(images, str):
            return images
        rows = fold_rows(ids, is_token, is_wanted, row_multiple(input_ids.device), images)
        if rows.reuse < self.min_reuse and ids.size <= self.pass_tokens:
            return (
                f"too few tokens are shared: {rows.tokens.numel()} tokens of rows for a packed sequence of "
                f"{rows.batch['input_ids'].shape[1]}, a reuse below `min_reuse={self.min_reuse}`"
            )
        label_mask = (labels[:, 1:] if shifted is None else labels) != IGNORE_INDEX
        return _Call(rows, label_mask, kwargs.get("num_items_in_batch"))


def _per_token(output: Any) -> dict[str, torch.Tensor]:
    """The results of TRL's `FusedCausalLMOutput` that have one entry for each token."""
    return {name: x for name, x in vars(output).items() if isinstance(x, torch.Tensor) and x.dim() == 2}


@dataclasses.dataclass
class _Streamed:
    """
    A folded call in sections (`overflow="stream"`). A loss needs the results of all of them, so they run without
    gradient first, and once more in the backward, which knows the gradient of every result.
    """

    calls: _FoldedCalls
    module: PreTrainedModel
    batch: dict[str, torch.Tensor]
    flags: dict[str, Any]
    device: torch.device

    def __post_init__(self) -> None:
        if not self.batch.keys() <= set(TREE_INPUTS):
            raise ValueError(
                f"Rows with images and more than `max_row_tokens={self.calls.pass_tokens}` tokens cannot be streamed: "
                "raise it, or use `overflow='split'`."
            )
        # In place of a weight, a label carries the index of its result to the section that computes it.
        ranks = (self.batch["labels"] != IGNORE_INDEX).cumsum(dim=1) - 1
        self.batch, self.size = {**self.batch, "loss_weights": ranks}, int(ranks[0, -1]) + 1
        kind = self.device.type
        # The backward computes in the same precision, and draws the same masks of dropout.
        self.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        one_of_each_device = {parameter.device: parameter for parameter in self.module.parameters()}.values()
        self.draws = torch.get_rng_state(), *get_device_states(*one_of_each_device)
        self.results = self.run()

    def attached(self, anchor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The results; as `anchor` does, another result of the model, they depend on its weights."""
        names = [name for name, value in self.results.items() if value.is_floating_point() and anchor.requires_grad]
        results = self.results | {name: self.results[name] + 0 * anchor.sum() for name in names}

        def backward(grads: Sequence[torch.Tensor | None]) -> None:
            self.run({name: grad for name, grad in zip(names, grads, strict=True) if grad is not None})

        register_multi_grad_hook([results[name] for name in names], backward)
        return results

    def run(self, grads: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The results, `[1, M]` each, without gradient; or the backward, given their gradients."""
        results: dict[str, torch.Tensor] = {}

        def forward(section: Section | None) -> torch.Tensor:
            assert section is not None  # all are of this rank
            part = section.inputs
            where = part["loss_weights"][is_supervised(part["prefix_tree"], part["labels"])].to(self.device)
            inputs = {name: part[name].to(self.device, non_blocking=True) for name in TREE_INPUTS}
            with torch.autocast(*self.autocast):
                output = self.module(**inputs, **self.flags)
            total = output.log_probs.new_zeros(())
            for name, value in _per_token(output).items():
                own = value[0, : len(where)]  # a section without labels has a result that stands for none
                if grads is None:
                    results.setdefault(name, value.new_zeros((1, self.size)))[0, where] = own
                elif name in grads:
                    total = total + (own * grads[name][0, where]).sum()
            return total

        tokens, multiple, trains = int(self.calls.pass_tokens), row_multiple(self.device), grads is not None
        sections = sections_of(self.batch, tokens, on_host=self.calls.on_host, multiple=multiple)
        state, devices, states = self.draws
        with torch.set_grad_enabled(trains), torch.random.fork_rng(devices, trains, device_type=self.device.type):
            if trains:
                torch.set_rng_state(state)
                set_device_states(devices, states, device_type=self.device.type)
            stream(sections, [s.name for s in sections], forward, torch.autograd.backward if trains else None)
        return results


@dataclasses.dataclass
class _Call:
    """One folded call, with the indices that unfold the results of the tree."""

    rows: FoldedRows
    label_mask: torch.Tensor  # of the shape of the results
    num_items_in_batch: torch.Tensor | int | None
    streamed: _Streamed | None = None

    def unfold(self, output: Any, config: Any) -> Any:
        """The output of the rows, given that of the tree (TRL's `FusedCausalLMOutput`)."""
        device = output.log_probs.device
        results = _per_token(output) if self.streamed is None else self.streamed.attached(output.log_probs)
        where, mask = self.rows.where.to(device, non_blocking=True), self.label_mask.to(device)
        for name, value in results.items():
            # Autograd sums the gradients of shared tokens in the backward of this gather. Without any label the result
            # still depends on the model: a differentiable zero.
            setattr(output, name, value.new_zeros(mask.shape).masked_scatter(mask, value[0][where]))
        divisor = mask.sum().clamp(min=1) if self.num_items_in_batch is None else self.num_items_in_batch
        output.loss = -output.log_probs.sum() / divisor
        if output.aux_loss is not None:  # of the rows already, see `token_branches`
            output.loss = output.loss + getattr(config, "router_aux_loss_coef", 0.0) * output.aux_loss
        return output


class FoldedForwardMixin(CheckpointMixin):
    """
    Folds the policy and the reference model of a TRL trainer that scores padded rows with its fused head. Put it
    before the trainer: `class TreeDPOTrainer(FoldedForwardMixin, DPOTrainer)`.

    Options of [`~hf_prefix_tree.rl.config.FoldingOptions`] in the configuration become attributes of the trainer.
    `tree/tokens` (of packed sequences) and `tree/token_ratio` (tokens of rows divided by them) of the policy's folded
    training calls are logged with the loss.

    Raises:
        `ValueError`: where the architecture cannot be exact on trees, and where [`refuse_engines`] or
            [`refuse_options`] raises.
    """

    min_reuse: float = MIN_REUSE
    attn_backend: str | None = None
    max_row_tokens: int = 0
    overflow: str = "split"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        refuse_engines(self.accelerator)
        refuse_options(self.args)
        if self.args.torch_compile:
            logger.warning(
                "Rows are not folded under `torch_compile=True`, which compiles the whole model. Leave it at `False`, "
                "and for compiled layers call `prepare_model(model, compile_layers=True)` before the trainer."
            )
        self.fold_models()
        if self.overflow == "stream":
            check_streaming(self, in_calls=True)
            if math.isinf(self.min_reuse):
                raise ValueError(
                    "`overflow='stream'` streams folded rows, and under `torch_compile=True` or `min_reuse=inf` none "
                    "are folded: leave these out."
                )

    def fold_models(self) -> None:
        """Folds the models that the trainer has so far; called early where `__init__` already scores rows."""
        if isinstance(self.args, FoldingOptions):
            for option in dataclasses.fields(FoldingOptions):
                setattr(self, option.name, getattr(self.args, option.name))
        if self.args.torch_compile:
            self.min_reuse = math.inf
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                fold_shared_prefixes(model, min_reuse=self.min_reuse, attn_backend=self.attn_backend)
                calls = _calls_of(model)
                calls.pass_tokens = self.max_row_tokens if self.overflow == "stream" else math.inf
                calls.on_host = getattr(self.args, "activation_offloading", False)

    def training_step(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        ensure_verified(self.model, model)
        if self.overflow != "stream" or self.accelerator.num_processes == 1:
            return super().training_step(model, *args, **kwargs)
        with self.accelerator.no_sync(model):  # of the calls of sections it knows nothing
            loss = super().training_step(model, *args, **kwargs)
        if self.accelerator.sync_gradients:
            inputs = {**empty_row(loss.device), "fused_lm_head": True, WEIGHTED_BY_CALLER: True}
            self.accelerator.backward(model(**inputs).log_probs.sum())
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        calls = _calls_of(self.model)
        if "loss" in logs:  # every rank logs a training step
            counts = torch.tensor([calls.row_tokens, calls.packed_tokens], device=self.accelerator.device)
            row_tokens, packed_tokens = self.accelerator.reduce(counts).tolist()
            calls.row_tokens = calls.packed_tokens = 0
            if packed_tokens:
                logs |= {"tree/tokens": packed_tokens, "tree/token_ratio": row_tokens / packed_tokens}
        super().log(logs, *args, **kwargs)
