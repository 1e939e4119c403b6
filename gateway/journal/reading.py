"""What the segments of a journal say together, and what is wrong with them. Nothing is written."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from gateway.journal import live_ids
from gateway.journal.files import segment_files
from gateway.journal.segments import Kind, Record, Scan, decode, scan
from gateway.journal.state import Head, Place, State

_NUM_LOOKS = 10
_HEAD_BYTES = 64 << 10
_END_OF_ALL = 1 << 62
_decode_head = msgspec.json.Decoder(Head).decode


@dataclass(slots=True)
class Found:
    """`head` is the newest sound one. `group` is the highest there is.

    `ends` are where the records of each segment end. A crash of the machine has left `torn`: its
    end is before what is broken, and sound records may stand behind that. `damaged` tells by
    segment what else is wrong; `missing` segments are not there. `broken` are turns whose latest
    record is not what was written, with the record's kind and what is left of it. `lost_at` is the
    last place, segment and byte, at which records may be gone without a trace. `unsure` turns were
    open before it, so that their close may be gone. `forgotten` turns were in the ledger as of a
    record that is still there.
    """

    state: State = field(default_factory=State)
    head: Head | None = None
    group: int = -1
    ends: dict[int, int] = field(default_factory=dict)
    torn: int | None = None
    damaged: dict[int, str] = field(default_factory=dict)
    missing: list[int] = field(default_factory=list)
    broken: dict[str, tuple[Kind, bytes]] = field(default_factory=dict)
    lost_at: tuple[int, int] = (0, 0)
    unsure: list[str] = field(default_factory=list)
    forgotten: set[str] = field(default_factory=set)


def read_journal(directory: Path, lists: live_ids.Told | None = None) -> Found:
    """`lists` tell whose journal it is, and how far its newest segment was on disk at least.

    Raise OSError.
    """
    found, paths = Found(), segment_files(directory)
    synced = lists.end if lists is not None else (0, 0)
    heads = {number: _head_of(path) for number, path in paths.items()}
    found.head = _newest(heads, lists.instance if lists is not None else None)
    # Earlier heads may tell of segments that a start has moved away.
    told = found.head.ends if found.head is not None else {}
    newest = max(paths, default=0)
    for number, path in paths.items():
        content = path.read_bytes()
        if _is_foreign(heads[number], found.head):
            found.damaged[number] = "it is of another journal"
            found.lost_at = max(found.lost_at, (number, _END_OF_ALL))
            found.ends[number] = len(content)
            continue
        end = told.get(number)
        if end is not None and len(content) < end:
            found.damaged[number] = f"it ends at {len(content)} of {end} bytes"
        least = synced[1] if number == synced[0] else 0
        _read_segment(found, number, content if end is None else content[:end], newest, end, least)
        found.state.keep()
    if found.head is not None:
        found.state.num_forgotten = max(found.state.num_forgotten, found.head.forgotten)
        found.state.keep()
    oldest = min(paths, default=0)
    found.missing = [number for number in sorted(told) if number > oldest and number not in paths]
    if synced[0] > newest:
        found.missing.append(synced[0])
    if found.missing:
        found.lost_at = max(found.lost_at, (found.missing[-1], 0))
    found.unsure = [
        turn_id
        for turn_id, place in found.state.open.items()
        if (place.segment, place.offset) < found.lost_at and turn_id not in found.broken
    ]
    return found


def look(directory: Path) -> Found:
    """As `read_journal`, of a journal whose gateway may run. Raise OSError."""
    for _ in range(_NUM_LOOKS):
        with suppress(FileNotFoundError):  # a segment that was drained meanwhile
            return _read_with_lists(directory)
    return _read_with_lists(directory)


def _read_with_lists(directory: Path) -> Found:
    return read_journal(directory, live_ids.read(live_ids.names_of(directory)))


def set_aside_in(directory: Path) -> list[tuple[str, str, str, int]]:
    """Turns that were set aside: id, ISO time, reason, bytes that are kept. Raise OSError."""
    return [
        (turn_id, place.aside.at, place.aside.reason, place.aside.num_bytes or 0)
        for turn_id, place in look(directory).state.aside.items()
        if place.aside is not None
    ]


def _head_of(path: Path) -> Head | None:
    """The segment's head, of whatever number."""
    with path.open("rb") as file:
        content = file.read(_HEAD_BYTES)
        record = decode(content)
        if record is not None and record.length > len(content):
            record = decode(content + file.read(record.length - len(content)))
    return _head(record) if record is not None and record.kind is Kind.HEAD else None


