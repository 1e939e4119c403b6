"""The residency index: the prefixes that each engine holds, by name, from events and receipts.

A name here is a hint for routing: a wrong one can lose a hit and can never make one. One
`ResidencyIndex` describes one engine in one epoch. Pure: time and frames are handed in.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from engine.protocol import (
    ChainGone,
    ChainHeld,
    EventFrame,
    Heartbeat,
    HeldName,
    LeaseEnded,
    Snapshot,
    Started,
    Tier,
)

MAX_NAMES = 500_000
"""The most names of one engine, if no bound of memory is given."""
BYTES_PER_NAME = 320
"""The most memory of one name: 215 bytes were measured under a lease, and half as much again while
a dictionary grows."""
_MAX_DIGEST = 64
"""The most digits of a name. Names have 16; a longer one is not a gateway's."""
EXPECTED_SECONDS = 30.0
"""Seconds for which a sent prefix counts as held before the engine says so."""
CONFIRM_SECONDS = 10.0
"""Seconds for which a receipt counts until the event with the same news has come."""
STALE_SECONDS = 20.0
"""Four missing heartbeats. After them the engine's last known holdings no longer count."""
_MAX_EXPECTED = 100_000


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


class PrefixEnd(NamedTuple):
    """One named prefix of a prompt and its size.

    The unit of `size` is the same for all prefixes.
    """

    digest: str
    size: int


@dataclass(slots=True)
class HeldChain:
    """One held prefix. `leased_until` is on the monotonic clock, 0 without a lease."""

    tier: Tier
    leased_until: float = 0.0


class Coverage(NamedTuple):
    """How much of a prompt an engine holds, in the unit of its `PrefixEnd`s: `device` in device
    memory, then `host`, which must be copied back, then `disk`, which must be read from its store.
    `leased` is the part of all that a lease holds."""

    device: int = 0
    host: int = 0
    leased: int = 0
    disk: int = 0

    @property
    def held(self) -> int:
        return self.device + self.host + self.disk


NOTHING = Coverage()


class ResidencyIndex:
    """What one engine holds, by its events: at most `max_names` names of BYTES_PER_NAME bytes."""

    def __init__(self, max_names: int = MAX_NAMES) -> None:
        self.epoch: str | None = None
        self.seq = 0
        self.heard_at: float | None = None
        self.num_forgotten = 0
        self._max_names = max_names
        self._names: OrderedDict[str, HeldChain] = OrderedDict()
        # Name -> the time until which it counts without an event.
        self._expected: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    # What the engine says.

    def apply(self, frame: EventFrame | SnapshotPart, now: float) -> bool:
        """Take one frame in.

        Return False if an event before it is missing: then ask for a replay.
        """
        self.heard_at = now
        match frame:
            case Snapshot():
                self._restart(frame.epoch)
                self.seq = frame.seq
                for chain in frame.chains:
                    self._hold(chain, now)
                return True
            case SnapshotPart():
                if frame.is_first:
                    self._restart(frame.epoch)
                elif frame.epoch != self.epoch:
                    return False
                for chain in frame.chains:
                    self._hold(chain, now)
                self.seq = frame.seq or 0
                return True
            case Heartbeat():
                return frame.seq == self.seq
        if frame.seq <= self.seq:
            return True
        if frame.seq != self.seq + 1:
            return False
        self.seq = frame.seq
        match frame:
            case ChainHeld():
                self._hold(frame, now)
            case ChainGone():
                for digest in frame.names:
                    self._expected.pop(digest, None)
                    self._names.pop(digest, None)
            case LeaseEnded():
                for digest in frame.names:
                    if (holding := self._names.get(digest)) is not None:
                        holding.leased_until = 0.0
        return True

    def forget(self) -> None:
        """Forget everything: the process is gone, or its last event is too old."""
        self.epoch, self.seq, self.heard_at = None, 0, None
        self._clear()

    def is_stale(self, now: float) -> bool:
        return self.heard_at is None or now - self.heard_at > STALE_SECONDS

    # What we know before the engine says it.

    def expect(self, ends: Iterable[PrefixEnd], now: float) -> None:
        """A prompt was sent to the engine. Later requests may count on its prefix."""
        self._believe([end.digest for end in ends], now + EXPECTED_SECONDS)

    def disappoint(self, ends: Iterable[PrefixEnd]) -> None:
        """The expected prompt did not reach the engine."""
        for end in ends:
            self._expected.pop(end.digest, None)

    def learn(self, started: Started, digests: Sequence[str], now: float) -> None:
        """Take in a response's receipt. `digests` are the request's names in order."""
        self._believe(digests[: started.receipt.num_held], now + CONFIRM_SECONDS)

    # What is asked of it.

    def coverage(self, ends: Sequence[PrefixEnd], now: float) -> Coverage:
        """How much of a prompt the engine holds.

        `ends` are shallowest first; the deepest held one counts.
        """
        held = leased = above = 0
        for digest, size in reversed(ends):
            holding = self._names.get(digest)
            if holding is None:
                if (until := self._expected.get(digest)) is None or until < now:
                    continue
                return _split(size, max(above, size), max(held, size), leased)
            held = held or size
            if holding.tier != "disk":
                above = above or size
            if not leased and holding.leased_until > now:
                leased = size
            if holding.tier == "device":
                leases = (
                    depth
                    for digest, depth in reversed(ends)
                    if depth <= size
                    and (holding := self._names.get(digest)) is not None
                    and holding.leased_until > now
                )
                return _split(size, above, held, max(leased, next(leases, 0)))
        return _split(0, above, held, leased)

    # Inside.

    def _restart(self, epoch: str) -> None:
        self._clear()
        self.epoch, self.seq = epoch, 0

    def _clear(self) -> None:
        self._names.clear()
        self._expected.clear()

    def _hold(self, chain: ChainHeld, now: float) -> None:
        until = now + chain.lease_seconds if chain.lease_seconds is not None else 0.0
        names: list[HeldName] = chain.names
        for index in range(len(names) - 1, -1, -1):
            digest = names[index].digest
            self._expected.pop(digest, None)
            leased_until = until if index < chain.num_leased else 0.0
            holding = self._names.get(digest)
            if holding is None:
                if len(digest) <= _MAX_DIGEST:
                    self._names[digest] = HeldChain(chain.tier, leased_until)
                continue
            # Most names of an event were held before, since turns share their beginnings.
            holding.tier = chain.tier
            holding.leased_until = max(leased_until, holding.leased_until)
            self._names.move_to_end(digest)
        while len(self._names) > self._max_names:
            self._names.popitem(last=False)
            self.num_forgotten += 1

    def _believe(self, digests: Sequence[str], until: float) -> None:
        for digest in digests:
            if digest not in self._names:
                self._expected[digest] = until
                self._expected.move_to_end(digest)
        while len(self._expected) > _MAX_EXPECTED:
            self._expected.popitem(last=False)


def _split(device: int, above: int, held: int, leased: int) -> Coverage:
    """A coverage by the ends of what is on the device, of what is there or on the host, of all."""
    return Coverage(device, above - device, leased, held - above)


def frames_of(line: bytes) -> Iterator[EventFrame | SnapshotPart]:
    """Yield the frame of a line of an engine's event stream, or the parts of a long snapshot,
    between which the event loop has other work. Raise msgspec's errors and UnicodeDecodeError."""
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
