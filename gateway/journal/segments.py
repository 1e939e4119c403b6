"""The format of the journal's segments, and what is made of damaged ones. Pure.

A segment is a file of records, one behind the other. The writer appends the records of a *group* by
one write and syncs them together. Behind the last record come zeros up to the end of the file, so
that most groups change no length of a file. Numbers are little-endian:

    bytes  what
    4      `MAGIC`, whose first byte never occurs in UTF-8
    8      XXH3-64 of the rest of the header: all that follows, up to the payload
    8      XXH3-64 of the payload
    4      bytes of the payload
    8      number of the group, which grows by one with each group of a journal
    1      kind
    1      bytes of the turn's id, at most 64
    n      the turn's id, ASCII
    m      the payload

LevelDB's log (doc/log_format.md) and SQLite's write-ahead log (walformat.html) are like it: a
length and a checksum a record, and reading stops at a torn end. Two things differ. The header has a
checksum of its own, so that a record whose payload is broken still tells its turn and its length.
And a scan goes on behind damage at the next magic whose header is sound: each record tells all of
its turn's state by itself, so what stands behind a hole is as good as what stands before it.

What a machine's crash can leave is some of the pages of the newest group, which nobody was told of.
So damage is *torn* where only records of one group, the newest, stand behind it. All other damage
is damage of what was synced.
"""

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

MAGIC = b"\xf5HFj"
MAX_ID_BYTES = 64
_HEADER = struct.Struct("<4sQQIQBB")
_SUMMED = 12
_TAIL = struct.Struct("<QIQBB")


class Kind(IntEnum):
    """What a record tells.

    `HEAD` begins a segment. `OPEN` and `CLOSE` carry a turn's record as JSON. `FORGET` and `FOUND`
    carry ids. `ASIDE` carries a turn that can't be drained. `PROBE` tells nothing.
    """

    HEAD = 1
    OPEN = 2
    CLOSE = 3
    FORGET = 4
    ASIDE = 5
    FOUND = 6
    PROBE = 7


_KINDS = {int(kind): kind for kind in Kind}


class Record(NamedTuple):
    """`payload` is None where it is not what was written. `length` is of the whole record."""

    kind: Kind
    group: int
    turn_id: str
    offset: int
    length: int
    payload: bytes | None


@dataclass(slots=True)
class Scan:
    """What a segment holds. `end` is behind its last record.

    `holes` are ranges of bytes that are no record and not the zeros at the end. `is_torn` tells
    whether a crash of the machine alone explains all that is broken. `first_broken` is where the
    first of that begins, None where nothing is.
    """

    records: list[Record] = field(default_factory=list)
    holes: list[tuple[int, int]] = field(default_factory=list)
    end: int = 0
    is_torn: bool = True

    @property
    def first_broken(self) -> int | None:
        starts = [start for start, _ in self.holes]
        starts += [record.offset for record in self.records if record.payload is None]
        return min(starts, default=None)

    @property
    def is_whole(self) -> bool:
        return self.first_broken is None


def encode(kind: Kind, group: int, turn_id: str, payload: bytes) -> bytes:
    """Raise ValueError for an id that is not ASCII or longer than 64 bytes, or a group below 0."""
    name = turn_id.encode("ascii")
    if len(name) > MAX_ID_BYTES or group < 0:
        raise ValueError(f"id of {len(name)} bytes, group {group}")
    tail = _TAIL.pack(xxh3_64_intdigest(payload), len(payload), group, kind, len(name)) + name
    return MAGIC + xxh3_64_intdigest(tail).to_bytes(8, "little") + tail + payload


def decode(content: bytes, offset: int = 0) -> Record | None:
    """The record at `offset`, or None where no sound header is."""
    if len(content) - offset < _HEADER.size:
        return None
    magic, told, payload_sum, size, group, kind, name_size = _HEADER.unpack_from(content, offset)
    start = offset + _HEADER.size + name_size
    if magic != MAGIC or name_size > MAX_ID_BYTES or kind not in _KINDS:
        return None
    if xxh3_64_intdigest(content[offset + _SUMMED : start]) != told:
        return None
    name = content[offset + _HEADER.size : start]
    payload: bytes | None = content[start : start + size]
    if payload is None or xxh3_64_intdigest(payload) != payload_sum or len(payload) != size:
        payload = None
    length = _HEADER.size + name_size + size
    return Record(_KINDS[kind], group, name.decode("ascii"), offset, length, payload)


def scan(content: bytes) -> Scan:
    """Read a segment, in time linear in its length. Raises nothing, whatever the bytes are."""
    found, end = Scan(), len(content.rstrip(b"\0"))
    position = 0
    while position < end:
        record = decode(content, position)
        if record is None:
            position = _skip(content, position, end, found)
            continue
        found.records.append(record)
        position = record.offset + record.length
        if record.payload is None:
            position = _behind_broken(content, record)
    sound = [
        record.offset + record.length for record in found.records if record.payload is not None
    ]
    found.end = max(sound, default=0)
    found.is_torn = _is_torn(found)
    return found


def _skip(content: bytes, position: int, end: int, found: Scan) -> int:
    """Note the hole at `position`; return where the next record begins, or `end`."""
    at = position
    while (at := content.find(MAGIC, at + 1, end)) >= 0:
        if decode_header(content, at):
            break
    stop = end if at < 0 else at
    found.holes.append((position, stop))
    return stop


def decode_header(content: bytes, offset: int) -> bool:
    """Whether a sound header stands there. This does not look at the payload."""
    if len(content) - offset < _HEADER.size:
        return False
    name_size = content[offset + _HEADER.size - 1]
    start = offset + _HEADER.size + name_size
    told = int.from_bytes(content[offset + len(MAGIC) : offset + _SUMMED], "little")
    return (
        name_size <= MAX_ID_BYTES and xxh3_64_intdigest(content[offset + _SUMMED : start]) == told
    )


def _behind_broken(content: bytes, record: Record) -> int:
    """Where to go on behind a broken payload.

    Its length is sound, but bytes may be missing or added in it: the next record may stand nearer.
    """
    end = record.offset + record.length
    at = record.offset
    while (at := content.find(MAGIC, at + 1, end)) >= 0:
        if decode_header(content, at):
            return at
    return min(end, len(content))


def _is_torn(found: Scan) -> bool:
    """Whether all that is broken stands in the newest group, or where that begins."""
    first = found.first_broken
    if first is None:
        return True
    before = [r.group for r in found.records if r.offset < first and r.payload is not None]
    behind = {r.group for r in found.records if r.offset >= first}
    last = before[-1] if before else -1
    return not behind or (len(behind) == 1 and behind <= {last, last + 1})
