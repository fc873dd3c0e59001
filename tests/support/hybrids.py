"""Tiny hybrid models of every family that follows a tree, and the comparison with independent branches."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from conformance.configs import tiny_config
from hf_prefix_tree import prepare_model
from hf_prefix_tree.modeling.batch import concatenate_trees
from tests.support.models import branch_runs, gradients, relative_error

# One architecture for each kind of mixer.
KINDS = {"delta": "qwen3_5_text", "kda": "kimi_linear", "convolution": "lfm2", "mamba2": "bamba"}
FAMILIES = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid", "lara_mini"),
    *("lfm2", "lfm2_moe", "lfm3", "bamba", "nemotron_h", "granitemoehybrid", "falcon_h1", "zamba2"),
    *("kimi_linear", "bailing_hybrid"),
)
_NO_KEYWORDS = "in this Transformers it does not hand `causal_conv1d_fn` the keyword arguments"
REFUSED_BEFORE_5_24 = {"lfm2": _NO_KEYWORDS, "lfm2_moe": _NO_KEYWORDS, "qwen4_exp_text": "`qwen_sparse_attention`"}
FAMILIES = [name for name in FAMILIES if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES]


def make_hybrid(model_type, dtype=torch.float64, seed=0, config=None):
    """A tiny model with amplified weights; vectors (decays and step sizes among them) are moved at random."""
    torch.manual_seed(seed)
    config = copy.deepcopy(config or tiny_config(model_type))
    config._experts_implementation = "eager"  # grouped matmuls reject float64 on CPU
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)  # also parameters that some models keep in float32


def served_here(model_type):
    """Skips architectures that lack what they are served by before Transformers 5.24, once they are refused."""
    if model_type in REFUSED_BEFORE_5_24 and Version(transformers.__version__) < Version("5.24"):
        with pytest.raises(ValueError, match=REFUSED_BEFORE_5_24[model_type]) as refusal:
            prepare_model(make_hybrid(model_type))
        pytest.skip(f"needs Transformers 5.24: {refusal.value}")


def errors(model, trees, pad_to=128):
    """Errors of loss, logits and all gradients of one row against independent runs of its branches; the last two
    relative."""
    row = concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=pad_to)
    model.zero_grad()
    loss, logits = branch_runs(model, trees)
    loss.backward()
    expected = gradients(model)
    model.zero_grad()
    tree_loss = model(**row).loss
    tree_loss.backward()
    with torch.no_grad():
        tree_logits = model(**{key: value for key, value in row.items() if key != "labels"}).logits[0]
    logits_error, start, branches = 0.0, 0, iter(logits)
    for tree in trees:
        for path in tree.paths():
            alone = next(branches)
            difference = (tree_logits[torch.from_numpy(path) + start] - alone).abs().max() / alone.abs().max()
            logits_error = max(logits_error, difference.item())
        start += len(tree)
    return abs((tree_loss - loss).item()), logits_error, relative_error(gradients(model), expected)
