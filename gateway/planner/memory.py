"""The memory of one simulated engine: the product's own pool, tiers, entries and leases."""

from dataclasses import dataclass

from engine.cache.digests import TOKEN_BYTES, ChainHasher
from engine.cache.entries import Entries
from engine.cache.host_tier import HostTier
from engine.cache.ids import Digest
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, CacheResult, Found, PrefixCache
from engine.cache.store_tier import StoreTier
from engine.cache.table import BlockTable
from engine.protocol import Event, LeaseEnded
from gateway.planner.simulated import Capacities, SimulatedRequest

SPARE_BLOCKS = 2
"""What a prompt must leave of the pool, as engines refuse it (`prepare/preparer.py`)."""


class UnitHasher(ChainHasher):
    """A prefix's digest is its last unit's id, since that stands for all before it too."""

    def root(self, scope: str) -> Digest:
        return Digest(scope.encode())

    def extend(self, parent: Digest, packed: bytes | bytearray | memoryview) -> Digest:
        return Digest(bytes(packed[-TOKEN_BYTES:]))

    def chain(self, root: Digest, packed: bytes) -> list[Digest]:
        stride = self._stride
        return [
            Digest(packed[end - TOKEN_BYTES : end])
            for end in range(stride, len(packed) + 1, stride)
        ]


@dataclass(frozen=True, slots=True)
class Copied:
    """Blocks that came back to the device."""

    host: int = 0
    disk: int = 0


class SimulatedMemory:
    def __init__(self, capacities: Capacities, unit_tokens: int, *, has_names: bool) -> None:
        """`has_names`: a gateway asks where a prefix is held."""
        self._has_names = has_names
        self._events: list[Event] = []
        block_tokens = unit_tokens * capacities.block_units
        self.block_tokens = block_tokens
        self.pool = BlockPool(max(capacities.device // block_tokens, 2), capacities.block_units)
        self._hasher = UnitHasher(b"simulation", capacities.block_units)
        host, store = self._tiers(capacities, block_tokens)
        self.entries = Entries(
            self.pool,
            lease_share=capacities.lease_share,
            scope_lease_share=capacities.scope_lease_share,
            ttl_scale=capacities.ttl_scale,
            grace_seconds=capacities.grace_seconds,
            host=host.pool if host is not None else None,
            store=store,
        )
        self.cache = PrefixCache(self.pool, self.entries, self._hasher, host, store)
        self._min_units = max(-(-capacities.min_cache_tokens // unit_tokens), 1)

    def _tiers(
        self, capacities: Capacities, block_tokens: int
    ) -> tuple[HostTier | None, StoreTier | None]:
        host = store = None
        above = [self.pool]
        if num_blocks := capacities.host // block_tokens:
            # Copies are not bounded: a step of the simulation may be a whole prompt.
            host = HostTier(self.pool, num_blocks, max_copies=num_blocks)
            above.append(host.pool)
        if num_blocks := capacities.disk // block_tokens:
            size = capacities.block_units
            store = StoreTier(num_blocks, size, self._hasher, _name_of, lower_than=above)
        return host, store

    def fits(self, query: CacheQuery) -> bool:
        """Whether engines take a prompt of this length at all."""
        room = max(self.pool.num_blocks - SPARE_BLOCKS, 1) * self.pool.block_size
        return len(query.tokens) <= room

    def query(self, request: SimulatedRequest, now: float) -> CacheQuery:
        """The prompt as the cache sees it. It is kept: other points of a plan ask the same."""
        made = request.query
        same = now, self._min_units, self._has_names
        if made is None or (made.arrived_at, made.min_tokens, bool(made.names)) != same:
            tokens = request.units + request.behind
            made = request.query = CacheQuery(
                scope=request.scope,
                tokens=tokens,
                digests=self.cache.digests(request.scope, tokens),
                segments=request.segments(),
                breakpoints=request.breakpoints(),
                names=request.names() if self._has_names else [],
                min_tokens=self._min_units,
                arrived_at=now,
            )
        return made

    def bring_back(self, query: CacheQuery, found: Found | None, table: BlockTable) -> Copied:
        """Copy to the device what a table waits for in lower tiers."""
        if self.cache.host is not None:
            self.cache.host.take_demotions()
        num_host = num_disk = 0
        store = self.cache.store
        while table.incoming:
            block = table.next_incoming
            if block.tier == "host":
                assert self.cache.host is not None
                self.cache.host.promote(table)
                num_host += 1
                continue
            assert store is not None
            if store.is_lost(block):
                self.cache.miss(query, found, table)
                continue
            store.ask(table.arriving(), is_first=True)
            for key in store.take_asked():
                store.arrived(key.name, b"")
            while table.incoming and store.promote(table) is not None:
                num_disk += 1
                if table.incoming and table.next_incoming.tier == "host":
                    break
        return Copied(num_host, num_disk)

    def write(self, query: CacheQuery, found: Found, table: BlockTable, now: float) -> CacheResult:
        """Write the entries of a prompt that is computed."""
        result = self.cache.write(query, found, table, now)
        if result.held is not None:
            self._events += [*self.pool.changes.take(), result.held]
        return result

    def take_events(self) -> tuple[list[Event], list[str]]:
        """What a gateway hears of a step, and why leases have ended since the last one."""
        self._step_of_tiers()
        events, self._events = self._events, []
        reasons: list[str] = []
        for lease in self.entries.leases.take_ended():
            reasons.append(lease.reason)
            key = lease.entry.key.hex()
            events.append(LeaseEnded(seq=0, entry=key, names=lease.names, reason=lease.reason))
        return events + self.pool.changes.take(), reasons

    def _step_of_tiers(self) -> None:
        """Make the copies, and write what the store wants."""
        host, store = self.cache.host, self.cache.store
        if host is not None:
            host.take_demotions()
        if store is not None:
            while saves := store.take_saves(len(store.pool.blocks)):
                for save in saves:
                    store.written(save.key.name, is_good=True)
            store.take_deletes()
            store.take_notes()


def _name_of(digest: bytes) -> str:
    return digest.hex()
