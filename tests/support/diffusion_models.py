"""Prepared models beside stock ones of the same weights, and who sees whom, written out."""

import copy

import torch

from hf_prefix_tree.diffusion.model import prepare_diffusion_model
from tests.support.models import make_model


def pair(name, seed=0):
    """A prepared model, and a stock one of the same weights that takes any mask. Windows hold all tokens."""
    found = make_model(name, seed=seed)
    found.config.sliding_window = 64
    other = copy.deepcopy(found)
    other.set_attn_implementation("eager")
    return prepare_diffusion_model(found), other


def stock_logits(model, ids, visible):
    """Of one sequence under any mask `(N, N)`, positions 0, 1, 2, ..."""
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)
    return model(ids[None], attention_mask=mask[None, None], use_cache=False).logits[0]


def block_of(position, size, start):
    return -1 if position < start else (position - start) // size


def sees(layout, size, start, length, q, k, causal_before=0):
    """The definition, for one pair of one row."""
    if layout == "full":
        return True
    q_noisy, k_noisy = (layout != "block_causal" and x < length for x in (q, k))
    q, k = q % length, k % length
    q_block, k_block = block_of(q, size, start), block_of(k, size, start)
    if layout == "block_causal":
        return k <= q if q < causal_before else k_block <= q_block
    if q_noisy:
        return k_block == q_block if k_noisy else k_block < q_block
    return not k_noisy and (k_block <= q_block if layout == "block_diffusion" else k <= q)
