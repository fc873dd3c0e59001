# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Dataset rows of any supported form to trees.

In: a `datasets` dataset and a tokenizer. Out: a dataset of folded trees, and counts of all that was lost on the way.
"""
