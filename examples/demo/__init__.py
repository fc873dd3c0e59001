# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The demo's own data: invented help-desk dialogues and a tokenizer trained on them, so that it needs no hub."""
