# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""One optimizer step, exactly normalised over ranks and accumulation steps.

In: a trainer, its options and its dataset. Out: which rows a step reads and what its loss is divided by.
"""
