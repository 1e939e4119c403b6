"""What advice sees of a turn: digests, tokens and times. No content, no I/O.

The prefixes are those of the turn's fingerprint (`prompt/fingerprint.py`). The segments are those
of its sketch. They can be compared one by one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from engine.protocol import InputUsage, SegmentKind, Ttl, is_one_position
from gateway.prices.price import TokenPrices
from gateway.prompt.fingerprint import Fingerprint
from gateway.prompt.names import ASSISTANT, CALL, NAMES_RULE, RESULT, THINKING
from gateway.prompt.sketch import CHUNK, DIGEST_BYTES, Sketch, split_pieces

_BYTES_PER_TOKEN = 4
_KINDS: dict[str, SegmentKind] = {CALL: "tool_use", RESULT: "tool_result"}
"""The kinds of segments that may form a run, by letter. An upper-case letter begins a message."""
_OPENAI = ("openai", "responses", "chat")
"""The dialects whose breakpoints look back over any number of positions."""
_OF_THE_MODEL = (ASSISTANT, CALL, THINKING)
Mark = tuple[int, Ttl]
"""A breakpoint: the place of its prefix among an observation's prefixes, and its TTL."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A turn, as the ledger has it or as it was pasted."""

    id: str
    at_ms: int
    workspace: str
    key: str
    model: str
    dialect: str | None
    # The prompt's tokens, as billed and as computed.
    usage: InputUsage
    # When the answer began. From then on others could read what the turn wrote.
    begun_ms: int
    # The time of a prompt's token on the engine that answered; None where it is not known.
    token_seconds: float | None = None
    # The prices of the turn; None without a price.
    rates: TokenPrices | None


@dataclass(frozen=True, slots=True)
class Segment:
    """One sketched segment."""

    digest: bytes
    tokens: int
    # The digest with sorted keys; None but for tools and calls.
    unordered: bytes | None = None
    # The digests of pieces of its text; empty for a short text.
    pieces: tuple[bytes, ...] = ()


@dataclass(slots=True, kw_only=True)
class Observation(Row):
    """One turn. It never changes. Five sequences of one length describe its prefixes, the shortest
    first."""

    digests: list[bytes]
    # The length of each prefix.
    tokens: list[int]
    # The segment that each prefix ends with.
    places: list[int]
    # The letter of that segment, for each prefix (`prompt/names.py`).
    kinds: str
    # For each prefix: how many positions it is behind the prefix before it. It is 0 inside a run of
    # calls or of results, and in OpenAI's dialects.
    steps: list[int]
    # The whole prompt's tokens.
    total: int
    num_tools: int
    num_system: int
    # The breakpoints that were sent.
    marks: list[Mark]
    # The prefix before the model's last answer, -1 without one.
    answer: int
    sketch: Sketch | None
    tokens_per_byte: float
    # Whether tokens were estimated by bytes.
    is_estimated: bool
    # The places of the breakpoints that asked for no lease.
    unheld: frozenset[int] = frozenset()
    _segments: list[Segment] | None = None
    _ends: tuple[int, int] | None = None

    @property
    def ends(self) -> tuple[int, int]:
        """The prefixes for a marker before the last answer and for one at the last block; -1 for
        none. They are kept, because every way of marking a conversation asks for them."""
        if self._ends is None:
            self._ends = self.carrier(self.answer), self.carrier(len(self.places) - 1)
        return self._ends

    @property
    def head(self) -> int:
        """The number of tools and system blocks."""
        return self.num_tools + self.num_system

    @property
    def segment_digests(self) -> list[bytes]:
        """The digests of the sketched segments."""
        packed = b"" if self.sketch is None else self.sketch.digests
        return [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]

    @property
    def segments(self) -> list[Segment]:
        """The sketched segments. They are unpacked on first use, because few turns are compared."""
        if self._segments is None:
            self._segments = _segments(self)
        return self._segments

    def pieces_of(self, segment: int) -> tuple[bytes, ...]:
        """The pieces of one sketched segment, empty if it has none. Other segments are not
        unpacked."""
        pieces = () if self.sketch is None else self.sketch.pieces
        return split_pieces(next((packed for at, packed in pieces if at == segment), b""))

    def prefix_at(self, segment: int) -> int:
        """The place of the prefix that ends with this segment; -1 where it has none."""
        if 0 <= segment < len(self.places) and self.places[segment] == segment:
            return segment
        for place, place_of_segment in enumerate(self.places):
            if place_of_segment >= segment:
                return place if place_of_segment == segment else -1
        return -1

    def carrier(self, place: int) -> int:
        """The last prefix up to this place that may have a marker; -1 where there is none."""
        while place >= 0 and self.kinds[place].lower() == THINKING:
            place -= 1
        return place


