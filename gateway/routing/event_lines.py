"""Lines of an engine's event stream as frames; a long snapshot as parts. Pure.

A snapshot has as many names as the engine holds. Reading 160,000 of them takes a third of a second,
so the event loop must have other work between the parts.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from engine.protocol import ChainHeld, EventFrame

WHOLE_BYTES = 64 * 1024
"""A shorter line is read at once."""
PART_BYTES = 128 * 1024

_event = msgspec.json.Decoder(EventFrame)
_chain = msgspec.json.Decoder(ChainHeld)


class _Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """As the protocol's, with chains that are not read yet."""

    seq: int
    epoch: str
    chains: list[msgspec.Raw]


_snapshot = msgspec.json.Decoder(_Snapshot)


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Some chains of a snapshot. Only the last part has `seq`: the snapshot is complete with it."""

    epoch: str
    chains: list[ChainHeld]
    is_first: bool
    seq: int | None


def frames_of(line: bytes) -> Iterator[EventFrame | SnapshotPart]:
    """Yield a line's frame, or its parts. Raise msgspec's errors and UnicodeDecodeError."""
    if len(line) <= WHOLE_BYTES:
        yield _event.decode(line)
        return
    try:
        snapshot = _snapshot.decode(line)
    except msgspec.ValidationError:
        yield _event.decode(line)
        return
    chains: list[ChainHeld] = []
    num_bytes, is_first = 0, True
    for raw in snapshot.chains:
        chains.append(_chain.decode(raw))
        num_bytes += len(bytes(raw))
        if num_bytes >= PART_BYTES:
            yield SnapshotPart(snapshot.epoch, chains, is_first, None)
            chains, num_bytes, is_first = [], 0, False
    yield SnapshotPart(snapshot.epoch, chains, is_first, snapshot.seq)
