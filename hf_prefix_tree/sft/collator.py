# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`DataCollatorForPrefixTree`]: trees, or what folds into one, to one packed sequence of the batch contract.

[`BranchCollator`] is the grouped baseline, the slow reference of a step: the loss and gradients of a tree, branch by
branch, each with its backward before the next one's forward, so memory is that of one branch. The tree's weights are
handed to its branches, so the divisor and the step's metrics stay the same. Cost: every branch's tokens, a shared
prefix once per branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_prefix_tree.data.baselines import branch_shares
from hf_prefix_tree.data.nodes import as_branch, rollout_branches
from hf_prefix_tree.data.rows import rows_of_batch
from hf_prefix_tree.data.supervision import IGNORE_INDEX, located
from hf_prefix_tree.modeling.batch import BLOCK_SIZE, concatenate_trees
from hf_prefix_tree.training.sampling import PADDING_FEATURE
from hf_prefix_tree.tree.folding import WEIGHTINGS, as_list, check_choice, check_integer
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold


class RowCounts:
    """
    Tokens, supervised tokens and visible pairs of dataset rows; a function for `Dataset.map(batched=True)`.

    Args:
        collator ([`DataCollatorForPrefixTree`]): Reads the rows.
    """

    def __init__(self, collator: DataCollatorForPrefixTree) -> None:
        self.collator = collator

    def __call__(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, list[list[int]]]:
        return {"counts": [self.of(row) for row in rows_of_batch(columns)]}

    def of(self, row: Any) -> list[int]:
        """The counts of one row."""
        stats = [tree.stats() for tree in self.collator.trees([row])]
        names = ("tree_tokens", "supervised_tokens", "tree_pairs")
        return [sum(getattr(of_tree, name) for of_tree in stats) for name in names]


# The keys of each form of a feature.
_FORMS = (("trees",), ("node_parents",), ("branches",), ("prompt_ids", "completions"))


