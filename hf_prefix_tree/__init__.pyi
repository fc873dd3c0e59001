# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The public names and where they are defined: read by type checkers, and by `__init__.py` at run time."""

from hf_prefix_tree.data.baselines import flat_steps as flat_steps
from hf_prefix_tree.data.baselines import per_branch as per_branch
from hf_prefix_tree.data.images import fold_images as fold_images
from hf_prefix_tree.data.prepare import prepare_trees as prepare_trees
from hf_prefix_tree.data.turns import conversation_branches as conversation_branches
from hf_prefix_tree.diffusion.collator import DataCollatorForDiffusionLM as DataCollatorForDiffusionLM
from hf_prefix_tree.diffusion.config import DiffusionSFTConfig as DiffusionSFTConfig
from hf_prefix_tree.diffusion.generation import diffusion_generate as diffusion_generate
from hf_prefix_tree.diffusion.trainer import DiffusionSFTTrainer as DiffusionSFTTrainer
from hf_prefix_tree.eagle3.collator import DataCollatorForEagle3 as DataCollatorForEagle3
from hf_prefix_tree.eagle3.config import Eagle3Config as Eagle3Config
from hf_prefix_tree.eagle3.config import Eagle3DraftConfig as Eagle3DraftConfig
from hf_prefix_tree.eagle3.data import build_eagle3_dataloader as build_eagle3_dataloader
from hf_prefix_tree.eagle3.data import pack_eagle3_dataset as pack_eagle3_dataset
from hf_prefix_tree.eagle3.export import export_for_serving as export_for_serving
from hf_prefix_tree.eagle3.model import Eagle3DraftModel as Eagle3DraftModel
from hf_prefix_tree.eagle3.trainer import Eagle3Trainer as Eagle3Trainer
from hf_prefix_tree.eagle3.vocabulary import build_token_mapping as build_token_mapping
from hf_prefix_tree.eagle3.vocabulary import load_or_build_token_mapping as load_or_build_token_mapping
from hf_prefix_tree.eagle3.vocabulary import load_token_mapping as load_token_mapping
from hf_prefix_tree.eagle3.vocabulary import save_token_mapping as save_token_mapping
from hf_prefix_tree.modeling.attention.masks.causal import tree_mask_mod as tree_mask_mod
from hf_prefix_tree.modeling.prepare import prepare_model as prepare_model
from hf_prefix_tree.modeling.prepare import unprepare_model as unprepare_model
from hf_prefix_tree.nemo import CROSS_ENTROPY_IGNORE_IDX as CROSS_ENTROPY_IGNORE_IDX
from hf_prefix_tree.nemo import DLLMCollator as DLLMCollator
from hf_prefix_tree.nemo import FoldedRollouts as FoldedRollouts
from hf_prefix_tree.nemo import fold_shared_prefix_rollouts as fold_shared_prefix_rollouts
from hf_prefix_tree.nemo import prefix_tree_collate_fn as prefix_tree_collate_fn
from hf_prefix_tree.rl.config import TreeDPOConfig as TreeDPOConfig
from hf_prefix_tree.rl.config import TreeGRPOConfig as TreeGRPOConfig
from hf_prefix_tree.rl.config import TreeKTOConfig as TreeKTOConfig
from hf_prefix_tree.rl.config import TreeRLOOConfig as TreeRLOOConfig
from hf_prefix_tree.rl.folded_forward import fold_shared_prefixes as fold_shared_prefixes
from hf_prefix_tree.rl.log_probs import tree_log_probs as tree_log_probs
from hf_prefix_tree.rl.policy import TreeGRPOTrainer as TreeGRPOTrainer
from hf_prefix_tree.rl.policy import TreeRLOOTrainer as TreeRLOOTrainer
from hf_prefix_tree.rl.preference import TreeDPOTrainer as TreeDPOTrainer
from hf_prefix_tree.rl.preference import TreeKTOTrainer as TreeKTOTrainer
from hf_prefix_tree.sft.collator import DataCollatorForPrefixTree as DataCollatorForPrefixTree
from hf_prefix_tree.sft.config import TreeSFTConfig as TreeSFTConfig
from hf_prefix_tree.sft.mixin import TreeLossMixin as TreeLossMixin
from hf_prefix_tree.sft.trainer import TreeSFTTrainer as TreeSFTTrainer
from hf_prefix_tree.tree.packing import pack_rows as pack_rows
from hf_prefix_tree.tree.packing import split_tree as split_tree
from hf_prefix_tree.tree.prefix_tree import Branch as Branch
from hf_prefix_tree.tree.prefix_tree import PrefixTree as PrefixTree
from hf_prefix_tree.tree.prefix_tree import fold as fold
from hf_prefix_tree.tree.synthetic import caterpillar as caterpillar
from hf_prefix_tree.tree.synthetic import caterpillar_set as caterpillar_set

__version__: str
