"""Turns text into the same tokens that the tokenizer makes of the whole text in one call.

The text is split before control tokens, because every tokenizer splits it there too. Each *piece*
is encoded by itself, and its tokens are remembered. If a client wrote the text of a control token,
its piece is encoded by a tokenizer without control tokens.
"""

import json
import re
from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from engine.cache.ids import TokenId
from engine.errors import InvalidRequest

# Special tokens are control tokens. So is an added token that looks like markup, as `<tool_call>`
# and `[INST]` do, or that the chat template writes. Other added tokens, as runs of spaces, are
# text.
_MARKUP = re.compile(r"[<\[].*[>\]]", re.DOTALL)


class ControlMatch(NamedTuple):
    """The characters [begin, end) of a text are the text of the control token `token_id`."""

    begin: int
    end: int
    token_id: TokenId


class ControlTexts:
    """Finds the texts of control tokens. `ids` maps each text to its token."""

    def __init__(self, ids: Mapping[str, TokenId]) -> None:
        self.ids = dict(ids)
        longest_first = map(re.escape, sorted(self.ids, key=len, reverse=True))
        self.pattern = re.compile("|".join(longest_first) or "(?!)")
        self._longest = max(map(len, self.ids), default=0)
        self._joined = "\0".join(self.ids)
        self._by_beginning: dict[str, list[str]] = {}
        self._by_end: dict[str, list[str]] = {}
        for text in self.ids:
            for size in range(1, len(text)):
                self._by_beginning.setdefault(text[:size], []).append(text)
                self._by_end.setdefault(text[-size:], []).append(text)

    def matches(self, text: str) -> list[ControlMatch]:
        """The control tokens in a text: leftmost, longest and without overlaps, as tokenizers match
        added tokens."""
        return [
            ControlMatch(match.start(), match.end(), self.ids[match.group()])
            for match in self.pattern.finditer(text)
        ]

    def cut(self, text: str, mark: str) -> str:
        """The text with `mark` behind the first character of each control token's text in it.

        The mark stands inside. So the text is no control token even if a template changes the mark.
        A shorter control token may begin inside another one, so the search goes on there.
        """
        pieces: list[str] = []
        last = 0
        match = self.pattern.search(text)
        while match is not None:
            is_long = match.end() - match.start() > 1
            pieces += [text[last : match.start() + is_long], mark]
            last = match.start() + is_long
            match = self.pattern.search(text, match.start() + 1)
        pieces.append(text[last:])
        return "".join(pieces)

    def completed_by(self, text: str) -> frozenset[str]:
        """The control tokens' texts that this text could become a part of, with template text
        around it.

        A template that writes `<` + name + `>` makes `<think>` of a tool with the name `think`.
        """
        text = text.strip()
        if not text:
            return frozenset()
        controls: set[str] = set()
        if len(text) < self._longest and text in self._joined:
            controls.update(c for c in self.ids if text in c and text != c)
        for size in range(1, self._longest):
            controls.update(self._by_beginning.get(text[-size:], ()))
            controls.update(self._by_end.get(text[:size], ()))
        return frozenset(controls)

    def cut_completing(self, text: str, mark: str, controls: frozenset[str]) -> str:
        """The text with `mark` in it, if it could become a part of one of these control texts.

        A mark stands at the beginning and before the last character. So each part of the text that
        could stand in a control text has a mark at its beginning or inside.
        """
        if self.completed_by(text).isdisjoint(controls):
            return text
        body = text.strip()
        return text.replace(body, mark + body[:-1] + mark + body[-1], 1)


_CACHE_BYTES = 256 * 1024 * 1024
_ENTRY_BYTES = 300  # the size of an entry without its text and numbers
_SPACE = "\u2581"  # SentencePiece's stand-in for a space
_LINE_ENDS = ("\n", "\r")
_SAMPLE = "one two, three"