@dataclass
class DataCollatorForPrefixTree:
    """
    Data collator for prefix trees: all features of a batch become one packed sequence of a multiple of 128 tokens.

    A feature is one tree or several, given as

    - a [`PrefixTree`], or a dataset row that holds one (`PrefixTree.to_dict`),
    - `trees`: a list of either,
    - `branches`: a list of [`Branch`] or of `{"input_ids": [...], "weights": [...]}`,
    - `prompt_ids` and `completions`: token ids; every completion token is supervised, the prompt is not.

    A key whose value is `None` counts as absent. Folding here or beforehand gives the same batch. The collator pickles
    and runs in worker processes.

    Args:
        pad_token_id (`int`):
            Token id of the padding; that of the end of a text where a tokenizer has none.
        weighting (`str`, *optional*, defaults to `"tree"`):
            How raw features are weighted, see [`fold`]. Trees keep the weighting that they were folded with.
        pad_to_multiple_of (`int`, *optional*, defaults to `128`):
            Packed sequences are padded to a multiple of it. FlexAttention needs a multiple of 128.

    Raises:
        `ValueError`: For an argument of another kind, and when called with a feature of another form, or of two.

    Example:

    ```python
    >>> from hf_prefix_tree import DataCollatorForPrefixTree

    >>> collator = DataCollatorForPrefixTree(pad_token_id=0, pad_to_multiple_of=8)
    >>> batch = collator([{"prompt_ids": [5, 6], "completions": [[7], [8, 9]]}])
    >>> batch["input_ids"]
    tensor([[5, 6, 8, 9, 7, 0, 0, 0]])
    >>> batch["labels"]
    tensor([[-100, -100,    8,    9,    7, -100, -100, -100]])
    >>> batch["position_ids"]
    tensor([[0, 1, 2, 3, 2, 0, 0, 0]])

    ```
    """

    pad_token_id: int
    weighting: str = "tree"
    pad_to_multiple_of: int = BLOCK_SIZE

    def __post_init__(self) -> None:
        check_integer(self.pad_token_id, "pad_token_id")
        check_choice(self.weighting, "weighting", WEIGHTINGS)
        check_integer(self.pad_to_multiple_of, "pad_to_multiple_of", least=1)

    def __call__(self, features: Sequence[PrefixTree | Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        return concatenate_trees(self.trees(features), self.pad_token_id, self.pad_to_multiple_of)

    def trees(self, features: Sequence[PrefixTree | Mapping[str, Any]]) -> list[PrefixTree]:
        """
        The trees of a batch, in order.

        Args:
            features (`Sequence`): The features that the collator is called with.
        """
        trees: list[PrefixTree] = []
        for index, feature in enumerate(as_list(features, "features")):
            if not _is_padding(feature):
                with located(f"`features[{index}]`"):
                    trees += _trees(feature, self.weighting)
        return trees


def _is_padding(feature: object) -> bool:
    if not isinstance(feature, Mapping) or feature.keys() != PADDING_FEATURE.keys():
        return False
    return isinstance(feature["input_ids"], list) and not feature["input_ids"]  # arrays compare by element


def _trees(feature: object, weighting: str) -> list[PrefixTree]:
    if isinstance(feature, PrefixTree):
        return [feature]
    given = type(feature).__name__
    if isinstance(feature, Mapping):
        # Arrow fills the columns of the remaining forms with nulls
        feature = {name: value for name, value in feature.items() if value is not None}
        forms = [" and ".join(f"`{name}`" for name in form) for form in _FORMS if feature.keys() >= {*form}]
        if len(forms) > 1:
            raise ValueError(f"it has {' as well as '.join(forms)}: keep one of them.")
        if "trees" in feature:
            trees = as_list(feature["trees"], "trees")
            return [tree if isinstance(tree, PrefixTree) else PrefixTree.from_dict(tree) for tree in trees]
        if "node_parents" in feature:
            return [PrefixTree.from_dict(feature)]
        if "node_lengths" in feature and "sample_paths" in feature:
            raise ValueError(
                "it holds `node_lengths` and `sample_paths`: convert it with `PrefixTree.from_node_paths` "
                "first, or collate it with `prefix_tree_collate_fn`."
            )
        if "branches" in feature:
            branches = as_list(feature["branches"], "branches")
            return [fold([as_branch(branch, index) for index, branch in enumerate(branches)], weighting)]
        if "prompt_ids" in feature and "completions" in feature:
            return [fold(rollout_branches(feature["prompt_ids"], feature["completions"]), weighting)]
        given = f"the keys {list(feature)}"
    raise ValueError(
        f"it must be a tree, or have `branches`, or `prompt_ids` with `completions`, got {given}. Turn conversations "
        "into trees with `hf_prefix_tree.prepare_trees`, or let `TreeSFTTrainer` do it. If these were trees, Trainer "
        "dropped their columns: set `remove_unused_columns=False`."
    )


@dataclass
class BranchCollator:
    """
    Every branch of the trees as a sequence by itself, padded by itself, one after the other in one batch.

    `branch_lengths` (int64 `[1, number of sequences]`) says where they end; [`branch_batches`] takes them apart.
    Indices in `prefix_tree` count from each sequence's start. `tree_stats` are those of the trees.

    Args:
        collator ([`DataCollatorForPrefixTree`]): Reads the features.
    """

    collator: DataCollatorForPrefixTree

    def __call__(self, features: Sequence[PrefixTree | Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        trees = self.collator.trees(features)
        chains = [
            [fold([Branch(branch.input_ids, weights)], weighting="branch")]
            for tree in trees
            for branch, weights in zip(tree.branches(), branch_shares(tree), strict=True)
        ]
        sequences = [self.collator(chain) for chain in chains or [[]]]
        batch = {name: torch.cat([part[name] for part in sequences], dim=-1) for name in sequences[0]}
        batch["tree_stats"] = self.collator(trees)["tree_stats"]
        batch["branch_lengths"] = torch.tensor([[part["input_ids"].shape[1] for part in sequences]])
        return batch


@dataclass
class EvaluationCollator:
    """
    Trees in one packed sequence, and where their supervised branches are in it, int64 `[branches, longest]`:
    `branch_positions`, filled up with -1, and `branch_labels`, unshifted and filled up with -100.

    Args:
        collator ([`DataCollatorForPrefixTree`]): Reads the features.
    """

    collator: DataCollatorForPrefixTree

    def __call__(self, features: Sequence[PrefixTree | Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        trees = self.collator.trees(features)
        starts = np.cumsum([0, *map(len, trees)])
        branches = [
            (path + start, np.where(branch.weights > 0, branch.input_ids, IGNORE_INDEX))
            for start, tree in zip(starts, trees, strict=False)
            for branch, path in zip(tree.branches(), tree.paths(), strict=True)
            if branch.weights.any()
        ]
        batch = self.collator(trees)
        for index, (name, filler) in enumerate((("branch_positions", -1), ("branch_labels", IGNORE_INDEX))):
            parts = [*(torch.from_numpy(branch[index]) for branch in branches), batch["labels"][0, :0]]
            batch[name] = pad_sequence(parts, batch_first=True, padding_value=filler)[:-1]
        return batch


def branch_batches(batch: Mapping[str, torch.Tensor], number: int) -> list[dict[str, torch.Tensor]]:
    """
    The sequences of a batch of [`BranchCollator`], and sequences without weight up to `number`.

    Args:
        batch (`Mapping[str, torch.Tensor]`): The batch.
        number (`int`): Sequences to return, at least as many as the batch has.
    """
    lengths = batch["branch_lengths"][0].tolist()
    parts = {name: batch[name].split(lengths, -1) for name in batch if name not in ("branch_lengths", "tree_stats")}
    sequences = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    # The shortest sequence again, as if it were padding: collectives need a forward and a backward on every rank.
    shortest = min(sequences, key=lambda part: part["input_ids"].shape[1])
    filler = shortest | {
        "labels": torch.full_like(shortest["labels"], IGNORE_INDEX),
        "attention_mask": torch.zeros_like(shortest["attention_mask"]),
    }
    return sequences + [filler] * (number - len(sequences))
