# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trainers on prefix trees. The only room that imports TRL."""

import logging
from importlib.metadata import version

from packaging.version import Version

from hf_prefix_tree.version import TESTED

for _name, (_, _highest) in TESTED.items():
    if Version(version(_name)) > Version(_highest):
        logging.getLogger(__name__).warning(
            "%s %s is newer than %s, the newest version that hf_prefix_tree is tested with: it may have options that "
            "are neither honoured nor refused.",
            _name,
            version(_name),
            _highest,
        )
