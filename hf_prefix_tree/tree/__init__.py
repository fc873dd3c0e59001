# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Branches to prefix trees, in numpy.

In: token ids and weights of branches. Out: [`PrefixTree`]s, split and packed; also synthetic ones.
"""
