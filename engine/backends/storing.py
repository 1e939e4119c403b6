"""The composition of an engine's memory: pool, tiers, entries, and the store on disk if any."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from engine.approximate.kinds import Sibling
from engine.backends.base import Parts
from engine.cache.digests import ChainHasher
from engine.cache.entries import ARRIVAL_GRACE_SECONDS, Entries
from engine.cache.host_tier import HostTier
from engine.cache.ids import BlockId
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.cache.store_tier import StoreTier
from engine.cache.worth import Worths
from engine.clock import Clock
from engine.heap import collector_off
from engine.protocol.reports import Description, StoreRefusal, StoreStats
from engine.refusal import StartRefused
from engine.schedule.runner import Runner
from engine.settings import Settings
from engine.sizing import aligned
from engine.store.files import (
    BlockReader,
    StoreDirectory,
    StoreRefused,
    fingerprint,
    header_bytes,
    open_member,
)
from engine.store.journal import End, Restored, replay, restore
from engine.store.peers import Peers
from engine.store.store import DiskStore, StoreBounds, StoreThreads

MIN_BLOCKS = 8
MAX_BLOCKS = 262_144
"""The most blocks of a store. Each takes some 600 bytes of the engine's memory."""
PAGE_BYTES = 4096
COPY_BYTES_PER_STEP = 64 * 2**20
"""The most bytes that one step copies to the host, and the most that it copies back."""
STORE_BYTES_PER_SECOND = 64 * 2**20
"""The most bytes that are written to the store in a second."""

log = structlog.get_logger()


class StorePlan(NamedTuple):
    """A directory that this engine may use, and what its files are."""

    directory: StoreDirectory
    reader: BlockReader
    file_bytes: int
    num_blocks: int


