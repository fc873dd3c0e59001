# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""Tokenizing piece by piece gives what tokenizing whole gives, or is not done."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_prefix_tree.data.template import SegmentTokenizer
from hf_prefix_tree.tree.folding import common_prefix

WORDS = [
    "Hello",
    " world",
    "\n",
    "\n\n",
    "  ",
    " ",
    "é",
    "e\u0301",
    "你好",
    "1.5",
    "'s",
    "<",
    "|",
    "<|",
    "think>",
    "\u00a0",
]


def random_texts(tokenizer, number: int) -> list[str]:
    rng = random.Random(0)
    tokens = [token.content for token in tokenizer.added_tokens_decoder.values()]
    lengths = [rng.randint(0, 40) for _ in range(number)]
    return ["".join(rng.choice(rng.choice([WORDS, tokens])) for _ in range(length)) for length in lengths]


def whole(tokenizer, texts: list[str]) -> list[list[int]]:
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def assert_exact(tokenizer, cuts: bool, number: int = 400) -> None:
    segments, texts = SegmentTokenizer(tokenizer), random_texts(tokenizer, number)
    assert segments.cuts is cuts
    encoded = segments.encode(texts)
    assert [ids.tolist() for ids in encoded] == whole(tokenizer, texts)
    assert {ids.dtype for ids in encoded} == {np.dtype(np.int64)}
    assert segments.encode([]) == []


def with_tokens(tokenizer, *tokens: AddedToken):
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(list(tokens))
    return changed


def metaspace(prepend: str) -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose words begin with a space, in the way of SentencePiece."""
    words = {"<unk>": 0, "<s>": 1, "▁": 2, "▁world": 3, "world": 4, "▁Hello": 5, "Hello": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>")


def test_byte_level(tiny_tokenizer):
    assert_exact(tiny_tokenizer, cuts=True)


def test_qwen3(qwen3_tokenizer):
    assert_exact(qwen3_tokenizer, cuts=True)


def test_tokens_that_contain_one_another(tiny_tokenizer):
    tokens = ("<|im", "<|im_end|>\n", "<|im_end|><|im_start|>", "think", "<think>\n\n</think>", "你")
    assert_exact(with_tokens(tiny_tokenizer, *(AddedToken(t, normalized=False) for t in tokens)), cuts=True)


def test_tokens_that_are_found_after_normalization(tiny_tokenizer):
    changed = with_tokens(tiny_tokenizer, AddedToken("world", normalized=True), AddedToken("e", normalized=True))
    changed.backend_tokenizer.normalizer = normalizers.NFC()
    assert_exact(changed, cuts=True)


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_reach_into_the_text_around_them(tiny_tokenizer, flag):
    assert_exact(with_tokens(tiny_tokenizer, AddedToken("<x>", normalized=False, **{flag: True})), cuts=False)


@pytest.mark.parametrize(("prepend", "cuts"), [("first", False), ("always", True), ("never", True)])
def test_a_piece_that_stands_first_is_treated_differently(prepend, cuts):
    assert_exact(metaspace(prepend), cuts=cuts)


def test_special_tokens_as_text(tiny_tokenizer):
    changed = copy.deepcopy(tiny_tokenizer)
    changed.split_special_tokens = True
    segments = SegmentTokenizer(changed)
    assert not segments.cuts
    assert [ids.tolist() for ids in segments.encode(["a<|im_end|>"])] == whole(changed, ["a<|im_end|>"])


def test_what_texts_share_is_tokenized_once(tiny_tokenizer):
    calls: list[list[str]] = []

    class Counting(type(tiny_tokenizer)):
        def __call__(self, text, **options):
            calls.append(text)
            return super().__call__(text, **options)

    counting = copy.deepcopy(tiny_tokenizer)
    counting.__class__ = Counting
    segments = SegmentTokenizer(counting)
    turns = [f"<|im_start|>user\nquestion {i}<|im_end|>\n" for i in range(9)]
    texts = ["".join(turns[:n]) for n in range(1, 10)]
    segments.encode(texts[:1])
    calls.clear()
    segments.encode(texts[1:])
    pieces, *checks = calls
    assert pieces == [f"user\nquestion {i}" for i in range(1, 9)]
    assert checks == [[texts[3]]]  # of the texts 1, 4, 16, ...


def test_a_wrong_piece_is_found_by_the_sample(tiny_tokenizer):
    segments = SegmentTokenizer(tiny_tokenizer)
    segments.encode(["Hi<|im_end|>"])
    segments._pieces["Hi"] = segments._pieces["Hi"][:-1]
    segments.encode(["Hi<|im_end|>"] * 2)
    with pytest.raises(RuntimeError, match=r"differently when it is cut at control tokens.*'Hi<\|im_end\|>'"):
        segments.encode(["Hi<|im_end|>"])


def test_the_cache_is_bounded(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("hf_prefix_tree.data.template._CACHED_CHARACTERS", 50)
    segments, texts = SegmentTokenizer(tiny_tokenizer), [f"{'x' * 10}{i}<|im_end|>" for i in range(30)]
    own_tokens = len(segments._token_ids)
    for text, expected in zip(texts, whole(tiny_tokenizer, texts), strict=True):
        assert segments.encode([text])[0].tolist() == expected
        assert len(segments._pieces) <= own_tokens + 6


@pytest.mark.parametrize(
    ("first", "second", "length"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 5, 3], 1), ([4], [5], 0)],
)
def test_common_prefix(first, second, length):
    assert common_prefix(np.array(first), np.array(second)) == length
    assert common_prefix(np.array(second), np.array(first)) == length
