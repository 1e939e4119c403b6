"""Where two prompts first differ, to the character. Their contents must be stored."""

from itertools import islice, zip_longest
from typing import NamedTuple

import msgspec

from engine.protocol import Prompt
from gateway.prompt.names import Segment, segments_of

_encode = msgspec.json.Encoder().encode


class Difference(NamedTuple):
    """Where the later prompt stops being equal to the earlier one."""

    # The first segment of the earlier prompt that differs.
    segment: int
    # How many characters of that segment's text are still equal.
    characters: int
    # The part of the earlier prompt's bytes before the difference, 0 to 1.
    share: float


def first_difference(earlier: Prompt, later: Prompt) -> Difference | None:
    """The first difference; None where the later prompt begins with all of the earlier one."""
    segments = list(segments_of(earlier))
    num_bytes = sum(_size(segment) for segment in segments)
    equal_bytes = 0
    # A later prompt that is shorter differs where it ends.
    pairs = zip_longest(segments, islice(segments_of(later), len(segments)))
    for number, (segment, later_segment) in enumerate(pairs):
        if segment == later_segment:
            equal_bytes += _size(segment)
            continue
        characters = 0
        if later_segment is not None and segment[:-1] == later_segment[:-1]:
            characters = common_length(segment.text, later_segment.text)
        equal_bytes += len(segment.text[:characters].encode())
        return Difference(number, characters, equal_bytes / num_bytes if num_bytes else 0.0)
    return None


def common_length(earlier: str, later: str) -> int:
    """The characters of the longest common beginning of two texts."""
    low = 0
    high = min(len(earlier), len(later))
    while low < high:
        middle = (low + high + 1) // 2
        if earlier[low:middle] == later[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _size(segment: Segment) -> int:
    values = b"" if segment.values is None else _encode(segment.values)
    return len(values) + len(segment.text.encode())
