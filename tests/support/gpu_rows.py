"""Rows and models on a GPU, and attention called directly."""

import copy

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from hf_prefix_tree.modeling.attention.interface import prefix_tree_attention
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.context import TreeContext
from hf_prefix_tree.tree.prefix_tree import fold
from tests.support.models import CONFIGS, random_branches

HEAD_DIM = 32


def forest(seed, num_trees=2, **kwargs):
    rng = np.random.default_rng(seed)
    return [fold(random_branches(rng, **kwargs)) for _ in range(num_trees)]


def row_of(trees):
    return {key: value.cuda() for key, value in concatenate_trees(trees, pad_token_id=0).items()}


def model_of(name, dtype=torch.float32, window=None, head_dim=HEAD_DIM):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    config.head_dim = head_dim
    config.max_position_embeddings = 4096
    if window is not None:
        config.sliding_window = window
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="prefix_tree").cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return model


class Layer(torch.nn.Module):
    is_causal = True


def attend(
    backend, dtype, heads, head_dim, window, softcap=None, sinks=None, autocast=False, seed=0, heads_first=False
):
    trees = forest(seed, 3, num_branches=25, max_length=300)
    row = row_of(trees)
    length = row["input_ids"].shape[1]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(1, n, length, head_dim, device="cuda", generator=generator)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    if not heads_first:  # in memory; models lay tokens out before heads
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    # under autocast norms and rotary leave query and key in float32 beside a value in bf16
    dtypes = (torch.float32, torch.float32, torch.bfloat16) if autocast else (dtype,) * 3
    q, k, v = (x.to(d).requires_grad_() for x, d in zip((q, k, v), dtypes, strict=True))
    sinks = None if sinks is None else torch.linspace(-1, 3, heads[0], device="cuda", dtype=dtype).requires_grad_()
    context = TreeContext(row["prefix_tree"], attn_backend=backend)
    mask = context.mask(window=window, flex=backend != "sdpa")
    if backend == "flash":
        mask.backend = backend
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        output, _ = prefix_tree_attention(
            Layer(), q, k, v, mask, prefix_tree=context, softcap=softcap, s_aux=sinks, scaling=head_dim**-0.5
        )
    output.backward(grad.transpose(1, 2).to(output.dtype))
    found = [output, q.grad, k.grad, v.grad] + ([] if sinks is None else [sinks.grad])
    return [x.double() for x in found]


def error(got, expected):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True))
