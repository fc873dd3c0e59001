# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One call of a model on a packed sequence of trees.

In: a causal LM and a batch of the contract. Out: exact logits and the weighted loss, or a refusal.
"""
