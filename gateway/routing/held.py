"""The prefix index: which engines hold which prefixes, by name, from events and receipts.

A name here is a hint for routing: a wrong one can lose a hit, and can never make a wrong one. Each
name is here once, with all its holders. The index is bounded as a whole. When it is full, it first
forgets names that few engines hold, that no lease holds, and that stand early in their prompts.
`Holdings` are one engine's part of the index, in one epoch. Pure: time and frames are handed in.

An engine that holds a prefix up to a name holds it up to every name before it. So the depth is
searched by bisection. There are two exceptions, where every name is looked at: near a prompt's end,
because the deepest names are kept longest, and where an engine holds entries without what stands
before them (a recurrent state).
"""

import asyncio
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import msgspec

from engine.protocol import (
    ChainGone,
    ChainHeld,
    EventFrame,
    Heartbeat,
    LeaseEnded,
    Snapshot,
    Started,
    Tier,
)

BYTES_PER_NAME = 160
"""The most memory of one name: 88 bytes were measured, 78 more where many engines hold it."""
INDEX_BYTES = 640 << 20
EXPECTED_SECONDS = 30.0
"""The longest time for which a sent prefix, or a receipt's, counts without the engine's event. The
shortest time is half of it."""
STALE_SECONDS = 20.0
"""Four missing heartbeats. After them the engine's last known holdings no longer count."""
WHOLE_BYTES = 64 * 1024
"""A line up to this size is read at once."""
PART_BYTES = 32 * 1024
NEAR_NAMES = 32
"""How many names before a prompt's end are all looked at: a marker's look-back and some more."""
_MAX_EXPECTED = 1_000_000
_MAX_SHARDS = 1024
_NAMES_A_SHARD = 64
_MAX_SHARED = 1 << 16
_MAX_SPLITS = 64
_MAX_KNOWN = 1 << 13

# A name's holders are one integer: a byte for its depth, then four fields with a bit for each
# engine's slot. The garbage collector does not traverse integers, and names with the same holders
# share one.
_SLOTS = 512
_EVERY = (1 << _SLOTS) - 1
_DEPTH = 0xFF
_DEPTH_TOKENS = 64
_DEVICE, _LEASED, _HOST, _DISK = (8 + field * _SLOTS for field in range(4))
_FIELDS: dict[Tier, int] = {"device": _DEVICE, "host": _HOST, "disk": _DISK}
_OF_SLOT = sum(1 << field for field in (_DEVICE, _LEASED, _HOST, _DISK))
_ANY_LEASE = _EVERY << _LEASED

_event = msgspec.json.Decoder(EventFrame)
_chain = msgspec.json.Decoder(ChainHeld)


class _Snapshot(msgspec.Struct, frozen=True, tag="snapshot"):
    """The protocol's snapshot, with chains that are not decoded yet."""

    seq: int
    epoch: str
    chains: list[msgspec.Raw]


_snapshot = msgspec.json.Decoder(_Snapshot)


class SnapshotPart(NamedTuple):
    """Some chains of a snapshot."""

    epoch: str
    chains: list[ChainHeld]
    is_first: bool
    # The number of the snapshot's event; None before the last part.
    seq: int | None


class Copied(NamedTuple):
    """A document of a prompt. What stands here is the part that is read where its name is held."""

    digest: str
    # Where that part begins and ends, as sizes of the prompt.
    start: int
    end: int

    def behind(self, prefix: int) -> int:
        """How much of it is behind a prefix of this size."""
        return max(self.end - max(self.start, prefix), 0)


class Ends(NamedTuple):
    """The named prefixes of a prompt, shallowest first. All sizes are in one unit."""

    digests: Sequence[str]
    # The length of each prefix.
    lengths: Sequence[int]
    # The size of one unit of length.
    rate: float = 1.0
    # The documents, which may stand anywhere in the prompt.
    documents: Sequence[Copied] = ()

    def size(self, index: int) -> int:
        return ceil(self.lengths[index] * self.rate)

    def first_above(self, size: int) -> int:
        """The index of the first prefix that is larger; the number of prefixes where none is."""
        return bisect_right(range(len(self.digests)), size, key=self.size)

    @property
    def whole(self) -> int:
        """The size of the whole prompt, 1 at least."""
        return max(self.size(-1), 1) if self.lengths else 1


