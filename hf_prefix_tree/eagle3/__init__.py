# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Training of EAGLE-3 draft heads: draft vocabulary, packing, draft model, trainer, export to serving engines, a
speculative decoder to try drafts with.

Names are loaded on first use.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "DataCollatorForEagle3": "hf_prefix_tree.collators.eagle3",
    "build_token_mapping": "hf_prefix_tree.eagle3.token_mapping",
    "d2t_from_ids": "hf_prefix_tree.eagle3.token_mapping",
    "ids_from_d2t": "hf_prefix_tree.eagle3.token_mapping",
    "t2d_from_ids": "hf_prefix_tree.eagle3.token_mapping",
    "load_or_build_token_mapping": "hf_prefix_tree.eagle3.mapping_cache",
    "load_token_mapping": "hf_prefix_tree.eagle3.mapping_cache",
    "mapping_fingerprint": "hf_prefix_tree.eagle3.mapping_cache",
    "save_token_mapping": "hf_prefix_tree.eagle3.mapping_cache",
    "pack_eagle3_dataset": "hf_prefix_tree.eagle3.packing",
    "build_eagle3_dataloader": "hf_prefix_tree.eagle3.data",
    "Eagle3DraftConfig": "hf_prefix_tree.eagle3.config",
    "Eagle3DraftModel": "hf_prefix_tree.eagle3.draft",
    "Eagle3Output": "hf_prefix_tree.eagle3.draft",
    "Eagle3Config": "hf_prefix_tree.eagle3.arguments",
    "Eagle3Trainer": "hf_prefix_tree.eagle3.trainer",
    "Eagle3Target": "hf_prefix_tree.eagle3.target",
    "precompute_hidden_states": "hf_prefix_tree.eagle3.precompute",
    "speculative_generate": "hf_prefix_tree.eagle3.decoding",
    "export_for_serving": "hf_prefix_tree.eagle3.export",
    "load_exported": "hf_prefix_tree.eagle3.export",
    "validate_export": "hf_prefix_tree.eagle3.validation",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
