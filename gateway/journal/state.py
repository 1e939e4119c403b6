"""What a journal's records say together: the turns that are in it, and where. Pure.

Records are applied in the order in which they were written. A turn's later record replaces its
earlier ones, so the place of one record is all that is kept of a turn: about 250 bytes. The bound
on the journal's bytes bounds their number.

Changes since the last `keep` can be undone, because the group that tells of them may fail.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from gateway.journal.segments import Kind

LOST = "lost"
LOST_BY_LEDGER = "lost by the ledger"
BROKEN = "broken"


class Head(msgspec.Struct, frozen=True):
    """The payload of a `HEAD`: what the journal is, as the segment begins.

    `former` are the instances that it had before each of its losses. `forgotten` turns are in the
    ledger. `ends` tells for each earlier segment that there was where its last record ends: what
    stands behind that was never acknowledged.
    """

    number: int
    instance: str
    former: tuple[str, ...] = ()
    forgotten: int = 0
    ends: dict[int, int] = {}


class Aside(msgspec.Struct, frozen=True):
    """Begins the payload of an `ASIDE`; a line break and the turn's bytes follow, if there are any.

    `at` is ISO 8601. `num_bytes` is None where nothing is left of the turn.
    """

    at: str
    reason: str
    num_bytes: int | None


class Place(NamedTuple):
    """A record in a segment, in bytes. `aside` is of a turn that was set aside."""

    segment: int
    offset: int
    length: int
    aside: Aside | None = None


Table = dict[str, Place]

_encode = msgspec.json.Encoder().encode
_decode_aside = msgspec.json.Decoder(Aside).decode


def aside_payload(aside: Aside, content: bytes) -> bytes:
    return _encode(aside) + b"\n" + content


def aside_of(payload: bytes) -> tuple[Aside, bytes]:
    """Raise msgspec.MsgspecError for other bytes."""
    line, _, content = payload.partition(b"\n")
    return _decode_aside(line), content


def forget_payload(num_forgotten: int, turn_ids: Iterable[str]) -> bytes:
    """`num_forgotten` is the number of turns that the journal has ever forgotten, with these."""
    return " ".join([str(num_forgotten), *turn_ids]).encode("ascii")


@dataclass(slots=True)
class State:
    """Turns by id, each table in the order of the first records of its kind.

    `live` counts the bytes of a segment's records that something here points to.
    """

    open: Table = field(default_factory=dict)
    closed: Table = field(default_factory=dict)
    aside: Table = field(default_factory=dict)
    live: Counter[int] = field(default_factory=Counter)
    num_forgotten: int = 0
    _kept_forgotten: int = 0
    _undo: list[tuple[Table, str, Place | None]] = field(default_factory=list)

    def __contains__(self, turn_id: str) -> bool:
        return turn_id in self.open or turn_id in self.closed or turn_id in self.aside

    @property
    def ids(self) -> set[str]:
        return {*self.open, *self.closed, *self.aside}

    def apply(self, kind: Kind, turn_id: str, payload: bytes, place: Place) -> None:
        """Raise ValueError or msgspec.MsgspecError where the payload is not of its kind."""
        if kind is Kind.OPEN:
            if turn_id not in self.closed:
                self._set(self.open, turn_id, place)
        elif kind is Kind.CLOSE:
            self._set(self.open, turn_id, None)
            self._set(self.closed, turn_id, place)
        elif kind is Kind.ASIDE:
            self._set(self.open, turn_id, None)
            self._set(self.closed, turn_id, None)
            self._set(self.aside, turn_id, place._replace(aside=aside_of(payload)[0]))
        elif kind is Kind.FORGET:
            number, *turn_ids = payload.decode("ascii").split()
            for each in turn_ids:
                self._set(self.open, each, None)
                self._set(self.closed, each, None)
            self.num_forgotten = max(self.num_forgotten, int(number))
        elif kind is Kind.FOUND:
            for each in payload.decode("ascii").split():
                self._set(self.aside, each, None)

    def keep(self) -> None:
        """What was applied is on disk."""
        self._undo.clear()
        self._kept_forgotten = self.num_forgotten

    def undo(self) -> None:
        """What was applied since `keep` is not."""
        undo, self._undo = self._undo, []
        for table, turn_id, before in reversed(undo):
            self._set(table, turn_id, before)
        self._undo.clear()
        self.num_forgotten = self._kept_forgotten

    def places_in(self, segment: int) -> list[tuple[str, Place]]:
        """The turns whose record stands in this segment."""
        return [
            (turn_id, place)
            for table in (self.open, self.closed, self.aside)
            for turn_id, place in table.items()
            if place.segment == segment
        ]

    def _set(self, table: Table, turn_id: str, place: Place | None) -> None:
        before = table.get(turn_id)
        if before is None and place is None:
            return
        self._undo.append((table, turn_id, before))
        if before is not None:
            self.live[before.segment] -= before.length
        if place is None:
            del table[turn_id]
        else:
            table[turn_id] = place
            self.live[place.segment] += place.length
