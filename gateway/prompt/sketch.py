"""Sketches: digests of a prompt's segments one by one, so that advice can say what changed.

A sketch has a digest of each of the first segments by itself, keyed by the scope, and no content.
The tools alone may be more segments than that. So a sketch also has the pieces of the first long
system blocks behind these segments. Two sketches tell a list in another order, a changed order of
keys, a text that grew or moved, and a text of which a part changes. The constants below bound its
size. Pure.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from zlib import crc32

import msgspec

from engine.protocol import Prompt
from gateway.prompt.names import ASSISTANT, CALL, RAW, RESULT, THINKING, TOOL, segments_of

MAX_SEGMENTS = 96
SKETCHED_BYTES = 256 * 1024
DIGEST_BYTES = 6
MAX_TEXTS = 6
PIECES = 12
PIECE_BYTES = 4
_CHECKSUMS = 1 << 32
_PIECED_CHARACTERS = 160
"""A shorter text has no pieces: it is compared as a whole."""
_PIECED_BYTES = 32 * 1024
_MAX_KNOWN = 256
_LINE_BYTES = 2047
_TEXT_HEADER = b"x"
"""A text has the same digest in every role, so that it is recognised where it moves."""
_encode = msgspec.json.Encoder().encode
_encode_sorted = msgspec.json.Encoder(order="sorted").encode

ALIKE = 0.5
"""Texts with this share of their pieces in common are versions of one text."""

CHUNK = "."
"""The letter of a prefix that ends inside a segment."""
_HEADERS = {RAW: b"r", TOOL: b"t", THINKING: b"h", CALL: b"c", RESULT: b"o"}
_OF_THE_MODEL = (ASSISTANT, CALL, THINKING)


class Sketch(msgspec.Struct, frozen=True, array_like=True):
    """Digests of a prompt's first segments."""

    # DIGEST_BYTES for each sketched segment, one behind the other.
    digests: bytes = b""
    # Each sketched segment's bytes of content.
    sizes: list[int] = []
    # Of tools and calls: the segment, and its digest with the keys in alphabetical order.
    unordered: list[tuple[int, bytes]] = []
    # Of texts: the segment, and PIECE_BYTES of each of some of its lines or sentences, in their
    # order. Two texts that have the same lines have the same pieces. System blocks behind the
    # segments that have a digest are there too.
    pieces: list[tuple[int, bytes]] = []


def kinds_of(prompt: Prompt) -> str:
    """The letters of all segments, in order; the first of a message is in upper case."""
    return "".join(
        segment.letter.upper() if segment.is_first else segment.letter
        for segment in segments_of(prompt)
    )


def sketch_of(prompt: Prompt, scope: str) -> Sketch:
    """The sketch of the prompt's first segments."""
    base = blake2b(scope.encode(), digest_size=DIGEST_BYTES, person=b"sketch")
    digests = []
    sketch = Sketch()
    room = SKETCHED_BYTES
    is_first_message = True
    for index, segment in enumerate(islice(segments_of(prompt), MAX_SEGMENTS)):
        letter, _, _, values, text = segment
        kind = _HEADERS.get(letter, _TEXT_HEADER)
        content = text.encode()
        header = kind if values is None else kind + _encode(values)
        room -= len(header) + len(content)
        if room < 0:
            break
        digests.append(_digest(base, header, content))
        sketch.sizes.append(len(header) + len(content))
        if letter in (TOOL, CALL):
            sketch.unordered.append((index, _digest(base, kind, _encode_sorted(values))))
        is_first_message = is_first_message and letter not in _OF_THE_MODEL
        has_pieces = is_first_message and len(sketch.pieces) < MAX_TEXTS
        if has_pieces and len(text) >= _PIECED_CHARACTERS:
            sketch.pieces.append((index, _pieces(scope, content[:_PIECED_BYTES])))
    later_pieces = _pieces_behind(prompt, scope, len(sketch.sizes))
    sketch.pieces.extend(islice(later_pieces, MAX_TEXTS - len(sketch.pieces)))
    return msgspec.structs.replace(sketch, digests=b"".join(digests))


def _pieces_behind(prompt: Prompt, scope: str, start: int) -> Iterator[tuple[int, bytes]]:
    """The pieces of the long system blocks from segment `start` on."""
    for segment, block in enumerate(prompt.system, len(prompt.tools)):
        if segment >= start and len(block.text) >= _PIECED_CHARACTERS:
            content = block.text[:_PIECED_BYTES].encode()
            yield segment, _pieces(scope, content[:_PIECED_BYTES])


def split_pieces(packed: bytes) -> tuple[bytes, ...]:
    """The pieces of one text."""
    return tuple(packed[at : at + PIECE_BYTES] for at in range(0, len(packed), PIECE_BYTES))


def overlap(there: Sequence[bytes], here: Sequence[bytes]) -> float:
    """The part of the pieces that both texts have."""
    return (Counter(there) & Counter(here)).total() / max(len(there), len(here))


def _digest(base: blake2b, header: bytes, content: bytes) -> bytes:
    copy = base.copy()
    copy.update(b"%d:%b%b" % (len(header), header, content))
    return copy.digest()


def forget_pieces() -> None:
    """Forget the texts whose pieces are remembered."""
    _pieces.cache_clear()


# Cached: most prompts begin as an earlier one did, and this is most of a plan's work.
@lru_cache(_MAX_KNOWN)
def _pieces(scope: str, content: bytes) -> bytes:
    """Digests of some lines: those with the smallest checksums, so that two texts give the same.

    A text of few lines is cut into sentences, one of few sentences into words. The first and the
    last piece are always there, since that is where texts change most.
    """
    splits = (list(filter(None, content.split(separator))) for separator in (b"\n", b". ", b" "))
    whole = [content[:1], content, content[-1:]]
    pieces = next((split for split in splits if len(split) >= PIECES // 2), whole)
    checksums = list(map(crc32, pieces))
    num_inner = PIECES - 2
    inner = range(1, len(checksums) - 1)
    # To sort all of a long text's words would be most of a turn's plan. Checksums are spread
    # evenly, so about three times as many as are needed are below this bound.
    bound = 3 * num_inner * _CHECKSUMS // len(checksums)
    candidates: Sequence[int] = [place for place in inner if checksums[place] < bound]
    if len(candidates) < num_inner:
        candidates = inner
    chosen = sorted(candidates, key=checksums.__getitem__)[:num_inner]
    base = blake2b(scope.encode(), digest_size=DIGEST_BYTES, person=b"sketch")
    sketch = []
    for place in (0, *sorted(chosen), len(pieces) - 1):
        digest = base.copy()
        digest.update(pieces[place][:_LINE_BYTES])
        sketch.append(digest.digest()[:PIECE_BYTES])
    return b"".join(sketch)
