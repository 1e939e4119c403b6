"""Changes to the segments of a journal that nobody has open: damage, or an operator's hand."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.journal.files import segment_files
from gateway.journal.segments import Kind, Record, encode, scan
from gateway.journal.state import Head

Edit = Callable[[Record], bytes | None]
"""The new payload of a record, or None where the record is to be gone."""


def edit(directory: Path, change: Edit) -> int:
    """Write every segment anew, with sound checksums. Return how many records were changed."""
    changed = 0
    for path in segment_files(directory).values():
        content = path.read_bytes()
        kept = b""
        for record in scan(content).records:
            assert record.payload is not None
            payload = _without_ends(record) if record.kind is Kind.HEAD else change(record)
            changed += record.kind is not Kind.HEAD and payload != record.payload
            if payload is not None:
                kept += encode(record.kind, record.group, record.turn_id, payload)
        path.write_bytes(kept.ljust(len(content), b"\0"))
    return changed


def _without_ends(record: Record) -> bytes:
    head = msgspec.json.decode(record.payload or b"", type=Head)
    return msgspec.json.encode(msgspec.structs.replace(head, ends={}))


def without(turn_id: str) -> Edit:
    """Every trace of a turn goes."""
    return lambda record: None if record.turn_id == turn_id else record.payload


def append(directory: Path, kind: Kind, turn_id: str, payload: bytes) -> None:
    """One more record in the newest segment."""
    path = list(segment_files(directory).values())[-1]
    content = path.read_bytes()
    found = scan(content)
    group = max(record.group for record in found.records) + 1
    path.write_bytes(content[: found.end] + encode(kind, group, turn_id, payload))
