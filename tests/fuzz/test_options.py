"""Options of every border, right and wrong: a wrong one is named, never rounded, parsed or passed on."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import TrainingArguments

from hf_prefix_tree import (
    Branch,
    DataCollatorForDiffusionLM,
    DataCollatorForEagle3,
    DataCollatorForPrefixTree,
    DiffusionSFTConfig,
    DLLMCollator,
    Eagle3Config,
    TreeDPOConfig,
    TreeGRPOConfig,
    TreeKTOConfig,
    TreeRLOOConfig,
    TreeSFTConfig,
    build_eagle3_dataloader,
    fold,
    fold_shared_prefix_rollouts,
    pack_eagle3_dataset,
    pack_rows,
    prefix_tree_collate_fn,
    split_tree,
)
from hf_prefix_tree.data.prepare import check_preparation
from tests.fuzz.inputs import ODD, Refused, inputs, outcome

TREE = fold([Branch([1, 2, 3], [0, 1, 1]), Branch([1, 2, 4], [0, 1, 1])])
SAMPLES = [{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1]}]
GROUP = fold_shared_prefix_rollouts([1, 2], [[3], [4]])


def integer(least: int, optional: bool = False) -> Any:
    def fits(value: Any) -> bool:
        return (optional and value is None) or (
            isinstance(value, (int, np.integer)) and not isinstance(value, bool) and least <= value < 2**63
        )

    return fits


def one_of(*choices: Any) -> Any:
    return lambda value: any(value is choice or (isinstance(value, str) and value == choice) for choice in choices)


def one_of_type(kind: type, fits: Any) -> Any:
    """`None`, a value of a type, or JSON of one."""

    def is_one(value: Any) -> bool:
        if isinstance(value, str) and value.startswith("{"):
            value = json.loads(value)
        return value is None or (isinstance(value, kind) and fits(value))

    return is_one


def text(optional: bool = False) -> Any:
    return lambda value: isinstance(value, str) or (optional and value is None)


def integers(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(integer(0), value)))


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


QUIET: dict[str, Any] = {"report_to": [], "use_cpu": True, "bf16": False}
WEIGHTING = {"weighting": one_of("tree", "branch", "branch_mean", "once")}
PREPARATION = {
    **WEIGHTING,
    "reasoning": one_of("per_turn", "side_leaf", "think_split", "keep"),
    "overlong": one_of("truncate", "drop", "raise"),
    "overflow": one_of("split", "drop", "raise"),
    "on_error": one_of("raise", "skip"),
    "selection_metric": one_of(None, "branching_score", "num_turns", "token_ratio", "pair_ratio"),
    "max_length": integer(2, True),
    "max_packed_tokens": integer(2, True),
    "selection_num_proc": integer(1, True),
    "max_examples": integer(1, True),
}
TRUTH = one_of(True, False)
JSON = one_of_type(dict, lambda value: all(isinstance(key, str) for key in value))
REUSE = {"min_reuse": lambda v: is_number(v), "attn_backend": one_of("auto", "flex", "flash", "sdpa")}
REUSE |= {"overflow": one_of("split")}  # "stream" needs a size
CONFIGS: dict[Any, dict[str, Any]] = {
    TreeSFTConfig: {
        **PREPARATION,
        "chat_template_kwargs": JSON,
        "column_names": one_of_type(dict, lambda v: all(isinstance(i, str) for item in v.items() for i in item)),
        "empty_thinking_in_prompt": TRUTH,
        "stop_token_ids": integers,
        "group_by": text(True),
        "pack_trees": TRUTH,
        "mode": one_of("tree", "grouped"),
        "attn_backend": one_of("auto", "flex", "flash", "sdpa"),
        "compile_layers": TRUTH,
    },
    DiffusionSFTConfig: {
        "max_length": integer(1, True),
        "objective": one_of("mdlm", "block", "hybrid"),
        "block_size": integer(1),
        "response_window": TRUTH,
        "supervise_padding": TRUTH,
        "mask_token_id": integer(0, True),
        "corruption": one_of("uniform", "blockwise"),
        "half_life": lambda v: is_number(v) and 0 < v < math.inf,
        "noise_eps": lambda v: is_number(v) and 0 < v <= 1,
        "alpha": lambda v: is_number(v) and 0 < v < math.inf,
        "eval_noise_draws": integer(1),
        "group_by": text(True),
        "chat_template_kwargs": JSON,
        "on_error": one_of("raise", "skip"),
        "attn_backend": one_of("auto", "flex", "sdpa"),
    },
    Eagle3Config: {
        "draft_vocab_size": integer(1, True),
        "selected_token_ids_path": text(True),
        "aux_layer_ids": integers,
        "ttt_steps": integer(1),
        "step_decay": lambda v: is_number(v) and 0 < v <= 1,
        "seq_length": integer(1),
        "packed_sequence_size": integer(0),
        "packing_strategy": one_of("next_fit", "best_fit"),
        "supervise_reasoning": TRUTH,
        "reasoning_end": text(),
        "on_error": one_of("raise", "skip"),
        "dataset_num_proc": integer(1, True),
        "attn_backend": one_of("auto", "flex", "sdpa"),
        "target_model_init_kwargs": JSON,
    },
    TreeDPOConfig: {**REUSE, "max_row_tokens": lambda v: integer(0)(v) and not v},  # a size of streaming alone
    TreeKTOConfig: {**REUSE, "max_row_tokens": lambda v: integer(0)(v) and not v},
    TreeGRPOConfig: {**REUSE, "max_row_tokens": integer(0), "rollout_rows": one_of("one", "as_sampled")},
    TreeRLOOConfig: {**REUSE, "max_row_tokens": integer(0)},
}
# A call that takes keyword arguments, and for each of them whether a value is right.
BORDERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "preparation": (check_preparation, PREPARATION),
    "tree_collator": (
        lambda **options: DataCollatorForPrefixTree(**{"pad_token_id": 0, **options}),
        {**WEIGHTING, "pad_token_id": integer(-(2**63)), "pad_to_multiple_of": integer(1)},
    ),
    "diffusion_collator": (
        lambda **options: DataCollatorForDiffusionLM(**{"pad_token_id": 0, **options}),
        {
            "pad_token_id": integer(0),
            "eos_token_id": integer(0, True),
            "block_size": integer(0, True),
            "pad_seq_len_divisible": integer(0, True),
            "max_seq_len": integer(1, True),
            "return_tensors": one_of("pt", "np"),
        },
    ),
    "nemo_collator": (lambda **options: DLLMCollator(**options), {"block_size": integer(0, True)}),
    "eagle3_collator": (
        lambda **options: DataCollatorForEagle3(**{"pad_token_id": 0, **options}),
        {"pad_token_id": integer(0), "length": integer(1, True), "pad_to_multiple_of": integer(1)},
    ),
    "nemo_group": (
        lambda **options: prefix_tree_collate_fn([GROUP], **options),
        {
            **WEIGHTING,
            "pad_token_id": integer(0),
            "pad_to_multiple_of": integer(1),
        },
    ),
    "nemo_rollouts": (
        lambda **options: fold_shared_prefix_rollouts([1], [[2]], **options),
        {"ignore_idx": integer(-(2**31))},
    ),
    "eagle3_packing": (
        lambda **o: pack_eagle3_dataset(SAMPLES, **{"packed_sequence_size": 4, "pad_token_id": 0, **o}),
        {"packed_sequence_size": integer(1), "pad_token_id": integer(0), "strategy": one_of("next_fit", "best_fit")},
    ),
    "eagle3_loader": (
        lambda **options: build_eagle3_dataloader(SAMPLES, pad_token_id=0, **options),
        {
            "batch_size": integer(1),
            "seq_length": integer(1),
            "packed_sequence_size": integer(0),
            "seed": integer(0),
            "num_workers": integer(0),
        },
    ),
    "split": (lambda **options: split_tree(TREE, **options), {"max_tokens": integer(3)}),
    "fold": (lambda **options: fold(TREE.branches(), **options), WEIGHTING),
    "pack": (lambda **options: pack_rows([1, 2], **{"max_tokens": 3, **options}), {"max_tokens": integer(2)}),
    **{
        config.__name__: (partial(config, "unused", **QUIET), options)  # of ours, and TRL's with another default
        for config, options in CONFIGS.items()
    },
}
LARGE = {"length", "pad_to_multiple_of", "packed_sequence_size", "num_workers", "max_tokens"}  # they allocate or fork


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_every_option_of_a_config_is_drawn(config):
    ours = [kind for kind in config.__mro__ if kind.__module__.startswith("hf_prefix_tree")]
    names = {name for kind in ours for name in inspect.get_annotations(kind)}
    assert names - CONFIGS[config].keys() <= {field.name for field in dataclasses.fields(TrainingArguments)}


@pytest.mark.parametrize("border", BORDERS)
def test_options(border):
    call, options = BORDERS[border]

    @inputs(40)
    @given(st.sampled_from(sorted(options)), ODD)
    def run(name, value):
        fits = options[name](value)
        if fits and name in LARGE and value and value > 1000:
            return
        try:
            outcome(lambda: call(**{name: value}), rf"`{name}\b")
        except Refused:
            return
        assert fits, f"accepted: {value!r}"

    run()
