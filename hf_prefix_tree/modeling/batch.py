# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The batch contract: a packed sequence of trees as tensors. Only this module encodes or decodes it.

| key | shape, dtype | meaning |
|---|---|---|
| `input_ids` | [B, N] int64 | tokens in layout order, padded to a multiple of 128 |
| `position_ids` | [B, N] int64 | depth |
| `labels` | [B, N] int64 | unshifted; -100 where not supervised |
| `prefix_tree` | [B, 3, N] int32 | tensor rows: `subtree_end`, `depth`, `predecessor` |
| `attention_mask` | [B, N] int64 | 1 = real token |
| `loss_weights` | [B, N] int64 | the bit pattern of the float64 weight |
| `token_branches` | [B, N] int64 | branches through each token, 0 at padding: what a router's auxiliary loss counts |
| `tree_stats` | [B, 6] int64 | counts for reports, see [`STATS`]; the model never reads them |
| `inputs_embeds` | [B, N] int64 | zeros, see [`UNPREPARED_SENTINEL`]; a prepared model never reads them |

All entries are integers because engines cast float entries of a batch to the model's dtype. Building a packed sequence
is one concatenation per key: O(N).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.tree.prefix_tree import PrefixTree

_PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_weights", "attention_mask", "token_branches")
SUBTREE_END, DEPTH, PREDECESSOR = range(3)
NUM_ROWS = 3
# The columns of `tree_stats`.
STATS = ("trees", "branches", "branch_tokens", "tree_tokens", "branch_pairs", "tree_pairs")
# A model that was not prepared ignores `prefix_tree` and would silently read the trees as one sequence. Transformers'
# models refuse `input_ids` together with `inputs_embeds`, so a batch holds both; `prepare_model`'s hook takes it out.
UNPREPARED_SENTINEL = "inputs_embeds"

# Marks a call whose caller weights the log-probs of a fused head and takes no loss from the model. Only this package's
# trainers set it, to True or to a `Caller`; the hook takes it out.
WEIGHTED_BY_CALLER = "weighted_by_caller"
BLOCK_SIZE = 128  # FlexAttention's block: packed sequences are padded to a multiple of it


class Supervised(NamedTuple):
    """The supervised tokens of a batch, compacted to M: what the head and the loss need, and no more."""

    where: torch.Tensor  # [M] int64, position of each token's predecessor in the flattened [B * N]
    labels: torch.Tensor  # [1, M] int64, the token itself
    weights: torch.Tensor  # [1, M] float64


class Caller:
    """A caller that weights log-probs; the hook hands it what the call supervises."""

    supervised: Supervised


def encode_weights(weights: torch.Tensor) -> torch.Tensor:
    """
    The integer form in which weights travel through a batch.

    Args:
        weights (`torch.Tensor` of shape `(B, N)`, float64): Weight of each token.

    Returns:
        `torch.Tensor` of shape `(B, N)`, int64: the bit pattern of the weights.

    Example:

    ```python
    >>> import torch
    >>> encode_weights(torch.tensor([0.0, 1.0], dtype=torch.float64))
    tensor([                  0, 4607182418800017408])

    ```
    """
    if weights.dtype != torch.float64:
        raise ValueError(f"`weights` must be float64, got {weights.dtype}: convert them with `.double()` first.")
    return weights.view(torch.int64)


def decode_weights(loss_weights: torch.Tensor) -> torch.Tensor:
    """
    The float64 weights of a batch's `loss_weights`, the inverse of [`encode_weights`].

    Args:
        loss_weights (`torch.Tensor`, int64): Bit patterns of float64 weights.
    """
    if loss_weights.dtype != torch.int64:
        raise ValueError(
            f"`loss_weights` must be int64 (the bit pattern of float64 weights), got {loss_weights.dtype}: something "
            "cast them on the way. Build the batch with `DataCollatorForPrefixTree` or encode the weights with "
            "`hf_prefix_tree.modeling.batch.encode_weights`."
        )
    return loss_weights.view(torch.float64)


