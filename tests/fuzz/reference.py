"""What a row means, in plain Python from the documentation: its branches, or `Refused`; and a tree as a dictionary."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tests.fuzz.inputs import Refused, Unspecified

Plain = tuple[list[int], list[float]]  # token ids, weights
DEEPEST = 100  # levels of a message


def check(condition: Any) -> None:
    if not condition:
        raise Refused


# --- Columns


def items_of(value: Any) -> list[Any]:
    """The entries of a flat list, tuple, array or tensor."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        check(value.ndim == 1)
        return value.tolist()
    check(isinstance(value, (list, tuple)))
    items = [item.item() if isinstance(item, (np.ndarray, torch.Tensor)) and not item.ndim else item for item in value]
    check(not any(isinstance(item, (list, tuple, np.ndarray, torch.Tensor)) for item in items))
    return items


def ints(value: Any, least: int = 0, most: int = 2**63 - 1) -> list[int]:
    items = items_of(value)
    check(all(type(item) is int and least <= item <= most for item in items))
    return items


def numbers(value: Any) -> list[float]:
    items = items_of(value)
    check(all(isinstance(item, (bool, int, float)) and item < 2**64 for item in items))
    check(all(math.isfinite(item) and item >= 0 for item in items))
    return [float(item) for item in items]


def zeros_and_ones(value: Any, count: int) -> list[int]:
    items = numbers(value)
    check(len(items) == count and all(item in (0, 1) for item in items))
    return [int(item) for item in items]


def sample(row: Any, weighted: bool = False, padded: bool = False) -> Plain:
    """The ids of one sequence, and 1 (or its weight) where a token is supervised."""
    check(isinstance(row, Mapping))
    given = {name: value for name, value in row.items() if value is not None}
    check("input_ids" in given)
    ids = ints(given["input_ids"])
    masks = []
    if "loss_mask" in given:
        masks.append(zeros_and_ones(given["loss_mask"], len(ids)))
    trl = [zeros_and_ones(given[n], len(ids)) for n in ("completion_mask", "assistant_masks") if n in given]
    if trl:
        masks.append([min(column) for column in zip(*trl, strict=True)] if ids else [])
    if "labels" in given:
        labels = ints(given["labels"], -100)
        check(len(labels) == len(ids))
        check(all(label in (-100, token) for label, token in zip(labels, ids, strict=True)))
        masks.append([int(label != -100) for label in labels])
    check(masks or weighted or not ids)
    check(all(mask == masks[0] for mask in masks))
    weights = [float(m) for m in masks[0]] if masks else [1.0] * len(ids)
    if "weights" in given:
        check(weighted)
        factors = numbers(given["weights"])
        check(len(factors) == len(ids))
        weights = [w * factor for w, factor in zip(weights, factors, strict=True)]
    attended = zeros_and_ones(given["attention_mask"], len(ids)) if "attention_mask" in given else [1] * len(ids)
    real = sum(attended)
    if "seq_lengths" in given:
        check(items_of(given["seq_lengths"]) == [len(ids)])
    if "position_ids" in given:
        positions = items_of(given["position_ids"])
        check(len(positions) == len(ids))
        check([p for p, a in zip(positions, attended, strict=True) if a] == list(range(real)))
    if padded:
        return ids, weights
    check(all(attended[:real]))
    return ids[:real], weights[:real]


# --- Rows of every kind


def branches_of(kind: str, row: Any, tokenizer: Any) -> list[Plain]:
    """The branches of a row, in order."""
    return [as_branch(ids, weights) for ids, weights in _KINDS[kind](row, tokenizer)]


def as_branch(ids: list[int], weights: list[float]) -> Plain:
    check(ids and len(ids) == len(weights))
    return ids, [0.0, *weights[1:]]


def rows_list(row: Any, name: str) -> list[Any]:
    check(row.get(name) is not None and isinstance(row[name], list))
    return row[name]


def _of_branches(row: Any, tokenizer: Any) -> list[Plain]:
    found = []
    for branch in rows_list(row, "branches"):
        check(
            isinstance(branch, Mapping) and branch.get("input_ids") is not None and branch.get("weights") is not None
        )
        found.append((ints(branch["input_ids"]), numbers(branch["weights"])))
    return found


