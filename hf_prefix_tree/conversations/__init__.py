# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""From chat messages to branches: rendering with the tokenizer's own chat template, exact and shared tokenization."""

from hf_prefix_tree.conversations.branches import REASONING_MODES, ConversationBranches, conversation_branches
from hf_prefix_tree.conversations.messages import Tools
from hf_prefix_tree.conversations.tokenization import common_prefix

__all__ = ["REASONING_MODES", "ConversationBranches", "Tools", "common_prefix", "conversation_branches"]