def concatenate_trees(
    trees: Sequence[PrefixTree], pad_token_id: int, pad_to_multiple_of: int = BLOCK_SIZE
) -> dict[str, torch.Tensor]:
    """
    Lays trees one after another in one packed sequence of the batch contract.

    Args:
        trees (`Sequence[PrefixTree]`): The trees; without any, the packed sequence is padding that weighs nothing.
        pad_token_id (`int`): Token id of the padding. A padding token sees itself only.
        pad_to_multiple_of (`int`, *optional*, defaults to `128`): The length is rounded up to a multiple of it.

    Returns:
        `dict[str, torch.Tensor]`: the keys of the batch contract, `[1, N]` each (`prefix_tree`: `[1, 3, N]`).

    Example:

    ```python
    >>> from hf_prefix_tree import Branch, fold
    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8], [0, 1, 1])])
    >>> batch = concatenate_trees([tree], pad_token_id=0, pad_to_multiple_of=1)
    >>> batch["input_ids"], batch["labels"], batch["position_ids"]
    (tensor([[5, 6, 7, 8]]), tensor([[-100,    6,    7,    8]]), tensor([[0, 1, 2, 2]]))
    >>> batch["prefix_tree"][0]
    tensor([[ 4,  4,  3,  4],
            [ 0,  1,  2,  2],
            [-1,  0,  1,  1]], dtype=torch.int32)

    ```
    """
    tokens = sum(len(tree) for tree in trees)
    length = max(1, -(-tokens // pad_to_multiple_of)) * pad_to_multiple_of
    input_ids = np.full(length, pad_token_id, dtype=np.int64)
    weights = np.zeros(length, dtype=np.float64)
    tree_rows = np.zeros((NUM_ROWS, length), dtype=np.int32)
    tree_rows[SUBTREE_END] = np.arange(1, length + 1)
    tree_rows[PREDECESSOR] = -1
    token_branches = np.zeros(length, dtype=np.int64)
    counts = np.zeros(len(STATS), dtype=np.int64)
    start = 0
    for tree in trees:
        end = start + len(tree)
        stats = tree.stats()
        counts += [1, *(getattr(stats, name) for name in STATS[1:])]
        input_ids[start:end] = tree.input_ids
        weights[start:end] = tree.weights
        tree_rows[SUBTREE_END, start:end] = tree.subtree_end + start
        tree_rows[DEPTH, start:end] = tree.depth
        tree_rows[PREDECESSOR, start:end] = np.where(tree.predecessor >= 0, tree.predecessor + start, -1)
        token_branches[start:end] = _branches_through(tree)
        start = end
    return {
        # `input_ids` first: engines read the batch size off the first entry
        "input_ids": torch.from_numpy(input_ids)[None],
        "position_ids": torch.from_numpy(tree_rows[DEPTH].astype(np.int64))[None],
        "labels": torch.from_numpy(np.where(weights > 0, input_ids, IGNORE_INDEX))[None],
        "attention_mask": torch.from_numpy((np.arange(length) < tokens).astype(np.int64))[None],
        "prefix_tree": torch.from_numpy(tree_rows)[None],
        "loss_weights": encode_weights(torch.from_numpy(weights))[None],
        "token_branches": torch.from_numpy(token_branches)[None],
        "tree_stats": torch.from_numpy(counts)[None],
        UNPREPARED_SENTINEL: torch.zeros((1, length), dtype=torch.int64),
    }


def _branches_through(tree: PrefixTree) -> np.ndarray:
    """How many branches pass through each token, int64 `[N]`."""
    last = (tree.node_starts + tree.node_lengths - 1)[tree.branch_nodes]
    ended = np.bincount(last + 1, minlength=len(tree) + 1).cumsum()  # branches that end before each token
    return ended[tree.subtree_end] - ended[:-1]


def check_batch(batch: Mapping[str, Any]) -> None:
    """
    Raises `ValueError` where a batch breaks the contract. Looks at types and shapes only: it never waits for a device.

    Args:
        batch (`Mapping[str, Any]`): Keyword arguments of a model call that holds `prefix_tree`.
    """
    tree = batch["prefix_tree"]
    is_tensor = isinstance(tree, torch.Tensor)
    size: Any = tree.shape if is_tensor else ()
    if len(size) != 3 or tree.dtype != torch.int32 or size[1] != NUM_ROWS or not size[0]:
        what = f"{tree.dtype} of shape {tuple(tree.shape)}" if is_tensor else type(tree).__name__
        raise ValueError(
            f"`prefix_tree` must be an int32 tensor of shape (batch, {NUM_ROWS}, length) that stacks subtree_end, "
            f"depth and predecessor, got {what}. Build the batch with `DataCollatorForPrefixTree`."
        )
    shape, int64 = (size[0], size[2]), torch.int64
    for name in _PER_TOKEN:
        value = batch.get(name)
        is_tensor = isinstance(value, torch.Tensor)
        if value is None or (is_tensor and value.dtype is int64 and value.shape == shape):
            continue
        if not is_tensor or value.shape != shape:
            what = str(tuple(value.shape)) if is_tensor else type(value).__name__
            raise ValueError(
                f"`{name}` must be a tensor of shape {shape} to match `prefix_tree`, got {what}. Build the batch "
                "with `DataCollatorForPrefixTree`."
            )
        if value.is_floating_point() and name != "loss_weights":  # `decode_weights` says more about those
            raise ValueError(
                f"`{name}` must hold integers, got {value.dtype}: something cast it on the way. Build the batch with "
                "`DataCollatorForPrefixTree`."
            )
        if name == "labels":
            raise ValueError(f"`labels` must be of dtype torch.int64, got {value.dtype}: pass `labels.long()`.")


def gather_supervised(
    prefix_tree: torch.Tensor, labels: torch.Tensor, loss_weights: torch.Tensor | None = None
) -> Supervised:
    """
    Compacts a batch to its supervised tokens, in the order of the flattened batch.

    A token counts where its label is not -100 and it has a predecessor: the first token of a root is predicted by
    nothing. A batch without any such token gives one ignored entry of weight 0, so that its loss stays differentiable.

    Args:
        prefix_tree (`torch.Tensor` of shape `(B, 3, N)`, int32): As in the batch contract.
        labels (`torch.Tensor` of shape `(B, N)`, int64): Unshifted labels.
        loss_weights (`torch.Tensor` of shape `(B, N)`, int64, *optional*): Encoded weights; 1 for each supervised
            token where left out.

    Example:

    ```python
    >>> import torch
    >>> tree = torch.tensor([[[4, 4, 3, 4], [0, 1, 2, 2], [-1, 0, 1, 1]]], dtype=torch.int32)
    >>> gather_supervised(tree, torch.tensor([[-100, 6, -100, 8]]))
    Supervised(where=tensor([0, 1]), labels=tensor([[6, 8]]), weights=tensor([[1., 1.]], dtype=torch.float64))

    ```
    """
    batch_size, _, length = prefix_tree.shape
    predecessor = prefix_tree[:, PREDECESSOR]
    where = is_supervised(prefix_tree, labels).view(-1).nonzero().squeeze(-1)
    if where.numel() == 0:
        index = torch.zeros(1, dtype=torch.int64, device=labels.device)
        ignored = torch.full((1, 1), IGNORE_INDEX, dtype=labels.dtype, device=labels.device)
        return Supervised(index, ignored, torch.zeros((1, 1), dtype=torch.float64, device=labels.device))
    index = (predecessor + torch.arange(batch_size, device=labels.device)[:, None] * length).view(-1)[where]
    labels, weights = (x.reshape(-1)[where][None] for x in (labels, _weights(labels, loss_weights)))
    return Supervised(index, labels, weights)


def summed_weights(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """
    The divisor of a batch's loss: the summed weights of its supervised tokens, a float64 scalar.

    Args:
        batch (`Mapping[str, torch.Tensor]`): A batch of the contract, with `labels`.
    """
    supervised = is_supervised(batch["prefix_tree"], batch["labels"])
    return _weights(batch["labels"], batch.get("loss_weights")).masked_fill(~supervised, 0.0).sum()


def _weights(labels: torch.Tensor, loss_weights: torch.Tensor | None) -> torch.Tensor:
    return torch.ones_like(labels, dtype=torch.float64) if loss_weights is None else decode_weights(loss_weights)


def is_supervised(prefix_tree: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Which tokens of a batch have a label and a predecessor, bool `(B, N)`."""
    return (labels != IGNORE_INDEX) & (prefix_tree[:, PREDECESSOR] >= 0)
