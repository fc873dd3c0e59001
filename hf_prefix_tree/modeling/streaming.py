# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A packed sequence of trees in sections, one call of the model each: memory of one path, no token computed twice.

A section is a stretch of the layout. In preorder, all tokens before it that its tokens see lie on one path: that of
its first token. So a section reads the keys and values of this path, which earlier sections left behind, and its
backward adds to their gradients in float32. A section is either *closed*, whole subtrees, or *open*, a chain of tokens
whose subtrees are too large. The backward of an open section runs after those of all sections that read it, and
takes their gradients in; that of a closed one follows its forward. The sections that wait are those of one path.

[`sections_of`] cuts a batch, [`stream`] runs it. The attention of a call extends its keys and values by
[`Section.extend`], one autograd function: recomputation under checkpointing, either kind, reads the same path and
does not add twice, as a backward runs once.

A label whose token begins another section is that of a token of padding here: it is predicted where the hidden state
of its predecessor is.

Cost: every token once, full passes; O(N) to cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hf_prefix_tree.data.supervision import IGNORE_INDEX
from hf_prefix_tree.modeling.batch import BLOCK_SIZE, DEPTH, PREDECESSOR, SUBTREE_END, UNPREPARED_SENTINEL

Name = tuple[int, ...]  # of a section: the number among its siblings of each section that it reads, and its own
_HINT = "Use `overflow='split'`."


def plan(subtree_end: npt.NDArray[np.int32], max_tokens: int) -> list[tuple[int, int, bool]]:
    """
    Cuts a layout into sections of at most `max_tokens` tokens.

    Args:
        subtree_end (`np.ndarray` of shape `[N]`): As in the batch contract, without padding.
        max_tokens (`int`): Most tokens of a section.

    Returns:
        `list` of `tuple`: first token, end, and whether the section is open.

    Example:

    ```python
    >>> plan(np.array([9, 9, 5, 5, 5, 9, 7, 9, 9]), max_tokens=3)  # a trunk of 2; children of 3 tokens, and of 4
    [(0, 2, True), (2, 5, False), (5, 6, True), (6, 9, False)]

    ```
    """
    sections = []
    ends, total, start = subtree_end.tolist(), len(subtree_end), 0
    (fits,) = np.nonzero(subtree_end - np.arange(total) <= max_tokens)  # tokens whose subtree is no larger
    while start < total:
        end = ends[start]
        is_open = end > start + max_tokens
        if is_open:  # a token whose subtree is larger has a child, which follows it
            end = min(start + max_tokens, int(fits[np.searchsorted(fits, start)]))
        else:
            while end < total and ends[end] <= start + max_tokens:
                end = ends[end]
        sections.append((start, end, is_open))
        start = end
    return sections or [(0, 0, False)]


class Section:
    """
    A section of a packed sequence.

    Args:
        name (`tuple` of `int`): That of the last section on its path, and its number among those that follow it.
        inputs (`dict[str, torch.Tensor]`): Its part of the batch, N tokens.
        is_open (`bool`): Whether later sections read its keys and values.
        path (`torch.Tensor` of shape `(1, 2, P)`, int32): Its path, see
            [`~hf_prefix_tree.modeling.attention.masks.causal.dense_mask`]; P may be 0.
        store ([`PathStore`]): The keys and values of the path.
    """

    def __init__(self, name: Name, inputs: dict[str, Tensor], is_open: bool, path: Tensor, store: PathStore) -> None:
        self.name, self.inputs, self.is_open, self.path, self.store = name, inputs, is_open, path, store
        self.start, self.length = path.shape[2], inputs["input_ids"].shape[1]
        self.is_alone = not is_open and not self.start
        self.met: set[torch.nn.Module] | None = set()  # the layers of the call that runs, `None` after it

    @torch.compiler.disable
    def extend(self, layer: torch.nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """
        Keys and values of the path before those of the section, which stay behind for later ones.

        Args:
            layer (`torch.nn.Module`): The layer of attention.
            key (`torch.Tensor` of shape `(1, kv_heads, N, head_dim)`): Keys of the section.
            value (`torch.Tensor` of shape `(1, kv_heads, N, value_dim)`): Its values.

        Returns:
            `tuple`: keys and values of `P + N` tokens.
        """
        if self.met is not None:  # not in a recomputation
            if layer in self.met:
                raise ValueError(
                    f"{type(layer).__name__} attends twice in a call, which cannot be streamed: the keys of a path "
                    f"are kept for each layer once. {_HINT}"
                )
            self.met.add(layer)
        kept = self.store.layer(layer, (key, value))
        extended = _Extend.apply(key, value, kept, self)
        if self.store.on_host:
            self.store.fetch_ahead(kept, self)
        return extended

    def check(self) -> None:
        """Raises `RuntimeError` where the backward of the section left a gradient of later ones behind."""
        if self.is_open and any(
            filled > self.start for layer in self.store.layers.values() for filled in layer.filled
        ):
            raise RuntimeError(
                "The backward of a section did not reach all layers whose keys and values later ones read: the "
                f"gradients would be wrong. {_HINT}"
            )


class _Extend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, layer: _Layer, section: Section) -> tuple[Tensor, Tensor]:
        ctx.layer, ctx.section = layer, section
        return layer.extended(0, key, section), layer.extended(1, value, section)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.section.store.wait(for_fetched=False)
        return *(ctx.layer.handed_over(index, grad, ctx.section) for index, grad in enumerate(grads)), None, None


