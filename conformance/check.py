# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One architecture: builds a tiny model, runs the forest as a tree and branch by branch, and compares.

The branches run through an unprepared copy of the model, under its default attention. The harness compares the logits
of every token of every branch and the gradient of every parameter: in float64, kept through Transformers' casts, or in
float32 if the architecture does not run in float64. It also compares gradients with and without checkpointing (both
kinds), on the prepared model in float32. Takes a few seconds per architecture on one core.
"""

from __future__ import annotations

import contextlib
import copy
import traceback
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from conformance.build import build_forest, build_model, class_name
from conformance.double import keep_double
from conformance.forest import Forest
from conformance.overrides import NOT_RUNNABLE
from hf_prefix_tree.modeling.batch import concatenate_trees
from hf_prefix_tree.modeling.prepare import prepare_model

TOLERANCE = {"float64": 1e-9, "float32": 2e-3}
CHECKPOINT_TOLERANCE = 1e-5
CONTROL = 1e-3  # a causal mask over the packed sequence must be at least this wrong, or the comparison proves nothing
PAD_TO = 8
EXACT, REFUSED, FAILED, NOT_BUILT = "exact", "refused", "failed", "not built"


@dataclass
class Result:
    """
    The result of one architecture.

    Args:
        model_type (`str`): Its key in Transformers' mapping.
        architecture (`str`): The class of the causal LM.
        variant (`str`): The variant of the model, see [`build_model`].
        status (`str`): `"exact"`, `"refused"`, `"failed"` or `"not built"`.
        reason (`str`): The reason, if it is not exact.
        layers (`str`): The kinds of layers of the tiny model.
        compared (`str`): The dtype in which logits and gradients were compared.
        error (`float`, *optional*): Largest relative error of logits and gradients.
        control (`float`, *optional*): The same error of the logits under a plain causal mask, which must be large.
        checkpointed (`str`): The effect of checkpointing on the gradients.
    """

    model_type: str
    architecture: str = ""
    variant: str = "text"
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


def check_architecture(model_type: str, seed: int = 0, variant: str = "text") -> Result:
    """
    Runs the whole comparison for one architecture; an error of the architecture becomes its result.

    Args:
        model_type (`str`): A key of `MODEL_FOR_CAUSAL_LM_MAPPING_NAMES`, or of `VARIANTS[variant]`.
        seed (`int`, *optional*, defaults to 0): Seed of the weights, the tokens and their weights.
        variant (`str`, *optional*, defaults to `"text"`): The variant of the model, see [`build_model`].
    """
    result = Result(model_type, class_name(model_type), variant)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            stock = build_model(model_type, seed, variant)
            result.layers = _layers(stock.config)
            forest = build_forest(stock, seed, variant)
            with torch.no_grad():
                stock.eval()(**forest.branch_inputs()[0][0], use_cache=False)
            stock.train()
        except Exception as error:  # any error of a modeling file is the reason
            result.status, result.reason = NOT_BUILT, NOT_RUNNABLE.get(model_type) or _sentence(error)
            return result
        model = copy.deepcopy(stock)
        try:
            prepare_model(model)
            if forest.images:  # images are refused by the call, after the text was verified
                model(**_batch_of(forest))
        except ValueError as error:
            result.status, result.reason = REFUSED, _sentence(error)
            return result
        except Exception as error:
            result.reason = f"prepare_model raised {_sentence(error)}"
            return result
        try:
            _compare(result, stock, model, forest)
        except Exception as error:
            result.reason = _sentence(error)
    return result


def _compare(result: Result, stock: PreTrainedModel, model: PreTrainedModel, forest: Forest) -> None:
    if _draws_in_training(stock, forest):  # random numbers, in a router for example: no two runs agree
        stock.eval()
        model.eval()
    try:
        result.compared = "float64"
        if result.variant == "nf4":
            raise TypeError("4-bit weights have no double")
        with keep_double():
            errors = _errors(_double(stock), _double(model), forest)
    except (RuntimeError, TypeError):  # an operation without float64, or a float32 constant in the way
        result.compared = "float32"
        errors = _errors(stock, model, forest)
    logits_error, gradient_error, result.control = errors
    result.error = max(logits_error, gradient_error)
    tolerance = TOLERANCE[result.compared]
    if not stock.training:
        result.compared += " (eval)"
    if not result.error < tolerance:
        result.reason = f"logits differ by {logits_error:.1e}, gradients by {gradient_error:.1e} ({result.compared})"
    elif not result.control > CONTROL:
        result.reason = f"a causal mask gives the same logits (to {result.control:.1e}): nothing was tested"
    elif not _is_refused(stock, forest):
        result.reason = "the unprepared model accepts a tree silently"
    else:
        result.checkpointed, difference = _checkpointing(stock, model, forest)
        if difference > CHECKPOINT_TOLERANCE:
            result.reason = f"checkpointed gradients differ by {difference:.1e}"
        else:
            result.status = EXACT


def _draws_in_training(stock: PreTrainedModel, forest: Forest) -> bool:
    with torch.no_grad(), torch.random.fork_rng():
        before = torch.random.get_rng_state()
        stock(**forest.branch_inputs()[0][0], use_cache=False)
        return not torch.equal(before, torch.random.get_rng_state())


def _batch_of(forest: Forest) -> dict[str, torch.Tensor]:
    return {**concatenate_trees(forest.trees, pad_token_id=0, pad_to_multiple_of=PAD_TO), **forest.images}


def _is_refused(stock: PreTrainedModel, forest: Forest) -> bool:
    try:
        with torch.no_grad():
            stock(**_batch_of(forest))
    except (ValueError, RuntimeError):
        return True
    return False


def _double(model: PreTrainedModel) -> PreTrainedModel:
    model = copy.deepcopy(model).double()
    for module in model.modules():  # buffers that `.double()` casts were computed in float32 on both sides alike
        module.to(torch.float64)
    return model


def _errors(stock: PreTrainedModel, model: PreTrainedModel, forest: Forest) -> tuple[float, float, float]:
    """Largest relative errors of logits and of gradients, and that of the logits under a plain causal mask."""
    batch = _batch_of(forest)
    expected_loss, expected_logits = _branch_runs(stock, forest)
    expected_loss.backward()
    model(**batch).loss.backward()
    without_labels = {key: value for key, value in batch.items() if key not in ("labels", "loss_weights")}
    tree_logits = model(**without_labels).logits[0].detach()  # with gradients: 4-bit kernels differ without
    with torch.no_grad():
        causal_logits = stock(**forest.plain_inputs(batch["input_ids"], forest.images), use_cache=False).logits[0]
    logits_error = control = 0.0
    start, branches = 0, iter(expected_logits)
    for tree in forest.trees:
        for path in tree.paths():
            expected, where = next(branches), torch.from_numpy(path) + start
            scale = expected.abs().max().item()
            logits_error = max(logits_error, _largest(tree_logits[where] - expected) / scale)
            control = max(control, _largest(causal_logits[where] - expected) / scale)
        start += len(tree)
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.requires_grad} for m in (stock, model)]
    return logits_error, _gradient_error(*gradients), control


def _branch_runs(stock: PreTrainedModel, forest: Forest) -> tuple[torch.Tensor, list[torch.Tensor]]:
    total: Any = 0.0
    divisor: Any = 0.0
    logits = []
    for tree, inputs in zip(forest.trees, forest.branch_inputs(), strict=True):
        for branch, arguments in zip(tree.branches(), inputs, strict=True):
            out = stock(**arguments, use_cache=False).logits[0]
            logits.append(out.detach())
            weight = torch.from_numpy(branch.weights[1:].copy()) / len(inputs)
            nll = torch.nn.functional.cross_entropy(out[:-1], arguments["input_ids"][0, 1:], reduction="none")
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
        # a gradient that is zero up to rounding (the bias of a key) is measured against the largest one of the model
        scale = max(gradient.abs().max().item(), 1e-4 * largest)
        worst = max(worst, _largest(got[name] - gradient) / scale)
    return worst


def _checkpointing(stock: PreTrainedModel, model: PreTrainedModel, forest: Forest) -> tuple[str, float]:
    if not model.supports_gradient_checkpointing:
        return "not supported by the model", 0.0
    batch = _batch_of(forest)
    branch = forest.branch_inputs()[0][0]
    branch["labels"] = branch["input_ids"]
    differences = {
        kind: _checkpointed_error(model, batch, kind == "reentrant") for kind in ("non-reentrant", "reentrant")
    }
    worst = max(differences.values())
    if worst > CHECKPOINT_TOLERANCE:
        # if the model's checkpointing is wrong, the gradients of a single branch are wrong, too
        wrong = [k for k, d in differences.items() if d > CHECKPOINT_TOLERANCE]
        if all(_checkpointed_error(stock, branch, kind == "reentrant") > CHECKPOINT_TOLERANCE for kind in wrong):
            return f"{' and '.join(wrong)} gives wrong gradients without trees, too", 0.0
    return ("bit-identical" if worst == 0 else f"to {worst:.0e}"), worst


def _checkpointed_error(model: PreTrainedModel, batch: dict[str, torch.Tensor], reentrant: bool) -> float:
    gradients = []
    model.train()
    for checkpointed in (False, True):
        model.zero_grad()
        torch.manual_seed(0)
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
            if reentrant:
                model.enable_input_require_grads()
        model(**batch, use_cache=False).loss.backward()
        gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
    model.gradient_checkpointing_disable()
    if reentrant:
        model.disable_input_require_grads()
    return _gradient_error(*gradients)


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
