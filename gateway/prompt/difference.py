"""Where two prompts first differ, to the character: of prompts whose contents are kept."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from engine.protocol import Prompt
from gateway.prompt.names import Segment, segments_of

_encode = msgspec.json.Encoder().encode


class Difference(NamedTuple):
    """The earlier prompt's `segment` that the later one does not have as it is, and how many of the
    first `characters` of its text are alike. `share` is the part of the earlier prompt's bytes
    before that, from 0 to 1."""

    segment: int
    characters: int
    share: float


def first_difference(earlier: Prompt, later: Prompt) -> Difference | None:
    """None where the later prompt begins with all of the earlier one."""
    segments = list(segments_of(earlier))
    alike = 0
    place: tuple[int, int] | None = None
    pairs = zip_longest(segments, _as_many(later, len(segments)))
    for number, (before, after) in enumerate(pairs):
        if before == after:
            alike += _size(before)
            continue
        characters = 0
        if after is not None and before[:4] == after[:4]:
            characters = common_length(before.text, after.text)
        alike += len(before.text[:characters].encode())
        place = number, characters
        break
    if place is None:
        return None
    whole = sum(_size(segment) for segment in segments)
    return Difference(*place, alike / whole if whole else 0.0)


def common_length(earlier: str, other: str) -> int:
    """The characters of the longest common beginning of two texts."""
    low = 0
    high = min(len(earlier), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if earlier[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _as_many(prompt: Prompt, count: int) -> Iterator[Segment]:
    for segment, _ in zip(segments_of(prompt), range(count), strict=False):
        yield segment


def _size(segment: Segment) -> int:
    values = b"" if segment.values is None else _encode(segment.values)
    return len(values) + len(segment.text.encode())
