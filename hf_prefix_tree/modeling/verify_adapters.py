# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Self-verification in training mode, gradients included: of code that nobody knows, and of PEFT adapters.

New adapters are zero somewhere, so that the check of the model cannot see what they do. Here their weights get noise
for the time of the check. Adapters may also average over the call (in the forward or in the backward alone) or draw
random numbers in training: the layers are compared in training mode, without dropout, gradients included. So is a
whole model that runs unknown code or normalises over the call.

Deep models in 16 bits amplify their rounding under that noise, up to errors as large as those of wrong adapters. Where
they may be either, the comparison is made again in float32.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_prefix_tree.modeling import verify
from hf_prefix_tree.modeling.attention.implementations import FALLBACK_HINT
from hf_prefix_tree.modeling.checks import position_limit

logger = logging.getLogger(__name__)

PATH = 24  # tokens of the longest path: what adapters do depends on no distance
UNKNOWN_PATH = 180  # the same for unknown code: its forest fills the packed sequence, which is padded anyway
NOISE = 0.1  # standard deviation of what is added to the weights of adapters, of at most `WIDTH` inputs
# Times what the logits of a model round without adapters; twice that for gradients. LoRA of SmolLM2-135M in bf16: up
# to 7 and 12, but gradients 140 under one seed of six, where Lily has 40. There float32 decides: 1e-4 against 0.6.
OWN_ROUNDING = 8
WIDTH = 64  # wider weights get less, so that adapters change a layer's output by as much, and bf16 stays comparable

SMALL = 2**20  # the largest parameter whose gradient is compared; norms, biases and routers have fewer numbers

Result = tuple[torch.Tensor, list[torch.Tensor]]  # logits, gradients of the parameters of adapters
Errors = dict[str, tuple[float, float]]  # relative errors of logits and of gradients, by what was compared


def verify_adapters(model: PreTrainedModel, forward: Callable) -> None:
    """
    Compares the tree path with independent runs of the branches under adapters with random weights.

    Args:
        model (`PreTrainedModel`): The prepared causal LM. Nothing of it has changed afterwards.
        forward (`Callable`): The function to call: `model` itself or its wrapper under FSDP or DDP.

    Raises:
        `ValueError`: where an adapter does not give a tree the logits and gradients of its branches.
        `RuntimeError`: if there is no memory for the comparison in float32.
    """
    layers = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    if not layers:
        return
    with _with_gradients(model) as dtypes, _randomized(layers) as (parameters, reset):
        is_whole = verify.is_materialized(model)  # gradients of sharded weights are reduced by hooks
        runs = _Runs(model, forward, verify.make_forest(model, PATH), parameters if is_whole else [], reset)
        errors, own = runs.errors(evaluation=True), 0.0
        rounding = verify.rounding_of({runs.dtype, *dtypes})
        if rounding > verify.ROUNDING[torch.float32] and not _are_close(errors, rounding):
            # A deep model in 16 bits rounds without adapters, and more with them. A reset would switch them on again.
            plain = dataclasses.replace(runs, parameters=[], reset=lambda: None)
            with verify.changed([(vars(layer), "_disable_adapters", True) for layer in layers]):
                own = _error(plain.of_tree(), plain.of_branches())[0]
            if is_whole and not _are_close(errors, rounding, own):  # last, since it takes three times the memory
                runs.forward, own = functools.partial(_in_float32, model), 0.0
                quantized = [vars(x) for x in model.modules() if "compute_dtype" in vars(x)]  # by bitsandbytes
                in_float32 = verify.changed([(table, "compute_dtype", torch.float32) for table in quantized])
                try:
                    with torch.autocast(model.device.type, enabled=False), in_float32:
                        errors = runs.errors(evaluation=True)
                except torch.OutOfMemoryError as error:
                    raise RuntimeError(
                        f"Rounding in 16 bits hides what the adapters of {type(model).__name__} compute, and there is "
                        "no memory for a float32 copy of the weights to check them with. Load the model in float32."
                    ) from error
    reason = _judge(f"Adapters of {type(model).__name__}", errors, rounding, own, runs.is_random)
    if reason is not None:
        raise ValueError(
            f"PEFT adapter {_names(model, layers)} {reason}. Use LoRA or another adapter that treats each token by "
            "itself."
        )


