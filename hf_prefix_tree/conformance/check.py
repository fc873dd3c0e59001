# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One architecture: build it tiny, run the forest as a tree and branch by branch, compare.

The branches run through a copy of the model that was never prepared, under its default attention. Logits of every
token of every branch and the gradient of every parameter are compared, in float64 kept through Transformers' casts,
in float32 where the architecture does not run in float64. Checkpointed gradients are compared with uncheckpointed ones
of the prepared model in float32, both kinds of checkpointing. Some seconds per architecture on one core.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_prefix_tree.attention.defaults import default_implementation
from hf_prefix_tree.batch import concatenate_trees
from hf_prefix_tree.conformance.configs import tiny_config
from hf_prefix_tree.conformance.forest import conformance_forest
from hf_prefix_tree.conformance.overrides import NOT_RUNNABLE
from hf_prefix_tree.double import keep_double
from hf_prefix_tree.model import prepare_model
from hf_prefix_tree.tree import PrefixTree

TOLERANCE = {"float64": 1e-9, "float32": 2e-3}
CHECKPOINT_TOLERANCE = 1e-5
CONTROL = 1e-3  # a causal mask over the row must be at least this wrong, or the comparison proves nothing
AMPLIFY = 3.0
PAD_TO = 8
EXACT, REFUSED, FAILED, NOT_BUILT = "exact", "refused", "failed", "not built"


