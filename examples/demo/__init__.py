# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""The demo: tree SFT on invented help-desk dialogues, with a tokenizer trained on them, without any download."""
