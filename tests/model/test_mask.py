"""The dense mask against its definition by paths, and the directly built block mask against FlexAttention's own "
"builder."""

import pytest
import torch
from models import random_forest
from torch.nn.attention.flex_attention import create_block_mask

from hf_prefix_tree.attention.mask import dense_mask, tree_block_mask
from hf_prefix_tree.batch import concatenate_trees


def rows(seed, num_trees, multiple=128, **kwargs):
    trees = random_forest(seed, num_trees, **kwargs)
    return concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=multiple)["prefix_tree"]


@pytest.mark.parametrize("window", [None, 1, 5])
def test_dense_mask_is_path_membership(window):
    tree = rows(0, 3)
    length = tree.shape[-1]
    expected = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        key, distance = query, 0
        while key >= 0 and (window is None or distance < window):
            expected[query, key] = True
            key, distance = tree[0, 2, key].item(), distance + 1
    assert torch.equal(dense_mask(tree, window)[0, 0], expected)


@pytest.mark.parametrize("window", [None, 7, 130, 300])
@pytest.mark.parametrize("seed", range(3))
def test_block_mask_equals_create_block_mask(seed, window):
    forest = rows(seed, 2, 1280, num_branches=30, max_length=400)
    tree = torch.cat([forest, rows(seed + 50, 1, 1280, num_branches=40, max_length=700)])
    batch_size, _, length = tree.shape
    block_mask = tree_block_mask(tree, window)
    dense = dense_mask(tree, window)
    generic = create_block_mask(
        lambda b, h, q, k: dense[b, 0, q, k], B=batch_size, H=None, Q_LEN=length, KV_LEN=length, device="cpu"
    )
    num_blocks = length // 128
    for row in range(batch_size):
        for query in range(num_blocks):
            found, expected = (
                {
                    kind: set(indices[row, 0, query, : counts[row, 0, query]].tolist())
                    for kind, counts, indices in (
                        ("partial", mask.kv_num_blocks, mask.kv_indices),
                        ("full", mask.full_kv_num_blocks, mask.full_kv_indices),
                    )
                }
                for mask in (block_mask, generic)
            )
            if window is None:
                assert found == expected
            else:  # bounds by depth may call a block partial that is not: slower, never wrong
                assert found["full"] <= expected["full"]
                assert expected["partial"] | expected["full"] <= found["partial"] | found["full"]
                assert expected["partial"] <= found["partial"]
    # the backward's lists hold the same blocks, by key
    assert torch.equal(block_mask.to_dense().sum(-2), block_mask.q_num_blocks + block_mask.full_q_num_blocks)
    index = torch.arange(length)
    pointwise = block_mask.mask_mod(torch.arange(batch_size)[:, None, None], 0, index[:, None], index[None, :])
    assert torch.equal(pointwise, dense[:, 0])


def test_windowed_block_mask_hides_blocks_out_of_reach():
    chain = rows(1, 1, num_branches=1, max_length=1280)
    assert tree_block_mask(chain, window=100).to_dense().sum() == 10 + 9  # the diagonal and one block before it
    assert tree_block_mask(chain).to_dense().sum() == 55


def test_block_mask_needs_whole_blocks():
    with pytest.raises(ValueError, match=r"rows of 100 tokens.*multiple of 128.*DataCollatorForPrefixTree"):
        tree_block_mask(torch.zeros(1, 3, 100, dtype=torch.int32))
