# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Trainers on prefix trees. The only room that imports TRL."""