def plan_store(
    settings: Settings, runner: Runner, facts: Mapping[str, str] | None, block_size: int
) -> StorePlan | None:
    """Take the directory that the settings name. None if they name no directory.

    Raises StoreRefused if it can't be used.
    """
    if not settings.store or facts is None:
        return None
    payload_bytes = len(runner.save([BlockId(0)])[0])
    file_bytes = aligned(header_bytes(block_size) + payload_bytes, PAGE_BYTES)
    num_blocks = min(settings.store_bytes // file_bytes, MAX_BLOCKS)
    if num_blocks < MIN_BLOCKS:
        message = f"ENGINE_STORE_BYTES is too small for {MIN_BLOCKS} blocks of {file_bytes} bytes"
        raise StoreRefused("too_small", message)
    model = fingerprint(facts)
    root = Path(settings.store)
    try:
        directory = open_member(root, model) if settings.store_shared else StoreDirectory(root)
    except OSError as error:
        raise StoreRefused("unusable", f"{settings.store}: {error.strerror}") from error
    return StorePlan(
        directory, BlockReader(model, payload_bytes, directory.keys), file_bytes, num_blocks
    )


@dataclass(frozen=True, slots=True)
class OpenStore:
    """A store at work, and its end."""

    disk: DiskStore
    threads: StoreThreads
    directory: StoreDirectory
    peers: Sequence[Peers] = ()

    def wake_by(self, wake: Callable[[], object]) -> None:
        self.threads.results.wake = wake
        for peers in self.peers:
            peers.results.wake = wake

    def close(self, seconds: float) -> None:
        """The engine's thread has ended."""
        self.wake_by(lambda: None)
        self.disk.close(seconds)
        self.directory.close()


class EngineMemory(NamedTuple):
    """The cache of one engine, and its store at work, or why it has none."""

    cache: PrefixCache
    store: OpenStore | None = None
    refused: StoreRefusal | None = None

    def store_stats(self) -> StoreStats | None:
        """None where the settings name no store."""
        if self.store is not None:
            return self.store.disk.stats()
        if self.refused is not None:
            return StoreStats(is_up=False, refused=self.refused)
        return None


class _Tiers(NamedTuple):
    """The cache, with what the store needs of its making."""

    cache: PrefixCache
    # The pools above the store.
    above: list[BlockPool]
    # The tiers for the content of other members. First comes the tier of this model's members, for
    # which the sibling is None, then the sibling's.
    others: list[tuple[Sibling | None, StoreTier]]


def new_memory(
    settings: Settings,
    parts: Parts,
    description: Description,
    clock: Clock,
    wall: Callable[[], float] = time.time,
) -> EngineMemory:
    """Compose pool, tiers and entries. An engine whose store can't be used runs without a store.

    `wall` gives the time in seconds since 1970, which goes on while no engine runs. Raises
    StartRefused if the engine's role needs the store.
    """
    plan: StorePlan | None = None
    refused: StoreRefusal | None = None
    try:
        plan = plan_store(settings, parts.runner, parts.facts, description.block_size)
    except StoreRefused as refusal:
        if settings.role != "both":
            raise StartRefused(f"ENGINE_ROLE={settings.role} needs the store: {refusal}") from None
        refused = refusal.reason
        log.warning("no store: the engine runs without", code=refused, reason=str(refusal))
    with collector_off():
        tiers = _new_tiers(settings, parts, description, plan)
    if plan is None:
        return EngineMemory(tiers.cache, refused=refused)
    return EngineMemory(tiers.cache, _open_store(plan, tiers, parts, clock, wall))


def _max_copies(parts: Parts) -> int:
    """The most blocks that one step copies to the host, and the most that it copies back."""
    return max(COPY_BYTES_PER_STEP // parts.block_bytes, 1)


def _new_tiers(
    settings: Settings, parts: Parts, description: Description, plan: StorePlan | None
) -> _Tiers:
    pool = BlockPool(description.num_blocks, description.block_size, worths=Worths())
    host = None
    if settings.host_blocks:
        host = HostTier(pool, settings.host_blocks, _max_copies(parts))
    above = [pool] if host is None else [pool, host.pool]
    key = plan.directory.keys.chain if plan is not None else os.urandom(32)
    hasher = ChainHasher(key, pool.block_size)

    tier: StoreTier | None = None
    others: list[tuple[Sibling | None, StoreTier]] = []
    if plan is not None:
        new_tier = partial(
            StoreTier, plan.num_blocks, pool.block_size, hasher, plan.directory.keys.name_of
        )
        tier = new_tier(lower_than=above)
        if settings.store_shared:
            models = (
                [None] if parts.approximate.sibling is None else [None, parts.approximate.sibling]
            )
            others = [(model, new_tier(lower_than=[*above, tier.pool])) for model in models]
    entries = Entries(
        pool,
        lease_share=settings.lease_share,
        grace_seconds=ARRIVAL_GRACE_SECONDS,
        host=host.pool if host is not None else None,
        store=tier,
    )
    peer_tiers = [peer_tier for _, peer_tier in others]
    cache = PrefixCache(pool, entries, hasher, host, tier, peer_tiers, parts.state_blocks)
    return _Tiers(cache, above, others)


def _open_store(
    plan: StorePlan, tiers: _Tiers, parts: Parts, clock: Clock, wall: Callable[[], float]
) -> OpenStore:
    """Take the journal's entries back, and start the threads."""
    cache = tiers.cache
    assert cache.store is not None
    threads = StoreThreads(plan.directory, plan.reader)
    restored = _restore(plan, cache, clock, wall)
    peers: list[Peers] = []
    for sibling, peer_tier in tiers.others:
        reader = plan.reader
        kind = None
        if sibling is not None:
            reader = reader._replace(model=sibling.model)
            kind = sibling.kind
        peers.append(
            Peers(
                plan.directory,
                reader,
                cache.hasher,
                peer_tier,
                cache.entries,
                tiers.above,
                clock,
                wall,
                kind,
            )
        )
    disk = DiskStore(
        cache.store,
        cache.entries,
        cache.pool,
        parts.runner.save,
        threads,
        StoreBounds(plan.file_bytes, STORE_BYTES_PER_SECOND, _max_copies(parts)),
        clock=clock,
        wall=wall,
        restored=restored,
        peers=peers,
    )
    threads.append([End(key=key) for key in restored.dead], {})
    threads.compact()
    return OpenStore(disk, threads, plan.directory, peers)


def _restore(
    plan: StorePlan, cache: PrefixCache, clock: Clock, wall: Callable[[], float]
) -> Restored:
    """Take in the entries that the journal tells of and whose files are whole."""
    reader = plan.reader
    lines: list[bytes] = []
    try:
        lines = plan.directory.journal_lines()
    except OSError as error:
        log.error("the store's journal can't be read", reason=error.strerror)
    journal = replay(lines, reader.model.hex(), reader.keys)
    restored = restore(
        journal,
        cache.entries.restore,
        lambda put: put.keys(cache.hasher, reader.keys),
        partial(reader.miss_of, plan.directory.path),
        clock.now(),
        wall(),
    )
    num_damaged = journal.damages["checksum"]
    if num_damaged:
        log.error(
            "the store's journal is damaged: what these lines told is lost",
            lines=num_damaged,
            lost_leases=restored.num_lost,
        )
    log.info(
        "store opened",
        blocks=plan.num_blocks,
        entries=restored.num_entries,
        leases=restored.num_leases,
        lost_leases=restored.num_lost,
        misses=restored.misses,
    )
    return restored