def verify_training(model: PreTrainedModel, forward: Callable, unknown: Sequence[str] = ()) -> None:
    """
    Compares the tree path with independent runs of the branches in training mode, without dropout. Of unknown code,
    the gradients of small parameters are compared as well.

    Args:
        model (`PreTrainedModel`): The prepared causal LM. Nothing of it has changed afterwards.
        forward (`Callable`): What is called, `model` itself or its wrapper under FSDP or DDP.
        unknown (`Sequence[str]`, *optional*): Functions that the model runs and that are from no known package.
            Without any, only a model that normalises over the call is compared.

    Raises:
        `ValueError`: where training mode does not give a tree the logits and gradients of its branches.
    """
    norms = {type(x).__name__ for x in model.modules() if isinstance(x, torch.nn.modules.batchnorm._BatchNorm)}
    if not unknown and not norms:
        return
    small = [p for p in model.parameters() if p.is_floating_point() and p.numel() <= SMALL]
    compared = small if unknown and verify.is_materialized(model) else []
    with _with_gradients(model) as dtypes, _in_training(model, compared):
        length = min(UNKNOWN_PATH, position_limit(model.config.get_text_config()))
        runs = _Runs(model, forward, verify.make_forest(model, length), compared)
        errors = runs.errors()
    reason = _judge(f"Training mode of {type(model).__name__}", errors, verify.rounding_of({runs.dtype, *dtypes}))
    if reason is not None:
        raise ValueError(
            f"{type(model).__name__} {reason}, in training mode or in the backward. It runs "
            f"{', '.join(dict.fromkeys([*unknown, *sorted(norms)]))}. {FALLBACK_HINT}"
        )


def _judge(name: str, errors: Errors, rounding: float, own: float = 0.0, is_random: bool = False) -> str | None:
    """Why these errors are not those of rounding, if so."""
    numbers = ", ".join(f"{name} {logits:.1e} / {grads:.1e}" for name, (logits, grads) in errors.items())
    logger.info("%s on trees (logits / gradients): %s.", name, numbers)
    reason = None
    if is_random or not _is_close(errors["two equal calls"], rounding / 10, own / 10):
        reason = "draws random numbers in each call, so that the branches of a tree share what they would draw apart"
    elif not _are_close(errors, rounding, own):
        reason = "computes something over all tokens of a call, so that the branches of a tree change each other"
    return reason and f"{reason} ({numbers})"


def _in_float32(model: PreTrainedModel, **inputs: Any) -> Any:
    """A call with float32 weights, which are there as long as it lasts, instead of those of 16 bits."""
    named = [*model.named_parameters(), *model.named_buffers()]
    weights = {name: x.float() for name, x in named if x.dtype in (torch.float16, torch.bfloat16)}
    return torch.func.functional_call(model, weights, kwargs=inputs)


@contextmanager
def _with_gradients(model: PreTrainedModel) -> Iterator[set[torch.dtype]]:
    """An undisturbed model whose gradients can be had; gives the dtypes in which its linear layers answer."""
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise ValueError(
            f"The weights of {type(model).__name__} were made under `torch.inference_mode()`, which leaves no "
            "gradients to check: make the model outside of it."
        )
    with torch.inference_mode(False), verify.undisturbed(model), verify.coarsest_dtype(model) as dtypes:
        yield dtypes


