# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""What folding does to a data set: counts, predicted FLOPs and memory, and pictures of trees."""
