"""Sketches: what is kept of a prompt's segments one by one, so that advice can say what changed.

Names (`names.py`) are chained: behind the first difference nothing can be compared. A sketch has a
digest of each of the first segments by itself, keyed by the scope, and no content. From two of them
one can tell a list in another order, a changed order of keys, a text that grew or moved, and a text
of which a part changes. Pure.

The sizes are bounded: MAX_SEGMENTS segments, SKETCHED_BYTES of content, PIECES pieces of each of
MAX_TEXTS texts.
"""

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

import msgspec

from engine.protocol import Prompt
from gateway.prompt.names import (
    ASSISTANT,
    CALL,
    RAW,
    RESULT,
    THINKING,
    TOOL,
    Recent,
    Segment,
    segments_of,
)

MAX_SEGMENTS = 96
SKETCHED_BYTES = 256 * 1024
DIGEST_BYTES = 6
MAX_TEXTS = 6
PIECES = 12
PIECE_BYTES = 4
_CHECKSUMS = 1 << 32
# A shorter text is compared as a whole.
_PIECED_CHARACTERS = 160
_PIECED_BYTES = 32 * 1024
_UPDATE_BYTES = 2047
# A text has the same digest whoever says it, so that one that moves is known again.
_TEXT_HEADER = b"x"
_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode

CHUNK = "."
"""Stands for a prefix that ends inside a segment."""
_HEADERS = {RAW: b"r", TOOL: b"t", THINKING: b"h", CALL: b"c", RESULT: b"o"}
_OF_THE_MODEL = (ASSISTANT, CALL, THINKING)


class Sketch(msgspec.Struct, frozen=True, array_like=True):
    """`own` has DIGEST_BYTES for each sketched segment, `sizes` its bytes of content.

    `unordered` are digests of tools and calls with the keys in alphabetical order, by segment.
    `pieces` has for a text's segment PIECE_BYTES of each of some of its lines or sentences, in
    their order. The same lines are chosen in every text.
    """

    own: bytes = b""
    sizes: list[int] = []
    unordered: list[tuple[int, bytes]] = []
    pieces: list[tuple[int, bytes]] = []


def kinds_of(prompt: Prompt) -> str:
    """The letters of all segments, in order; the first of a message is in upper case."""
    return "".join(
        one.letter.upper() if one.is_first else one.letter for one in segments_of(prompt)
    )


class Sketched(NamedTuple):
    """What a sketch has of one segment. `pieces` is None where the segment has none."""

    letter: str
    own: bytes
    size: int
    unordered: bytes | None
    pieces: bytes | None


def sketch_of(
    prompt: Prompt, scope: str, ends: Sequence[str] = (), known: Recent[Sketched] | None = None
) -> Sketch:
    """The sketch of the prompt's first segments.

    `ends` are the names of the segments' ends (`names.py`). A name stands for the scope and for all
    content before it, so what is `known` by it is not made again.
    """
    base = blake2b(scope.encode(), digest_size=DIGEST_BYTES, person=b"sketch")
    made: list[Sketched] = []
    num_pieced, room, is_first_message = 0, SKETCHED_BYTES, True
    for index, segment in enumerate(segments_of(prompt)):
        if index >= MAX_SEGMENTS:
            break
        one = known.get(ends[index]) if known is not None else None
        if one is None:
            has_pieces = is_first_message and num_pieced < MAX_TEXTS
            one = _sketched(base, segment, room, has_pieces=has_pieces)
            if one is None:
                break
            if known is not None:
                known.put(ends[index], one)
        room -= one.size
        if room < 0:
            break
        made.append(one)
        is_first_message = is_first_message and one.letter not in _OF_THE_MODEL
        num_pieced += one.pieces is not None
    return Sketch(
        b"".join(one.own for one in made),
        [one.size for one in made],
        [(index, one.unordered) for index, one in enumerate(made) if one.unordered is not None],
        [(index, one.pieces) for index, one in enumerate(made) if one.pieces is not None],
    )


def _sketched(base: blake2b, segment: Segment, room: int, *, has_pieces: bool) -> Sketched | None:
    """What a sketch has of one segment; None where that has more content than `room`."""
    letter, values, text = segment.letter, segment.values, segment.text
    header = _HEADERS.get(letter, _TEXT_HEADER)
    kind, content = header, text.encode()
    if values is not None:
        header += _encode(values)
    size = len(header) + len(content)
    if size > room:
        return None
    is_pieced = has_pieces and letter not in _OF_THE_MODEL and len(text) >= _PIECED_CHARACTERS
    return Sketched(
        letter,
        _digest(base, header, content),
        size,
        _digest(base, kind, _encode_sorted(values)) if letter in (TOOL, CALL) else None,
        _pieces(base, content) if is_pieced else None,
    )


def _digest(base: blake2b, header: bytes, content: bytes) -> bytes:
    made = base.copy()
    made.update(b"%d:" % len(header))
    # hashlib gives up the interpreter's lock for longer ones: see `names.py`.
    for data in (header, content):
        if len(data) <= _UPDATE_BYTES:
            made.update(data)
            continue
        for offset in range(0, len(data), _UPDATE_BYTES):
            made.update(data[offset : offset + _UPDATE_BYTES])
    return made.digest()


def _pieces(base: blake2b, content: bytes) -> bytes:
    """Digests of the lines with the smallest checksums, so that two texts give the same lines.

    A text of few lines is cut into sentences, one of few sentences into words. The first and the
    last piece are always there, since that is where texts change most.
    """
    found = _split(content[:_PIECED_BYTES])
    checksums = list(map(crc32, found))
    chosen = _smallest(checksums)
    made = []
    for place in (0, *sorted(chosen), len(found) - 1):
        digest = base.copy()
        digest.update(found[place][:_UPDATE_BYTES])
        made.append(digest.digest()[:PIECE_BYTES])
    return b"".join(made)


def _smallest(checksums: list[int]) -> list[int]:
    """The places of the smallest ones, the first and the last left out."""
    wanted, inner = PIECES - 2, range(1, len(checksums) - 1)
    # Sorting all of a long text's words would be most of a turn's plan. Of evenly spread ones
    # about three times those that are wanted are below this bound.
    bound = 3 * wanted * _CHECKSUMS // len(checksums)
    few = [place for place in inner if checksums[place] < bound]
    return sorted(few if len(few) >= wanted else inner, key=checksums.__getitem__)[:wanted]


def _split(content: bytes) -> list[bytes]:
    for separator in (b"\n", b". ", b" "):
        found = list(filter(None, content.split(separator)))
        if len(found) >= PIECES // 2:
            return found
    return [content[:1], content, content[-1:]]
