"""The residency index: the prefixes that each engine holds, by name, from events and receipts.

A name here is a hint for routing. A wrong one can lose a hit and can never make one.

Pure: time and frames are handed in. One `ResidencyIndex` describes one engine in one epoch. A
snapshot replaces it, events update it, and responses may update it earlier.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.protocol import (
    ChainGone,
    ChainHeld,
    EventFrame,
    Heartbeat,
    HeldName,
    LeaseEnded,
    Receipt,
    Snapshot,
    Started,
    Tier,
)
from gateway.admin.structs.fleet import Source
from gateway.routing.event_lines import SnapshotPart

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


class PrefixEnd(NamedTuple):
    """One named prefix of a prompt and its size.

    The unit of `size` is the same for all prefixes.
    """

    digest: str
    size: int


@dataclass(slots=True)
class HeldChain:
    """One held prefix. `leased_until` is on the monotonic clock, 0 without a lease.

    `own_tokens` lie behind the name before it. They are known from receipts, and used only without
    events.
    """

    tier: Tier
    leased_until: float = 0.0
    own_tokens: int = 0


class Coverage(NamedTuple):
    """How much of a prompt an engine holds, in the unit of its `PrefixEnd`s, and how deep.

    `device` is in device memory. `host` is the part behind it that must be copied back, and `disk`
    the part behind both that must be read from the engine's store. `leased` is the part of all that
    a lease holds.
    """

    device: int = 0
    host: int = 0
    leased: int = 0
    disk: int = 0

    @property
    def held(self) -> int:
        return self.device + self.host + self.disk


NOTHING = Coverage()


class ResidencyIndex:
    """What one engine holds.

    With events it follows them, and has at most `max_names` names of BYTES_PER_NAME bytes each.
    Without events (`capacity_tokens` is given) it is learned from receipts alone. Then it forgets
    by least recent use, as the engine presumably does.
    """

    def __init__(self, *, capacity_tokens: int | None = None, max_names: int = MAX_NAMES) -> None:
        self.epoch: str | None = None
        self.seq = 0
        self.heard_at: float | None = None
        self.num_forgotten = 0
        self._capacity = capacity_tokens
        self._max_names = max_names
        self._names: OrderedDict[str, HeldChain] = OrderedDict()
        self._tokens = 0
        # Name -> the time until which it counts without an event.
        self._expected: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def source(self) -> Source:
        return "events" if self._capacity is None else "learned"

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
                    self._drop(digest)
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
        if self._capacity is not None:
            return False
        return self.heard_at is None or now - self.heard_at > STALE_SECONDS

    # What we know before the engine says it.

    def expect(self, ends: Iterable[PrefixEnd], now: float) -> list[str]:
        """A prompt was sent to the engine. Later requests may count on its prefix.

        Return the names that the engine was not known to hold.
        """
        digests = [end.digest for end in ends]
        """As `expect`."""
        unheld = [digest for digest in digests if digest not in self._names]
        self._believe(unheld, now + EXPECTED_SECONDS)
        return unheld

    def disappoint(self, ends: Iterable[PrefixEnd]) -> None:
        """The expected prompt did not reach the engine."""
        self.disappoint_names(end.digest for end in ends)

    def disappoint_names(self, digests: Iterable[str]) -> None:
        """As `disappoint`."""
        for digest in digests:
            self._expected.pop(digest, None)

    def learn(self, started: Started, digests: Sequence[str], now: float) -> None:
        """Take in a response's receipt. `digests` are the request's names in order."""
        self.learn_receipt(started.epoch, started.receipt, digests, now)

    def learn_receipt(
        self, epoch: str, receipt: Receipt, digests: Sequence[str], now: float
    ) -> None:
        """As `learn`. `digests` are those at least that the engine holds."""
        if self._capacity is None:
            self._believe(digests[: receipt.num_held], now + CONFIRM_SECONDS)
            return
        if epoch != self.epoch:
            self._restart(epoch)
        until = now + receipt.lease_seconds if receipt.lease_seconds is not None else 0.0
        offsets = [0, *receipt.name_tokens]
        # The deepest name is put first, so that a chain is forgotten from its tail.
        for index in range(receipt.num_held - 1, -1, -1):
            holding = HeldChain(
                receipt.tier,
                until if index < receipt.num_leased else 0.0,
                max(offsets[index + 1] - offsets[index], 0),
            )
            self._put(digests[index], holding)
        self._shrink(now)

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
                return _split(size, above, held, max(leased, self._leased(ends, size, now)))
        return _split(0, above, held, leased)

    def touch(self, ends: Sequence[PrefixEnd]) -> None:
        """A prompt with these prefixes was sent to the engine.

        Without events this marks them as used.
        """
        if self._capacity is not None:
            for end in reversed(ends):
                if end.digest in self._names:
                    self._names.move_to_end(end.digest)

    # Inside.

    def _leased(self, ends: Sequence[PrefixEnd], size: int, now: float) -> int:
        for digest, depth in reversed(ends):
            if depth <= size and (holding := self._names.get(digest)) is not None:
                if holding.leased_until > now:
                    return depth
        return 0

    def _restart(self, epoch: str) -> None:
        self._clear()
        self.epoch, self.seq = epoch, 0

    def _clear(self) -> None:
        self._names.clear()
        self._expected.clear()
        self._tokens = 0

    def _hold(self, chain: ChainHeld, now: float) -> None:
        until = now + chain.lease_seconds if chain.lease_seconds is not None else 0.0
        names: list[HeldName] = chain.names
        for index in range(len(names) - 1, -1, -1):
            digest = names[index].digest
            self._expected.pop(digest, None)
            leased_until = until if index < chain.num_leased else 0.0
            holding = self._names.get(digest)
            if holding is None:
                self._put(digest, HeldChain(chain.tier, leased_until))
                continue
            # Most names of an event were held before, since turns share their beginnings.
            holding.tier = chain.tier
            holding.leased_until = max(leased_until, holding.leased_until)
            self._names.move_to_end(digest)
        while len(self._names) > self._max_names:
            self._names.popitem(last=False)
            self.num_forgotten += 1

    def _put(self, digest: str, holding: HeldChain) -> None:
        self._drop(digest)
        if len(digest) > _MAX_DIGEST:
            return
        self._names[digest] = holding
        self._tokens += holding.own_tokens

    def _drop(self, digest: str) -> None:
        if (before := self._names.pop(digest, None)) is not None:
            self._tokens -= before.own_tokens

    def _shrink(self, now: float) -> None:
        """Forget the least recently used names beyond the capacity. Leased names stay."""
        assert self._capacity is not None
        spared = 0
        while self._names and spared < len(self._names):
            if self._tokens <= self._capacity and len(self._names) <= self._max_names:
                return
            digest, holding = next(iter(self._names.items()))
            if holding.leased_until > now:
                self._names.move_to_end(digest)
                spared += 1
                continue
            self._drop(digest)
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
