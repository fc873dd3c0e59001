# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Tokenizing renderings that share most of their text: each distinct piece between control tokens is tokenized once.

A fast tokenizer looks for its added tokens before it does anything else, and then treats the text between them piece
by piece. So cutting at those tokens changes nothing, as long as none of them reaches into the text around it and no
piece is treated differently for standing first. The first is checked on the tokens' flags, the second on a probe; a
sample of the renderings is tokenized whole too, and compared. Where cutting is not exact, texts are tokenized whole.

Cost: a scan of every text, tokenization of every distinct piece.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Ids = npt.NDArray[np.int64]

# Pieces as they stand between control tokens: words, spaces and line breaks at either end, nothing at all.
_PROBE = (
    "Hello",
    " world ",
    "\n\nA b",
    "",
    "1.5 e\u0301x,",
    "\n",
    "  \n x",
    "\u00a0\u4f60\u597d ",
    "def f():\n\treturn",
)
# The cache is emptied when it holds more text than this: 8 million characters are about 2 million tokens, 16 MB.
_CACHED_CHARACTERS = 8_000_000


class SegmentTokenizer:
    """
    Tokenizes texts without adding special tokens, with the same ids as `tokenizer(text, add_special_tokens=False)`.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Not to be changed afterwards.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._blank: dict[int, bool] = {}
        added = tokenizer.added_tokens_decoder
        self.special_ids = frozenset(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
        self._texts_seen, self._next_check = 0, 1
        self._pattern: re.Pattern[str] | None = None
        self._token_ids: dict[str, Ids] = {"": np.empty(0, dtype=np.int64)}
        # Tokens that are looked for in the text as it stands; others are found after normalization, in the pieces.
        raw = {i: token for i, token in added.items() if not token.normalized and token.content}
        reaching = any(token.lstrip or token.rstrip or token.single_word for token in raw.values())
        if raw and not reaching and tokenizer.is_fast:
            self._pattern = re.compile(f"({_longest_match(token.content for token in raw.values())})")
            self._token_ids |= {token.content: np.array([i], dtype=np.int64) for i, token in raw.items()}
        self._pieces: dict[str, Ids] = dict(self._token_ids)
        self._cached_characters = 0
        if self._pattern is not None and not self._probe_is_exact():
            self._pattern = None

    @property
    def cuts(self) -> bool:
        """Whether texts are cut at control tokens; `False` where that is not exact for this tokenizer."""
        return self._pattern is not None

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Token ids of each text, int64."""
        if self._pattern is None or not texts:
            return self._encode_whole(texts)
        encoded = self._encode_pieces(texts, self._pattern)
        for text, ids in zip(texts, encoded, strict=True):
            self._texts_seen += 1
            if self._texts_seen < self._next_check:
                continue
            self._next_check *= 4
            if not np.array_equal(ids, self._encode_whole([text])[0]):
                raise RuntimeError(
                    f"{type(self._tokenizer).__name__} tokenizes a text differently when it is cut at control tokens, "
                    f"although the checks found none that allows this: {text[:200]!r}. Please report this tokenizer."
                )
        return encoded

    def encode_alone(self, text: str) -> Ids:
        """Token ids of a text as they follow any other token: without the space that some tokenizers put in front."""
        if self.cuts:
            return self.encode([text])[0]
        alone, anchor = self._encode_whole(["\n" + text, "\n"])
        if common_prefix(anchor, alone) < len(anchor):
            raise ValueError(f"{type(self._tokenizer).__name__} can't tokenize {text[:80]!r} by itself; drop the row.")
        return alone[len(anchor) :]

    def is_blank(self, token_id: int) -> bool:
        """Whether a token is white space or nothing."""
        if token_id not in self._blank:
            self._blank[token_id] = not self._tokenizer.decode([token_id]).strip()
        return self._blank[token_id]

    def _encode_whole(self, texts: Sequence[str]) -> list[Ids]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return [np.array(ids, dtype=np.int64) for ids in encoded["input_ids"]]

    def _encode_pieces(self, texts: Sequence[str], pattern: re.Pattern[str]) -> list[Ids]:
        if self._cached_characters > _CACHED_CHARACTERS:
            self._pieces, self._cached_characters = dict(self._token_ids), 0
        cut = [pattern.split(text) for text in texts]  # text, token, text, ..., token, text
        new = list({piece: None for pieces in cut for piece in pieces[::2] if piece not in self._pieces})
        self._pieces.update(zip(new, self._encode_whole(new), strict=True))
        self._cached_characters += sum(map(len, new))
        return [np.concatenate([self._pieces[piece] for piece in pieces]) for pieces in cut]

    def _probe_is_exact(self) -> bool:
        assert self._pattern is not None
        tokens = [content for content in self._token_ids if content][:64]
        pieces = cycle(_PROBE)
        texts = ["".join(next(pieces) + token for token in [*tokens, *tokens[:1] * len(_PROBE)]), *_PROBE]
        whole, cut = self._encode_whole(texts), self._encode_pieces(texts, self._pattern)
        return all(map(np.array_equal, whole, cut))


def common_prefix(first: Ids, second: Ids) -> int:
    """Number of tokens that two texts share at their start."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length


def _longest_match(words: Iterable[str]) -> str:
    """A pattern for the longest of the words at a position. Thousands of words are no slower than a few."""
    by_first: dict[str, list[str]] = {}
    ends_here = False
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
        else:
            ends_here = True
    if not by_first:
        return ""
    options = "|".join(re.escape(first) + _longest_match(rests) for first, rests in by_first.items())
    return f"(?:{options}){'?' if ends_here else ''}" if ends_here or len(by_first) > 1 else options
