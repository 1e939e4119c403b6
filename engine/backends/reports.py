"""Reports of what an engine holds: events, entries, names, and a map of the pool's blocks."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from typing import NamedTuple

import msgspec

from engine.approximate.kinds import approximation_of, compression_of
from engine.cache.block import Block, Entry
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.protocol import (
    ChainGone,
    ChainHeld,
    Event,
    EventFrame,
    Heartbeat,
    HeldName,
    LeaseEnded,
    Snapshot,
    Tier,
)
from engine.protocol.reports import BlockCell, BlockStats, EntryInfo, Holding

REPLAY_EVENTS = 65_536
MAX_BEHIND = 8_192
HEARTBEAT_SECONDS = 5.0


class _HeldPlace(NamedTuple):
    """Where a name is held."""

    tier: Tier
    # The tokens of its prefix.
    tokens: int
    is_leased: bool


class EventLog:
    def __init__(self, epoch: str) -> None:
        self.epoch = epoch
        self.last_seq = 0
        self._replay: deque[Event] = deque(maxlen=REPLAY_EVENTS)
        self._subscribers: set[asyncio.Queue[Event | None]] = set()
        self._is_closed = False
        self._places: dict[str, _HeldPlace] = {}

    def held(self, names: Sequence[str]) -> list[ChainHeld]:
        """The held names, according to events and snapshots. Each is a chain of its own."""
        chains = []
        for name in names:
            place = self._places.get(name)
            if place is not None:
                chain = [HeldName(name, place.tokens)]
                num_leased = int(place.is_leased)
                chains.append(ChainHeld(seq=0, names=chain, tier=place.tier, num_leased=num_leased))
        return chains

    def _note(self, event: Event) -> None:
        match event:
            case ChainHeld():
                for index, name in enumerate(event.names):
                    before = self._places.get(name.digest)
                    was_leased = before is not None and before.is_leased
                    is_leased = was_leased or index < event.num_leased
                    self._places[name.digest] = _HeldPlace(event.tier, name.tokens, is_leased)
            case ChainGone():
                for digest in event.names:
                    self._places.pop(digest, None)
            case LeaseEnded():
                for digest in event.names:
                    place = self._places.get(digest)
                    if place is not None:
                        self._places[digest] = place._replace(is_leased=False)

    def publish(self, events: Sequence[Event]) -> None:
        for event in events:
            self._note(event)
            self.last_seq += 1
            numbered = msgspec.structs.replace(event, seq=self.last_seq)
            self._replay.append(numbered)
            for subscriber in list(self._subscribers):
                if subscriber.qsize() >= MAX_BEHIND - 1:
                    self._end(subscriber)
                else:
                    subscriber.put_nowait(numbered)

    def close(self) -> None:
        """End all subscribers, after the events that were published before."""
        self._is_closed = True
        while self._subscribers:
            self._end(next(iter(self._subscribers)))

    async def subscribe(
        self, epoch: str | None, after: int | None, snapshot: Callable[[], Awaitable[Snapshot]]
    ) -> AsyncIterator[EventFrame]:
        """Yield the missed events (or a snapshot), then new ones.

        The stream ends when the log closes or the subscriber is too slow.
        """
        if self._is_closed:
            return
        queue: asyncio.Queue[Event | None] = asyncio.Queue(maxsize=MAX_BEHIND)
        first = self._replay[0].seq if self._replay else self.last_seq + 1
        missed: list[Event] | None = None
        if epoch == self.epoch and after is not None and first - 1 <= after <= self.last_seq:
            missed = [event for event in self._replay if event.seq > after]
        self._subscribers.add(queue)
        try:
            if missed is None:
                base = await snapshot()
                if base.seq == self.last_seq:
                    for chain in base.chains:
                        self._note(chain)
                yield base
                last = base.seq
            else:
                for event in missed:
                    yield event
                last = self.last_seq if not missed else missed[-1].seq
            while True:
                try:
                    next_event = await asyncio.wait_for(queue.get(), HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield Heartbeat(seq=last)
                    continue
                if next_event is None:
                    return
                if next_event.seq > last:
                    last = next_event.seq
                    yield next_event
        finally:
            self._subscribers.discard(queue)

    def _end(self, subscriber: "asyncio.Queue[Event | None]") -> None:
        """Put the end mark into the subscriber's queue. `publish` left room for it."""
        self._subscribers.discard(subscriber)
        subscriber.put_nowait(None)


