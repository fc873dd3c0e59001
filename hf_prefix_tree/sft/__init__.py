# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Supervised fine-tuning on prefix trees.

In: conversations, rollouts or trees. Out: a model trained as on the unfolded branches.
"""
