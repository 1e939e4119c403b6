"""The residency index: which prefixes each engine holds, by name, from its events and our receipts.

A name here is a hint for routing: a wrong one costs a hit and never gives one. Pure: time comes in,
frames come in, nothing goes out. One `ResidencyIndex` is one engine in
one epoch: a snapshot replaces it, events bring it forward, and responses may tell it sooner.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
"""Of one engine, where no bound of memory is given."""
BYTES_PER_NAME = 320
"""What a name takes here: 215 bytes measured for a name under a lease, and as much as half of that
again while a dictionary grows."""
_MAX_DIGEST = 64
"""Names have 16 digits; a longer one is nobody's."""
EXPECTED_SECONDS = 30.0
"""How long a prefix that was sent to an engine counts as held before the engine said so."""
CONFIRM_SECONDS = 10.0
"""How long a receipt counts before the event that repeats it has come."""
STALE_SECONDS = 20.0
"""Four missing heartbeats: what the engine held then is not believed any more."""
_MAX_EXPECTED = 100_000

Source = Literal["events", "learned"]


class PrefixEnd(NamedTuple):
    """One named prefix of a prompt and its length; `size` in any unit that is the same for all."""

    digest: str
    size: int


@dataclass(slots=True)
class HeldChain:
    """`leased_until` on the monotonic clock, 0 without a lease.

    `own_tokens` beyond the name before it are known from receipts only, and used only where there
    are no events.
    """

    tier: Tier
    leased_until: float = 0.0
    own_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a prompt an engine holds, in the unit of its `PrefixEnd`s, and how deep.

    `device` is at hand, `host` the part beyond it that must be copied back, `leased` the part of
    both that a lease promises.
    """

    device: int = 0
    host: int = 0
    leased: int = 0

    @property
    def held(self) -> int:
        return self.device + self.host


NOTHING = Coverage()


class ResidencyIndex:
    """What one engine holds.

    With events it is what they say, bounded by `max_names`, which is a bound of memory since a name
    takes at most BYTES_PER_NAME. Without (`capacity_tokens` given) it is
    learned from receipts alone and forgets by least recent use, as the engine presumably does.
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
        # Name -> until when it is believed without an event.
        self._expected: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def source(self) -> Source:
        return "events" if self._capacity is None else "learned"

    # What the engine says.

    def apply(self, frame: EventFrame, now: float) -> bool:
        """Take one frame in. False where an event is missing before it: ask for a replay."""
        self.heard_at = now
        match frame:
            case Snapshot():
                self._restart(frame.epoch)
                self.seq = frame.seq
                for chain in frame.chains:
                    self._hold(chain, now)
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
        """Its process is gone, or what it said is too old: nothing is known of it."""
        self.epoch, self.seq, self.heard_at = None, 0, None
        self._clear()

    def is_stale(self, now: float) -> bool:
        if self._capacity is not None:
            return False
        return self.heard_at is None or now - self.heard_at > STALE_SECONDS

    # What we know ahead of it.

    def expect(self, ends: Iterable[PrefixEnd], now: float) -> None:
        """A prompt goes to it: requests that come meanwhile may count on its prefix."""
        self._believe([end.digest for end in ends], now + EXPECTED_SECONDS)

    def disappoint(self, ends: Iterable[PrefixEnd]) -> None:
        """It never got there."""
        for end in ends:
            self._expected.pop(end.digest, None)

    def learn(self, started: Started, digests: Sequence[str], now: float) -> None:
        """Take in a response's receipt; `digests` are the request's names in their order."""
        receipt = started.receipt
        if self._capacity is None:
            self._believe(digests[: receipt.num_held], now + CONFIRM_SECONDS)
            return
        if started.epoch != self.epoch:
            self._restart(started.epoch)
        until = now + receipt.lease_seconds if receipt.lease_seconds is not None else 0.0
        offsets = [0, *receipt.name_tokens]
        # The deepest first: a chain is forgotten from its tail.
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
        """How much of a prompt is here; `ends` shallowest first. Looks from the deepest down."""
        held = leased = 0
        for digest, size in reversed(ends):
            holding = self._names.get(digest)
            if holding is None:
                if (until := self._expected.get(digest)) is None or until < now:
                    continue
                return Coverage(size, max(held - size, 0), leased)
            held = held or size
            if not leased and holding.leased_until > now:
                leased = size
            if holding.tier == "device":
                return Coverage(size, held - size, max(leased, self._leased(ends, size, now)))
        return Coverage(0, held, leased)

    def touch(self, ends: Sequence[PrefixEnd]) -> None:
        """A prompt with these prefixes was sent there: where it is learned, they are in use."""
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
            before = self._names.get(digest)
            leased_until = until if index < chain.num_leased else 0.0
            if before is not None:
                leased_until = max(leased_until, before.leased_until)
            self._put(digest, HeldChain(chain.tier, leased_until))
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
        """Forget the least recently used beyond the capacity; a lease keeps what it holds."""
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
