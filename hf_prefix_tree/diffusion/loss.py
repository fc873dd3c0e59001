# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The losses of diffusion language models: masked diffusion, block diffusion, and both with next-token prediction.

Each is `sum_t w_t * nll_t / N` with N the supervised tokens of the whole optimizer step. Diffusion predicts a token at
its own position, next-token prediction at the position before. [`objective_inputs`] lays a micro-batch out for the
model and says which positions predict a token; [`objective_loss`] is the loss of their log-probs.

Under `group_by` the `[x_t | x_0]` of all samples become one packed sequence: the tree of the clean tokens, in which
equal prefixes are one, with each noisy block as a leaf below the clean tokens before it:

    prompt [noisy a1] a1 [noisy a2] a2 ... [noisy b1] b1 [noisy b2] ...

A token sees the tokens of its path, and a noisy block itself. Clean tokens merge where `"hybrid"`, which attends
causally, has the same tokens up to there, and `"block"` the same whole blocks: a token sees the rest of its block.
Noisy blocks and clean tokens on which no prediction depends are left out. Cost: linear in the tokens of the samples,
vectorised, plus Python steps over samples and blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from hf_prefix_tree.diffusion.collator import supervised_tokens
from hf_prefix_tree.diffusion.noise import Corrupted, window_starts
from hf_prefix_tree.modeling.attention.masks.spans import END0, FIRST, START0, spans
from hf_prefix_tree.modeling.batch import BLOCK_SIZE
from hf_prefix_tree.modeling.loss import weighted_mean
from hf_prefix_tree.training.sampling import rounded_up
from hf_prefix_tree.tree import layout
from hf_prefix_tree.tree.prefix_tree import Branch, fold

if TYPE_CHECKING:
    from hf_prefix_tree.diffusion.config import DiffusionSFTConfig


def mdlm_weights(is_masked: torch.Tensor, p: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """The weights of masked diffusion, float64 `(B, L)`: 1 / p at masked and supervised tokens; see [`mdlm_loss`]."""
    return torch.where((is_masked != 0) & (loss_mask != 0), 1 / p.double(), 0.0)


def next_token_weights(loss_mask: torch.Tensor) -> torch.Tensor:
    """
    The weights of next-token prediction: 1 at the position before each supervised token.

    The first token of a sequence has no position before it and is in no sum.

    Args:
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised. Not shifted.

    Returns:
        `torch.Tensor` of shape `(B, L)`, float64.

    Example:

    ```python
    >>> import torch
    >>> next_token_weights(torch.tensor([[1, 0, 1]]))
    tensor([[0., 1., 0.]], dtype=torch.float64)

    ```
    """
    return torch.nn.functional.pad((loss_mask[:, 1:] != 0).double(), (0, 1))


def mdlm_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    is_masked: torch.Tensor,
    p: torch.Tensor,
    loss_mask: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """
    The masked-diffusion loss (MDLM, LLaDA): `sum nll * [masked and supervised] / p` over N.

    Args:
        logits (`torch.Tensor` of shape `(B, L, vocab)` or `(B, L)`): The logits at a position predict its own token.
            Or the log-probs of the targets, float64, where a fused head computed them; any finite
            number where no token is predicted.
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised.
        is_masked (`torch.Tensor` of shape `(B, L)`, bool): Which tokens were masked or replaced.
        p (`torch.Tensor` of shape `(B, L)`, float32): Probability with which each was masked.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): N, the supervised tokens, masked or not, of the
            whole optimizer step on all ranks. Defaults to those of this call.

    Returns:
        `torch.Tensor`: scalar, float64 for float64 logits and float32 otherwise. Without masked tokens a
        differentiable zero; not finite where N or the p of a masked token is 0.

    Example:

    ```python
    >>> import torch
    >>> masked, mask = torch.tensor([[False, True, False, True]]), torch.tensor([[0, 1, 1, 1]])
    >>> mdlm_loss(torch.zeros(1, 4, 4), torch.tensor([[0, 1, 2, 3]]), masked, torch.full((1, 4), 0.5), mask)
    tensor(1.8484)

    ```
    """
    return _loss(logits, targets, mdlm_weights(is_masked, p, loss_mask), loss_mask, num_items_in_batch)


def block_diffusion_loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    loss_mask: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
) -> torch.Tensor:
    """
    The flat block-diffusion loss: `sum nll` of all supervised tokens, masked or not, over N.

    Args:
        logits (`torch.Tensor` of shape `(B, L, vocab)` or `(B, L)`): As in [`mdlm_loss`].
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): N, as in [`mdlm_loss`].

    Returns:
        `torch.Tensor`: scalar, as [`mdlm_loss`].

    Example:

    ```python
    >>> import torch
    >>> block_diffusion_loss(torch.zeros(1, 4, 4), torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 1, 1, 1]]))
    tensor(1.3863)

    ```
    """
    return _loss(logits, targets, (loss_mask != 0).double(), loss_mask, num_items_in_batch)