@dataclass(frozen=True, slots=True)
class Piece:
    """A text's tokens."""

    token_ids: "array[int]"
    # For each token the number of the text's characters up to its end.
    character_ends: "array[int]"
    # For each token 1 if no token could join its characters with those before it, else 0.
    edges: bytearray

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece and its place in a text."""

    # The character of the text at which the piece begins.
    begin: int
    # The number of the text's tokens before the piece.
    first_token: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class EncodedText:
    """A text's tokens, piece by piece."""

    pieces: Sequence[PlacedPiece]

    def token_ids(self) -> list[TokenId]:
        return list(chain.from_iterable(placed.piece.token_ids for placed in self.pieces))

    def piece_at(self, character: int) -> PlacedPiece | None:
        """The piece with this character; the last piece for the text's end; None if there are no
        pieces."""
        index = bisect_right(self.pieces, character, key=lambda placed: placed.begin) - 1
        return self.pieces[index] if index >= 0 else None


class PieceTokenizer:
    """Encodes whole texts. Pieces that were encoded are remembered, separately for each scope."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str = "",
        end_token_ids: Iterable[TokenId] = (),
        cache_bytes: int = _CACHE_BYTES,
    ) -> None:
        self.tokenizer = tokenizer
        ends = frozenset(end_token_ids)
        # Finds the texts of control tokens.
        self.controls = ControlTexts(
            {
                token.content: token_id
                for token_id, token in tokenizer.get_added_tokens_decoder().items()
                if token.content.strip()
                and (
                    token.special
                    or token_id in ends
                    or _MARKUP.fullmatch(token.content)
                    # A word that the tokenizer keeps whole has a meaning if the template writes it.
                    or (len(token.content) > 1 and token.content in template)
                )
            }
        )
        parts = json.loads(tokenizer.to_str())
        # The post-processor moves offsets away from white space. It also adds tokens that templates
        # already write.
        parts["post_processor"] = None
        self._whole = Tokenizer.from_str(json.dumps(parts))
        # The added tokens at which the tokenizer splits a text before anything else. True: the
        # token takes the white space before it.
        self._splitting: dict[TokenId, bool] = {
            token["id"]: token["lstrip"]
            for token in parts["added_tokens"]
            if not token["single_word"] and (not token["normalized"] or parts["normalizer"] is None)
        }
        self.control_ids = self.controls.ids
        self._controls = frozenset(self.control_ids.values())
        self._plain: _PlainTokenizer | None = None
        self._edges = _Edges(self._whole)
        self._cache = _PieceCache(cache_bytes)

    def encode(self, text: str, cuts: Sequence[int] = (), *, scope: str = "") -> EncodedText:
        """The tokens of a text. The texts of control tokens in it become control tokens.

        A text with one of `cuts` at its beginning or inside becomes no control token. `cuts` are
        characters of the text, ascending.
        """
        owned = [
            match
            for match in self.controls.matches(text)
            if bisect_left(cuts, match.begin) == bisect_left(cuts, match.end)
        ]
        begins = [match.begin for match in owned]
        # The text may be encoded in parts that meet where a control token splits it.
        borders = [0] if text else []
        for match in owned:
            takes_space = self._splitting.get(match.token_id)
            is_split = takes_space is False or (
                takes_space is True and not text[match.begin - 1].isspace()
            )
            if match.begin and is_split:
                borders.append(match.begin)
        keys: list[_Key] = []
        for begin, end in pairwise([*borders, len(text)]):
            inside: tuple[ControlMatch, ...] | None = None
            if bisect_left(cuts, begin) != bisect_left(cuts, end):
                matches = owned[bisect_left(begins, begin) : bisect_left(begins, end)]
                inside = tuple(
                    ControlMatch(match.begin - begin, match.end - begin, match.token_id)
                    for match in matches
                )
            keys.append(_Key(scope, text[begin:end], begin == 0, inside))
        known: dict[_Key, Piece] = {}
        for key in keys:
            piece = self._cache.find(key)
            if piece is not None:
                known[key] = piece
        missing = [key for key in dict.fromkeys(keys) if key not in known]
        # A batch frees the interpreter's lock. A single call would hold it.
        encodings = self._whole.encode_batch([k.text for k in missing], add_special_tokens=False)
        for key, encoding in zip(missing, encodings, strict=True):
            known[key] = self._piece(key, encoding)
            self._cache.add(key, known[key])
        placed: list[PlacedPiece] = []
        num_tokens = 0
        for begin, key in zip(borders, keys, strict=True):
            placed.append(PlacedPiece(begin, num_tokens, known[key]))
            num_tokens += len(known[key])
        return EncodedText(placed)

    def _piece(self, key: "_Key", encoding: Encoding) -> Piece:
        owned = key.owned
        if owned is None:
            owned = tuple(self.controls.matches(key.text))
        begins = {match.begin: match.token_id for match in owned}
        for token_id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # Is it a control token that the template did not write? A token's characters may begin
            # with white space, which it takes from its neighbour.
            if token_id in self._controls and token_id not in map(begins.get, range(begin, end)):
                break
        else:
            ends = array("I", [end for _, end in encoding.offsets])
            return Piece(array("I", encoding.ids), ends, self._edges.of(key.text, encoding))
        # Encode the text between the template's control tokens without control tokens.
        if self._plain is None:
            self._plain = _PlainTokenizer(self._whole, self.controls)
        joined = Piece(array("I"), array("I"), bytearray())
        last = 0
        for match in (*owned, None):
            end = len(key.text) if match is None else match.begin
            is_first = key.is_first and last == 0
            for begin, encoding in self._plain.encode(key.text[last:end], is_first=is_first):
                joined.token_ids.extend(encoding.ids)
                joined.character_ends.extend(last + begin + e for _, e in encoding.offsets)
                part = key.text[last + begin : end]
                joined.edges.extend(self._edges.of(part, encoding))
            if match is not None:
                joined.token_ids.append(match.token_id)
                joined.character_ends.append(match.end)
                joined.edges.append(1)
                last = match.end
        return joined


class _Key(NamedTuple):
    """All that a piece's tokens depend on, and the scope that may know them."""

    scope: str
    text: str
    # Whether the piece is the first of its text.
    is_first: bool
    # The control tokens in the text that the template wrote; None: it wrote all of them.
    owned: tuple[ControlMatch, ...] | None = None