def observe(row: Row, fingerprint: Fingerprint) -> Observation | None:
    """The observation of a turn; None where its fingerprint is of an earlier version."""
    if fingerprint.rule != NAMES_RULE:
        return None
    if not fingerprint.points or len(fingerprint.kinds) != len(fingerprint.points):
        return None
    points = fingerprint.points
    tokens = fingerprint.tokens
    kinds = fingerprint.kinds
    if CHUNK in kinds:
        ends = [place for place, kind in enumerate(kinds) if kind != CHUNK]
        points = [points[place] for place in ends]
        tokens = [tokens[place] for place in ends] if tokens else []
        kinds = "".join(kinds[place] for place in ends)
    total = fingerprint.num_tokens or points[-1].num_bytes // _BYTES_PER_TOKEN
    is_estimated = not tokens or not all(tokens)
    if is_estimated:
        # Where an engine did not report a length, it is estimated by bytes.
        token_counts = tokens
        tokens = []
        before = 0
        whole = max(points[-1].num_bytes, 1)
        for place, point in enumerate(points):
            exact = token_counts[place] if token_counts else 0
            before = max(before, exact or point.num_bytes * total // whole)
            tokens.append(before)
    places = [point.segment for point in points]
    marks: list[Mark] = []
    unheld: frozenset[int] = frozenset()
    if fingerprint.marks:
        place_of = {segment: place for place, segment in enumerate(places)}
        marks = [
            (place_of[segment], ttl) for segment, ttl in fingerprint.marks if segment in place_of
        ]
        unheld = frozenset(
            place_of[segment] for segment in fingerprint.unheld if segment in place_of
        )
    head = fingerprint.num_tools + fingerprint.num_system
    answer_places = (
        place
        for place in range(len(kinds) - 1, -1, -1)
        if kinds[place].isupper()
        and kinds[place].lower() in _OF_THE_MODEL
        and places[place] >= head
    )
    return Observation(
        **{field.name: getattr(row, field.name) for field in fields(Row)},
        digests=[point.digest for point in points],
        tokens=tokens,
        places=places,
        kinds=kinds,
        steps=[0] * len(places) if row.dialect in _OPENAI else _steps(places, kinds),
        total=max(total, tokens[-1]),
        num_tools=fingerprint.num_tools,
        num_system=fingerprint.num_system,
        marks=marks,
        answer=next(answer_places, 0) - 1,
        sketch=fingerprint.sketch,
        tokens_per_byte=total / max(fingerprint.num_bytes, 1),
        is_estimated=is_estimated,
        unheld=unheld,
    )


def _steps(places: Sequence[int], kinds: str) -> list[int]:
    """How many positions each prefix is behind the prefix before it.

    If the two are not neighbours, each segment between them counts as one position.
    """
    if places[-1] == len(places) - 1 and CALL not in kinds and RESULT not in kinds:
        return [1] * len(places)
    steps = [places[0] + 1]
    for pair, letters in zip(pairwise(places), pairwise(kinds), strict=True):
        distance = pair[1] - pair[0]
        kind = _KINDS.get(letters[0].lower(), "text")
        following = _KINDS.get(letters[1].lower(), "text")
        is_run = is_one_position(kind, following, is_same_turn=letters[1].islower())
        steps.append(0 if is_run and distance == 1 else distance)
    return steps


def _segments(turn: Observation) -> list[Segment]:
    sketch = turn.sketch
    if sketch is None:
        return []
    tokens = dict(zip(turn.places, turn.tokens, strict=True))
    tokens[-1] = 0
    unordered = dict(sketch.unordered)
    pieces = dict(sketch.pieces)
    segments = []
    for index, (content, size) in enumerate(zip(turn.segment_digests, sketch.sizes, strict=True)):
        before = tokens.get(index - 1)
        after = tokens.get(index)
        is_known = before is not None and after is not None
        packed = pieces.get(index, b"")
        segments.append(
            Segment(
                content,
                (after or 0) - (before or 0) if is_known else round(size * turn.tokens_per_byte),
                unordered.get(index),
                split_pieces(packed),
            )
        )
    return segments
