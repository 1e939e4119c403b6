"""Fingerprints: what is stored of a prompt so that a later one can be compared with it.

A fingerprint has a bounded number of the prompt's prefixes, by their names, and no content. Two
fingerprints tell where two prompts first differ, in the order in which a prefix cache sees them:
model, tools, system, messages. It also has what advice needs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import msgspec

from engine.protocol import Ttl, class_of
from gateway.base.rounding import ceil_div
from gateway.prompt.names import Prefix
from gateway.prompt.sketch import (
    ALIKE,
    CHUNK,
    DIGEST_BYTES,
    Sketch,
    overlap,
    split_pieces,
)
from gateway.structs.misses import DivergenceKind

MAX_POINTS = 128
STORED_STEP = 4096
"""Names inside texts are stored at multiples of this many characters."""
_DENSE_POINTS = 24
"""How many of the last points always stay, since a breakpoint looks 20 positions back."""
_TELLING_BYTES = 256
"""A text that is shorter does not tell where a prompt comes from."""
_BYTES_PER_TOKEN = 4
"""An estimate for prompts that no engine counted. Common vocabularies come near it."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A named prefix."""

    # The segment in which it ends.
    segment: int
    # The characters of that segment's text up to its end; None is the segment's end.
    characters: int | None
    digest: bytes
    # The bytes of its content.
    num_bytes: int

    @property
    def place(self) -> tuple[int, int | None]:
        return self.segment, self.characters