def _of_rollouts(row: Any, tokenizer: Any) -> list[Plain]:
    check(row.get("prompt_ids") is not None)
    prompt = ints(row["prompt_ids"])
    found = [ints(completion) for completion in rows_list(row, "completions")]
    check(found and all(found))
    return [(prompt + ids, [0.0] * len(prompt) + [1.0] * len(ids)) for ids in found]


def _of_nodes(row: Any, tokenizer: Any) -> list[Plain]:
    tokens = []
    for node in rows_list(row, "nodes"):
        ids = ints(node.get("input_ids") if isinstance(node, Mapping) else node)
        weights = [1.0] * len(ids)
        if isinstance(node, Mapping) and node.get("weights") is not None:
            weights = numbers(node["weights"])
        check(len(weights) == len(ids))
        tokens.append((ids, weights))
    return along_leaves(rows_list(row, "parents"), tokens)


def along_leaves(parents: list[Any], tokens: list[Plain]) -> list[Plain]:
    parents = ints([-1 if p is None else p for p in parents], -1)
    check(parents and len(parents) == len(tokens))
    check(all(parent < node for node, parent in enumerate(parents)))
    found = []
    for node in range(len(parents)):
        if node not in parents:
            ids, weights, at = [], [], node
            while at >= 0:
                ids, weights, at = tokens[at][0] + ids, tokens[at][1] + weights, parents[at]
            found.append((ids, weights))
    return found


def _of_texts(row: Any, tokenizer: Any) -> list[Plain]:
    texts = rows_list(row, "texts")
    weights = [1.0] * len(texts) if row.get("weights") is None else numbers(row["weights"])
    check(len(weights) == len(texts))
    tokens = [tokens_of(text, tokenizer) for text in texts]
    weighted = [(ids, [weight] * len(ids)) for ids, weight in zip(tokens, weights, strict=True)]
    return along_leaves(rows_list(row, "parents"), weighted)


def tokens_of(text: Any, tokenizer: Any) -> list[int]:
    check(isinstance(text, str) and not any("\ud800" <= letter <= "\udfff" for letter in text))
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def _of_search(row: Any, tokenizer: Any) -> list[Plain]:
    check(isinstance(row.get("input"), str))
    prompt = row["input"] if row["input"][-1:].isspace() else row["input"] + "\n"
    kept: dict[tuple[int, str], bool] = {}
    for step in rows_list(row, "nodes"):
        check(isinstance(step, Mapping) and type(step.get("step")) is int and step["step"] >= 0)
        check(isinstance(step.get("text"), str) and type(step.get("kept")) is bool)
        tokens_of(step["text"], tokenizer)
        key = (step["step"], step["text"])
        kept[key] = kept.get(key, False) or step["kept"]
    before: dict[tuple[int, str], tuple[int, str] | None] = {}
    for number, text in kept:
        starts = [key for key in kept if key[0] == number - 1 and text.startswith(key[1])]
        check(starts or not number)
        before[number, text] = max(starts, key=lambda key: (kept[key], len(key[1]))) if number else None
    paths = []
    for key in [key for key, is_kept in kept.items() if is_kept]:
        path = [key]
        while (start := before[path[0]]) is not None:
            path.insert(0, start)
        paths.append(path)
    check(paths)
    found = []
    for path in sorted(paths, key=lambda path: path[-1][0]):
        if any(path == other[: len(path)] for other in paths if len(other) > len(path)):
            continue
        ids = tokens_of(prompt, tokenizer)
        weights = [0.0] * len(ids)
        seen = ""
        for number, text in path:
            new = tokens_of(text[len(seen) :], tokenizer)
            ids, weights, seen = ids + new, weights + [float(kept[number, text])] * len(new), text
        found.append((ids, weights))
    return found


