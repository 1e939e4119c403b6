"""From places in the rendered text to offsets in its tokens."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import overload

from engine.protocol import Prompt
from engine.text.rendered import SegmentSpan
from engine.text.template.boundaries import Place, PlacedText
from engine.text.template.conversation import segment_texts
from engine.text.tokens.pieces import Piece


@dataclass(frozen=True, slots=True)
class Stretch:
    """The text between two neighbouring boundaries, characters [begin, end), as tokens.

    `first_token` is its place among the prompt's tokens; between its pieces there is one cut.
    """

    begin: int
    end: int
    first_token: int
    pieces: Sequence[Piece]
    lengths: Sequence[int]


class CharacterEnds(Sequence[int]):
    """How many of a text's characters lie before the end of each token, looked up when asked.

    `shifts[i]` is what piece i's own offsets need added; everything is kept within the text.
    """

    def __init__(self, pieces: Sequence[Piece], shifts: Sequence[int], num_characters: int) -> None:
        self._pieces = pieces
        self._shifts = shifts
        self._num_characters = num_characters
        self._starts = list(accumulate((len(p.token_ids) for p in pieces), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        at = bisect_right(self._starts, index) - 1
        end = self._pieces[at].character_ends[index - self._starts[at]] + self._shifts[at]
        return min(max(end, 0), self._num_characters)


def segment_spans(
    prompt: Prompt, placed: PlacedText, cut: str, stretches: Sequence[Stretch]
) -> list[SegmentSpan]:
    """`stretches` cover the text; every segment end is the beginning of one of them."""
    token_at = {stretch.begin: stretch.first_token for stretch in stretches}
    begins = [stretch.begin for stretch in stretches]
    spans: list[SegmentSpan] = []
    for place, text in zip(placed.places, segment_texts(prompt), strict=True):
        end = None if place.end is None else token_at[place.end]
        if text is None or place.begin is None or end is None:
            spans.append(SegmentSpan(end, end or 0))
            continue
        stretch = stretches[bisect_right(begins, place.begin) - 1]
        ends = _character_ends(
            stretch, place, text, placed.text.count(cut, stretch.begin, place.begin)
        )
        spans.append(SegmentSpan(end, stretch.first_token, ends))
    return spans


def _character_ends(stretch: Stretch, place: Place, text: str, num_cuts: int) -> CharacterEnds:
    assert place.begin is not None
    # Marks are inside the text's outer white space: `begin` is its first other character.
    leading = len(text) - len(text.lstrip())
    text_begin = place.begin - stretch.begin - num_cuts - leading
    offsets = accumulate(stretch.lengths, initial=0)
    shifts = [offset - text_begin for offset, _ in zip(offsets, stretch.pieces, strict=False)]
    return CharacterEnds(stretch.pieces, shifts, len(text))
