"""Tokens to text as they come: never half a character, never a wrong space.

Also how many bytes of text one token can stand for (`longest_token_bytes`). A text of n bytes has
at least n divided by that many tokens."""

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
"""A composed character has at most so many times fewer bytes than its parts (U+1F82, U+0390)."""


class Detokenizer(Protocol):
    """One choice's tokens to text. `flush` returns what is left of an incomplete character at the
    end."""

    def feed(self, token_id: TokenId) -> str: ...

    def flush(self) -> str: ...


class Vocabulary:
    """What each token stands for. Special tokens are silent, other added tokens are text."""

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
        """The same, but these special tokens are text: an output format needs to see them."""
        changed = copy(self)
        names = {text.encode() for text in texts}
        changed._added = self._added | {t: name for t, name in self._names.items() if name in names}
        return changed

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """`continues`: the text goes on with the prompt's, so that a space before it counts."""
        if self._is_byte_level or self._is_sentencepiece:
            drops_first_space = self._is_sentencepiece and not continues
            return _ByteDetokenizer(self, drops_first_space=drops_first_space)
        return _OtherDetokenizer(self._tokenizer)

    def spelled(self, token_id: TokenId) -> Spelled:
        """A token by itself. A special one has its name, and is silent unless it is text here."""
        text = self.bytes_of(token_id)
        if not text and token_id in self._names:
            return Spelled(self._names[token_id], is_silent=True)
        return Spelled(text, is_silent=False)

    def bytes_of(self, token_id: TokenId) -> bytes:
        """The bytes of a byte-level or SentencePiece-like token; none for an unknown one."""
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
    """For any other tokenizer: its own decoder, which waits for whole characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)

    def feed(self, token_id: TokenId) -> str:
        return self._stream.step(self._tokenizer, token_id) or ""

    def flush(self) -> str:
        return ""


def longest_token_bytes(tokenizer: Tokenizer) -> int:
    """UTF-8 bytes of a text that one token stands for at most; 0 where there is no such bound.

    There is no bound where the tokenizer leaves text out. It does where it fuses unknown characters
    into one token, where added tokens take the white space beside them, and maybe by a normalizer
    that is not known here.
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
    """The most bytes of text that become one byte of normalized text. None: not known."""
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
    if isinstance(decoder, dict):
        yield str(decoder.get("type"))
        for inner in decoder.get("decoders", ()):
            yield from _decoder_types(inner)
