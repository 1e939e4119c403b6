"""What advice sees of a turn: digests, tokens and times. No content, no I/O.

Prefixes are those of the turn's fingerprint (`prompt/fingerprint.py`). The segments of its sketch
can be compared one by one.
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
"""The letters of segments that may form a run. An upper-case letter begins a message."""
_OPENAI = ("openai", "responses", "chat")
"""Their breakpoints look back over any number of positions."""
_OF_THE_MODEL = (ASSISTANT, CALL, THINKING)
Mark = tuple[int, Ttl]
"""A breakpoint: the place of its prefix among an observation's prefixes, and its TTL."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A turn as its source has it."""

    id: str
    at_ms: int
    workspace: str
    key: str
    model: str
    dialect: str | None
    # Its prompt's tokens, as billed and as computed.
    usage: InputUsage
    # When the answer began. From then on others could read what the turn wrote.
    begun_ms: int
    # The time of a prompt's token on the engine that answered; None where it is not known.
    token_seconds: float | None = None
    # None without a price.
    rates: TokenPrices | None


@dataclass(frozen=True, slots=True)
class Segment:
    """One sketched segment. `unordered` is its digest with sorted keys, of tools and calls only."""

    digest: bytes
    tokens: int
    unordered: bytes | None = None
    pieces: tuple[bytes, ...] = ()


@dataclass(slots=True, kw_only=True)
class Observation(Row):
    """One turn. It never changes. Its prefixes are in five lists of one length, the shortest
    first."""

    digests: list[bytes]
    # The length of each prefix.
    tokens: list[int]
    # The segment that each prefix ends with.
    places: list[int]
    # The letter of that segment (`prompt/names.py`).
    kinds: str
    # The positions that a breakpoint walks from the prefix before. 0 inside a run of calls or
    # results, and in OpenAI's dialects.
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
        """Where markers behind the last answer and behind the last block stand, -1 for nowhere.
        Every way of marking a conversation asks for them."""
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
        """The sketched segments. Few turns are compared, so they are read when first asked for."""
        if self._segments is None:
            self._segments = _segments(self)
        return self._segments

    def pieces_of(self, segment: int) -> tuple[bytes, ...]:
        """The pieces of one sketched segment, without reading the others; empty without any."""
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
        """The last prefix up to this place at which a marker may stand; -1 where there is none."""
        while place >= 0 and self.kinds[place].lower() == THINKING:
            place -= 1
        return place


def observe(row: Row, printed: Fingerprint) -> Observation | None:
    """The observation of a turn; None where its fingerprint is of an earlier version."""
    if printed.rule != NAMES_RULE:
        return None
    if not printed.points or len(printed.kinds) != len(printed.points):
        return None
    points = printed.points
    tokens = printed.tokens
    kinds = printed.kinds
    if CHUNK in kinds:
        ends = [n for n, kind in enumerate(kinds) if kind != CHUNK]
        points = [points[n] for n in ends]
        tokens = [tokens[n] for n in ends] if tokens else []
        kinds = "".join(kinds[n] for n in ends)
    total = printed.num_tokens or points[-1].num_bytes // _BYTES_PER_TOKEN
    is_estimated = not tokens or not all(tokens)
    if is_estimated:
        # Lengths are estimated by bytes where an engine did not report tokens.
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
    if printed.marks:
        at = {segment: place for place, segment in enumerate(places)}
        marks = [(at[segment], ttl) for segment, ttl in printed.marks if segment in at]
        unheld = frozenset(at[segment] for segment in printed.unheld if segment in at)
    head = printed.num_tools + printed.num_system
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
        num_tools=printed.num_tools,
        num_system=printed.num_system,
        marks=marks,
        answer=next(answer_places, 0) - 1,
        sketch=printed.sketch,
        tokens_per_byte=total / max(printed.num_bytes, 1),
        is_estimated=is_estimated,
        unheld=unheld,
    )


def _steps(places: Sequence[int], kinds: str) -> list[int]:
    """How many positions each prefix is behind the one before it.

    Between prefixes that are not neighbours every segment counts as one.
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
        is_told = before is not None and after is not None
        packed = pieces.get(index, b"")
        segments.append(
            Segment(
                content,
                (after or 0) - (before or 0) if is_told else round(size * turn.tokens_per_byte),
                unordered.get(index),
                split_pieces(packed),
            )
        )
    return segments