MAX_BLOCKS_A_STEP = 8192
"""The most blocks that are looked at between two steps; it takes some milliseconds."""
MAX_NAMES_A_STEP = 4096
"""The most names that are copied between two steps; it takes some milliseconds."""


def chains_held(cache: PrefixCache, now: Callable[[], float]) -> Iterator[list[ChainHeld]]:
    """What is held, block by block: the names of one block are one chain's.

    The caller takes each part between two steps. Changes after the first part may already be in the
    later parts, and come again as events. That is harmless: an event gives the state of its names.
    """
    part = list[ChainHeld]()
    num_names = 0
    num_blocks = 0
    for pool in cache.pools:
        for block in pool.blocks:
            num_blocks += 1
            if block.names:
                num_names += len(block.names)
                part.append(_chain_of(cache, block, now))
            if num_names >= MAX_NAMES_A_STEP or num_blocks >= MAX_BLOCKS_A_STEP:
                yield part
                part = []
                num_names = 0
                num_blocks = 0
    yield part


def _chain_of(cache: PrefixCache, block: Block, now: Callable[[], float]) -> ChainHeld:
    names = [HeldName(digest, tokens) for digest, tokens in block.names.items()]
    if cache.store is None or block.tier != "disk":
        num_leased = len(names) if block.is_promised else 0
        return ChainHeld(seq=0, names=names, tier=block.tier, num_leased=num_leased)
    # A block of the store is leased for as long as an entry that is leased there.
    expiries = (
        entry.expires_at
        for entry in cache.store.copies.of(block)
        if entry.is_leased and entry.lease_tier == "disk"
    )
    ends_at = max(expiries, default=None)
    return ChainHeld(
        seq=0,
        names=names,
        tier="disk",
        num_leased=0 if ends_at is None else len(names),
        lease_seconds=None if ends_at is None else ends_at - now(),
    )


