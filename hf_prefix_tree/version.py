# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The version of the package, for itself and for the build."""

__version__ = "0.1.0"
