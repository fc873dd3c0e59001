"""Set-ups of a training, drawn by a seed: trainer, model, data, and the options that change how steps are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from hf_prefix_tree.tree.packing import split_tree
from hf_prefix_tree.tree.prefix_tree import Branch, fold
from tests.support.definition import GivenBranch, GivenTree, capped

MODELS = ("qwen3", "llama", "gemma2", "mistral", "gpt_oss", "qwen3_moe", "lfm2", "qwen3_5_text")
# "sft" is `TreeSFTTrainer`, "grouped" the same with `mode="grouped"`, "mixin" is `TreeLossMixin` before `Trainer`,
# "mixin_sft" before TRL's `SFTTrainer`, "plain" a `Trainer` after `prepare_model`.
TRAINERS = ("sft", "sft", "sft", "grouped", "mixin", "mixin", "mixin_sft", "plain")
WEIGHTINGS = ("tree", "branch", "branch_mean", "once")
CHECKPOINTING = ("reentrant", "non_reentrant")
ENGINES = {"one": 1, "ddp": 2, "fsdp2": 2}  # processes


@dataclass(frozen=True)
class Setup:
    """One draw; options of the trainer's config have their names."""

    seed: int
    engine: str
    trainer: str
    model: str
    is_double: bool
    attn_implementation: str | None
    attn_backend: str
    adapter: str | None  # "lora", "lora_saved" (with `modules_to_save`), "dora"
    checkpointing: str | None
    rows: str  # "branches", "rollouts", "tokens" (`input_ids` and `labels` by group), "trees"
    is_prepared: bool  # by `prepare_trees`; or the collator folds
    weighting: str
    folded_as: str  # weighting of the given trees, before they are prepared
    num_trees: int
    max_length: int | None
    overlong: str
    overflow: str | None  # None: without `max_packed_tokens`
    pack_trees: bool
    pad_to_multiple_of: int
    batch_size: int
    accumulation: int
    epochs: int
    sampling: str
    drop_last: bool
    eval_sets: int  # 2: a dict
    eval_batch_size: int
    eval_steps: int
    eval_on_start: bool
    logging_steps: int
    scale: float  # of the weights of given branches, which may add up to less than 1
    resumed_at: int | None  # the step after which training stops, and another trainer goes on

    @property
    def ranks(self) -> int:
        return ENGINES[self.engine]


def draw_setup(seed: int, engine: str = "one") -> Setup:
    rng = np.random.default_rng([seed, *engine.encode()])

    def one_of(*values):
        return values[rng.integers(len(values))]

    is_alone = engine == "one"
    trainer = one_of(*TRAINERS) if is_alone else one_of("sft", "sft", "grouped", "mixin")
    is_sft = trainer in ("sft", "grouped")
    rows = one_of("branches", "branches", "rollouts", "tokens", "trees")
    is_prepared = rows == "tokens" or one_of(True, is_sft, False)
    weighting = one_of("tree", *WEIGHTINGS)
    overflow = one_of(None, None, "split", "drop") if is_prepared else None
    if trainer == "plain" and overflow == "split":
        overflow = "drop"  # parts of a tree would be in several micro-batches
    pack_trees = one_of(True, False) or overflow is None
    is_packed = overflow is not None and pack_trees
    has_cap = is_prepared and rows != "trees" and one_of(True, False)
    eval_sets = one_of(0, 1, 1, 2)
    if trainer == "plain" and is_packed:
        eval_sets = 0  # its evaluation is a mean over packed rows
    batch_size = 1 if is_packed else one_of(1, 2, 3)
    # `keep_double` does not reach what is computed again in a backward
    is_double, checkpointing = one_of((True, None), (True, None), (False, None), *((False, c) for c in CHECKPOINTING))
    setup = Setup(
        seed=seed,
        engine=engine,
        trainer=trainer,
        model="qwen3" if engine == "fsdp2" else one_of(*MODELS),
        is_double=is_double,
        attn_implementation=one_of(None, "prefix_tree"),
        attn_backend=one_of("auto", "sdpa"),
        adapter=one_of(None, "lora", "lora_saved", "dora") if one_of(True, False) else None,
        checkpointing=checkpointing,
        rows=rows,
        is_prepared=is_prepared,
        weighting=weighting,
        folded_as=one_of(*WEIGHTINGS) if is_prepared else weighting,
        num_trees=one_of(3, 4, 5, 6, 7),
        max_length=one_of(5, 8, 11) if has_cap else None,
        overlong=one_of("truncate", "drop") if has_cap else "truncate",
        overflow=overflow,
        pack_trees=pack_trees,
        pad_to_multiple_of=one_of(16, 128),
        batch_size=batch_size,
        accumulation=one_of(1, 2, 3),
        epochs=one_of(1, 2),
        sampling=one_of("random", "sequential", *(["group_by_length"] if trainer != "plain" else [])),
        drop_last=one_of(True, False, False) and (is_alone or not is_packed),  # each rank keeps a row
        eval_sets=eval_sets,
        eval_batch_size=1 if is_packed else one_of(1, 2, 3),
        eval_steps=one_of(1, 2),
        eval_on_start=one_of(True, False),
        logging_steps=one_of(1, 1, 2),
        resumed_at=one_of(None, None, 1, 2) if engine != "fsdp2" else None,
        scale=one_of(1.0, 1e-3) if rows in ("branches", "trees") else 1.0,
    )
    # Transformers 5.24 saves the experts of Qwen3-MoE one by one, and a Trainer that resumes finds none of them
    if setup.model == "qwen3_moe" and setup.adapter is None:
        setup = replace(setup, resumed_at=None)
    if trainer == "plain" and eval_sets:  # a plain evaluation drops rows, too
        setup = replace(setup, drop_last=False)
    return setup