def entry_infos(
    cache: PrefixCache,
    now: Callable[[], float],
    owners: Mapping[Block, Entry],
    scope: str | None = None,
    limit: int | None = None,
    after: str | None = None,
) -> list[EntryInfo]:
    """The live entries of one scope, or of all scopes. `owners` is what `owners_of` found.

    With `after` these are the entries whose ids (hexadecimal) follow it, in the order of their ids.
    Without it the largest come first. With a `limit` there are no more than so many.
    """
    num_own_blocks = Counter(owners.values())
    current = now()
    block_size = cache.pool.block_size
    infos = list[EntryInfo]()
    live = [entry for entry in cache.entries.live() if scope in (None, entry.scope)]
    if after is not None:
        behind = [entry for entry in live if entry.key.hex() > after]
        live = nsmallest(len(behind) if limit is None else limit, behind, key=_key_of)
    elif limit is not None:
        live = nlargest(limit, live, key=lambda entry: (entry.tokens, entry.key))
    for entry in live:
        deepest = entry.blocks[max(entry.tokens // block_size - 1, 0)]
        compression = compression_of(entry.kind, block_size)
        infos.append(
            EntryInfo(
                entry=entry.key.hex(),
                scope=entry.scope,
                tokens=entry.tokens + (compression.cut if compression is not None else 0),
                blocks=len(entry.blocks),
                ttl=entry.ttl,
                state=entry.state,
                expires_in_seconds=entry.expires_at - current,
                has_own_lifetime=entry.seconds is not None,
                reads=entry.reads,
                name=entry.name,
                reason=entry.why_unleased,
                tier=entry.blocks[0].tier,
                is_stored=entry.outlives_restarts,
                own_tokens=max(
                    entry.tokens - (len(entry.blocks) - num_own_blocks[entry]) * block_size, 0
                ),
                shared_by=deepest.ref_count - deepest.lease_count,
                approximate=approximation_of(entry.kind, compression),
            )
        )
    return infos


def _key_of(entry: Entry) -> bytes:
    return entry.key


MAX_HOLDINGS = 1000
"""The most entries that are reported one by one. A scope's other entries are counted together."""
Count = Counter[tuple[str | None, Entry | None, str]]


def owners_of(cache: PrefixCache, owners: dict[Block, Entry]) -> Iterator[int]:
    """Fill `owners` with the entry that each block counts for.

    That is the shortest leased entry on the block, else the shortest entry. The caller takes each
    part between two steps. Entries of one chain share its beginning. So each entry is walked from
    its end to the first block that has an owner, and the total is linear in the number of blocks.
    """
    entries = sorted(cache.entries.live(), key=lambda entry: (not entry.is_leased, entry.tokens))
    num_seen = 0
    for entry in entries:
        for block in reversed(entry.blocks):
            if block in owners:
                break
            owners[block] = entry
            num_seen += 1
        num_seen += 1
        if num_seen >= MAX_BLOCKS_A_STEP:
            yield num_seen
            num_seen = 0
    yield num_seen


class CellsPart(NamedTuple):
    cells: list[BlockCell]
    num_referenced: int
    unused_tokens: int
    # Blocks by scope, entry and state.
    holdings: Count


def cells_of(
    cache: PrefixCache, blocks_per_cell: int, owners: Mapping[Block, Entry]
) -> Iterator[CellsPart]:
    """The map of the device's pool, with the owners of its blocks.

    The caller takes each part between two steps. An entry in `owners` counts only if it is still
    live.
    """
    pool = cache.pool
    blocks = pool.blocks
    cells = max(MAX_BLOCKS_A_STEP // blocks_per_cell, 1)
    for first in range(0, len(blocks), cells * blocks_per_cell):
        looked_at = blocks[first : first + cells * blocks_per_cell]
        part = list[BlockCell]()
        holdings = Count()
        for start in range(0, len(looked_at), blocks_per_cell):
            of_cell = looked_at[start : start + blocks_per_cell]
            states = Counter[str]()
            for block in of_cell:
                entry = owners.get(block)
                if entry is not None and (entry.is_broken or not cache.entries.is_live(entry)):
                    entry = None
                state = state_of(block, entry)
                if block.ref_count:
                    states[state_of(block, None)] += 1
                elif block.dependents:
                    states["best_effort"] += 1
                else:
                    states["cached" if block.has_content else "free"] += 1
                if state != "free":
                    scope = entry.scope if entry else cache.scopes.get(block.owner)
                    holdings[scope, entry, state] += 1
            part.append(BlockCell(**states, shared=sum(block.ref_count > 1 for block in of_cell)))
        referenced = [block for block in looked_at if block.ref_count]
        unused = sum(pool.block_size - pool.num_tokens(block) for block in referenced)
        yield CellsPart(part, len(referenced), unused, holdings)


def state_of(block: Block, entry: Entry | None) -> str:
    """The field of `Holding` that counts the block, or `free`."""
    if block.ref_count > block.lease_count:
        return "active"
    if block.lease_count:
        return "leased"
    if entry is not None:
        return "lowered" if entry.is_leased else "best_effort"
    return "cached" if block.has_content else "free"


def entry_holdings(owners: Mapping[Block, Entry]) -> Count:
    """The blocks of live entries by the entries' own states. The blocks are another program's."""
    holdings = Count()
    for entry in owners.values():
        holdings[entry.scope, entry, entry.state] += 1
    return holdings


def holdings_of(counted: Count) -> list[Holding]:
    """The holdings by entry, the one with the most blocks first, then those without an entry."""
    sizes = Counter[Entry]()
    for (_, entry, _), count in counted.items():
        if entry is not None:
            sizes[entry] += count
    largest = dict.fromkeys(entry for entry, _ in sizes.most_common(MAX_HOLDINGS))
    by_entry = dict[tuple[str | None, Entry | None], Counter[str]]()
    for entry in largest:
        by_entry[entry.scope, entry] = Counter()
    for (scope, entry, state), count in counted.items():
        reported = entry if entry in largest else None
        by_entry.setdefault((scope, reported), Counter())[state] += count
    return [
        Holding(
            scope=scope,
            entry=entry.key.hex() if entry else None,
            name=entry.name if entry else None,
            tokens=entry.tokens if entry else 0,
            **states,
        )
        for (scope, entry), states in by_entry.items()
    ]


def pool_stats(pool: BlockPool) -> BlockStats:
    counts = pool.counts()
    return BlockStats(
        total=pool.num_blocks,
        free=counts.free,
        active=counts.active,
        leased=counts.leased,
        best_effort=counts.best_effort,
        cached=counts.cached,
        shared=counts.shared,
    )
