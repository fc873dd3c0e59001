"""FlexAttention under the masks of diffusion models against dense SDPA, forward and backward. Needs a GPU."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_prefix_tree import diffusion_generate
from hf_prefix_tree.diffusion.model import prepare_diffusion_model
from hf_prefix_tree.modeling.attention.interface import diffusion_attention
from hf_prefix_tree.modeling.attention.kernels import attend_dense, attend_flex
from hf_prefix_tree.modeling.attention.masks.spans import LAYOUTS, block_mask, dense_mask, spans
from tests.support.models import CONFIGS, VOCAB, gradients

pytestmark = pytest.mark.gpu
LENGTH = 640


def rows_of(layout, block_size=48):
    attended = torch.arange(LENGTH)[None] < torch.tensor([LENGTH, 400])[:, None]
    starts = torch.tensor([0, 37])
    return spans(attended.cuda(), layout, block_size, window_start=starts.cuda())


def attend(backend, layout, dtype, heads=(4, 2), head_dim=64, sinks=False, autocast=False, block_size=48):
    rows = rows_of(layout, block_size)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, grad = (
        torch.randn(2, n, rows.shape[-1], head_dim, device="cuda", generator=generator)
        for n in (heads[0], heads[1], heads[1], heads[0])
    )
    # under autocast norms and rotary leave query and key in float32 beside a value in bf16
    dtypes = (torch.float32, torch.float32, torch.bfloat16) if autocast else (dtype,) * 3
    q, k, v = (x.to(d).requires_grad_() for x, d in zip((q, k, v), dtypes, strict=True))
    sink = torch.linspace(-1, 3, heads[0], device="cuda", dtype=dtype).requires_grad_() if sinks else None
    mask = block_mask(rows) if backend == "flex" else dense_mask(rows)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        output, _ = diffusion_attention(torch.nn.Identity(), q, k, v, mask, scaling=head_dim**-0.5, s_aux=sink)
    output.backward(grad.transpose(1, 2).to(output.dtype))
    found = [output, q.grad, k.grad, v.grad] + ([sink.grad] if sinks else [])
    return [x.double() for x in found]


def error(got, expected):
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_flex_equals_the_dense_mask(layout, sinks):
    exact = attend("sdpa", layout, torch.float64, sinks=sinks)
    assert error(attend("flex", layout, torch.float32, sinks=sinks), exact) < 2e-5
    dense_bf16 = error(attend("sdpa", layout, torch.bfloat16, sinks=sinks), exact)
    assert error(attend("flex", layout, torch.bfloat16, sinks=sinks), exact) < max(2 * dense_bf16, 1e-2)
    assert error(attend("flex", layout, torch.float32, sinks=sinks, autocast=True), exact) < max(3 * dense_bf16, 2e-2)


def test_another_mask_would_be_seen():
    exact = attend("sdpa", "block_diffusion", torch.float64)
    assert error(attend("flex", "hybrid", torch.float32), exact) > 0.05
    assert error(attend("flex", "block_diffusion", torch.float32, block_size=32), exact) > 0.05


def model_of(name, attn_backend):
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    config.head_dim, config.sliding_window, config.max_position_embeddings = 32, 4096, 4096
    model = AutoModelForCausalLM.from_config(config).cuda()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2.0)
    return prepare_diffusion_model(model, attn_backend=attn_backend)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt_oss"])
def test_models_agree_on_both_backends(name, checkpointed):
    generator = torch.Generator("cuda").manual_seed(1)
    ids = torch.randint(3, VOCAB, (2, 2 * LENGTH), device="cuda", generator=generator)
    positions = torch.arange(LENGTH, device="cuda").repeat(2).expand(2, -1)
    where = torch.randint(0, 400, (50,), device="cuda", generator=generator)
    found = []
    for backend in ("sdpa", "flex"):
        model = model_of(name, backend).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        rows = rows_of("block_diffusion")
        logits = model(ids, position_ids=positions, diffusion_layout=rows, predict_positions=where).logits
        logits.log_softmax(-1)[..., 7].sum().backward()
        found.append({"logits": logits.detach(), **gradients(model)})
    for key, value in found[0].items():
        assert (found[1][key] - value).norm() <= 2e-3 * value.norm() + 1e-6, key


def test_one_graph_serves_all_layouts_and_lengths():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    for length in (256, 384, 640, 1024):
        for layout in LAYOUTS:
            rows = spans(torch.ones(1, length, device="cuda"), layout, 32)
            q, k, v = (
                torch.randn(1, 2, rows.shape[-1], 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for _ in range(3)
            )
            attend_flex(q, k, v, block_mask(rows)).sum().backward()
    assert 1 <= counters["stats"]["unique_graphs"] <= 3, dict(counters["stats"])
    assert not counters["graph_break"] and not counters["recompile_limit"]


def test_memory_is_not_that_of_a_dense_mask():
    length = 16384
    rows = spans(torch.ones(1, length, device="cuda"), "block_diffusion", 32)  # a dense mask: 1 GiB
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    block_mask(rows)
    assert torch.cuda.max_memory_allocated() - before < 64 * 2**20


def test_generation_runs_on_a_gpu():
    model = model_of("qwen3", "auto").eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, VOCAB, (2, 40), device="cuda", generator=torch.Generator("cuda").manual_seed(2))
    for objective in ("mdlm", "block", "hybrid"):
        found = diffusion_generate(model, ids, 40, 16, VOCAB - 1, objective=objective)
        on_cpu = diffusion_generate(copy.deepcopy(model).cpu(), ids.cpu(), 40, 16, VOCAB - 1, objective=objective)
        assert (found.cpu() == on_cpu).float().mean() > 0.9  # ties aside


def test_a_dense_mask_of_few_keys_is_exact():
    """`attend_dense` under a boolean mask is what the others are compared with: once by hand, in float64."""
    rows = rows_of("hybrid")
    mask = dense_mask(rows)
    q, k, v = (torch.randn(2, 2, rows.shape[-1], 16, device="cuda", dtype=torch.float64) for _ in range(3))
    scores = (q @ k.transpose(2, 3) * 0.25).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(attend_dense(q, k, v, mask, scale=0.25), scores.softmax(-1) @ v, rtol=0, atol=1e-12)
