"""What a layer can read of the tree: predecessors, nodes and their parents."""

import numpy as np
import torch

from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.models import random_forest


def test_nodes_of_a_row_of_two_trees():
    #            5 6 - 7 8          9
    #             \\ 7 is shared, 8 ends; 3 forks from 6
    first = fold([Branch(ids, [1.0] * len(ids)) for ids in ([5, 6, 7, 8], [5, 6, 3], [5, 6, 7])])
    second = fold([Branch([9], [0.0])])
    context = TreeContext(concatenate_trees([first, second], 0, pad_to_multiple_of=8)["prefix_tree"])
    # tokens 5 6 | 7 8 | 3 | 9 | padding, padding: a branch that ends inside a run does not cut it
    assert context.predecessor.tolist() == [-1, 0, 1, 2, 1, -1, -1, -1]
    assert context.nodes.tolist() == [0, 2, 4, 5, 6, 7, 8]
    assert context.parents.tolist() == [-1, 0, 0, -1, -1, -1]
    assert context.nodes is context.nodes and context.parents is context.parents


def test_nodes_cut_random_batches_into_runs_of_single_children():
    for seed in range(20):
        rows = [concatenate_trees([tree], 0)["prefix_tree"] for tree in random_forest(seed, num_trees=3)]
        tree = torch.cat(rows)
        context = TreeContext(tree)
        length = tree.shape[-1]
        predecessor = [-1 if p < 0 else p + row * length for row in range(3) for p in tree[row, 2].tolist()]
        assert context.predecessor.tolist() == predecessor
        children = np.bincount([p for p in predecessor if p >= 0], minlength=len(predecessor))
        starts = [t for t, p in enumerate(predecessor) if p < 0 or p != t - 1 or children[p] > 1]
        assert context.nodes.tolist() == [*starts, len(predecessor)]
        node_of = np.searchsorted(starts, np.arange(len(predecessor)), side="right") - 1
        assert context.parents.tolist() == [-1 if predecessor[s] < 0 else node_of[predecessor[s]] for s in starts]
        # what continues a node continues its last token
        ends = [end - 1 for end in context.nodes[1:].tolist()]
        assert all(predecessor[s] in (-1, ends[p]) for s, p in zip(starts, context.parents.tolist(), strict=True))