def hybrid_loss(
    logits: torch.Tensor,
    next_token_logits: torch.Tensor,
    targets: torch.Tensor,
    is_masked: torch.Tensor,
    p: torch.Tensor,
    loss_mask: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None = None,
    *,
    alpha: float,
) -> torch.Tensor:
    """
    `alpha` times the masked-diffusion loss, plus next-token cross-entropy; both over the same N.

    Args:
        logits (`torch.Tensor` of shape `(B, L, vocab)` or `(B, L)`): Of the noisy tokens, as in [`mdlm_loss`].
        next_token_logits (`torch.Tensor` of shape `(B, L, vocab)` or `(B, L)`): Of the clean tokens under a causal
            mask; they predict the next position.
        targets (`torch.Tensor` of shape `(B, L)`, int64): Clean ids, or labels with -100 where not supervised.
        is_masked (`torch.Tensor` of shape `(B, L)`, bool): Which tokens were masked or replaced.
        p (`torch.Tensor` of shape `(B, L)`, float32): Probability with which each was masked.
        loss_mask (`torch.Tensor` of shape `(B, L)`): Not 0 where a token is supervised, in both parts.
        num_items_in_batch (`torch.Tensor` or `float`, *optional*): N, as in [`mdlm_loss`].
        alpha (`float`): Weight of the diffusion part.

    Returns:
        `torch.Tensor`: scalar, as [`mdlm_loss`].
    """
    diffusion = mdlm_loss(logits, targets, is_masked, p, loss_mask, num_items_in_batch)
    weights = next_token_weights(loss_mask)
    return alpha * diffusion + _loss(next_token_logits, _next(targets), weights, loss_mask, num_items_in_batch)


def _loss(
    logits: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    loss_mask: torch.Tensor,
    num_items_in_batch: torch.Tensor | float | None,
) -> torch.Tensor:
    divisor = (loss_mask != 0).sum() if num_items_in_batch is None else num_items_in_batch
    if logits.dim() == 2:
        return weighted_mean(-logits, weights, divisor)
    selected, weights = weights != 0, weights.to(logits.device)
    logits = logits[selected]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    # not `cross_entropy`, which skips a target of -100
    log_probs = logits.to(dtype).log_softmax(dim=-1).gather(1, targets[selected][:, None].to(logits.device))
    return weighted_mean(-log_probs[:, 0], weights[selected], divisor).to(dtype)


def _next(targets: torch.Tensor) -> torch.Tensor:
    """The target after each position; at the last one, which predicts nothing, the first."""
    return targets.roll(-1, dims=1)


class ObjectiveInputs(NamedTuple):
    """A micro-batch for the model: N positions, L of x_t or 2 L of `[x_t | x_0]`, packed under `group_by`."""

    inputs: dict[str, Any]  # the arguments of a prepared model
    targets: torch.Tensor  # [B, N] int64
    is_predicted: torch.Tensor  # [B, N] bool: whether the target of a position is predicted there
    places: torch.Tensor | None = None  # [B * N] int64: where each position was packed, -1 where nowhere


def objective_inputs(batch: Mapping[str, torch.Tensor], noise: Corrupted, args: DiffusionSFTConfig) -> ObjectiveInputs:
    """
    Lays a micro-batch out for the model.

    Args:
        batch (`Mapping[str, torch.Tensor]`): Of [`DataCollatorForDiffusionLM`].
        noise ([`Corrupted`]): Its noise.
        args ([`DiffusionSFTConfig`]): `objective`, `block_size`, `response_window` and `group_by`.
    """
    ids, attention_mask, supervised = batch["input_ids"], batch["attention_mask"], supervised_tokens(batch)
    positions = torch.arange(ids.shape[1], device=ids.device).expand(len(ids), -1)
    inputs = {"input_ids": noise.input_ids, "attention_mask": attention_mask, "position_ids": positions}
    if args.objective == "mdlm":
        inputs["diffusion_layout"] = spans(attention_mask)
        return ObjectiveInputs(inputs, ids, noise.is_masked & supervised)
    inputs = {name: torch.cat([x, ids if name == "input_ids" else x], dim=1) for name, x in inputs.items()}
    inputs["diffusion_layout"] = spans(
        attention_mask,
        "block_diffusion" if args.objective == "block" else "hybrid",
        args.block_size,
        window_start=window_starts(supervised) if args.response_window else None,
    )
    if args.objective == "block":
        predicted = [supervised, torch.zeros_like(supervised)]
    else:
        predicted = [noise.is_masked & supervised, next_token_weights(supervised) != 0]
    flat = ObjectiveInputs(inputs, torch.cat([ids, _next(ids)], dim=1), torch.cat(predicted, dim=1))
    return flat if args.group_by is None else _on_shared_prefixes(flat, supervised, args.objective == "hybrid")