@contextmanager
def _in_training(model: PreTrainedModel, parameters: list[torch.nn.Parameter]) -> Iterator[None]:
    """
    A model in training mode, which the caller restores, without dropout and NEFTune (of which others speak), and with
    gradients of these parameters. The causal LM itself stays in evaluation: fused heads give no logits in training.
    """
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    off: list[tuple[dict[Any, Any], Any, Any]] = []
    for module in model.modules():
        module.training = module is not model
        table = vars(module)
        names = [name for name in table if "drop" in name or "jitter" in name or name == "neftune_noise_alpha"]
        entries = [(table, name) for name in names]
        entries += [(table[name], key) for name in names if isinstance(table[name], dict) for key in table[name]]
        entries += [(table, "p")] if isinstance(module, torch.nn.modules.dropout._DropoutNd) else []
        off += [(where, key, type(where[key])(0)) for where, key in entries if isinstance(where[key], float)]
        if table.get("gradient_checkpointing") is True:  # whose reentrant form wants inputs that have gradients
            off.append((table, "gradient_checkpointing", False))
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with verify.changed(off):
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@dataclasses.dataclass
class _Runs:
    """The runs of one forest, as a packed sequence and branch by branch, with the gradients of what is checked."""

    model: PreTrainedModel
    forward: Callable
    forest: verify.Forest
    parameters: list[torch.nn.Parameter]
    reset: Callable = lambda: None
    draws: bool = False  # whether a call moved the random state
    dtype: torch.dtype = torch.float32  # of the logits
    is_random: bool = False  # whether two equal calls differ by what they draw; some draw for a dropout of 0

    def errors(self, evaluation: bool = False) -> Errors:
        """Errors of the tree in training mode, between two equal calls, and of the logits in evaluation mode."""
        expected, tree, again = self.of_branches(), self.of_tree(), self.of_tree()
        self.dtype, self.is_random = expected[0].dtype, self.draws and bool((again[0] != tree[0]).any())
        errors = {"training": _error(tree, expected), "two equal calls": _error(again, tree)}
        if evaluation:
            runs = dataclasses.replace(self, parameters=[])
            with verify.changed([(vars(module), "training", False) for module in self.model.modules()]):
                errors["evaluation"] = _error(runs.of_tree(), runs.of_branches())
        return errors

    def of_tree(self) -> Result:
        """Logits of all checked tokens of all branches, `[tokens, vocabulary]`, and gradients."""
        chosen = torch.cat(self.forest.chosen)
        return self._run(lambda: verify.tree_logits(self.model, self.forward, self.forest.batch)[chosen], chosen)

    def of_branches(self) -> Result:
        """The same, each branch by itself."""
        results = [
            self._run(functools.partial(verify.plain_logits, self.model, self.forward, branch), chosen)
            for branch, chosen in zip(self.forest.branches, self.forest.chosen, strict=True)
        ]
        gradients = [torch.stack(parts).sum(dim=0) for parts in zip(*(grads for _, grads in results), strict=True)]
        return torch.cat([logits for logits, _ in results]), gradients

    def _run(self, call: Callable, chosen: torch.Tensor) -> Result:
        self.reset()
        before = _random_state(self.model.device)
        with torch.set_grad_enabled(bool(self.parameters)):
            logits = call()
            self.draws |= not torch.equal(before, _random_state(self.model.device))
            if not self.parameters:
                return logits, []
            shape = (int(torch.cat(self.forest.chosen).max()) + 1, logits.shape[-1])
            directions = torch.randn(shape, generator=torch.Generator().manual_seed(0))  # for each checked token
            loss = (logits * directions[chosen].to(logits)).sum()
            grads = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        pairs = zip(self.parameters, grads, strict=True)
        return logits.detach(), [torch.zeros_like(p) if grad is None else grad for p, grad in pairs]