class Coverage(NamedTuple):
    """How much of a prompt an engine holds, in the unit of its `Ends`."""

    # What is in device memory.
    device: int = 0
    # What is in host memory, from where it must be copied back.
    host: int = 0
    # The part of all tiers that a lease holds.
    leased: int = 0
    # What is in the store, from where it must be read.
    disk: int = 0
    # The part of all tiers that belongs to documents behind the prefix.
    copied: int = 0
    # A bit for each document that is held, by its number.
    documents: int = 0

    @property
    def held(self) -> int:
        return self.device + self.host + self.disk

    @property
    def prefix(self) -> int:
        return self.held - self.copied

    def joined(
        self, ends: "Ends", numbers: Sequence[int], tier: Tier, *, is_leased: bool
    ) -> "Coverage":
        """This coverage and the documents of these numbers, which are in this tier."""
        size = sum(ends.documents[number].behind(self.prefix) for number in numbers)
        return self._replace(
            **{tier: getattr(self, tier) + size},
            leased=self.leased + size * is_leased,
            copied=self.copied + size,
            documents=self.documents | sum(1 << number for number in numbers),
        )

    def holds(self, number: int) -> bool:
        """Whether the document of this number is held."""
        return bool(self.documents >> number & 1)


NOTHING = Coverage()


