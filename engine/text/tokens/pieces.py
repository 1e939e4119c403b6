"""Text to tokens, piece by piece; what was tokenized before is remembered."""

import json
import re
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from tokenizers import Encoding, Tokenizer

from engine.cache.ids import TokenId

# Special tokens are control tokens by declaration; others by looking like markup, as
# `<tool_call>` or `[INST]` do. What remains (runs of spaces, names) is text.
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)
_CACHE_BYTES = 256 * 1024 * 1024
_ENTRY_BYTES = 200  # of an entry without its text and numbers


@dataclass(frozen=True, slots=True)
class Piece:
    """A text's tokens. `character_ends[i]` characters lie before token i + 1."""

    token_ids: "array[int]"
    character_ends: "array[int]"

    @property
    def num_bytes(self) -> int:
        return 8 * len(self.token_ids)


class PieceTokenizer:
    """Encodes pieces of a prompt so that they add up to the encoding of the whole.

    Control tokens' texts in a piece become those tokens: pieces from clients are cut first
    (`engine.text.template.marks.cut_controls`). `controls` finds them, None where there are none.
    """

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int = _CACHE_BYTES) -> None:
        self.tokenizer = tokenizer
        self.control_ids = _control_ids(tokenizer)
        self.controls = _control_pattern(self.control_ids)
        self._inner = _without_prefix_space(tokenizer)
        self._cache = _PieceCache(cache_bytes)

    def encode(self, text: str, *, is_first: bool, scope: str = "") -> Piece:
        """The tokens of a piece; only the prompt's first piece may get the tokenizer's prefix.

        `scope` keeps tenants from timing what others have sent.
        """
        key = (scope, is_first, text)
        piece = self._cache.find(key)
        if piece is None:
            piece = self._encode(text, is_first=is_first)
            self._cache.add(key, piece)
        return piece

    def _encode(self, text: str, *, is_first: bool) -> Piece:
        if is_first or self._inner is None:
            return _piece(self.tokenizer.encode(text, add_special_tokens=False))
        # Behind a control token the tokenizer treats text as it does in the middle of a prompt.
        match = None if self.controls is None else self.controls.search(text)
        split = len(text) if match is None else match.start()
        head = _piece(self._inner.encode(text[:split], add_special_tokens=False))
        tail = _piece(self.tokenizer.encode(text[split:], add_special_tokens=False))
        shifted = array("I", [end + split for end in tail.character_ends])
        return Piece(head.token_ids + tail.token_ids, head.character_ends + shifted)


class _PieceCache:
    """Least recently used, bounded by bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pieces: OrderedDict[tuple[str, bool, str], Piece] = OrderedDict()

    def find(self, key: tuple[str, bool, str]) -> Piece | None:
        piece = self._pieces.get(key)
        if piece is not None:
            self._pieces.move_to_end(key)
        return piece

    def add(self, key: tuple[str, bool, str], piece: Piece) -> None:
        self._pieces[key] = piece
        self._num_bytes += _size(key, piece)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._pieces.popitem(last=False))


def _size(key: tuple[str, bool, str], piece: Piece) -> int:
    return _ENTRY_BYTES + 4 * len(key[2]) + piece.num_bytes


def _piece(encoding: Encoding) -> Piece:
    ends = array("I", [end for _, end in encoding.offsets])
    return Piece(array("I", encoding.ids), ends)


def _control_ids(tokenizer: Tokenizer) -> dict[str, TokenId]:
    return {
        token.content: token_id
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        # A single character can't be cut in two, so it counts as text.
        if len(token.content) > 1 and (token.special or _MARKUP.fullmatch(token.content))
    }


def _control_pattern(control_ids: dict[str, TokenId]) -> re.Pattern[str] | None:
    if not control_ids:
        return None
    longest_first = sorted(control_ids, key=len, reverse=True)
    return re.compile("|".join(re.escape(text) for text in longest_first))


def _without_prefix_space(tokenizer: Tokenizer) -> Tokenizer | None:
    """The same tokenizer for text inside a prompt, None where the two do not differ.

    SentencePiece-like tokenizers put a space before the first word they see.
    """
    original = tokenizer.to_str()
    parts = json.loads(original)
    for name in ("normalizer", "pre_tokenizer"):
        parts[name] = _drop_prefix(parts[name])
    changed = json.dumps(parts, ensure_ascii=False)
    if json.loads(original) == parts:
        return None
    return Tokenizer.from_str(changed)


def _drop_prefix(part: Any) -> Any:
    """A tokenizer's part, as its JSON declares it, without what adds a prefix."""
    if not isinstance(part, dict):
        return part
    if part.get("type") == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    part = dict(part)
    if part.get("type") == "Metaspace":
        part["prepend_scheme"] = "never"
    if part.get("type") == "ByteLevel":
        part["add_prefix_space"] = False
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            part[name] = [_drop_prefix(inner) for inner in part[name]]
    return part