@contextmanager
def _randomized(layers: list[Any]) -> Iterator[tuple[list[torch.nn.Parameter], Callable[[], None]]]:
    """
    Adapters with noise on their weights, switched on, in training mode but for their dropout. Gives their parameters
    and what takes back the traces of a call in the layers (averages, samples).
    """
    parameters = list({id(p): p for layer in layers for p in _of_adapter(layer.named_parameters())}.values())
    modules = list(dict.fromkeys(module for layer in layers for module in _of_adapter(layer.named_modules())))
    values = [(parameter, _local(parameter).clone(), parameter.requires_grad) for parameter in parameters]
    before = _attributes(modules)
    try:
        generator = torch.Generator().manual_seed(0)
        for parameter, value, _ in values:
            if parameter.is_floating_point():
                size = NOISE * min(1.0, (WIDTH / max(1, value.shape[-1] if value.dim() > 1 else 1)) ** 0.5)
                _local(parameter).add_((torch.randn(value.shape, generator=generator) * size).to(value))
                parameter.requires_grad_(True)
        torch.clear_autocast_cache()  # of a call that is checked inside autocast: it holds the weights without noise
        for layer in layers:
            layer._disable_adapters = False
        for module in modules:
            module.training = "Dropout" not in type(module).__name__
            for name, rates in vars(module).items():
                if "dropout" in name and isinstance(rates, dict):
                    rates.update(dict.fromkeys(rates, 0.0))
        yield [p for p in parameters if p.requires_grad], functools.partial(_restore, _attributes(modules))
    finally:
        _restore(before)
        for parameter, value, flag in values:
            _local(parameter).copy_(value)
            parameter.requires_grad_(flag)
        torch.clear_autocast_cache()


def _of_adapter(named: Iterable[tuple[str, Any]]) -> list[Any]:
    """The named values that belong to an adapter, not to the layer that it wraps."""
    return [x for name, x in named if name.split(".")[0] not in ("base_layer", "original_module")]


def _local(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The numbers of a parameter that are on this rank; writing them leaves no trace in autograd."""
    data = getattr(parameter, "ds_tensor", parameter).data  # ZeRO-3 keeps them there
    return data.to_local() if isinstance(data, torch.distributed.tensor.DTensor) else data


def _attributes(modules: list[torch.nn.Module]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    def is_kept(name: str) -> bool:
        return name in ("_buffers", "_disable_adapters") or (name[0] != "_" and name != "training")

    kept = [[(name, x) for name, x in vars(module).items() if is_kept(name)] for module in modules]
    copies = [{name: dict(x) if isinstance(x, dict) else x for name, x in items} for items in kept]
    return list(zip(map(vars, modules), copies, strict=True))


def _restore(attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for now, before in attributes:
        for name, value in before.items():
            if isinstance(value, dict):
                now[name].clear()
                now[name].update(value)
            else:
                now[name] = value


def _error(actual: Result, expected: Result) -> tuple[float, float]:
    """Relative errors of logits and of gradients, the largest over tokens and over parameters."""
    logits = verify.distance(actual[0], expected[0]) / verify.distance(expected[0], torch.zeros_like(expected[0]))
    norms = [gradient.double().norm().item() for gradient in expected[1]]
    errors = [(x.double() - y.double()).norm().item() for x, y in zip(actual[1], expected[1], strict=True)]
    # rounding of the others is all that a parameter without influence has
    floor = 1e-2 * max(norms, default=0.0)
    return logits, max(
        (error / max(norm, floor, 1e-30) for error, norm in zip(errors, norms, strict=True)), default=0.0
    )


def _is_close(errors: tuple[float, float], rounding: float, own: float = 0.0) -> bool:
    logits, gradients = errors  # neither is met by what is not a number
    return logits <= max(rounding, OWN_ROUNDING * own) and gradients <= max(4 * rounding, 2 * OWN_ROUNDING * own)


def _are_close(errors: Errors, rounding: float, own: float = 0.0) -> bool:
    return all(_is_close(error, rounding, own) for error in errors.values())


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cat([torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])])


def _names(model: Any, layers: list[Any]) -> str:
    variants = sorted({type(v).__name__ for layer in layers for v in getattr(layer, "lora_variant", {}).values()})
    configs = [f"{name!r} ({type(config).__name__})" for name, config in getattr(model, "peft_config", {}).items()]
    names = ", ".join(configs or sorted({type(layer).__name__ for layer in layers}))
    return f"{names} with {', '.join(variants)}" if variants else names
