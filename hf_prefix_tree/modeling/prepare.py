# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""[`prepare_model`]: the hooks that make a causal LM take the `prefix_tree` batch key.

No forward is replaced, because TRL and Accelerate replace `forward` on top. A pre-hook on the causal LM turns the
batch contract into the context of the call; hooks on the backbone refuse a call that went around it and hand the head
only the hidden states that predict a supervised token. Without `prefix_tree` in the call nothing is touched.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_prefix_tree.modeling import call, call_checks
from hf_prefix_tree.modeling.attention.backend import ATTN_BACKENDS
from hf_prefix_tree.modeling.attention.implementations import FALLBACK_HINT, IMPLEMENTATION
from hf_prefix_tree.modeling.batch import (
    DEPTH,
    UNPREPARED_SENTINEL,
    WEIGHTED_BY_CALLER,
    Caller,
    check_batch,
    gather_supervised,
)
from hf_prefix_tree.modeling.call import Kind, State, check_options, prepare, state_of, unprepare
from hf_prefix_tree.modeling.checks import base_causal_lm, rope_limit_of, warn_of_dropout
from hf_prefix_tree.modeling.compilation import compile_decoder_layers
from hf_prefix_tree.modeling.context import TreeContext, active_tree, separate_calls
from hf_prefix_tree.modeling.fingerprint import CodeWatch
from hf_prefix_tree.modeling.loss import weighted_token_loss
from hf_prefix_tree.modeling.positions import Override, place_by_depth, place_images
from hf_prefix_tree.modeling.recurrent.hooks import follow_branches, followed_functions
from hf_prefix_tree.modeling.streaming import take_section
from hf_prefix_tree.modeling.verify import is_materialized, verify_images, verify_loss, verify_tree_forward
from hf_prefix_tree.modeling.verify_adapters import verify_adapters, verify_training

logger = logging.getLogger(__name__)


@dataclass
class _TreeState(State):
    """The changes that `prepare_model` made to a model, and its knowledge about it."""

    loss: Override | None = None  # of the model's `_loss_function`
    flag: Override | None = None  # of `accepts_loss_kwargs`, where it was changed
    verified: dict[tuple, set[str]] = field(default_factory=dict)  # device types, by the code that was checked on them
    verified_on: set[str] = field(default_factory=set)  # the entry of the code that runs now
    watch: CodeWatch | None = None
    kept: list[Any] = field(default_factory=list)  # what the ids in the keys of `verified` belong to
    verifying: bool = False
    inputs: call_checks.OverwrittenInputs = field(default_factory=call_checks.OverwrittenInputs)
    router_config: Any = None  # the config that switches a router's auxiliary loss on, where there is a router
    rope_limit: int | None = None
    has_sinks: bool = False
    recurrent: set[str] = field(default_factory=set)
    image_refusal: str | None = None
    loss_refusal: str | None = None
    refusals: dict[Any, tuple[str | None, str | None]] = field(default_factory=dict)  # both, by the code checked

    def __getstate__(self) -> dict[str, Any]:  # a copy has other functions and is checked again
        unchecked: dict[str, Any] = {"verified": {}, "verified_on": set(), "watch": None, "kept": [], "refusals": {}}
        unchecked["inputs"] = call_checks.OverwrittenInputs()
        return {**self.__dict__, **unchecked}


