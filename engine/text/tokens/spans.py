"""From places in the rendered text to offsets in its tokens."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from engine.protocol import Prompt
from engine.text.rendered import SegmentSpan
from engine.text.template.boundaries import Place
from engine.text.template.segments import segment_texts
from engine.text.tokens.pieces import EncodedText, Piece


class CharacterEnds(Sequence[int]):
    """How many of a text's characters lie before the end of each token, looked up when asked.

    `begin` is the text's first character within the piece.
    """

    def __init__(self, piece: Piece, begin: int, num_characters: int) -> None:
        self._piece = piece
        self._begin = begin
        self._num_characters = num_characters

    def __len__(self) -> int:
        return len(self._piece)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        end = self._piece.character_ends[index] - self._begin
        return min(max(end, 0), self._num_characters)


@dataclass(frozen=True, slots=True)
class TokenEnd:
    """`tokens` lie before a character; `is_exact` unless one more begins before and ends behind."""

    tokens: int
    is_exact: bool


def token_end(encoded: EncodedText, character: int) -> TokenEnd:
    """The last edge up to a character: what is behind it changes no token before that edge."""
    if character == 0:
        return TokenEnd(0, True)
    placed = encoded.piece_at(character - 1)
    assert placed is not None
    piece, at = placed.piece, character - placed.begin
    whole = bisect_right(piece.character_ends, at)
    # A piece's end is an edge: behind it comes a control token, or nothing.
    if whole == len(piece):
        return TokenEnd(placed.first_token + whole, True)
    is_exact = bool(piece.edges[whole]) and (whole == 0 or piece.character_ends[whole - 1] == at)
    while whole > 0 and not piece.edges[whole]:
        whole -= 1
    return TokenEnd(placed.first_token + whole, is_exact)


def segment_spans(
    prompt: Prompt,
    places: Sequence[Place],
    encoded: EncodedText,
    known: Mapping[int, SegmentSpan] | None = None,
) -> list[SegmentSpan]:
    """A span for each segment; `places` are characters of the text that was encoded."""
    known = known or {}
    return [
        known[segment] if segment in known else _span(place, text, encoded)
        for segment, (place, text) in enumerate(zip(places, segment_texts(prompt), strict=True))
    ]


def _span(place: Place, text: str | None, encoded: EncodedText) -> SegmentSpan:
    if place.end is None:
        return SegmentSpan(None)
    end = token_end(encoded, place.end)
    placed = None if place.begin is None else encoded.piece_at(place.begin)
    if text is None or place.begin is None or placed is None:
        return SegmentSpan(end.tokens, end.tokens, is_exact=end.is_exact)
    # Places are inside the text's outer white space: `begin` is its first other character.
    leading = len(text) - len(text.lstrip())
    ends = CharacterEnds(placed.piece, place.begin - placed.begin - leading, len(text))
    return SegmentSpan(end.tokens, placed.first_token, ends, end.is_exact)
