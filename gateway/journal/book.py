"""The records of an open journal, and the group of changes that is being made.

Works change the book and read it; all run in the journal's thread. `commit` puts their changes on
disk as one group, `undo` takes them back.

Segments are deleted in the order in which they were begun, as soon as nothing points into the
oldest one. So whenever a record is there, all later records are there too, and a turn that was
forgotten does not come back. Turns that stay long keep the oldest segment. Where what nothing
points to takes more than half of all bytes, the oldest segment's turns are copied to the newest.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

import msgspec

from gateway.journal.files import SegmentFiles
from gateway.journal.live_ids import Held
from gateway.journal.segments import Kind, decode, encode
from gateway.journal.state import (
    BROKEN,
    LOST,
    LOST_BY_LEDGER,
    Aside,
    Head,
    Place,
    State,
    aside_of,
    aside_payload,
    forget_payload,
)

_MAX_GARBAGE_SEGMENTS = 2
_NUM_NAMES = 1000
"""Ids of one record; more go into several."""


class Refused(Exception):
    """A change that the journal's state does not allow: a defect of the caller."""


class Book:
    """`instance`, `former` and `group` are what the next segments begin with."""

    def __init__(
        self,
        files: SegmentFiles,
        state: State,
        instance: str,
        former: Sequence[str],
        group: int,
    ) -> None:
        self.files = files
        self.state = state
        self.instance = instance
        self.former = tuple(former)
        self._group = group
        self._buffer = bytearray()

    @property
    def end(self) -> tuple[int, int]:
        """The number of the newest segment, and the end of what is on disk of it in bytes."""
        return self.files.number, self.files.tail

    @property
    def held(self) -> Held:
        state = self.state
        return Held([*state.open, *state.closed], state.aside, state.num_forgotten, self.end)

    def begin(self) -> None:
        """Begin a group. Raise OSError. Changes do it by themselves, reads need not."""
        if self.files.is_full:
            self.files.start()
        if self.files.tail == 0:
            files = self.files
            head = Head(
                files.number, self.instance, self.former, self.state.num_forgotten, files.ends
            )
            self._put(Kind.HEAD, "", msgspec.json.encode(head))

    def commit(self) -> None:
        """Put the group on disk. Raise OSError; then call `undo`."""
        if self._buffer:
            self.files.append(bytes(self._buffer))
            self._buffer.clear()
            self._group += 1
        self.state.keep()

    def undo(self) -> None:
        self._buffer.clear()
        self.state.undo()

    def open(self, turn_id: str, record: bytes) -> int:
        """Raise Refused where the journal has the turn."""
        if turn_id in self.state.open or turn_id in self.state.closed:
            raise Refused(f"turn {turn_id} is in the journal")
        self._add(Kind.OPEN, turn_id, record)
        return 1

    def rewrite(self, turn_id: str, record: bytes) -> int:
        """Return 0 where the turn is not open."""
        if turn_id not in self.state.open:
            return 0
        self._add(Kind.OPEN, turn_id, record)
        return 1

    def close(self, turn_id: str, record: bytes) -> int:
        """Return 0 where the turn is not open."""
        if turn_id not in self.state.open:
            return 0
        self._add(Kind.CLOSE, turn_id, record)
        return 1

    def put_closed(self, turn_id: str, record: bytes) -> None:
        """A closed turn of a journal of before."""
        self._add(Kind.CLOSE, turn_id, record)

    def forget(self, turn_ids: Sequence[str]) -> int:
        """Return how many of them there were."""
        there = [i for i in dict.fromkeys(turn_ids) if self._is_turn(i)]
        for some in _parts(there):
            number = self.state.num_forgotten + len(some)
            self._add(Kind.FORGET, "", forget_payload(number, some))
        return len(there)

    def set_aside(self, turn_ids: Sequence[str], reason: str) -> int:
        """Keep these turns apart, with their bytes. Return how many there were."""
        there = [i for i in dict.fromkeys(turn_ids) if self._is_turn(i)]
        for turn_id in there:
            place = self.state.open.get(turn_id) or self.state.closed[turn_id]
            self.put_aside(turn_id, reason, self.content(place))
        return len(there)

    def put_aside(self, turn_id: str, reason: str, content: bytes | None, at: str = "") -> None:
        """Set a turn aside, with its bytes where there are any; `at` is now unless it is told."""
        at = at or datetime.now(UTC).isoformat(timespec="seconds")
        aside = Aside(at, reason, None if content is None else len(content))
        self._add(Kind.ASIDE, turn_id, aside_payload(aside, content or b""))

    def lose(self, turn_ids: Iterable[str], reason: str) -> int:
        """Set turns aside by name. What was set aside before stays as it was."""
        new = [i for i in dict.fromkeys(turn_ids) if i not in self.state.aside]
        for turn_id in new:
            self.put_aside(turn_id, reason, None)
        return len(new)

    def found(self, turn_ids: Sequence[str]) -> int:
        """These turns are set aside no more. Return how many of them were."""
        there = [i for i in dict.fromkeys(turn_ids) if i in self.state.aside]
        for some in _parts(there):
            self._add(Kind.FOUND, "", " ".join(some).encode("ascii"))
        return len(there)

    def probe(self) -> None:
        self._add(Kind.PROBE, "", b"")

    def lost(self) -> list[str]:
        """Turns of which no record is left here. The ledger may have them, or have them again."""
        return [
            turn_id
            for turn_id, place in self.state.aside.items()
            if place.aside is not None
            and place.aside.reason in (LOST, LOST_BY_LEDGER)
            and place.aside.num_bytes is None
        ]

    def content(self, place: Place) -> bytes:
        """The payload of a turn's record, or what is left of it. Raise OSError."""
        raw = self._raw(place)
        record = decode(raw)
        return raw if record is None or record.payload is None else record.payload

    def turns(self, turn_ids: Iterable[str]) -> list[tuple[str, bytes | None]]:
        """The JSON of open or closed turns. None where a record is not what was written.

        Raise OSError.
        """
        found: list[tuple[str, bytes | None]] = []
        for turn_id in turn_ids:
            place = self.state.open.get(turn_id) or self.state.closed[turn_id]
            record = decode(self._raw(place))
            is_its = record is not None and record.turn_id == turn_id
            found.append((turn_id, record.payload if is_its and record is not None else None))
        return found

    def clean(self) -> None:
        """Delete what nothing points to, or copy a part of what keeps it. Raise OSError."""
        files, state = self.files, self.state
        while files.oldest < files.number and state.live[files.oldest] <= 0:
            del state.live[files.oldest]
            files.delete_oldest()
        garbage = files.num_bytes - sum(state.live.values())
        least = max(files.num_bytes // 2, _MAX_GARBAGE_SEGMENTS * files.segment_bytes)
        if garbage > least and files.oldest < files.number:
            self._copy_oldest()

    def copy_from(self, segment: int) -> None:
        """Add records of the same content for all turns that stand in a segment."""
        for turn_id, place in self.state.places_in(segment):
            record = decode(self._raw(place))
            if record is None or record.payload is None:
                self.put_aside(turn_id, BROKEN, self._raw(place))
            elif record.kind is Kind.ASIDE:
                aside, content = aside_of(record.payload)
                kept = content if aside.num_bytes is not None else None
                self.put_aside(turn_id, aside.reason, kept, aside.at)
            else:
                self._add(record.kind, turn_id, record.payload)

    def _copy_oldest(self) -> None:
        self.begin()
        self.copy_from(self.files.oldest)
        self.commit()
        self.files.delete_oldest()

    def _is_turn(self, turn_id: str) -> bool:
        return turn_id in self.state.open or turn_id in self.state.closed

    def _raw(self, place: Place) -> bytes:
        start = place.offset - self.files.tail
        if place.segment == self.files.number and start >= 0:
            return bytes(self._buffer[start : start + place.length])
        return self.files.read(place)

    def _add(self, kind: Kind, turn_id: str, payload: bytes) -> None:
        if not self._buffer:
            self.begin()
        self._put(kind, turn_id, payload)

    def _put(self, kind: Kind, turn_id: str, payload: bytes) -> None:
        record = encode(kind, self._group, turn_id, payload)
        offset = self.files.tail + len(self._buffer)
        place = Place(self.files.number, offset, len(record))
        self._buffer += record
        self.state.apply(kind, turn_id, payload, place)


def _parts(turn_ids: list[str]) -> Iterable[list[str]]:
    for start in range(0, len(turn_ids), _NUM_NAMES):
        yield turn_ids[start : start + _NUM_NAMES]
