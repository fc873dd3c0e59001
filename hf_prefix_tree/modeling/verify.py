# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Self-verification: a prepared model runs a small forest and the same branches one by one, and must agree with
itself.

The forest has a fork, a strict prefix, a second tree and one path longer than the smallest sliding window and than
every window that only the code of the model reads. Three numbers are compared, each the largest over the checked
tokens of the root mean square over the vocabulary: the tree's error against the branches; the spread of the model (a
branch alone against the same branch right-padded); and, as a control that must be large, the error of a plain causal
run over the same packed sequence. Four short forwards without gradients.

Code that is from no known package may mix tokens over distances that no short forest has. A run whose
attention mixes nothing shows whether it does.
"""

from __future__ import annotations

import inspect
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.loss.loss_utils import ForCausalLMLoss

from hf_prefix_tree.data.images import fold_images
from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.attention.implementations import (
    FALLBACK_HINT,
    IMPLEMENTATION,
    default_implementation,
    uses_attention_interface,
)
from hf_prefix_tree.modeling.batch import BLOCK_SIZE, PREDECESSOR, concatenate_trees
from hf_prefix_tree.modeling.checks import checked_length, position_limit
from hf_prefix_tree.modeling.positions import image_model
from hf_prefix_tree.modeling.recurrent.hooks import has_convolution
from hf_prefix_tree.tree.prefix_tree import Branch, PrefixTree, fold

logger = logging.getLogger(__name__)

Images = Mapping[str, torch.Tensor]  # inputs of the model beside text
CHECKED_TOKENS = 6  # the last ones of each branch: what a fork, a window or a neighbour would disturb
SECOND_TREE = 12  # its tokens; the control is of more than them
FAR = 1024  # tokens of a sequence that unknown code is tested on
_VALUES = "prefix_tree_values"  # the attention that mixes nothing
# Error tolerance per dtype, relative to the logits: a few units of the dtype over some tens of layers.
ROUNDING = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 5e-2}


def is_materialized(model: PreTrainedModel) -> bool:
    """Whether every parameter is here in full: not on the meta device, not sharded by FSDP or ZeRO-3."""
    return not any(
        parameter.is_meta
        or hasattr(parameter, "ds_id")
        or isinstance(parameter.data, torch.distributed.tensor.DTensor)
        for parameter in model.parameters()
    )


def verify_tree_forward(model: PreTrainedModel, forward: Callable, unknown: Sequence[str] = ()) -> None:
    """
    Compares the tree path of a prepared model with independent runs of the branches.

    Args:
        model (`PreTrainedModel`): The prepared causal LM; its training flags, buffers and random state are restored.
        forward (`Callable`): The function to call: `model` itself or its wrapper under FSDP or DDP.
        unknown (`Sequence[str]`, *optional*): Functions that the model runs and that are from no known package. What
            they do to tokens far apart is checked as well.

    Raises:
        `ValueError`: if the tree path does not give the branches' logits.
    """
    config = model.config.get_text_config()
    longest = checked_length(config)
    if unknown:
        mixes_by_itself = not uses_attention_interface(config.__class__) or any(map(has_convolution, model.modules()))
        if not mixes_by_itself:
            _refuse_bypass(model, forward, unknown)
        longest = min(max(longest, FAR), position_limit(config))
    _verify(model, forward, make_forest(model, longest, with_late_fork=bool(unknown)))


def _refuse_bypass(model: PreTrainedModel, forward: Callable, unknown: Sequence[str]) -> None:
    """Raises where a token's logits depend on earlier tokens although attention mixes none."""
    length = min(FAR, position_limit(model.config.get_text_config()))
    ids = np.random.default_rng(0).integers(0, _vocab_size(model), size=(2, length))
    ids[1, length // 2 :] = ids[0, length // 2 :]
    keep = torch.arange(length // 2, length)
    with undisturbed(model), torch.no_grad(), coarsest_dtype(model) as dtypes:
        branches = (CheckedBranch(x, keep, {}) for x in torch.from_numpy(ids)[:, None])
        first, second = (plain_logits(model, forward, x, attention=_VALUES) for x in branches)
    error, scale = distance(first, second), distance(first, torch.zeros_like(first))
    if not error <= rounding_of({first.dtype, *dtypes}) * scale / 10:
        names = ", ".join(dict.fromkeys(unknown))
        raise ValueError(
            f"{type(model).__name__} lets tokens depend on earlier ones around Transformers' attention interface "
            f"(error {error:.1e} of {scale:.1e}), in code that is not of Transformers and cannot follow a tree: "
            f"{names}. Have it call the function of `ALL_ATTENTION_FUNCTIONS`, or train on unfolded branches with a "
            "stock trainer."
        )


def _attend_to_itself(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """An attention that mixes nothing."""
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_VALUES, _attend_to_itself)


def verify_images(model: PreTrainedModel, forward: Callable) -> str | None:
    """
    The same comparison with images in a shared prefix and in a single branch.

    Args:
        model (`PreTrainedModel`): The prepared causal LM.
        forward (`Callable`): The function to call: `model` itself or its wrapper under FSDP or DDP.

    Returns:
        `str`, *optional*: Why the model's images are not served on trees; `None` where they are. Text is.
    """
    if image_model(model) is None:
        return "of this model, trees train the text only (no multimodal rotary positions that a tree could place)."
    reasons = []
    for flat in (True, False):  # models take patches as vectors or as pictures
        try:
            _verify(model, forward, _forest_with_images(model, flat))
            return None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            reasons.append(f"self-verification with images did not pass ({type(error).__name__}: {error}).")
    return reasons[0]


def verify_loss(model: PreTrainedModel, forward: Callable) -> str | None:
    """
    Compares the loss that the model's forward returns for a branch with the cross-entropy of its logits.

    Args:
        model (`PreTrainedModel`): The prepared causal LM.
        forward (`Callable`): The function to call: `model` itself or its wrapper under FSDP or DDP.

    Returns:
        `str`, *optional*: Why the weighted cross-entropy of a tree cannot take the place of this loss; `None` where it
        can. Log-probs and logits can be had in any case.
    """
    ids = make_forest(model, SECOND_TREE + 1).branches[-1].ids.to(model.device)
    labels = ids.clone()
    labels[:, : SECOND_TREE // 3] = IGNORE_INDEX
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "use_cache": False}
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        kwargs["output_router_logits"] = False  # the router's loss comes on top of the weighted one
    # the loss function itself is checked at each call, since it may change; here it may have been deleted
    vars(model).setdefault("_loss_function", model.loss_function)
    stock_loss = changed([(vars(model), "_loss_function", ForCausalLMLoss)])
    with undisturbed(model), torch.no_grad(), _other_attention(model, None), stock_loss:
        for part in [x for x in model.modules() if isinstance(x, PreTrainedModel)]:
            part.training = True  # terms of the training loss; the layers stay as they are for evaluation
        output = forward(**kwargs)
    if output.logits is None or output.loss is None:
        return None  # a fused head: calls on trees see that they lack a loss
    logits, loss = output.logits[0].float(), output.loss.float()
    cross_entropy = torch.nn.functional.cross_entropy
    # decoders of encoder-decoder models take labels that the data shifted
    expected = torch.stack([cross_entropy(logits[:-1], labels[0, 1:]), cross_entropy(logits, labels[0])])
    rounding = 1e-5 if output.loss.dtype in (torch.float32, torch.float64) else ROUNDING[output.loss.dtype]
    if torch.isclose(expected, loss, rtol=rounding, atol=rounding).any():
        return None
    return (
        f"{type(model).__name__} returns the loss {loss.item():.6g} where the cross-entropy of its logits is "
        f"{expected[0].item():.6g}: it has another term, `z_loss_coefficient` say, which the weighted loss of a tree "
        f"would drop or weigh differently. Turn that term off. {FALLBACK_HINT}"
    )


class CheckedBranch(NamedTuple):
    """A branch by itself, and which of its logits are compared."""

    ids: torch.Tensor  # [1, tokens]
    keep: torch.Tensor  # [checked tokens]: where they are predicted
    images: Images


class Forest:
    """
    The input of a comparison, as a packed sequence and branch by branch. Labels are the last tokens of each branch.

    Args:
        trees (`list[PrefixTree]`): The trees.
        images (`dict[str, torch.Tensor]`, *optional*): Those of the packed sequence.
        branch_images (`list[dict[str, torch.Tensor]]`, *optional*): Those of each branch.
    """

    def __init__(
        self, trees: list[PrefixTree], images: Images | None = None, branch_images: Sequence[Images] = ()
    ) -> None:
        # two blocks at least: the kernels that will train are the ones to check
        batch = concatenate_trees(trees, pad_token_id=0, pad_to_multiple_of=2 * BLOCK_SIZE)
        *starts, self.tokens = itertools.accumulate(map(len, trees), initial=0)
        paths = [path + start for tree, start in zip(trees, starts, strict=True) for path in tree.paths()]
        checked = np.concatenate([path[-CHECKED_TOKENS:] for path in paths])
        where, chosen = map(torch.from_numpy, np.unique(checked, return_inverse=True))
        ids, self.images = batch["input_ids"], images or {}
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[0, where] = ids[0, where]
        self.batch = {**batch, "labels": labels, **self.images}
        # of the checked tokens, branch by branch: the token before, and their number among the supervised ones
        self.before = batch["prefix_tree"][0, PREDECESSOR, checked].long()
        self.chosen = chosen.split([len(path[-CHECKED_TOKENS:]) for path in paths])
        self.branches = [
            CheckedBranch(ids[:, path], torch.arange(len(path))[-CHECKED_TOKENS - 1 : -1], own)
            for path, own in zip(paths, branch_images or [{}] * len(paths), strict=True)
        ]


def _verify(model: PreTrainedModel, forward: Callable, forest: Forest) -> None:
    # A plain run has a position for each token, and a learned table may end before the packed sequence: then
    # its last tokens.
    limit, tokens = position_limit(model.config.get_text_config()), forest.tokens
    first = max(tokens - limit, 0)
    seen = forest.before >= first
    with undisturbed(model), torch.no_grad(), coarsest_dtype(model) as dtypes:
        ids, keep = forest.batch["input_ids"][:, first:tokens], forest.before[seen] - first
        causal = plain_logits(model, forward, CheckedBranch(ids, keep, forest.images))
        logits = tree_logits(model, forward, forest.batch)[torch.cat(forest.chosen)]
        alone = torch.cat([plain_logits(model, forward, branch) for branch in forest.branches])
        padded = torch.cat(
            [plain_logits(model, forward, branch, min(5, limit - branch.ids.shape[1])) for branch in forest.branches]
        )
    error, control = distance(logits, alone), distance(causal, alone[seen])
    spread, scale = distance(padded, alone), distance(alone, torch.zeros_like(alone))
    numbers = f"error {error:.1e}, spread {spread:.1e}, causal control {control:.1e}, logits {scale:.1e}"
    logger.info("Tree path of %s on %s: %s.", type(model).__name__, model.device.type, numbers)
    rounding = rounding_of({logits.dtype, *dtypes}) * scale  # autocast computes in 16 bits and may return float32
    if rounding <= ROUNDING[torch.float32] * scale and spread > 4 * rounding:
        raise ValueError(
            f"{type(model).__name__} gives a branch other logits when it is padded on the right ({numbers}): its "
            f"results depend on more than the tokens of the branch. {FALLBACK_HINT}"
        )
    rounding = max(4 * spread, rounding)
    if not error <= rounding:  # also where the error is not a number
        raise ValueError(
            f"{type(model).__name__} does not give the same logits on a prefix tree as on its branches ({numbers}): "
            f"a layer carries information that the tree mask and path positions do not control. {FALLBACK_HINT}"
        )
    if control < 4 * error:
        logger.warning(
            "The self-check of %s cannot tell a tree mask from a causal one (%s): these weights hardly attend.",
            type(model).__name__,
            numbers,
        )


def rounding_of(dtypes: set[torch.dtype]) -> float:
    """The error tolerance of the coarsest of these dtypes, relative to the logits."""
    return max(ROUNDING.get(dtype, 0.0) for dtype in dtypes)


def tree_logits(model: PreTrainedModel, forward: Callable, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    try:
        logits = forward(**{name: x.to(model.device) for name, x in batch.items()}).logits
    except (ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} runs its branches but not a prefix tree ({type(error).__name__}: {error}). "
            f"{FALLBACK_HINT}"
        ) from error
    supervised = int((batch["labels"] != IGNORE_INDEX).sum())
    if logits.shape[:2] != (1, supervised):
        raise ValueError(
            f"{type(model).__name__} gives logits of shape {tuple(logits.shape)} for {supervised} supervised tokens: "
            f"its head does not take what its backbone returns. {FALLBACK_HINT}"
        )
    return logits[0]


def make_forest(model: PreTrainedModel, longest: int, with_late_fork: bool = False) -> Forest:
    """With a short branch, if asked for, far from its prefix in the packed sequence and near to it on the path."""
    config = model.config.get_text_config()
    if longest <= SECOND_TREE:
        raise ValueError(
            f"{type(model).__name__} has {longest} positions, and the self-check needs more than {SECOND_TREE}. "
            f"{FALLBACK_HINT}"
        )
    pad, vocab_size = getattr(config, "pad_token_id", None), _vocab_size(model)
    ids = np.random.default_rng(0).integers(0, vocab_size, size=4 * longest)
    ids[ids == pad] = (pad or 0) + 1 if (pad or 0) + 1 < vocab_size else 0  # some models number tokens past padding
    trunk, fork = ids[:longest], 2 * longest // 3
    sibling = np.concatenate([trunk[:fork], ids[longest : longest + longest - fork]])
    paths = [[trunk, sibling, trunk[: longest - 4]], [ids[2 * longest : 2 * longest + SECOND_TREE]]]
    if with_late_fork:
        paths[0].append(np.concatenate([trunk[: longest // 3], ids[3 * longest :][: min(SECOND_TREE, longest // 2)]]))
    return Forest([fold([Branch(path, np.ones(len(path))) for path in tree]) for tree in paths])


def _forest_with_images(model: PreTrainedModel, flat: bool) -> Forest:
    config: Any = model.config
    vision, token = config.vision_config, config.image_token_id
    merge = getattr(vision, "spatial_merge_size", 1)
    channels: Any = getattr(vision, "in_channels", None) or getattr(vision, "num_channels", 3)
    shape = [channels * getattr(vision, "temporal_patch_size", 1), vision.patch_size, vision.patch_size]
    shape = [int(np.prod(shape))] if flat else shape
    special = [x for name, x in config.to_dict().items() if name.endswith(("_id", "_ids")) and isinstance(x, int)]
    rng = np.random.default_rng(0)
    text = np.setdiff1d(np.arange(min(_vocab_size(model), 10_000)), [token, *special])
    trunk, first, second, last = (rng.choice(text, size=count) for count in (5, 7, 6, 9))
    grids = torch.tensor([[1, 2 * merge, 3 * merge], [1, 4 * merge, 2 * merge]])
    generator = torch.Generator().manual_seed(0)
    patches = [torch.randn([int(grid.prod()), *shape], generator=generator) for grid in grids]
    shared, single = (np.full(int(grid.prod()) // merge**2, token) for grid in grids)
    start = [trunk[:3], shared, trunk[3:]]

    def branch(pieces: list[np.ndarray], images: list[int]) -> dict[str, Any]:
        ids = np.concatenate(pieces)
        text = {"input_ids": ids, "weights": np.ones(len(ids))}
        pixels = torch.cat([patches[i] for i in images]) if images else None
        return {**text, "pixel_values": pixels, "image_grid_thw": grids[images]} if images else text

    branches = [
        branch([*start, first, single, second], [0, 1]),
        branch([*start, last], [0]),
        branch([*start, first[:6]], [0]),
        branch([last], []),
    ]
    tree, images = fold_images(branches, image_token_id=token)
    branch_images = [{name: x for name, x in branch.items() if isinstance(x, torch.Tensor)} for branch in branches]
    return Forest([tree], images, branch_images)


def _vocab_size(model: PreTrainedModel) -> int:
    # Input embeddings may have entries that the head lacks (images, prompts), and the head some that are no tokens.
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    weights = [table.weight for table in tables if getattr(table, "weight", None) is not None]
    return min(getattr(weight, "ds_shape", weight.shape)[0] for weight in weights)  # ZeRO-3 leaves them empty


def plain_logits(
    model: PreTrainedModel, forward: Callable, branch: CheckedBranch, padding: int = 0, attention: str | None = None
) -> torch.Tensor:
    """The checked logits of a branch alone, or with so many tokens of padding after it."""
    ids, keep, images = branch
    ids, mask = (torch.nn.functional.pad(x, (0, padding)) for x in (ids, torch.ones_like(ids)))
    inputs = {"input_ids": ids, "attention_mask": mask, **images}
    if images:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).long()
    if "logits_to_keep" in inspect.signature(type(model).forward).parameters:
        inputs["logits_to_keep"] = keep
    with _other_attention(model, attention):
        logits = forward(**{name: x.to(model.device) for name, x in inputs.items()}, use_cache=False).logits[0]
    return logits if len(logits) == len(keep) else logits[keep]  # a patched forward may keep all


def _other_attention(model: PreTrainedModel, name: str | None) -> AbstractContextManager[None]:
    """The model under another attention by name, or its default: some leave things out under ours."""
    parts = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    configs = [config for config in parts if config._attn_implementation == IMPLEMENTATION]
    return changed(
        [(vars(x), "_attn_implementation_internal", name or default_implementation(x.__class__)) for x in configs]
    )


@contextmanager
def changed(entries: Sequence[tuple[dict[Any, Any], Any, Any]]) -> Iterator[None]:
    """Entries of dicts, attributes among them, with other values for the time of the block."""
    before = [(table, key, table[key]) for table, key, _ in entries]
    try:
        for table, key, value in entries:
            table[key] = value
        yield
    finally:
        for table, key, value in before:
            table[key] = value


@contextmanager
def coarsest_dtype(model: torch.nn.Module) -> Iterator[set[torch.dtype]]:
    """The dtypes in which the linear layers answer."""
    dtypes: set[torch.dtype] = set()

    def note(module: torch.nn.Module, args: tuple, output: Any) -> None:
        if isinstance(output, torch.Tensor):  # a router may return a tuple
            dtypes.add(output.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                hooks.enter_context(module.register_forward_hook(note))
        yield dtypes


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    return (left.double() - right.double()).square().mean(dim=-1).sqrt().max().item()


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    flags = [(vars(module), "training", module.training) for module in model.modules()]
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    # Vision-language models keep the offset that images give to the positions of the next call.
    parts = [vars(part) for part in model.modules() if isinstance(part, PreTrainedModel)]
    kept = [{name: x for name, x in part.items() if x is None or isinstance(x, torch.Tensor)} for part in parts]
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with changed(flags), torch.random.fork_rng(devices=devices):
            model.eval()
            yield
    finally:
        for buffer, value in buffers.items():
            buffer.copy_(value)
        for part, attributes in zip(parts, kept, strict=True):
            part.update(attributes)