def plain(value: Any, levels: int = DEEPEST) -> Any:
    """JSON data that a template can print."""
    check(levels >= 0)
    if isinstance(value, str):
        check(not any("\ud800" <= letter <= "\udfff" for letter in value))
    elif isinstance(value, Mapping):
        return {plain(key): plain(item, levels - 1) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        return [plain(item, levels - 1) for item in value]
    else:
        check(value is None or type(value) in (bool, int, float))
    return value


def chat(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str):
        try:
            messages = json.loads(messages)
        except (ValueError, RecursionError):
            raise Refused from None
    check(isinstance(messages, (list, tuple)) and messages)
    found = []
    for message in messages:
        check(isinstance(message, Mapping))
        given = {name: value for name, value in plain(message).items() if value is not None}
        check(isinstance(given.get("role"), str) and given["role"])
        check(isinstance(given.setdefault("content", ""), (str, list)))
        found.append(given)
    return found


def turns(messages: Any, tokenizer: Any, first: int = 0) -> list[Plain]:
    """The branches of a conversation under the template of `tests.support.byte_tokenizer`."""
    given = chat(messages)
    check(any(message["role"] == "assistant" for message in given[first:]))
    if any(isinstance(message["content"], list) for message in given):
        raise Unspecified
    ids: list[int] = []
    found = []
    for index, message in enumerate(given):
        parts = [f"<|im_start|>{message['role']}\n", f"{message['content']}<|im_end|>", "\n"]
        header, text, after = (tokens_of(part, tokenizer) for part in parts)
        if message["role"] == "assistant" and index >= first:
            found.append((ids + header + text + after, [0.0] * len(ids + header) + [1.0] * len(text) + [0.0]))
        ids = ids + header + text + after
    return found


def _of_conversations(row: Any, tokenizer: Any) -> list[Plain]:
    check(row.get("messages") is not None)
    return turns(row["messages"], tokenizer)


def conversations(row: Any) -> tuple[Any, list[Any]]:
    """The prompt of a row and its completions, all of one type."""
    name = "completions" if "completions" in row else "completion"
    check(row.get("prompt") is not None and row.get(name) is not None)
    prompt, given = plain(row["prompt"]), plain(row[name])
    check(name == "completion" or isinstance(given, list))
    texts = given if name == "completions" else [given]
    check(texts and {*map(type, texts), type(prompt)} in ({str}, {list}))
    return prompt, texts


def _of_completions(row: Any, tokenizer: Any) -> list[Plain]:
    prompt, texts = conversations(row)
    if isinstance(prompt, list):
        return [branch for text in texts for branch in turns([*prompt, *text], tokenizer, len(prompt))]
    found = []
    for text in texts:
        start, ids = tokens_of(prompt, tokenizer), tokens_of(text, tokenizer)
        ids = ids if text.endswith("<|im_end|>") else [*ids, tokenizer.eos_token_id]
        found.append((start + ids, [0.0] * len(start) + [1.0] * len(ids)))
    return found


_KINDS: dict[str, Any] = {
    "tokens": lambda row, tokenizer: [sample(row, weighted=True)],
    "branches": _of_branches,
    "rollouts": _of_rollouts,
    "nodes": _of_nodes,
    "texts": _of_texts,
    "search": _of_search,
    "conversation": _of_conversations,
    "completions": _of_completions,
}


def samples(kind: str, row: Any, tokenizer: Any) -> list[Plain]:
    """The sequences of a row for diffusion and EAGLE-3: each turn up to its end."""
    if kind == "tokens":
        return [sample(row)]
    found = branches_of(kind, row, tokenizer)
    ends = [max((at + 1 for at, weight in enumerate(weights) if weight), default=0) for _, weights in found]
    return [(ids[:end], weights[:end]) for (ids, weights), end in zip(found, ends, strict=True) if end]


# --- Trees


def folded(branches: list[Plain], weighting: str = "tree") -> Any:
    """A tree as a dictionary: for the tokens up to each one, its weight and how many branches supervise it."""
    sums: dict[tuple[int, ...], list[float]] = {}
    for ids, weights in branches:
        divisor = max(sum(map(bool, weights)), 1) if weighting == "branch_mean" else 1
        for at, weight in enumerate(weights):
            sums.setdefault(tuple(ids[: at + 1]), []).append(weight / divisor)
    tokens = {}
    for path, weights in sums.items():
        count = sum(map(bool, weights))
        divisor = {"tree": len(branches), "once": max(count, 1)}.get(weighting, 1)
        tokens[path] = (round(sum(weights) / divisor, 9), count)
    return tokens, len(branches), [ids for ids, _ in branches]


def prepared(branches: list[Plain], weighting: str = "tree", max_length: int | None = None) -> Any:
    """The same of a dataset row: branches are truncated, and keep one token if that leaves nothing supervised."""
    cut = [(ids[:max_length], weights[:max_length]) for ids, weights in branches]
    cut = [(ids, weights) if any(weights) else (ids[:1], [0.0]) for ids, weights in cut]
    return folded(cut, weighting) if any(any(weights) for _, weights in cut) else None


def as_folded(tree: Mapping[str, Any]) -> Any:
    """The same of what `PrefixTree.to_dict` returns."""
    tokens, paths = {}, []
    start = 0
    for length, parent in zip(tree["node_lengths"], tree["node_parents"], strict=True):
        path = paths[parent] if parent >= 0 else ()
        for at in range(start, start + length):
            path = (*path, int(tree["input_ids"][at]))
            assert path not in tokens, "two tokens have the same path"
            tokens[path] = (round(float(tree["weights"][at]), 9), int(tree["branch_count"][at]))
        paths.append(path)
        start += length
    assert start == len(tree["input_ids"])
    return tokens, tree["num_branches"], [list(paths[node]) for node in tree["branch_nodes"]]


# --- Batches of trees


def tokens_of_trees(trees: list[Any]) -> list[Any]:
    """Each token of folded trees, in any order: the ids up to it, its weight, and the branches through it."""
    return sorted(
        (path, weight, sum(tuple(ids[: len(path)]) == path for ids in of_tree))
        for tokens, _, of_tree in trees
        for path, (weight, _) in tokens.items()
    )


def tokens_of_batch(batch: Mapping[str, torch.Tensor], pad_token_id: int = 0) -> list[Any]:
    """The same of a batch, which must say the same of every token in all its tensors."""
    columns = {name: value[0].tolist() for name, value in batch.items() if name not in ("prefix_tree", "tree_stats")}
    ends, depths, predecessors = batch["prefix_tree"][0].tolist()
    weights = batch["loss_weights"][0].numpy().view(np.float64).tolist()
    count, length = sum(columns["attention_mask"]), len(ends)
    assert columns["attention_mask"] == [1] * count + [0] * (length - count)
    assert set(columns["input_ids"][count:]) <= {pad_token_id} and not any(columns["token_branches"][count:])
    chains: list[list[int]] = []  # the positions up to each token
    found = []
    for at in range(count):
        chains.append([*(chains[predecessors[at]] if predecessors[at] >= 0 else []), at])
        path = tuple(columns["input_ids"][i] for i in chains[at])
        assert len(path) == depths[at] + 1 == columns["position_ids"][at] + 1
        is_trained = weights[at] > 0 and predecessors[at] >= 0
        assert columns["labels"][at] == (path[-1] if is_trained else -100)
        found.append((path, round(weights[at], 9), columns["token_branches"][at]))
    for key in range(count):
        assert [key in chain for chain in chains[key:]] == [query < ends[key] for query in range(key, count)]
    assert columns["labels"][count:] == [-100] * (length - count) and not any(weights[count:])
    return sorted(found)


def positions_of(prompt: list[int], completions: list[list[int]]) -> dict[str, list[Any]]:
    """NeMo's form of rollouts, position by position."""
    form: dict[str, list[Any]] = {name: [] for name in ("input_ids", "labels", "position_ids")}
    for ids, start in [(prompt, 0), *((completion, len(prompt)) for completion in completions)]:
        for at, token in enumerate(ids):
            form["input_ids"].append(token)
            form["labels"].append(ids[at + 1] if ids is not prompt and at + 1 < len(ids) else -100)
            form["position_ids"].append(start + at)
    form["node_lengths"] = [len(prompt), *map(len, completions)]
    form["sample_paths"] = [[0, i + 1] if prompt else [i + 1] for i in range(len(completions))]
    return form