def prepare_model(
    model: torch.nn.Module, *, attn_backend: str = "auto", compile_layers: bool = False
) -> torch.nn.Module:
    """
    Makes a causal LM train on prefix trees, in place.

    Afterwards `model(**batch)` with a batch of [`DataCollatorForPrefixTree`] returns exact logits, and with `labels`
    the loss `sum(w * nll) / sum(w)`; `outputs.logits` is then `[1, M, vocab]`, one entry for each of the M supervised
    tokens. Without `prefix_tree` in the call the model does what it does under its default attention. Calling it again
    changes `attn_backend`, may compile and checks what was patched since, no more; [`unprepare_model`] undoes it.

    A stock `Trainer` then takes the mean of its micro-batches' losses (`model.accepts_loss_kwargs = False`), with
    trees and without: before it trains on anything else, call [`unprepare_model`]. A model that one of this package's
    trainers or [`fold_shared_prefixes`] prepared keeps the normalisation that it had. A `Trainer` reads it when it is
    made, so prepare the model before. Calls that count labels instead of weights are refused.

    The model is checked against independent runs of the branches: at once where its weights are whole and on the
    device they train on, otherwise at the first training step. Code that is patched later (a `forward`, a hook, a
    function of the modeling file, an adapter) is checked at the next call with a tree.

    A batch also holds `inputs_embeds`, which a prepared model takes out. A model that was not prepared raises on it
    ("You must specify exactly one of input_ids or inputs_embeds") instead of reading the tree as one sequence.

    Args:
        model (`PreTrainedModel` or `PeftModel`): A causal LM. Wrap it with DDP, FSDP or `torch.compile` afterwards.
        attn_backend (`str`, *optional*, defaults to `"auto"`):
            `"flex"` runs FlexAttention, `"flash"` the kernels of `flash-attn-4` (on Hopper), `"sdpa"` a dense
            mask; each raises where it cannot serve. `"auto"` takes FLASH where it is right and pays, FlexAttention
            wherever it can train, and the dense mask elsewhere (on CPU). The log says which and why.
        compile_layers (`bool`, *optional*, defaults to `False`):
            Compiles each decoder layer by itself, for calls with a tree: one graph for each kind of layer and all
            lengths. Recurrent mixers, and experts whose dispatch makes no graph, run eagerly inside (the log names
            them); any other layer that does not become one graph is refused.

    Returns:
        The same `model`.

    Raises:
        `ValueError`: where the architecture or an option of the model cannot be exact on trees.

    Example:

    ```python
    >>> from transformers import AutoModelForCausalLM, Qwen3Config
    >>> from hf_prefix_tree import Branch, DataCollatorForPrefixTree, fold, prepare_model

    >>> config = Qwen3Config(
    ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=16,
    ...     num_attention_heads=1, num_key_value_heads=1,
    ... )
    >>> model = prepare_model(AutoModelForCausalLM.from_config(config, attn_implementation="prefix_tree"))
    >>> tree = fold([Branch([5, 6, 7], [0, 1, 1]), Branch([5, 6, 8], [0, 1, 1])])
    >>> outputs = model(**DataCollatorForPrefixTree(pad_token_id=0)([tree]))
    >>> outputs.logits.shape, outputs.loss.dtype
    (torch.Size([1, 3, 32]), torch.float32)

    ```
    """
    install_tree_hooks(model, attn_backend=attn_backend, compile_layers=compile_layers)
    base = base_causal_lm(model)
    state: _TreeState = state_of(base)
    if state.flag is None:
        # Trainer would otherwise pass the number of labels as `num_items_in_batch`, which is not their weights.
        state.flag = Override(base, "accepts_loss_kwargs", False)
        state.handles.append(state.flag)
    return model


def install_tree_hooks(
    model: torch.nn.Module, *, attn_backend: str = "auto", compile_layers: bool = False
) -> torch.nn.Module:
    """[`prepare_model`] for trainers that normalise by themselves: leaves stock ones the model's normalisation."""
    if not isinstance(compile_layers, bool):
        raise ValueError(f"`compile_layers` must be `True` or `False`, got {compile_layers!r}.")
    base, is_new = prepare(model, TREE, attn_backend, _TreeState)
    state: _TreeState = state_of(base)
    if is_new:
        _follow_trees(base, state)
    elif state.attn_backend != attn_backend:
        state.attn_backend = attn_backend
        _forget_checks(state)
    try:
        if compile_layers and (added := compile_decoder_layers(base)):
            state.handles += added
            _forget_checks(state)
        is_to_check = not _is_verified(base, state) and (is_new or _has_changed(state))
        if is_to_check and is_materialized(base) and not (base.device.type == "cpu" and torch.cuda.is_available()):
            _verify(base, state, model)  # what will be called: some adapters go around the hooks
    except BaseException:
        if is_new:
            unprepare_model(model)
        raise
    return model


