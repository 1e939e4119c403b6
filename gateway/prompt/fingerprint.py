"""Fingerprints: what is kept of a prompt so that a later one can be compared with it.

A fingerprint holds a bounded number of the prompt's prefixes, by their names: no content. Two of
them tell where two prompts diverge first, in the order in which a prefix cache sees it: model,
tools, system, messages. With it stands what advice needs besides.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

from engine.protocol import Ttl
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
from gateway.structs.usage import DivergenceKind

MAX_POINTS = 128
STORED_STEP = 4096
"""Of the names inside texts those at multiples of so many characters are kept."""
# So many of the last points always stay: a breakpoint looks 20 positions back.
_DENSE_POINTS = 24
# A shorter text says nothing of where a prompt comes from.
_TELLING_BYTES = 256
# For prompts whose tokens were never counted: about what text has in a common vocabulary.
_BYTES_PER_TOKEN = 4


class Point(msgspec.Struct, frozen=True, array_like=True):
    """A named prefix: after `characters` of the segment's text, or at its end; its bytes."""

    segment: int
    characters: int | None
    digest: bytes
    num_bytes: int

    @property
    def place(self) -> tuple[int, int | None]:
        return self.segment, self.characters


class Fingerprint(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One turn's prompt. `is_shared`: the client asked for diagnostics, so it may compare with it.
    `parameters` is the digest of what shapes the prompt besides its content. `num_tokens` is the
    prompt's exact length, 0 until an engine has counted it. `tokens` (as the engine counted them, 0
    where it did not tell) and `kinds` (the letters of `sketch.py`) go with the points. `marks` are
    the breakpoints as they went to the engine. These and `sketch` are empty in turns of earlier
    versions. `rule` is the version of the names. `unheld` are the segments of the breakpoints that
    asked for no lease. `salt` is the beginning of what the names are narrowed by."""

    model: str
    parameters: bytes
    num_tools: int
    num_system: int
    points: list[Point]
    num_tokens: int = 0
    is_shared: bool = False
    tokens: list[int] = []
    kinds: str = ""
    marks: list[tuple[int, Ttl]] = []
    sketch: Sketch | None = None
    rule: int = 1
    unheld: list[int] = []
    salt: str = ""

    @property
    def basis(self) -> tuple[str, int, str]:
        """Prompts whose bases differ have no name in common, whatever they say."""
        return self.model, self.rule, self.salt

    @property
    def num_bytes(self) -> int:
        return self.points[-1].num_bytes


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first difference. `segment` is where the earlier prompt stops being matched, from
    `characters` of its text on, and `missed_tokens` (estimated by bytes) its tokens from there on;
    None where the place is not known."""

    kind: DivergenceKind
    segment: int | None = None
    missed_tokens: int | None = None
    characters: int | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a comparison with an earlier prompt came to. It is "unfinished" while the earlier one is
    still fetched. "compared" without a divergence: the prompt only grew."""

    result: Literal["compared", "not_found", "unfinished"]
    divergence: Divergence | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Fingerprint)


def points_of(prefixes: Iterable[Prefix]) -> list[Point]:
    return [
        Point(name.segment, name.characters, bytes.fromhex(name.digest), num_bytes)
        for name, num_bytes in prefixes
    ]


def kinds_at(points: Iterable[Point], kinds: str) -> str:
    """The letters that go with the points, of the letters of all segments."""
    return "".join(
        CHUNK if point.characters is not None else kinds[point.segment] for point in points
    )


def digest_parameters(parameters: bytes, scope: str) -> bytes:
    """Keyed by the scope, as names are: equal parameters of two workspaces don't look equal."""
    return blake2b(
        parameters, digest_size=8, key=scope.encode()[:64], person=b"parameters"
    ).digest()


def few_of(prefixes: Sequence[Prefix], num_tools: int, num_system: int) -> list[Prefix]:
    """The prefixes whose points are stored, found without making a point of each."""
    prefixes = [prefix for prefix in prefixes if (prefix.name.characters or 0) % STORED_STEP == 0]
    if len(prefixes) <= MAX_POINTS:
        return prefixes
    places = [(prefix.name.segment, prefix.name.characters) for prefix in prefixes]
    return [prefixes[ordinal] for ordinal in _kept(places, num_tools, num_system)]


def pack(fingerprint: Fingerprint) -> bytes:
    """At most MAX_POINTS points, every second one left out until they fit.

    The ends of the tools and of the system prompt always stay, and the last points.
    """
    points = fingerprint.points
    if len(points) > MAX_POINTS:
        places = [point.place for point in points]
        kept = list(_kept(places, fingerprint.num_tools, fingerprint.num_system))
        tokens = fingerprint.tokens
        kinds = fingerprint.kinds
        fingerprint = msgspec.structs.replace(
            fingerprint,
            points=[points[ordinal] for ordinal in kept],
            tokens=[tokens[ordinal] for ordinal in kept] if tokens else [],
            kinds="".join(kinds[ordinal] for ordinal in kept) if kinds else "",
        )
    return _encoder.encode(fingerprint)


