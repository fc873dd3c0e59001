# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Convolutions and scans that follow the branches.

In: the inputs of a recurrent mixer and the context of the call. Out: what the mixer gives on each branch alone.
"""
