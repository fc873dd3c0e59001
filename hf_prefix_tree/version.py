# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The version of the package, for itself and for the build, and the versions of others that it is tested with."""

__version__ = "0.1.0"

# Lowest and highest, as in requirements-lowest.txt and requirements-dev.txt. Trainers warn of newer ones.
TESTED = {"transformers": ("5.17.0", "5.24.0"), "trl": ("1.16.0", "1.16.0"), "peft": ("0.21.0", "0.21.2")}