class _Edges:
    """Finds edges: places between tokens where no token could join the characters on both sides.

    The words of a pre-tokenizer are never joined. A tokenizer without words (SentencePiece) can
    join two characters only if they stand side by side in a token of its vocabulary.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        words = tokenizer.encode(_SAMPLE, add_special_tokens=False).word_ids
        self._has_words = len(set(words)) > 1

    def of(self, text: str, encoding: Encoding) -> bytearray:
        """For each token of the text's encoding 1 if an edge is before it, else 0.

        There is also an edge before a token that begins with a line end. Pre-tokenizers put a line
        end into the word of the punctuation before it, and templates may leave it out. Joined pairs
        are never split again. So the tokens before such a token are the tokens of the text without
        it.
        """
        words = encoding.word_ids
        offsets = encoding.offsets
        edges = bytearray(len(words))
        last: int | None = -1
        for index, word in enumerate(words):
            begin = offsets[index][0] if word == last else 0
            if word != last or text[begin : begin + 1] in _LINE_ENDS:
                edges[index] = 1
                last = word
        if not self._has_words:
            for index in range(1, len(edges)):
                at = offsets[index - 1][1]
                if 0 < at < len(text) and offsets[index][0] >= at:
                    pair = text[at - 1 : at + 1].replace(" ", _SPACE)
                    edges[index] |= pair not in self._pairs
        return edges

    @cached_property
    def _pairs(self) -> frozenset[str]:
        """All pairs of neighbouring characters in tokens."""
        parts = json.loads(self._tokenizer.to_str())
        vocabulary = parts["model"]["vocab"]
        tokens = vocabulary if isinstance(vocabulary, dict) else (text for text, _ in vocabulary)
        return frozenset(chain.from_iterable(map(_neighbours, tokens)))


def _neighbours(token: str) -> Iterator[str]:
    """All pairs of characters of a token that stand side by side."""
    for index in range(len(token) - 1):
        yield token[index : index + 2]


class _PlainTokenizer:
    """The tokenizer without control tokens. Their texts are text."""

    def __init__(self, tokenizer: Tokenizer, controls: ControlTexts) -> None:
        parts = json.loads(tokenizer.to_str())
        for token in parts["added_tokens"]:
            token["special"] = token["content"] in controls.ids
        self._controls = frozenset(controls.ids.values())
        self._first = _without_prefix(parts, schemes=())
        self._behind_control = _without_prefix(parts, schemes=("first",))
        self._behind_text = _without_prefix(parts, schemes=("first", "always"))

    def encode(self, text: str, *, is_first: bool) -> list[tuple[int, Encoding]]:
        """The encodings of the text's parts, each with the character at which it begins.

        A vocabulary may have a control token's text as an ordinary word. Then the text is encoded
        in two parts that meet inside that word. Raises InvalidRequest if the word is one character.
        """
        parts: list[tuple[int, Encoding]] = []
        begin = 0
        end = len(text)
        while begin < len(text):
            tokenizer = self._behind_text
            if begin == 0:
                tokenizer = self._first if is_first else self._behind_control
            encoding = tokenizer.encode(text[begin:end], add_special_tokens=False)
            # The character at which a control token begins.
            spans = zip(encoding.ids, encoding.offsets, strict=True)
            control = next((at for token_id, (at, _) in spans if token_id in self._controls), None)
            if control is None:
                parts.append((begin, encoding))
                begin = end
                end = len(text)
            elif begin + control + 1 < end:
                end = begin + control + 1
            elif control > 0:
                end = begin + control
            else:
                raise InvalidRequest("prompt: has a character that is a control token")
        return parts


class _PieceCache:
    """Encoded pieces, bounded by bytes. The least recently used ones are dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pieces: OrderedDict[_Key, Piece] = OrderedDict()

    def find(self, key: _Key) -> Piece | None:
        piece = self._pieces.get(key)
        if piece is not None:
            self._pieces.move_to_end(key)
        return piece

    def add(self, key: _Key, piece: Piece) -> None:
        self._pieces[key] = piece
        self._num_bytes += _size(key, piece)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._pieces.popitem(last=False))


