# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The cost of a training step by counting: FLOPs and activation memory, from a model's config and counts of trees.

Counted are decoders of gated MLPs, full attention and the gated delta rule of Qwen3-Next and Qwen3.5: matrix products
and convolutions, forward and backward, nothing recomputed. A layer with a sliding window counts the pairs inside the
window. A mixture of experts counts the experts that a token is sent to.

The gated delta rule is counted in its chunked form (Yang et al., 2024, https://arxiv.org/abs/2412.06464) with chunks
of 64 tokens. With keys of `d_k` and values of `d_v` a token costs each head, forward, three products with the state,
`6 d_k d_v` FLOPs, products of queries by keys, of keys by keys and of the former by values within its chunk,
`2 * 64 (2 d_k + d_v)`, and a triangular system solved for the keys and the values, `64 (d_k + d_v)`. A backward is two
forwards. Kernels do a little more: they invert the system and multiply by the inverse.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# A backward is 2.5 forwards: five matrix products of queries by keys instead of two.
FORWARD_AND_BACKWARD = 3.5
# Model types whose layers of type `linear_attention` are the gated delta rule that is counted here. Their full
# attention has a gate as wide as the queries.
_GATED_DELTA_RULE = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_CHUNK = 64


class _DeltaRule:
    """The sizes of a model's gated delta rule; widths are those of all heads together."""

    def __init__(self, config: Any) -> None:
        self.layers = list(config.layer_types).count("linear_attention")
        self.heads = config.linear_num_value_heads  # those of keys are repeated for them
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.kernel = config.linear_conv_kernel_dim  # width of the convolution
        self.values = self.heads * self.value_dim
        self.convolved = 2 * config.linear_num_key_heads * self.key_dim + self.values  # queries, keys and values

    def products(self, hidden: int) -> float:
        """Multiplications of a token in the mixer of one layer, forward."""
        projections = hidden * (self.convolved + 2 * self.values + 2 * self.heads)  # two gates, and the output
        scan = 3.0 * self.key_dim * self.value_dim + _CHUNK * (2 * self.key_dim + self.value_dim)
        scan += _CHUNK / 2 * (self.key_dim + self.value_dim)
        return projections + self.convolved * self.kernel + self.heads * scan

    def activation_bytes(self) -> int:
        """
        Bytes that the mixer of one layer keeps for a token with the kernels of flash-linear-attention: input of the
        convolution and of its activation, queries, keys and values, output and gate and what their norm makes of
        them, and for each head a line of the inverted system, decays and gates.
        """
        scanned = 2 * self.heads * self.key_dim + self.values
        return 4 * self.convolved + 2 * scanned + 18 * self.values + (2 * _CHUNK + 24) * self.heads


class _Sizes:
    """The sizes of a text model; what its config does not say is guessed."""

    def __init__(self, config: Any) -> None:
        self.heads = getattr(config, "num_attention_heads", None) or 1
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
        if getattr(config, "num_experts_per_tok", None):
            expert = getattr(config, "moe_intermediate_size", None) or mlp
            mlp = config.num_experts_per_tok * expert + (getattr(config, "shared_expert_intermediate_size", None) or 0)
        self.mlp = mlp  # inner width that a token passes through
        self.hidden, self.vocab, self.layers = config.hidden_size, config.vocab_size, config.num_hidden_layers
        self.delta_rule = _DeltaRule(config) if getattr(config, "model_type", None) in _GATED_DELTA_RULE else None
        self.attention_layers = self.layers - (self.delta_rule.layers if self.delta_rule else 0)
        self.queries = self.heads * head_dim  # width of all query heads, and of all key heads:
        self.keys = (getattr(config, "num_key_value_heads", None) or self.heads) * head_dim


def attention_flops(pairs: int, heads: int, head_dim: int, factor: float = FORWARD_AND_BACKWARD) -> float:
    """Useful FLOPs of one layer's attention: visible pairs only, 4 FLOPs per pair and dimension forward."""
    return factor * 4 * head_dim * heads * pairs


def activation_bytes(config: PretrainedConfig, tokens: int, checkpointing: bool) -> int:
    """
    Bytes that a bfloat16 model keeps between forward and backward, for packed sequences of so many tokens.

    Per token and layer: 8 bytes for each norm's input in float32, its normalised value and its output, over the hidden
    states (twice), the queries and the keys; 2 for values and attention output, 8 for a gated MLP. This is Qwen3's
    layer in eager mode; models without norms on queries and keys keep less. Layers of Qwen3-Next and Qwen3.5, whose
    norms keep 10 bytes and whose attention has a gate, are counted as theirs, the delta rule by its fast kernels. Not
    counted: weights, gradients, optimizer, and the head, which TRL computes in chunks.

    Args:
        config (`PretrainedConfig`):
            The model's.
        tokens (`int`):
            Tokens of a micro-batch.
        checkpointing (`bool`):
            Whether layers are recomputed: kept are then each layer's input, and one layer's activations at a time.

    Raises:
        `ValueError`: If the config lacks a size, or has layers that are not counted.
    """
    sizes = counted_sizes(config)
    rule = sizes.delta_rule
    layer = (20 if rule else 16) * sizes.hidden + 8 * sizes.mlp
    attention = 16 * sizes.queries + 12 * sizes.keys if rule else 10 * sizes.queries + 10 * sizes.keys
    recurrent = rule.activation_bytes() if rule else 0
    largest = layer + max(attention if sizes.attention_layers else 0, recurrent)
    all_layers = sizes.layers * layer + sizes.attention_layers * attention
    all_layers += (sizes.layers - sizes.attention_layers) * recurrent
    return (sizes.layers * 2 * sizes.hidden + largest if checkpointing else all_layers) * tokens


def cost_per_count(config: PretrainedConfig) -> npt.NDArray[np.float64]:
    """
    FLOPs, forward and backward, of one token, one supervised token and one visible pair. For any model: layers without
    attention that [`activation_bytes`] refuses count as if they had it, and what a config doesn't say is guessed, so
    only compare dataset rows of one model by it.

    Args:
        config (`PretrainedConfig`):
            The model's.

    Returns:
        float64 `[3]`.

    Example:

    ```python
    >>> from transformers import Qwen3Config
    >>> cost_per_count(Qwen3Config(hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=1,
    ...     num_key_value_heads=1, head_dim=8, vocab_size=32))
    array([7680., 1536.,  224.])

    ```
    """
    sizes = _Sizes(config.get_text_config())
    rule = sizes.delta_rule
    attention = sizes.hidden * ((3 if rule else 2) * sizes.queries + 2 * sizes.keys)
    token = float(sizes.attention_layers * attention + sizes.layers * 3 * sizes.hidden * sizes.mlp)
    if rule is not None:
        token += rule.layers * rule.products(sizes.hidden)
    pair = attention_flops(1, sizes.heads, sizes.queries // sizes.heads)
    return np.array([6.0 * token, 6.0 * sizes.hidden * sizes.vocab, sizes.attention_layers * pair])


class ModelCosts(NamedTuple):
    """
    What a model costs, by counting.

    Args:
        parameters (`int`): Its parameters.
        flops (`np.ndarray` of shape `[3]`, float64): See [`cost_per_count`].
        activation_bytes (`float`), checkpointed_bytes (`float`): Of a token, see [`activation_bytes`].
        attention_layers (`int`): Its layers with attention.
    """

    parameters: int
    flops: npt.NDArray[np.float64]
    activation_bytes: float
    checkpointed_bytes: float
    attention_layers: int


def model_costs(config: PretrainedConfig) -> ModelCosts:
    """
    The costs of any causal LM. A config that [`activation_bytes`] refuses is counted on its modules, without weights:
    6 FLOPs for each parameter that a token meets, all heads of every attention layer for a pair. Their activations are
    an approximation: 4 bytes per output of a matrix product, 12 per layer and hidden unit.

    Args:
        config (`PretrainedConfig`):
            The model's. Of a multimodal one, its text model is counted.

    Raises:
        `ValueError`: If Transformers has no causal LM for the config, or does not say how many experts a token meets.
    """
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    config = config.get_text_config()
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (ValueError, TypeError, AttributeError, KeyError, ZeroDivisionError, RuntimeError) as error:
        raise ValueError(f"`model` is a {config.model_type}, whose model can't be built: {error}") from error
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if not _uncounted(config):
        kept, checkpointed = (float(activation_bytes(config, 1, checkpointing=x)) for x in (False, True))
        return ModelCosts(parameters, cost_per_count(config), kept, checkpointed, _Sizes(config).attention_layers)
    hidden, head = config.hidden_size, model.get_output_embeddings()
    token, outputs, heads = 0.0, 0.0, 0
    for module in model.modules():
        heads += hasattr(module, "is_causal")  # the attention layers: they go through Transformers' interface
        if isinstance(module, nn.Embedding) or module is head:
            continue
        for name, weight in module.named_parameters(recurse=False):
            met = 1.0
            if weight.ndim == 3 and not isinstance(module, nn.Conv1d):
                if not (experts := getattr(config, "num_experts_per_tok", None)):
                    raise ValueError(f"`model` is a {config.model_type}, whose config lacks num_experts_per_tok.")
                met = experts / len(weight)
                outputs += met * weight.numel() / hidden
            elif weight.ndim == 2 and name == "weight":
                outputs += getattr(module, "out_features", len(weight))
            token += met * weight.numel() * (weight.ndim > 1)
    sizes = _Sizes(config)
    rope, plain, value = (getattr(config, f"{name}_head_dim", None) or 0 for name in ("qk_rope", "qk_nope", "v"))
    width = (rope + plain + value) / 2 or sizes.queries / sizes.heads
    if rope:  # latent attention writes queries and keys anew, in float32 for the rotation
        outputs += 6 * heads * sizes.heads * (rope + plain)
    flops = np.array([6 * token, 6 * hidden * sizes.vocab, heads * attention_flops(1, sizes.heads, 1) * width])
    kept = 4 * outputs + 12 * sizes.layers * hidden
    return ModelCosts(parameters, flops, kept, 2 * sizes.layers * hidden + kept / sizes.layers, heads)


def choose_overflow(
    trees: Iterable[PrefixTree],
    config: PretrainedConfig,
    max_tokens: int,
    checkpointing: bool,
    offloading: bool = False,
) -> tuple[str, int, str]:
    """
    Whether trees are best trained whole, split or streamed, by counting.

    What a packed sequence of `max_tokens` tokens keeps for the backward counts as the memory that there is. Streaming
    keeps the activations of the longest path and of a pass, and the path's keys and values in bfloat16 with their
    gradients in float32; under offloading those of two layers, as the rest waits on the host. Trees are streamed where
    splitting them is impossible, or costs 55% more FLOPs and streaming fits.

    Args:
        trees (iterable of [`PrefixTree`]): Those with more than `max_tokens` tokens.
        config (`PretrainedConfig`): The model's.
        max_tokens (`int`): Tokens of the largest packed sequence that fits.
        checkpointing (`bool`): Whether layers are recomputed.
        offloading (`bool`, *optional*, defaults to `False`): Whether activations wait on the host.

    Returns:
        `tuple`: `"whole"`, `"split"` or `"stream"`; the tokens of a packed sequence or pass; the numbers, as a text.

    Example:

    ```python
    >>> from transformers import Qwen3Config
    >>> choose_overflow([], Qwen3Config(num_hidden_layers=1, hidden_size=64), max_tokens=8192, checkpointing=True)
    ('whole', 8192, 'no tree has more than 8,192 tokens')

    ```
    """
    longest, streamed, divided = 0, np.zeros(3), np.zeros(3)
    for tree in trees:
        stats = tree.stats()
        longest = max(longest, stats.longest_path)
        streamed += (stats.tree_tokens, stats.supervised_tokens, stats.tree_pairs)
        for part in split_tree(tree, max_tokens) if stats.longest_path <= max_tokens else []:
            stats = part.stats()
            divided += (stats.tree_tokens, stats.supervised_tokens, stats.tree_pairs)
    if not longest:
        return "whole", max_tokens, f"no tree has more than {max_tokens:,} tokens"
    sizes, costs = _Sizes(config.get_text_config()), model_costs(config)
    per_token = costs.checkpointed_bytes if checkpointing else costs.activation_bytes
    waiting = 2.0 * sizes.layers * sizes.hidden if checkpointing else costs.activation_bytes
    waiting += 12 * sizes.keys * costs.attention_layers  # both in bfloat16, the gradients of both in float32
    waiting *= min(2, sizes.layers) / sizes.layers if offloading else 1
    room = max_tokens * per_token - longest * waiting
    passes = int(min(room / per_token, _LARGEST_PASS)) // 128 * 128
    ratio = float(costs.flops @ divided / (costs.flops @ streamed)) if longest <= max_tokens else math.inf
    numbers = (
        f"the longest path has {longest:,} tokens of {max_tokens:,}; splitting computes {divided[0]:,.0f} tokens for "
        f"{streamed[0]:,.0f}, {ratio:.2f}x the FLOPs; streaming keeps {longest * waiting / 2**30:.1f} GiB beside a "
        f"pass, a packed sequence {max_tokens * per_token / 2**30:.1f} GiB"
    )
    smallest = min(_SMALLEST_PASS[ratio < math.inf], max_tokens // 128 * 128 or max_tokens)
    if ratio <= _WORTH_STREAMING or (passes < smallest and ratio < math.inf):
        return "split", max_tokens, numbers
    if passes < smallest and not offloading:
        numbers += "; it may not fit: set `activation_offloading=True`"
    return "stream", max(passes, smallest), numbers


_LARGEST_PASS = 8192  # tokens
_SMALLEST_PASS = {True: 4096, False: 1024}  # where splitting is possible, and where it is not
# On an H200, with checkpointing and passes of 6k to 8k tokens, streaming took 1.05 and 1.43 times as long as its FLOPs
# suggest, with offloading 1.08 and 1.55 times (two trees, benchmarks/results/streaming_h200.csv).
_WORTH_STREAMING = 1.55


def _uncounted(config: Any) -> str:
    """Why the FLOPs of a text model's config are not counted by its sizes; empty if they are."""
    uncounted = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if config.model_type in _GATED_DELTA_RULE:
        uncounted -= {"linear_attention"}
    if uncounted or getattr(config, "kv_lora_rank", None):
        reason = f"layers of type {', '.join(sorted(uncounted))}" if uncounted else "latent attention"
        return f"with {reason}, whose FLOPs are not counted"
    has_experts = all(getattr(config, name, None) for name in ("num_experts_per_tok", "moe_intermediate_size"))
    inner = "moe_intermediate_size" if has_experts else "intermediate_size"
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", inner, "vocab_size")
    missing = [name for name in names if getattr(config, name, None) is None]
    return f"whose config lacks {', '.join(missing)}" if missing else ""


def counted_sizes(config: PretrainedConfig) -> _Sizes:
    """The sizes of a model whose FLOPs are counted by them; raises `ValueError` for others."""
    config = config.get_text_config()
    if reason := _uncounted(config):
        raise ValueError(f"`model` is a {config.model_type} {reason}.")
    return _Sizes(config)