def _on_shared_prefixes(flat: ObjectiveInputs, supervised: torch.Tensor, is_causal: bool) -> ObjectiveInputs:
    """The sequences `[x_t | x_0]` as one packed sequence, see the top of this file."""
    names, length = ("input_ids", "attention_mask", "diffusion_layout"), supervised.shape[1]
    ids, attended, seen = (flat.inputs[name].cpu().numpy() for name in names)  # waits for the device
    starts, ends = seen[:, START0, :length], seen[:, END0, :length]  # of the block of each token
    keys = 2 * ids[:, length:] + attended[:, length:]  # of clean tokens: equal where they merge
    # the first position that sees each one: the start of its block or, of tokens that attend causally, itself
    seen_from = np.hstack([starts, length + (np.arange(length) + 0 * starts if is_causal else starts)])
    seen_from = seen_from + 2 * length * np.arange(len(ids))[:, None]
    is_supervised = supervised.cpu().numpy().copy()
    is_supervised[0, 0] |= not is_supervised.any()  # a packed sequence has a token
    begins = np.zeros_like(is_supervised)  # first tokens of the noisy blocks that predict anything
    begins[is_supervised.nonzero()[0], starts[is_supervised]] = True
    rows, first = begins.nonzero()
    widths = ends[rows, first] - first
    known: dict[bytes, int] = {}  # clean blocks
    paths = []  # clean tokens of each sample, below a common root
    for row, columns in enumerate(map(np.flatnonzero, is_supervised if is_causal else begins)):
        path = keys[row, : columns.max(initial=0)]
        if not is_causal and len(path):
            bounds = np.unique(starts[row, : len(path)])
            blocks = [known.setdefault(block.tobytes(), len(known)) for block in np.split(path, bounds[1:])]
            path = np.repeat(blocks, np.diff(bounds, append=len(path)))
        paths.append(np.append(0, path))
    clean = fold(Branch(path, np.zeros(len(path))) for path in paths)
    walks = clean.paths()
    # Tokens are numbered as in `clean`, then along the noisy blocks. A node ends where a noisy block hangs below it.
    above = np.concatenate(walks)[layout.node_starts(clean.branch_lengths)[rows] + first]
    tops = len(clean) + layout.node_starts(widths)
    nodes = np.unique(np.concatenate([clean.node_starts, above + 1, tops]))
    before = np.append(clean.predecessor[nodes[nodes < len(clean)]], above)
    # in the order of the samples, which decides ties: the clean tokens of each one, then its noisy blocks
    tips = np.append([walk[-1] for walk in walks], tops)
    tips = tips[np.argsort(np.append(np.arange(len(walks)), rows), kind="stable")]
    parents, tips = (np.searchsorted(nodes, numbers, "right") - 1 for numbers in (before, tips))
    lengths = np.diff(nodes, append=len(clean) + widths.sum())
    lengths[0], nodes[0] = lengths[0] - 1, 1  # without the root
    order, new_index = layout.heavy_first_order(lengths, parents, tips)
    tokens = layout.ranges(nodes[order], lengths[order])
    places, at = np.full(ids.shape, -1), np.argsort(tokens)  # where positions are packed; tokens, without the root
    for row, walk in enumerate(walks):
        places[row, length : length + len(walk) - 1] = at[walk[1:] - 1]
    places.flat[layout.ranges(2 * length * rows + first, widths)] = at[len(clean) - 1 :]
    source, kept = np.zeros_like(tokens), np.flatnonzero(places >= 0)  # a position of each packed token
    source[places.flat[kept]] = kept
    packed = np.zeros((6, rounded_up(len(tokens), BLOCK_SIZE)), dtype=np.int32)
    packed[END0] = packed.shape[1]  # each query sees all keys that it is seen from
    visible = places.flat[seen_from.flat[source]], layout.subtree_end(lengths[order], new_index[parents[order]])
    packed[FIRST:, : len(tokens)] = np.stack(visible) * attended.flat[source]
    inputs = {"diffusion_layout": torch.from_numpy(packed[None]).to(supervised.device)}
    of, padding = torch.from_numpy(source).to(supervised.device), (0, packed.shape[1] - len(tokens))
    for name in ("input_ids", "position_ids", "attention_mask"):
        inputs[name] = torch.nn.functional.pad(flat.inputs[name].flatten()[of], padding)[None]
    return flat._replace(inputs=inputs, places=torch.from_numpy(places.ravel()).to(supervised.device))


def objective_loss(
    log_probs: torch.Tensor,
    batch: Mapping[str, torch.Tensor],
    noise: Corrupted,
    args: DiffusionSFTConfig,
    num_items_in_batch: torch.Tensor,
) -> torch.Tensor:
    """
    The loss of an objective.

    Args:
        log_probs (`torch.Tensor` of shape `(B, N)`, float64): Those of the targets of [`objective_inputs`].
        batch, noise, args: As in [`objective_inputs`]; of `args` also `alpha`.
        num_items_in_batch (`torch.Tensor`): The supervised tokens of the optimizer step.
    """
    ids, supervised = batch["input_ids"], supervised_tokens(batch)
    noisy, clean = log_probs.tensor_split([ids.shape[1]], dim=1)
    if args.objective == "block":
        return block_diffusion_loss(noisy, ids, supervised, num_items_in_batch)
    arguments: Any = (ids, noise.is_masked, noise.p, supervised, num_items_in_batch)
    if args.objective == "mdlm":
        return mdlm_loss(noisy, *arguments)
    return hybrid_loss(noisy, clean, *arguments, alpha=args.alpha)
