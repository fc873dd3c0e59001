# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Train causal language models on sequences that share prefixes, each shared token computed once.

Importing the package registers `attn_implementation="prefix_tree"` with Transformers. Everything else is loaded on
first use: neither TRL nor datasets is imported before a name that needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_prefix_tree.attention.interface import register
from hf_prefix_tree.version import __version__ as __version__

if TYPE_CHECKING:  # what tools see; at run time `__getattr__` loads the same names on first use
    from hf_prefix_tree.baselines import flat_steps as flat_steps
    from hf_prefix_tree.baselines import per_branch as per_branch
    from hf_prefix_tree.collators.diffusion import DataCollatorForDiffusionLM as DataCollatorForDiffusionLM
    from hf_prefix_tree.collators.diffusion import DLLMCollator as DLLMCollator
    from hf_prefix_tree.collators.eagle3 import DataCollatorForEagle3 as DataCollatorForEagle3
    from hf_prefix_tree.collators.prefix_tree import DataCollatorForPrefixTree as DataCollatorForPrefixTree
    from hf_prefix_tree.collators.rollouts import prefix_tree_collate_fn as prefix_tree_collate_fn
    from hf_prefix_tree.conversations import conversation_branches as conversation_branches
    from hf_prefix_tree.datasets import prepare_trees as prepare_trees
    from hf_prefix_tree.diffusion.config import DiffusionSFTConfig as DiffusionSFTConfig
    from hf_prefix_tree.diffusion.generation import diffusion_generate as diffusion_generate
    from hf_prefix_tree.diffusion.trainer import DiffusionSFTTrainer as DiffusionSFTTrainer
    from hf_prefix_tree.eagle3.arguments import Eagle3Config as Eagle3Config
    from hf_prefix_tree.eagle3.config import Eagle3DraftConfig as Eagle3DraftConfig
    from hf_prefix_tree.eagle3.data import build_eagle3_dataloader as build_eagle3_dataloader
    from hf_prefix_tree.eagle3.draft import Eagle3DraftModel as Eagle3DraftModel
    from hf_prefix_tree.eagle3.export import export_for_serving as export_for_serving
    from hf_prefix_tree.eagle3.mapping_cache import load_or_build_token_mapping as load_or_build_token_mapping
    from hf_prefix_tree.eagle3.mapping_cache import load_token_mapping as load_token_mapping
    from hf_prefix_tree.eagle3.mapping_cache import save_token_mapping as save_token_mapping
    from hf_prefix_tree.eagle3.packing import pack_eagle3_dataset as pack_eagle3_dataset
    from hf_prefix_tree.eagle3.token_mapping import build_token_mapping as build_token_mapping
    from hf_prefix_tree.eagle3.trainer import Eagle3Trainer as Eagle3Trainer
    from hf_prefix_tree.images import fold_images as fold_images
    from hf_prefix_tree.model import prepare_model as prepare_model
    from hf_prefix_tree.model import unprepare_model as unprepare_model
    from hf_prefix_tree.packing import pack_rows as pack_rows
    from hf_prefix_tree.rollouts import CROSS_ENTROPY_IGNORE_IDX as CROSS_ENTROPY_IGNORE_IDX
    from hf_prefix_tree.rollouts import FoldedRollouts as FoldedRollouts
    from hf_prefix_tree.rollouts import fold_shared_prefix_rollouts as fold_shared_prefix_rollouts
    from hf_prefix_tree.splitting import split_tree as split_tree
    from hf_prefix_tree.synthetic import caterpillar as caterpillar
    from hf_prefix_tree.synthetic import caterpillar_set as caterpillar_set
    from hf_prefix_tree.trainers.config import TreeSFTConfig as TreeSFTConfig
    from hf_prefix_tree.trainers.dpo import TreeDPOTrainer as TreeDPOTrainer
    from hf_prefix_tree.trainers.folded import fold_shared_prefixes as fold_shared_prefixes
    from hf_prefix_tree.trainers.grpo import TreeGRPOTrainer as TreeGRPOTrainer
    from hf_prefix_tree.trainers.kto import TreeKTOTrainer as TreeKTOTrainer
    from hf_prefix_tree.trainers.log_probs import tree_log_probs as tree_log_probs
    from hf_prefix_tree.trainers.mixin import TreeLossMixin as TreeLossMixin
    from hf_prefix_tree.trainers.rloo import TreeRLOOTrainer as TreeRLOOTrainer
    from hf_prefix_tree.trainers.sft import TreeSFTTrainer as TreeSFTTrainer
    from hf_prefix_tree.tree import Branch as Branch
    from hf_prefix_tree.tree import PrefixTree as PrefixTree
    from hf_prefix_tree.tree import fold as fold


_HOMES = {
    "Branch": "tree",
    "PrefixTree": "tree",
    "fold": "tree",
    "conversation_branches": "conversations",
    "CROSS_ENTROPY_IGNORE_IDX": "rollouts",
    "FoldedRollouts": "rollouts",
    "fold_shared_prefix_rollouts": "rollouts",
    "caterpillar": "synthetic",
    "caterpillar_set": "synthetic",
    "flat_steps": "baselines",
    "per_branch": "baselines",
    "prepare_trees": "datasets",
    "fold_images": "images",
    "prepare_model": "model",
    "unprepare_model": "model",
    "DataCollatorForPrefixTree": "collators.prefix_tree",
    "prefix_tree_collate_fn": "collators.rollouts",
    "DataCollatorForDiffusionLM": "collators.diffusion",
    "DLLMCollator": "collators.diffusion",
    "split_tree": "splitting",
    "pack_rows": "packing",
    "build_token_mapping": "eagle3.token_mapping",
    "save_token_mapping": "eagle3.mapping_cache",
    "load_token_mapping": "eagle3.mapping_cache",
    "load_or_build_token_mapping": "eagle3.mapping_cache",
    "pack_eagle3_dataset": "eagle3.packing",
    "DataCollatorForEagle3": "collators.eagle3",
    "build_eagle3_dataloader": "eagle3.data",
    "Eagle3DraftConfig": "eagle3.config",
    "Eagle3DraftModel": "eagle3.draft",
    "Eagle3Config": "eagle3.arguments",
    "Eagle3Trainer": "eagle3.trainer",
    "export_for_serving": "eagle3.export",
    "DiffusionSFTConfig": "diffusion.config",
    "DiffusionSFTTrainer": "diffusion.trainer",
    "diffusion_generate": "diffusion.generation",
    "TreeLossMixin": "trainers.mixin",
    "TreeSFTConfig": "trainers.config",
    "TreeSFTTrainer": "trainers.sft",
    "TreeDPOTrainer": "trainers.dpo",
    "TreeKTOTrainer": "trainers.kto",
    "fold_shared_prefixes": "trainers.folded",
    "tree_log_probs": "trainers.log_probs",
    "TreeGRPOTrainer": "trainers.grpo",
    "TreeRLOOTrainer": "trainers.rloo",
}
__all__ = ["__version__", *sorted(_HOMES)]

register()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