def _follow_trees(base: PreTrainedModel, state: _TreeState) -> None:
    """Makes loss, positions and recurrent layers follow the tree of a call."""
    text_config = base.config.get_text_config()
    state.router_config = text_config if hasattr(text_config, "output_router_logits") else None
    state.has_sinks = any("sink" in name for name, _ in base.named_parameters())
    state.recurrent = followed_functions(base)
    state.loss = Override(base, "_loss_function", functools.partial(_tree_aware_loss, base.loss_function))
    state.handles += [state.loss, *place_by_depth(base), *follow_branches(base)]
    state.handles.append(base.register_state_dict_pre_hook(_settle_inputs))


def _settle_inputs(module: PreTrainedModel, *args: Any) -> None:
    """Before weights are saved that the last calls trained."""
    state_of(module).inputs.settle()


def unprepare_model(model: torch.nn.Module) -> torch.nn.Module:
    """
    Undoes [`prepare_model`]; does nothing to a model that is not prepared.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The model.
    """
    _, state = unprepare(model, TREE)
    if state is not None:
        state.inputs.settle()
    return model


def is_prepared(model: torch.nn.Module) -> bool:
    """Whether [`prepare_model`] was called on this model."""
    state = state_of(base_causal_lm(model))
    return state is not None and state.kind == TREE


def ensure_verified(model: torch.nn.Module, forward: Callable) -> None:
    """
    Checks a prepared model whose code, on its device, was not yet checked; cheap where it was. Every rank must call
    it, since sharded weights are gathered for it; then all ranks decide together.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The prepared model.
        forward (`Callable`): The wrapped model (DDP, FSDP) to call.
    """
    base = base_causal_lm(model)
    state = state_of(base)
    is_new = not _is_verified(base, state)
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        if is_materialized(base):
            forward = model  # without the wrapper's collectives, because other ranks may have nothing to check
        else:
            flag = torch.tensor(int(is_new), device=base.device)
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MAX)
            is_new = bool(flag)
    if is_new:
        _verify(base, state, forward)


def _is_verified(base: PreTrainedModel, state: _TreeState, in_turns: bool = False) -> bool:
    """Whether the code that the model runs now was checked on its device; see [`CodeWatch.unchanged`]."""
    call.leave_last(base)
    if state.watch is None or not state.watch.unchanged(in_turns):
        call.refuse_other_backbone(base)
        state.watch = CodeWatch(base)
        state.rope_limit = rope_limit_of(base)
        state.kept += state.watch.kept
        state.verified_on = state.verified.setdefault(state.watch.key, set())
        state.image_refusal, state.loss_refusal = state.refusals.get(state.watch.key, (None, None))
    return state.watch.device_type in state.verified_on


def _has_changed(state: _TreeState) -> bool:
    """Whether other code was checked than the one that runs now."""
    return not state.verified_on and any(state.verified.values())


def _forget_checks(state: _TreeState) -> None:
    state.verified.clear()
    state.refusals.clear()
    state.watch = None


def _verify(base: PreTrainedModel, state: _TreeState, forward: Callable | None = None) -> None:
    if _has_changed(state):  # `prepare_model` warned of the others
        warn_of_dropout(base)
    state.verifying = True
    try:
        assert state.watch is not None  # made by `_is_verified`
        with separate_calls():
            verify_tree_forward(base, forward or base, state.watch.unknown)
            verify_training(base, forward or base, state.watch.unknown)
            verify_adapters(base, forward or base)
            refusals = verify_images(base, forward or base), verify_loss(base, forward or base)
    finally:
        state.verifying = False
    _remember(state, refusals)
    _is_verified(base, state)  # the first calls may have added attributes, counters for example
    _remember(state, refusals)


def _remember(state: _TreeState, refusals: tuple[str | None, str | None]) -> None:
    """Notes that the code that runs now was checked on its device, and what is refused with it."""
    assert state.watch is not None
    state.verified_on.add(state.watch.device_type)
    state.refusals[state.watch.key] = state.image_refusal, state.loss_refusal = refusals


