"""The dense mask against its definition by paths, and the directly built block mask against FlexAttention's own "
"builder."""

import gc
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import hf_prefix_tree.modeling.attention.masks.causal as mask_module
from hf_prefix_tree.modeling.attention.masks.causal import dense_mask, tree_block_mask
from hf_prefix_tree.modeling.batch import concatenate_trees
from tests.support.models import random_forest


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
    assert torch.equal(dense_mask(tree, window=window)[0, 0], expected)


@pytest.mark.parametrize("kind", mask_module.KINDS)
@pytest.mark.parametrize("limit", [1, 5, 13])
def test_a_query_sees_as_many_keys_as_the_flop_count_says(kind, limit):
    tree = rows(0, 3)
    seen = dense_mask(tree, **{kind: limit})[0, 0].sum(dim=1)
    depth = tree[0, 1].numpy()
    assert depth.max() > 13
    assert mask_module.KINDS[kind].keys_seen(depth, limit).tolist() == seen.tolist()


@pytest.mark.parametrize("window", [None, 7, 130, 300])
@pytest.mark.parametrize("seed", range(3))
def test_block_mask_equals_create_block_mask(seed, window):
    forest = rows(seed, 2, 1280, num_branches=30, max_length=400)
    tree = torch.cat([forest, rows(seed + 50, 1, 1280, num_branches=40, max_length=700)])
    batch_size, _, length = tree.shape
    block_mask = tree_block_mask(tree, window=window)
    dense = dense_mask(tree, window=window)
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


def listed(counts, indices):
    return [
        [own[:count].tolist() for own, count in zip(*row, strict=True)]
        for row in zip(indices[:, 0], counts[:, 0], strict=True)
    ]


@pytest.mark.parametrize("kind", [{}, {"window": 130}, {"chunk": 200}])
def test_the_backwards_lists_are_those_of_flexattention(kind):
    mask = tree_block_mask(rows(3, 3, 1280, num_branches=60, max_length=400), **kind)
    own = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    stock = BlockMask.from_kv_blocks(*own, BLOCK_SIZE=128, mask_mod=mask.mask_mod)
    for name in ("q", "full_q"):
        found, expected = (
            listed(getattr(m, f"{name}_num_blocks"), getattr(m, f"{name}_indices")) for m in (mask, stock)
        )
        assert found == expected and (kind or any(any(row) for row in found))
    assert all(x.dtype == torch.int32 for x in (*own, mask.q_indices, mask.full_q_indices, mask.q_num_blocks))


@pytest.mark.parametrize(("sequences", "blocks"), [(1, 7), (2, 9), (3, 8)])
def test_compiled_layers_need_no_copies_of_lists(sequences, blocks):
    """They copy inputs that do not start at a multiple of 16 bytes, in every layer."""
    mask = tree_block_mask(rows(0, sequences, 128 * blocks, num_branches=9, max_length=300))
    for name in ("kv", "full_kv", "q", "full_q"):
        for x in (getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")):
            assert x.data_ptr() % 16 == 0 and x.is_contiguous()


@pytest.mark.parametrize("kind", [{}, {"window": 700}, {"chunk": 1024}])
@pytest.mark.parametrize("length", [2048, 2176])  # whole blocks of 256, and half of one at the end
def test_long_rows_have_larger_blocks(length, kind, monkeypatch):
    monkeypatch.setattr(mask_module, "_MOST_BLOCKS", 10)
    monkeypatch.setattr(mask_module, "_LISTED_AT_ONCE", 3 * 9)  # some rows of blocks at a time
    tree = rows(5, 2, length, num_branches=60, max_length=700)
    assert tree.shape[2] == length
    mask, dense = tree_block_mask(tree, **kind), dense_mask(tree, **kind)
    assert mask.BLOCK_SIZE == (256, 256) and mask.seq_lengths == (length, length)
    stock = create_block_mask(lambda b, h, q, k: dense[b, 0, q, k], 1, None, length, length, "cpu", 256)
    names = ("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")
    (partial, full), (stock_partial, stock_full) = (
        [listed(*(getattr(m, name) for name in pair))[0] for pair in names] for m in (mask, stock)
    )
    for query, blocks in enumerate(zip(partial, full, stock_partial, stock_full, strict=True)):
        own_partial, own_full, expected_partial, expected_full = map(set, blocks)
        if kind:
            assert own_full <= expected_full and expected_partial | expected_full <= own_partial | own_full
        elif 256 * (query + 1) <= length:
            assert (own_partial, own_full) == (expected_partial, expected_full)
        else:  # FlexAttention calls no block full that reaches beyond the row
            assert own_partial | own_full == expected_partial and not expected_full
    blocks = torch.zeros(-(-length // 256), -(-length // 256), dtype=torch.bool)
    for query, keys in enumerate(full):
        blocks[query, keys] = True
    covered = blocks.repeat_interleave(256, 0).repeat_interleave(256, 1)[:length, :length]
    assert blocks.any() and dense[0, 0][covered].all()


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all live tensors that operations return, without computing any: on the meta device."""

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.storages = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.storages:
                    self.storages.add(storage._cdata)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self.free, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def free(self, storage, size):
        self.storages.discard(storage)
        self.live -= size


@pytest.mark.parametrize("kind", [{}, {"window": 4096}, {"chunk": 4096}])
def test_a_million_tokens_fit_into_a_gibibyte(kind):
    tree = torch.empty(1, 3, 2**20, dtype=torch.int32, device="meta")
    with PeakMemory() as memory:
        mask = tree_block_mask(tree, **kind)
    lists = [mask.kv_indices, mask.full_kv_indices, mask.q_indices, mask.full_q_indices]
    own = sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in lists}.values())
    assert own == 4 * 4 * (2**20 // 256) ** 2 <= memory.peak < 0.6 * 2**30
    del mask, lists
    gc.collect()
    assert memory.live <= tree.untyped_storage().nbytes()  # the count is of what lives


def chain_and_strangers(end, length):
    """A branch of `end` tokens, and tokens that see themselves only."""
    index = torch.arange(length)
    subtree_end = torch.where(index < end, end, index + 1)
    return torch.stack([subtree_end, torch.where(index < end, index, 0), index - 1])[None].int()


@pytest.mark.parametrize(("end", "is_full"), [(255, False), (256, True)])
def test_a_block_is_full_up_to_its_last_query(end, is_full):
    mask = tree_block_mask(chain_and_strangers(end, 384))
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == [[[], [0] if is_full else [], []]]
    assert listed(mask.kv_num_blocks, mask.kv_indices) == [[[0], [1] if is_full else [0, 1], [2]]]


def test_a_short_block_at_the_end_is_full_up_to_the_last_token(monkeypatch):
    monkeypatch.setattr(mask_module, "_MOST_BLOCKS", 2)
    mask = tree_block_mask(chain_and_strangers(384, 384))
    assert mask.BLOCK_SIZE == (256, 256)
    assert listed(mask.full_kv_num_blocks, mask.full_kv_indices) == [[[], [0]]]
