# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Which kernel runs the attention of a call: [`choose_backend`].

| backend | what runs |
|---|---|
| `"sdpa"` | PyTorch's SDPA with a dense mask: anywhere, O(N^2) memory |
| `"flex"` | FlexAttention's Triton kernels with a block mask |
| `"flash"` | the kernels of `flash-attn-4` with the same block mask: faster on Hopper, younger |

Reading the config, the device and the installed versions costs nothing. Two checks wait for the device, once: whether
FLASH agrees with Triton on the shapes at hand, and how sparse the masks of a range of lengths are.
"""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from hf_prefix_tree.modeling.attention.flash import FLASH_KINDS, attend_flash
from hf_prefix_tree.modeling.attention.kernels import LONG, attend_flex
from hf_prefix_tree.modeling.attention.masks.causal import TreeBlockMask
from hf_prefix_tree.modeling.batch import BLOCK_SIZE

logger = logging.getLogger(__name__)
_log_once = functools.cache(logger.log)

ATTN_BACKENDS = ("auto", "flex", "flash", "sdpa")

# The one build whose private functions are called. Earlier ones gave wrong gradients for heads of 64 and, in one of
# some hundred launches, garbage for all.
_FLASH_BUILD = Version("4.0.0b36")
FLASH_HEAD_SIZES = (64, 128)
FLASH_DTYPES = (torch.bfloat16, torch.float16)
# On an H100 twice as fast as Triton at 40 blocks, 1.9 times at 64; fewer were not measured.
_LEAST_FLASH_BLOCKS = 40
_MOST_PARTIAL = 0.5  # share of the visible blocks above which FLASH is not taken
_TOLERANCE = 2e-2  # norm of the difference of two bf16 kernels over the norm; typically 5e-3
_CHECKED_TOKENS = 2**17  # times key-value heads: bounds the memory of the comparison


class AttentionCall(NamedTuple):
    """The facts that the choice of a backend depends on."""

    device: torch.device
    dtype: torch.dtype
    length: int  # tokens of a packed sequence
    heads: int
    kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    softcap: bool = False
    sinks: bool = False
    mask_kind: str = "causal"

    @classmethod
    def of(cls, config: Any, device: torch.device, dtype: torch.dtype, length: int, **kwargs: Any) -> AttentionCall:
        """
        The call of a model's layers.

        Args:
            config (`PretrainedConfig`): The config of the language model.
            device (`torch.device`): Where it runs.
            dtype (`torch.dtype`): The dtype that attention runs in.
            length (`int`): Tokens of a packed sequence.
            kwargs: `sinks` and `mask_kind`.
        """
        heads, kv_heads = (getattr(config, f"num_{kind}_heads", None) for kind in ("attention", "key_value"))
        if not (isinstance(heads, int) and isinstance(kv_heads, int | None)):
            heads = kv_heads = 1  # where layers differ, the head sizes decide alone
        sizes = (_head_dim(config), getattr(config, "v_head_dim", None) or _head_dim(config))
        softcap = bool(getattr(config, "attn_logit_softcapping", None))
        return cls(device, dtype, length, heads, kv_heads or heads, *sizes, softcap=softcap, **kwargs)


def _head_dim(config: Any) -> int:
    if getattr(config, "is_heterogeneous", False):  # the smallest of the layers
        return min(_head_dim(layer) for layer in config.per_layer_config)
    if getattr(config, "qk_nope_head_dim", None):  # multi-head latent attention
        return config.qk_nope_head_dim + config.qk_rope_head_dim
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def choose_backend(
    requested: str, call: AttentionCall, mask: Callable[[], TreeBlockMask], no_flex: str | None = None
) -> str:
    """
    The backend of a call, logged with the reason whenever either is new.

    `"auto"` takes FLASH where it is installed in a version that is known to be right, on a Hopper GPU, in half
    precision, for heads of 64 or 128 without softcap and sinks, under the plain tree mask, on packed sequences of at
    least 40 blocks that are mostly full, and agrees with Triton, forward and backward, at these head sizes;
    FlexAttention's Triton kernels elsewhere on a GPU; SDPA where FlexAttention cannot train. The first packed sequence
    of a length between two powers of two decides for all of these lengths, so that the device is waited for once.

    Args:
        requested (`str`): `"auto"`, or the backend to use.
        call ([`AttentionCall`]): The shapes.
        mask (`Callable[[], TreeBlockMask]`): Builds the block mask of the call.
        no_flex (`str`, *optional*): Why the architecture cannot use a block mask, if so.

    Returns:
        `str`: `"flash"`, `"flex"` or `"sdpa"`.

    Raises:
        `ValueError`: where the requested backend cannot serve the call.
    """
    if requested == "sdpa":
        return _log(requested, call, "sdpa", "it was asked for")
    no_flex = no_flex or why_not_flex(call.device, call.dtype, min(call.head_dim, call.value_dim), call.length)
    if requested == "auto" and call.length == BLOCK_SIZE:
        no_flex = no_flex or "a single block needs another graph, and a dense mask of it is small"
    if no_flex is not None:
        return _log(requested, call, "sdpa", no_flex)
    if requested == "flex":
        return _log(requested, call, "flex", "it was asked for")
    no_flash = _why_not_flash(call)
    if requested == "auto":
        no_flash = no_flash or _too_sparse(call, mask)
    if no_flash := no_flash or _agrees_with_triton(call, mask):
        return _log(requested, call, "flex", f"no FLASH: {no_flash}")
    return _log(requested, call, "flash", f"flash-attn-4 {_flash_version()} agrees with Triton at these head sizes")


def _log(requested: str, call: AttentionCall, backend: str, reason: str) -> str:
    if requested not in ("auto", backend):
        raise ValueError(
            f"`attn_backend={requested!r}` cannot serve this call: {reason}. Use `attn_backend='auto'`, which would "
            f"take {backend!r}."
        )
    level, gib = logging.INFO, call.length**2 / 2**30
    if backend == "sdpa" and call.length > LONG:
        level, reason = logging.WARNING, f"{reason}; the dense mask of {call.length} tokens takes {gib:.1f} GiB"
        if gib > 3 and call.device.type == "cpu":
            raise ValueError(f"{reason}: lower `max_packed_tokens`, or use a GPU, where FlexAttention needs none.")
    _log_once(level, f"Tree attention on {call.device.type}: {backend}, as {reason}.")
    return backend


def why_not_flex(device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> str | None:
    """`None` where FlexAttention can train these shapes, otherwise the reason why not."""
    if device.type != "cuda":
        return f"FlexAttention has no backward on {device.type}"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"FlexAttention does not take {dtype}"
    if head_dim < 16:
        return f"FlexAttention needs a head size of at least 16, got {head_dim}"
    if length % BLOCK_SIZE != 0:
        return f"packed sequences of {length} tokens are no multiple of {BLOCK_SIZE}"
    return None


def takes_flex(requested: str, device: torch.device, dtype: torch.dtype, head_dim: int, length: int) -> bool:
    """Whether FlexAttention runs a call that has no other choice than a dense mask; raises where it was asked for."""
    reason = why_not_flex(device, dtype, head_dim, length)
    if requested == "flex" and reason is not None:
        raise ValueError(f"`attn_backend='flex'` cannot serve this call: {reason}. Use `attn_backend='auto'`.")
    return requested != "sdpa" and reason is None


def _why_not_flash(call: AttentionCall) -> str | None:
    """The reason against FLASH that is known before any number is computed, if there is one."""
    version = _flash_version()
    if version is None:
        return "`flash-attn-4` is not installed"
    if version != _FLASH_BUILD:
        return f"`flash-attn-4` {version} is not {_FLASH_BUILD}, whose private functions it calls"
    major, minor = torch.cuda.get_device_capability(call.device)
    if major != 9:
        return f"it is tested on compute capability 9 (Hopper) only, this is {major}.{minor}"
    if call.dtype not in FLASH_DTYPES:
        return f"it does not take {call.dtype}"
    if call.head_dim != call.value_dim or call.head_dim not in FLASH_HEAD_SIZES:
        return f"head sizes {call.head_dim} and {call.value_dim} are not among those it is right for (64, 128)"
    if call.sinks:
        return "attention sinks need gradients through the log-sum-exp, which it does not have"
    if call.mask_kind not in FLASH_KINDS:
        return f"it has no {call.mask_kind} mask"
    if call.softcap:
        return "its gradients under a softcap are not tested"
    if call.length > 4096 * BLOCK_SIZE:
        return f"it takes blocks of {BLOCK_SIZE} only, and sequences above {4096 * BLOCK_SIZE} tokens have larger ones"
    if torch.are_deterministic_algorithms_enabled():
        return "its backward is not deterministic, as `torch.use_deterministic_algorithms(True)` asks for"
    return None


@functools.cache
def _flash_version() -> Version | None:
    try:
        return Version(importlib.metadata.version("flash-attn-4"))
    except importlib.metadata.PackageNotFoundError:
        return None


_sparse: dict[tuple, str | None] = {}  # reasons by device, kind of mask and power of two of the length
# Reasons by device, dtype, kind of mask, long or short sequences, and head sizes.
_checked: dict[tuple, str | None] = {}


def _too_sparse(call: AttentionCall, mask: Callable[[], TreeBlockMask]) -> str | None:
    if call.mask_kind not in ("causal", "path"):
        return f"its speed under a {call.mask_kind} was not measured"
    blocks = call.length // BLOCK_SIZE
    if blocks < _LEAST_FLASH_BLOCKS:
        return f"sequences of fewer than {_LEAST_FLASH_BLOCKS} blocks are not known to gain"
    key = (call.device, call.mask_kind, blocks.bit_length())
    if key not in _sparse:
        block_mask = mask()
        assert block_mask.full_kv_num_blocks is not None
        partial, full = (count.sum().item() for count in (block_mask.kv_num_blocks, block_mask.full_kv_num_blocks))
        share = partial / (partial + full)
        _sparse[key] = None if share <= _MOST_PARTIAL else f"{share:.0%} of the visible blocks are partial"
    return _sparse[key]


def _agrees_with_triton(call: AttentionCall, mask: Callable[[], TreeBlockMask]) -> str | None:
    """`None` where it does; looked at once for each key of [`_checked`]."""
    sizes = (call.heads // call.kv_heads, call.head_dim, call.value_dim)
    is_long = call.length >= _LEAST_FLASH_BLOCKS * BLOCK_SIZE  # shorter ones may have no full block to look at
    key = (call.device, call.dtype, call.mask_kind, is_long, *sizes)
    if key not in _checked:
        if torch.is_inference_mode_enabled():
            return "it was not compared with Triton yet, and cannot be in inference mode"
        _checked[key] = reason = _difference_to_triton(call, mask())
        if reason is not None:
            warnings.warn(f"The kernels of `flash-attn-4` are not used: {reason}.", stacklevel=2)
    return _checked[key]


def _difference_to_triton(call: AttentionCall, mask: TreeBlockMask) -> str | None:
    """Compares output and gradients of both kernels on random numbers under the mask; `None` where they agree."""
    batch_size = mask.kv_num_blocks.shape[0]
    kv_heads = max(1, min(call.kv_heads, _CHECKED_TOKENS // (batch_size * mask.subtree_end.shape[1])))
    heads = kv_heads * (call.heads // call.kv_heads)
    generator = torch.Generator(call.device).manual_seed(0)  # leaves the training's random state alone

    def random(heads: int, size: int, length: int) -> Tensor:
        shape = (batch_size, length, heads, size)  # as in a model: tokens before heads
        return torch.randn(shape, device=call.device, dtype=call.dtype, generator=generator).transpose(1, 2)

    keys = mask.subtree_end.shape[1]  # more than queries over a path
    sizes = ((heads, call.head_dim, call.length), (kv_heads, call.head_dim, keys), (kv_heads, call.value_dim, keys))
    leaves = [random(*size).requires_grad_() for size in sizes]
    grad = random(heads, call.value_dim, call.length)

    def run(attend: Callable) -> list[Tensor]:
        output = attend(*leaves, mask)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad)]

    kept = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)  # not by offloading or checkpointing
    with torch.enable_grad(), torch.autocast(call.device.type, enabled=False), kept:
        try:
            actual = [run(attend_flash) for _ in range(2)][1]  # as in layers after the first under a mask
            if call.device.type == "cuda":
                torch.cuda.synchronize(call.device)  # what the kernels fail with is told here
        except (torch.cuda.OutOfMemoryError, torch.AcceleratorError):
            raise  # the first says nothing about the kernel, after the second none runs
        except Exception as error:  # whatever a young kernel fails with, the reason is passed on
            if "out of memory" in str(error):  # of others than PyTorch
                raise
            return f"it failed with {type(error).__name__}: {(str(error) or 'no message').splitlines()[0]}"
        expected = run(attend_flex)
    errors = [((x - y).float().norm() / y.float().norm()).item() for x, y in zip(actual, expected, strict=True)]
    names = ("output", "query gradient", "key gradient", "value gradient")
    wrong = [f"{name} {error:.1e}" for name, error in zip(names, errors, strict=True) if not error < _TOLERANCE]
    return f"it differs from Triton by {', '.join(wrong)} (relative)" if wrong else None
