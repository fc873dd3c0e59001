# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The operator around `flash-attn-4`, whose kernels are stood in for: gradients, and one graph when compiled."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from benchmarks import packed


def probabilities(query, key, starts, scale):
    branch = torch.bucketize(torch.arange(len(query)), starts[1:], right=True)
    visible = torch.ones(len(query), len(key), dtype=torch.bool).tril() & (branch[:, None] == branch[None])
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    return scores.masked_fill(~visible, -torch.inf).softmax(-1)


def forward(query, key, value, *, cu_seqlens_q, softmax_scale, causal, return_lse, **kwargs):
    assert causal and return_lse
    chosen = probabilities(query, key, cu_seqlens_q, softmax_scale)
    return torch.einsum("hqk,khd->qhd", chosen, value), torch.zeros(query.shape[1], len(query)), None


def backward(query, key, value, output, grad, lse, scale, causal, *, cu_seqlens_q, **kwargs):
    chosen = probabilities(query, key, cu_seqlens_q, scale)
    of_chosen = torch.einsum("qhd,khd->hqk", grad, value)
    of_scores = chosen * (of_chosen - (of_chosen * chosen).sum(-1, keepdim=True)) * scale
    grads = (torch.einsum("hqk,khd->qhd", of_scores, key), torch.einsum("hqk,qhd->khd", of_scores, query))
    return *grads, torch.einsum("hqk,qhd->khd", chosen, grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_fa4(monkeypatch, compiled):
    module = types.ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", types.ModuleType("flash_attn.cute"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    torch.manual_seed(0)
    lengths = [5, 3]
    starts = torch.tensor([0, 5, 8], dtype=torch.int32)
    leaves = [torch.randn(8, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    grad = torch.randn(8, 2, 4, dtype=torch.float64)

    def attend(query, key, value):
        return packed.varlen_causal("fa4", query, key, value, starts, starts, 5, 5)

    run = torch.compile(attend, backend="aot_eager", fullgraph=True) if compiled else attend
    output = run(*leaves)
    got = [output, *torch.autograd.grad(output, leaves, grad)]
    branches = zip(*(x.split(lengths) for x in leaves), strict=True)
    expected = torch.cat(
        [packed.causal(*(x.transpose(0, 1)[None] for x in branch))[0].transpose(0, 1) for branch in branches]
    )
    wanted = [expected, *torch.autograd.grad(expected, leaves, grad)]
    for x, y in zip(got, wanted, strict=True):
        assert torch.allclose(x, y, atol=1e-12)