def _newest(heads: dict[int, Head | None], instance: str | None) -> Head | None:
    """The newest head of a journal that is, or was, `instance`; without one, the newest of all."""
    sound = [head for number, head in heads.items() if head is not None and head.number == number]
    own = [head for head in sound if instance in (head.instance, *head.former)]
    newest = own or sound
    return newest[-1] if newest else None


def _is_foreign(head: Head | None, newest: Head | None) -> bool:
    """Whether a segment is of a journal that never was this one, as another worker's."""
    if head is None or newest is None:
        return False
    return head.instance not in (newest.instance, *newest.former)


def _head(record: Record) -> Head | None:
    if record.payload is None:
        return None
    try:
        return _decode_head(record.payload)
    except msgspec.MsgspecError:
        return None


def _read_segment(
    found: Found, number: int, content: bytes, newest: int, told_end: int | None, least: int
) -> None:
    """The segment counts up to `told_end`, where a later head tells it, or to `least` at least."""
    scanned = scan(content)
    found.ends[number] = scanned.end if told_end is None else told_end
    synced = least if told_end is None else told_end
    if not synced and (told_end == 0 or not (scanned.records or scanned.holes)):
        return  # begun, and nothing in it was acknowledged
    first_broken = scanned.first_broken
    is_torn = number == newest and scanned.is_torn
    if is_torn and first_broken is not None:
        is_torn = first_broken >= synced
    if is_torn and first_broken is not None:
        found.torn, found.ends[number] = number, first_broken
    if (damage := _damage_of(scanned, number, is_torn, synced)) is not None:
        found.damaged.setdefault(number, damage)
        found.lost_at = max(found.lost_at, (number, _lost_at(scanned, number, synced)))
    for record in scanned.records:
        found.group = max(found.group, record.group)
        if record.payload is not None:
            _apply(found, number, record)
        elif not is_torn and record.kind in (Kind.OPEN, Kind.CLOSE, Kind.ASIDE):
            start = record.offset
            left = content[start : start + record.length]
            found.broken[record.turn_id] = (record.kind, left)


def _damage_of(scanned: Scan, number: int, is_torn: bool, synced: int) -> str | None:
    first = scanned.records[0] if scanned.records else None
    head = _head(first) if first is not None and first.kind is Kind.HEAD else None
    if first is None or first.offset or head is None:
        return "its head is gone"
    if head.number != number:
        return f"it is a copy of segment {head.number}"
    if scanned.end < synced:
        return f"its records end at {scanned.end} of {synced} bytes"
    if scanned.is_whole or is_torn:
        return None
    holes = ", ".join(f"{start} to {stop}" for start, stop in scanned.holes[:5])
    broken = sum(record.payload is None for record in scanned.records)
    return f"{len(scanned.holes)} holes ({holes}), {broken} broken records"


def _lost_at(scanned: Scan, number: int, synced: int) -> int:
    """Where the last records may be gone of which nothing tells the turn."""
    first = scanned.records[0] if scanned.records else None
    head = _head(first) if first is not None and first.kind is Kind.HEAD else None
    if head is not None and head.number != number:
        return _END_OF_ALL  # none of its own is left
    if scanned.end < synced:
        return scanned.end
    return max((start for start, _ in scanned.holes), default=0)


def _apply(found: Found, number: int, record: Record) -> None:
    assert record.payload is not None
    place = Place(number, record.offset, record.length)
    try:
        found.state.apply(record.kind, record.turn_id, record.payload, place)
    except (ValueError, msgspec.MsgspecError):
        found.damaged.setdefault(number, f"record at {record.offset} can't be read")
        return
    replaced = _replaced_by(found, record, record.payload)
    for turn_id in replaced:
        found.broken.pop(turn_id, None)
    if record.kind is Kind.FORGET:
        found.forgotten.update(replaced)


def _replaced_by(found: Found, record: Record, payload: bytes) -> list[str]:
    """Turns whose earlier record does not matter any more, broken or not."""
    if record.kind is Kind.FORGET:
        return payload.decode("ascii").split()[1:]
    if record.kind is Kind.FOUND:
        return payload.decode("ascii").split()
    if record.kind is Kind.OPEN and found.broken.get(record.turn_id, (Kind.OPEN,))[0] != Kind.OPEN:
        return []
    return [record.turn_id]
