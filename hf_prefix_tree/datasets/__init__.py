# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""From a `datasets` dataset of any supported row kind to a dataset whose rows are folded trees."""

from hf_prefix_tree.datasets.pipeline import prepare_trees

__all__ = ["prepare_trees"]
