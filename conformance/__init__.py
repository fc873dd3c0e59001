# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The conformance harness: runs a tiny model of every causal-LM architecture of the installed Transformers on a prefix
tree and on its branches. `python -m conformance`, run from the root of the repository, writes the table of results."""
