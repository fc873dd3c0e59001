# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The conformance harness: every causal-LM architecture of the installed Transformers, tiny, on a prefix tree and on
its branches. `python -m conformance` writes the table of results."""