class DrawnData:
    """
    A dataset as given (`rows`) and by the definition (`trees`). All branches of tree i start with a token of its own,
    `tree_of`, which tells whose the tokens of a batch are. A tree may be given twice.
    """

    def __init__(self, setup: Setup, part: int, num_trees: int) -> None:
        rng = np.random.default_rng([setup.seed, part])
        given = [_branches(rng, index, setup) for index in range(num_trees)]
        left = [capped(branches, setup.max_length, setup.overlong) for branches in given]
        self.trees = {i: GivenTree(branches, setup.weighting) for i, branches in enumerate(left) if branches}
        self.order = [*range(num_trees), *rng.integers(num_trees, size=rng.integers(2)).tolist()]  # the rows' trees
        self.rows = _rows(rng, [given[index] for index in self.order], setup)
        if setup.rows == "tokens":  # a group comes where its first row does
            self.order = [self.order[group] for group in dict.fromkeys(row["group"] for row in self.rows)]

    def keep(self, is_kept) -> None:
        """Leaves out trees that the preparation drops."""
        self.trees = {index: tree for index, tree in self.trees.items() if is_kept(tree)}

    def given(self) -> list[GivenTree]:
        """The trees of the dataset in its order."""
        return [self.trees[index] for index in self.order if index in self.trees]

    @staticmethod
    def tree_of(path: tuple[int, ...]) -> int:
        return (path[0] - 3) // 2


def most_packed_tokens(setup: Setup, data: list[DrawnData]) -> int:
    """A `max_packed_tokens` under which some trees are split or dropped."""
    trees = [tree for own in data for tree in own.trees.values()]
    sizes = sorted(tree.num_tokens for tree in trees)
    least = max(tree.longest for tree in trees)
    if setup.overflow == "drop":  # every dataset keeps its first tree
        least = max(own.trees[0].num_tokens for own in data)
    limit = max(least, sizes[len(sizes) // 2], setup.max_length or 2)
    # whether branches without supervised token are in a tree decides over none
    return next(most for most in count(limit) if not any(t.supervised_tokens <= most < t.num_tokens for t in trees))


def most_parts(data: DrawnData, max_tokens: int) -> int:
    """Parts of the tree that has most: an optimizer step must hold them."""
    trees = [fold([Branch(branch.ids, branch.weights) for branch in tree.branches]) for tree in data.given()]
    return max(len(split_tree(tree, max_tokens)) for tree in trees)


def _branches(rng: np.random.Generator, index: int, setup: Setup) -> list[GivenBranch]:
    """Branches that fork, repeat, end inside one another, and may supervise nothing."""
    first = 3 + 2 * index
    tokens = lambda low, high: rng.integers(3, 97, size=rng.integers(low, high + 1)).tolist()  # noqa: E731
    is_short = index == 0  # no cap leaves a dataset without supervised token
    if setup.rows == "rollouts":
        prompt = [first, *tokens(0, 1 if is_short else 5)]
        ends = [tokens(1, 3 if is_short else 6) for _ in range(rng.integers(1, 5))]
        ends += ends[: rng.integers(2)]  # a duplicate
        ends += [ends[0][: rng.integers(1, len(ends[0]) + 1)]]  # a strict prefix, or another duplicate
        return [GivenBranch((*prompt, *end), (*[0.0] * len(prompt), *[1.0] * len(end))) for end in ends]
    paths = [[first, *tokens(2, 4 if is_short else 12)]]
    for _ in range(rng.integers(1, 5)):
        parent = paths[rng.integers(len(paths))]
        form = rng.integers(6)
        if form == 0:
            paths.append(list(parent))
        elif form == 1:
            paths.append(parent[: rng.integers(1, len(parent) + 1)])
        elif form == 2:
            paths.append([first + 1, *tokens(1, 5)])  # another root
        else:
            paths.append(parent[: rng.integers(1, len(parent) + 1)] + tokens(1, 5))
    branches = []
    for path in paths:
        weights = rng.integers(0, 2, size=len(path)) * (rng.integers(5) > 0)
        if setup.rows != "tokens":
            weights = weights * rng.uniform(0.25, 2, size=len(path))
        if is_short and not branches:
            weights[1] = 1
        weights = setup.scale * weights
        weights[0] = 0
        branches.append(GivenBranch(tuple(path), tuple(weights.astype(float).tolist())))
    return branches


def _rows(rng: np.random.Generator, trees: list[list[GivenBranch]], setup: Setup) -> list[dict]:
    if setup.rows == "branches":
        first = float(rng.integers(2))  # what the weight of a first token is matters to nobody
        return [
            {"branches": [{"input_ids": list(b.ids), "weights": [first, *b.weights[1:]]} for b in own]}
            for own in trees
        ]
    if setup.rows == "trees":
        return [fold([Branch(b.ids, b.weights) for b in own], setup.folded_as).to_dict() for own in trees]
    if setup.rows == "rollouts":
        rows = []
        for own in trees:
            length = next(t for t, weight in enumerate(own[0].weights) if weight)
            completions = [list(b.ids[length:]) for b in own]
            rows.append({"prompt_ids": list(own[0].ids[:length]), "completions": completions})
        return rows
    rows = [
        {
            "input_ids": list(b.ids),
            "labels": [b.ids[0], *(x if w else -100 for x, w in zip(b.ids[1:], b.weights[1:], strict=True))],
            "group": index,
        }
        for index, own in enumerate(trees)
        for b in own
    ]
    return [rows[index] for index in rng.permutation(len(rows))]  # the rows of a group are not together
