# Copyright 2026 The hf_prefix_tree team. Licensed under the Apache License, Version 2.0.
"""A tokenizer and its chat template, for renderings that share most of their text.

The template is compiled once, and its inputs are copied once per conversation. Texts equal those of
`tokenizer.apply_chat_template(messages, tokenize=False)`, which copies messages and tools for every rendering and
serializes every tool anew; for an agent dialogue, rendered once per turn, this is most of it.

Each distinct piece of text between control tokens is tokenized once. A fast tokenizer looks for its added tokens
before anything else, and then treats the text between them piece by piece. So cutting there changes nothing, as long
as no added token reaches into the text around it and no piece is treated differently for standing first. The first is
checked on the tokens' flags, the second on a probe; a sample of the renderings is tokenized whole too, and compared.
Where cutting is not exact, texts are tokenized whole.

Cost: one pass of the template over the messages per rendering; a scan of every text, tokenization of every distinct
piece.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache, partial
from inspect import signature
from itertools import cycle, groupby
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from hf_prefix_tree.data.dialect import Dialect, Ids
from hf_prefix_tree.data.messages import Message
from hf_prefix_tree.tree.folding import common_prefix

# Arguments of `apply_chat_template` that are not for the template, and its variable for the conversation.
_OWN_ARGUMENTS = {*signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
_OWN_ARGUMENTS -= {"self", "documents", "chat_template", "kwargs"}
# Pieces as they stand between control tokens: words, spaces and line breaks at either end, nothing at all.
_PROBE = (
    *("Hello", " world ", "\n\nA b", "", "1.5 e\u0301x,", "\n", "  \n x", "\u00a0\u4f60\u597d ", "def f():\n\treturn"),
)
# The cache is emptied when it holds more text than this: 8 million characters are about 2 million tokens, 16 MB.
_CACHED_CHARACTERS = 8_000_000


class ChatTemplate:
    """
    The chat template of a tokenizer, and the tokenizer that goes with it.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with a chat template. Not to be changed afterwards.
        source (`str`):
            The template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
        self.segments = SegmentTokenizer(tokenizer)
        self.takes_enable_thinking = re.search(r"\benable_thinking\b", source) is not None
        self._tokenizer = tokenizer
        self._source = source
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._json: dict[Any, tuple[Any, str]] = {}
        self._dialects: dict[str, Dialect] = {}
        self._compiled = self._compile()

    def render(
        self,
        messages: Sequence[Message],
        tools: list[Any] | None,
        variables: dict[str, Any],
        add_generation_prompt: bool = False,
    ) -> str:
        """
        Render normalized messages.

        Raises:
            `ValueError`: If the template raises. The message gives its reason.
        """
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            if self._compiled is None:
                options |= {"chat_template": self._source, "tokenize": False}
                return self._tokenizer.apply_chat_template(list(messages), **options, **variables)
            special_tokens = self._special_tokens
            return self._compiled.render(messages=messages, documents=None, **options, **special_tokens | variables)
        except Exception as error:  # whatever a template does with data that it was not written for
            what = f"the prompt after {len(messages)} messages" if add_generation_prompt else "the messages"
            roles = ", ".join(message["role"] for message in messages[-4:]) or "none"
            raise ValueError(
                f"the chat template can't render {what}: {type(error).__name__}: {error}. Fix the order of the "
                f"messages (roles {roles} at the end), or the types of their content and of the arguments of their "
                "calls; or pass another `chat_template`."
            ) from error

    def forget(self) -> None:
        """Drop what was kept of the last conversation's tools."""
        self._json.clear()

    def dialect(self, variables: dict[str, Any]) -> Dialect:
        """The form of messages that the template reads under these variables, and how it ends turns."""
        key = json.dumps(variables, sort_keys=True, default=str)
        if key not in self._dialects:
            render = partial(self.render, variables=variables)
            self._dialects[key] = Dialect(render, self.segments, self._tokenizer.eos_token_id)
        return self._dialects[key]

    def token(self, token_id: int) -> str:
        return str(self._tokenizer.convert_ids_to_tokens(token_id))

    @cached_property
    def generation_stop_ids(self) -> frozenset[int]:
        """The tokens at which generation ends: those of the `generation_config.json` beside the tokenizer, if any."""
        file = Path(self._tokenizer.name_or_path) / "generation_config.json"
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        return frozenset([ids] if isinstance(ids, int) else ids or ())

    def _compile(self) -> Any:
        """The template as Transformers compiles it, or `None` where the tokenizer renders in a way of its own."""
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import _compile_jinja_template

        if type(self._tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
            return None
        try:
            environment = _compile_jinja_template(self._source).environment.overlay()
        except TemplateSyntaxError as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the chat template is not valid ({reason}); correct it, or pass another.") from None
        to_json = environment.filters["tojson"]

        def to_json_once(value: Any, *args: Any, **options: Any) -> str:
            if not isinstance(value, (dict, list)):
                return to_json(value, *args, **options)
            # Keeping the value keeps its id from being given to another one. Templates can't change it.
            key = (id(value), args, *options.items())
            if key not in self._json:
                self._json[key] = (value, to_json(value, *args, **options))
            return self._json[key][1]

        environment.filters = environment.filters | {"tojson": to_json_once}
        return environment.from_string(self._source)


def chat_template_of(
    tokenizer: PreTrainedTokenizerBase, tools: list[Any] | None, variables: dict[str, Any]
) -> ChatTemplate:
    """
    The template that `tokenizer` uses for these tools; the same object as last time if nothing changed.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Tokenizer with a chat template.
        tools (`list`, *optional*):
            Tokenizers may have a template of its own for tools.
        variables (`dict[str, Any]`):
            The caller's `chat_template_kwargs`. `chat_template` is taken out of it.

    Raises:
        `ValueError`: If there is no template, or `variables` has a name that is not for the template.
    """
    for name in sorted(_OWN_ARGUMENTS & variables.keys()):
        raise ValueError(f"`chat_template_kwargs` has {name!r}, which is set here; take it out.")
    try:
        source = tokenizer.get_chat_template(variables.pop("chat_template", None), tools)
    except ValueError as error:
        raise ValueError(
            f"`tokenizer` ({type(tokenizer).__name__}) has no chat template ({error}); set `tokenizer.chat_template`."
        ) from None
    return _chat_template(tokenizer, source, len(tokenizer), getattr(tokenizer, "split_special_tokens", False))


@lru_cache(maxsize=4)
def _chat_template(tokenizer: PreTrainedTokenizerBase, source: str, *_changes: Any) -> ChatTemplate:
    return ChatTemplate(tokenizer, source)


def encode_first(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """
    Token ids of texts with the special tokens that a tokenizer puts in front, but without those that it puts behind. A
    text that begins with the start token gets no second one.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The model's tokenizer.
        texts (sequence of `str`): The texts.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full, *ids = tokenizer(["a", *texts], return_attention_mask=False, verbose=False)["input_ids"]
    behind = next(i for i in range(len(full)) if full[len(full) - i - len(plain) : len(full) - i] == plain)
    return [x[x[:2] == [tokenizer.bos_token_id] * 2 : len(x) - behind] for x in ids]


def encode_alone(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """
    Token ids of texts as they follow other tokens: without the space that some tokenizers put in front of a text. A
    text that shares a token with a line break before it, or whose tokenizer knows none, is tokenized as it is.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The model's tokenizer.
        texts (sequence of `str`): The texts.
    """
    encode: Any = partial(tokenizer, add_special_tokens=False, return_attention_mask=False, verbose=False)
    start, *ids = encode(["\n", *("\n" + text for text in texts)])["input_ids"]
    size = 0 if tokenizer.unk_token_id in start else len(start)
    return [x[size:] if x[:size] == start else encode(y)["input_ids"] for x, y in zip(ids, texts, strict=True)]


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


def _longest_match(words: Iterable[str]) -> str:
    """A pattern for the longest of the words at a position. Thousands of words are no slower than a few."""
    words = sorted(words)
    by_first = groupby(filter(None, words), key=lambda word: word[0])
    options = [re.escape(first) + _longest_match(word[1:] for word in group) for first, group in by_first]
    if not options:
        return ""
    ends_here, either = "" in words, "|".join(options)
    return f"(?:{either}){'?' if ends_here else ''}" if ends_here or len(options) > 1 else either
