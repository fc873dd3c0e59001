# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Chat templates, and a tokenizer for each: the template's control tokens, added to the vocabulary of another one."""

from __future__ import annotations

import copy
import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.dialogues import DIALOGUES

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Control tokens as templates write them; tags of plain text such as `<tool_response>` are not among them.
_CONTROL = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<\uff5c[^<>\s'\"{}]+\uff5c>|</?(?:assistant|user|system)>"
    r"|<(?:start|end)_of_\w+>|<beginning_of_sentence>|\[/?[A-Z_]{3,}\]|\[gMASK\]|<sop>|<seed:(?:bos|eos|pad)>"
    r"|<SPECIAL_\d+>|\[e~\[|\]~!?b[\[\]]|</?s>|<sep>|</?role>"
)
# Tags that real vocabularies have as tokens that are not special.
_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# What ends generation: the first whose first token the template writes. Verified with the end of what TRL's training
# variants mark ("TRL"), with the end tokens in src/llama-vocab.cpp of llama-cpp-python 0.3.36 ("llama.cpp"), or with
# the `eos_token` of a model's tokenizer_config.json (the model). The others are what templates write after a turn.
_STOPS = (
    ("<|im_end|>",),  # TRL, llama.cpp, Qwen2.5 and Qwen3
    ("<|eot_id|>", "<|eom_id|>"),  # TRL (the first), llama.cpp, Llama-3.1 (the first)
    ("<end_of_turn>",),  # TRL, llama.cpp, Gemma-3
    ("<turn|>", "<|tool_response>"),  # TRL (the first), llama.cpp
    ("<|return|>", "<|call|>"),  # TRL, llama.cpp, gpt-oss (the first)
    ("<|observation|>", "<|user|>"),  # TRL
    ("<|END_OF_TURN_TOKEN|>",),  # TRL
    ("<\uff5cend\u2581of\u2581sentence\uff5c>",),  # TRL, llama.cpp, DeepSeek-V3
    ("<|eot|>",),  # TRL
    ("[e~[",),  # llama.cpp
    ("<|EOT|>",),
    ("<|eos|>",),
    ("<|end_of_msg|>",),
    ("<|message_sep|>",),
    ("<|assistant_end|>", "<|tools_suffix|>"),
    ("<seed:eos>",),
    ("<end_of_sentence>",),
    ("<SPECIAL_12>",),
    ("<|role_end|>",),
    ("<\uff5chy_eos:opensource\uff5c>",),
    ("<|end_of_text|>",),  # llama.cpp
    ("</assistant>",),
    ("<end_of_utterance>",),  # TRL, llama.cpp
    ("<sep>",),
    ("<|end|>", "<|calls|>"),  # TRL (the first), llama.cpp
    ("</s>",),  # llama.cpp, Llama-2, Mistral-Nemo
)
_EOS = {"<|end|>": "<|endoftext|>", "<|observation|>": "<|endoftext|>"}  # where it is not what ends a turn
# How Qwen cuts text into pieces, and how GPT-2 does: "\n\n" is one token at the end of a text, and two before a word.
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_SPLIT = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
NO_STOP_TOKEN = ("\n\n",)  # a template without control tokens, such as RWKV World's


def trl_templates() -> dict[str, Path]:
    """The templates of the installed TRL, by name; those with `{% generation %}` are left out."""
    return {name: path for name, path in _trl_folder().items() if not name.endswith("_training")}


def trl_twins() -> dict[str, Path]:
    """TRL's variants of its templates that mark what the model generates, by the name of the original."""
    suffix = "_training"
    return {name[: -len(suffix)]: path for name, path in _trl_folder().items() if name.endswith(suffix)}


def _trl_folder() -> dict[str, Path]:
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return templates_in(Path(spec.origin).parent / "chat_templates")


def templates_in(folder: Path) -> dict[str, Path]:
    """The `*.jinja` files of a folder, by name."""
    return {path.stem: path for path in sorted(folder.glob("*.jinja"))}


def byte_tokenizer(split: str = _SPLIT) -> PreTrainedTokenizerBase:
    """
    A vocabulary of bytes and a few merges, among them of line breaks, as real vocabularies have them.

    Args:
        split (`str`, *optional*): The pattern of what is never merged across. By default Qwen's.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    line, space = "\u010a", "\u0120"
    merges = [(line, line), (space, space), (">", line), ("}", line), ("}", "}"), ('"', "}"), ("i", "t"), ("r", "e")]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def stops_of(source: str) -> tuple[str, ...]:
    """The tokens at which a model with this template stops, one of which ends every turn."""
    if "\uff5chy_eos" in source:
        return ("<\uff5chy_eos:opensource\uff5c>",)
    written = next((stops for stops in _STOPS if stops[0] in source), None)
    if written is None:
        return ("</s>",) if "eos_token" in source else NO_STOP_TOKEN
    return written


def tokenizer_for(source: str, base: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """
    A tokenizer for a template: `base`, the control tokens that the template writes, and its `bos` and `eos`.

    Args:
        source (`str`): The template.
        base ([`~transformers.PreTrainedTokenizerBase`]): The vocabulary; it is not changed.
    """
    from tokenizers import AddedToken

    tokenizer: Any = copy.deepcopy(base)
    tokenizer.chat_template = source
    stop = stops_of(source)[0]
    eos = "<|endoftext|>" if stop == "\n\n" else _EOS.get(stop, stop)
    tokenizer.bos_token, tokenizer.eos_token = "<s>", eos
    written = source
    for dialogue in DIALOGUES:
        try:
            written += tokenizer.apply_chat_template(dialogue.messages, tools=dialogue.tools, tokenize=False)
        except Exception:  # the template can't render this one; the judge says so later
            continue
    tokens = sorted({*_CONTROL.findall(written), "<s>", eos, *(set(stops_of(source)) - {"\n\n"})})
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    tags = [tag for tag in _TAGS if tag in source]
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    return tokenizer