def _kept(
    places: Sequence[tuple[int, int | None]], num_tools: int, num_system: int
) -> Iterator[int]:
    stride = 1
    dense = len(places) - _DENSE_POINTS
    while ceil_div(dense, stride) > MAX_POINTS - 2 - _DENSE_POINTS:
        stride *= 2
    levels = {(num_tools - 1, None), (num_tools + num_system - 1, None)}
    for ordinal, place in enumerate(places):
        if ordinal % stride == 0 or ordinal >= dense or place in levels:
            yield ordinal


def unpack(packed: bytes) -> Fingerprint:
    return _decoder.decode(packed)


def compare(earlier: Fingerprint, later: Fingerprint) -> Divergence | None:
    """Where `later` first differs from `earlier`; None where it only grew, or was cut short."""
    if earlier.model != later.model:
        return _divergence("model_changed", earlier, None)
    if earlier.basis != later.basis:
        return Divergence("unavailable")
    known = {point.place: point for point in later.points}
    matched: Point | None = None
    shared = [point for point in earlier.points if point.place in known]
    has_difference = False
    for point in shared:
        if known[point.place].digest != point.digest:
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
    """The places of the prompts that are one conversation with the one at `place`: each has all of
    the one before it. The prompts are in the order in which they came."""
    digests = {point.digest for point in prompts[place].points}
    shared = [at for at in range(place + 1) if prompts[at].points[-1].digest in digests]
    last = prompts[place].points[-1].digest
    for at in range(place + 1, len(prompts)):
        points = prompts[at].points
        if any(point.digest == last for point in points):
            last = points[-1].digest
            shared.append(at)
    return shared


def shared_bytes(earlier: Fingerprint, later: Fingerprint) -> int:
    """How long a prefix both prompts have, as far as their points tell.

    It is 0 for different models, and for names by different rules.
    """
    if earlier.basis != later.basis:
        return 0
    known = {point.place: point.digest for point in later.points}
    num_bytes = 0
    for point in earlier.points:
        if known.get(point.place, point.digest) != point.digest:
            break
        if point.place in known:
            num_bytes = point.num_bytes
    return num_bytes


def are_versions(earlier: Fingerprint, later: Fingerprint) -> bool:
    """Whether two prompts are versions of one, also where they begin otherwise: a text of both is
    the same, or a block of the system prompt has half of its pieces in common with one of the
    other. False for different models, and for names by different rules."""
    if earlier.basis != later.basis:
        return False
    if _long_texts(earlier) & _long_texts(later):
        return True
    blocks = _system_pieces(later)
    return any(
        overlap(there, here) >= ALIKE for there in _system_pieces(earlier) for here in blocks
    )


def _long_texts(fingerprint: Fingerprint) -> set[bytes]:
    """The digests of sketched segments that are no tools, and long enough to tell something."""
    sketch = fingerprint.sketch or Sketch()
    return {
        sketch.own[segment * DIGEST_BYTES : (segment + 1) * DIGEST_BYTES]
        for segment, size in enumerate(sketch.sizes)
        if segment >= fingerprint.num_tools and size >= _TELLING_BYTES
    }


def _system_pieces(fingerprint: Fingerprint) -> list[tuple[bytes, ...]]:
    head = fingerprint.num_tools + fingerprint.num_system
    pieces = fingerprint.sketch.pieces if fingerprint.sketch is not None else []
    return [split_pieces(packed) for segment, packed in pieces if segment < head]


def known_to_differ(earlier: Fingerprint, later: Fingerprint) -> Point | None:
    """The first point of the earlier prompt by which the two surely differ: the difference stands
    before it, and behind what they share. None where no point of both tells."""
    if earlier.basis != later.basis:
        return None
    known = {point.place: point.digest for point in later.points}
    differing = (p for p in earlier.points if known.get(p.place, p.digest) != p.digest)
    return next(differing, None)


def _level(fingerprint: Fingerprint, level: int) -> tuple[int, bytes | None]:
    """How many segments the tools (0) or the system prompt (1) have, and the digest behind them."""
    count = (fingerprint.num_tools, fingerprint.num_system)[level]
    end = fingerprint.num_tools + level * fingerprint.num_system - 1
    digests = [point.digest for point in fingerprint.points if point.place == (end, None)]
    return count, digests[0] if digests and count else None


def _divergence(kind: DivergenceKind, earlier: Fingerprint, matched: Point | None) -> Divergence:
    missed = earlier.num_bytes - (matched.num_bytes if matched else 0)
    if earlier.num_tokens and earlier.num_bytes:
        tokens = round(earlier.num_tokens * missed / earlier.num_bytes)
    else:
        tokens = missed // _BYTES_PER_TOKEN
    if matched is None:
        segment = characters = 0
    else:
        segment = matched.segment + (matched.characters is None)
        characters = matched.characters or 0
    return Divergence(kind, segment, max(tokens, 1), characters)
