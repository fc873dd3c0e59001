"""The kernels of `flash-attn-4` for our masks compile for Hopper. Needs the package, but no GPU."""

import os
import subprocess
import sys

import pytest

from hf_prefix_tree.modeling.attention import backend

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        backend._flash_version() != backend._FLASH_BUILD, reason=f"needs flash-attn-4 {backend._FLASH_BUILD}"
    ),
]

# In a process of its own: what to compile for is read once.
SCRIPT = """
import sys
from contextlib import nullcontext
import torch
import torch._subclasses.fake_tensor as fake_tensor

import hf_prefix_tree.modeling.attention.flash as flash

fake_tensor.init_gpu_context = lambda device: None  # there may be none
torch.accelerator.device_index = lambda index: nullcontext()


def select(x, index):  # which a build of PyTorch without CUDA lets fake tensors do
    return x.select(0, index[0]).unsqueeze(0) if isinstance(index, tuple) else x.select(0, index)


torch.Tensor.__getitem__, torch.Tensor.__iter__ = select, lambda x: iter(x.unbind(0))
torch.Tensor.data_ptr = lambda x: 0
kind, rows, heads, kv_heads, head_dim = sys.argv[1], *map(int, sys.argv[2:])
tree = [torch.zeros(rows, 512, dtype=torch.int32) for _ in range({"causal": 1, "path": 2}.get(kind, 3))]
with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
    make = lambda *shape, dtype=torch.bfloat16: torch.empty(rows, *shape, dtype=dtype, device="cuda")
    query, key, value, grad = (make(512, n, head_dim).transpose(1, 2) for n in (heads, kv_heads, kv_heads, heads))
    lists = [make(1, 4, *shape, dtype=torch.int32) for _ in range(4) for shape in ((), (4,))]
    shape = heads // kv_heads, kv_heads
    forward, backward = (flash._prepare(shape, tree, own, kind) for own in (lists[:4], lists[4:]))
    output, lse = flash._forward(query, key, value, forward, 0.1)
    grads = flash._backward(grad, query, key, value, output, lse, masks=backward, scale=0.1)
for own, like in zip((output, grads[0]), (query, query), strict=True):
    assert own.shape == like.shape and own.stride() == like.stride()
for own, like in zip(grads[1:], (key, value), strict=True):
    assert own.shape == (rows, heads // kv_heads, *like.transpose(1, 2).shape[1:]) and own.is_contiguous()
print("compiled")
"""


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("causal", (1, 16, 8, 128)),
        ("window", (1, 4, 4, 64)),
        ("chunk", (2, 6, 2, 64)),
        ("causal", (2, 8, 1, 128)),
        ("path", (1, 4, 2, 128)),
    ],
)
def test_kernels_compile(kind, sizes):
    target = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, kind, *map(str, sizes)],
        env={**os.environ, **target, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.split()[-1] == "compiled", done.stderr[-3000:]