class PathStore:
    """
    Keys and values of one path, by layer, and the sums of their gradients.

    What the host keeps is copied while the GPU computes: what the next layer reads is fetched during this one. The
    tensors of a copy are allocated by the stream that computes, so it waits for the end of the copy before it reads
    what was fetched, and before it frees either of them.

    Args:
        room (`int`): Tokens of the longest path, its last section included.
        open_room (`int`): The same without closed sections, which no other reads.
        on_host (`bool`): Whether they are kept in the memory of the host.
    """

    def __init__(self, room: int, open_room: int, on_host: bool) -> None:
        self.room, self.open_room, self.on_host = room, open_room, on_host
        self.layers: dict[torch.nn.Module, _Layer] = {}
        self.leaving: list[tuple[_Layer, Tensor, torch.cuda.Event | None]] = []

    def layer(self, module: torch.nn.Module, like: Sequence[Tensor]) -> _Layer:
        """The tensors of a layer of attention, made at its first call."""
        if module not in self.layers:
            self.layers[module] = _Layer(self, like)
        return self.layers[module]

    def empty(self, tokens: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for so many tokens, `[tokens, heads, size]`: a stretch of tokens has no gaps."""
        where: Any = {"device": "cpu", "pin_memory": like.is_cuda} if self.on_host else {"device": like.device}
        return torch.empty((tokens, like.shape[1], like.shape[3]), dtype=dtype, **where)

    def fetch_ahead(self, layer: _Layer, section: Section) -> None:
        """Begins to fetch what comes next: sums for the backward of a recomputed layer, and the next layer's path."""
        layers, is_forward = list(self.layers.values()), section.met is not None
        following = layers.index(layer) + (1 if is_forward else -1)
        for index in () if is_forward else (2, 3):
            layer.fetch(index, section)
        for index in (0, 1) if 0 <= following < len(layers) else ():
            layers[following].fetch(index, section)

    def wait(self, for_fetched: bool = True) -> None:
        """Waits for the copies to the host, and for those from it that nobody read."""
        for layer, _, end in self.leaving:
            layer.wait(end)
        self.leaving.clear()
        for layer in self.layers.values() if for_fetched else ():
            for _, end in layer.fetched.values():
                layer.wait(end)
            layer.fetched.clear()


class _Layer:
    """Keys (index 0) and values (1) of the path in one layer, and their gradients."""

    def __init__(self, store: PathStore, like: Sequence[Tensor]) -> None:
        self.on_host, self.device = store.on_host, like[0].device  # not the store, which would never be freed at once
        tokens = store.open_room if self.on_host else store.room
        self.kept = [store.empty(tokens, x, x.dtype) for x in like]
        self.sums: list[Tensor | None] = [None, None]
        self.filled = [0, 0]  # tokens from the root whose sums hold something
        self.fetched: dict[int, tuple[Tensor, torch.cuda.Event | None]] = {}  # 2 and 3 are the sums
        self.copies = torch.cuda.Stream(self.device) if self.on_host and self.device.type == "cuda" else None

    def _copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Begins a copy that follows what has been computed so far, and earlier copies. Returns its end."""
        if self.copies is None:
            target.copy_(source)
            return None
        self.copies.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.copies):
            target.copy_(source, non_blocking=True)
        return self.copies.record_event()

    def wait(self, end: torch.cuda.Event | None) -> None:
        if end is not None:
            torch.cuda.current_stream(self.device).wait_event(end)

    def fetch(self, index: int, section: Section) -> None:
        """Begins to fetch what a section reads: keys (0) and values (1) of its path, or all that is in their sums."""
        source, end = (*self.kept, *self.sums)[index], (section.start, section.start, *self.filled)[index]
        if source is not None and index not in self.fetched:
            target = torch.empty_like(source[:end], device=self.device)
            self.fetched[index] = target, self._copy(target, source[:end])

    def take(self, index: int, section: Section) -> Tensor:
        """What [`fetch`] brings, begun before or now."""
        self.fetch(index, section)
        tensor, end = self.fetched.pop(index)
        self.wait(end)
        return tensor

    def extended(self, index: int, tensor: Tensor, section: Section) -> Tensor:
        """`tensor`, `[1, heads, N, size]`, after its path."""
        start, end = section.start, section.start + section.length
        kept = self.kept[index].data  # with a version of its own: what an earlier section saved for its backward stays
        tokens = tensor.detach()[0].transpose(0, 1)
        if section.is_open or not self.on_host:
            kept[start:end].copy_(tokens, non_blocking=True)
        if not self.on_host:
            return kept[:end][None].transpose(1, 2)
        return torch.cat([self.take(index, section), tokens])[None].transpose(1, 2)

    def handed_over(self, index: int, grad: Tensor, section: Section) -> Tensor:
        """Adds the gradient of the path to the sums; returns the section's, with what later sections added to it."""
        start, filled = section.start, self.filled[index]
        tokens = grad[0].transpose(0, 1)
        if (sums := self.sums[index]) is None:
            dtype = torch.promote_types(grad.dtype, torch.float32)
            sums = self.sums[index] = section.store.empty(section.store.open_room, grad, dtype)
        held = self.take(2 + index, section) if self.on_host else sums
        own = tokens[start:]
        if section.is_open and filled > start:
            own = own + held[start:filled]
        common = min(filled, start)
        total = held[:common].add_(tokens[:common])
        if self.on_host:
            section.store.leaving.append((self, total, self._copy(sums[:common], total)))
        sums[common:start].copy_(tokens[common:start], non_blocking=True)
        self.filled[index] = start
        return own.to(grad.dtype)[None].transpose(1, 2)


def sections_of(
    batch: Mapping[str, Tensor], max_tokens: int, *, on_host: bool = False, multiple: int = BLOCK_SIZE
) -> list[Section]:
    """
    The sections of a packed sequence, in the order of their forwards.

    Args:
        batch (`Mapping[str, torch.Tensor]`): A batch of the contract, of one packed sequence.
        max_tokens (`int`): Most tokens of a section.
        on_host (`bool`, *optional*, defaults to `False`): Whether keys, values and gradients are kept by the host.
        multiple (`int`, *optional*, defaults to `128`): Sections are padded to a multiple of it.

    Raises:
        `ValueError`: For a batch of several packed sequences, or with images.
    """
    if len(batch["input_ids"]) != 1:
        raise ValueError(f"A batch of {len(batch['input_ids'])} packed sequences cannot be streamed: collate one.")
    if batch.get("pixel_values") is not None:
        raise ValueError("Images (`pixel_values`) cannot be streamed: use `overflow='split'`.")
    arrays = {name: batch[name].cpu().numpy()[0] for name in (*_CUT, "prefix_tree")}
    tokens = int(arrays["attention_mask"].sum())
    subtree_end, depth, predecessor = arrays["prefix_tree"][:, :tokens]
    planned = plan(subtree_end, max_tokens)
    starts = np.array([start for start, *_ in planned])
    supervised = np.flatnonzero((arrays["labels"][:tokens] != IGNORE_INDEX) & (predecessor >= 0))
    predicted_in = np.searchsorted(starts, predecessor[supervised], side="right") - 1
    moved = predicted_in != np.searchsorted(starts, supervised, side="right") - 1
    # Open sections whose subtrees go on: name, end of the first token's subtree, and for each of its tokens, padding
    # included, the end of its subtree and its depth.
    waiting: list[tuple[Name, int, npt.NDArray[np.int32]]] = []
    children: dict[Name, int] = {}
    cut = []
    for index, (start, end, is_open) in enumerate(planned):
        while waiting and waiting[-1][1] <= start:
            waiting.pop()
        parent = waiting[-1][0] if waiting else ()
        name = (*parent, children.setdefault(parent, 0))
        children[parent] += 1
        inputs = _cut(arrays, start, end, supervised[moved & (predicted_in == index)], multiple)
        path = np.concatenate([np.zeros((2, 0), dtype=np.int32), *(part for *_, part in waiting)], axis=1)
        path[SUBTREE_END] = np.clip(path[SUBTREE_END] - start, 0, end - start)
        cut.append((name, inputs, is_open, torch.from_numpy(path)[None]))
        if is_open:
            part = np.zeros((2, inputs["input_ids"].shape[1]), dtype=np.int32)
            part[:, : end - start] = subtree_end[start:end], depth[start:end]
            waiting.append((name, int(subtree_end[start]), part))
    ends = [(path.shape[2] + inputs["input_ids"].shape[1], is_open) for _, inputs, is_open, path in cut]
    store = PathStore(max(ends)[0], max((end for end, is_open in ends if is_open), default=0), on_host)
    return [Section(*section, store) for section in cut]


# What a token of padding has.
_CUT = {"input_ids": 0, "labels": IGNORE_INDEX, "attention_mask": 0, "loss_weights": 0, "token_branches": 0}


def _cut(
    arrays: Mapping[str, npt.NDArray[Any]], start: int, end: int, moved: npt.NDArray[np.int64], multiple: int
) -> dict[str, Tensor]:
    """Tokens `start` to `end` as a packed sequence; labels of the tokens `moved` are those of padding after them."""
    tokens = end - start
    length = max(1, -(-(tokens + len(moved)) // multiple)) * multiple
    cut: dict[str, npt.NDArray[Any]] = {}
    for name, filler in _CUT.items():
        cut[name] = np.full(length, filler, dtype=np.int64)
        cut[name][:tokens] = arrays[name][start:end]
    cut["input_ids"][tokens:] = arrays["input_ids"][start]
    labelled = slice(tokens, tokens + len(moved))
    for name in ("labels", "loss_weights"):
        cut[name][labelled] = arrays[name][moved]
    subtree_end, depth, predecessor = arrays["prefix_tree"]
    tree = np.zeros((3, length), dtype=np.int32)
    tree[SUBTREE_END] = np.arange(1, length + 1)
    tree[SUBTREE_END, :tokens] = np.minimum(subtree_end[start:end], end) - start
    tree[DEPTH, :tokens] = depth[start:end]
    tree[PREDECESSOR, :tokens] = np.maximum(predecessor[start:end] - start, -1)
    tree[PREDECESSOR, tokens:] = -1
    tree[PREDECESSOR, labelled] = predecessor[moved] - start
    cut |= {"position_ids": tree[DEPTH].astype(np.int64), "prefix_tree": tree}
    cut[UNPREPARED_SENTINEL] = np.zeros(length, dtype=np.int64)
    return {name: torch.from_numpy(array)[None] for name, array in cut.items()}


def kept_on_host(*lengths: int) -> torch.autograd.graph.saved_tensors_hooks:
    """
    While active, activations that autograd saves are kept by the host. Nothing waits for the copies: they are made in
    the order of the device's stream.

    Args:
        lengths (`int`): Tokens of the call, and with those of its path, by which activations are told from weights;
            without any nothing is moved.
    """

    def pack(saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if saved.dim() < 3 or set(saved.shape).isdisjoint(lengths) or not saved.is_floating_point():
            return saved
        kept = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
        return saved.device, kept.copy_(saved, non_blocking=True)

    def unpack(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed[1].to(packed[0], non_blocking=True)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


_entered: ContextVar[Section | None] = ContextVar("hf_prefix_tree_section", default=None)


def take_section() -> Section | None:
    """The section whose call begins, for the first that asks."""
    section = _entered.get()
    _entered.set(None)
    return section


@contextmanager
def _entering(section: Section | None) -> Iterator[None]:
    token = _entered.set(None if section is None or section.is_alone else section)
    try:
        yield
    finally:
        _entered.reset(token)
        if section is not None:
            section.met = None
            section.store.wait()


def stream(
    sections: Sequence[Section],
    names: Iterable[Name],
    forward: Callable[[Section | None], Tensor],
    backward: Callable[[Tensor], None] | None,
) -> None:
    """
    Runs the sections of a packed sequence, forward and backward. What waits is kept by the host where their keys and
    values are. A backward runs outside of the forward's autocast, which the caller may be inside of.

    Args:
        sections (`Sequence` of [`Section`]): The sections.
        names (`Iterable` of names): Theirs, or of several ranks together: where engines reduce gradients with every
            backward, all ranks must run forwards and backwards in the same order.
        forward (`Callable`): The loss of a section, `None` for one that other ranks have; one call of the model.
        backward (`Callable`, *optional*): The backward of such a loss.
    """
    by_name = {section.name: section for section in sections}
    store = sections[0].store
    waiting: list[tuple[Name, Tensor]] = []

    def close() -> None:
        name, loss = waiting.pop()
        if backward is None:
            return
        try:
            with torch.autocast(loss.device.type, enabled=False), kept_on_host() if store.on_host else nullcontext():
                backward(loss)
        finally:
            store.wait()
        if name in by_name:
            by_name[name].check()

    for name in sorted(names):
        while waiting and name[: len(waiting[-1][0])] != waiting[-1][0]:
            close()
        section = by_name.get(name)
        lengths = () if section is None else (section.length, section.start + section.length)
        with _entering(section), kept_on_host(*lengths) if store.on_host else nullcontext():
            waiting.append((name, forward(section)))
    while waiting:
        close()
