# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Tree attention: the masks, the context of a call, and what is registered with Transformers."""
