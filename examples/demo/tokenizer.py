# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A small byte-level BPE tokenizer, trained at run time, with a chat template. Cost: under a second."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

_CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Each tag is ordinary text but one token: text before and after it never merges with it.
_TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Words with the space before them, single digits, punctuation; a run of line breaks is one piece whatever follows it,
# so that a prompt which ends in a line break stays a token prefix of its continuation.
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 1024) -> PreTrainedTokenizerFast:
    """
    Trains a byte-level BPE tokenizer. Equal texts give an equal tokenizer.

    Args:
        texts (`Iterable[str]`): The corpus, for example `dialogue_texts(rows)`.
        vocab_size (`int`, *optional*, defaults to `1024`): Size of the vocabulary, special tokens included; at least
            265: 256 bytes and 9 special tokens.

    Returns:
        `PreTrainedTokenizerFast`: `<|im_end|>` ends a turn (`eos_token`), `<|endoftext|>` pads. The chat template
        knows `tools`, `tool_calls`, `reasoning_content` (dropped from turns before the last user message),
        `add_generation_prompt` and `enable_thinking=False`.

    Raises:
        `ValueError`: If `vocab_size` is below 265.
    """
    control = [AddedToken(token, special=True, normalized=False) for token in _CONTROL_TOKENS]
    tags = [AddedToken(token, special=False, normalized=False) for token in _TAGS]
    smallest = 256 + len(control) + len(tags)
    if vocab_size < smallest:
        raise ValueError(
            f"vocab_size={vocab_size} has no room for 256 bytes and the special tokens: pass at least {smallest}."
        )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=control,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(tags)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        chat_template=Path(__file__).with_name("chat_template.jinja").read_text(),
    )
