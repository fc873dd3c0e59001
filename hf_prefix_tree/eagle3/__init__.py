# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Training of EAGLE-3 draft heads: conversations or token ids and a target model come in, a trained draft goes out.

The draft is exported in the formats of vLLM, SGLang and speculators; `speculative_generate` tries it on its target.
"""