def _size(key: _Key, piece: Piece) -> int:
    """The bytes that a piece takes in the cache, at most."""
    return _ENTRY_BYTES + 4 * len(key.text) + 9 * len(piece)


def _without_prefix(parts: dict[str, Any], *, schemes: tuple[str, ...]) -> Tokenizer:
    """The tokenizer with special tokens as text, and without the space it puts before a text.

    SentencePiece-like tokenizers put such a space. `schemes` are the ways of putting it that are
    dropped: `first` only before a prompt's first word, `always` also behind every control token.
    """
    changed = {name: _drop_prefix(parts[name], schemes) for name in ("normalizer", "pre_tokenizer")}
    tokenizer = Tokenizer.from_str(json.dumps({**parts, **changed}))
    tokenizer.encode_special_tokens = True
    return tokenizer


def _drop_prefix(part: Any, schemes: tuple[str, ...]) -> Any:
    """A part of a tokenizer's JSON without its prefixes of these schemes."""
    if not isinstance(part, dict):
        return part
    drops_all = "always" in schemes
    if part.get("type") == "Prepend" and drops_all:
        return {"type": "Sequence", "normalizers": []}
    part = dict(part)
    if part.get("type") == "Metaspace" and part.get("prepend_scheme") in schemes:
        part["prepend_scheme"] = "never"
    if part.get("type") == "ByteLevel" and drops_all:
        part["add_prefix_space"] = False
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            part[name] = [_drop_prefix(inner, schemes) for inner in part[name]]
    return part