def check_call(module: PreTrainedModel, kwargs: dict[str, Any], is_weighted: bool = False) -> None:
    """
    All checks of a call with a tree, which must cost little (`benchmarks/call_overhead.py`).

    Args:
        module (`PreTrainedModel`): The prepared causal LM.
        kwargs (`dict[str, Any]`): Keyword arguments of the call.
        is_weighted (`bool`, *optional*, defaults to `False`): Whether the caller weighs log-probs by itself.

    Raises:
        `ValueError`: where the call cannot be exact.
    """
    state: _TreeState = state_of(module)
    check_options(module, TREE, kwargs)
    check_batch(kwargs)
    trains = module.training and torch.is_grad_enabled()
    state.inputs.refuse(kwargs, trains)
    call_checks.refuse_long_branches(kwargs["prefix_tree"], state.rope_limit)
    call_checks.refuse_missing_labels(kwargs, trains)
    if module.training:
        embeddings = module.get_input_embeddings() if state.watch is None else state.watch.embeddings
        call_checks.refuse_noisy_embeddings(embeddings)
    if not state.verifying:
        (_verify_outside_graphs if torch.compiler.is_compiling() else _verify_call)(module, state, trains)
    call_checks.refuse_other_inputs(module, kwargs, state.image_refusal)
    if kwargs.get("labels") is not None and not state.verifying and not is_weighted:
        call_checks.refuse_counted_items(kwargs.get("num_items_in_batch"), kwargs.get("loss_weights"))
        _refuse_other_losses(module, state)


def _refuse_other_losses(module: PreTrainedModel, state: _TreeState) -> None:
    loss: Any = module.loss_function
    if getattr(loss, "func", None) is _tree_aware_loss:
        by_name = LOSS_MAPPING.get(getattr(module, "loss_type", None), ForCausalLMLoss)  # as before it was replaced
        loss = loss.args[0] if state.loss is not None and state.loss.previous else by_name
    if loss is not ForCausalLMLoss:
        raise ValueError(
            f"`model.loss_function` is {getattr(loss, '__qualname__', repr(loss))}, and the weighted cross-entropy of "
            f"a tree would take its place: remove it (`del model._loss_function`). {FALLBACK_HINT}"
        )
    if state.loss_refusal is not None:
        raise ValueError(state.loss_refusal)


def _verify_call(module: PreTrainedModel, state: _TreeState, trains: bool) -> None:
    """Checks the code of the model in a call, without the other ranks."""
    if _is_verified(module, state, in_turns=trains):
        return
    if is_materialized(module):
        if trains or _has_changed(state):
            _verify(module, state)
    elif _has_changed(state):
        raise ValueError(
            f"Code of {type(module).__name__} was patched after its check, and one rank cannot check sharded weights: "
            "patch it before `prepare_model`, or use a trainer of this package, which checks it on all ranks."
        )


# It looks at the model's code, and runs it where that has changed. The wrapper alone takes 9 microseconds.
_verify_outside_graphs = torch.compiler.disable(_verify_call)