class PrefixIndex:
    """What all engines hold, in at most `max_bytes`, at BYTES_PER_NAME a name.

    `forgot` is called with the number of names that were forgotten. `has_gaps` says that an engine
    holds entries without what stands before them.
    """

    def __init__(
        self, max_bytes: int = INDEX_BYTES, forgot: Callable[[int], object] = lambda _: None
    ) -> None:
        self.max_names = max(max_bytes // BYTES_PER_NAME, 1)
        self.num_forgotten = 0
        self.has_gaps = False
        self._snapshot_part = asyncio.Lock()
        self._forgot = forgot
        # Many small dictionaries, so that none takes long to grow, to be thinned or to be swept.
        num_shards = 1
        while num_shards < _MAX_SHARDS and self.max_names // (2 * num_shards) >= _NAMES_A_SHARD:
            num_shards *= 2
        self._shards: list[dict[int, int]] = [{} for _ in range(num_shards)]
        self._last_shard = num_shards - 1
        self._shard_names = max(self.max_names // num_shards, 1)
        # One integer for each set of holders, which all names with these holders use.
        self._shared: dict[int, int] = {}
        # The names of sent prefixes and the engines that may hold them: the young ones, then the
        # old ones.
        self._expected: list[dict[int, int]] = [{}, {}]
        self._expected_at = 0.0
        # How many names each slot holds, and how many of its names were forgotten.
        self.names = [0] * _SLOTS
        self.forgotten = [0] * _SLOTS
        self._free = deque(range(_SLOTS))
        # The bits of slots whose engines are gone, and how many shards still have them.
        self._dead = 0
        self._to_sweep = 0

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    async def wait_turn(self) -> None:
        """Wait between two parts of a long snapshot. One part of all engines' snapshots is taken in
        at a time, and the event loop runs once before the next part."""
        async with self._snapshot_part:
            await asyncio.sleep(0)

    def take_slot(self) -> int:
        """Take a slot: a number for one epoch of one engine."""
        while self._to_sweep and not self._free:
            self.sweep()
        return self._free.popleft()

    def leave_slot(self, slot: int) -> None:
        """Let nothing of a slot count from now on. Its names are removed bit by bit (`sweep`)."""
        self._dead |= 1 << slot
        self._to_sweep = len(self._shards)

    def sweep(self) -> None:
        """Remove engines that are gone from the names of one more shard, if any has them."""
        if not self._to_sweep:
            return
        self._to_sweep -= 1
        shard = self._shards[self._to_sweep]
        dead = self._dead * _OF_SLOT
        for key in [key for key, bits in shard.items() if bits & dead]:
            bits = shard[key] & ~dead
            if bits > _DEPTH:
                shard[key] = bits
            else:
                del shard[key]
        if not self._to_sweep:
            for slot in _slots_of(self._dead):
                self.names[slot] = 0
                self.forgotten[slot] = 0
                self._free.append(slot)
            self._dead = 0

    def hold(self, slot: int, chain: ChainHeld) -> None:
        """Note that an engine holds these names."""
        here = 1 << _FIELDS[chain.tier] + slot
        # A lease ends by an event of its own, or with the name.
        slot_bits = _OF_SLOT << slot
        names = self.names
        kept = ~(slot_bits | _DEPTH) | 1 << _LEASED + slot
        leased = here | 1 << _LEASED + slot
        shared = self._shared
        shards = self._shards
        last = self._last_shard
        most = self._shard_names
        if len(shared) > _MAX_SHARED:
            shared.clear()
        for index, name in enumerate(chain.names):
            key = hash(name.digest)
            shard = shards[key & last]
            # The names that were reported last stand last.
            old_bits = shard.pop(key, 0)
            depth = name.tokens // _DEPTH_TOKENS
            if not 0 <= depth <= _DEPTH:
                depth = _DEPTH if depth > 0 else 0
            holder = leased if index < chain.num_leased else here
            bits = old_bits & kept | holder | depth
            shard[key] = shared.setdefault(bits, bits)
            if not old_bits & slot_bits:
                names[slot] += 1
                if len(shard) > most:
                    self._thin(shard)

    def lose(self, slot: int, digests: Sequence[str], lost: int = _OF_SLOT) -> None:
        """Note that an engine no longer holds these names. `lost` are the fields that it loses, for
        example only the lease."""
        lost_bits = lost << slot
        for digest in digests:
            key = hash(digest)
            shard = self._shards[key & self._last_shard]
            old_bits = shard.get(key, 0)
            if not old_bits & lost_bits:
                continue
            bits = old_bits & ~lost_bits
            if not bits & _OF_SLOT << slot:
                self.names[slot] -= 1
            if bits > _DEPTH:
                shard[key] = self._shared.setdefault(bits, bits)
            else:
                del shard[key]

    def expect(self, slot: int, digests: Sequence[str], now: float) -> None:
        """Note that an engine will hold these names, so that later requests may count on them."""
        if now - self._expected_at > EXPECTED_SECONDS / 2 or len(self._expected[0]) > _MAX_EXPECTED:
            is_late = now - self._expected_at > EXPECTED_SECONDS
            self._expected = [{}, {} if is_late else self._expected[0]]
            self._expected_at = now
        young = self._expected[0]
        bit = 1 << _DEVICE + slot
        for key in map(hash, digests):
            young[key] = young.get(key, 0) | bit

    def disappoint(self, slot: int, digests: Sequence[str]) -> None:
        for names in self._expected if any(self._expected) else ():
            for key in map(hash, digests):
                if key in names:
                    names[key] &= ~(1 << _DEVICE + slot)

    def cover(self, ends: Ends, now: float) -> dict[int, Coverage]:
        """How much of a prompt each engine holds, by slot. An engine that holds nothing is left
        out."""
        shards = self._shards
        last = self._last_shard
        age = now - self._expected_at
        expected = self._expected[: 2 if age <= EXPECTED_SECONDS / 2 else 1]
        expected = [names for names in expected if names and age <= EXPECTED_SECONDS]

        def at(digest: str) -> int:
            """A name's holders, expected ones too."""
            key = hash(digest)
            bits = shards[key & last].get(key, 0)
            for names in expected:
                bits |= names.get(key, 0)
            return bits

        covered = self._cover_prefix(ends, at)
        if ends.documents:
            self._cover_documents(ends, at, covered)
        return covered

    def _cover_documents(
        self, ends: Ends, at: Callable[[str], int], covered: dict[int, Coverage]
    ) -> None:
        """Add the documents that engines hold to what is covered, each in its fastest tier."""
        # Documents with the same holders are handled together, and so are engines with the same
        # coverage.
        alike = dict[int, list[int]]()
        for number, document in enumerate(ends.documents):
            holders_bits = at(document.digest) & ~_DEPTH & ~(self._dead * _OF_SLOT)
            if holders_bits:
                alike.setdefault(holders_bits, []).append(number)
        for holders_bits, numbers in alike.items():
            remaining = _EVERY
            leased = holders_bits >> _LEASED
            for tier, field in _FIELDS.items():
                holders = holders_bits >> field & remaining
                remaining &= ~holders
                _join(ends, numbers, tier, holders & leased, covered, is_leased=True)
                _join(ends, numbers, tier, holders & ~leased, covered, is_leased=False)

    def _cover_prefix(self, ends: Ends, at: Callable[[str], int]) -> dict[int, Coverage]:
        levels: dict[int, list[tuple[int, int]]] = {_DEVICE: [], _LEASED: [], _HOST: [], _DISK: []}
        unseen = ~_DEPTH & ~(self._dead * _OF_SLOT)
        digests = ends.digests
        # The holders at the looked-at names, by index. Between two of them holders do not change.
        near = 0 if self.has_gaps else max(len(digests) - NEAR_NAMES, 0)
        probed = {index: at(digests[index]) for index in range(len(digests) - 1, near - 1, -1)}
        spans = [(0, near)] if near else []
        if near:
            probed[0] = at(digests[0])
        while spans:
            low, high = spans.pop()
            if high - low > 1 and (probed[low] ^ probed[high]) > _DEPTH:
                middle = (low + high) // 2
                probed[middle] = at(digests[middle])
                spans += (low, middle), (middle, high)
        for index, holders in sorted(probed.items(), reverse=True):
            fresh = holders & unseen
            if not fresh:
                continue
            unseen &= ~fresh
            size = ends.size(index)
            for field, reached in levels.items():
                bits = fresh >> field & _EVERY
                if bits:
                    reached.append((bits, size))
        device, leased, host, disk = levels.values()
        covered = dict[int, Coverage]()
        if not (host or disk) and len(device) * len(leased) <= _MAX_SPLITS:
            # Most engines hold as much as others, so these are handled together.
            for bits, size in device:
                for others, leased_size in leased:
                    both = bits & others
                    if both:
                        coverage = Coverage(size, 0, leased_size)
                        covered.update(dict.fromkeys(_slots_of(both), coverage))
                        bits ^= both
                if bits:
                    covered.update(dict.fromkeys(_slots_of(bits), Coverage(size)))
            return covered
        reach = [
            {slot: size for bits, size in reached for slot in _slots_of(bits)}
            for reached in levels.values()
        ]
        for slot in reach[0].keys() | reach[2].keys() | reach[3].keys():
            device_size, leased_size, host_size, disk_size = (sizes.get(slot, 0) for sizes in reach)
            memory_size = max(device_size, host_size)
            whole_size = max(memory_size, disk_size)
            covered[slot] = Coverage(
                device_size, memory_size - device_size, leased_size, whole_size - memory_size
            )
        return covered

    def _thin(self, shard: dict[int, int]) -> None:
        """Forget the least worthy third of a full shard; among equals those reported first."""
        keys = list(shard)
        values = list(shard.values())
        unpacked = list(map(_known, values))
        worths = [worth for worth, _ in unpacked]
        order = sorted(range(len(keys)), key=worths.__getitem__)
        gone = order[: len(keys) // 3 + 1]
        # The shard is filled anew, because a dictionary keeps its size when items are deleted.
        shard.clear()
        for place in order[len(gone) :]:
            shard[keys[place]] = values[place]
        names = self.names
        forgotten = self.forgotten
        for place in gone:
            for slot in unpacked[place][1]:
                names[slot] -= 1
                forgotten[slot] += 1
        self.num_forgotten += len(gone)
        self._forgot(len(gone))


def _join(
    ends: Ends,
    numbers: Sequence[int],
    tier: Tier,
    holders: int,
    covered: dict[int, Coverage],
    *,
    is_leased: bool,
) -> None:
    """Add these documents to what is covered at each of these holders."""
    joined = dict[Coverage, Coverage]()
    for slot in _slots_of(holders) if holders else ():
        coverage = covered.get(slot, NOTHING)
        if coverage not in joined:
            joined[coverage] = coverage.joined(ends, numbers, tier, is_leased=is_leased)
        covered[slot] = joined[coverage]


@lru_cache(_MAX_KNOWN)
def _known(bits: int) -> tuple[int, list[int]]:
    """The worth of a name with these holders, and the holders' slots."""
    num_holders = min((bits >> 8).bit_count(), 8)
    worth = (bool(bits & _ANY_LEASE) << 16) + num_holders * (bits & _DEPTH)
    return worth, _slots_of((bits >> _DEVICE | bits >> _HOST | bits >> _DISK) & _EVERY)


def _slots_of(bits: int) -> list[int]:
    if not bits & bits - 1:
        return [bits.bit_length() - 1]
    return [slot for slot, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


class Holdings:
    """One engine's part of an index, by its events."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self.index = PrefixIndex() if index is None else index
        self.slot = self.index.take_slot()
        self.epoch: str | None = None
        self.seq = 0
        self.heard_at = -math.inf

    def __len__(self) -> int:
        return self.index.names[self.slot]

    @property
    def num_forgotten(self) -> int:
        return self.index.forgotten[self.slot]

    def apply(self, frame: EventFrame | SnapshotPart, now: float) -> bool:
        """Take one frame in. Return False if an event before it is missing, so that a replay must
        be asked for."""
        self.heard_at = now
        self.index.sweep()
        match frame:
            case Snapshot() | SnapshotPart():
                if isinstance(frame, Snapshot) or frame.is_first:
                    self._restart(frame.epoch)
                elif frame.epoch != self.epoch:
                    return False
                self.hold(frame.chains)
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
                self.index.hold(self.slot, frame)
            case ChainGone():
                self.index.lose(self.slot, frame.names)
                self.disappoint(frame.names)
            case LeaseEnded():
                self.index.lose(self.slot, frame.names, 1 << _LEASED)
        return True

    def forget(self) -> None:
        """Forget everything, because the process is gone or its last event is too old."""
        self._restart(None)
        self.heard_at = -math.inf

    def is_stale(self, now: float) -> bool:
        return now - self.heard_at > STALE_SECONDS

    # What is known before the engine reports it.

    def expect(self, digests: Sequence[str], now: float) -> None:
        """Note that a prompt with these names was sent to the engine."""
        self.index.expect(self.slot, digests, now)

    def disappoint(self, digests: Sequence[str]) -> None:
        """Note that an expected prompt did not reach the engine."""
        self.index.disappoint(self.slot, digests)

    def learn(self, started: Started, digests: Sequence[str], now: float) -> None:
        """Take in a response's receipt. `digests` are the request's names in order."""
        self.index.expect(self.slot, digests[: started.receipt.num_held], now)

    def hold(self, chains: Sequence[ChainHeld]) -> None:
        """Take in chains that the engine holds, from a snapshot or from an answer about names."""
        for chain in chains:
            self.index.hold(self.slot, chain)

    def coverage(self, ends: Ends, now: float) -> Coverage:
        """How much of a prompt this engine holds."""
        return self.index.cover(ends, now).get(self.slot, NOTHING)

    def _restart(self, epoch: str | None) -> None:
        if self.epoch is not None or len(self):
            self.index.leave_slot(self.slot)
            self.slot = self.index.take_slot()
        self.epoch = epoch
        self.seq = 0


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
    num_bytes = 0
    is_first = True
    for raw in snapshot.chains:
        chains.append(_chain.decode(raw))
        num_bytes += len(bytes(raw))
        if num_bytes >= PART_BYTES:
            yield SnapshotPart(snapshot.epoch, chains, is_first, None)
            chains = []
            num_bytes = 0
            is_first = False
    yield SnapshotPart(snapshot.epoch, chains, is_first, snapshot.seq)