class Fingerprint(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What is stored of one turn's prompt. Earlier versions wrote neither `tokens` nor the fields
    behind it."""

    model: str
    # The digest of what shapes the prompt besides its content.
    parameters: bytes
    # How many segments the tools have.
    num_tools: int
    # How many segments the system prompt has.
    num_system: int
    points: list[Point]
    # The prompt's exact length, 0 until an engine has counted it.
    num_tokens: int = 0
    # Whether the client may compare with it, because it asked for diagnostics.
    is_shared: bool = False
    # Tokens up to each point, as the engine counted them; 0 where it did not report them.
    tokens: list[int] = []
    # The letter of `sketch.py` for each point.
    kinds: str = ""
    # The breakpoints as they went to the engine.
    marks: list[tuple[int, Ttl]] = []
    sketch: Sketch | None = None
    # The version of the rule of names.
    rule: int = 1
    # The segments of breakpoints that asked for no lease.
    unheld: list[int] = []
    # The first digits of the salt that narrows the names' scope.
    salt: str = ""

    @property
    def basis(self) -> tuple[str, int, str]:
        """Prompts whose bases differ have no name in common, whatever their content."""
        return self.model, self.rule, self.salt

    @property
    def num_bytes(self) -> int:
        return self.points[-1].num_bytes


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference of a later prompt from an earlier one."""

    kind: DivergenceKind
    # The segment in which the earlier prompt stops being matched. This and the fields below are
    # None where the place is not known.
    segment: int | None = None
    # The tokens of the earlier prompt from that place on, estimated by bytes.
    missed_tokens: int | None = None
    # How many characters of the segment's text still match.
    characters: int | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of a comparison with an earlier prompt."""

    # "unfinished" while the earlier prompt is still being fetched.
    result: Literal["compared", "not_found", "unfinished"]
    # None with "compared": the prompt only grew.
    divergence: Divergence | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Fingerprint)
_marks_place = Fingerprint.__struct_fields__.index("marks")
_MARKS = slice(_marks_place, _marks_place + 1)
"""Where a stored fingerprint has its marks. It is a slice: early versions have none."""


def points_of(prefixes: Iterable[Prefix]) -> list[Point]:
    """The points of these prefixes."""
    return [
        Point(name.segment, name.characters, bytes.fromhex(name.digest), num_bytes)
        for name, num_bytes in prefixes
    ]


def kinds_at(points: Iterable[Point], kinds: str) -> str:
    """The letters of the points. `kinds` has the letters of all segments."""
    return "".join(
        CHUNK if point.characters is not None else kinds[point.segment] for point in points
    )


def digest_parameters(parameters: bytes, scope: str) -> bytes:
    """The digest of parameters, keyed by the scope: those of two workspaces never look equal."""
    return blake2b(
        parameters, digest_size=8, key=scope.encode()[:64], person=b"parameters"
    ).digest()


def few_of(prefixes: Sequence[Prefix], num_tools: int, num_system: int) -> list[Prefix]:
    """The prefixes whose points are stored, found without making a point of each."""
    prefixes = [prefix for prefix in prefixes if (prefix.name.characters or 0) % STORED_STEP == 0]
    if len(prefixes) <= MAX_POINTS:
        return prefixes
    places = [(prefix.name.segment, prefix.name.characters) for prefix in prefixes]
    return [prefixes[ordinal] for ordinal in _stored_ordinals(places, num_tools, num_system)]


def pack(fingerprint: Fingerprint) -> bytes:
    """The fingerprint as bytes, with at most MAX_POINTS points.

    Every second point is left out until they fit. The ends of the tools and of the system prompt
    always stay, and so do the last points.
    """
    points = fingerprint.points
    if len(points) > MAX_POINTS:
        places = [point.place for point in points]
        ordinals = list(_stored_ordinals(places, fingerprint.num_tools, fingerprint.num_system))
        tokens = fingerprint.tokens
        kinds = fingerprint.kinds
        fingerprint = msgspec.structs.replace(
            fingerprint,
            points=[points[ordinal] for ordinal in ordinals],
            tokens=[tokens[ordinal] for ordinal in ordinals] if tokens else [],
            kinds="".join(kinds[ordinal] for ordinal in ordinals) if kinds else "",
        )
    return _encoder.encode(fingerprint)


def _stored_ordinals(
    places: Sequence[tuple[int, int | None]], num_tools: int, num_system: int
) -> Iterator[int]:
    """The ordinals of the points that are stored, out of the points at these places."""
    stride = 1
    dense = len(places) - _DENSE_POINTS
    while ceil_div(dense, stride) > MAX_POINTS - 2 - _DENSE_POINTS:
        stride *= 2
    levels = {(num_tools - 1, None), (num_tools + num_system - 1, None)}
    for ordinal, place in enumerate(places):
        if ordinal % stride == 0 or ordinal >= dense or place in levels:
            yield ordinal


def unpack(packed: bytes) -> Fingerprint:
    """The fingerprint of these bytes. Raise msgspec.DecodeError where they are none.

    Marks of a TTL class that only a later version has are read as `class_of` says.
    """
    try:
        return _decoder.decode(packed)
    except msgspec.ValidationError:
        values = msgspec.msgpack.decode(packed, type=list[Any])
        recorded = msgspec.convert(values[_MARKS], list[list[tuple[int, str]]])
        values[_MARKS] = [
            [(segment, class_of(name)) for segment, name in marks] for marks in recorded
        ]
        return _decoder.decode(_encoder.encode(values))


def compare(earlier: Fingerprint, later: Fingerprint) -> Divergence | None:
    """Where `later` first differs from `earlier`; None where it only grew, or was cut short."""
    if earlier.model != later.model:
        return _divergence("model_changed", earlier, None)
    if earlier.basis != later.basis:
        return Divergence("unavailable")
    later_digests = {point.place: point.digest for point in later.points}
    matched: Point | None = None
    has_difference = False
    for point in earlier.points:
        if point.place not in later_digests:
            continue
        if later_digests[point.place] != point.digest:
            has_difference = True
            break
        matched = point
    if _level(earlier, 0) != _level(later, 0):
        return _divergence("tools_changed", earlier, matched)
    if _level(earlier, 1) != _level(later, 1):
        return _divergence("system_changed", earlier, matched)
    if has_difference:
        return _divergence("messages_changed", earlier, matched)
    ends = {earlier.points[-1].place, later.points[-1].place}
    is_whole = matched is not None and matched.place in ends
    if not is_whole or earlier.parameters != later.parameters:
        return Divergence("unavailable")
    return None


def conversation(prompts: Sequence[Fingerprint], place: int) -> list[int]:
    """The places of the prompts that are in one conversation with the prompt at `place`.

    In a conversation each prompt begins with the whole prompt before it. `prompts` are in the order
    of their arrival.
    """
    digests = {point.digest for point in prompts[place].points}
    places = [index for index in range(place + 1) if prompts[index].points[-1].digest in digests]
    whole_digest = prompts[place].points[-1].digest
    for index in range(place + 1, len(prompts)):
        points = prompts[index].points
        if any(point.digest == whole_digest for point in points):
            whole_digest = points[-1].digest
            places.append(index)
    return places


def shared_bytes(earlier: Fingerprint, later: Fingerprint) -> int:
    """The bytes of the longest prefix that both prompts have, as far as their points tell.

    It is 0 for different models, and for names by different rules.
    """
    if earlier.basis != later.basis:
        return 0
    later_digests = {point.place: point.digest for point in later.points}
    num_bytes = 0
    for point in earlier.points:
        if later_digests.get(point.place, point.digest) != point.digest:
            break
        if point.place in later_digests:
            num_bytes = point.num_bytes
    return num_bytes


def are_versions(earlier: Fingerprint, later: Fingerprint) -> bool:
    """Whether two prompts are versions of one prompt, even where their beginnings differ.

    They are if they share a long text, or if a block of one system prompt shares half of its pieces
    with a block of the other. Prompts for different models, or with names by different rules, never
    are.
    """
    if earlier.basis != later.basis:
        return False
    if _long_texts(earlier) & _long_texts(later):
        return True
    blocks = _system_pieces(later)
    return any(
        overlap(earlier_block, block) >= ALIKE
        for earlier_block in _system_pieces(earlier)
        for block in blocks
    )


def _long_texts(fingerprint: Fingerprint) -> set[bytes]:
    """The digests of sketched segments, without tools, that are at least _TELLING_BYTES long."""
    sketch = fingerprint.sketch or Sketch()
    return {
        sketch.digests[segment * DIGEST_BYTES : (segment + 1) * DIGEST_BYTES]
        for segment, size in enumerate(sketch.sizes)
        if segment >= fingerprint.num_tools and size >= _TELLING_BYTES
    }


def _system_pieces(fingerprint: Fingerprint) -> list[tuple[bytes, ...]]:
    head = fingerprint.num_tools + fingerprint.num_system
    pieces = fingerprint.sketch.pieces if fingerprint.sketch is not None else []
    return [split_pieces(packed) for segment, packed in pieces if segment < head]


def first_differing_point(earlier: Fingerprint, later: Fingerprint) -> Point | None:
    """The first point of the earlier prompt at which the later one has another digest.

    The difference stands between what they share and this point. None where the prompts have equal
    points, or no common place.
    """
    if earlier.basis != later.basis:
        return None
    later_digests = {point.place: point.digest for point in later.points}
    for point in earlier.points:
        if later_digests.get(point.place, point.digest) != point.digest:
            return point
    return None


def _level(fingerprint: Fingerprint, level: int) -> tuple[int, bytes | None]:
    """How many segments the tools (0) or the system prompt (1) have, and the digest of the prefix
    that ends with them."""
    if level == 0:
        count = fingerprint.num_tools
        end = fingerprint.num_tools - 1
    else:
        count = fingerprint.num_system
        end = fingerprint.num_tools + fingerprint.num_system - 1
    digests = [point.digest for point in fingerprint.points if point.place == (end, None)]
    digest = digests[0] if digests and count else None
    return count, digest


def _divergence(kind: DivergenceKind, earlier: Fingerprint, matched: Point | None) -> Divergence:
    matched_bytes = 0 if matched is None else matched.num_bytes
    missed_bytes = earlier.num_bytes - matched_bytes
    if earlier.num_tokens and earlier.num_bytes:
        tokens = round(earlier.num_tokens * missed_bytes / earlier.num_bytes)
    else:
        tokens = missed_bytes // _BYTES_PER_TOKEN
    if matched is None:
        segment = 0
        characters = 0
    elif matched.characters is None:
        segment = matched.segment + 1
        characters = 0
    else:
        segment = matched.segment
        characters = matched.characters
    return Divergence(kind, segment, max(tokens, 1), characters)