@dataclass
class Result:
    """
    What one architecture gave.

    Args:
        model_type (`str`): Its key in Transformers' mapping.
        architecture (`str`): The class of the causal LM.
        status (`str`): `"exact"`, `"refused"`, `"failed"` or `"not built"`.
        reason (`str`): Why, where it is not exact.
        layers (`str`): The kinds of layers of the tiny model.
        compared (`str`): The dtype in which logits and gradients were compared.
        error (`float`, *optional*): Largest relative error of logits and gradients.
        control (`float`, *optional*): The same error of the logits under a plain causal mask, which must be large.
        checkpointed (`str`): What checkpointing did to the gradients.
    """

    model_type: str
    architecture: str = ""
    status: str = FAILED
    reason: str = ""
    layers: str = ""
    compared: str = ""
    error: float | None = None
    control: float | None = None
    checkpointed: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values."""
        return asdict(self)


def check_architecture(model_type: str, seed: int = 0) -> Result:
    """
    Runs the whole comparison for one architecture; an error of the architecture becomes its result.

    Args:
        model_type (`str`): A key of `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
        seed (`int`, *optional*, defaults to 0): Of the weights, the tokens and their weights.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    result = Result(model_type, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stock = build_model(model_type, seed)
            result.layers = _layers(stock.config)
            with torch.no_grad():
                ids = torch.arange(3, 12)[None]
                stock.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            stock.train()
        except Exception as error:  # whatever a modeling file raises is the reason
            result.status, result.reason = NOT_BUILT, NOT_RUNNABLE.get(model_type) or _sentence(error)
            return result
        model = copy.deepcopy(stock)
        try:
            prepare_model(model)
        except ValueError as error:
            result.status, result.reason = REFUSED, _sentence(error)
            return result
        except Exception as error:
            result.reason = f"prepare_model raised {_sentence(error)}"
            return result
        try:
            _compare(result, stock, model, seed)
        except Exception as error:
            result.reason = _sentence(error)
    return result


def build_model(model_type: str, seed: int = 0) -> PreTrainedModel:
    """
    The tiny model in float32: weights amplified, because errors hide behind small ones; biases, sinks and every other
    vector random.

    Args:
        model_type (`str`): A key of `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`.
        seed (`int`, *optional*, defaults to 0): Of the weights.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    for part in [config, *(getattr(config, name, None) for name in config.sub_configs)]:
        if part is not None:
            part._experts_implementation = "eager"  # grouped matmuls reject float64 on CPU
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    if model.config._attn_implementation == "sdpa" and default_implementation(model.config.__class__) == "eager":
        model.set_attn_implementation("eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.normal_(0, 2)
            elif parameter.dim() > 1:
                zero = parameter.abs().sum(dim=-1, keepdim=True) == 0  # a padding token's embedding, say
                parameter.add_(torch.randn_like(parameter) * 0.02 * zero).mul_(AMPLIFY)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _compare(result: Result, stock: PreTrainedModel, model: PreTrainedModel, seed: int) -> None:
    trees = conformance_forest(stock.config.get_text_config().vocab_size, seed)
    if _draws_in_training(stock, trees):  # random numbers, in a router say: no two runs agree
        stock.eval()
        model.eval()
    try:
        result.compared = "float64"
        with keep_double():
            errors = _errors(_double(stock), _double(model), trees)
    except (RuntimeError, TypeError):  # an operation without float64, or a float32 constant in the way
        result.compared = "float32"
        errors = _errors(stock, model, trees)
    logits_error, gradient_error, result.control = errors
    result.error = max(logits_error, gradient_error)
    tolerance = TOLERANCE[result.compared]
    if not stock.training:
        result.compared += " (eval)"
    if not result.error < tolerance:
        result.reason = f"logits differ by {logits_error:.1e}, gradients by {gradient_error:.1e} ({result.compared})"
    elif not result.control > CONTROL:
        result.reason = f"a causal mask gives the same logits (to {result.control:.1e}): nothing was tested"
    else:
        result.checkpointed, difference = _checkpointing(stock, model, trees)
        if difference > CHECKPOINT_TOLERANCE:
            result.reason = f"checkpointed gradients differ by {difference:.1e}"
        else:
            result.status = EXACT


def _draws_in_training(stock: PreTrainedModel, trees: list[PrefixTree]) -> bool:
    ids = torch.from_numpy(trees[0].branches()[0].input_ids.copy())[None].long()
    with torch.no_grad(), torch.random.fork_rng():
        before = torch.random.get_rng_state()
        stock(input_ids=ids, use_cache=False)
        return not torch.equal(before, torch.random.get_rng_state())


def _double(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model).double()
    for module in model.modules():  # buffers that `.double()` casts were computed in float32 on both sides alike
        module.to(torch.float64)
    return model


def _errors(stock: PreTrainedModel, model: PreTrainedModel, trees: list[PrefixTree]) -> tuple[float, float, float]:
    """Largest relative errors of logits and of gradients, and that of the logits under a plain causal mask."""
    row = concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=PAD_TO)
    expected_loss, expected_logits = _branch_runs(stock, trees)
    expected_loss.backward()
    model(**row).loss.backward()
    without_labels = {key: value for key, value in row.items() if key not in ("labels", "loss_weights")}
    with torch.no_grad():
        tree_logits = model(**without_labels).logits[0]
        ids = row["input_ids"]
        causal_logits = stock(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
    logits_error = control = 0.0
    start, branches = 0, iter(expected_logits)
    for tree in trees:
        for path in tree.paths():
            expected, where = next(branches), torch.from_numpy(path) + start
            scale = expected.abs().max().item()
            logits_error = max(logits_error, _largest(tree_logits[where] - expected) / scale)
            control = max(control, _largest(causal_logits[where] - expected) / scale)
        start += len(tree)
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (stock, model)]
    return logits_error, _gradient_error(*gradients), control


def _branch_runs(stock: PreTrainedModel, trees: list[PrefixTree]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    total: Any = 0.0
    divisor: Any = 0.0
    logits = []
    for tree in trees:
        branches = tree.branches()
        for branch in branches:
            ids = torch.from_numpy(branch.input_ids.copy())[None].long()
            out = stock(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0]
            logits.append(out.detach())
            weight = torch.from_numpy(branch.weights[1:].copy()) / len(branches)
            nll = torch.nn.functional.cross_entropy(out[:-1], ids[0, 1:], reduction="none")
            total = total + (nll.double() * weight).sum()
            divisor = divisor + weight.sum()
    return total / divisor, logits


def _gradient_error(expected: dict[str, Any], got: dict[str, Any]) -> float:
    largest = max(g.abs().max().item() for g in expected.values() if g is not None)
    worst = 0.0
    for name, gradient in expected.items():
        if gradient is None or got[name] is None:
            present = gradient if gradient is not None else got[name]
            worst = max(worst, 0.0 if present is None else _largest(present) / largest)
            continue
        # a gradient that is zero but for rounding (a key's bias, say) is measured against the largest of the model
        scale = max(gradient.abs().max().item(), 1e-4 * largest)
        worst = max(worst, _largest(got[name] - gradient) / scale)
    return worst


def _checkpointing(stock: PreTrainedModel, model: PreTrainedModel, trees: list[PrefixTree]) -> tuple[str, float]:
    if not model.supports_gradient_checkpointing:
        return "not supported by the model", 0.0
    row = concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=PAD_TO)
    ids = torch.from_numpy(trees[0].branches()[0].input_ids.copy())[None].long()
    branch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    differences = {
        kind: _checkpointed_error(model, row, kind == "reentrant") for kind in ("non-reentrant", "reentrant")
    }
    worst = max(differences.values())
    if worst > CHECKPOINT_TOLERANCE:
        # a model whose own checkpointing is wrong gives wrong gradients on a single branch, too
        wrong = [k for k, d in differences.items() if d > CHECKPOINT_TOLERANCE]
        if all(_checkpointed_error(stock, branch, kind == "reentrant") > CHECKPOINT_TOLERANCE for kind in wrong):
            return f"{' and '.join(wrong)} gives wrong gradients without trees, too", 0.0
    return ("bit-identical" if worst == 0 else f"to {worst:.0e}"), worst


def _checkpointed_error(model: PreTrainedModel, batch: dict[str, torch.Tensor], reentrant: bool) -> float:
    found = []
    model.train()
    for checkpointed in (False, True):
        model.zero_grad()
        torch.manual_seed(0)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        model(**batch, use_cache=False).loss.backward()
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
    model.gradient_checkpointing_disable()
    if reentrant:
        model.disable_input_require_grads()
    return _gradient_error(*found)


def _largest(difference: torch.Tensor) -> float:
    value = difference.abs().max().item()
    return value if value == value else float("inf")


def _layers(config: Any) -> str:
    text = config
    with contextlib.suppress(ValueError):
        text = config.get_text_config()
    if getattr(text, "is_heterogeneous", False):
        return ", ".join(dict.fromkeys(kind for layer in text.per_layer_config for kind in _layers(layer).split(", ")))
    names = list(getattr(text, "layer_types", None) or [])
    names += list(getattr(text, "layers_block_type", None) or [])
    kinds = list(dict.fromkeys(name.removesuffix("_attention") for name in names))
    if getattr(text, "kv_lora_rank", None):
        kinds.append("MLA")
    if any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        kinds.append("MoE")
    return ", ".join(kinds)


def _sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text[:300]} ({frame.filename.rsplit('/', 1)[-1]}:{frame.lineno})"