def _enter(module: PreTrainedModel, kwargs: dict[str, Any]) -> tuple[TreeContext, dict[str, Any]] | None:
    """Batch contract in, context of the call out."""
    if kwargs.get("node_lengths") is not None:
        raise ValueError(
            "This batch holds shared prefixes as `node_lengths` and `sample_paths`: convert it with "
            "`PrefixTree.from_node_paths` and collate it with `DataCollatorForPrefixTree`."
        )
    if kwargs.get("prefix_tree") is None:
        state_of(module).inputs.settle()
        call_checks.refuse_partial_batch(kwargs)
        trains = module.training and torch.is_grad_enabled() and kwargs.get("labels") is not None
        if trains and state_of(module).flag is not None:
            logger.warning_once(  # type: ignore[attr-defined]
                "A prepared model trains on a call without a tree. A stock `Trainer` would take the mean of "
                "micro-batches, not of their tokens (`model.accepts_loss_kwargs = False`). Call "
                "`unprepare_model(model)` before it."
            )
        return None
    section = take_section()  # before the model is checked, which may call it
    sentinel = kwargs.get(UNPREPARED_SENTINEL)
    if isinstance(sentinel, torch.Tensor) and not sentinel.is_floating_point():
        del kwargs[UNPREPARED_SENTINEL]
    caller = kwargs.pop(WEIGHTED_BY_CALLER, False)
    is_weighted = bool(caller)
    check_call(module, kwargs, is_weighted)
    state, tree, labels = state_of(module), kwargs["prefix_tree"], kwargs.get("labels")
    if section is not None:
        call_checks.refuse_section(module, tree, bool(state.recurrent), state.rope_limit)
    supervised = None if labels is None else gather_supervised(tree, labels, kwargs.get("loss_weights"))
    if isinstance(caller, Caller) and supervised is not None:
        caller.supervised = supervised
    # The check of the model may run in another precision than training, and on short sequences. Before FLASH is
    # taken, it is compared with Triton on the packed sequences themselves.
    backend = "auto" if state.verifying and state.attn_backend == "flash" else state.attn_backend
    context = TreeContext(tree, supervised, backend, state.has_sinks, section)
    context.is_weighted = is_weighted
    token_branches = kwargs.get("token_branches")
    beside_model = ("loss_weights", "token_branches", "tree_stats")
    kwargs = {name: value for name, value in kwargs.items() if name not in beside_model}
    kwargs |= {"prefix_tree": context, "position_ids": tree[:, DEPTH].long()}
    if kwargs.get("image_grid_thw") is not None:
        kwargs |= place_images(module, tree, kwargs["input_ids"], kwargs["image_grid_thw"])
    if kwargs.get("attention_mask") is None:
        # without one, Transformers takes the restarting positions for packed documents and severs branches
        kwargs["attention_mask"] = torch.ones((tree.shape[0], tree.shape[2]), dtype=torch.int64, device=tree.device)
    context.attention_mask = kwargs["attention_mask"]
    trains_on_it = not is_weighted and (labels is not None or module.training)
    if (trains_on_it or token_branches is not None) and call_checks.has_router_loss(state.router_config, kwargs):
        # The auxiliary loss weighs tokens by this mask; the backbone gets the other one. Without branches: 0 / 0.
        token_branches = call_checks.refuse_uncounted(token_branches) * context.attention_mask
        kwargs["attention_mask"] = token_branches.masked_fill(~token_branches.any(), 1)
        context.mask_counts_branches = True
    if supervised is not None:
        kwargs |= {"labels": supervised.labels, "shift_labels": supervised.labels}
    return context, kwargs


def _leave(module: PreTrainedModel, context: Any, kwargs: dict[str, Any], output: Any) -> Any:
    if not context.masks:
        raise ValueError(
            f"{type(module).__name__} asked for no mask of the tree (it masks by itself), so branches would see each "
            f"other. {FALLBACK_HINT}"
        )
    if missing := sorted(state_of(module).recurrent - context.followed):
        raise ValueError(
            f"The recurrent layers of {type(module).__name__} ran without the tree: something replaced {missing} of "
            "their modeling file after `prepare_model`. Call `unprepare_model(model)` and `prepare_model(model)` "
            "after it, or have it call the function that it replaces with all keyword arguments."
        )
    supervised = context.supervised
    if supervised is None or context.is_weighted:
        return None
    if context.loss is not None:
        state: _TreeState = state_of(module)
        if not state.verifying and not call_checks.has_router_loss(state.router_config, kwargs):
            call_checks.refuse_changed_loss(module, output, context.loss)
        return None
    # an architecture that computes its loss by itself, without `loss_function`
    if isinstance(output, tuple):
        raise ValueError(
            f"{type(module).__name__} computes its loss by itself, and the tree's cannot take its place in a tuple: "
            "call the model with `return_dict=True`."
        )
    if getattr(output, "logits", None) is None:
        raise ValueError(
            f"{type(module).__name__} returned no logits, as fused heads do (`fused_lm_head=True` of TRL's trainers, "
            "Liger's kernels), so its loss lacks the weights of the tree: use `TreeSFTTrainer` in place of "
            "`SFTTrainer`, and set `use_liger_kernel=False`."
        )
    output.loss = weighted_token_loss(
        output.logits, supervised.labels, supervised.weights, kwargs.get("num_items_in_batch")
    )
    return output


def _tree_aware_loss(
    default: Callable, logits: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    context = active_tree()
    if context is None or context.supervised is None:
        return default(logits, labels, *args, **kwargs)
    supervised = context.supervised
    context.loss = weighted_token_loss(logits, supervised.labels, supervised.weights, kwargs.get("num_items_in_batch"))
    return context.loss


TREE = Kind("tree", IMPLEMENTATION, ATTN_BACKENDS, "prepare_model", "unprepare_model", _enter, _leave)
