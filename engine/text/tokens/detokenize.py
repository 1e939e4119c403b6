"""Turns tokens into text as they come: never half a character, never a wrong space.

It also bounds the bytes of text that one token can stand for (`longest_token_bytes`). A text of n
bytes has at least n divided by that bound tokens.
"""

import codecs
import json
from collections.abc import Iterator
from copy import copy
from math import prod
from typing import Any, Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from engine.cache.ids import TokenId
from engine.schedule.output import Spelled

_SPACE = "\u2581"  # SentencePiece's stand-in for a space
_BYTE_TOKEN_LENGTH = len("<0x00>")
_NFC_SHRINKS = 3
"""The parts of a composed character have at most so many times its bytes (U+1F82, U+0390)."""


class Detokenizer(Protocol):
    """Turns the tokens of one choice into text."""

    def feed(self, token_id: TokenId) -> str:
        """The text that is whole with this token."""
        ...

    def flush(self) -> str:
        """The rest of an incomplete character at the end."""
        ...


class Vocabulary:
    """The text of each token. Special tokens are silent. Other added tokens are text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder().items()
        self._names = {token_id: token.content.encode() for token_id, token in added}
        silent = {token_id: b"" for token_id, token in added if token.special}
        self._added = self._names | silent
        kinds = set(_decoder_types(json.loads(tokenizer.to_str())["decoder"]))
        self._is_byte_level = "ByteLevel" in kinds
        self._is_sentencepiece = bool(kinds & {"Metaspace", "ByteFallback"})
        # GPT-2's printable character for each byte (`bytes_to_unicode` in its encoder.py).
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = (byte for byte in range(256) if byte not in printable)
        self._bytes_of = {chr(byte): byte for byte in printable}
        self._bytes_of |= {chr(256 + index): byte for index, byte in enumerate(hidden)}

    def with_text(self, texts: set[str]) -> "Vocabulary":
        """The same vocabulary, in which these special tokens are text. Output formats need them."""
        changed = copy(self)
        names = {text.encode() for text in texts}
        changed._added = self._added | {t: name for t, name in self._names.items() if name in names}
        return changed

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """A detokenizer for one choice.

        `continues` says that the text continues the prompt's text. Then a space at its beginning
        counts.
        """
        if self._is_byte_level or self._is_sentencepiece:
            drops_first_space = self._is_sentencepiece and not continues
            return _ByteDetokenizer(self, drops_first_space=drops_first_space)
        return _OtherDetokenizer(self._tokenizer)

    def spelled(self, token_id: TokenId) -> Spelled:
        """A token by itself. A special token has its name as text, and is silent unless it is text
        here."""
        text = self.bytes_of(token_id)
        if not text and token_id in self._names:
            return Spelled(self._names[token_id], is_silent=True)
        return Spelled(text, is_silent=False)

    def bytes_of(self, token_id: TokenId) -> bytes:
        """The bytes of a token of a byte-level or SentencePiece-like vocabulary; empty for an
        unknown token."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            return bytes(self._bytes_of[char] for char in token if char in self._bytes_of)
        if token.startswith("<0x") and token.endswith(">") and len(token) == _BYTE_TOKEN_LENGTH:
            return bytes.fromhex(token[3:5])
        return token.replace(_SPACE, " ").encode()


class _ByteDetokenizer:
    """For byte-level and SentencePiece-like tokenizers. It decodes the bytes of tokens."""

    def __init__(self, vocabulary: Vocabulary, *, drops_first_space: bool) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drops_space = drops_first_space

    def feed(self, token_id: TokenId) -> str:
        text = self._decoder.decode(self._vocabulary.bytes_of(token_id))
        if self._drops_space and text:
            self._drops_space = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _OtherDetokenizer:
    """For any other tokenizer. It uses the tokenizer's own decoder, which waits for whole
    characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_id: TokenId) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""

    def flush(self) -> str:
        return ""


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """The most UTF-8 bytes of a text for which one token stands; 0 if there is no bound.

    There is no bound if one token can stand for any amount of text. That is so if the tokenizer
    fuses unknown characters into one token, or if added tokens take the white space beside them. It
    is also assumed of a normalizer that is not known here.
    """
    parts = json.loads(tokenizer.to_str())
    factor = _factor(parts["normalizer"])
    added = tokenizer.get_added_tokens_decoder().values()
    if factor is None or any(token.lstrip or token.rstrip for token in added):
        return 0
    if not {"ByteLevel", "ByteFallback"} & set(_decoder_types(parts["decoder"])):
        return 0
    vocabulary = Vocabulary(tokenizer).with_text({token.content for token in added})
    longest = max(len(vocabulary.bytes_of(token_id)) for token_id in tokenizer.get_vocab().values())
    return factor * longest


def _factor(normalizer: Any) -> int | None:
    """The most bytes of text that become one byte of normalized text; None: it is not known."""
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Sequence":
            factors = [_factor(inner) for inner in normalizer["normalizers"]]
            return None if None in factors else prod(filter(None, factors))
        case "NFC":
            return _NFC_SHRINKS
        case "Prepend":
            return 1
        case "Replace" if normalizer["pattern"] == {"String": " "} and normalizer["content"]:
            return 1
        case _:
            return None


def _decoder_types(decoder: Any) -> Iterator[str]:
    """The types of a tokenizer's decoder and of the decoders in it."""
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders", ()):
            yield from _decoder_types(inner)
