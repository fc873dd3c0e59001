"""Tiny models with amplified weights, random forests, and independent runs of their branches."""

import copy

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hf_prefix_tree.tree.prefix_tree import Branch, fold

VOCAB = 97
WINDOW = 6  # tokens; shorter than the paths of the forests

_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "llama": LlamaConfig(**_SMALL),
    "qwen3": Qwen3Config(**_SMALL),
    "qwen3_moe": Qwen3MoeConfig(**_SMALL, **{k: v for k, v in _MOE.items() if k != "num_local_experts"}),
    "mistral": MistralConfig(**_SMALL, sliding_window=WINDOW),
    "gemma2": Gemma2Config(
        **_SMALL,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=5.0,  # reached by these weights
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gemma3": Gemma3TextConfig(
        **{**_SMALL, "num_hidden_layers": 3},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gpt_oss": GptOssConfig(
        **{k: v for k, v in {**_SMALL, **_MOE}.items() if k not in ("num_experts", "moe_intermediate_size")},
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


def make_model(
    name, dtype=torch.float64, seed=0, amplify=3.0, attn_implementation: str | None = "prefix_tree", **kwargs
):
    """A tiny model; its weights are amplified, because errors hide behind small ones."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name])
    config._experts_implementation = "eager"  # grouped matmuls reject float64 on CPU
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation, **kwargs)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                parameter.normal_(0, 2)
            elif parameter.dim() > 1:
                parameter.mul_(amplify)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def random_branches(rng, num_branches=6, max_length=24, fractional=True):
    """Branches that fork, end inside one another and repeat; weights 0, 1 or in between."""
    paths = [rng.integers(3, VOCAB, size=max_length)]
    while len(paths) < num_branches:
        parent = paths[rng.integers(len(paths))]
        kind = rng.integers(5)
        if kind == 0:
            paths.append(parent.copy())  # duplicate
        elif kind == 1 and len(parent) > 2:
            paths.append(parent[: rng.integers(2, len(parent))])  # strict prefix
        else:
            keep = rng.integers(1, len(parent) + 1)
            paths.append(np.concatenate([parent[:keep], rng.integers(3, VOCAB, size=rng.integers(1, 8))]))
    branches = []
    for path in paths:
        weights = rng.integers(0, 2, size=len(path)).astype(float)
        if fractional:
            weights *= rng.uniform(0.25, 2, size=len(path))
        branches.append(Branch(path, weights))
    return branches


def random_forest(seed, num_trees=2, weighting="tree", **kwargs):
    rng = np.random.default_rng(seed)
    return [fold(random_branches(rng, **kwargs), weighting=weighting) for _ in range(num_trees)]


def branch_runs(model, trees):
    """The reference: every branch by itself, no tree code. Returns loss (weighted as `trees` are) and logits by "
    "branch."""
    total, divisor, logits = 0.0, 0.0, []
    for tree in trees:
        branches = tree.branches()
        for branch in branches:
            ids = torch.tensor(branch.input_ids, device=model.device)[None]
            out = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
            logits.append(out)
            weight = torch.tensor(branch.weights, device=model.device)
            if tree.weighting == "tree":
                weight = weight / len(branches)
            nll = torch.nn.functional.cross_entropy(out[:-1], ids[0, 1:], reduction="none")
            total = total + (nll.double() * weight[1:]).sum()
            divisor = divisor + weight[1:].sum()
    return total / divisor, logits


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative_error(got, expected):
    """Largest difference over all entries, relative to the largest entry of each tensor."""
    assert got.keys() == expected.keys()
    return max(
        ((got[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-30)).item()
        for name in expected
    )


def kept_bytes(model, **batch):
    """Bytes that the backbone of a causal LM keeps for the backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(**batch)
    return sum(size for size, _ in kept.values())
